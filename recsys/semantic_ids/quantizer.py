"""The protocol of quantisers, and the residual arithmetic that they share. NumPy only.

A quantiser maps features to latents and approximates a latent by a sum of one centroid per level.
Each level encodes the residual of the levels above.
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

BLOCK = 1 << 14  # rows of a distance matrix in memory


class Quantizer(Protocol):
    """A fitted quantiser.

    Attributes:
        centroids: (L, V, D) float32 in the latent space.
    """

    centroids: NDArray[np.float32]

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


def residual_codes(
    latents: NDArray[np.float32], centroids: NDArray[np.float32]
) -> NDArray[np.int32]:
    """(n, L) codes of (n, D) latents by greedy residual coding with (L, V, D) centroids."""
    residual = np.array(latents, np.float32)
    codes = np.empty((len(latents), len(centroids)), np.int32)
    for level, book in enumerate(centroids):
        codes[:, level] = nearest(residual, book)
        residual -= book[codes[:, level]]
    return codes


def decode(codes: NDArray[np.integer], centroids: NDArray[np.float32]) -> NDArray[np.float32]:
    """(n, <=L) codes to (n, D) latents: the sum of their centroids."""
    out = np.zeros((len(codes), centroids.shape[2]), np.float32)
    for level in range(codes.shape[1]):
        out += centroids[level][codes[:, level]]
    return out


def check_size(items: int, codebook_size: int) -> None:
    """Raise ValueError if there are fewer items than codes, or fewer than two codes."""
    if codebook_size < 2 or items < codebook_size:
        raise ValueError(
            f"codebook_size {codebook_size} needs 2 <= codebook_size <= items, "
            f"and there are {items} items; choose a smaller one"
        )
