"""Baselines: popularity, item-kNN, a directional item-item model, and successors of the last item.

All are fitted on training events only. On the test split, their histories include the validation
event, as the model's do, but they are not fitted on it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from recsys.evaluation.protocol import Ranker
from recsys.interactions import Histories
from recsys.retrieval import ItemItem


@dataclass(frozen=True)
class Popularity:
    """The same list for all users: items by training events; ties by item.

    Attributes:
        counts: (items,) int64 training events.
    """

    counts: NDArray[np.int64]

    @classmethod
    def fit(cls, histories: Histories, num_items: int) -> Popularity:
        """Count the events of training histories."""
        return cls(np.bincount(histories.items, minlength=num_items))

    def rank(
        self, histories: Histories, k: int, exclude_seen: bool
    ) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        """First k of the list, without the history's items if `exclude_seen`.

        Returns:
            (n, k) int32 items, -1 after the last item with a training event, and their (n, k)
            float32 counts, -inf there.
        """
        histories = histories.left_out(exclude_seen)
        order = np.argsort(-self.counts, kind="stable")
        order = order[self.counts[order] > 0]
        longest = int(histories.lengths.max(initial=0))
        order = order[: k + longest]  # no user needs more
        free = np.ones((len(histories), len(order)), np.bool_)
        place = np.full(len(self.counts), len(order))
        place[order] = np.arange(len(order))
        row, column = histories.rows, place[histories.items]
        free[row[column < len(order)], column[column < len(order)]] = False
        first = np.argsort(~free, axis=1, kind="stable")[:, :k]
        there = np.take_along_axis(free, first, axis=1)
        items = np.full((len(histories), k), -1, np.int32)
        scores = np.full((len(histories), k), -np.inf, np.float32)
        items[:, : first.shape[1]] = np.where(there, order[first], -1)
        scores[:, : first.shape[1]] = np.where(there, self.counts[order[first]], -np.inf)
        return items, scores


def fit_baselines(histories: Histories, num_items: int) -> dict[str, Ranker]:
    """Fit all baselines on training histories; the keys are their names in reports."""
    return {
        "popularity": Popularity.fit(histories, num_items),
        "item-kNN": ItemItem.cosine(histories, num_items),
        "directional": ItemItem.directional(histories, num_items),
        "successors": _successors(histories, num_items),
    }


def _successors(histories: Histories, num_items: int) -> ItemItem:
    """How often each item came directly after the last item; earlier items only break ties."""
    return ItemItem.directional(
        histories, num_items, window=1, reverse=0.0, source_damping=0.0, decay=1e-4
    )
