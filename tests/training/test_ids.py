"""The `ids` stage, from a canonical data set to its artifact."""

import json
from dataclasses import replace

import numpy as np
import pytest
from safetensors.numpy import load_file

from recsys.artifacts import read_manifest, verify
from recsys.config import Settings
from recsys.errors import ConfigError
from recsys.retrieval import digest
from recsys.semantic_ids.encoder import PLACED, ItemEncoder
from recsys.semantic_ids.rqkmeans import RQKMeans
from recsys.semantic_ids.rqvae import RQVAE
from recsys.splits import TRAIN
from recsys.training.ids import stage
from recsys.training.settings import IdsConfig

SMALL = {
    "levels": 3,
    "codebook_size": [8, 4, 4],
    "features": {"text_dim": 8, "collaborative_dim": 8},
    "rqvae": {"latent_dim": 4, "hidden": [16], "steps": 30, "batch_size": 64},
}


@pytest.fixture
def make(make_context, shop):
    def make(dataset=None, *, force=False, **ids):
        context = make_context(force=force, ids={**SMALL, **ids})
        if dataset is not None:
            shop.write_parents(context.workspace, dataset=dataset)
        return context

    return make


@pytest.mark.parametrize(("method", "cls"), [("rq-kmeans", RQKMeans), ("rq-vae", RQVAE)])
def test_the_artifact_holds_unique_codes_and_what_made_them(method, cls, make, shop):
    path = stage(make(method=method))
    dataset = shop.chain_dataset()
    info = verify(path, "ids").info
    assert info["colliding_items"] == 0
    assert info["fitted_on"] == digest(dataset.train_histories)
    codes = np.load(path / "codes.npy", allow_pickle=False)
    assert codes.dtype == np.int32
    assert codes.shape == (shop.ITEMS, 3)
    assert len(np.unique(codes, axis=0)) == shop.ITEMS
    features = np.load(path / "features.npy", allow_pickle=False)
    quantizer = cls.load(path / "quantizer")
    assert [len(book) for book in quantizer.centroids] == [8, 4, 4]
    written = load_file(path / "centroids.safetensors")
    for level, book in enumerate(quantizer.centroids):
        np.testing.assert_array_equal(written[f"centroids.{level}"], book)
    report = json.loads((path / "report.json").read_text())
    assert report["codebook_size"] == [8, 4, 4]
    before = quantizer.encode(features)
    assert report["moved_items"] == int((before != codes).any(axis=1).sum())
    assert report["method"] == method
    # the encoder for new items gives most training items the code that they have
    coder = ItemEncoder(path / "item_encoder", path / "quantizer")
    placed, far = coder.encode(dataset.items)
    assert far.shape == (shop.ITEMS, 4)
    assert (placed[:, 0] == before[:, 0]).mean() > 3 / 8


def test_codes_that_items_would_get_if_new_are_kept_and_counted(make, shop):
    weights = {"predicted_weight": 0.5, "text_dim": 6, "collaborative_dim": 4}
    path = stage(make(features=weights))
    placed = np.load(path / "item_encoder" / PLACED, allow_pickle=False)
    codes = np.load(path / "codes.npy", allow_pickle=False)
    assert placed.shape == codes.shape
    report = json.loads((path / "report.json").read_text())
    right = sum(a[0] == b[0] for a, b in zip(placed.tolist(), codes.tolist(), strict=True))
    assert report["as_new"]["first_code"] == pytest.approx(right / shop.ITEMS, abs=1e-4)
    firsts = codes[:, 0].tolist()
    chance = sum(firsts.count(code) for code in firsts) / shop.ITEMS**2
    assert report["as_new"]["by_chance"] == pytest.approx(chance, abs=1e-4)
    blocks = report["feature_blocks"]
    assert blocks["predicted"] == blocks["collaborative"]
    # what is predicted is no vector of retrieval
    kept = np.load(path / "features.npy", allow_pickle=False).shape[1]
    assert kept == sum(blocks.values()) - blocks["predicted"]


def test_it_is_made_again_only_when_something_changed(make, shop):
    manifest = stage(make()) / "manifest.json"
    first = read_manifest(manifest.parent).digest

    def again(dataset=None, **changes):
        before = manifest.stat().st_mtime_ns, manifest.stat().st_ino
        stage(make(dataset, **changes))
        return (manifest.stat().st_mtime_ns, manifest.stat().st_ino) != before

    assert not again()
    assert again(force=True)
    assert read_manifest(manifest.parent).digest == first, "the same seed, the same artifact"
    assert again(codebook_size=8)
    assert again(codebook_size=8, levels=2)


def test_test_and_validation_events_never_reach_the_ids(make, shop):
    dataset = shop.chain_dataset()
    shuffled = dataset.interactions.item.copy()
    held = dataset.split != TRAIN
    shuffled[held] = np.random.default_rng(9).permutation(shuffled[held])
    assert not np.array_equal(shuffled, dataset.interactions.item)
    other = replace(dataset, interactions=replace(dataset.interactions, item=shuffled))
    codes = [np.load(stage(make(data)) / "codes.npy") for data in (dataset, other)]
    np.testing.assert_array_equal(*codes)


def test_imported_codes_are_taken_as_they_are_collisions_and_all(make, shop, capsys):
    given = np.arange(2 * shop.ITEMS, dtype=np.int32).reshape(-1, 2) % 37
    given[1] = given[0]
    path = stage(make(replace(shop.chain_dataset(), codes=given), method="imported"))
    np.testing.assert_array_equal(np.load(path / "codes.npy"), given)
    report = json.loads((path / "report.json").read_text())
    assert report["colliding_items"] > 0
    assert not (path / "centroids.safetensors").exists()
    assert "share their semantic ID" in capsys.readouterr().err


def test_a_codebook_larger_than_the_catalog_is_refused(make):
    with pytest.raises(ConfigError, match=r"ids: codebook_size 32 at level 2 .* 27 items"):
        stage(make(codebook_size=[8, 32, 8]))


@pytest.mark.parametrize(
    ("override", "error"),
    [
        ("[8, 4]", r"ids\.codebook_size: \[8, 4\] has 2 sizes, and levels is 3; give one size"),
        ("[8, 4, 1]", r"ids\.codebook_size: expected at least 2 codes per level, got 1"),
        ("0", r"ids\.codebook_size: expected at least 2 codes per level, got 0"),
        ("[8, 4, x]", r"ids\.codebook_size\[2\]: .*valid integer.*'x'"),
        ("many", r"ids\.codebook_size: .*valid integer.*'many'"),
    ],
)
def test_sizes_that_no_data_set_fits_are_refused_at_once(override, error):
    settings = Settings({"ids": SMALL}).overridden([f"ids.codebook_size={override}"])
    with pytest.raises(ConfigError, match=error):
        settings.section("ids", IdsConfig)
