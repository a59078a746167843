"""Rows of sparse matrices and of padded items: pairs, shares, look-ups, repeats. Arrays only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import sparse

from recsys.interactions import Histories


def pairs_of(sequences: Sequence[Histories], size: int) -> NDArray[np.int64]:
    """One integer per (row, item) pair of the sequences, without items beyond the catalog."""
    pairs = [np.zeros(0, np.int64)]
    for histories in sequences:
        known = histories.items < size
        pairs.append((histories.rows * size + histories.items)[known])
    return np.concatenate(pairs)


def without_repeats(items: NDArray[np.int32]) -> NDArray[np.int32]:
    """(n, w) the first place of each item, in order, filled up with -1."""
    order = np.argsort(items, axis=1, kind="stable")
    ordered = np.take_along_axis(items, order, axis=1)
    again = np.zeros(items.shape, np.bool_)
    np.put_along_axis(again, order[:, 1:], ordered[:, 1:] == ordered[:, :-1], axis=1)
    again |= items < 0
    to_left = np.argsort(again, axis=1, kind="stable")
    return np.take_along_axis(np.where(again, -1, items), to_left, axis=1)


def normalised(evidence: Any) -> sparse.csr_array:
    """The same with rows that add up to 1, or to 0, without zeros, columns ascending."""
    shares = sparse.csr_array(evidence)
    shares.eliminate_zeros()
    shares.sort_indices()
    total = shares.sum(axis=1)
    shares.data = shares.data / np.repeat(total, np.diff(shares.indptr))
    return shares


def look_up(matrix: sparse.csr_array, columns: NDArray[np.integer]) -> NDArray[np.float64]:
    """(n, c) entries at the given columns of each row, 0 if absent; the matrix is sorted."""
    n, size = matrix.shape
    row = np.repeat(np.arange(n), np.diff(matrix.indptr))
    keys = row * (size + 1) + matrix.indices
    wanted = np.arange(n)[:, None] * (size + 1) + columns
    place = np.searchsorted(keys, wanted).clip(max=max(len(keys) - 1, 0))
    if not len(keys):
        return np.zeros(columns.shape)
    found = (keys[place] == wanted) & (columns >= 0)
    return np.where(found, matrix.data[place], 0.0)
