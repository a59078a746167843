"""The `ids` stage, from a canonical data set to its artifact."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from safetensors.numpy import load_file

from recsys.artifacts import read_manifest, verify, write_artifact
from recsys.config import Settings
from recsys.dataset import Dataset
from recsys.errors import ConfigError
from recsys.interactions import Interactions
from recsys.pipeline import Context
from recsys.retrieval import digest
from recsys.semantic_ids.encoder import ItemEncoder
from recsys.semantic_ids.rqkmeans import RQKMeans
from recsys.semantic_ids.rqvae import RQVAE
from recsys.splits import TRAIN, leave_one_out
from recsys.training.ids import print_report, stage

SMALL = {
    "levels": 3,
    "codebook_size": 8,
    "features": {"text_dim": 8, "collaborative_dim": 8},
    "rqvae": {"latent_dim": 4, "hidden": [16], "warmup_steps": 10, "steps": 30, "batch_size": 64},
}


def make_dataset(items=80, users=60, codes=None, seed=0):
    rng = np.random.default_rng(seed)
    item_ids = np.array([f"i{k}" for k in range(items)])
    events = [(u, k) for u in range(users) for k in rng.choice(items, 6, replace=False)]
    interactions = Interactions.of(
        [f"u{u}" for u, _ in events], item_ids[[k for _, k in events]], item_ids=item_ids
    )
    words = ["red", "blue", "wool", "steel", "garden"]
    texts = [f"{words[k % 5]} {words[k // 5 % 5]} thing" for k in range(items)]
    table = pa.table({"item_id": item_ids, "title": texts, "text": texts})
    return Dataset(interactions, leave_one_out(interactions), table, codes)


def make_context(home, dataset, monkeypatch, force=False, **ids):
    monkeypatch.setenv("RECSYS_HOME", str(home))
    context = Context.of(Settings({"name": "toy", "ids": {**SMALL, **ids}}), force=force)
    if dataset is not None:
        with write_artifact(context.workspace.dataset, "dataset") as folder:
            dataset.save(folder)
    return context


@pytest.mark.parametrize(("method", "cls"), [("rq-kmeans", RQKMeans), ("rq-vae", RQVAE)])
def test_the_artifact_holds_unique_codes_and_what_made_them(method, cls, tmp_path, monkeypatch):
    path = stage(make_context(tmp_path, make_dataset(), monkeypatch, method=method))
    info = verify(path, "ids").info
    assert info["colliding_items"] == 0
    assert info["fitted_on"] == digest(make_dataset().train_histories)
    codes = np.load(path / "codes.npy", allow_pickle=False)
    assert codes.dtype == np.int32
    assert codes.shape == (80, 3)
    assert len(np.unique(codes, axis=0)) == 80
    features = np.load(path / "features.npy", allow_pickle=False)
    quantizer = cls.load(path / "quantizer")
    np.testing.assert_array_equal(
        load_file(path / "centroids.safetensors")["centroids"], quantizer.centroids
    )
    report = json.loads((path / "report.json").read_text())
    before = quantizer.encode(features)
    assert report["moved_items"] == int((before != codes).any(axis=1).sum())
    assert report["method"] == method
    assert (path / "report.svg").stat().st_size > 1000
    # what it keeps for new items places those that it was made from much where they are
    coder = ItemEncoder(path / "item_encoder", path / "quantizer")
    placed, far = coder.encode(make_dataset().items)
    assert far.shape == (80, quantizer.centroids.shape[1])
    assert (placed[:, 0] == before[:, 0]).mean() > 3 / quantizer.centroids.shape[1]


def test_it_is_made_again_only_when_something_changed(tmp_path, monkeypatch):
    context = make_context(tmp_path, make_dataset(), monkeypatch)
    manifest = stage(context) / "manifest.json"

    def again(dataset=None, **changes):
        before = manifest.stat().st_mtime_ns, manifest.stat().st_ino
        stage(make_context(tmp_path, dataset, monkeypatch, **changes))
        return (manifest.stat().st_mtime_ns, manifest.stat().st_ino) != before

    assert not again()
    assert again(force=True)
    assert again(levels=2)
    assert again(levels=3)
    assert again(dataset=make_dataset(seed=1))


def test_the_same_seed_gives_the_same_artifact(tmp_path, monkeypatch):
    digests = [
        read_manifest(stage(make_context(tmp_path / run, make_dataset(), monkeypatch))).digest
        for run in ("a", "b")
    ]
    assert digests[0] == digests[1]


def test_test_and_validation_events_never_reach_the_ids(tmp_path, monkeypatch):
    dataset = make_dataset()
    shuffled = dataset.interactions.item.copy()
    held = dataset.split != TRAIN
    shuffled[held] = np.random.default_rng(9).permutation(shuffled[held])
    other = Dataset(
        Interactions(**{**dataset.interactions.__dict__, "item": shuffled}),
        dataset.split,
        dataset.items,
    )
    assert not np.array_equal(shuffled, dataset.interactions.item)
    codes = [
        np.load(stage(make_context(tmp_path / run, data, monkeypatch)) / "codes.npy")
        for run, data in (("a", dataset), ("b", other))
    ]
    np.testing.assert_array_equal(*codes)


def test_imported_codes_are_taken_as_they_are_collisions_and_all(tmp_path, monkeypatch, capsys):
    given = np.arange(160, dtype=np.int32).reshape(80, 2) % 37
    given[1] = given[0]
    context = make_context(tmp_path, make_dataset(codes=given), monkeypatch, method="imported")
    path = stage(context)
    np.testing.assert_array_equal(np.load(path / "codes.npy"), given)
    report = json.loads((path / "report.json").read_text())
    assert report["colliding_items"] > 0
    assert not (path / "centroids.safetensors").exists()
    assert "share their semantic ID" in capsys.readouterr().err


def test_import_without_codes_names_the_way_out(tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match=r"ids\.method: 'imported' needs .* use rq-kmeans"):
        stage(make_context(tmp_path, make_dataset(), monkeypatch, method="imported"))


def test_a_codebook_larger_than_the_catalog_is_refused(tmp_path, monkeypatch):
    context = make_context(tmp_path, make_dataset(items=20), monkeypatch, codebook_size=32)
    with pytest.raises(ConfigError, match=r"ids: codebook_size 32 .* 20 items"):
        stage(context)
    assert not context.workspace.run("ids").exists()


def test_the_report_prints_as_a_table_and_as_json(tmp_path, monkeypatch, capsys):
    path = stage(make_context(tmp_path, make_dataset(), monkeypatch))
    capsys.readouterr()
    print_report(path)
    assert "perplexity" in capsys.readouterr().out
    print_report(path, as_json=True)
    printed = json.loads(capsys.readouterr().out)
    assert printed["items"] == 80
    assert printed["seconds"] >= 0


@pytest.mark.slow
def test_beauty_gets_unique_ids_with_every_code_in_use(tmp_path, monkeypatch):
    root = Path(os.environ.get("RECSYS_DATASETS", "var/raw"))
    file = root / "s3rec-beauty" / "Beauty.txt"
    if not file.exists():
        pytest.skip(f"{file} is absent; set RECSYS_DATASETS")
    lines = [line.split() for line in file.read_text().splitlines()]
    users = [user for user, *items in lines for _ in items]
    interactions = Interactions.of(users, [item for _, *items in lines for item in items])
    ids = interactions.item_ids
    table = pa.table({"item_id": ids, "title": ids, "text": [""] * len(ids)})
    dataset = Dataset(interactions, leave_one_out(interactions), table)
    monkeypatch.setenv("RECSYS_HOME", str(tmp_path))
    settings = Settings({"name": "beauty", "ids": {"method": "rq-kmeans"}})
    context = Context.of(settings)
    with write_artifact(context.workspace.dataset, "dataset") as folder:
        dataset.save(folder)
    report = json.loads((stage(context) / "report.json").read_text())
    assert report["colliding_items"] == 0
    assert report["used_codes"] == [256] * 4
