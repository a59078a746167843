"""One constrained step: scores x log-probs x trie -> the best children.

Beam search, drafting and verification share it, so all agree on what a step means. Candidates are
kept in row order (ascending states), which makes "ties go to the lower row" a stable selection.

Shapes: B requests, W beams, C children a beam at most, V vocabulary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple

import torch

if TYPE_CHECKING:
    from recsys.constraint.transitions import DeviceTrie

Normalize = Literal["vocabulary", "allowed"]


class Frontier(NamedTuple):
    """Live beams of each request at one depth, ascending by state.

    Attributes:
        states: (B, W) int64 trie states.
        scores: (B, W) sum of log-probabilities; -inf for a beam that does not exist.
        tokens: (B, W) int64 last token.
        parents: (B, W) int64 place of the parent in the previous frontier.
    """

    states: torch.Tensor
    scores: torch.Tensor
    tokens: torch.Tensor
    parents: torch.Tensor

    @classmethod
    def root(cls, batch: int, dtype: torch.dtype, device: torch.device) -> Frontier:
        """One beam a request, at the root, with score 0."""
        zeros = torch.zeros((batch, 1), dtype=torch.int64, device=device)
        return cls(zeros, torch.zeros((batch, 1), dtype=dtype, device=device), zeros, zeros)


def expand(
    frontier: Frontier,
    logits: torch.Tensor,
    trie: DeviceTrie,
    depth: int,
    width: int,
    *,
    excluded: torch.Tensor | None = None,
    normalize: Normalize = "vocabulary",
) -> Frontier:
    """The `width` best children of a frontier.

    Args:
        frontier: beams at `depth`.
        logits: (B, W, V) at the beams' last tokens.
        trie: the constraint.
        depth: depth of the frontier, 0 for the root.
        width: children to keep; fewer may be alive, the rest then has score -inf.
        excluded: rows that may not be reached (`DeviceTrie.pad_excluded`).
        normalize: log-probabilities over the whole vocabulary, or over the allowed tokens alone.
    """
    children = trie.children(frontier.states, depth, excluded)
    chosen = logits.gather(-1, children.tokens).to(frontier.scores.dtype)  # (B, W, C)
    chosen = chosen.masked_fill(~children.alive, -torch.inf)
    if normalize == "vocabulary":
        total = logits.to(frontier.scores.dtype).logsumexp(-1, keepdim=True)
    else:
        # a dead beam has nothing allowed: keep its total finite, or -inf - -inf would be NaN
        total = chosen.logsumexp(-1, keepdim=True).clamp(min=torch.finfo(chosen.dtype).min)
    scores = (frontier.scores.unsqueeze(-1) + (chosen - total)).flatten(1)  # (B, W * C)
    best = stable_top(scores, width)  # ascending places, so ascending states
    return Frontier(
        children.states.flatten(1).gather(1, best),
        scores.gather(1, best),
        children.tokens.flatten(1).gather(1, best),
        best // children.states.shape[-1],
    )


def stable_top(values: torch.Tensor, count: int) -> torch.Tensor:
    """(B, count) places of the largest values, ascending; equal values favour lower places.

    `torch.topk` leaves the choice among equals open. Two of them and a running count settle it:
    everything above the count-th value, then the first of those equal to it.
    """
    threshold = values.topk(count, dim=-1).values[:, -1:]
    above, equal = values > threshold, values == threshold
    room = count - above.sum(-1, keepdim=True)
    taken = above | (equal & (equal.cumsum(-1) <= room))
    place = torch.arange(values.shape[-1], device=values.device)
    return torch.where(taken, place, values.shape[-1]).topk(count, largest=False).values


def best_first(frontier: Frontier) -> torch.Tensor:
    """(B, W) places by falling score; equal scores keep row order."""
    return frontier.scores.sort(dim=-1, descending=True, stable=True).indices
