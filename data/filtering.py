"""Which events stay: duplicates, ratings, k-core, length. Every row that goes is counted.

The rules are written once, over arrays of dense numbers in time order (`repeated_rows`,
`near_repeats`, `core`), so that data in memory and data in parts are filtered by the same code. The
functions of `RawData` below them apply a rule to a whole source. No file format and no split is
known here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from recsys.data.raw import RawData
from recsys.errors import ConfigError, DataError

Duplicates = Literal["keep", "drop-exact", "keep-first", "drop-near"]
NEAR_S = 86_400  # what a person says of one thing within a day is one opinion


def repeated_rows(
    user: NDArray[np.int64], timestamp: NDArray[np.int64], others: Iterable[NDArray[np.int64]]
) -> NDArray[np.bool_]:
    """Whether an earlier row equals each row in every column.

    Args:
        user: (n,) ascending.
        timestamp: (n,) ascending within a user.
        others: (n,) arrays of the remaining columns.
    """
    again = np.zeros(len(user), bool)
    if not len(user):
        return again
    same = (np.diff(user) == 0) & (np.diff(timestamp) == 0)
    # Equal rows share user and time, so that they stand in one run; few rows are in a run.
    run = np.flatnonzero(np.concatenate([[False], same]) | np.concatenate([same, [False]]))
    row = np.cumsum(np.concatenate([[True], ~same]))[run]
    for column in others:
        values = np.unique(column[run], return_inverse=True)[1]
        row = np.unique(row * (values.max(initial=0) + 1) + values, return_inverse=True)[1]
    first = np.unique(row, return_index=True)[1]
    again[run] = True
    again[run[first]] = False
    return again


def later_pairs(user: NDArray[np.int64], item: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Whether an earlier row has the same user and item."""
    later = np.ones(len(user), bool)
    later[np.unique(_pairs(user, item), return_index=True)[1]] = False
    return later


def near_repeats(
    user: NDArray[np.int64],
    timestamp: NDArray[np.int64],
    what: NDArray[np.int64],
    valid: NDArray[np.bool_] | None = None,
) -> NDArray[np.bool_]:
    """Whether the same user did the same (`what`) at most `NEAR_S` before.

    Each row is compared with the one just before it of the same user and `what`; a chain of them
    is one opinion.

    Args:
        user: (n,) dense, ascending.
        timestamp: (n,) ascending within a user.
        what: (n,) dense item, or a number for what the review says.
        valid: (n,) rows that count; None for all.
    """
    rows = np.arange(len(user)) if valid is None else np.flatnonzero(valid)
    near = np.zeros(len(user), bool)
    if len(rows) < 2:
        return near
    pair = _pairs(user[rows], what[rows])
    order = np.argsort(pair, kind="stable")
    pair, rows = pair[order], rows[order]
    close = (np.diff(pair) == 0) & (np.diff(timestamp[rows]) <= NEAR_S)
    near[rows[1:][close]] = True
    return near


def core(
    blocks: Callable[[], Iterator[tuple[slice, NDArray[np.int64], NDArray[np.int64]]]],
    rows: int,
    users: int,
    items: int,
    k: int,
) -> NDArray[np.bool_]:
    """The k-core: rows that stay when users and items with fewer are dropped again and again.

    Args:
        blocks: reads the rows once more, as (their places, dense users, dense items).
        rows: how many there are.
        users: how many users.
        items: how many items.
        k: rows that each user and item of the core has.

    Returns:
        (rows,) whether each stays.
    """
    alive = np.ones(rows, bool)
    enough_user, enough_item = np.ones(users, bool), np.ones(items, bool)
    while True:
        of_user, of_item = np.zeros(users, np.int64), np.zeros(items, np.int64)
        for place, user, item in blocks():
            alive[place] &= enough_user[user] & enough_item[item]
            here = alive[place]
            of_user += np.bincount(user[here], minlength=users)
            of_item += np.bincount(item[here], minlength=items)
        before = enough_user, enough_item
        enough_user, enough_item = of_user >= k, of_item >= k
        # A user of no rows fails both times, so equal verdicts mean that no row went.
        if all(map(np.array_equal, before, (enough_user, enough_item))):
            return alive


def duplicates(
    policy: Duplicates,
    user: NDArray[np.int64],
    item: NDArray[np.int64],
    timestamp: NDArray[np.int64] | None,
    others: Iterable[NDArray[np.int64]] = (),
    content: NDArray[np.int64] | None = None,
) -> tuple[NDArray[np.bool_], dict[str, int]]:
    """Which rows a policy keeps, and counts of what was dropped or only noticed.

    Args:
        policy: `keep`; `drop-exact`, rows equal in every column (without timestamps a row's place
            is its time, so no two are); `keep-first`, one event for each user and item;
            `drop-near`, exact ones and those that `near_repeats` finds, by item or by content.
        user: (n,) dense, ascending.
        item: (n,) dense.
        timestamp: (n,) ascending within a user; None where only the order is known.
        others: (n,) further columns that exact duplicates share.
        content: (n,) a number for what each review says, 0 where it says nothing; None where the
            source has no texts.
    """
    keep = np.ones(len(user), bool)
    counts = {}
    if policy == "keep-first":
        keep = ~later_pairs(user, item)
    elif policy != "keep" and timestamp is not None:
        keep = ~repeated_rows(user, timestamp, [item, *others])
    counts["duplicate_rows_dropped"] = int((~keep).sum())
    if timestamp is None:
        return keep, counts
    rows = np.flatnonzero(keep)
    user, item, timestamp = user[rows], item[rows], timestamp[rows]
    near = near_repeats(user, timestamp, item)
    done = "dropped" if policy == "drop-near" else "kept"
    counts[f"near_duplicate_rows_{done}"] = int(near.sum())
    if content is not None:
        said = np.unique(content[rows], return_inverse=True)[1]
        copied = near_repeats(user, timestamp, said, content[rows] != 0) & ~near
        counts[f"reviews_copied_to_other_items_{done}"] = int(copied.sum())
        near |= copied
    if policy == "drop-near":
        keep[rows[near]] = False
    return keep, counts


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
    """Apply `duplicates` to events as `in_time_order` gives them; contents have served then."""
    events = raw.events
    columns = {name: _numbers(events[name]) for name in events.column_names if name != "content"}
    given = {
        name: events[name].to_numpy()
        for name in ("timestamp", "content")
        if name in events.column_names
    }
    keep, counts = duplicates(
        policy,
        columns.pop("user"),
        columns.pop("item"),
        given.get("timestamp"),
        [column for name, column in columns.items() if name != "timestamp"],
        given.get("content"),
    )
    if "content" in given:
        raw = replace(raw, events=events.drop_columns("content"))
    return replace(_keep(raw, keep, "duplicate_rows_dropped"), counts=raw.counts | counts)


def drop_ratings_below(raw: RawData, minimum: float) -> RawData:
    """Drop events rated lower, or not rated.

    Raises:
        ConfigError: the source has no ratings.
    """
    if "rating" not in raw.events.column_names:
        raise no_ratings(minimum)
    rating = raw.events["rating"].to_numpy(zero_copy_only=False)
    return _keep(raw, rating >= minimum, "rows_below_min_rating_dropped")


def no_ratings(minimum: float) -> ConfigError:
    """What to say where ratings are asked for and there are none."""
    return ConfigError(f"data.min_rating={minimum}: this source has no ratings; leave it out")


def k_core(raw: RawData, k: int) -> RawData:
    """Drop users and items with fewer than `k` events until all have as many.

    Items outside the core leave the catalog too.
    """
    user, item = _numbers(raw.events["user"]), _numbers(raw.events["item"])
    alive = core(
        lambda: iter([(slice(None), user, item)]),
        len(user),
        int(user.max(initial=-1)) + 1,
        int(item.max(initial=-1)) + 1,
        k,
    )
    raw = _keep(raw, alive, "rows_outside_core_dropped")
    in_core = pc.is_in(raw.items["item_id"], value_set=raw.events["item"].combine_chunks())
    counts = raw.counts | {"items_outside_core_dropped": pc.sum(pc.invert(in_core)).as_py() or 0}
    codes = None if raw.codes is None else raw.codes[in_core.to_numpy()]
    return replace(raw, items=raw.items.filter(in_core), codes=codes, counts=counts)


def drop_short(raw: RawData, minimum: int) -> RawData:
    """Drop users with fewer than `minimum` events; their items stay in the catalog."""
    user = _numbers(raw.events["user"])
    enough = np.bincount(user)[user] >= minimum if len(user) else np.zeros(0, bool)
    return _keep(raw, enough, "rows_of_short_users_dropped")


def nothing_left(reason: str) -> DataError:
    """What to say when a rule has dropped every row."""
    return DataError(f"no events are left after {reason.removesuffix('_dropped')!r}")


def _pairs(user: NDArray[np.int64], other: NDArray[np.int64]) -> NDArray[np.int64]:
    """One number for each pair; users ascend, and those of a part are numbered from 0."""
    from_zero = user.astype(np.int64) - (user[0] if len(user) else 0)
    return from_zero * (int(other.max(initial=0)) + 1) + other


def _numbers(column: pa.ChunkedArray) -> NDArray[np.int64]:
    """Distinct values numbered by first appearance."""
    encoded = column.combine_chunks().dictionary_encode("encode")
    return np.asarray(encoded.indices.to_numpy(zero_copy_only=False), np.int64)


def _keep(raw: RawData, keep: NDArray[np.bool_], reason: str) -> RawData:
    if not keep.any():
        raise nothing_left(reason)
    counts = raw.counts | {reason: int((~keep).sum())}
    return replace(raw, events=raw.events.filter(pa.array(keep)), counts=counts)
