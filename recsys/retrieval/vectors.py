"""VectorIndex: nearest items by the cosine of their vectors, by exact search with faiss."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import sparse

from recsys.progress import track

BLOCK = 16  # queries that are multiplied together
SEARCHED = 256  # items whose neighbours are searched at once


@dataclass(frozen=True, eq=False)
class VectorIndex:
    """Vectors of items; an item with a zero vector has no neighbours.

    Attributes:
        vectors: (items, D) float32 rows of length 1, or 0.
    """

    vectors: NDArray[np.float32]

    def __len__(self) -> int:
        return len(self.vectors)

    @classmethod
    def of(cls, vectors: NDArray[np.floating[Any]]) -> VectorIndex:
        """Make an index from vectors of any length."""
        length = np.linalg.norm(vectors, axis=1, keepdims=True)
        unit = np.divide(vectors, length, out=np.zeros(vectors.shape, np.float32), where=length > 0)
        return cls(np.ascontiguousarray(unit, np.float32))

    @cached_property
    def _index(self) -> Any:
        import faiss

        index = faiss.IndexFlatIP(self.vectors.shape[1])
        index.add(self.vectors)
        return index

    def near(
        self, items: NDArray[np.integer], k: int
    ) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """The k nearest items of each of `items`, which include itself unless its vector is 0.

        Returns:
            (m, k) items with positive cosine, padded with -1, and their (m, k) cosines.
        """
        width = min(k, len(self.vectors))
        nearest_items = np.full((len(items), k), -1, np.int64)
        cosines = np.zeros((len(items), k), np.float32)
        if width and len(items):
            cosines[:, :width], nearest_items[:, :width] = self._index.search(
                self.vectors[items], width
            )
        nearest_items[cosines <= 0] = -1
        return nearest_items, cosines

    def neighbours(self, k: int, end: float = math.inf) -> sparse.csr_array:
        """(items, items) the k nearest other items of each, weighted by cosine to the power of 4.

        Rows sum to 1, or to 0 for an item without neighbours. The search takes time quadratic in
        the items. After `end`, by `time.monotonic`, the items that were not reached have no
        neighbours; which ones those are is random.
        """
        size = len(self.vectors)
        neighbours = np.full((size, k + 1), -1, np.int64)
        cosines = np.zeros((size, k + 1), np.float32)
        order = np.arange(size)
        if not math.isinf(end):
            order = np.random.default_rng(0).permutation(order)
        with track("near items", size) as bar:
            for start in range(0, size, SEARCHED):
                if time.monotonic() > end:
                    break
                rows = order[start : start + SEARCHED]
                neighbours[rows], cosines[rows] = self.near(rows, k + 1)
                bar.advance(len(rows))
        kept = (neighbours >= 0) & (neighbours != np.arange(size)[:, None])
        weight = np.where(kept, cosines, 0.0) ** 4
        total = weight.sum(axis=1, keepdims=True)
        weight = np.divide(weight, total, out=weight, where=total > 0)
        row = np.nonzero(kept)[0]
        return sparse.csr_array((weight[kept], (row, neighbours[kept])), shape=(size, size))


def product(queries: NDArray[np.float32], vectors: NDArray[np.float32]) -> NDArray[np.float32]:
    """(n, items) dot products, in blocks of one size.

    A query thus gets the same bits alone and beside others.
    """
    found = np.empty((len(queries), len(vectors)), np.float32)
    for start in range(0, len(queries), BLOCK):
        some = queries[start : start + BLOCK]
        block = np.zeros((BLOCK, queries.shape[1]), np.float32)
        block[: len(some)] = some
        found[start : start + BLOCK] = (vectors @ block.T).T[: len(some)]
    return found


def best_entries(
    scores: NDArray[np.float32], k: int, blocked: NDArray[np.bool_]
) -> NDArray[np.int32]:
    """(n, k) columns with the largest finite scores, best first, padded with -1.

    Args:
        scores: (n, items).
        k: number of items.
        blocked: (n, items) which items each row may not get.
    """
    found = np.full((len(scores), k), -1, np.int32)
    width = min(k, scores.shape[1])
    if not width:
        return found
    scores = np.where(blocked, np.float32(-np.inf), scores)
    best = largest(scores, width)
    value = np.take_along_axis(scores, best, axis=1)
    found[:, :width] = np.where(value > -np.inf, best, -1)
    return found


def nearest(cosines: NDArray[np.float32], k: int, blocked: NDArray[np.bool_]) -> NDArray[np.int32]:
    """The same for the largest positive cosines."""
    return best_entries(cosines, k, blocked | (cosines <= 0))


def largest(scores: NDArray[np.float32], k: int) -> NDArray[np.int64]:
    """(n, k) columns of the k largest entries of each row, descending; ties by column.

    Which of several equal entries are taken at the k-th place is not defined.
    """
    best = np.sort(select_largest(scores, k), axis=1)
    order = np.argsort(-np.take_along_axis(scores, best, axis=1), axis=1, kind="stable")
    return np.take_along_axis(best, order, axis=1)


def select_largest(scores: NDArray[np.float32], k: int) -> NDArray[np.int64]:
    """The same columns in any order."""
    import torch  # its selection of a few among many is several times faster than NumPy's

    found = torch.from_numpy(scores).topk(min(k, scores.shape[1]), sorted=False).indices
    return np.asarray(found.numpy())
