"""Canary: whether events of validation or test reach what the training stages learn.

The stages are run on small copies of a data set which differ in the items of one event of each
user: of a test event, a validation event, or a training event. They take the same few steps with
the same seed. A file that differs between two copies has therefore learned from the changed events.
The last copy shows that the comparison notices what training learns.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from recsys.artifacts import Workspace, read_manifest, write_artifact
from recsys.dataset import Dataset
from recsys.evaluation.audit import Finding, Verdict
from recsys.pipeline import Context
from recsys.pipeline import run as run_stages
from recsys.progress import say
from recsys.splits import LABELS

STAGES = ("sasrec", "ids", "target", "draft", "retrieval")
USERS = 300
STEPS = 12  # of each model
CHOSEN = (
    "retrieval/retrieval.json",
    "retrieval/reranker_network.npy",
    "retrieval/recent_popularity.npy",
)
"""Files that validation may change: the reranker, and a source that is kept if it helps."""
TIMED = "log.jsonl"  # has times of the clock
FAST = (
    "minutes=null",
    "parent=null",
    "recipe=null",
    *(
        f"{model}.{setting}"
        for model in ("sasrec", "target", "draft")
        for setting in (
            "min_steps=0",
            f"max_steps={STEPS}",
            "max_minutes=null",
            "evaluate_every=0",  # so that validation chooses no epoch
            "precision=float32",
        )
    ),
)
"""Settings of the copies that differ from those of the run."""

Learn = Callable[[Dataset], dict[str, str]]


def check_canary(context: Context, dataset: Dataset) -> Finding:
    """Train on the copies, and say which learned files follow the events of each split.

    Args:
        context: settings of the run; nothing is written to its folders.
        dataset: canonical data; `USERS` of its users are taken.
    """
    small = take_users(dataset, USERS, context.settings.seed)
    with tempfile.TemporaryDirectory() as folder:
        return compare(small, lambda copy: learn(context, copy, Path(folder)))


def compare(dataset: Dataset, learn: Learn) -> Finding:
    """The finding for a function from a data set to the digests of all files learned from it."""
    learned = {"base": learn(dataset)}
    for split in LABELS:
        learned[split] = learn(plant(dataset, split))
    changed = {split: _differ(learned["base"], learned[split]) for split in LABELS}
    leaked = changed["test"] + [file for file in changed["valid"] if file not in CHOSEN]
    unstable = _differ(learned["base"], learn(dataset)) if leaked else []
    leaked = sorted(set(leaked) - set(unstable))
    unmoved = sorted({_stage(f) for f in learned["base"]} - {_stage(f) for f in changed["train"]})
    decided = changed["train"] and not unstable
    verdict: Verdict = "bad" if leaked else "good" if decided else "unknown"
    meaning, advice = _sentences(leaked, unstable, unmoved, changed)
    figures = {"files": len(learned["base"]), "changed": changed, "unstable": unstable}
    return Finding("leaks", verdict, figures, meaning, advice)


def _sentences(
    leaked: list[str], unstable: list[str], unmoved: list[str], changed: dict[str, list[str]]
) -> tuple[str, str]:
    if leaked:
        return (
            f"Learned files follow events that are not training events: {', '.join(leaked)}.",
            "Figures of these models are worth nothing. Find where the stage reads its events; it "
            "must use Dataset.train_histories.",
        )
    if unstable:
        return (
            f"The same data gave different files twice: {', '.join(unstable)}.",
            "The comparison decides nothing on this machine. Give the command again with one "
            "thread (OMP_NUM_THREADS=1).",
        )
    if not changed["train"]:
        return (
            "Other training events changed no learned file, so nothing can be noticed.",
            "Give the settings of the run (--config) with which its stages train.",
        )
    chosen = f" but {', '.join(changed['valid'])}, which it chooses" if changed["valid"] else ""
    also = f" The stages {', '.join(unmoved)} do not depend on training events." if unmoved else ""
    return (
        "With other test events, all learned files are the same to the bit; with other validation "
        f"events, all{chosen}. Other training events change them.{also}",
        "",
    )


def take_users(dataset: Dataset, users: int, seed: int) -> Dataset:
    """At most `users` random users that the test split asks for, with the whole catalog."""
    asked = dataset.examples("test").users
    chosen = np.sort(np.random.default_rng(seed).permutation(asked)[:users])
    keep = np.isin(dataset.interactions.user, chosen)
    events = dataset.interactions.where(keep)
    events = replace(
        events,
        user=np.searchsorted(chosen, events.user).astype(np.int32),
        user_ids=events.user_ids[chosen],
    )
    return replace(dataset, interactions=events, split=dataset.split[keep])


def plant(dataset: Dataset, split: str) -> Dataset:
    """A copy in which the last event of each user within a split is on another item."""
    events = dataset.interactions
    rows = np.flatnonzero(dataset.split == LABELS[split])
    last = rows[np.diff(events.user[rows], append=-1) != 0]
    item = events.item.copy()
    shift = np.random.default_rng(0).integers(1, len(dataset.item_ids), len(last))
    item[last] = (item[last] + shift) % len(dataset.item_ids)
    return replace(dataset, interactions=replace(events, item=item))


def learn(context: Context, dataset: Dataset, home: Path) -> dict[str, str]:
    """Run the training stages on a data set; returns stage/file -> SHA-256 of what they wrote."""
    number = sum(1 for _ in (home / "datasets").glob("*"))
    workspace = Workspace(home, f"canary-{number}")
    with write_artifact(workspace.dataset, "dataset") as folder:
        dataset.save(folder)
    settings = context.settings.overridden([*FAST, f"name={workspace.name}"])
    say(f"canary: copy {number + 1}")
    results = run_stages(Context(settings, workspace), STAGES)
    return _digests((stage, path) for stage, (path, _) in results.items())


def _digests(artifacts: Iterable[tuple[str, Path]]) -> dict[str, str]:
    return {
        f"{stage}/{file}": digest
        for stage, path in artifacts
        for file, digest in read_manifest(path).files.items()
        if Path(file).name != TIMED
    }


def _differ(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    return sorted(file for file in one.keys() | other.keys() if one.get(file) != other.get(file))


def _stage(file: str) -> str:
    return file.split("/", 1)[0]
