"""A shop's own export: any table of events, and optionally one of items.

The files may be delimited text, JSON lines or Parquet, plain or compressed; events may also be a
folder of such files. The columns are recognised, unless `data.columns` names them, and the rows are
cleaned; `recsys.data.report` says how.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from rich.markup import escape

from recsys.availability import FROM, UNTIL, available_items
from recsys.catalog import CODE_COLUMN
from recsys.data import column_candidates, column_notes, columns, grouped_rows
from recsys.data.cleaning import other_ids
from recsys.data.day_orders import orders_of_days
from recsys.data.event_rows import EventReader
from recsys.data.files import Damage, NoRowsError
from recsys.data.first_rows import look_at
from recsys.data.ids import IdForms
from recsys.data.item_cleaning import ItemCleaner, ItemFields
from recsys.data.layouts import refuse_other_lines, refuse_wide_orders, refuse_without_header
from recsys.data.numbers import has_unrated
from recsys.data.opening import TableFile, command_to_utf8, find_tables, open_table
from recsys.data.raw import EventStream, ItemCatalog, ReaderConfig
from recsys.data.refunds import refunds
from recsys.data.report import Report, sentence
from recsys.data.sample import SAMPLE_ROWS, Chosen, Roles, Sample, free_columns
from recsys.data.texts import examples
from recsys.data.time_formats import TimeRules
from recsys.dataset import AVAILABILITY, ITEM_COLUMNS
from recsys.errors import DataError
from recsys.progress import say


def files(config: ReaderConfig) -> dict[str, Path]:
    """The files by role: `interactions` (or one role per file of a folder), and `items` if given.

    Raises:
        DataError: a folder without tables.
    """
    paths = {"interactions": config.path}
    if config.path.is_dir():
        paths = {f"interactions/{file.name}": file for file in find_tables(config.path)}
    if config.items is not None:
        paths["items"] = config.items
    return paths


def read(config: ReaderConfig) -> EventStream:
    """Read an export part by part; the first rows show the columns.

    Raises:
        DataError: a column that cannot be recognised, or a file that is not a table; an error in a
            later row when the iteration reaches it.
    """
    paths = files(config)
    report = Report()
    items = open_table(paths.pop("items")) if "items" in paths else None
    if items is not None:
        refuse_wide_orders(items)
    described = None if items is None else Sample(items.path, items.sample(SAMPLE_ROWS))
    chosen, known = asdict(config.columns), config.mapping
    day_second = bool(known and known.get("day_second"))
    times = TimeRules(
        config.time_unit, config.time_zone, config.day_first, config.now, day_second=day_second
    )
    events, sample, roles, of_orders = _recognised(config, list(paths.values()), described, times)
    if empty := [p.name for p in paths.values() if p not in {file.path for file in events}]:
        _warn(report, sentence("files_without_rows", names=", ".join(empty)))
    if "timestamp" not in roles:
        report.note(sentence("no_times"))
    moment = roles["timestamp"].column if "timestamp" in roles else None
    before_now = known["day_first"] if known else None
    of_file = orders_of_days(events, moment, times, report, before_now)
    orders = {rules.day_first for rules in of_file.values()}
    times = replace(times, day_first=orders.pop() if len(orders) == 1 else None)
    column_candidates.check_names(sample, {match.column for match in roles.values()})
    before_asked = (known or {}).get("unasked", ())
    unasked = column_notes.ask_about_returns(sample, roles, chosen, before_asked)
    unused = free_columns(sample, roles)
    report.mapping["events"] = {role: match.column for role, match in roles.items()}
    report.mapping |= {"unused": unused, "unasked": unasked, "day_first": times.day_first}
    report.mapping["day_second"] = next(iter(of_file.values())).day_second
    ratings = [sample.texts(roles["rating"].column)] if "rating" in roles else []
    report.mapping["unrated"] = known.get("unrated") if known else any(map(has_unrated, ratings))
    _say_forms(report, [*events, *([items] if items else [])])
    _report_columns(report, sample, roles, chosen)
    first = look_at(sample, events, roles, items, described, chosen, times, config)
    report.mapping |= {"nobody": first.nobody, "prefix": first.prefix}
    if first.totals:
        said = {"name": roles["price"].column, "pieces": roles["quantity"].column}
        _warn(report, sentence("totals", **said))
    reader = EventReader(config, roles, of_file, report, first, IdForms(report), of_orders)

    def read_items(match: pa.Table) -> ItemCatalog:
        ids = match["item"].unique()
        always = first.service.dropped.keys() - first.service.below_0
        report.mapping["no_products"] = sorted(always)  # prices of the night are looked at anew
        report.mapping["separator"], report.mapping["numbers_of_pieces"] = first.cells
        report.mapping["pieces"] = first.pieces
        if left_out := first.service.summary():
            _warn(report, left_out)
            report.no_products = dict(first.service.dropped)
        if items is None or described is None:
            return _items(reader.described(ids, times), ids, config, report)
        return _of_file(items, described, ids, reader, times)

    sessions = reader.sessions == "users"
    return EventStream(
        reader.read(events), read_items, reader.counts, reader.types, report, sessions
    )


def _recognised(
    config: ReaderConfig, paths: Sequence[Path], described: Sample | None, times: TimeRules
) -> tuple[list[TableFile], Sample, Roles, grouped_rows.OfOrders]:
    """The files of events, their first rows, the roles, and the columns of whole orders."""
    chosen, known = asdict(config.columns), config.mapping
    for explode in (True, False):
        filled = [path for path in paths if path.stat().st_size] or paths
        opened, events = list[TableFile](), list[TableFile]()
        for path in filled:
            with suppress(NoRowsError):  # an empty file, or nothing below the names of columns
                opened.append(open_table(path, explode=explode))
                if not config.column_names:
                    next(opened[-1].batches(), None)
                events.append(opened[-1])
        events = events or opened or [open_table(filled[0])]
        refuse_wide_orders(events[0])
        refuse_other_lines(events[0])
        if config.column_names:
            events = [file.with_names(config.column_names) for file in events]
        events = _agreed([_as_before(file, known) for file in events] if known else events)
        first_rows = events[0].sample(SAMPLE_ROWS)
        of_orders = grouped_rows.columns_of_orders(first_rows)
        sample = Sample(
            events[0].path, next(grouped_rows.filled_down([first_rows], of_orders, Report()))
        )
        if known is None:
            roles = columns.recognise_events(sample, chosen, described, times)
            roles |= other_ids(sample, roles, chosen)
            roles = refunds(sample, roles, chosen)
            roles = column_notes.with_lines_of_returns(sample, roles, chosen)
        else:
            roles = columns.mapped(sample, chosen, known["events"], of_items=False)
            before = known.get("unused", sample.table.column_names)
            columns.check_new_columns(sample, chosen, roles, before, times)
        lists = {file.explode for file in events if file.explode}
        if not lists or any(
            f"{m.column}.".startswith(f"{name}.") for name in lists for m in roles.values()
        ):
            break  # lines of orders; other lists, such as parameters, are no rows
    return events, sample, roles, of_orders


def _of_file(
    items: TableFile, described: Sample, ids: pa.Array, reader: EventReader, times: TimeRules
) -> ItemCatalog:
    """The items of their file, of which `described` has the first rows."""
    config, report, chosen = reader.config, reader.report, asdict(reader.config.columns)
    known = config.mapping or {}
    own = reader.roles["item"].column
    mine = columns.recognise_items(
        described, chosen, own, pa.chunked_array([ids]), times, known.get("items") or None
    )
    report.mapping["items"] = {role: match.column for role, match in mine.items()}
    _report_columns(report, described, mine, chosen)
    damage = Damage()
    table = items.read(damage)
    damage.check(items.path, config.clean.damaged_rows)
    report.add("damaged_item_rows_skipped", damage.rows, damage.examples)
    table, mine = reader.filled(table, mine, items.path)
    prices = reader.fields.texts("price")
    cleaner = ItemCleaner(items.path, mine, config.clean, times, report, reader.forms, prices)
    made = cleaner.clean(table)
    named = pa.array(sorted(reader.first.service.named), pa.string())
    made = made.filter(pc.invert(pc.is_in(made["item_id"], value_set=named)))
    return _items(made, ids, config, report, items.path, reader.fields)


def _say_forms(report: Report, files: Sequence[TableFile]) -> None:
    """Say what is not read above the tables, and which files are not in UTF-8."""
    for file in files:
        if file.above:
            lines = examples(pa.array(file.above))
            _warn(report, sentence("lines_above", name=file.path.name, lines=lines))
    others = [file for file in files if file.encoding != "utf-8"]
    report.add("files_not_in_utf8", len(others), [f"{f.path.name}: {f.encoding}" for f in others])
    for file in (file for file in others if file.encoding != "utf-16"):
        shown, pages = file.letters()
        read = ", ".join(f"{text!r} in {page}" for page, text in pages.items())
        command = command_to_utf8(file.path, file.compression, next(iter(pages), "PAGE"))
        said = {"name": file.path.name, "encoding": file.encoding, "command": command}
        said |= {"shown": shown and f", such as {shown!r}", "read": read and f" ({read})"}
        report.note(sentence("read_as", **said))


def _as_before(file: TableFile, known: Mapping[str, Any]) -> TableFile:
    """A file whose columns have the names of the first run, of which the case may differ."""
    before = {name.lower(): name for name in (*known["events"].values(), *known.get("unused", ()))}
    names = [n if n in before.values() else before.get(n.lower(), n) for n in file.names]
    return replace(file, renamed=tuple(names)) if len({*names}) == len(names) else file


def _agreed(files: list[TableFile]) -> list[TableFile]:
    """The files of a folder, all with the names of the columns of the first one.

    Their order and upper or lower case may differ.

    Raises:
        DataError: a file has other columns.
    """
    names = files[0].names
    by_key = {name.lower(): name for name in names}
    made = files[:1]
    for file in files[1:]:
        if sorted(file.names) == sorted(names):
            made.append(file)
            continue
        keys = [name.lower() for name in file.names]
        if sorted(keys) != sorted(by_key) or len(by_key) < len(names):
            refuse_without_header(Sample(file.path, file.sample(SAMPLE_ROWS)), named=False)
            grouped_rows.refuse_orders_beside_lines([files[0], file])
            grouped_rows.refuse_returns_beside_orders([files[0], file])
            said = {"own": ", ".join(file.names), "names": ", ".join(names)}
            quoted = shlex.quote(str(max(files[0], file, key=lambda f: len(f.names)).path))
            raise DataError(sentence("other_columns", path=file.path, quoted=quoted, **said))
        made.append(replace(file, renamed=tuple(by_key[key] for key in keys)))
    return made


def _warn(report: Report, note: str) -> None:
    """Say something in the terminal and in the report."""
    report.note(note)
    say(f"[bold yellow]data[/bold yellow]: {escape(note)}")


def _report_columns(report: Report, sample: Sample, roles: Roles, chosen: Chosen) -> None:
    """Show the roles before the work starts, and add them and what is not read to the report."""
    mapping = ", ".join(f"{role} = {match.column}" for role, match in roles.items())
    say(f"data: columns of {sample.path.name}: {escape(mapping)}")
    for role, match in roles.items():
        values = pc.unique(sample.texts(match.column).slice(0, 100)).to_pylist()[:3]
        shown = ", ".join(value[:40] for value in values)
        row = {"file": sample.path.name, "role": role, "column": match.column, "why": match.why}
        report.columns.append(row | {"values": shown})
    taken = {match.column for match in roles.values()}
    unused = [
        field.name + " (empty in the first rows)" * (not len(sample.texts(field.name)))
        if not pa.types.is_nested(field.type)
        else f"{field.name} (lists)"
        for field in sample.table.schema
        if field.name not in taken
    ]
    if unused and "user" in roles:
        report.note(f"Columns of {sample.path.name} that are not used: {', '.join(unused)}.")
    for note in [
        *column_notes.ignored_availability(sample, chosen, roles),
        *column_notes.unread_exclusions(sample, roles, chosen),
        *column_notes.unread_times(sample, roles),
        *column_notes.states_of_lines(sample, roles),
        *column_notes.several_currencies(sample, roles),
    ]:
        _warn(report, note)


def _items(
    described: pa.Table | None,
    ids: pa.Array,
    config: ReaderConfig,
    report: Report,
    path: Path | None = None,
    fields: ItemFields | None = None,
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
        but, own = "; ", described["item_id"].combine_chunks()
        forms = {"zeros": partial(pc.utf8_ltrim, characters="0"), "cases": pc.utf8_lower}
        for key, form in forms.items():
            if pc.any(pc.is_in(form(ids), value_set=form(own))).as_py():
                but = sentence(f"agree_without_{key}")
        said = {"ours": ", ".join(ids[:3].to_pylist()), "theirs": theirs, "but": but}
        raise DataError(sentence("no_item_of_the_events", path=path, **said))
    if "available" in described.column_names and described["available"].type != pa.bool_():
        described = described.drop_columns("available")  # it was not read
    reserved = sorted({CODE_COLUMN, *AVAILABILITY} & set(described.column_names))
    kinds = {"available": pa.bool_(), FROM: pa.int64(), UNTIL: pa.int64()}
    for name in reserved:
        if described[name].type != kinds.get(name):
            raise DataError(f"items: attribute {name!r} has a reserved name; rename the column")
    empty = pa.array([""] * len(missing), pa.string())
    titles = pc.fill_null((fields.of(missing) if fields else {}).get("title", empty), "")
    unknown = pa.table({"item_id": missing, "title": titles, "text": empty})
    if path is not None and len(missing) and config.clean.applies("unknown_items"):
        report.add("unknown_items", len(missing), missing[:3].to_pylist())
        unknown = unknown.append_column("available", pa.array(np.zeros(len(missing), bool)))
    table = pa.concat_tables([described, unknown], promote_options="default")
    title = pc.if_else(pc.equal(table["title"], ""), table["item_id"], table["title"])
    table = table.set_column(1, "title", title)
    if "available" in table.column_names:
        position = table.column_names.index("available")
        available = pc.fill_null(table["available"], True)
        table = table.set_column(position, "available", available)
        report.add_rows("unavailable_items", pc.invert(available), table["item_id"])
    dates = table.select([name for name in (FROM, UNTIL) if name in table.column_names])
    within = available_items(dates, int(time.time())) if dates.num_columns else None
    if within is not None:
        outside = table["item_id"].filter(pa.array(~within))
        report.add("items_outside_dates", len(outside), outside[:3].to_pylist())
    return ItemCatalog(table.combine_chunks(), None, {"items_without_metadata": len(missing)})
