"""Attention masks by position, as additive floats: 0 or -inf.

Every query attends at least to itself, so no row of the softmax is empty and none becomes NaN.
"""

from __future__ import annotations

import torch


def prompt_mask(
    positions: torch.Tensor, slots: int, *, window: int | None, dtype: torch.dtype
) -> torch.Tensor:
    """(B, 1, S, slots) causal mask of prompt tokens; node slots come after them and are masked.

    (B, S) `positions` are positions, which are the slots of the tokens. A token attends to `window`
    positions, its own included; None for all before it.
    """
    distance = positions.unsqueeze(-1) - torch.arange(slots, device=positions.device)
    seen = distance >= 0
    if window is not None:
        seen &= distance < window
    return additive(seen, dtype)[:, None]


def tree_mask(
    ancestors: torch.Tensor,
    lengths: torch.Tensor,
    prompt: int,
    *,
    depth: torch.Tensor,
    node_depth: torch.Tensor,
    window: int | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    """(B, 1, W, prompt + nodes) mask of tree nodes over the prompt's slots and the tree's.

    Args:
        ancestors: (B, W, nodes) bool, whether each node in view is the query or an ancestor of it.
        lengths: (B,) prompt tokens of each request.
        prompt: prompt slots.
        depth: (B, W) depth of the queries, 1 for the first generated token.
        node_depth: (B, nodes) depth of the nodes in view.
        window: positions that a token attends to, including its own; None for all before it.
        dtype: dtype of the mask.
    """
    batch, width, _ = ancestors.shape
    slot = torch.arange(prompt, device=lengths.device)
    in_prompt = (slot < lengths[:, None])[:, None, :].expand(batch, width, prompt)
    if window is not None:
        position = (lengths[:, None] + depth - 1).unsqueeze(-1)
        in_prompt = in_prompt & (position - slot < window)
        ancestors = ancestors & (depth[:, :, None] - node_depth[:, None, :] < window)
    return additive(torch.cat([in_prompt, ancestors], dim=-1), dtype)[:, None]


def additive(seen: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """0 where `seen`, -inf elsewhere."""
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, -torch.inf)
