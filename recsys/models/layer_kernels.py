"""The functions of `recsys.models.layers` as Triton kernels, one launch each.

No kernel depends on values for its shape, and none synchronises, so a pass can be captured. What
differs between passes is no constant of the compiled code, so another shape compiles nothing. Sums
are float32. This module imports triton; see `recsys.kernels`.
"""

# The arguments of kernels have no Python types:
# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# ruff: noqa: ANN001, ANN201
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from recsys.kernels import launch
from recsys.models.layers import Heads, Norms

_HEADS = 8  # that one program rotates
_MULTIPLIED = 1024  # values that one program multiplies


def try_out(device: torch.device) -> None:
    """Launch a kernel; an error where triton cannot compile."""
    silu_multiply(torch.ones((1, 2), device=device))


def norm(values: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """As `layers.norm`, of contiguous (T, n) values."""
    return _norm(values, values, weight, epsilon, added=False)


def add_norm(
    residual: torch.Tensor, added: torch.Tensor, weight: torch.Tensor, epsilon: float
) -> torch.Tensor:
    """As `layers.add_norm`."""
    return _norm(residual, added.contiguous(), weight, epsilon, added=True)


def _norm(
    residual: torch.Tensor,
    values: torch.Tensor,
    weight: torch.Tensor,
    epsilon: float,
    *,
    added: Any,
) -> torch.Tensor:
    result, size = torch.empty_like(residual), residual.shape[1]
    block = triton.next_power_of_2(size)
    launch(
        norm_rows,
        (len(residual),),
        *(result, residual, values, weight, size, epsilon),
        ADDED=added,
        BLOCK=block,
        num_warps=min(16, max(1, block // 512)),
    )
    return result


def rotate_and_store(
    merged: torch.Tensor,
    positions: torch.Tensor,
    write: torch.Tensor,
    cache: torch.Tensor,
    heads: Heads,
    norms: Norms | None,
) -> torch.Tensor:
    """As `layers.rotate_and_store`."""
    batch, new = positions.shape
    queries = merged.new_empty((batch, heads.queries, new, heads.size))
    head_count = heads.queries + 2 * heads.pairs
    launch(
        rotate_heads,
        (len(merged), triton.cdiv(head_count, _HEADS)),
        *(queries, cache, merged, positions.contiguous(), write, heads.rotation),
        *((heads.rotation, heads.rotation) if norms is None else norms),
        *(new, cache.stride(0), heads.queries, heads.pairs, heads.size // 2, heads.epsilon),
        NORMED=norms is not None,
        HEADS=_HEADS,
        HALF=triton.next_power_of_2(heads.size // 2),
        num_warps=4,
    )
    return queries


def silu_multiply(merged: torch.Tensor) -> torch.Tensor:
    """As `layers.silu_multiply`."""
    size = merged.shape[1] // 2
    result = merged.new_empty((len(merged), size))
    grid = (len(merged), triton.cdiv(size, _MULTIPLIED))
    launch(multiply_gates, grid, result, merged, size, BLOCK=_MULTIPLIED, num_warps=4)
    return result


@triton.jit(do_not_specialize=["size", "epsilon"])
def norm_rows(
    result, residual, values, weight, size, epsilon, ADDED: tl.constexpr, BLOCK: tl.constexpr
):
    """Program t: the norm of row t, to whose residual `values` are added first if ADDED."""
    row = tl.program_id(0).to(tl.int64) * size
    offsets = tl.arange(0, BLOCK)
    inside = offsets < size
    exact = tl.load(residual + row + offsets, mask=inside, other=0.0).to(tl.float32)
    if ADDED:
        exact += tl.load(values + row + offsets, mask=inside, other=0.0).to(tl.float32)
        rounded = exact.to(residual.dtype.element_ty)
        tl.store(residual + row + offsets, rounded, mask=inside)
        exact = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(exact * exact, 0) / size + epsilon)
    normed = (exact * scale).to(result.dtype.element_ty).to(tl.float32)
    factor = tl.load(weight + offsets, mask=inside, other=0.0).to(tl.float32)
    tl.store(result + row + offsets, (normed * factor).to(result.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["new", "values_from", "queries", "pairs", "half", "epsilon"])
def rotate_heads(
    rotated,
    cache,
    merged,
    positions,
    write,
    rotation,
    query_weight,
    key_weight,
    new,
    values_from,
    queries,
    pairs,
    half,
    epsilon,
    NORMED: tl.constexpr,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
):
    """Program (t, i): block i of the heads of token t, as two (HEADS, HALF) halves.

    Values are moved as they are. `half` is D / 2, `values_from` where the cache's values begin.
    """
    token = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * HEADS + tl.arange(0, HEADS))[:, None]
    offsets = tl.arange(0, HALF)[None, :]
    size = 2 * half
    inside = (head < queries + 2 * pairs) & (offsets < half)
    kind = rotated.dtype.element_ty
    source = merged + token * (queries + 2 * pairs) * size + head * size + offsets
    plain_first = tl.load(source, mask=inside, other=0.0)
    plain_second = tl.load(source + half, mask=inside, other=0.0)
    first, second = plain_first.to(tl.float32), plain_second.to(tl.float32)
    is_query = head < queries
    is_key = (head >= queries) & (head < queries + pairs)
    if NORMED:
        squares = tl.sum(first * first + second * second, 1)[:, None]
        scale = tl.rsqrt(squares / size + epsilon)
        used = inside & is_query
        weight = tl.load(query_weight + offsets + head * 0, mask=used, other=0.0)
        weight += tl.load(key_weight + offsets + head * 0, mask=inside & is_key, other=0.0)
        normed = (first * scale).to(kind).to(tl.float32) * weight.to(tl.float32)
        first = normed.to(kind).to(tl.float32)
        weight = tl.load(query_weight + half + offsets + head * 0, mask=used, other=0.0)
        weight += tl.load(key_weight + half + offsets + head * 0, mask=inside & is_key, other=0.0)
        normed = (second * scale).to(kind).to(tl.float32) * weight.to(tl.float32)
        second = normed.to(kind).to(tl.float32)
    angle = rotation + tl.load(positions + token) * size + offsets
    cosine = tl.load(angle, mask=offsets < half, other=0.0).to(tl.float32)
    sine = tl.load(angle + half, mask=offsets < half, other=0.0).to(tl.float32)
    # As in torch, products are rounded to the model's dtype before they are added.
    low = (first * cosine).to(kind).to(tl.float32) - (second * sine).to(kind).to(tl.float32)
    high = (second * cosine).to(kind).to(tl.float32) + (first * sine).to(kind).to(tl.float32)
    low, high = low.to(kind), high.to(kind)
    batch, step = token // new, token % new
    to = rotated + ((batch * queries + head) * new + step) * size + offsets
    tl.store(to, low, mask=inside & is_query)
    tl.store(to + half, high, mask=inside & is_query)
    slot = tl.load(write + token)
    to = cache + (slot * pairs + head - queries) * size + offsets
    tl.store(to, low, mask=inside & is_key)
    tl.store(to + half, high, mask=inside & is_key)
    to += values_from - pairs * size
    is_value = head >= queries + pairs
    tl.store(to, plain_first, mask=inside & is_value)
    tl.store(to + half, plain_second, mask=inside & is_value)


@triton.jit(do_not_specialize=["size"])
def multiply_gates(result, merged, size, BLOCK: tl.constexpr):
    """Program (t, i): block i of row t."""
    row = tl.program_id(0).to(tl.int64)
    offsets = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < size
    kind = result.dtype.element_ty
    gate = tl.load(merged + 2 * row * size + offsets, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(merged + (2 * row + 1) * size + offsets, mask=inside, other=0.0).to(tl.float32)
    silu = (gate / (1.0 + tl.exp(-gate))).to(kind).to(tl.float32)
    tl.store(result + row * size + offsets, (silu * up).to(kind), mask=inside)
