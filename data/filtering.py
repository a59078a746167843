"""Filters events: duplicates, ratings, k-core, history length. Every dropped row is counted.

The rules work on arrays of dense numbers in time order (`repeated_rows`, `near_repeats`, `core`),
so that the same code filters data in memory and data in parts. The functions on `RawData` apply a
rule to a whole source.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from recsys.data.raw import RawData, distinct
from recsys.data.raw import numbered as numbers_of
from recsys.data.report import RULES
from recsys.errors import ConfigError, DataError

Duplicates = Literal["keep", "drop-exact", "keep-first", "drop-near"]
TIME = ("timestamp", "nanosecond")
SURE_ORDER = 0.99  # share of neighbouring rows that must be newest first
NEWEST_FIRST = (
    "The file is newest first, so events of a user at the same time count in the opposite order of "
    "the file."
)
NEAR_S = 86_400  # events of a user on one item within a day count as one opinion


def repeated_rows(
    user: NDArray[np.int64], timestamp: NDArray[np.int64], others: Iterable[NDArray[np.int64]]
) -> NDArray[np.bool_]:
    """Whether an earlier row equals each row in every column.

    Args:
        user: (n,) ascending.
        timestamp: (n,) ascending within a user.
        others: (n,) arrays of the remaining columns.
    """
    return np.asarray(first_equal(user, timestamp, others) != np.arange(len(user)))


def first_equal(
    user: NDArray[np.int64], timestamp: NDArray[np.int64], others: Iterable[NDArray[Any]]
) -> NDArray[np.int64]:
    """(n,) the place of the first row that equals each row; arguments as for `repeated_rows`."""
    places = np.arange(len(user))
    if not len(user):
        return places
    same = (np.diff(user) == 0) & (np.diff(timestamp) == 0)
    # Equal rows have the same user and time, so they are in one run; few rows are in a run.
    run = np.flatnonzero(np.concatenate([[False], same]) | np.concatenate([same, [False]]))
    row = np.cumsum(np.concatenate([[True], ~same]))[run]
    for column in others:
        values = np.unique(column[run], return_inverse=True)[1]
        row = np.unique(row * (values.max(initial=0) + 1) + values, return_inverse=True)[1]
    _, first, number = np.unique(row, return_index=True, return_inverse=True)
    places[run] = run[first[number]]
    return places


def added_pieces(
    policy: Duplicates,
    columns: Mapping[str, NDArray[Any]],
    others: Iterable[NDArray[Any]],
    pieces: NDArray[np.float32],
) -> tuple[NDArray[np.float32], int]:
    """Pieces of which the first of equal rows has those of all, and how many rows were added.

    Rows of an export with pieces that are equal are lines of orders, and each counts, although
    one event stays of them.

    Args:
        policy: as for `duplicates`; only policies that drop exact duplicates add.
        columns: `user`, `item` and, if known, `timestamp`, as for `duplicates`.
        others: (n,) further columns that exact duplicates share, also the pieces.
        pieces: (n,) of each row; NaN where they are not known, which is not added.
    """
    if policy not in ("drop-exact", "drop-near") or "timestamp" not in columns:
        return pieces, 0
    first = first_equal(columns["user"], columns["timestamp"], [columns["item"], *others])
    rows = np.bincount(first, minlength=len(first)).astype(np.float32)
    more = (rows > 1) & ~np.isnan(pieces) & (pieces != 0)
    return np.where(more, pieces * rows, pieces), int((rows[more] - 1).sum())


def later_pairs(user: NDArray[np.int64], item: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Whether an earlier row has the same user and item."""
    later = np.ones(len(user), bool)
    later[np.unique(_pairs(user, item), return_index=True)[1]] = False
    return later


def near_repeats(
    user: NDArray[np.int64],
    timestamp: NDArray[np.int64],
    key: NDArray[np.int64],
    valid: NDArray[np.bool_] | None = None,
) -> NDArray[np.bool_]:
    """Whether the user has an earlier row with the same `key` at most `NEAR_S` seconds before.

    Each row is compared with the previous row of the same user and key, so that a chain of close
    rows counts as one.

    Args:
        user: (n,) dense, ascending.
        timestamp: (n,) ascending within a user.
        key: (n,) dense item, or a number that stands for the text of a review.
        valid: (n,) rows to compare; None for all.
    """
    rows = np.arange(len(user)) if valid is None else np.flatnonzero(valid)
    near = np.zeros(len(user), bool)
    if len(rows) < 2:
        return near
    pair = _pairs(user[rows], key[rows])
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
    """The k-core: drop users and items with fewer than k rows until there are none.

    Args:
        blocks: reads all rows, as (their places, dense users, dense items).
        rows: number of rows.
        users: number of users.
        items: number of items.
        k: rows that each user and item of the core has at least.

    Returns:
        (rows,) whether each row is kept.
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
        # Equal results in two rounds mean that no row was dropped in the second.
        if all(map(np.array_equal, before, (enough_user, enough_item))):
            return alive


def duplicates(
    policy: Duplicates,
    user: NDArray[Any],
    item: NDArray[Any],
    timestamp: NDArray[np.int64] | None,
    others: Iterable[NDArray[Any]] = (),
    content: NDArray[np.int64] | None = None,
) -> tuple[NDArray[np.bool_], dict[str, int]]:
    """The rows that a policy keeps, and counts of the duplicates that were found.

    Args:
        policy: `keep`; `drop-exact` (rows equal in every column; without timestamps there are none,
            because the place of a row is its time); `keep-first` (one event for each user and
            item); or `drop-near` (exact ones, and those that `near_repeats` finds by item or text).
        user: (n,) dense, ascending.
        item: (n,) dense.
        timestamp: (n,) ascending within a user; None if only the order is known.
        others: (n,) further columns that exact duplicates share.
        content: (n,) a number for the text of each review, 0 for an empty text; None if the source
            has no texts.
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
    if len(rows) < len(keep):
        user, item, timestamp = user[rows], item[rows], timestamp[rows]
    near = near_repeats(user, timestamp, item)
    done = "dropped" if policy == "drop-near" else "kept"
    counts[f"near_duplicate_rows_{done}"] = int(near.sum())
    if content is not None:
        text = np.unique(content[rows], return_inverse=True)[1]
        copied = near_repeats(user, timestamp, text, content[rows] != 0) & ~near
        counts[f"reviews_copied_to_other_items_{done}"] = int(copied.sum())
        near |= copied
    if policy == "drop-near":
        keep[rows[near]] = False
    return keep, counts


def in_time_order(raw: RawData) -> RawData:
    """Sort events by user (first appearance), then time; equal times keep the source's order.

    In a cleaned source that is newest first, equal times have the opposite order.
    """
    events = raw.events
    keys: list[NDArray[Any]] = [_numbers(events["user"]).astype(np.int32)]
    keys += [events[name].to_numpy() for name in TIME if name in events.column_names]
    if raw.report is not None and FileOrder().add(events).newest_first:
        keys.append(-np.arange(len(events), dtype=np.int64))
        events = events.take(pa.array(np.lexsort(keys[::-1])))
        if ties(as_arrays(events)):
            raw.report.note(NEWEST_FIRST)
        return replace(raw, events=events)
    return replace(raw, events=events.take(pa.array(np.lexsort(keys[::-1]))))  # a stable sort


class FileOrder:
    """Finds out whether the rows of a source are newest first, from their parts in order."""

    def __init__(self) -> None:
        self._last: pa.Table | None = None
        # Neighbours of which the second is earlier, and later: of one user, and of any.
        self._earlier, self._later = np.zeros(2, np.int64), np.zeros(2, np.int64)

    def add(self, events: pa.Table) -> FileOrder:
        """Look at the next rows."""
        names = [name for name in TIME if name in events.column_names]
        if not names or not events.num_rows:
            return self
        rows = events.select(["user", "item", *names])
        if self._last is not None:
            rows = pa.concat_tables([self._last, rows], promote_options="permissive")
        self._last = rows.slice(rows.num_rows - 1)
        user, item = (np.diff(_numbers(rows[name])) for name in ("user", "item"))
        same = (user == 0) & (item != 0)  # a file in order of items says nothing of users
        step = np.zeros(len(same), np.int64)
        for name in names:
            times = rows[name].to_numpy()
            step = np.where(step == 0, np.sign(np.diff(times.astype(np.int64))), step)
        for place, among in enumerate((same, np.ones(len(same), bool))):
            self._earlier[place] += np.count_nonzero(step[among] < 0)
            self._later[place] += np.count_nonzero(step[among] > 0)
        return self

    @property
    def newest_first(self) -> bool:
        """Whether rows are newest first: those of each user, or if these do not show it, all."""
        for earlier, later in zip(self._earlier.tolist(), self._later.tolist(), strict=True):
            if earlier + later:
                return bool(earlier >= SURE_ORDER * (earlier + later))
        return False


def ties(columns: Mapping[str, NDArray[Any]]) -> int:
    """The number of rows that have the user and time of the row before, and another item.

    Args:
        columns: in time order.
    """
    if "timestamp" not in columns:
        return 0
    same = np.diff(columns["item"]) != 0
    for name in ("user", *TIME):
        if name in columns:
            same &= np.diff(columns[name]) == 0
    return int(np.count_nonzero(same))


def drop_duplicates(raw: RawData, policy: Duplicates) -> RawData:
    """Apply `duplicates` and `added_pieces` to events in time order, and drop the contents."""
    events = raw.events
    columns = {
        name: _numbers(events[name]).astype(np.int32)
        for name in events.column_names
        if name not in ("timestamp", "content")
    }
    given = {
        name: events[name].to_numpy()
        for name in ("timestamp", "content")
        if name in events.column_names
    }
    ids = {name: columns.pop(name) for name in ("user", "item")}
    others = list(columns.values())
    keep, counts = duplicates(
        policy, ids["user"], ids["item"], given.get("timestamp"), others, given.get("content")
    )
    if "quantity" in events.column_names:
        place, old = events.column_names.index("quantity"), events["quantity"].to_numpy()
        pieces, added = added_pieces(policy, ids | given, others, old)
        events = events.set_column(place, "quantity", pa.array(pieces))
        if raw.report is not None:
            raw.report.add("pieces_of_equal_rows_added", added)
    if "content" in given:
        events = events.drop_columns("content")
    raw = replace(raw, events=events)
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
    """The error for a minimum rating on a source without ratings."""
    return ConfigError(f"data.min_rating={minimum}: this source has no ratings; leave it out")


def k_core(raw: RawData, k: int) -> RawData:
    """Drop users and items with fewer than `k` events until all have at least `k`.

    Items outside the core are dropped from the catalog too.
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
    in_core = pc.is_in(raw.items["item_id"], value_set=distinct(raw.events["item"]))
    counts = raw.counts | {"items_outside_core_dropped": pc.sum(pc.invert(in_core)).as_py() or 0}
    codes = None if raw.codes is None else raw.codes[in_core.to_numpy()]
    return replace(raw, items=raw.items.filter(in_core), codes=codes, counts=counts)


def drop_short(raw: RawData, minimum: int) -> RawData:
    """Drop users with fewer than `minimum` events; their items remain in the catalog."""
    user = _numbers(raw.events["user"])
    enough = np.bincount(user)[user] >= minimum if len(user) else np.zeros(0, bool)
    return _keep(raw, enough, "rows_of_short_users_dropped")


def nothing_left(reason: str) -> DataError:
    """The error for a rule that drops every row."""
    rule = RULES.get(reason) or RULES.get(f"{reason}_dropped")
    why = f": {rule.found}, and are {rule.done}" if rule else ""
    why += f"; --set {rule.otherwise}" if rule and rule.otherwise else ""
    return DataError(f"no events are left after {reason.removesuffix('_dropped')!r}{why}")


def _pairs(user: NDArray[np.int64], other: NDArray[np.int64]) -> NDArray[np.int64]:
    """One number for each (user, other) pair; ascending users are renumbered from 0."""
    from_zero = user.astype(np.int64) - (user[0] if len(user) else 0)
    return from_zero * (int(other.max(initial=0)) + 1) + other


def _numbers(column: pa.ChunkedArray) -> NDArray[np.int64]:
    """Number the distinct values by first appearance."""
    return numbers_of(column)[0]


def as_arrays(events: pa.Table) -> dict[str, NDArray[Any]]:
    """The columns as arrays; users and items are numbered by first appearance."""
    return {
        name: _numbers(events[name])
        if name in ("user", "item")
        else events[name].to_numpy(zero_copy_only=False)
        for name in events.column_names
    }


def only(raw: RawData, keep: NDArray[np.bool_], reason: str) -> RawData:
    """The events to keep; `reason` is named if none is left.

    Raises:
        DataError: none is left.
    """
    if not keep.any():
        raise nothing_left(reason)
    return raw if keep.all() else replace(raw, events=raw.events.filter(pa.array(keep)))


def _keep(raw: RawData, keep: NDArray[np.bool_], reason: str) -> RawData:
    """As `only`, and count the dropped events under `reason`."""
    raw = only(raw, keep, reason)
    return replace(raw, counts=raw.counts | {reason: int((~keep).sum())})
