"""Settings of the item features and of the quantisers. This module imports no torch."""

from __future__ import annotations

from typing import Literal

from recsys.config import internal, section


@section
class FeatureConfig:
    """Settings of the item features. A weight of 0 leaves a block out."""

    text_weight: float = 1.0
    """Weight of titles and texts."""
    text_dim: int = internal(default=128)
    """Dimensions of their TF-IDF to keep."""
    embedding_column: str | None = None
    """Column of items.parquet with embeddings of the texts by any model (list of float); replaces
    TF-IDF."""
    collaborative: Literal["ppmi", "sasrec"] = "ppmi"
    """Source of collaborative features: `ppmi`, co-occurrence in histories, or `sasrec`, the item
    vectors of the run's SASRec."""
    collaborative_weight: float = internal(default=1.0)
    """Weight of the collaborative features."""
    collaborative_dim: int = internal(default=128)
    """Dimensions of the PPMI matrix to keep."""
    window: int = internal(default=10)
    """Items at most this far apart in a history co-occur; fewer in millions of events."""
    attribute_weight: float = 0.5
    """Weight of the attribute columns."""
    attribute_dim: int = internal(default=64)
    """Dimensions of the TF-IDF of attribute values to keep."""
    predicted_weight: float = 0.0
    """Weight of the collaborative features as content predicts them. They are all that is known of
    the collaborative features of a new item."""


@section
class RQKMeansConfig:
    """Settings of RQ-KMeans."""

    iterations: int = 50
    """k-means steps per level."""
    restarts: int = 3
    """k-means runs per level; the one with the lowest error is kept."""


@section
class RQVAEConfig:
    """Settings of the RQ-VAE."""

    latent_dim: int = 128
    """D, width of the centroids; at most that of the features."""
    hidden: tuple[int, ...] = (256,)
    """Widths of the encoder's layers; the decoder has them in reverse."""
    passes: int = 60
    """Passes over the items."""
    steps: int = 800
    """Steps at most. Without any, the codes are those of residual k-means on the features'
    principal components."""
    batch_size: int = 1024
    """Items per step, at most a fifth of them."""
    learning_rate: float = 1e-3
    """Peak of AdamW's learning rate: a short rise, then a cosine."""
    commitment: float = 0.25
    """Weight of the commitment loss."""
    memory: float = 1.0
    """Passes over the items that the codebooks' moving averages remember. A longer memory holds the
    codebooks where k-means left them."""
    revive_below: float = 0.125
    """A code whose moving average of items is a lower share of that of all codes is dead and
    restarts at a random residual."""
