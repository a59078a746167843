"""What is served has learned from all events: SASRec, trained a little further.

The SASRec that is evaluated has never seen events of validation and test. A copy goes on with a
tenth of the learning rate, on windows that end in such events and as many losses of older windows,
for as many steps as these events are a share of all. The target and the weights of the blend stay
as they are: in a blended list, a target that was trained further gained nothing.
"""

from __future__ import annotations

import tempfile
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from recsys.config import Settings
from recsys.dataset import Dataset
from recsys.pipeline import Context
from recsys.prompts import Windows
from recsys.retrieval import SasRec
from recsys.splits import TRAIN
from recsys.training import sasrec
from recsys.training.batches import TrainingBatches
from recsys.training.settings import SasRecConfig
from recsys.training.state import Checkpoints
from recsys.training.supervised import with_labels, within_budget

RATE = 0.1  # of the first training's peak
WARMUP = 20  # steps, at most a fifth of all


def refit(context: Context, dataset: Dataset) -> SasRec:
    """The run's SASRec, trained further on the events of a data set that it has not learned from.

    There is at least one. The time limit is the share of stage `bundle`.
    """
    folder, kind = context.workspace.run(sasrec.KIND), "bundle"
    trained, is_new = SasRec.load(folder), dataset.split != TRAIN
    made, seed = context.workspace.manifest(sasrec.KIND), context.settings.seed
    names = {f.name for f in fields(SasRecConfig)}
    values = {key: value for key, value in made.config.items() if key in names}
    config = Settings({sasrec.KIND: values}, internals=True).section(sasrec.KIND, SasRecConfig)
    steps = max(1, round(float(is_new.mean()) * made.info["steps"]))
    config = replace(
        within_budget(replace(config, max_minutes=None), kind, context),
        learning_rate=RATE * config.learning_rate, warmup_steps=min(WARMUP, steps // 5),
        min_steps=steps, max_steps=steps, evaluate_every=0,
    )  # fmt: skip
    torch.manual_seed(seed)
    model = sasrec.SasRecModel(len(trained), config, None)
    sasrec.load_weights(model, trained, trained.vectors)
    everything = replace(dataset, split=np.full_like(dataset.split, TRAIN))
    batches = newest(sasrec.training_batches(everything, config, context), is_new, seed)
    batches = with_labels(batches, everything, config, sasrec.KIND, context, sasrec.LABELS)
    with tempfile.TemporaryDirectory() as scratch:
        checkpoints, name = Checkpoints(Path(scratch), {}), "sasrec, with the newest events"
        sasrec.train(model, batches, config, checkpoints, name=name, seed=seed)
    return model.frozen()


def newest(batches: TrainingBatches, is_new: NDArray[np.bool_], seed: int) -> TrainingBatches:
    """Batches over windows with new events, which alone carry loss, and as many older losses.

    Args:
        batches: over the windows of all events.
        is_new: (events,) the last ones of some users.
        seed: of the choice of older windows.
    """
    sequences, first = batches.windows.sequences, batches.windows.first
    lengths = sequences.lengths
    new = np.add.reduceat(is_new[sequences.items].astype(np.int64), sequences.offsets[:-1])
    first = np.where(new > 0, np.maximum(first, lengths - new), first)
    losses = lengths - first
    old = np.random.default_rng(seed).permutation(np.flatnonzero(new == 0))
    enough = int(np.searchsorted(np.cumsum(losses[old]), losses[new > 0].sum())) + 1
    rows = np.sort(np.concatenate([np.flatnonzero(new > 0), old[:enough]]))
    return replace(batches, windows=Windows(sequences.take(rows), first[rows]))
