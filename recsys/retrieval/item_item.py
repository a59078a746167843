"""Item-item models: what a history's items speak for, as one sparse matrix.

Fitted on training histories in seconds, ranked without a dense row: only items with evidence are
ever touched. Knows dense items only; no titles, no semantic IDs, no model.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from scipy import sparse

from recsys.interactions import Histories

USERS_AT_A_TIME = 2048  # bounds memory: a few hundred neighbours for each of them


@dataclass(frozen=True)
class ItemItem:
    """Scores an item by the sum over the history of `decay**age * weights[seen, item]`.

    Attributes:
        weights: (items, items) float32 CSR; row a says what an `a` in the history speaks for.
        decay: weight of an event relative to the one after it, in (0, 1]; the last event has age 0.
    """

    weights: sparse.csr_array
    decay: float

    def __post_init__(self) -> None:
        if not 0 < self.decay <= 1:
            raise ValueError(f"decay must lie in (0, 1], got {self.decay}")

    @classmethod
    def directional(
        cls,
        histories: Histories,
        num_items: int,
        *,
        window: int = 5,
        reverse: float = 0.5,
        source_damping: float = 0.5,
        target_damping: float = 0.0,
        decay: float = 0.6,
    ) -> ItemItem:
        """Who follows whom: events up to `window` apart count 1/gap forwards, less backwards.

        Row a is divided by `count(a)**source_damping`, so that a popular item in the history does
        not drown the others, and column b by `count(b)**target_damping`, which favours the tail.
        (0.5, 0.5) is the cosine; (0.5, 0) was the best or nearly the best on the validation parts
        of Beauty, Sports, Yelp and LastFM.

        Args:
            histories: training events; nothing else may come in.
            num_items: items of the catalog.
            window: largest gap that counts, in events.
            reverse: weight of a pair read backwards.
            source_damping: exponent of the popularity of the history's item.
            target_damping: exponent of the popularity of the ranked item.
            decay: see the class.

        Raises:
            ValueError: a window below 1.
        """
        if window < 1:
            raise ValueError(f"window must be at least 1, got {window}")
        source, target, weight = [], [], []
        rows, items = histories.rows, histories.items
        for gap in range(1, window + 1):
            together = rows[:-gap] == rows[gap:]
            source.append(items[:-gap][together])
            target.append(items[gap:][together])
            weight.append(np.full(int(together.sum()), 1 / gap))
        shape = (num_items, num_items)
        places = (np.concatenate(source), np.concatenate(target))
        forwards = sparse.csr_array((np.concatenate(weight), places), shape=shape)
        both = forwards + reverse * forwards.T
        counts = np.bincount(items, minlength=num_items).clip(1).astype(np.float64)
        damped = (
            sparse.diags_array(counts**-source_damping)
            @ both
            @ sparse.diags_array(counts**-target_damping)
        )
        return cls(_finished(damped), decay)

    @classmethod
    def cosine(
        cls, histories: Histories, num_items: int, *, shrink: float = 10.0, decay: float = 0.7
    ) -> ItemItem:
        """Item-kNN: users in common over `sqrt(users of a * users of b) + shrink`, never itself.

        Args:
            histories: training events; nothing else may come in.
            num_items: items of the catalog.
            shrink: pulls similarities that rest on few users towards zero.
            decay: see the class.
        """
        shape = (len(histories), num_items)
        taken = sparse.csr_array(
            (np.ones(len(histories.items)), (histories.rows, histories.items)), shape=shape
        )
        taken.data[:] = 1  # a user counts once, however often the item was taken
        users = np.bincount(taken.indices, minlength=num_items).astype(np.float64)
        common = (taken.T @ taken).tocoo()
        a, b = common.coords
        similarity = common.data / (np.sqrt(users[a] * users[b]) + shrink)
        similarity[a == b] = 0
        return cls(
            _finished(sparse.csr_array((similarity, (a, b)), shape=(num_items, num_items))), decay
        )

    def with_near(self, near: sparse.csr_array, share: float) -> ItemItem:
        """Let items speak for those that are like them, too: rare ones get neighbours thereby.

        Row a becomes `(1 - share) * weights[a] + share * sum(weights[a]) * near[a]`; an item that
        has little or nothing beside it in training speaks for its like as loudly as a fifth of the
        median item.

        Args:
            near: (items, items), whose rows add up to 1 or 0 (`VectorIndex.neighbours`).
            share: of an item's weight, 0 .. 1.
        """
        loud = np.asarray(self.weights.sum(axis=1), np.float64)
        heard = loud[loud > 0]
        loud = np.maximum(loud, np.median(heard) / 5 if len(heard) else 1.0)
        both = (1 - share) * self.weights + share * (sparse.diags_array(loud) @ near)
        return replace(self, weights=_finished(both))

    def rank(
        self, histories: Histories, k: int, exclude_seen: bool
    ) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        """Best k items of each history; equal scores go to the lower item.

        Args:
            histories: n sequences of dense items, oldest first.
            k: length of the lists.
            exclude_seen: leave out the items of the history.

        Returns:
            (n, k) int32 items, -1 behind the last item with evidence, and their (n, k) float32
            scores, -inf there.
        """
        items = np.full((len(histories), k), -1, np.int32)
        scores = np.full((len(histories), k), -np.inf, np.float32)
        step = min(USERS_AT_A_TIME, 2 ** (32 - _item_bits(self.weights.shape[1])))
        for start in range(0, len(histories), step):
            rows = np.arange(start, min(start + step, len(histories)))
            row, place, item, score = best_of(self.score(histories.take(rows), exclude_seen), k)
            items[start + row, place] = item
            scores[start + row, place] = score
        return items, scores

    def score(self, histories: Histories, exclude_seen: bool) -> sparse.csr_array:
        """(n, items) scores; absent where there is no evidence."""
        end = np.repeat(histories.offsets[1:], histories.lengths)
        age = end - 1 - np.arange(len(histories.items))
        shape = (len(histories), self.weights.shape[0])
        places = (histories.rows, histories.items)
        recency = (self.decay**age).astype(np.float32)
        query = sparse.csr_array((recency, places), shape=shape)
        scores = sparse.csr_array(query @ self.weights)
        if exclude_seen:
            seen = sparse.csr_array((np.ones(len(age), np.bool_), places), shape=shape)
            scores = sparse.csr_array(scores - scores.multiply(seen))  # x - x is zero exactly
        scores.eliminate_zeros()
        return scores


def _finished(matrix: sparse.csr_array) -> sparse.csr_array:
    weights: sparse.csr_array = sparse.csr_array(matrix).astype(np.float32)
    weights.eliminate_zeros()
    return weights


def _item_bits(num_items: int) -> int:
    return max(num_items - 1, 1).bit_length()


def best_of(
    scores: sparse.csr_array, k: int
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int32], NDArray[np.float32]]:
    """Row, place below k, item and score of the best k entries of each row; scores are positive.

    Sorts one 64-bit integer an entry: row, score downwards (32 bits), item. Positive floats order
    as their bits do, and sorting values is several times faster than sorting by several keys.
    """
    item_bits = np.uint64(_item_bits(scores.shape[1]))
    row = np.repeat(np.arange(scores.shape[0], dtype=np.uint64), np.diff(scores.indptr))
    falling = np.uint64(2**32 - 1) - scores.data.view(np.uint32)
    key = (row << (item_bits + np.uint64(32))) | (falling << item_bits)
    key = np.sort(key | scores.indices.astype(np.uint64))
    place = np.arange(len(row)) - np.repeat(scores.indptr[:-1], np.diff(scores.indptr))
    kept = place < k
    key = key[kept]
    item = (key & ((np.uint64(1) << item_bits) - np.uint64(1))).astype(np.int32)
    score = (np.uint64(2**32 - 1) - ((key >> item_bits) & np.uint64(2**32 - 1))).astype(np.uint32)
    return row[kept].astype(np.int64), place[kept], item, score.view(np.float32)
