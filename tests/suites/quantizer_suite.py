"""What every quantiser of semantic IDs promises; a quantiser gets these tests by a subclass."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file

from recsys.errors import ArtifactError


def blobs(seed: int = 0, items: int = 200, dim: int = 6) -> NDArray[np.float32]:
    """(items, dim) features: eight clusters of eight sub-clusters, with noise."""
    rng = np.random.default_rng(seed)
    coarse, fine = rng.standard_normal((8, dim)) * 4, rng.standard_normal((8, dim))
    place = rng.integers(0, 8, (items, 2))
    noise = rng.standard_normal((items, dim)) * 0.1
    return (coarse[place[:, 0]] + fine[place[:, 1]] + noise).astype(np.float32)


class QuantizerSuite:
    """Tests of one quantiser: a subclass names its class and a quick configuration."""

    quantizer: Any
    config: Any
    tensors: str  # its file of tensors

    def fit(
        self,
        features: NDArray[np.float32],
        sizes: Sequence[int] = (8, 8, 8),
        seed: int = 0,
        seconds: float | None = None,
    ) -> Any:
        return self.quantizer.fit(features, sizes, self.config, seed, seconds=seconds)

    @pytest.mark.parametrize("sizes", [[8, 8, 8], [16, 4, 2]])
    def test_every_code_is_in_use_and_explains_the_features(self, sizes: list[int]) -> None:
        features = blobs()
        quantizer = self.fit(features, sizes)
        codes = quantizer.encode(features)
        assert codes.dtype == np.int32
        assert codes.shape == (200, 3)
        assert [len(book) for book in quantizer.centroids] == sizes
        assert [len(np.unique(column)) for column in codes.T] == sizes
        width = quantizer.latents(features).shape[1]
        assert {book.shape[1] for book in quantizer.centroids} == {width}
        assert quantizer.reconstruct(codes).shape == features.shape
        variance = ((features - features.mean(axis=0)) ** 2).sum(1).mean()
        assert ((features - quantizer.reconstruct(codes)) ** 2).sum(1).mean() < 0.5 * variance

    def test_what_is_saved_is_what_is_loaded(self, tmp_path: Path) -> None:
        quantizer = self.fit(blobs(), [16, 4, 2])
        quantizer.save(tmp_path)
        again = self.quantizer.load(tmp_path)
        new = blobs(seed=1, items=5)  # items that were not there
        codes = quantizer.encode(new)
        np.testing.assert_array_equal(again.encode(new), codes)
        np.testing.assert_array_equal(again.reconstruct(codes), quantizer.reconstruct(codes))
        assert {file.suffix for file in tmp_path.iterdir()} <= {".safetensors", ".json"}

    def test_the_seed_decides_everything(self) -> None:
        """Seeds of a run have 63 bits."""
        features = blobs()
        seeds = ((1 << 63) - 1, (1 << 63) - 1, 6)
        first, second, other = (self.fit(features, seed=seed) for seed in seeds)
        np.testing.assert_array_equal(first.centroids, second.centroids)  # of equal sizes
        assert not np.array_equal(first.centroids, other.centroids)

    def test_fitting_leaves_torchs_generator_as_it_was(self) -> None:
        torch.manual_seed(11)
        expected = torch.rand(3)
        torch.manual_seed(11)
        self.fit(blobs())
        torch.testing.assert_close(torch.rand(3), expected)

    def test_more_codes_than_items_are_refused(self) -> None:
        with pytest.raises(ValueError, match=r"codebook_size 8 at level 2 .* 5 items; choose 2 <="):
            self.fit(blobs(items=5), sizes=(5, 8))

    def test_a_time_limit_changes_the_codes_only_where_it_is_too_short(self) -> None:
        features = blobs(items=400)
        free, ample, none = (
            self.fit(features, (8, 8), seconds=limit) for limit in (None, 1e6, 0.0)
        )
        np.testing.assert_array_equal(free.centroids, ample.centroids)  # of equal sizes
        assert [book.shape for book in none.centroids] == [book.shape for book in free.centroids]
        assert all(np.isfinite(book).all() for book in none.centroids)

    def test_a_folder_without_a_quantiser_is_named(self, tmp_path: Path) -> None:
        with pytest.raises(ArtifactError, match=str(tmp_path)):
            self.quantizer.load(tmp_path)
        self.fit(blobs()).save(tmp_path)
        (tmp_path / self.tensors).write_bytes(b"not a tensor")
        with pytest.raises(ArtifactError, match="unreadable"):
            self.quantizer.load(tmp_path)

    def test_another_version_is_refused_with_the_command_that_makes_it(
        self, tmp_path: Path
    ) -> None:
        """One tensor for all levels, as files had before levels could differ in size."""
        self.fit(blobs()).save(tmp_path)
        tensors = load_file(tmp_path / self.tensors)
        levels = [tensors.pop(f"centroids.{level}") for level in range(3)]
        save_file(tensors | {"centroids": torch.stack(levels)}, tmp_path / self.tensors)
        with pytest.raises(ArtifactError, match="stage `ids` of `recsys run --force` makes it"):
            self.quantizer.load(tmp_path)
