"""Growth: the data set of a run with a parent, which is the parent's with newer events and items.

What is new is taken once, into the artifact `events` of the run, so that a run that was stopped
continues with the same data whatever has arrived meanwhile.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from recsys.data.cleaning import Rules
from recsys.data.engine import Prepared, collect
from recsys.data.raw import EVENT_COLUMNS, RawData, events_table
from recsys.data.report import Report, sentence
from recsys.data.texts import each_value
from recsys.dataset import PAIR, Dataset, Disliked
from recsys.errors import DataError
from recsys.event_names import level, normalised
from recsys.progress import say

KIND = "events"
EVENTS, ITEMS = "events.parquet", "items.parquet"
ERASED_USERS, ERASED_DISLIKES = "erased_users.npy", "erased_dislikes.npy"
COLUMNS = pa.schema(
    [("type", pa.string()) if name == "behaviour" else (name, kind)
     for name, kind in EVENT_COLUMNS.items() if name != "split"] + [("stored", pa.bool_())]
)  # fmt: skip
"""New events: outside ids, unix seconds and nanoseconds, null for no rating, type, quantity or line
(as in `RawData`), and whether the store of the service has the event."""
ONE_TYPE = "purchase"  # stands for the only type of data without types
STANDING = pa.schema(
    [("available", pa.bool_()), ("available_from", pa.int64()), ("available_until", pa.int64())]
)
"""The columns of items that make a standing rule (`recsys.availability`)."""


class Erased(NamedTuple):
    """What must not be used again, by its place in the parent's data: files keep no erased id.

    Attributes:
        users: dense users whose events are left out.
        dislikes: rows of `Disliked.table`.
    """

    users: NDArray[np.integer]
    dislikes: NDArray[np.integer]

    @classmethod
    def of(cls, before: Dataset, user_ids: Collection[str]) -> Erased:
        """The places of these users in a data set."""
        ids = list(user_ids)
        disliked = [] if before.disliked is None else before.disliked.table["user_id"].to_pylist()
        return cls(
            np.flatnonzero(np.isin(before.interactions.user_ids, ids)),
            np.flatnonzero(np.isin(np.asarray(disliked, np.str_), ids)),
        )


def write(folder: Path, events: pa.Table, items: pa.Table, erased: Erased) -> None:
    """Write what is new into `folder` (the artifact `events`, being written).

    The items are as `conform` makes them.
    """
    pq.write_table(new_events(events), folder / EVENTS)
    pq.write_table(items, folder / ITEMS)
    np.save(folder / ERASED_USERS, erased.users, allow_pickle=False)
    np.save(folder / ERASED_DISLIKES, erased.dislikes, allow_pickle=False)


def new_events(table: pa.Table) -> pa.Table:
    """A table with the columns of new events; those that it lacks become null."""
    columns = [
        table[field.name] if field.name in table.column_names else pa.nulls(len(table), field.type)
        for field in COLUMNS
    ]
    return pa.table(columns, names=COLUMNS.names).cast(COLUMNS)


def read(folder: Path) -> tuple[pa.Table, Erased]:
    """The events of the artifact `events`, and what of the parent's data must not be used again.

    Raises:
        DataError: another version of this program wrote the events.
    """
    events = pq.read_table(folder / EVENTS)
    if not events.schema.equals(COLUMNS):
        raise DataError(sentence("events_of_another_version", folder=folder))
    arrays = (np.load(folder / file) for file in (ERASED_USERS, ERASED_DISLIKES))
    return events, Erased(*arrays)


def conform(items: pa.Table, schema: pa.Schema) -> pa.Table:
    """Items with the columns and types of a schema; other columns are left out, missing ones null.

    A column of availability that the schema lacks is added, because it is a standing rule: a shop
    may begin to say what is in stock. One that rules nothing out is left out.

    Raises:
        DataError: a column of another type; the message names it.
    """
    columns = []
    rules = [field for field in STANDING if field.name not in schema.names]
    schema = pa.schema([*schema, *(field for field in rules if _rules_out(items, field.name))])
    for field in schema:
        if field.name not in items.column_names:
            columns.append(pa.nulls(items.num_rows, field.type))
            continue
        try:
            columns.append(items[field.name].cast(field.type, safe=False))
        except pa.ArrowException as error:
            said = {"kind": items[field.name].type, "field": field, "error": error}
            raise DataError(sentence("another_type", **said)) from error
    return pa.table(columns, schema=schema.remove_metadata())


def _rules_out(items: pa.Table, name: str) -> bool:
    """Whether a column of availability is there, and says of an item when it is not available."""
    if name not in items.column_names:
        return False
    said = items[name].drop_null()
    return not pc.all(said).as_py() if name == "available" and len(said) else len(said) > 0


def grow(
    before: Dataset,
    folder: Path,
    rules: Rules,
    *,
    cleaned: bool = True,
    mapping: Mapping[str, Any] | None = None,
) -> Prepared:
    """The data set of the parent with what is new.

    Items of the parent keep their dense numbers; new ones follow. Types of events keep their roles.
    If the parent has no types, new events are of its only type, or negative, such as returns. What
    is new is cleaned if the parent's source was, whose report has the `mapping`.
    """
    new, erased = read(folder)
    roles = {b.name: b.role for b in before.behaviours} | dict(rules.roles)
    own = {normalised(name): name for name in roles}
    types = each_value(new["type"], lambda name: own.get(normalised(name), name), pa.string())
    new = new.set_column(new.column_names.index("type"), "type", types)
    if before.behaviours:
        names = [b.name for b in before.behaviours]
        names += [n for n in pc.unique(new["type"]).to_pylist() if n not in names]
    else:
        new, names = _with_one_type(new, roles, cleaned=cleaned)
        roles |= {name: "negative" if number else "target" for number, name in enumerate(names)}
    rules = replace(rules, roles={n: roles[n] for n in names if n in roles})
    counted = before.pieces is not None or new["quantity"].null_count < new.num_rows
    old = old_events(before, erased, typed=bool(names), counted=counted)
    raw = RawData(
        pa.concat_tables([old, _new_events(new, names, counted=counted)]),
        stacked([before.items, pq.read_table(folder / ITEMS)]),
        behaviours=tuple(names),
        report=Report(old=old.num_rows, mapping=dict(mapping or {})) if cleaned else None,
        sessions=before.sessions,
    )
    made = collect(raw.stream(), rules)
    return made._replace(dataset=_with_disliked(made.dataset, before, erased))


def is_negative(types: pa.ChunkedArray, roles: Mapping[str, str]) -> pa.ChunkedArray:
    """Whether events of these types, by their roles or else by their names, are negative."""
    names = pc.unique(types).drop_null().to_pylist()
    negative = [n for n in names if roles.get(n, "negative" if level(n) == 0 else "") == "negative"]
    return pc.is_in(types, value_set=pa.array(negative, pa.string()))


def _with_one_type(
    new: pa.Table, roles: Mapping[str, str], *, cleaned: bool
) -> tuple[pa.Table, list[str]]:
    """New events of data without types, and names of types: the first one is positive.

    There are none if no new event is negative. Data that are not cleaned have no place for negative
    events, which are left out.
    """
    negative = is_negative(new["type"], roles)
    count = pc.sum(negative).as_py() or 0
    if count and not cleaned:
        say(f"{count} new events are returns or dislikes, which these data do not have: left out")
        new, count = new.filter(pc.invert(negative)), 0
    if not count:
        return new, []
    types = pc.if_else(negative, new["type"], ONE_TYPE)
    new = new.set_column(new.column_names.index("type"), "type", types)
    return new, [ONE_TYPE, *(n for n in pc.unique(types).to_pylist() if n != ONE_TYPE)]


def old_events(before: Dataset, erased: Erased, *, typed: bool, counted: bool) -> pa.Table:
    """The events of the parent as a source has them, without erased ones."""
    rows = before.events
    keep = ~np.isin(rows.user, erased.users)
    columns: dict[str, Any] = {
        "user": before.interactions.user_ids[rows.user[keep]],
        "item": before.item_ids[rows.item[keep]],
        "timestamp": rows.timestamp[keep],
        "rating": rows.rating[keep],
    }
    below = np.zeros(len(keep), np.int32) if rows.nanosecond is None else rows.nanosecond
    columns["nanosecond"] = below[keep]
    if typed:
        types = np.zeros(len(rows.user), np.uint8) if rows.behaviour is None else rows.behaviour
        columns["behaviour"] = types[keep]
    if counted:
        columns["quantity"] = _old_pieces(before)[keep]
        columns["line"] = pa.nulls(len(columns["user"]), pa.uint64())
    return events_table(**columns)


def _old_pieces(before: Dataset) -> NDArray[np.float32]:
    """(n,) pieces of the parent's events: what is left of a pair, if known, is of its first one."""
    pieces = np.full(len(before.interactions), np.nan, np.float32)
    if before.pieces is None:
        return pieces
    events = before.interactions
    ids = events.user_ids[events.user], events.item_ids[events.item]
    rows = pa.table([*ids, np.arange(len(pieces))], [*PAIR, "row"])
    rows = rows.join(before.pieces, list(PAIR), join_type="inner")
    first = rows.group_by(list(PAIR)).aggregate([("row", "min"), ("pieces", "min")])
    pieces[rows["row"]] = 0
    pieces[first["row_min"]] = first["pieces_min"]
    return pieces


def _new_events(new: pa.Table, names: list[str], *, counted: bool) -> pa.Table:
    columns: dict[str, Any] = {name: new[name] for name in ("user", "item", "timestamp")}
    columns["rating"] = pc.fill_null(new["rating"], float("nan"))
    columns["nanosecond"] = pc.fill_null(new["nanosecond"], 0)
    if names:
        columns["behaviour"] = pc.index_in(new["type"], value_set=pa.array(names)).cast(pa.uint8())
    if counted:
        columns["quantity"] = pc.fill_null(new["quantity"], float("nan"))
        columns["line"] = new["line"]
    return events_table(**columns)


def stacked(tables: list[pa.Table]) -> pa.Table:
    """The newest description of each item in tables of items, null where it lacks a column."""
    bare = [table.replace_schema_metadata(None) for table in tables]
    both = pa.concat_tables(bare, promote_options="default")
    rows = {item_id: row for row, item_id in enumerate(both["item_id"].to_pylist())}
    return both.take(pa.array(rows.values(), pa.int64()))


def _with_disliked(dataset: Dataset, before: Dataset, erased: Erased) -> Dataset:
    """The data set with the parent's negative events, except those of items chosen since."""
    if before.disliked is None:
        return dataset
    rows = np.setdiff1d(np.arange(before.disliked.table.num_rows), erased.dislikes)
    old = before.disliked.table.take(pa.array(rows))
    events = dataset.interactions
    ids = events.user_ids[events.user], events.item_ids[events.item]
    chosen = pa.table([*ids, events.timestamp], [*PAIR, "last"])
    last = chosen.group_by(list(PAIR)).aggregate([("last", "max")])
    joined = old.join(last, list(PAIR), join_type="left outer")
    since = pc.fill_null(pc.greater(joined["last_max"], joined["timestamp"]), False)
    stands = pc.and_(joined["stands"], pc.invert(since))
    old = joined.drop_columns("last_max").drop_columns("stands").append_column("stands", stands)
    table = old.select(before.disliked.table.column_names)
    if dataset.disliked is not None:
        table = pa.concat_tables([table, dataset.disliked.table])
    return Dataset(**{**vars(dataset), "disliked": Disliked(table)})
