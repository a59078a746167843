"""ItemEncoder: codes of new items, by the features and the quantiser of the existing ones.

A bundle stores the feature encoder beside the quantiser: vocabularies and projections of text and
attributes, and the prediction of collaborative features from content
(`recsys.semantic_ids.features`). Arrays are memory-mapped, and files are read when the first item
is encoded.
"""

from __future__ import annotations

import json
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from recsys.errors import ArtifactError
from recsys.semantic_ids.features import FeatureEncoder
from recsys.semantic_ids.quantizer import Quantizer, decode, squared_distances
from recsys.semantic_ids.words import Words

FILE = "encoder.json"
PLACED = "placed.npy"  # (items, L) codes that the fitted items would get if they were new


class ItemEncoder:
    """Encodes items that were added after training (`recsys.placement.ItemCoder`)."""

    def __init__(self, encoder: Path, quantizer: Path) -> None:
        """Set the folders, which are read when the first item is encoded."""
        self._encoder, self._quantizer = encoder, quantizer

    @cached_property
    def features(self) -> FeatureEncoder:
        """Encoder of item features."""
        return load(self._encoder)

    @cached_property
    def quantizer(self) -> Quantizer:
        """Quantiser of item features."""
        from recsys.semantic_ids.rqkmeans import CENTROIDS, RQKMeans

        if (self._quantizer / CENTROIDS).is_file():
            return RQKMeans.load(self._quantizer)
        from recsys.semantic_ids.rqvae import RQVAE

        return RQVAE.load(self._quantizer)

    def encode(self, items: pa.Table) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        """Codes of items, and their distances to all codes of the last level.

        Returns:
            (n, L) codes, and (n, V) squared distances of the residual of the levels above to each
            centroid of the last level.

        Raises:
            ArtifactError: the bundle's encoder or quantiser cannot be read.
        """
        features, centroids = self.features.encode(items), self.quantizer.centroids
        codes = self.quantizer.encode(features)
        rest = self.quantizer.latents(features) - decode(codes[:, :-1], centroids)
        return codes, squared_distances(rest, centroids[-1])

    def beside(self, code: int) -> NDArray[np.float32]:
        """(V,) squared distances of one code of the last level to all of them."""
        last = self.quantizer.centroids[-1]
        far: NDArray[np.float32] = squared_distances(last[code : code + 1], last)[0]
        return far


def save(encoder: FeatureEncoder, folder: Path) -> None:
    """Create `folder` and write JSON and npy files."""
    folder.mkdir(parents=True)
    for name, words in (("words", encoder.words), ("values", encoder.values)):
        if words is not None:
            text = json.dumps(words.terms, ensure_ascii=False)
            (folder / f"{name}.json").write_text(text + "\n", encoding="utf-8")
            np.save(folder / f"{name}-idf.npy", words.idf, allow_pickle=False)
            np.save(folder / f"{name}-projection.npy", words.projection, allow_pickle=False)
    np.save(folder / "prediction.npy", encoder.prediction, allow_pickle=False)
    shape = {
        "blocks": encoder.blocks,
        "weights": encoder.weights,
        "embedding_column": encoder.embedding_column,
        "numbers": encoder.numbers,
        "columns": encoder.columns,
    }
    (folder / FILE).write_text(json.dumps(shape, indent=2) + "\n", encoding="utf-8")


def load(folder: Path) -> FeatureEncoder:
    """Read what `save` wrote; ArtifactError if a file is missing or damaged."""
    try:
        shape = json.loads((folder / FILE).read_text(encoding="utf-8"))
        return FeatureEncoder(
            blocks=shape["blocks"],
            weights=shape["weights"],
            embedding_column=shape["embedding_column"],
            words=_words(folder, "words", True),
            values=_words(folder, "values", False),
            numbers={name: (mean, std) for name, (mean, std) in shape["numbers"].items()},
            columns=shape["columns"],
            prediction=_array(folder / "prediction.npy"),
        )
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise ArtifactError(f"{folder}: unreadable item encoder: {error}") from error


def _words(folder: Path, name: str, text: bool) -> Words | None:
    file = folder / f"{name}.json"
    if not file.is_file():
        return None
    terms = json.loads(file.read_text(encoding="utf-8"))
    idf, projection = (_array(folder / f"{name}-{part}.npy") for part in ("idf", "projection"))
    if not len(terms) == len(idf) == len(projection):
        raise ValueError(f"{file.name}: {len(terms)} terms for {len(projection)} rows")
    return Words(terms, idf, projection, text)


def _array(file: Path) -> NDArray[Any]:
    array: NDArray[Any] = np.load(file, mmap_mode="r", allow_pickle=False)
    return array
