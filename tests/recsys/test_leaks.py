"""No file that is evaluated follows events of validation or test.

The training stages run on copies of a data set in which one event of each user is on another item:
a test event, a validation event, or a training event. They take the same few steps with the same
seed, so a file that differs between two copies has learned from the changed events. What is served
has counted all events, and its SASRec has learned from them; what is evaluated is in the folders
`trained/` of retrieval and bundle. The rules of counting pairs, which validation users choose, are
the same in all copies here.
"""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from recsys.artifacts import Workspace, read_manifest, write_artifact
from recsys.config import Settings
from recsys.dataset import Dataset
from recsys.pipeline import Context, run
from recsys.retrieval import PairRules
from recsys.splits import LABELS
from recsys.training import retrieval

STAGES = ("sasrec", "ids", "target", "draft", "retrieval", "bundle")
TRAINED = {
    "min_steps": 0, "max_steps": 3, "max_minutes": None, "evaluate_every": 0,
    "precision": "float32",
}  # fmt: skip
SMALL = {"hidden_size": 32, "intermediate_size": 64}
SETTINGS = {
    "name": "base",
    "data": {"source": "synthetic", "synthetic": {"users": 150, "items": 240}},
    "sasrec": {**TRAINED, "epochs": 1},
    "ids": {
        "method": "rq-kmeans", "levels": 3, "codebook_size": 8,
        "features": {"collaborative": "sasrec"},
    },
    "target": {
        **TRAINED, "architecture": SMALL, "prompt": {"max_items": 6, "block": 2},
        "soft_labels": 0.5, "soft_labels_from": "sasrec",
    },
    "draft": {**TRAINED, "objective": "sft", "architecture": SMALL},
}  # fmt: skip
# The reranker is fitted on validation, which also decides whether a source is kept.
CHOSEN = {
    "retrieval/retrieval.json",
    "retrieval/reranker_network.npy",
    "retrieval/recent_popularity.npy",
    "retrieval/trained/recent_popularity.npy",
}
SERVED = (
    "retrieval/retrieval.json",  # says on which events it was fitted
    "retrieval/item_item.",
    "retrieval/popularity.npy",
    "retrieval/recent_popularity.npy",
    "bundle/eval/sasrec.safetensors",
)
OF_BUNDLE = (SERVED[-1], "bundle/trained/sasrec.safetensors")  # the rest is of other stages


def planted(dataset: Dataset, split: str) -> Dataset:
    """A copy in which the last event of each user within a split is on another item."""
    events = dataset.interactions
    rows = np.flatnonzero(dataset.split == LABELS[split])
    last = rows[np.diff(events.user[rows], append=-1) != 0]
    shift = np.random.default_rng(0).integers(1, len(dataset.item_ids), len(last))
    item = events.item.copy()
    item[last] = (item[last] + shift) % len(dataset.item_ids)
    return replace(dataset, interactions=replace(events, item=item))


def learned(dataset: Dataset, home: Path, name: str) -> dict[str, str]:
    """Run the stages; returns stage/file -> SHA-256 of what they wrote."""
    workspace = Workspace(home, name)
    with write_artifact(workspace.dataset, "dataset") as folder:
        dataset.save(folder)
    results = run(Context(Settings(SETTINGS | {"name": name}), workspace), STAGES)
    digests = {
        f"{stage}/{file}": digest
        for stage, (path, _) in results.items()
        for file, digest in read_manifest(path).files.items()
        if Path(file).name != "log.jsonl"  # has times of the clock
    }
    of_stages = (*(f"{stage}/" for stage in STAGES[:-1]), *OF_BUNDLE)
    return {file: digest for file, digest in digests.items() if file.startswith(of_stages)}


def compared(home):
    """Files that differ from those of the base, by split."""
    run(Context(Settings(SETTINGS), Workspace(home, "base")), ["data"])
    dataset = Dataset.load(Workspace(home, "base").dataset)
    base = learned(dataset, home, "copy")
    found = {}
    for split in LABELS:
        other = learned(planted(dataset, split), home, split)
        assert other.keys() - CHOSEN == base.keys() - CHOSEN
        found[split] = {
            file for file in base.keys() | other.keys() if base.get(file) != other.get(file)
        }
    return found


@pytest.mark.slow
def test_what_is_learned_follows_training_events_alone(tmp_path, monkeypatch):
    """But for the reranker, which is fitted on validation events."""
    monkeypatch.setattr(retrieval, "search_rules", lambda *_: PairRules())
    changed = compared(tmp_path)
    assert {file for file in changed["test"] if not file.startswith(SERVED)} == set()
    assert {"retrieval/popularity.npy", OF_BUNDLE[0]} <= changed["test"]
    assert OF_BUNDLE[1] in changed["train"]
    assert {file for file in changed["valid"] if not file.startswith(SERVED)} <= CHOSEN
    assert "retrieval/retrieval.json" in changed["valid"]
    assert {file.split("/")[0] for file in changed["train"]} == set(STAGES)
