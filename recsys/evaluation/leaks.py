"""Leak checks: nothing that is measured on a split may have been fitted on its events."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from recsys.dataset import Dataset
from recsys.errors import DataError
from recsys.retrieval import digest
from recsys.splits import LABELS, TRAIN, SplitName


def check_no_leak(dataset: Dataset, split: SplitName) -> None:
    """Check, event by event, that training data and histories end before the split's first event.

    Raises:
        DataError: the split has no events, or a training history or a history reaches into it.
    """
    events, num_users = dataset.interactions, len(dataset.interactions.user_ids)
    trained = np.flatnonzero(dataset.split == TRAIN)
    evaluated = np.flatnonzero(dataset.split == LABELS[split])
    if len(evaluated) == 0:
        raise DataError(
            f"the data set has no {split} events; prepare it with a split that has some"
        )
    first = np.full(num_users, len(events))
    np.minimum.at(first, events.user[evaluated], evaluated)
    if (trained >= first[events.user[trained]]).any():
        raise DataError(f"leak: a user's training events reach into the {split} split")
    if not np.array_equal(dataset.train_histories.items, events.item[trained]):
        raise DataError("leak: training histories hold events that are not labelled training")
    # The history ends before the first event of the split that may be asked for: with event types a
    # target, and of a session not its first event.
    asked = evaluated[dataset.is_asked[evaluated]]
    first = np.full(num_users, len(events))
    np.minimum.at(first, events.user[asked], asked)
    examples = dataset.examples(split)
    before = first[examples.users] - events.histories.offsets[examples.users]
    if not np.array_equal(examples.histories.lengths, before):
        raise DataError(f"leak: histories do not end where the {split} split begins")


def check_fitted_on(part: str, fitted_on: str | None, dataset: Dataset, again: str) -> list[str]:
    """DataError unless a part of a bundle was fitted on the training events and on nothing else.

    `fitted_on` is the `digest` of the histories that it was fitted on. If it is None, the result is
    a warning for the reader of the report, which names the stages to run `again`.
    """
    if fitted_on is None:
        return [
            f"The bundle does not say which events its {part} learned from. Run {again} again to "
            "have that checked."
        ]
    if fitted_on != digest(dataset.train_histories):
        raise DataError(
            f"leak: the bundle's {part} learned from other events than the data set's training "
            f"events; run {again} again before measuring"
        )
    return []


def check_counts(counts: NDArray[np.float64], dataset: Dataset) -> None:
    """DataError if retrieval has counted more events of an item than there are to train on."""
    trained = np.bincount(dataset.train_histories.items, minlength=len(dataset.item_ids))
    over = np.flatnonzero(counts > trained + 1e-6)
    if len(over):
        item = int(over[0])
        raise DataError(
            f"leak: retrieval has counted {counts[item]:g} events of item "
            f"{str(dataset.item_ids[item])!r}, but there are {trained[item]} training events (the "
            f"same holds for {len(over)} items); fit it on training events before measuring"
        )
