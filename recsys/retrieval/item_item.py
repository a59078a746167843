"""Item-item models: scores of items given the items of a history, by one sparse matrix.

They are fitted on training histories in seconds. Ranking only visits items with evidence and makes
no dense row.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import sparse

from recsys.interactions import Histories
from recsys.retrieval.rows import Entries, WeightedItems

USERS_AT_A_TIME = 2048  # bounds memory, as each user has a few hundred neighbours


@dataclass(frozen=True)
class PairRules:
    """Which pairs of events count, and how much.

    A pair of an event of item a and a later one of item b, `gap` events apart, counts
    `gap**-fading` for b given a, and `reverse` times as much for a given b. The sum is divided by
    `(events of a + source_offset)**source_damping`, so that popular items in the history do not
    dominate, and by `(events of b + target_offset)**target_damping`, which favours rare items.

    Attributes:
        window: largest gap that counts, in events.
        fading: how much less distant pairs count.
        reverse: weight of a pair in reverse order.
        source_damping: exponent of the popularity of the history's item.
        source_offset: events that are added to it.
        target_damping: exponent of the popularity of the ranked item.
        target_offset: events that are added to it.
        decay: weight of an event of a history relative to the next one, in (0, 1].
    """

    window: int = 5
    fading: float = 1.0
    reverse: float = 0.5
    source_damping: float = 0.5
    source_offset: float = 0.0
    target_damping: float = 0.0
    target_offset: float = 0.0
    decay: float = 0.6

    def __post_init__(self) -> None:
        if self.window < 1:
            raise ValueError(f"window must be at least 1, got {self.window}")

    def scales(
        self, events: NDArray[np.integer]
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """(items,) factors of the pairs given an item, and of those for an item."""
        counts = events.astype(np.float64)
        source = np.maximum(counts + self.source_offset, 1) ** -self.source_damping
        target = np.maximum(counts + self.target_offset, 1) ** -self.target_damping
        return source, target


DIRECTIONAL = PairRules()  # was best or nearly the best on Beauty, Sports, Yelp and LastFM


@dataclass(frozen=True)
class ItemItem:
    """Scores an item by the sum over the history of `decay**age * weights[seen, item]`.

    Attributes:
        weights: (items, items) float32 CSR; row a has the scores given item a in the history.
        decay: weight of an event relative to the next one, in (0, 1]; the last event has age 0.
    """

    weights: sparse.csr_array
    decay: float

    def __post_init__(self) -> None:
        if not 0 < self.decay <= 1:
            raise ValueError(f"decay must lie in (0, 1], got {self.decay}")

    def __len__(self) -> int:
        return int(self.weights.shape[0])

    @classmethod
    def count(
        cls,
        histories: Histories,
        num_items: int,
        rules: PairRules = DIRECTIONAL,
        ends: NDArray[np.bool_] | None = None,
    ) -> ItemItem:
        """Count pairs of events by `rules`.

        Args:
            histories: training events only.
            num_items: items of the catalog.
            rules: which pairs count, and how much.
            ends: (total,) events that a pair may end in, such as purchases; None for all.
        """
        forwards = count_pairs(histories, num_items, rules, ends)
        both = forwards if not rules.reverse else forwards + rules.reverse * forwards.T
        del forwards
        source, target = rules.scales(np.bincount(histories.items, minlength=num_items))
        both.data *= np.repeat(source, np.diff(both.indptr))
        both.data *= target[both.indices]
        return cls.of(both, rules.decay)

    @classmethod
    def of(cls, weights: sparse.csr_array, decay: float) -> ItemItem:
        """The model with these weights, in float32 and without zeros, which they lose."""
        weights = sparse.csr_array(weights).astype(np.float32, copy=False)
        weights.eliminate_zeros()
        return cls(weights, decay)

    def rank(
        self, histories: Histories, k: int, exclude_seen: bool
    ) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        """Best k items of each history; equal scores go to the lower item.

        Args:
            histories: n sequences of dense items, oldest first.
            k: length of the lists.
            exclude_seen: whether to leave out the items of the history that count as seen.

        Returns:
            (n, k) int32 items, -1 after the last item with evidence, and their (n, k) float32
            scores, -inf there.
        """
        items = np.full((len(histories), k), -1, np.int32)
        scores = np.full((len(histories), k), -np.inf, np.float32)
        for start in range(0, len(histories), USERS_AT_A_TIME):
            rows = np.arange(start, min(start + USERS_AT_A_TIME, len(histories)))
            row, column, item, score = best_of(self.score(histories.take(rows), exclude_seen), k)
            items[start + row, column] = item
            scores[start + row, column] = score
        return items, scores

    def score(self, histories: Histories, exclude_seen: bool) -> sparse.csr_array:
        """(n, items) scores, without entries for items without evidence."""
        query = decayed(histories, self.weights.shape[0], self.decay)
        scores = sparse.csr_array(query @ self.weights)
        left_out = histories.left_out(exclude_seen)
        if len(left_out.items):
            hidden = decayed(left_out, self.weights.shape[0], 1.0).astype(np.bool_)
            scores = sparse.csr_array(scores - scores.multiply(hidden))  # x - x is zero exactly
        scores.eliminate_zeros()
        return scores


def decayed(histories: Histories, num_items: int, decay: float) -> sparse.csr_array:
    """(n, num_items) the sum of `decay**age` of each item of a history; the last one has age 0.

    Items beyond `num_items` are skipped; they age the others.
    """
    weighted = WeightedItems.decayed(histories, num_items, decay)
    recency = weighted.weights.astype(np.float32)
    shape = (weighted.rows, num_items)
    return sparse.csr_array((recency, (weighted.row, weighted.items)), shape=shape)


def count_pairs(
    histories: Histories, num_items: int, rules: PairRules, ends: NDArray[np.bool_] | None = None
) -> sparse.csr_array:
    """(items, items) float64 sums of `gap**-fading` over the pairs of each item and a later one.

    `ends` as of `ItemItem.count`.
    """
    source, target, weight = [], [], []
    rows, items = histories.rows, histories.items
    longest = int(histories.lengths.max(initial=1))
    for gap in range(1, min(rules.window, longest) + 1):
        pairs = rows[:-gap] == rows[gap:]
        if ends is not None:
            pairs &= ends[gap:]
        source.append(items[:-gap][pairs])
        target.append(items[gap:][pairs])
        weight.append(float(gap) ** -rules.fading)
    weights = np.repeat(weight, [len(items) for items in source])
    pairs_of_items = np.concatenate(source), np.concatenate(target)
    del source, target  # as long as what was made of them
    return sparse.csr_array((weights, pairs_of_items), shape=(num_items, num_items))


def best_of(
    scores: sparse.csr_array, k: int
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int32], NDArray[np.float32]]:
    """Row, rank (from 0), item and score of the best k entries of each row; ties by item."""
    row = np.repeat(np.arange(scores.shape[0]), np.diff(scores.indptr))
    return _best_of(row, scores.indices, scores.data, k)


def _best_of(
    row: NDArray[np.int64], items: NDArray[np.integer], scores: NDArray[np.float32], k: int
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int32], NDArray[np.float32]]:
    """`best_of` of entries by ascending rows."""
    rank = np.arange(len(row)) - np.searchsorted(row, row)
    inside = rank < k
    order = np.lexsort((items, -scores, row))[inside]
    return row[inside], rank[inside], items[order].astype(np.int32), scores[order]


def best_items(scores: Entries, k: int, blocked: NDArray[np.bool_]) -> NDArray[np.int32]:
    """(n, k) items with the largest positive scores, best first, padded with -1.

    Args:
        scores: (n, items).
        k: number of items.
        blocked: (n, items) which items each row may not get.
    """
    n, width = scores.shape
    row, item = np.divmod(scores.keys, max(1, width))
    keep = (scores.values > 0) & ~blocked[row, item]
    line, column, item, _ = _best_of(row[keep], item[keep], scores.values[keep], k)
    best = np.full((n, k), -1, np.int32)
    best[line, column] = item
    return best
