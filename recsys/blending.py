"""Blended lists: the model's beams and retrieval's candidates, ranked by both at once.

    score(item) = log p_model(item) + boosts + weight * log p_retrieval(item)

over the union of the beams and of the candidates that the model has scored along (DESIGN 4.12).
Arrays in, arrays out: nothing here searches, or knows a model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from recsys.constraint import ItemTrie
    from recsys.constraint.boost import Boost
    from recsys.constraint.mask import RowMask
    from recsys.interactions import Histories
    from recsys.retrieval import Candidates, Retrieval

MODEL, RETRIEVAL, POPULAR = 0, 1, 2


@dataclass(frozen=True)
class Lists:
    """Items of n requests, best first.

    Attributes:
        items: (n, k) int32, -1 where there are no more.
        scores: (n, k) float32, -inf there.
        source: (n, k) int8, which of `MODEL`, `RETRIEVAL`, `POPULAR` proposed each.
    """

    items: NDArray[np.int32]
    scores: NDArray[np.float32]
    source: NDArray[np.int8]

    @classmethod
    def of_model(cls, items: NDArray[np.int32], scores: NDArray[np.float32]) -> Lists:
        """What the model has found."""
        return cls(items, scores, np.full(items.shape, MODEL, np.int8))

    def first(self, k: int) -> Lists:
        """The first k places."""
        return Lists(self.items[:, :k], self.scores[:, :k], self.source[:, :k])


def allowed_items(
    trie: ItemTrie, alive: NDArray[np.bool_], mask: RowMask | None, size: int
) -> NDArray[np.bool_] | None:
    """(size,) which of a catalogue's first items a request may get; None for all of them.

    Args:
        trie: the catalogue as it is now.
        alive: (items,) which can be recommended.
        mask: what the request may get, in the trie's order; None for everything.
        size: items that retrieval knows.
    """
    if mask is None:
        return None if alive[:size].all() else alive[:size]
    allowed = np.zeros(len(alive), np.bool_)
    allowed[trie.row_items] = mask.items
    return (allowed & alive)[:size]


def candidate_rows(trie: ItemTrie, candidates: Candidates) -> list[NDArray[np.int32]]:
    """Trie rows of each request's candidates, in their order."""
    return [trie.item_row[items[items >= 0]] for items in candidates.items]


def blended(
    model: Lists,
    candidates: Candidates,
    candidate_scores: NDArray[np.floating],
    retrieval: Retrieval,
    histories: Histories,
    weight: float,
    k: int,
    *,
    trie: ItemTrie,
    boosts: Sequence[Boost | None],
) -> Lists:
    """The best k of both.

    Args:
        model: what the search has found, boosts included.
        candidates: what retrieval proposes.
        candidate_scores: (n, c) the model's log-probabilities of the candidates; -inf for those
            that it was not asked about, which are left out.
        retrieval: gives log p_retrieval.
        histories: that all of it is about.
        weight: of log p_retrieval.
        k: items wanted.
        trie: the catalogue, for the boosts.
        boosts: what each request's items gain.
    """
    width = candidate_scores.shape[1]
    proposed = candidates.items[:, :width]
    scores = candidate_scores.astype(np.float64)
    for i, boost in enumerate(boosts):
        if boost is not None:
            real = np.flatnonzero(proposed[i] >= 0)
            scores[i, real] += boost.items[_places(trie, proposed[i, real])]
    again = (proposed[:, :, None] == model.items[:, None, :]).any(-1)
    scores[again | (proposed < 0)] = -np.inf
    items = np.concatenate([model.items, proposed], axis=1)
    source = np.where(candidates.supported[:, :width], RETRIEVAL, POPULAR)
    source = np.concatenate([model.source, source], axis=1)
    scores = np.concatenate([model.scores.astype(np.float64), scores], axis=1)
    scores += weight * retrieval.log_prob(histories, items)
    order = np.argsort(-scores, axis=1, kind="stable")[:, :k]
    items, scores, source = (
        np.take_along_axis(array, order, axis=1) for array in (items, scores, source)
    )
    items = np.where(np.isfinite(scores), items, -1)
    return Lists(items.astype(np.int32), scores.astype(np.float32), source.astype(np.int8))


def _places(trie: ItemTrie, items: NDArray[np.int32]) -> NDArray[np.intp]:
    """Place of each item in `trie.row_items`."""
    which, places = trie.places_of(trie.item_row[items])
    found: NDArray[np.intp] = places[trie.row_items[places] == items[which]]
    return found
