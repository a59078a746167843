"""Settings of the item features and of the quantisers. This module imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal


@dataclass(frozen=True)
class FeatureConfig:
    """Settings of the item features. A weight of 0 leaves a block out.

    Attributes:
        text_weight: weight of titles and texts.
        text_dim: dimensions of their TF-IDF to keep.
        text_model: folder of a sentence-transformers model; replaces TF-IDF.
        embedding_column: column of items.parquet with ready embeddings (list of float); replaces
            both.
        collaborative: source of collaborative features: `ppmi`, co-occurrence in histories, or
            `sasrec`, the item vectors of the run's SASRec.
        collaborative_weight: weight of the collaborative features.
        collaborative_dim: dimensions of the PPMI matrix to keep.
        window: items at most this far apart in a history co-occur.
        attribute_weight: weight of the attribute columns.
        attribute_dim: dimensions of the TF-IDF of attribute values to keep.
        predicted_weight: weight of the collaborative features as content predicts them. They are
            all that is known of the collaborative features of a new item.
    """

    text_weight: float = 1.0
    text_dim: int = 128
    text_model: Path | None = None
    embedding_column: str | None = None
    collaborative: Literal["ppmi", "sasrec"] = "ppmi"
    collaborative_weight: float = 1.0
    collaborative_dim: int = 128
    window: int = 10
    attribute_weight: float = 0.5
    attribute_dim: int = 64
    predicted_weight: float = 0.0


@dataclass(frozen=True)
class RQKMeansConfig:
    """Settings of RQ-KMeans.

    Attributes:
        iterations: k-means steps per level.
        restarts: k-means runs per level; the one with the lowest error is kept.
    """

    iterations: int = 50
    restarts: int = 3


@dataclass(frozen=True)
class RQVAEConfig:
    """Settings of the RQ-VAE.

    Attributes:
        latent_dim: D, width of the centroids; at most that of the features.
        hidden: widths of the encoder's layers; the decoder has them in reverse.
        passes: over the items.
        steps: at most. Without any, the codes are those of residual k-means on the features'
            principal components.
        batch_size: items per step.
        learning_rate: peak of AdamW's learning rate: a short rise, then a cosine.
        commitment: weight of the commitment loss.
        decay: decay of the codebooks' moving averages.
        revive_below: a code whose moving average of items is a lower share of that of all codes is
            dead and restarts at a random residual.
    """

    latent_dim: int = 128
    hidden: tuple[int, ...] = (256,)
    passes: int = 60
    steps: int = 800
    batch_size: int = 1024
    learning_rate: float = 1e-3
    commitment: float = 0.25
    decay: float = 0.98
    revive_below: float = 0.125
