"""One constrained step: scores x log-probs x trie -> the best children.

Beam search, drafting and verification share it, so all agree on what a step means. Candidates are
kept in row order (ascending states), which makes "ties go to the lower row" a stable selection.

Shapes: B requests, W beams, C children a beam at most, V vocabulary, A tokens of the trie.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple

import torch

if TYPE_CHECKING:
    from recsys.constraint.transitions import Children, DeviceTrie

Normalize = Literal["vocabulary", "allowed"]


class TokenLogits(NamedTuple):
    """What a step needs of a model's logits: the trie's own tokens, and the total over all.

    Attributes:
        logits: (B, W, A) of the trie's alphabet.
        total: (B, W) logsumexp over the whole vocabulary.
    """

    logits: torch.Tensor
    total: torch.Tensor

    @classmethod
    def of(cls, logits: torch.Tensor, trie: DeviceTrie) -> TokenLogits:
        """Cut (B, W, V) logits down to the alphabet."""
        return cls(logits.index_select(-1, trie.alphabet), logits.logsumexp(-1))

    def at(self, places: torch.Tensor) -> TokenLogits:
        """The (B, w) entries at `places` of each request."""
        wide = places.unsqueeze(-1).expand(-1, -1, self.logits.shape[-1])
        return TokenLogits(self.logits.gather(1, wide), self.total.gather(1, places))


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

    def padded(self, width: int) -> Frontier:
        """The frontier with dead beams behind it, `width` in all."""
        missing = width - self.scores.shape[1]
        if missing <= 0:
            return self
        pad = torch.nn.functional.pad
        return Frontier(
            pad(self.states, (0, missing)),
            pad(self.scores, (0, missing), value=-torch.inf),
            pad(self.tokens, (0, missing)),
            pad(self.parents, (0, missing)),
        )


def expand(
    frontier: Frontier,
    logits: TokenLogits,
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
        logits: at the beams' last tokens.
        trie: the constraint.
        depth: depth of the frontier, 0 for the root.
        width: children to keep; fewer may be alive or exist, the rest then has score -inf.
        excluded: rows that may not be reached (`DeviceTrie.pad_excluded`).
        normalize: log-probabilities over the whole vocabulary, or over the allowed tokens alone.
    """
    children = trie.children(frontier.states, depth, excluded)
    scores = child_scores(frontier.scores, logits, children, normalize).flatten(1)  # (B, W * C)
    best = stable_top(scores, min(width, scores.shape[1]))  # ascending places, ascending states
    found = Frontier(
        children.states.flatten(1).gather(1, best),
        scores.gather(1, best),
        trie.alphabet[children.symbols.flatten(1).gather(1, best)],
        best // children.states.shape[-1],
    )
    return found.padded(width)


def child_scores(
    scores: torch.Tensor, logits: TokenLogits, children: Children, normalize: Normalize
) -> torch.Tensor:
    """(B, W, C) scores of all children of (B, W) beams; -inf for those that are not alive."""
    chosen = logits.logits.gather(-1, children.symbols).masked_fill(~children.alive, -torch.inf)
    if normalize == "vocabulary":
        total = logits.total.unsqueeze(-1)
    else:
        # a dead beam has nothing allowed: keep its total finite, or -inf - -inf would be NaN
        total = chosen.logsumexp(-1, keepdim=True).clamp(min=torch.finfo(chosen.dtype).min)
    return scores.unsqueeze(-1) + (chosen - total)


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
