"""RQ-KMeans: k-means on the features, then on the residuals of each level.

The latent space is the feature space, so only centroids are trained.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from recsys.errors import ArtifactError
from recsys.progress import track
from recsys.semantic_ids.quantizer import (
    ANEW,
    Codebooks,
    Quantizer,
    centroid_tensors,
    check_sizes,
    decode,
    nearest,
    pop_centroids,
)
from recsys.semantic_ids.settings import RQKMeansConfig

CENTROIDS = "centroids.safetensors"
LEAST_POINTS = 16  # items of a centroid, on average, that a time limit leaves


class RQKMeans(Quantizer):
    """Residual k-means; `centroids`, L arrays (V_l, F), lie in feature space.

    >>> features = np.array([[0, 0], [0, 1], [9, 0], [9, 1]], np.float32)
    >>> quantizer = RQKMeans.fit(features, sizes=[2, 2], config=RQKMeansConfig())
    >>> codes = quantizer.encode(features)
    >>> bool((quantizer.reconstruct(codes) == features).all())
    True
    """

    def __init__(self, centroids: Codebooks) -> None:
        self.centroids = centroids

    @classmethod
    def fit(
        cls,
        features: NDArray[np.float32],
        sizes: Sequence[int],
        config: RQKMeansConfig,
        seed: int = 0,
        start: Codebooks | None = None,
        seconds: float | None = None,
    ) -> RQKMeans:
        """Fit a codebook for each of L levels to (items, F) features.

        Args:
            features: (items, F).
            sizes: V_l, the number of codes at each level.
            config: iterations and restarts.
            seed: of the first centroids.
            start: L arrays (V_l, F), the first centroids; they are drawn from the items without it.
            seconds: time limit; the centroids are then fitted to the sample of the items for which
                there is time, as far as the time of one assignment of all items tells.

        Raises:
            ValueError: a size that does not fit the number of items.
        """
        import faiss

        check_sizes(len(features), sizes)
        residual = np.array(features, np.float32, order="C")
        books = []
        with track("rq-kmeans", total=len(sizes)) as bar:
            for level, size in enumerate(sizes):
                begun = time.monotonic()
                points = 1 << 16
                if seconds is not None:
                    nearest(residual, residual[:size])
                    passes = config.iterations * config.restarts
                    each = max(time.monotonic() - begun, 1e-9) * passes / len(residual)
                    share = seconds / (len(sizes) - level)
                    points = int(np.clip(share / each / size, LEAST_POINTS, points))
                kmeans = faiss.Kmeans(
                    residual.shape[1],
                    size,
                    niter=config.iterations,
                    nredo=config.restarts,
                    seed=(seed + level) % (1 << 31),  # an int in C
                    min_points_per_centroid=1,
                    max_points_per_centroid=points,
                )
                kmeans.train(residual, init_centroids=None if start is None else start[level])
                book = np.array(kmeans.centroids, np.float32)
                residual -= book[nearest(residual, book)]
                books.append(book)
                if seconds is not None:
                    seconds = max(seconds - (time.monotonic() - begun), 0.0)
                bar.advance(error=float((residual**2).sum(axis=1).mean()))
        return cls(books)

    def latents(self, features: NDArray[np.float32]) -> NDArray[np.float32]:
        """The features themselves."""
        return features

    def reconstruct(self, codes: NDArray[np.integer]) -> NDArray[np.float32]:
        """(n, L) codes to (n, F) features."""
        return decode(codes, self.centroids)

    def save(self, folder: Path) -> None:
        """Write the centroids into `folder`."""
        from safetensors.numpy import save_file

        folder.mkdir(parents=True, exist_ok=True)
        save_file(centroid_tensors(self.centroids), folder / CENTROIDS)

    @classmethod
    def load(cls, folder: Path) -> RQKMeans:
        """Read what `save` wrote; ArtifactError if it is missing or unreadable."""
        from safetensors import SafetensorError
        from safetensors.numpy import load_file

        try:
            return cls(pop_centroids(load_file(folder / CENTROIDS)))
        except (OSError, KeyError, SafetensorError) as error:
            raise ArtifactError(
                f"{folder}: unreadable rq-kmeans quantiser: {error}; {ANEW}"
            ) from error
