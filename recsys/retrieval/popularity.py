"""Popularity: event counts of items, with more weight on recent events if times are known."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

DAY = 86_400
RECENT_SHARE = 1 / 30  # half-life of recent popularity, as a share of the time of the events


def decayed_counts(
    items: NDArray[np.int32],
    num_items: int,
    *,
    timestamps: NDArray[np.int64] | None = None,
    half_life_days: float | None = None,
) -> NDArray[np.float64]:
    """(items,) weighted events of each item.

    Args:
        items: (n,) items of training events only.
        num_items: items of the catalog.
        timestamps: (n,) unix seconds, or None if only the order is known.
        half_life_days: an event that is so much older than the newest one counts half. With None,
            or without timestamps, all events count 1.

    Raises:
        ValueError: a half-life that is not above 0.
    """
    if half_life_days is not None and not half_life_days > 0:
        raise ValueError(f"half_life_days must be above 0, got {half_life_days}")
    weights = None
    if timestamps is not None and half_life_days is not None and len(items):
        weights = 0.5 ** ((timestamps.max() - timestamps) / (half_life_days * DAY))
    return np.bincount(items, weights=weights, minlength=num_items).astype(np.float64)
