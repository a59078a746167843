"""VectorIndex: items near to items by the cosine of their vectors. Exact search by faiss."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import sparse


@dataclass(frozen=True, eq=False)
class VectorIndex:
    """Vectors of items, one a row; a zero vector is near to nothing.

    Attributes:
        vectors: (items, D) float32 of length 1, or 0.
    """

    vectors: NDArray[np.float32]

    @classmethod
    def of(cls, vectors: NDArray[np.floating[Any]]) -> VectorIndex:
        """Of vectors of any length."""
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
        """The k items nearest to each of `items`, itself among them if its vector is not 0.

        Returns:
            (m, k) items, -1 where there are no more, and their (m, k) cosines.
        """
        width = min(k, len(self.vectors))
        found = np.full((len(items), k), -1, np.int64)
        cosines = np.zeros((len(items), k), np.float32)
        if width and len(items):
            cosines[:, :width], found[:, :width] = self._index.search(self.vectors[items], width)
        found[cosines <= 0] = -1
        return found, cosines

    def neighbours(self, k: int) -> sparse.csr_array:
        """(items, items) the k items nearest to each, by the fourth power of their cosine.

        Rows add up to 1, or to 0 for an item that is near to nothing; none is its own neighbour.
        """
        size = len(self.vectors)
        found, cosines = self.near(np.arange(size), k + 1)
        kept = (found >= 0) & (found != np.arange(size)[:, None])
        weight = np.where(kept, cosines, 0.0) ** 4
        total = weight.sum(axis=1, keepdims=True)
        weight = np.divide(weight, total, out=weight, where=total > 0)
        row = np.nonzero(kept)[0]
        return sparse.csr_array((weight[kept], (row, found[kept])), shape=(size, size))
