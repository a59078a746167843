"""VectorIndex: nearest items by the cosine of their vectors, by exact search."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from recsys.semantic_ids.words import unit_rows

BLOCK = 16  # queries that are multiplied together


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
        return cls(np.ascontiguousarray(unit_rows(vectors)))


def product(queries: NDArray[np.float32], vectors: NDArray[np.float32]) -> NDArray[np.float32]:
    """(n, items) dot products, in blocks of one size.

    A query thus gets the same bits alone and beside others.
    """
    products = np.empty((len(queries), len(vectors)), np.float32)
    for start in range(0, len(queries), BLOCK):
        some = queries[start : start + BLOCK]
        block = np.zeros((BLOCK, queries.shape[1]), np.float32)
        block[: len(some)] = some
        products[start : start + BLOCK] = (vectors @ block.T).T[: len(some)]
    return products


def best_entries(
    scores: NDArray[np.float32], k: int, blocked: NDArray[np.bool_]
) -> NDArray[np.int32]:
    """(n, k) columns with the largest finite scores, best first, padded with -1.

    Args:
        scores: (n, items).
        k: number of items.
        blocked: (n, items) which items each row may not get.
    """
    columns = np.full((len(scores), k), -1, np.int32)
    width = min(k, scores.shape[1])
    if not width:
        return columns
    scores = np.where(blocked, np.float32(-np.inf), scores)
    best = largest(scores, width)
    value = np.take_along_axis(scores, best, axis=1)
    columns[:, :width] = np.where(value > -np.inf, best, -1)
    return columns


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

    columns = torch.from_numpy(scores).topk(min(k, scores.shape[1]), sorted=False).indices
    return np.asarray(columns.numpy())
