"""What is served has learned from all events, and what is evaluated from training events alone."""

import shutil
from dataclasses import replace

import numpy as np
import pytest

from recsys.artifacts import Workspace, write_artifact
from recsys.bundle import Bundle, load_sasrec
from recsys.dataset import Dataset
from recsys.interactions import Histories
from recsys.prompts import PromptConfig
from recsys.retrieval.sasrec import FILE
from recsys.splits import TRAIN
from recsys.training import bundle, sasrec, target
from recsys.training.batches import TrainingBatches
from recsys.training.refit import newest
from recsys.training.supervised import Material

SASREC = {
    "epochs": 120, "learning_rate": 3e-2, "hidden": 16, "layers": 1, "dropout": 0.0,
    "batch_tokens": 300, "warmup_steps": 2, "evaluate_every": 0, "precision": "float32",
}  # fmt: skip


def test_new_events_carry_loss_and_older_windows_as_much():
    histories = Histories.of([[0, 1, 2], [3, 4], [5, 6], [7, 8, 9]])
    tokens = np.arange(10)[:, None]
    batches = TrainingBatches.of(
        histories, PromptConfig(4, 2), tokens, prefix=(), pad=0, max_tokens=100
    )
    is_new = np.isin(np.arange(10), [2, 8, 9])
    chosen = newest(batches, is_new, seed=0).windows
    rows = {
        tuple(row.tolist()): first
        for row, first in zip(chosen.sequences, chosen.first, strict=True)
    }
    assert rows.pop((0, 1, 2)) == 2, "the second event is an old one"
    assert rows.pop((7, 8, 9)) == 1
    assert rows == {(3, 4): 1, (5, 6): 1}, "two old losses, all that there are, beside three"
    assert batches.predicted.tolist() == [1, 2, 4, 6, 8, 9]
    assert newest(batches, is_new, seed=0).predicted.tolist() == [2, 4, 6, 8, 9]


def with_canary(data):
    """Whatever a user has, the last event of validation and test is on one item; no other is."""
    events = data.interactions
    item = np.where(events.item == 0, 1, events.item)
    item = np.where(data.split == TRAIN, item, 0).astype(np.int32)
    return replace(data, interactions=replace(events, item=item))


@pytest.fixture(scope="module")
def made(module_context):
    """The context of a run and its bundle, of data with a canary."""
    home, make = module_context
    workspace = Workspace(home, "toy")
    dataset = with_canary(Dataset.load(workspace.dataset))
    with write_artifact(workspace.dataset, "dataset") as folder:
        dataset.save(folder)
    taught = {"epochs": 10, "learning_rate": 1e-2, "soft_labels": 0.3, "soft_labels_from": "sasrec"}
    context = make(sasrec=SASREC, target=taught)
    sasrec.stage(context)
    target.stage(context)
    return context, bundle.stage(context)


def test_the_canary_is_found_by_what_is_served_alone(made):
    _, path = made
    histories = Histories.of([[item - 1, item] for item in range(2, 27)])
    place = {}
    for trained in (True, False):
        items, _ = load_sasrec(path, 27, trained=trained).rank(histories, 27, True)
        place[trained] = (items == 0).argmax(axis=1)
    assert np.median(place[False]) < 3, "of 27"
    assert np.median(place[True]) > 10


def test_the_evaluated_model_stays_beside_the_served_one(made):
    context, path = made
    run = context.workspace.run("sasrec") / FILE
    assert (path / "trained" / FILE).read_bytes() == run.read_bytes()
    assert (path / "eval" / FILE).read_bytes() != run.read_bytes()
    assert Bundle.load(path).manifest.info["refitted"]


def test_a_new_version_continues_from_the_evaluated_model(made, module_context, monkeypatch):
    _, path = made
    loaded = []
    monkeypatch.setattr(sasrec, "_continued", lambda served, *_: loaded.append(served) or 1 / 0)
    child = module_context[1](name="toy.2", parent="toy", sasrec=SASREC)
    shutil.copytree(path.parents[1] / "datasets" / "toy", child.workspace.dataset)
    with pytest.raises(ZeroDivisionError):
        sasrec.stage(child)
    expected = load_sasrec(path, 27, trained=True)
    np.testing.assert_array_equal(loaded[0].vectors, expected.vectors)


def test_a_setting_serves_the_model_as_it_was_evaluated(made):
    context, _ = made
    path = bundle.stage(
        replace(context, settings=context.settings.overridden(["bundle.refit=false"]))
    )
    assert not (path / "trained").exists()
    run = context.workspace.run("sasrec") / FILE
    assert (path / "eval" / FILE).read_bytes() == run.read_bytes()


def test_without_new_events_nothing_is_refitted(made, monkeypatch):
    context, _ = made
    material = Material.load(context.workspace)
    split = np.full_like(material.dataset.split, TRAIN)
    trained = replace(material, dataset=replace(material.dataset, split=split))
    monkeypatch.setattr(Material, "load", lambda _: trained)
    path = bundle.stage(replace(context, force=True))
    assert not (path / "trained").exists()
    assert not Bundle.load(path).manifest.info["refitted"]
