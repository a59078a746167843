"""Blended lists: the model's beams and retrieval's candidates, ranked together by the reranker.

This module works on arrays; it runs no search and no model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from recsys.constraint import ItemTrie
from recsys.constraint.boost import Boost
from recsys.constraint.mask import RowMask
from recsys.interactions import Histories
from recsys.retrieval import Candidates, Reranker, Retrieval
from recsys.retrieval.reranker import MODEL as MODEL_SOURCE
from recsys.retrieval.reranker import SOURCES

MODEL, RETRIEVAL, POPULAR = 0, 1, 2


@dataclass(frozen=True)
class Lists:
    """Items of n requests, best first.

    Attributes:
        items: (n, k) int32, -1 where there are no more.
        scores: (n, k) float32, -inf there.
        source: (n, k) int8, what proposed each: `MODEL`, `RETRIEVAL` or `POPULAR`.
    """

    items: NDArray[np.int32]
    scores: NDArray[np.float32]
    source: NDArray[np.int8]

    @classmethod
    def of_model(cls, items: NDArray[np.int32], scores: NDArray[np.float32]) -> Lists:
        """Lists of the model's own items."""
        return cls(items, scores, np.full(items.shape, MODEL, np.int8))

    def first(self, k: int) -> Lists:
        """The first k places."""
        return Lists(self.items[:, :k], self.scores[:, :k], self.source[:, :k])


def allowed_items(
    trie: ItemTrie, alive: NDArray[np.bool_], mask: RowMask | None, size: int
) -> NDArray[np.bool_] | None:
    """(size,) bool, which of the catalog's first items a request may get; None for all.

    Args:
        trie: the catalog as it is now.
        alive: (items,) bool, which can be recommended.
        mask: the items that the request may get, in the trie's order; None for all.
        size: number of items that retrieval knows.
    """
    if mask is None:
        return None if alive[:size].all() else alive[:size]
    allowed = np.zeros(len(alive), np.bool_)
    allowed[trie.row_items] = mask.items
    return (allowed & alive)[:size]


def candidate_rows(trie: ItemTrie, candidates: Candidates) -> list[NDArray[np.int32]]:
    """Trie rows of each request's candidates, in their order."""
    return [trie.item_row[items[items >= 0]] for items in candidates.items]


@dataclass(frozen=True)
class Union:
    """The items of the model's beams and of retrieval, with what each source says about them.

    Attributes:
        items: (n, w) int32, -1 for padding and repeated items.
        values: source -> (n, w), for `Reranker.score`.
        gains: (n, w) float64 of the requests' boosts.
        source: (n, w) int8, as in `Lists`.
    """

    items: NDArray[np.int32]
    values: dict[str, NDArray[np.float64]]
    gains: NDArray[np.float64]
    source: NDArray[np.int8]

    @classmethod
    def of(
        cls,
        model: Lists,
        candidates: Candidates,
        candidate_scores: NDArray[np.floating[Any]],
        retrieval: Retrieval,
        histories: Histories,
        *,
        trie: ItemTrie,
        boosts: Sequence[Boost | None] = (),
        sources: Sequence[str] = SOURCES,
    ) -> Union:
        """Put both together.

        Args:
            model: items that the search found, with log-probabilities without boosts.
            candidates: items that retrieval proposes.
            candidate_scores: (n, c) the model's log-probabilities of the first c candidates; -inf
                for those that were not scored.
            retrieval: knows about all items.
            histories: the n histories.
            trie: the catalog, for the boosts.
            boosts: what each request's items gain; empty for nothing.
            sources: what is asked about the items.
        """
        proposed = candidates.items
        again = (proposed[:, :, None] == model.items[:, None, :]).any(-1)
        items = np.concatenate([model.items, np.where(again, -1, proposed)], axis=1)
        missing = proposed.shape[1] - candidate_scores.shape[1]
        scored = np.pad(candidate_scores, ((0, 0), (0, missing)), constant_values=-np.inf)
        log_probs = np.concatenate([model.scores, scored], axis=1).astype(np.float64)
        values = retrieval.values(histories, candidates.shares, items, sources)
        values[MODEL_SOURCE] = np.where(log_probs > -np.inf, log_probs, np.nan)
        source = np.concatenate(
            [model.source, np.where(candidates.supported, RETRIEVAL, POPULAR)], axis=1
        )
        gains = np.zeros(items.shape)
        for i, boost in enumerate(boosts):
            if boost is not None:
                real = np.flatnonzero(items[i] >= 0)
                gains[i, real] = boost.items[trie.item_places(items[i, real])]
        return cls(items, values, gains, source.astype(np.int8))

    def best(self, reranker: Reranker, k: int) -> Lists:
        """The k best items; ties keep the model's order, with the model's items first."""
        scores = reranker.score(self.values, self.items >= 0) + self.gains
        order = np.argsort(-scores, axis=1, kind="stable")[:, :k]
        items = np.take_along_axis(self.items, order, axis=1)
        source = np.take_along_axis(self.source, order, axis=1)
        scores = np.take_along_axis(scores, order, axis=1)
        missing = ((0, 0), (0, k - items.shape[1]))
        return Lists(
            np.pad(np.where(scores > -np.inf, items, -1), missing, constant_values=-1),
            np.pad(scores, missing, constant_values=-np.inf).astype(np.float32),
            np.pad(source, missing),
        )
