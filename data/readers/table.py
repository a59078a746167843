"""Any csv, tsv or parquet file with named columns: one of events, optionally one of items.

Events may also be a folder of parquet files, which are read in the order of their names.

Events must have the columns `user` and `item`, and may have `timestamp` and `rating`. Items must
have `item`, and may have `title` and `text`; every other column is an attribute. `data.columns`
gives other names. The delimiter (`,` `;` `|` or tab) is the one that yields the columns.
"""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from recsys.data.delimited import delimited_batches, first_line, read_delimited
from recsys.data.raw import (
    Columns,
    EventStream,
    ItemCatalog,
    RawData,
    ReaderConfig,
    describe_all,
    events_table,
    items_table,
)
from recsys.data.times import unix_seconds
from recsys.errors import DataError

DELIMITERS = (",", "\t", ";", "|")
BATCH = 1 << 20  # rows read at a time from a parquet file


def files(config: ReaderConfig) -> dict[str, Path]:
    """The files by role: `interactions` (or one role per file of a folder), and `items` if given.

    Raises:
        DataError: a folder without parquet files.
    """
    found = {"interactions": config.path}
    if config.path.is_dir():
        inside = sorted(config.path.glob("*.parquet"))
        if not inside:
            raise DataError(f"{config.path}: the folder has no *.parquet files")
        found = {f"interactions/{file.name}": file for file in inside}
    if config.items is not None:
        found["items"] = config.items
    return found


def read(config: ReaderConfig) -> RawData:
    """Read tables with named columns.

    Raises:
        DataError: a missing column, a value of the wrong type, or a file that is not a table.
    """
    paths, columns = files(config), config.columns
    counts: Counter[str] = Counter()
    needed, types = (columns.user, columns.item), {columns.rating: pa.float32()}
    tables = [
        _events(_read(path, needed, types), 0, config, path, counts)
        for role, path in paths.items()
        if role != "items"
    ]
    _agree(tables, config.path)
    events = pa.concat_tables(tables)
    catalog = _catalog(paths.get("items"), columns, events)
    return RawData(events, catalog.items, counts=dict(counts) | catalog.counts)


def stream(config: ReaderConfig) -> EventStream:
    """Read events that do not fit in memory; the first megabytes of a csv determine the types.

    Raises:
        DataError: as `read`, when the iteration reaches the error.
    """
    paths = files(config)
    counts: Counter[str] = Counter()

    def events() -> Iterator[pa.Table]:
        for role, path in paths.items():
            if role == "items":
                continue
            row = 0
            for batch in _batches(path, config.columns):
                table = _events(batch, row, config, path, counts)
                row += batch.num_rows
                yield table

    return EventStream(
        events(), lambda found: _catalog(paths.get("items"), config.columns, found), counts
    )


def _events(
    table: pa.Table, first: int, config: ReaderConfig, path: Path, counts: Counter[str]
) -> pa.Table:
    """Canonical events of a table whose first row is row `first` of the file."""
    columns = config.columns
    _check_once(path, table, (columns.timestamp, columns.rating))
    read = {"user": table[columns.user], "item": table[columns.item]}
    if columns.timestamp in table.column_names:
        read["timestamp"] = unix_seconds(
            table[columns.timestamp],
            columns.timestamp,
            path,
            (first + 1).__add__,
            config.time_unit,
            counts,
        )
    if columns.rating in table.column_names:
        read["rating"] = _cast(table, columns.rating, pa.float32(), path)
    rows, dropped = _with_ids(pa.table(read), ("user", "item"), "rows_without_user_or_item_dropped")
    counts.update(dropped)
    return events_table(**{name: rows[name] for name in rows.column_names})


def _agree(tables: list[pa.Table], path: Path) -> None:
    """Check that all files of a folder have the same columns."""
    for table in tables[1:]:
        if table.column_names != tables[0].column_names:
            raise DataError(
                f"{path}: one file has {', '.join(table.column_names)}, the first "
                f"{', '.join(tables[0].column_names)}; read them separately"
            )


def _catalog(path: Path | None, columns: Columns, events: pa.Table) -> ItemCatalog:
    """The items of the items file, then those that only occur in events."""
    described: pa.Table | None = None
    counts: dict[str, int] = {}
    if path is not None:
        described = _read(path, (columns.item,), {})
        _check_once(path, described, described.column_names)
        described, counts = _with_ids(described, (columns.item,), "item_rows_without_id_dropped")
        first = _first_of_each(described[columns.item])
        counts["repeated_item_rows_dropped"] = described.num_rows - len(first)
        described = described.take(pa.array(first))
    items, counts["items_without_metadata"] = _items(described, columns, events)
    return ItemCatalog(items, None, counts)


def _read(path: Path, needed: tuple[str, ...], types: dict[str, pa.DataType]) -> pa.Table:
    """Read the table in a file; the columns `needed` are ids and are read as strings."""
    types = types | dict.fromkeys(needed, pa.string())
    if path.suffix == ".parquet":
        try:
            table = pq.read_table(path)
        except (pa.ArrowInvalid, OSError) as error:
            raise DataError(f"{path}: not a parquet file: {error}") from error
        _check_header(path, table.column_names, needed)
    else:
        table = read_delimited(path, _delimiter(path, needed)[0], types=types)
        _check_header(path, table.column_names, needed)  # a quoted name may contain a newline
    if not table.num_rows:
        raise DataError(f"{path}: no rows in it")
    return table


def _batches(path: Path, columns: Columns) -> Iterator[pa.Table]:
    """Read the columns of events that are used, some rows at a time."""
    needed = (columns.user, columns.item)
    used = (*needed, columns.timestamp, columns.rating)
    if path.suffix != ".parquet":
        delimiter, header = _delimiter(path, needed)
        types = dict.fromkeys(needed, pa.string()) | {columns.rating: pa.float32()}
        yield from delimited_batches(
            path, delimiter, types=types, columns=[name for name in header if name in used]
        )
        return
    try:
        with pq.ParquetFile(path) as file:
            names = file.schema_arrow.names
            _check_header(path, names, needed)
            if not file.metadata.num_rows:
                raise DataError(f"{path}: no rows in it")
            for batch in file.iter_batches(BATCH, columns=[n for n in names if n in used]):
                yield pa.Table.from_batches([batch])
    except (pa.ArrowInvalid, OSError) as error:
        raise DataError(f"{path}: not a parquet file: {error}") from error


def _delimiter(path: Path, needed: tuple[str, ...]) -> tuple[str, list[str]]:
    """The delimiter that yields the first needed column, and the header it gives."""
    line = first_line(path)
    delimiter = next((d for d in DELIMITERS if needed[0] in _names(line, d)), ",")
    header = _names(line, delimiter)
    _check_header(path, header, needed)
    return delimiter, header


def _check_header(path: Path, header: list[str], needed: tuple[str, ...]) -> None:
    for name in needed:
        if header.count(name) != 1:
            raise DataError(
                f"{path}: expected one column {name!r}, the header has {str(header)[1:-1][:120]}; "
                "name the columns, for example --set data.columns.user=userId"
            )


def _check_once(path: Path, table: pa.Table, names: Iterable[str]) -> None:
    for name in names:
        if (times := table.column_names.count(name)) > 1:
            raise DataError(f"{path}: {times} columns are called {name!r}; rename all but one")


def _names(line: str, delimiter: str) -> list[str]:
    return next(csv.reader([line.split("\r", 1)[0]], delimiter=delimiter), [])


def _texts(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Convert ids to strings; null becomes the empty string."""
    return pc.fill_null(pc.cast(column, pa.string()), "")


def _cast(table: pa.Table, name: str, kind: pa.DataType, path: Path) -> pa.ChunkedArray:
    try:
        return pc.cast(table[name], kind, safe=False)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise DataError(f"{path}: column {name!r} is not numeric: {error}") from error


def _with_ids(
    table: pa.Table, names: tuple[str, ...], reason: str
) -> tuple[pa.Table, dict[str, int]]:
    """The rows without missing ids, with ids as strings, and the number of dropped rows."""
    whole = pa.chunked_array([np.ones(table.num_rows, bool)])
    for name in names:
        place = table.column_names.index(name)
        table = table.set_column(place, name, _texts(table[name]))
        whole = pc.and_(whole, pc.not_equal(table[name], ""))
    kept = table.filter(whole)
    return kept, {reason: table.num_rows - kept.num_rows}


def _first_of_each(column: pa.ChunkedArray) -> NDArray[np.int64]:
    """The rows at which a value appears for the first time, ascending."""
    indices = column.combine_chunks().dictionary_encode().indices.to_numpy()
    return np.sort(np.unique(indices, return_index=True)[1])


def _items(table: pa.Table | None, columns: Columns, events: pa.Table) -> tuple[pa.Table, int]:
    """The items in the order of the items file, then of first appearance in the events."""
    if table is None:
        ids, missing = describe_all([], events)
        return items_table(ids, {}, {}, {}), missing
    rows = table[columns.item].to_pylist()
    ids, missing = describe_all(rows, events)
    place = {item: row for row, item in enumerate(rows)}
    order = pa.array([place.get(item) for item in ids], pa.int64())
    given = {name: table[name] for name in table.column_names if name != columns.item}
    words = {
        name: dict(zip(rows, _texts(given.pop(name)).to_pylist(), strict=True))
        for name in (columns.title, columns.text)
        if name in given
    }
    attributes = {
        name: _attribute(column).combine_chunks().take(order)
        for name, column in given.items()
        if not pa.types.is_null(column.type)
    }
    titles, texts = words.get(columns.title, {}), words.get(columns.text, {})
    return items_table(ids, titles, texts, attributes), missing


def _attribute(column: pa.ChunkedArray) -> Any:
    """Convert a column to a canonical type; texts with `|` become lists."""
    kind = column.type
    if pa.types.is_boolean(kind):
        return column
    if pa.types.is_integer(kind):
        return pc.cast(column, pa.int64())
    if pa.types.is_floating(kind):
        return pc.cast(column, pa.float64())
    if pa.types.is_list(kind) or pa.types.is_fixed_size_list(kind):
        ready = pa.types.is_floating(kind.value_type)  # an embedding
        return pc.cast(column, pa.list_(pa.float32() if ready else pa.string()))
    column = pc.cast(column, pa.string())
    if pc.any(pc.match_substring(column, "|")).as_py():
        return pc.split_pattern(column, "|")
    return column
