"""Where a shop's events and items come from: files, and tables in memory.

It only finds or writes the files that the reader `table` then reads; it knows nothing of what their
columns mean. Tables in memory are written as Parquet files to `$RECSYS_HOME/raw/NAME`, completely
or not at all.
"""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from recsys.artifacts import Workspace
from recsys.data.column_words import words
from recsys.data.grouped_rows import refuse_orders_beside_lines, refuse_returns_beside_orders
from recsys.data.opening import SUFFIXES, open_table, tables_in
from recsys.data.report import sentence
from recsys.data.returns import kind_of_file
from recsys.errors import ConfigError, DataError
from recsys.progress import say
from recsys.raw_files import find_raw

# Words in the name of a file that say what it holds.
EVENT_WORDS, ITEM_WORDS = words("files_of_events"), words("files_of_items")


@dataclass(frozen=True)
class Tables:
    """The file or folder of a shop's events, and the file that describes the items, if any."""

    events: Path
    items: Path | None = None


def name_of(source: str) -> str:
    """A plain word for the name of a run, from the name of its file or folder.

    >>> name_of("exports/Große Bestellungen.csv.gz")
    'grosse-bestellungen'
    """
    stem = Path(source).absolute().name.partition(".")[0]
    letters = unicodedata.normalize("NFKD", stem.casefold())
    ascii_only = letters.encode("ascii", "ignore").decode()
    return re.sub(r"[^a-z0-9_]+", "-", ascii_only).strip("-") or "shop"


def find_tables(events: str, items: str | None = None) -> Tables:
    """Find the files that a command names, as absolute paths.

    A folder is read as a folder of events, unless the names of its files tell the events from the
    items (`orders.csv`, `products.csv`).

    Raises:
        ConfigError: a path that does not exist, or a folder whose files cannot be told apart.
    """
    events_path = _find("EVENTS", events)
    described = items and _find("--items", items)
    if not events_path.is_dir():
        return Tables(events_path, described or None)
    if described and described.parent != events_path:
        return Tables(events_path, described)
    return _take_apart(events_path, described or None)


def _take_apart(folder: Path, named: Path | None) -> Tables:
    """Events and items of a folder, by the names of its files; the items may be `named`."""
    files = tables_in(folder)
    if not files:
        raise ConfigError(f"EVENTS: {folder} has no files of {', '.join(sorted(SUFFIXES))}")
    events = [file for file in files if _words(file) & EVENT_WORDS and file != named]
    items = [file for file in files if _words(file) & ITEM_WORDS and file not in events]
    lines = [file for file in items if _words(file) & words("orders")]  # such as order_items.csv
    items = [file for file in items if file not in lines] if named is None else [named]
    if len(lines) == len(events) == 1 and len(items) <= 1:
        both = [open_table(file) for file in (*lines, *events)]
        refuse_orders_beside_lines(both, str(items[0]) if items else "")
    if not items:
        return Tables(folder)
    back = [file for file in files if kind_of_file(file.stem) and file not in items]
    events = [f for f in events if f not in back] or [f for f in files if f not in (*items, *back)]
    if back and len(events) == len(items) == 1 and events != back:
        refuse_returns_beside_orders([open_table(f) for f in (*events, *back)], str(items[0]))
    if len(items) != 1 or len(events) != 1:
        names = ", ".join(file.name for file in files)
        raise ConfigError(sentence("which_files", folder=folder, names=names))
    ignored = [file.name for file in files if file not in (*events, *items)]
    rest = f"; not read: {', '.join(ignored)}" if ignored else ""
    say(f"events: {events[0].name}, items: {items[0].name}{rest}")
    return Tables(events[0], items[0])


def _words(file: Path) -> set[str]:
    return set(re.split(r"[^a-z]+", file.name.partition(".")[0].lower()))


def _find(option: str, path: str) -> Path:
    if "://" in path:
        raise ConfigError(sentence("no_url", option=option))
    own = Path(path).expanduser()
    existing = own if own.exists() else find_raw(own)
    if existing is None:
        raise ConfigError(sentence("no_path", option=option, path=path, here=Path.cwd()))
    return existing.absolute()


def export_tables(events: Any, items: Any | None, name: str, *, force: bool = False) -> Tables:
    """Paths as they are; tables in memory are written to the raw folder of run `name`.

    Any table that exports Arrow data is read (pandas, polars, pyarrow, DuckDB, ...). With `force`,
    it replaces one of other columns.

    Raises:
        ConfigError: neither a path nor a table, or events with other columns than those that were
            given under this name before.
        DataError: a table with values that Arrow cannot hold.
    """

    def place(part: str, table: Any) -> Path:
        if isinstance(table, (str, Path)):
            return _find(part, str(table))
        made = _as_arrow(part, table)
        if not force:
            _compare(name, part, made)
        return _write(name, part, made)

    described = None if items is None else place("items", items)
    if isinstance(events, (str, Path)):
        return find_tables(str(events), None if described is None else str(described))
    return Tables(place("events", events), described)


def _compare(name: str, part: str, made: pa.Table) -> None:
    """Refuse events of other columns than those that a run had before; tell of other changes."""
    path = _raw(name) / f"{part}.parquet"
    if not path.is_file():
        return
    before = pq.read_schema(path).names
    if part == "events" and set(before) != set(made.column_names):
        columns = [", ".join(names) for names in (before, made.column_names)]
        raise ConfigError(sentence("name_of_others", name=name, columns=columns))
    if before != made.column_names or not pq.read_table(path).equals(made):
        rows = pq.read_metadata(path).num_rows
        say(sentence("rows_replaced", part=part, new=made.num_rows, old=rows, name=name))


def _as_arrow(part: str, table: Any) -> pa.Table:
    if not hasattr(table, "__arrow_c_stream__"):
        raise ConfigError(sentence("no_table", part=part, kind=type(table).__name__))
    try:
        made = pa.table(table)
    except (pa.ArrowException, ValueError) as error:
        raise DataError(f"{part}: Arrow cannot hold this table: {error}") from error
    # The index of a pandas frame is no column of the shop, unless it has a name.
    names = [n for n in made.column_names if not re.fullmatch(r"__index_level_\d+__", n)]
    return made.select(names).replace_schema_metadata(None)


def _raw(name: str) -> Path:
    """The folder of what is written for run `name`."""
    return Workspace.of(name).home / "raw" / name


def _write(name: str, part: str, table: pa.Table) -> Path:
    """Write `part`.parquet of run `name`, completely or not at all."""
    if not table.num_rows:
        raise DataError(f"{part}: no rows")
    path = (_raw(name) / f"{part}.parquet").absolute()
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}~")
    try:
        pq.write_table(table, temporary)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    return path
