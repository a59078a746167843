"""LaterItems: what retrieval knows of items that were added after it was fitted.

They have no events, but words and attributes. Their vectors, and their item vectors of SASRec, are
those of the items with the nearest content, as a weighted mean.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import sparse

from recsys.retrieval.vectors import VectorIndex, largest

NEIGHBOURS = 20  # items with the nearest content
POWER = 4  # of the cosine, as the weight of a neighbour
BLOCK = 32  # items whose neighbours are found together, which bounds memory


@dataclass(frozen=True, eq=False)
class LaterItems:
    """Rows of m items whose dense numbers follow those of the fitted catalog.

    Attributes:
        content: (m, terms) float32 CSR with rows of length 1, or 0.
        vectors: (m, D) float32 rows of length 1, or 0; None if retrieval has no vectors.
        sasrec: (m, D) float32 item vectors, NaN for an item without neighbours; None if retrieval
            has no SASRec.
    """

    content: sparse.csr_array
    vectors: NDArray[np.float32] | None = None
    sasrec: NDArray[np.float32] | None = None

    def __len__(self) -> int:
        return int(self.content.shape[0])

    def take(self, rows: NDArray[np.integer]) -> LaterItems:
        """Some of the items."""
        return LaterItems(
            self.content[rows],
            None if self.vectors is None else self.vectors[rows],
            None if self.sasrec is None else self.sasrec[rows],
        )

    def followed_by(self, other: LaterItems) -> LaterItems:
        """Both, one behind the other."""
        return LaterItems(
            sparse.csr_array(sparse.vstack([self.content, other.content], format="csr")),
            _both(self.vectors, other.vectors),
            _both(self.sasrec, other.sasrec),
        )


def neighbours(
    content: sparse.csr_array, columns: sparse.csr_array, k: int = NEIGHBOURS
) -> sparse.csr_array:
    """(m, items) weights of the k fitted items with the nearest content; rows sum to 1, or 0.

    Args:
        content: (m, terms) unit rows.
        columns: (terms, items) the fitted items' rows, transposed.
        k: number of neighbours.
    """
    size, parts = columns.shape[1], []
    for start in range(0, content.shape[0], BLOCK):
        cosines = (content[start : start + BLOCK] @ columns).toarray()
        best = largest(cosines, k)
        weight = np.take_along_axis(cosines, best, axis=1).clip(0) ** POWER
        total = weight.sum(axis=1, keepdims=True)
        weight = np.divide(weight, total, out=np.zeros_like(weight), where=total > 0)
        rows = np.repeat(np.arange(len(best)), best.shape[1])
        part = sparse.csr_array((weight.ravel(), (rows, best.ravel())), (len(best), size))
        part.eliminate_zeros()
        parts.append(part)
    parts = parts or [sparse.csr_array((0, size), dtype=np.float32)]
    return sparse.csr_array(sparse.vstack(parts, format="csr"))


def describe(
    content: sparse.csr_array,
    columns: sparse.csr_array,
    vectors: NDArray[np.float32] | None,
    sasrec: NDArray[np.float32] | None,
) -> LaterItems:
    """Items with some content; `vectors` and `sasrec` are the fitted items'."""
    near = neighbours(content, columns)
    states = None if sasrec is None else near @ sasrec
    if states is not None:
        states[np.diff(near.indptr) == 0] = np.nan
    return LaterItems(
        content, None if vectors is None else VectorIndex.of(near @ vectors).vectors, states
    )


def _both(
    fitted: NDArray[np.float32] | None, other: NDArray[np.float32] | None
) -> NDArray[np.float32] | None:
    return None if fitted is None or other is None else np.concatenate([fitted, other])
