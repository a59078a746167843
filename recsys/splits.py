"""Splits: which events train, which validate, which test. One label an event, NumPy only."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from recsys.interactions import Interactions

TRAIN, VALID, TEST = 0, 1, 2
SplitName = Literal["valid", "test"]
LABELS: dict[str, int] = {"train": TRAIN, "valid": VALID, "test": TEST}


def leave_one_out(interactions: Interactions) -> NDArray[np.uint8]:
    """Last event of each user tests, the one before validates, the rest train.

    A user with fewer than three events only trains (there would be no history to test on).

    Returns:
        (n,) uint8 labels.
    """
    lengths = np.bincount(interactions.user, minlength=len(interactions.user_ids))
    end = np.cumsum(lengths)[interactions.user]
    from_end = end - 1 - np.arange(len(interactions))
    enough = lengths[interactions.user] >= 3
    labels = np.zeros(len(interactions), np.uint8)
    labels[(from_end == 1) & enough] = VALID
    labels[(from_end == 0) & enough] = TEST
    return labels


def global_temporal(
    interactions: Interactions,
    ratio: tuple[float, float] = (0.8, 0.1),
    dates: tuple[int, int] | None = None,
) -> NDArray[np.uint8]:
    """Cut by time over all users: early events train, later ones validate, the last ones test.

    Args:
        interactions: must have real timestamps.
        ratio: shares of events that train and validate.
        dates: unix seconds at which validation and test begin; overrides `ratio`.

    Returns:
        (n,) uint8 labels; events of one moment always share a label.

    Raises:
        ValueError: order-only data, or ratios or dates out of order.
    """
    if not interactions.has_time:
        raise ValueError("a global-temporal split needs timestamps; this data set has only order")
    if not len(interactions):
        return np.zeros(0, np.uint8)
    if dates is None:
        train, valid = ratio
        if not (0 < train < 1 and 0 <= valid < 1 and train + valid < 1):
            raise ValueError(f"split ratio {ratio}: want train > 0, valid >= 0, train + valid < 1")
        times = np.sort(interactions.timestamp)
        last = len(times) - 1
        dates = (
            int(times[min(int(len(times) * train), last)]),
            int(times[min(int(len(times) * (train + valid)), last)]),
        )
    if dates[0] > dates[1]:
        raise ValueError(f"split dates {dates}: validation must begin before test")
    return np.searchsorted(np.asarray(dates), interactions.timestamp, side="right").astype(np.uint8)
