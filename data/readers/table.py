"""A shop's own export: any table of events, and optionally one of items.

The files may be delimited text, JSON lines or Parquet, plain or compressed; events may also be a
folder of such files. The columns are recognised, unless `data.columns` names them, and the rows are
cleaned; `recsys.data.report` says how.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import asdict, dataclass, field, replace
from functools import reduce
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from rich.markup import escape

from recsys.availability import FROM, UNTIL, available_items
from recsys.catalog import CODE_COLUMN
from recsys.data.cleaning import MISSING, RowCleaner
from recsys.data.columns import (
    SAMPLE_ROWS,
    Roles,
    Sample,
    ignored_availability,
    mapped,
    recognise_events,
    recognise_items,
    shortened_ids,
    unread_exclusions,
)
from recsys.data.damage import Damage
from recsys.data.item_cleaning import WHOLE, ItemCleaner
from recsys.data.opening import TableFile, as_strings, find_tables, open_table
from recsys.data.ratings import read_ratings
from recsys.data.raw import EventStream, ItemCatalog, RawData, ReaderConfig, distinct, events_table
from recsys.data.report import EXAMPLES, Report
from recsys.data.returns import (
    fill_orders,
    is_cancellation,
    pieces_of_events,
    read_order_status,
    read_pieces,
    read_taken_back,
)
from recsys.data.time_formats import TimeRules, find_zones, read_times, show_day_first
from recsys.dataset import AVAILABILITY, ITEM_COLUMNS
from recsys.errors import DataError
from recsys.event_names import level
from recsys.progress import say

MAX_TYPES = 255
NO_TYPE = "(empty)"


def files(config: ReaderConfig) -> dict[str, Path]:
    """The files by role: `interactions` (or one role per file of a folder), and `items` if given.

    Raises:
        DataError: a folder without tables.
    """
    found = {"interactions": config.path}
    if config.path.is_dir():
        found = {f"interactions/{file.name}": file for file in find_tables(config.path)}
    if config.items is not None:
        found["items"] = config.items
    return found


def read(config: ReaderConfig) -> RawData:
    """Read an export into memory.

    Raises:
        DataError: a column that cannot be recognised, or a file that is not a table.
    """
    return stream(config).gather()


def stream(config: ReaderConfig) -> EventStream:
    """Read an export part by part; the first rows show the columns.

    Raises:
        DataError: as `read`; an error in a later row when the iteration reaches it.
    """
    paths = files(config)
    report = Report()
    items = open_table(paths["items"]) if "items" in paths else None
    described = None if items is None else Sample(items.path, items.sample(SAMPLE_ROWS))
    given, known = asdict(config.columns), config.mapping
    day_first = known["day_first"] if known and config.day_first is None else config.day_first
    times = TimeRules(config.time_unit, config.time_zone, day_first, config.now)
    ours = [path for role, path in paths.items() if role != "items"]
    for explode in (True, False):
        events = [open_table(path, explode=explode) for path in ours]
        _agree(events)
        sample = Sample(events[0].path, events[0].sample(SAMPLE_ROWS))
        if known is None:
            roles = recognise_events(sample, given, described, times)
        else:
            roles = mapped(sample, given, known["events"], of_items=False)
        lists = tuple(f"{file.explode}." for file in events if file.explode)
        if not lists or any(found.column.startswith(lists) for found in roles.values()):
            break  # lines of orders; other lists, such as parameters, are no rows
    if "timestamp" not in roles:
        report.note(
            "There are no times: the rows of each user count as in order of time, events cannot be "
            "merged into steps, and the split is by each user's last events."
        )
    times = _day_first(events, roles, times)
    report.mapping |= {"events": _names(roles), "day_first": times.day_first}
    _report_columns(report, sample, roles)
    for note in unread_exclusions(sample, roles) + shortened_ids(sample, roles):
        _warn(report, note)
    others = [file for file in (*events, items) if file and file.encoding != "utf-8"]
    report.add("files_not_in_utf8", len(others), [f"{f.path.name}: {f.encoding}" for f in others])
    whole = tuple(role for role in ("user", "item") if _is_whole(sample, roles[role].column))
    reader = _EventReader(config, roles, whole, times, report)

    def read_items(found: pa.Table) -> ItemCatalog:
        ids = distinct(found["item"])
        if items is None or described is None:
            return _items(None, ids, config, report)
        before = known["items"] if known and known.get("items") else None
        mine = recognise_items(
            described, given, roles["item"].column, pa.chunked_array([ids]), times, before
        )
        report.mapping["items"] = _names(mine)
        _report_columns(report, described, mine)
        ignored = ignored_availability(described, given, mine)
        notes = unread_exclusions(described, mine) + shortened_ids(described, mine)
        for note in ([ignored] if ignored else []) + notes:
            _warn(report, note)
        damage = Damage()
        table = items.read(damage)
        damage.check(items.path, config.clean.damaged_rows)
        report.add("damaged_rows_skipped", damage.rows, damage.examples)
        cleaner = ItemCleaner(items.path, mine, config.clean, times, report)
        return _items(cleaner.clean(table), ids, config, report, items.path)

    sessions = reader.sessions == "users"
    return EventStream(
        reader.read(events), read_items, reader.counts, reader.types, report, sessions
    )


@dataclass
class _EventReader:
    """Reads events of which the columns are known.

    Attributes:
        config: of the reader.
        roles: of the columns.
        whole: roles of ids that were written as numbers with a decimal place.
        times: how times are read.
        report: is increased by what is dropped.
        counts: conversions of times.
        types: names of the event types by number, as they appear.
        last: role -> the last row read, with the state of its order.
    """

    config: ReaderConfig
    roles: Roles
    whole: tuple[str, ...]
    times: TimeRules
    report: Report
    counts: Counter[str] = field(default_factory=Counter)
    types: list[str] = field(default_factory=list)
    last: dict[str, pa.Table] = field(default_factory=dict)

    @property
    def sessions(self) -> str | None:
        """Whether sessions are the `users`, or stand for `anonymous` ones; None without any."""
        if "session" not in self.roles:
            return None
        same = self.roles["session"].column == self.roles["user"].column
        return "users" if same else "anonymous"

    def read(self, files: list[TableFile]) -> Iterator[pa.Table]:
        """Canonical events, part by part."""
        used = {found.column for found in self.roles.values()}
        left = 0
        for file in files:
            damage = Damage()
            cleaner = RowCleaner(file.path, self.config.clean, self.times, self.report)
            for batch in file.batches(used, damage):
                _check_names(batch, used, file.path)
                table = self._without_open_quotes(batch, file, damage)
                events = self._canonical(table, file.path, cleaner)
                if events.num_rows:
                    left += events.num_rows
                    yield events
            damage.check(file.path, self.config.clean.damaged_rows)
            self.report.add("damaged_rows_skipped", damage.rows, damage.examples)
            time = self.roles.get("timestamp")
            cleaner.finish(time.column if time else None)
        if not left:
            where = files[0].path if len(files) == 1 else files[0].path.parent
            reasons = self.report.in_words()
            raise DataError(f"{where}: no usable rows are left" + (reasons and f". {reasons}"))

    def _without_open_quotes(self, table: pa.Table, file: TableFile, damage: Damage) -> pa.Table:
        """Drop rows in which a quote is not closed, so that a value contains other rows."""
        if file.kind != "delimited":
            return table
        for role in ("user", "item", "timestamp"):
            if role in self.roles:
                column = table[self.roles[role].column]
                long = pc.match_substring(pc.utf8_trim_whitespace(column), "\n")
                if pc.any(long).as_py():
                    for text in column.filter(long).to_pylist():
                        damage.add(None, text, text.count("\n") + 1)
                    table = table.filter(pc.invert(long))
        return table

    def _canonical(self, table: pa.Table, path: Path, cleaner: RowCleaner) -> pa.Table:
        column = {role: table[found.column] for role, found in self.roles.items()}
        made = {role: as_strings(column[role], role, path) for role in ("user", "item")}
        if self.sessions == "anonymous":
            made["user"] = self._or_session(made["user"], column["session"], path)
        for role in self.whole:
            made[role] = pc.replace_substring_regex(made[role], r"\.0$", "")
        if "timestamp" in self.roles:
            times = column["timestamp"]
            if "clock" in column:
                parts = [as_strings(column[role], role, path) for role in ("timestamp", "clock")]
                times = pc.binary_join_element_wise(*parts, " ", null_handling="replace")
            made["timestamp"] = read_times(times, self.times, self.counts)
            zones = find_zones(times)
            self.report.add("times_with_a_zone", zones.zoned, zones.names)
            self.report.add("times_without_a_zone", zones.local)
        if "rating" in self.roles:
            made["rating"] = self._ratings(as_strings(column["rating"], "rating", path))
        types = None
        if "behaviour" in self.roles:
            types = as_strings(column["behaviour"], "behaviour", path)
        returned: list[pa.ChunkedArray] = []
        cancelled: list[pa.ChunkedArray] = []
        # Only lines of orders with a time of day are surely of one order.
        is_order = (
            types is None and "timestamp" in made and ("clock" in column or _has_clock(times))
        )
        for role, found in self.roles.items():
            kind = role.partition(" ")[0]
            if kind not in ("taken_back", "order_status"):
                continue
            said = as_strings(column[role], kind, path)
            if is_order:
                said = self._filled(role, said, made["user"], made["timestamp"])
            if kind == "taken_back":
                (cancelled if is_cancellation(found.column) else returned).append(
                    read_taken_back(said)
                )
                continue
            state = read_order_status(said)
            for name, rows in (("returned", returned), ("cancelled", cancelled)):
                rows.append(pc.fill_null(pc.equal(state, name), False))
        pieces = None
        if "quantity" in self.roles:
            texts = pc.fill_null(as_strings(column["quantity"], "quantity", path), "")
            pieces = read_pieces(texts)
            returned.append(pc.fill_null(pc.less(pieces, 0), False))
        if returned:
            back = reduce(pc.or_, returned)
            made["quantity"] = pieces_of_events(pieces, types, back)
        if cancelled:
            made["cancelled"] = pc.and_(reduce(pc.or_, cancelled), _is_positive(types))
        if returned:
            types = _with_returns(types, back)
        if types is not None:
            made["behaviour"] = self._types(types)
        rows = cleaner.clean(pa.table(made), column)
        return events_table(**{name: rows[name] for name in rows.column_names})

    def _filled(
        self, role: str, said: pa.ChunkedArray, users: pa.ChunkedArray, times: pa.ChunkedArray
    ) -> pa.ChunkedArray:
        """`fill_orders`, where the rows of an order may be divided between two parts of a file."""
        rows = pa.table({"said": said, "user": users, "time": times})
        before = self.last.get(role, rows.slice(0, 0))
        every = pa.concat_tables([before, rows])
        every = every.set_column(0, "said", fill_orders(*every.columns))
        self.last[role] = every.slice(max(0, every.num_rows - 1))
        return every["said"].slice(before.num_rows)

    def _or_session(
        self, users: pa.ChunkedArray, sessions: pa.ChunkedArray, path: Path
    ) -> pa.ChunkedArray:
        """The user of each row, or its session where there is none."""
        texts = as_strings(sessions, "session", path)
        nobody, nothing = (
            pc.is_in(pc.utf8_lower(pc.fill_null(ids, "")), value_set=MISSING)
            for ids in (users, texts)
        )
        anonymous = pc.and_(nobody, pc.invert(nothing))
        self.report.add(
            "sessions_without_user",
            pc.sum(anonymous).as_py() or 0,
            pc.unique(texts.filter(anonymous)).slice(0, EXAMPLES).to_pylist(),
        )
        return pc.if_else(anonymous, texts, users)

    def _ratings(self, texts: pa.ChunkedArray) -> pa.ChunkedArray:
        filled = pc.fill_null(pc.not_equal(texts, ""), False)
        points = read_ratings(texts)
        odd = pc.and_(filled, pc.is_null(points))
        self.report.add(
            "ratings_unreadable",
            pc.sum(odd).as_py() or 0,
            texts.filter(odd).slice(0, 3).to_pylist(),
        )
        return points

    def _types(self, texts: pa.ChunkedArray) -> pa.ChunkedArray:
        """The number of each event's type."""
        texts = pc.fill_null(pc.if_else(pc.equal(texts, ""), NO_TYPE, texts), NO_TYPE)
        encoded = texts.combine_chunks().dictionary_encode()
        for name in encoded.dictionary.to_pylist():
            if name not in self.types:
                self.types.append(name)
        if len(self.types) > MAX_TYPES:
            raise DataError(
                f"{self.config.path}: column {self.roles['behaviour'].column!r} has more than "
                f"{MAX_TYPES} values, so it is no type of event; name another with "
                "--column behaviour=NAME, or none"
            )
        numbers = [self.types.index(name) for name in encoded.dictionary.to_pylist()]
        codes = pa.array(numbers, pa.uint8()).take(encoded.indices)
        return pa.chunked_array([codes])


def _with_returns(types: pa.ChunkedArray | None, back: pa.ChunkedArray) -> pa.ChunkedArray:
    """The types of events, of which those that were taken back are returns.

    A type that is negative stays.
    """
    if types is None:
        return pc.if_else(back, "return", "purchase")
    return pc.if_else(pc.and_(back, _is_positive(types)), "return", types)


def _is_positive(types: pa.ChunkedArray | None) -> pa.ChunkedArray | pa.Scalar:
    """Whether events of these types are no negative feedback: (rows,) bool; true without types."""
    if types is None:
        return pa.scalar(True)
    positive = pa.array([n for n in pc.unique(types).to_pylist() if n and level(n) != 0])
    return pc.is_in(types, value_set=positive.cast(pa.string()))


def _has_clock(times: pa.ChunkedArray) -> bool:
    """Whether times are more than dates."""
    if not pa.types.is_string(times.type):
        return not pa.types.is_date(times.type)
    return bool(pc.any(pc.match_substring_regex(times, r":|^\d{9,}")).as_py())


def _is_whole(sample: Sample, column: str) -> bool:
    texts = sample.texts(column)
    return bool(len(texts) and pc.all(pc.match_substring_regex(texts, WHOLE)).as_py())


def _check_names(table: pa.Table, used: Collection[str], path: Path) -> None:
    """Refuse a table in which a column that is used shares its name with another."""
    for name in used:
        if len(table.schema.get_all_field_indices(name)) > 1:
            raise DataError(f"{path}: two columns are named {name!r}; rename one of them")


def _agree(files: list[TableFile]) -> None:
    """Check that all files of a folder have the same columns."""
    for file in files[1:]:
        if sorted(file.names) != sorted(files[0].names):
            raise DataError(
                f"{file.path}: this file has {', '.join(file.names)}, the first file of the folder "
                f"{', '.join(files[0].names)}; read them separately"
            )


def _day_first(files: list[TableFile], roles: Roles, times: TimeRules) -> TimeRules:
    """The rules of times, with the order of day and month that the data show."""
    if times.day_first is not None or "timestamp" not in roles:
        return times
    name = roles["timestamp"].column
    columns = (batch[name] for file in files for batch in file.batches([name]))
    first = next(columns, None)
    seen, order = (False, None) if first is None else show_day_first([first])
    if seen and order is None:
        seen, order = show_day_first(columns)
        if order is None:
            raise DataError(
                f"{files[0].path}: no value of the column {name!r} shows whether the day or the "
                "month comes first in a date like 03/04/2024; say it with --set "
                "data.day_first=true (3 April) or --set data.day_first=false (4 March)"
            )
    return replace(times, day_first=order)


def _names(roles: Roles) -> dict[str, str]:
    """Role -> name of the column."""
    return {role: found.column for role, found in roles.items()}


def _warn(report: Report, note: str) -> None:
    """Say something in the terminal and in the report."""
    report.note(note)
    say(f"[bold yellow]data[/bold yellow]: {escape(note)}")


def _report_columns(report: Report, sample: Sample, roles: Roles) -> None:
    """Show the roles before the work starts, and add them to the report."""
    mapping = ", ".join(f"{role} = {found.column}" for role, found in roles.items())
    say(f"data: columns of {sample.path.name}: {escape(mapping)}")
    for role, found in roles.items():
        values = pc.unique(sample.texts(found.column).slice(0, 100)).to_pylist()[:3]
        report.columns.append(
            {
                "file": sample.path.name,
                "role": role,
                "column": found.column,
                "why": found.why,
                "values": ", ".join(value[:40] for value in values),
            }
        )
    taken = {found.column for found in roles.values()}
    unused = [name for name in sample.table.column_names if name not in taken]
    if unused and "user" in roles:
        report.note(f"Columns of {sample.path.name} that are not used: {', '.join(unused)}.")


def _items(
    described: pa.Table | None,
    ids: pa.Array,
    config: ReaderConfig,
    report: Report,
    path: Path | None = None,
) -> ItemCatalog:
    """The items in the order of the items file, then of first appearance in the events.

    Raises:
        DataError: no event is on an item of the items file, or an attribute has a reserved name.
    """
    if described is None:
        described = pa.table({name: pa.array([], pa.string()) for name in ITEM_COLUMNS})
    missing = ids.filter(pc.invert(pc.is_in(ids, value_set=described["item_id"].combine_chunks())))
    if described.num_rows and len(missing) == len(ids) and not config.new_items:
        theirs = ", ".join(described["item_id"][:3].to_pylist())
        bare = [pc.utf8_ltrim(values, "0") for values in (ids, described["item_id"])]
        zeros = ""
        if pc.any(pc.is_in(bare[0], value_set=bare[1].combine_chunks())).as_py():
            zeros = "; without leading zeros they agree, so export both columns as text, or else "
        raise DataError(
            f"{path}: no item of the events is in this file; the events have "
            f"{', '.join(ids[:3].to_pylist())}, the file {theirs}{zeros or '; '}"
            "name the columns with --column item=NAME and --column id=NAME"
        )
    reserved = sorted({CODE_COLUMN, *AVAILABILITY} & set(described.column_names))
    if "available" in reserved and described["available"].type != pa.bool_():  # it was not read
        described = described.drop_columns("available")
        reserved.remove("available")
    _check_reserved(described, reserved)
    empty = pa.array([""] * len(missing), pa.string())
    unknown = pa.table({"item_id": missing, "title": empty, "text": empty})
    if path is not None and len(missing) and config.clean.unknown_items:
        report.add("unknown_items", len(missing), missing[:3].to_pylist())
        unknown = unknown.append_column("available", pa.array(np.zeros(len(missing), bool)))
    table = pa.concat_tables([described, unknown], promote_options="default")
    title = pc.if_else(pc.equal(table["title"], ""), table["item_id"], table["title"])
    table = table.set_column(1, "title", title)
    if "available" in table.column_names:
        place = table.column_names.index("available")
        available = pc.fill_null(table["available"], True)
        table = table.set_column(place, "available", available)
        gone = pc.invert(available)
        report.add(
            "unavailable_items", pc.sum(gone).as_py(), table["item_id"].filter(gone)[:3].to_pylist()
        )
    dates = table.select([name for name in (FROM, UNTIL) if name in table.column_names])
    within = available_items(dates, int(time.time())) if dates.num_columns else None
    if within is not None:
        outside = table["item_id"].filter(pa.array(~within))
        report.add("items_outside_dates", len(outside), outside[:3].to_pylist())
    return ItemCatalog(table.combine_chunks(), None, {"items_without_metadata": len(missing)})


def _check_reserved(table: pa.Table, reserved: list[str]) -> None:
    kinds = {"available": pa.bool_(), "available_from": pa.int64(), "available_until": pa.int64()}
    for name in reserved:
        if table[name].type != kinds.get(name):
            raise DataError(f"items: attribute {name!r} has a reserved name; rename the column")
