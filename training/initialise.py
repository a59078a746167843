"""Initial weights of token embeddings, from the quantiser's centroids."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from recsys.semantic_ids.quantizer import Codebooks
from recsys.vocabulary import Vocabulary


def centroid_embeddings(
    centroids: Codebooks, level_sizes: tuple[int, ...], width: int, rms: float
) -> list[NDArray[np.float32]]:
    """Embeddings of codes whose relative positions are those of their centroids.

    Centroids wider than `width` are projected on the leading principal axes of all levels; narrower
    ones are filled up with zeros. Each level is centred and scaled separately, because deep levels
    quantise small residuals.

    Args:
        centroids: L arrays (V_l, D).
        level_sizes: codes of each level, at most V_l.
        width: H of the embedding.
        rms: root mean square of the result.

    Returns:
        L arrays (level_sizes[l], H).
    """
    levels = [
        c[:size] - c[:size].mean(axis=0) for c, size in zip(centroids, level_sizes, strict=True)
    ]
    levels = [c / max(float(np.sqrt((c**2).mean())), 1e-12) for c in levels]
    if levels[0].shape[1] > width:
        axes = np.linalg.svd(np.concatenate(levels), full_matrices=False)[2][:width]
        levels = [c @ axes.T for c in levels]
    embeddings = []
    for c in levels:
        wide = np.zeros((len(c), width), np.float32)
        wide[:, : c.shape[1]] = c
        embeddings.append(wide * (rms / max(float(np.sqrt((wide**2).mean())), 1e-12)))
    return embeddings


@torch.no_grad()
def initialise_from_centroids(model: Any, vocabulary: Vocabulary, centroids: Codebooks) -> None:
    """Copy `centroid_embeddings` to the rows of the semantic tokens, in embedding and head.

    They are scaled to the root mean square of the model's rows.
    """
    for matrix in (model.get_input_embeddings().weight, model.get_output_embeddings().weight):
        rms = float(matrix.float().pow(2).mean().sqrt())
        rows = centroid_embeddings(centroids, vocabulary.level_sizes, matrix.shape[1], rms)
        for offset, level in zip(vocabulary.level_offsets, rows, strict=True):
            matrix[offset : offset + len(level)] = torch.from_numpy(level).to(matrix)
