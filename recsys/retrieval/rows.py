"""Rows of sparse matrices and of padded items: sums, pairs, shares, look-ups, repeats. Arrays only.

A request needs a dozen small sparse matrices. SciPy checks each of them for longer than it takes to
compute one, so they are `Entries` here; SciPy keeps the large ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import sparse

from recsys.interactions import Histories
from recsys.semantic_ids.words import unit_rows


def blocked_items(
    size: int, left_out: Histories, allowed: Sequence[NDArray[np.bool_] | None] = ()
) -> NDArray[np.bool_]:
    """(n, size) which of the first `size` items each row may not get.

    Args:
        size: number of items.
        left_out: n sequences of items that are left out; those beyond `size` are skipped.
        allowed: at least (size,) bool for each row, the items it may get; None for all.
    """
    blocked, known = np.zeros((len(left_out), size), np.bool_), left_out.items < size
    blocked[left_out.rows[known], left_out.items[known]] = True
    for row, mask in zip(blocked, allowed, strict=False):
        if mask is not None:
            row |= ~mask[:size]
    return blocked


def repeated(items: NDArray[np.int32]) -> NDArray[np.bool_]:
    """(n, w) which places hold no item, or one that stands before."""
    order = np.argsort(items, axis=1, kind="stable")
    ordered = np.take_along_axis(items, order, axis=1)
    again = np.zeros(items.shape, np.bool_)
    np.put_along_axis(again, order[:, 1:], ordered[:, 1:] == ordered[:, :-1], axis=1)
    return np.asarray(again | (items < 0))


def without_repeats(items: NDArray[np.int32]) -> NDArray[np.int32]:
    """(n, w) the first place of each item, in order, filled up with -1."""
    again = repeated(items)
    to_left = np.argsort(again, axis=1, kind="stable")
    return np.take_along_axis(np.where(again, -1, items), to_left, axis=1)


@dataclass(frozen=True, eq=False)
class WeightedItems:
    """m items with a weight, each in one of n rows; an item may be in a row more than once.

    Attributes:
        rows: n.
        row: (m,) int64.
        items: (m,).
        weights: (m,) float64.
    """

    rows: int
    row: NDArray[np.int64]
    items: NDArray[np.integer]
    weights: NDArray[np.float64]

    @classmethod
    def decayed(
        cls,
        histories: Histories,
        num_items: int,
        decay: float,
        chosen: NDArray[np.bool_] | None = None,
    ) -> WeightedItems:
        """Items of histories with `decay**age`; the last one has age 0.

        Items beyond `num_items` are skipped, and those that are not `chosen` (total,); all of them
        age the others.
        """
        known = histories.items < num_items
        known = known if chosen is None else known & chosen
        lengths = histories.lengths
        age = np.repeat(histories.offsets[1:], lengths) - 1 - np.arange(len(known))
        row = np.repeat(np.arange(len(lengths)), lengths)
        weights = np.asarray(decay ** age[known], np.float64)
        return cls(len(lengths), row[known], histories.items[known], weights)

    def parts(self, matrix: sparse.csr_array) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """The entries of each item's row of a matrix, times its weight.

        Returns:
            `row * columns + column` of each entry, and its value.
        """
        first = matrix.indptr[self.items].astype(np.int64)
        count = matrix.indptr[self.items + 1] - first
        end = np.cumsum(count)
        entry = np.arange(end[-1] if len(end) else 0) + np.repeat(first - end + count, count)
        keys = np.repeat(self.row * matrix.shape[1], count) + matrix.indices[entry]
        return keys, np.repeat(self.weights, count) * matrix.data[entry]

    def entries(self, num_items: int) -> Entries:
        """(n, items) the weights themselves, added up."""
        keys = self.row * num_items + self.items
        return Entries.summed(keys, self.weights, (self.rows, num_items))

    def sums(self, matrix: sparse.csr_array) -> Entries:
        """(n, columns) the weighted sum of the rows of a matrix."""
        return Entries.summed(*self.parts(matrix), (self.rows, matrix.shape[1]))

    def dense(self, matrix: sparse.csr_array) -> NDArray[np.float64]:
        """The same as a dense array."""
        size = self.rows * matrix.shape[1]
        total = np.bincount(*self.parts(matrix), size).astype(np.float64)  # integers without parts
        return total.reshape(self.rows, matrix.shape[1])

    def mean(self, vectors: NDArray[np.float32]) -> NDArray[np.float32]:
        """(n, D) unit vectors of the weighted sums of the items' vectors; 0 for a sum of 0."""
        whole = np.zeros((self.rows, vectors.shape[1]))
        filled, first = np.unique(self.row, return_index=True)  # rows ascend
        if len(filled):
            own = self.weights[:, None] * vectors[self.items]
            whole[filled] = np.add.reduceat(own, first, axis=0)
        return unit_rows(whole)


@dataclass(frozen=True, eq=False)
class Entries:
    """A sparse (n, columns) matrix.

    Attributes:
        keys: (m,) int64 `row * columns + column`, ascending and distinct.
        values: (m,) float32.
        shape: n and columns.
    """

    keys: NDArray[np.int64]
    values: NDArray[np.float32]
    shape: tuple[int, int]

    @classmethod
    def summed(
        cls, keys: NDArray[np.int64], values: NDArray[np.floating[Any]], shape: tuple[int, int]
    ) -> Entries:
        """Add up the values of equal keys, in their order."""
        size = shape[0] * shape[1]
        there = np.zeros(size, np.bool_)
        there[keys] = True
        distinct = np.flatnonzero(there)
        number = np.empty(size, np.int32)  # only where an entry is
        number[distinct] = np.arange(len(distinct), dtype=np.int32)
        total = np.bincount(number[keys], values, len(distinct))
        return cls(distinct, total.astype(np.float32), shape)

    @property
    def row(self) -> NDArray[np.int64]:
        """(m,) row of each entry."""
        return self.keys // max(1, self.shape[1])

    @property
    def filled(self) -> NDArray[np.bool_]:
        """(n,) which rows have an entry above 0; that of an item of long ago may have become 0."""
        is_filled = np.zeros(self.shape[0], np.bool_)
        is_filled[self.row[self.values > 0]] = True
        return is_filled

    def normalised(self) -> Entries:
        """The same with rows that add up to 1; rows of zeros stay as they are."""
        row = self.row
        total = np.bincount(row, self.values, self.shape[0])[row]
        shares = np.divide(self.values, total, out=np.zeros(len(total)), where=total > 0)
        return Entries(self.keys, shares.astype(np.float32), self.shape)

    def at(self, columns: NDArray[np.integer]) -> NDArray[np.float32]:
        """(n, c) values at (n, c) columns, 0 where there is none, as for columns outside."""
        if not len(self.keys):
            return np.zeros(columns.shape, np.float32)
        n, width = self.shape
        keys = np.arange(n)[:, None] * width + columns
        position = np.searchsorted(self.keys, keys)
        position[position == len(self.keys)] = 0
        exists = (self.keys[position] == keys) & (columns >= 0) & (columns < width)
        return np.where(exists, self.values[position], np.float32(0))

    def toarray(self) -> NDArray[np.float32]:
        """The dense matrix."""
        dense = np.zeros(self.shape, np.float32)
        dense.reshape(-1)[self.keys] = self.values
        return dense
