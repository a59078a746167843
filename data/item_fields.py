"""Fields of items in the events file, such as `Description` or `Lineitem name`.

The title, the category and the brand of an item are their most frequent values, the latest one
among equals; its price is the latest one above 0, and 0 only if it has no other.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from recsys.data.cleaning import is_no_id

FIELDS = ("title", "price", "category", "brand")
LATEST = ("price",)  # the others are the most frequent value
NEGATIVE = r"^\D*[-\x{2212}(]\D*\d|\d-$"  # prices of lines of returns, 12,90- in those of SAP
MOST_PARTS = 32  # that wait to be merged


@dataclass
class ItemFields:
    """Gathers the fields of each item while the events are read.

    Attributes:
        columns: field -> name of its column in the events.
        parts: field -> tables with `item`, `value`, `rows` and `last`, the time of the last row.
        rows: events so far, which are times where there are no others.
    """

    columns: Mapping[str, str]
    parts: dict[str, list[pa.Table]] = field(default_factory=dict)
    rows: int = 0

    def take(self, events: pa.Table) -> pa.Table:
        """Note the columns named as `FIELDS`, and return the events without them."""
        if not self.columns:
            return events
        times = pa.array(np.arange(self.rows, self.rows + events.num_rows))
        if "timestamp" in events.column_names:
            times = events["timestamp"]
        self.rows += events.num_rows
        for name in self.columns:
            part = pa.table(
                [events["item"], events[name], pa.array(np.ones(events.num_rows, np.int64)), times],
                ["item", "value", "rows", "last"],
            )
            left_out = is_no_id(part["value"])
            if name in LATEST:
                left_out = pc.or_(left_out, pc.match_substring_regex(part["value"], NEGATIVE))
            parts = self.parts.setdefault(name, [])
            parts.append(_merged(part.filter(pc.invert(left_out))))
            if len(parts) > MOST_PARTS:
                self.parts[name] = [_merged(pa.concat_tables(parts))]
        return events.drop_columns(list(self.columns))

    def texts(self, name: str) -> pa.Array:
        """The distinct values of a field."""
        parts = [part["value"] for part in self.parts.get(name, [])]
        chunks = [chunk for part in parts for chunk in part.chunks]
        return pc.unique(pa.chunked_array(chunks, pa.string()))

    def of(self, ids: pa.Array) -> dict[str, pa.Array]:
        """Field -> the value of each item; null where the events have none."""
        fields_by_role = {}
        for name, parts in self.parts.items():
            rows = _merged(pa.concat_tables(parts))
            keys = ["rows", "last"]
            if name in LATEST:
                paid = pc.match_substring_regex(rows["value"], "[1-9]")
                rows = rows.append_column("paid", pc.cast(paid, pa.int8()))
                keys = ["paid", "last", "rows"]
            rows = rows.sort_by([(key, "descending") for key in keys])
            best = rows.group_by("item", use_threads=False).aggregate([("value", "first")])
            position = pc.index_in(ids, value_set=best["item"].combine_chunks())
            fields_by_role[name] = best["value_first"].combine_chunks().take(position)
        return fields_by_role


def ids_of_names(parts: Iterable[pa.Table]) -> pa.Table:
    """`name` and `id` of the names that have one id in some rows, and none in others.

    Args:
        parts: the columns `name` and `id` of all rows.
    """
    pairs = pa.table({name: pa.array([], pa.string()) for name in ("name", "id")})
    for part in parts:
        part = part.filter(pc.invert(is_no_id(part["name"]))).select(pairs.column_names)
        part = part.set_column(1, "id", pc.if_else(is_no_id(part["id"]), None, part["id"]))
        both = pa.concat_tables([pairs, part])
        pairs = both.group_by(pairs.column_names, use_threads=False).aggregate([])
    names = pairs.group_by("name", use_threads=False)
    counted = names.aggregate([("id", "min"), ("id", "count"), ([], "count_all")])
    some = pc.and_(pc.equal(counted["id_count"], 1), pc.equal(counted["count_all"], 2))
    return counted.filter(some).select(["name", "id_min"]).rename_columns(["name", "id"])


def _merged(part: pa.Table) -> pa.Table:
    """One row for each item and value."""
    grouped = part.group_by(["item", "value"], use_threads=False)
    made = grouped.aggregate([("rows", "sum"), ("last", "max")])
    return made.select(["item", "value", "rows_sum", "last_max"]).rename_columns(part.column_names)
