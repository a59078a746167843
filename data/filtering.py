"""Which events stay: duplicates, ratings, k-core, length. Every row that goes is counted.

Works on `RawData`; knows no file format and no split.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from recsys.errors import ConfigError, DataError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from data.raw import RawData

Duplicates = Literal["keep", "drop-exact", "keep-first"]


def in_time_order(raw: RawData) -> RawData:
    """The same events by user (first appearance), then time; equal times keep the source's order.

    This is the order of `Interactions.of`, so that whatever lies beside the events stays beside.
    """
    user = _numbers(raw.events["user"])
    keys = [np.arange(len(user)), user]
    if "timestamp" in raw.events.column_names:
        keys.insert(1, raw.events["timestamp"].to_numpy())
    return replace(raw, events=raw.events.take(pa.array(np.lexsort(keys))))


def drop_duplicates(raw: RawData, policy: Duplicates) -> RawData:
    """Drop repeated rows of events in time order.

    Args:
        raw: events as `in_time_order` gives them.
        policy: `keep`; `drop-exact`, rows equal in every column (without timestamps a row's place
            is its time, so no two are); `keep-first`, one event for each user and item.
    """
    columns = raw.events.column_names
    if policy == "keep" or (policy == "drop-exact" and "timestamp" not in columns):
        return raw
    keys = ["user", "item"] if policy == "keep-first" else columns
    row = _numbers(raw.events[keys[0]])
    for name in keys[1:]:
        column = _numbers(raw.events[name])
        row = np.unique(row * (column.max(initial=0) + 1) + column, return_inverse=True)[1]
    keep = np.zeros(len(row), bool)
    keep[np.unique(row, return_index=True)[1]] = True
    return _keep(raw, keep, "duplicate_rows_dropped")


def drop_ratings_below(raw: RawData, minimum: float) -> RawData:
    """Drop events rated lower, or not rated.

    Raises:
        ConfigError: the source has no ratings.
    """
    if "rating" not in raw.events.column_names:
        raise ConfigError(f"data.min_rating={minimum}: this source has no ratings; leave it out")
    rating = raw.events["rating"].to_numpy(zero_copy_only=False)
    return _keep(raw, rating >= minimum, "rows_below_min_rating_dropped")


def k_core(raw: RawData, k: int) -> RawData:
    """Drop users and items with fewer than `k` events until all have as many.

    Items outside the core leave the catalogue too.
    """
    user, item = _numbers(raw.events["user"]), _numbers(raw.events["item"])
    alive = np.ones(len(user), bool)
    while True:
        users = np.bincount(user[alive], minlength=user.max(initial=0) + 1)
        items = np.bincount(item[alive], minlength=item.max(initial=0) + 1)
        still = alive & (users[user] >= k) & (items[item] >= k)
        if still.sum() == alive.sum():
            break
        alive = still
    raw = _keep(raw, alive, "rows_outside_core_dropped")
    in_core = pc.is_in(raw.items["item_id"], value_set=raw.events["item"].combine_chunks())
    counts = raw.counts | {"items_outside_core_dropped": pc.sum(pc.invert(in_core)).as_py() or 0}
    codes = None if raw.codes is None else raw.codes[in_core.to_numpy()]
    return replace(raw, items=raw.items.filter(in_core), codes=codes, counts=counts)


def drop_short(raw: RawData, minimum: int) -> RawData:
    """Drop users with fewer than `minimum` events; their items stay in the catalogue."""
    user = _numbers(raw.events["user"])
    enough = np.bincount(user)[user] >= minimum if len(user) else np.zeros(0, bool)
    return _keep(raw, enough, "rows_of_short_users_dropped")


def _numbers(column: pa.ChunkedArray) -> NDArray[np.int64]:
    """Distinct values numbered by first appearance."""
    encoded = column.combine_chunks().dictionary_encode("encode")
    return np.asarray(encoded.indices.to_numpy(zero_copy_only=False), np.int64)


def _keep(raw: RawData, keep: NDArray[np.bool_], reason: str) -> RawData:
    if not keep.any():
        raise DataError(f"no events are left after {reason.removesuffix('_dropped')!r}")
    counts = raw.counts | {reason: int((~keep).sum())}
    return replace(raw, events=raw.events.filter(pa.array(keep)), counts=counts)
