"""Popularity: how often items were taken, recent events counting more where times are known."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

DAY = 86_400


def decayed_counts(
    items: NDArray[np.int32],
    num_items: int,
    *,
    timestamps: NDArray[np.int64] | None = None,
    half_life_days: float | None = None,
) -> NDArray[np.float64]:
    """(items,) events of each item; one that is a half-life older than the newest counts half.

    Args:
        items: (n,) of training events; nothing else may come in.
        num_items: items of the catalog.
        timestamps: (n,) unix seconds, or None where events have only an order.
        half_life_days: None counts all events alike, as do missing timestamps.

    Raises:
        ValueError: a half-life that is not above 0.
    """
    if half_life_days is not None and not half_life_days > 0:
        raise ValueError(f"half_life_days must be above 0, got {half_life_days}")
    weights = None
    if timestamps is not None and half_life_days is not None and len(items):
        weights = 0.5 ** ((timestamps.max() - timestamps) / (half_life_days * DAY))
    return np.bincount(items, weights=weights, minlength=num_items).astype(np.float64)
