"""What an own forward does between matrix products, in plain torch.

It is the twin of the Triton kernels in `recsys.models.layer_kernels`, which have the same functions
and take their place on a GPU. Values are rounded to the model's dtype where transformers does.

Shapes: T tokens of a pass, H query heads and G key/value heads of size D, P positions.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional


@dataclass(frozen=True)
class Heads:
    """How the rows of a merged query, key and value matrix are divided, and rotated.

    Attributes:
        queries: H.
        pairs: G, heads of keys, and of values.
        size: D.
        epsilon: of the norms.
        rotation: (P, D) cosines of the D / 2 angles of each position, then their sines.
    """

    queries: int
    pairs: int
    size: int
    epsilon: float
    rotation: torch.Tensor


Norms = tuple[torch.Tensor, torch.Tensor]
"""(D,) weights of the norms of queries and of keys."""


def norm(values: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """RMSNorm of the last axis (Zhang and Sennrich, 2019): computed in float32 for every dtype."""
    exact = values.float()
    scale = torch.rsqrt(exact.pow(2).mean(-1, keepdim=True) + epsilon)
    return weight * (exact * scale).to(values.dtype)


def add_norm(
    residual: torch.Tensor, added: torch.Tensor, weight: torch.Tensor, epsilon: float
) -> torch.Tensor:
    """Add `added` to the (T, n) `residual` in place; return the RMSNorm of the sum."""
    return norm(residual.add_(added), weight, epsilon)


def rotate_and_store(
    merged: torch.Tensor,
    positions: torch.Tensor,
    write: torch.Tensor,
    cache: torch.Tensor,
    heads: Heads,
    norms: Norms | None,
) -> torch.Tensor:
    """Rotate queries and keys by their positions (Su et al., 2021); store keys and values.

    Args:
        merged: (T, (H + 2G) D) queries, keys and values.
        positions: (B, S) int64, of T = B x S tokens.
        write: (T,) int64 slots of the flattened cache.
        cache: (2, B, slots, G, D) keys and values of a layer.
        heads: how `merged` is divided.
        norms: of heads before they are rotated, or None.

    Returns:
        (B, H, S, D) queries.
    """
    parts = merged.view(len(merged), -1, heads.size)
    queries, keys = parts[:, : heads.queries], parts[:, heads.queries : -heads.pairs]
    values = parts[:, -heads.pairs :]
    if norms is not None:
        queries, keys = (
            norm(part, weight, heads.epsilon)
            for part, weight in zip((queries, keys), norms, strict=True)
        )
    angles = heads.rotation.index_select(0, positions.flatten()).unsqueeze(1)
    flat = cache.flatten(1, 2)
    flat[0].index_copy_(0, write, _rotated(keys, angles))
    flat[1].index_copy_(0, write, values)
    batch, new = positions.shape
    rotated = _rotated(queries, angles).view(batch, new, heads.queries, heads.size)
    return rotated.transpose(1, 2).contiguous()


def silu_multiply(merged: torch.Tensor) -> torch.Tensor:
    """(T, n) `silu(gate) * up` of (T, 2n) merged gate and up (Shazeer, 2020)."""
    gate, up = merged.chunk(2, dim=-1)
    return functional.silu(gate) * up


def _rotated(values: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """(T, heads, D) `values`, rotated by (T, 1, D) cosines and sines."""
    cosine, sine = angles.chunk(2, dim=-1)
    first, second = values.chunk(2, dim=-1)
    return torch.cat([first * cosine - second * sine, second * cosine + first * sine], dim=-1)
