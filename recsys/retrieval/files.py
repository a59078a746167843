"""Arrays of a retrieval on disk, checked when they are read; a sparse matrix is three files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import sparse

_PARTS = ("indptr", "indices", "data")


def save_matrix(folder: Path, stem: str, matrix: sparse.csr_array) -> None:
    """Write a matrix as `STEM.indptr.npy`, `STEM.indices.npy` and `STEM.data.npy`."""
    for part in _PARTS:
        np.save(folder / f"{stem}.{part}.npy", getattr(matrix, part), allow_pickle=False)


def read_matrix(
    folder: Path, stem: str, shape: tuple[int, int] | None = None, least: float = 0
) -> sparse.csr_array:
    """Read a square matrix, or one of the given shape, of numbers of at least `least`.

    Raises:
        ValueError: its arrays contradict each other.
    """
    indptr, indices = (read_array(folder / f"{stem}.{part}.npy", "iu") for part in _PARTS[:2])
    data = read_array(folder / f"{stem}.{_PARTS[2]}.npy", least=least)
    size = len(indptr) - 1
    matrix = sparse.csr_array((data, indices, indptr), shape=shape or (size, size))
    matrix.check_format(full_check=True)
    if len(data) < 2**31:  # half the memory, and the type that the native library reads
        matrix.indices, matrix.indptr = (a.astype(np.int32) for a in (indices, indptr))
    return matrix


def read_array(file: Path, kinds: str = "f", least: float = -np.inf) -> NDArray[Any]:
    """Read an array of some kinds of numbers, all of them finite and at least `least`.

    Raises:
        ValueError: it has others; the text names the file.
    """
    array: NDArray[Any] = np.load(file, allow_pickle=False)
    if array.dtype.kind not in kinds:
        raise ValueError(f"{file.name} holds {array.dtype}")
    if not (np.isfinite(array) & (array >= least)).all():
        raise ValueError(f"{file.name} holds numbers that are not finite, or too small")
    return array
