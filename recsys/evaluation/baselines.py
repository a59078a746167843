"""Baselines: item-item models, and trivial heuristics that a benchmark should not be solved by.

All are fitted on training events only. On the test split, their histories include the validation
event, as the model's do, but they are not fitted on it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import sparse

from recsys.evaluation.protocol import Ranker
from recsys.interactions import Histories
from recsys.retrieval import ItemItem, PairRules, decayed_counts
from recsys.retrieval.popularity import DAY, RECENT_SHARE

POPULARITY, RECENT, REPEATS = "popularity", "recent popularity", "repeats"
PAIR_RULES = "pair rules"
SUCCESSORS = PairRules(window=1, reverse=0.0, source_damping=0.0, decay=1e-4)
"""How often each item came directly after the last item; earlier items only break ties."""
SHRINK = 10.0  # of similarities that are based on few users
ITEMS_AT_A_TIME = 1 << 15  # bounds the memory of pairs in float64
MOST_HIDDEN = 1 << 23  # pairs of a user and an unavailable item at once


@dataclass(frozen=True)
class Popularity:
    """The same list for all users: items by training events; ties by item.

    Attributes:
        counts: (items,) training events, possibly decayed.
    """

    counts: NDArray[np.integer | np.floating]

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
        column_of = np.full(len(self.counts), len(order))
        column_of[order] = np.arange(len(order))
        row, column = histories.rows, column_of[histories.items]
        free[row[column < len(order)], column[column < len(order)]] = False
        first = np.argsort(~free, axis=1, kind="stable")[:, :k]
        there = np.take_along_axis(free, first, axis=1)
        items = np.full((len(histories), k), -1, np.int32)
        scores = np.full((len(histories), k), -np.inf, np.float32)
        items[:, : first.shape[1]] = np.where(there, order[first], -1)
        scores[:, : first.shape[1]] = np.where(there, self.counts[order[first]], -np.inf)
        return items, scores


@dataclass(frozen=True)
class Repeats:
    """The items of the history itself, the latest first."""

    def rank(
        self, histories: Histories, k: int, exclude_seen: bool
    ) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        """First k distinct items from the end of each history that a list may contain.

        Returns:
            (n, k) int32 items, padded with -1, and their (n, k) float32 scores: 1, 1/2, 1/3, and so
            on, -inf after the last item.
        """
        left_out = histories.left_out(exclude_seen)
        size = 1 + max(int(part.items.max(initial=0)) for part in (histories, left_out))
        backwards = np.arange(len(histories.items))[::-1]
        pairs = histories.rows[backwards] * size + histories.items[backwards]
        pairs = pairs[np.sort(np.unique(pairs, return_index=True)[1])]  # the latest of each item
        pairs = pairs[~np.isin(pairs, left_out.rows * size + left_out.items)]
        row, item = np.divmod(pairs[np.argsort(pairs // size, kind="stable")], size)
        rank = np.arange(len(row)) - np.searchsorted(row, row)
        row, item, rank = (part[rank < k] for part in (row, item, rank))
        items = np.full((len(histories), k), -1, np.int32)
        scores = np.full((len(histories), k), -np.inf, np.float32)
        items[row, rank], scores[row, rank] = item, 1 / (1 + rank)
        return items, scores


@dataclass(frozen=True)
class OfAvailable:
    """A ranker whose lists have no item that is unavailable now, as in serving.

    Attributes:
        ranker: any ranker.
        unavailable: dense items.
    """

    ranker: Ranker
    unavailable: NDArray[np.integer]

    def rank(
        self, histories: Histories, k: int, exclude_seen: bool
    ) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        """The ranker's (n, k) items and scores, with the unavailable items hidden."""
        together = max(1, MOST_HIDDEN // max(1, len(self.unavailable)))
        items = np.full((len(histories), k), -1, np.int32)
        scores = np.full((len(histories), k), -np.inf, np.float32)
        for start in range(0, len(histories), together):
            rows = np.arange(start, min(start + together, len(histories)))
            without = histories.take(rows).hiding(self.unavailable)
            items[rows], scores[rows] = self.ranker.rank(without, k, exclude_seen)
        return items, scores


def of_available(
    rankers: Mapping[str, Ranker], available: NDArray[np.bool_] | None
) -> dict[str, Ranker]:
    """Rankers by name, limited to the available of (items,) items; as they are for None."""
    if available is None:
        return dict(rankers)
    unavailable = np.flatnonzero(~available)
    return {name: OfAvailable(ranker, unavailable) for name, ranker in rankers.items()}


def fit_baselines(
    histories: Histories, num_items: int, timestamps: NDArray[np.int64] | None = None
) -> dict[str, Ranker]:
    """Fit baselines on training histories; the keys are their names in reports.

    The one by the pair rules of the data set, `PAIR_RULES`, is not among them.

    Args:
        histories: training events.
        num_items: items of the catalog.
        timestamps: unix seconds of these events, if times of different users can be compared. Then
            recent popularity is a baseline, too. Repeats are one if a history has an item twice.
    """
    trivial = _fit_heuristics(histories, num_items, timestamps)
    return {
        POPULARITY: trivial.pop(POPULARITY),
        "item-kNN": item_knn(histories, num_items),
        "directional": ItemItem.count(histories, num_items),
        **trivial,
    }


def _fit_heuristics(
    histories: Histories, num_items: int, timestamps: NDArray[np.int64] | None = None
) -> dict[str, Ranker]:
    """Fit the trivial baselines, in time linear in the events; see `fit_baselines`."""
    rankers: dict[str, Ranker] = {
        POPULARITY: Popularity.fit(histories, num_items),
        "successors": ItemItem.count(histories, num_items, SUCCESSORS),
    }
    span = 0 if timestamps is None or not len(timestamps) else int(np.ptp(timestamps))
    if span:
        counts = decayed_counts(
            histories.items,
            num_items,
            timestamps=timestamps,
            half_life_days=RECENT_SHARE * span / DAY,
        )
        rankers[RECENT] = Popularity(counts)
    pairs = histories.rows * max(num_items, 1) + histories.items
    if len(np.unique(pairs)) < len(pairs):
        rankers[REPEATS] = Repeats()
    return rankers


def item_knn(histories: Histories, num_items: int) -> ItemItem:
    """Item-kNN: common users over `sqrt(users of a * users of b) + SHRINK`; 0 for a = b."""
    shape = (len(histories), num_items)
    pairs = histories.rows.astype(np.int32), histories.items  # halves the memory of all below
    taken = sparse.csr_array((np.ones(len(histories.items)), pairs), shape=shape)
    taken.data[:] = 1  # a user counts once per item
    users = np.bincount(taken.indices, minlength=num_items).astype(np.float64)
    by_item, parts = sparse.csr_array(taken.T), []
    for start in range(0, max(num_items, 1), ITEMS_AT_A_TIME):
        common = by_item[start : start + ITEMS_AT_A_TIME] @ taken
        common.sort_indices()
        a = start + np.repeat(np.arange(common.shape[0]), np.diff(common.indptr))
        b = common.indices
        similarity = np.where(a == b, 0, common.data / (np.sqrt(users[a] * users[b]) + SHRINK))
        entries = similarity.astype(np.float32), b, common.indptr
        parts.append(sparse.csr_array(entries, shape=common.shape))
    return ItemItem.of(sparse.vstack(parts, format="csr"), decay=0.7)
