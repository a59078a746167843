"""The protocol of quantisers, and the residual arithmetic that they share. NumPy only.

A quantiser maps features to latents and approximates a latent by a sum of one centroid per level.
Each level encodes the residual of the levels above.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

BLOCK = 1 << 14  # rows of a distance matrix in memory
Codebooks = Sequence[NDArray[np.float32]]  # the (V_l, D) centroids of each level l
T = TypeVar("T")


class Quantizer(Protocol):
    """A fitted quantiser.

    Attributes:
        centroids: L arrays (V_l, D) float32 in the latent space.
    """

    centroids: Codebooks

    def latents(self, features: NDArray[np.float32]) -> NDArray[np.float32]:
        """(n, F) features to (n, D) latents."""

    def encode(self, features: NDArray[np.float32]) -> NDArray[np.int32]:
        """(n, F) features to (n, L) codes, which need not be unique."""
        return residual_codes(self.latents(features), self.centroids)

    def reconstruct(self, codes: NDArray[np.integer]) -> NDArray[np.float32]:
        """(n, L) codes to (n, F) features."""

    def save(self, folder: Path) -> None:
        """Write safetensors and JSON files into `folder`."""


def squared_distances(
    points: NDArray[np.float32], centroids: NDArray[np.float32]
) -> NDArray[np.float32]:
    """(n, D) and (V, D) to (n, V) squared Euclidean distances, never below zero."""
    cross = points @ centroids.T
    norms = (points**2).sum(axis=1)[:, None] + (centroids**2).sum(axis=1)
    return np.asarray(np.maximum(norms - 2 * cross, 0), np.float32)


def nearest(points: NDArray[np.float32], centroids: NDArray[np.float32]) -> NDArray[np.int32]:
    """(n,) nearest centroid of each point; ties go to the lowest one."""
    out = np.empty(len(points), np.int32)
    for start in range(0, len(points), BLOCK):
        block = slice(start, start + BLOCK)
        out[block] = squared_distances(points[block], centroids).argmin(axis=1)
    return out


def residual_codes(latents: NDArray[np.float32], centroids: Codebooks) -> NDArray[np.int32]:
    """(n, L) codes of (n, D) latents by greedy residual coding with L arrays (V_l, D)."""
    residual = np.array(latents, np.float32)
    codes = np.empty((len(latents), len(centroids)), np.int32)
    for level, book in enumerate(centroids):
        codes[:, level] = nearest(residual, book)
        residual -= book[codes[:, level]]
    return codes


def decode(codes: NDArray[np.integer], centroids: Codebooks) -> NDArray[np.float32]:
    """(n, <=L) codes to (n, D) latents: the sum of their centroids."""
    out = np.zeros((len(codes), centroids[0].shape[1]), np.float32)
    for level in range(codes.shape[1]):
        out += centroids[level][codes[:, level]]
    return out


def check_sizes(items: int, sizes: Iterable[int]) -> None:
    """Raise ValueError if a level has more codes than there are items, or fewer than two codes."""
    for level, size in enumerate(sizes, 1):
        if not 2 <= size <= items:
            raise ValueError(
                f"codebook_size {size} at level {level} does not fit {items} items; "
                f"choose 2 <= codebook_size <= {items}"
            )


def centroid_tensors(centroids: Iterable[T]) -> dict[str, T]:
    """The tensors of a file: one per level, with its name."""
    return {f"centroids.{level}": book for level, book in enumerate(centroids)}


ANEW = "the stage `ids` of `recsys run --force` makes it anew"


def pop_centroids(tensors: dict[str, Any]) -> list[Any]:
    """Take the centroids of all levels out of a file's tensors; KeyError if there are none."""
    levels = sum(name.startswith("centroids.") for name in tensors)
    return [tensors.pop(f"centroids.{level}") for level in range(max(levels, 1))]
