"""RawData: the result of every reader, before filtering and splitting. NumPy and Arrow only.

It holds two tables over outside ids, optional imported semantic IDs, and a count of each decision
that the reader took. File formats are known only to the readers.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from recsys.catalog import CODE_COLUMN
from recsys.config import section
from recsys.data.cleaning import CleanConfig
from recsys.data.report import Report, sentence
from recsys.data.time_formats import TimeUnit
from recsys.dataset import ITEM_COLUMNS
from recsys.errors import DataError

EVENT_COLUMNS = {
    "user": pa.string(),
    "item": pa.string(),
    "timestamp": pa.int64(),
    "nanosecond": pa.int32(),
    "rating": pa.float32(),
    "split": pa.uint8(),
    "behaviour": pa.uint8(),
    "quantity": pa.float32(),
    "line": pa.uint64(),
}


@section
class Columns:
    """Names of the columns of a `table` source; those that are None are recognised.

    The value `none` says that no column has the role, if the role is not needed.
    """

    user: str | None = None
    """User id, any type."""
    item: str | None = None
    """Item id, any type; in the items file too, unless `id` names another column there."""
    timestamp: str | None = None
    """The time of the event, or `file-order` if the rows are in order of time."""
    rating: str | None = None
    """A number."""
    title: str | None = None
    """In the items file."""
    text: str | None = None
    """In the items file, the description of the item."""
    behaviour: str | None = None
    """Type of the event, such as `view` or `purchase`."""
    session: str | None = None
    """Visit or order; the user, if no column holds the user."""
    clock: str | None = None
    """The time of day, if `timestamp` holds dates alone."""
    quantity: str | None = None
    """Number of pieces; a negative one is a return, whatever the type."""
    taken_back: str | None = None
    """Whether the event was returned or cancelled, or when; or `COLUMN=VALUE`, such as `Sign=-`."""
    order_status: str | None = None
    """The state of the order, such as `paid` or `refunded`."""
    id: str | None = None
    """In the items file, the item id."""
    price: str | None = None
    """In the items file, a number with or without a currency."""
    category: str | None = None
    """In the items file, a category or a path of categories."""
    available: str | None = None
    """In the items file, whether the item can be bought, or the number in stock."""
    unavailable: str | None = None
    """In the items file, whether the item cannot be bought, such as `sold_out`."""
    available_from: str | None = None
    """In the items file, the time from which it can be bought."""
    available_until: str | None = None
    """In the items file, the time until which it can be bought."""


@dataclass(frozen=True)
class ReaderConfig:
    """The configuration of a reader, which uses the fields that it needs; see `DataConfig`.

    Attributes:
        now: unix seconds of the present; later events are impossible.
        new_items: whether all items of the file `items` may be without events, as at night.
        mapping: `Report.mapping` of earlier files of the same form, which is reused; None
            recognises the columns.
    """

    path: Path
    attributes: Path | None = None
    items: Path | None = None
    index: Path | None = None
    columns: Columns = field(default_factory=Columns)
    column_names: tuple[str, ...] = ()
    time_unit: TimeUnit = "auto"
    time_zone: str = "UTC"
    day_first: bool | None = None
    clean: CleanConfig = field(default_factory=CleanConfig)
    now: float = field(default_factory=time.time)
    new_items: bool = False
    mapping: Mapping[str, Any] | None = None


class ItemCatalog(NamedTuple):
    """The items of a source as in `RawData`, and the decisions taken while they were read."""

    items: pa.Table
    codes: NDArray[np.int32] | None
    counts: dict[str, int]


@dataclass(frozen=True)
class EventStream:
    """A source that does not fit in memory: its events in parts, and then its items.

    Attributes:
        events: tables in source order, all with the same columns of `RawData.events`.
        read_items: makes the items from a table whose column `item` lists every item once, by first
            appearance.
        counts: decisions taken; complete when `events` is exhausted.
        behaviours: as in `RawData`; complete when `events` is exhausted.
        report: as in `RawData`; complete when `read_items` has returned.
        sessions: as in `RawData`.
    """

    events: Iterator[pa.Table]
    read_items: Callable[[pa.Table], ItemCatalog]
    counts: dict[str, int]
    behaviours: list[str] = field(default_factory=list)
    report: Report | None = None
    sessions: bool = False

    def gather(self) -> RawData:
        """Read the whole source into memory."""
        parts = list(self.events)
        if not parts:
            raise DataError("the source has no events")
        events = pa.concat_tables(parts)
        items, codes, counts = self.read_items(events)
        names = tuple(self.behaviours)
        return RawData(
            events, items, codes, self.counts | counts, names, self.report, self.sessions
        )


@dataclass(frozen=True)
class RawData:
    """A data set as its source has it, over outside ids.

    Attributes:
        events: `user` and `item` (string), and if the source has them
            `timestamp` (int64, unix seconds), `nanosecond` (int32, after the second; left out if
            all are 0), `rating` (float32), `split` (uint8, `recsys.splits` labels), `behaviour`
            (uint8, the place of the type in `behaviours`), `quantity` (float32: pieces bought,
            negative pieces returned, 0 for a purchase that was returned as a whole, NaN where it is
            not known) and `line` (uint64, the same where whole rows of one file are; the upper half
            is the same where orders are).
            Without timestamps the rows of a user are in order of time.
        items: `item_id`, `title`, `text` and attribute columns, in canonical order. It has every
            item of `events`, and may have items without events.
        codes: (items, L) int32 imported semantic IDs, or None.
        counts: decisions taken, by name (`items_without_metadata`, ...).
        behaviours: names of the event types, as in the source.
        report: what was found in the source and done about it; None for sources without cleaning.
        sessions: whether each user is one session of an anonymous visitor.
    """

    events: pa.Table
    items: pa.Table
    codes: NDArray[np.int32] | None = None
    counts: dict[str, int] = field(default_factory=dict)
    behaviours: tuple[str, ...] = ()
    report: Report | None = None
    sessions: bool = False

    def __post_init__(self) -> None:
        check_items(self.events["item"].unique(), self.items, self.codes)

    def stream(self) -> EventStream:
        """The same source in one part."""
        return EventStream(
            iter([self.events]),
            lambda _: ItemCatalog(self.items, self.codes, {}),
            self.counts,
            list(self.behaviours),
            self.report,
            self.sessions,
        )


def check_items(ids: pa.Array, items: pa.Table, codes: NDArray[np.int32] | None) -> None:
    """Refuse a catalog that does not describe each item of the events exactly once.

    Raises:
        DataError: the message names the item.
    """
    missing = [name for name in ITEM_COLUMNS if name not in items.column_names]
    if missing:
        raise DataError(f"items lack the columns {missing}")
    described = items["item_id"]
    if pc.count_distinct(described).as_py() != len(described):
        counts = pc.value_counts(described)
        repeated = counts.filter(pc.greater(counts.field(1), 1))
        raise DataError(f"item {repeated[0]['values'].as_py()!r} is described twice")
    unknown = ids.filter(pc.invert(pc.is_in(ids, value_set=described.combine_chunks())))
    if len(unknown):
        raise DataError(f"item {unknown[0].as_py()!r} occurs in events but not among the items")
    if codes is not None and len(codes) != items.num_rows:
        raise DataError(f"codes: {len(codes)} rows for {items.num_rows} items")


def events_table(user: Any, item: Any, **others: Any) -> pa.Table:
    """Make the table of events from array-like columns of `EVENT_COLUMNS`; None is omitted."""
    columns = {"user": user, "item": item, **others}
    names = sorted(columns, key=[*EVENT_COLUMNS].index)
    table = pa.table(
        {n: _column(columns[n], EVENT_COLUMNS[n]) for n in names if columns[n] is not None}
    )
    for name in ("user", "item"):
        _check_ids(table[name], f"events: {name}")
    return table


def _check_ids(ids: pa.ChunkedArray, where: str) -> None:
    """Refuse ids that end with NUL: NumPy drops it, so that two ids could become equal."""
    row = pc.index(pc.ends_with(ids, "\0"), True).as_py()
    if row >= 0:
        raise DataError(sentence("ends_with_nul", where=where, shown=ids[row].as_py()[:40]))


def _column(values: Any, kind: pa.DataType) -> pa.Array | pa.ChunkedArray:
    if isinstance(values, (pa.Array, pa.ChunkedArray)):
        return values if values.type == kind else pc.cast(values, kind)
    if isinstance(values, np.ndarray) and values.dtype.kind in "iu":
        return pc.cast(pa.array(values), kind)
    return pa.array(values, kind)


def describe_all(described: Iterable[str], events: pa.Table) -> tuple[list[str], int]:
    """The canonical order of items: the described ones, then the others by first appearance.

    Returns:
        item ids, and the number of them that are not `described`.
    """
    ids = dict.fromkeys(described)
    known = len(ids)
    ids.update(dict.fromkeys(events["item"].unique().to_pylist()))
    return list(ids), len(ids) - known


def items_table(
    item_ids: Sequence[str],
    titles: Mapping[str, str],
    texts: Mapping[str, str],
    attributes: Mapping[str, pa.Array],
) -> pa.Table:
    """Make the table of items. The title of an item without one is its id.

    The attributes are in the order of the ids; titles and texts are by id.

    Raises:
        DataError: an attribute has a reserved name.
    """
    reserved = sorted({*ITEM_COLUMNS, CODE_COLUMN} & set(attributes))
    if reserved:
        raise DataError(f"items: attribute {reserved[0]!r} has a reserved name; rename the column")
    table = pa.table(
        {
            "item_id": pa.array(item_ids, pa.string()),
            "title": pa.array([titles.get(i) or i for i in item_ids], pa.string()),
            "text": pa.array([texts.get(i, "") for i in item_ids], pa.string()),
            **attributes,
        }
    )
    _check_ids(table["item_id"], "items: item")
    return table
