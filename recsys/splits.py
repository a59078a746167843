"""Splits: labels each event as training, validation or test. NumPy only."""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray

TRAIN, VALID, TEST = 0, 1, 2
SplitName = Literal["valid", "test"]
ENOUGH_USERS = 30  # validation or test users below which a split by time says little
BASKETS = 0.2  # share of tied events from which the next event is an accident of the file
LABELS: dict[str, int] = {"train": TRAIN, "valid": VALID, "test": TEST}


def label_ends(user: NDArray[np.int32]) -> NDArray[np.uint8]:
    """Leave-one-out: each user's last event is test, the one before validation, the rest training.

    All events of a user with fewer than three are training events: there would be no history left.

    Args:
        user: (n,) users of all or some events, ascending.

    Returns:
        (n,) uint8 labels.
    """
    starts = np.flatnonzero(np.diff(user, prepend=-1))
    lengths = np.diff(starts, append=len(user))
    ends = (starts + lengths)[lengths >= 3]
    labels = np.zeros(len(user), np.uint8)
    labels[ends - 2] = VALID
    labels[ends - 1] = TEST
    return labels


def label_baskets(
    user: NDArray[np.int32],
    timestamp: NDArray[np.int64],
    nanosecond: NDArray[np.int32] | None = None,
) -> NDArray[np.uint8]:
    """`label_ends` of whole baskets: a user's events of one time have one label.

    Args:
        user: (n,) ascending.
        timestamp: (n,) ascending within a user.
        nanosecond: (n,) after the second; None for whole seconds.

    Returns:
        (n,) uint8 labels. Users with fewer than three baskets only train.
    """
    if not len(user):
        return np.zeros(0, np.uint8)
    first = np.append(True, ~_same_time(user, timestamp, nanosecond))
    return np.asarray(label_ends(user[first])[np.cumsum(first) - 1])


def tied_events(
    user: NDArray[np.int32],
    timestamp: NDArray[np.int64],
    nanosecond: NDArray[np.int32] | None = None,
) -> int:
    """How many events share their time with another event of the same user.

    The arguments are as those of `label_baskets`.
    """
    same = _same_time(user, timestamp, nanosecond)
    return int((np.append(same, False) | np.append(False, same))[: len(user)].sum())


def _same_time(
    user: NDArray[np.int32], timestamp: NDArray[np.int64], nanosecond: NDArray[np.int32] | None
) -> NDArray[np.bool_]:
    """(n - 1,) whether an event has the user and the time of the one before."""
    same = (np.diff(user) == 0) & (np.diff(timestamp) == 0)
    return np.asarray(same if nanosecond is None else same & (np.diff(nanosecond) == 0))


def label_last_targets(user: NDArray[np.int32], target: NDArray[np.bool_]) -> NDArray[np.uint8]:
    """`label_ends` where only some events are targets.

    A user's last target is test and the target before it is validation, if an event precedes that.
    Events between the two and after both belong to test, and all earlier ones to training. Those
    after the last target are in no example, but they are the newest that a service imports.

    Args:
        user: (n,) ascending.
        target: (n,) whether each event is a target.

    Returns:
        (n,) uint8 labels.
    """
    labels, rows = np.zeros(len(user), np.uint8), np.flatnonzero(target)
    last = np.diff(user[rows], append=-1) != 0  # of the user's targets
    before = np.concatenate([[False], last[:-1]]) | (np.arange(len(rows)) == 0)  # the user's first
    ends = np.flatnonzero(last & ~before)
    starts = np.searchsorted(user, user[rows[ends]])
    valid = rows[ends[rows[ends - 1] > starts] - 1]
    stops = np.searchsorted(user, user[valid], side="right")
    steps = np.zeros(
        len(user) + 1, np.int8
    )  # of each user: 1 from the validation target to the end
    np.add.at(steps, valid, 1)
    np.add.at(steps, stops, -1)
    labels[np.cumsum(steps[:-1]) > 0] = TEST
    labels[valid] = VALID
    return labels


def starts_session(user: NDArray[np.int32], sessions: bool) -> NDArray[np.bool_]:
    """(n,) whether an event is the first of a session: nothing is known before it.

    Args:
        user: (n,) ascending.
        sessions: whether users are sessions; otherwise no event is.
    """
    return np.asarray(np.diff(user, prepend=-1) != 0) & sessions


def users_to_ask(
    user: NDArray[np.int32], labels: NDArray[np.uint8], target: NDArray[np.bool_]
) -> NDArray[np.int64]:
    """The number of users with a history before a target, for validation and test.

    Args:
        user: (n,) ascending.
        labels: (n,) labels of the events.
        target: (n,) whether each event is a target.
    """
    counts = []
    for label in (VALID, TEST):
        rows = np.flatnonzero((labels == label) & target)
        first = rows[np.diff(user[rows], prepend=-1) != 0]
        counts.append(int(((first > 0) & (user[first - 1] == user[first])).sum()))
    return np.array(counts)


def dates_of_shares(timestamps: NDArray[np.int64], ratio: tuple[float, float]) -> tuple[int, int]:
    """The times at which validation and test begin, so that each split gets its share of events.

    Args:
        timestamps: (n,) unix seconds in any order, at least one.
        ratio: shares of training and validation events.

    Raises:
        ValueError: ratios out of range.
    """
    train, valid = ratio
    if not (0 < train < 1 and 0 <= valid < 1 and train + valid < 1):
        raise ValueError(f"split ratio {ratio}: want train > 0, valid >= 0, train + valid < 1")
    last = len(timestamps) - 1
    positions = [min(int(len(timestamps) * share), last) for share in (train, train + valid)]
    times = np.partition(timestamps, positions)
    return int(times[positions[0]]), int(times[positions[1]])


def label_times(timestamps: NDArray[np.int64], dates: tuple[int, int]) -> NDArray[np.uint8]:
    """Label events by the times (unix seconds) at which validation and test begin.

    Raises:
        ValueError: validation would begin after test.
    """
    if dates[0] > dates[1]:
        raise ValueError(f"split dates {dates}: validation must begin before test")
    return np.searchsorted(np.asarray(dates), timestamps, side="right").astype(np.uint8)
