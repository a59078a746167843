"""Any csv, tsv or parquet file with named columns: one of events, optionally one of items.

Events need the columns `user` and `item`; `timestamp` and `rating` are read where they exist. Items
need `item`; `title` and `text` are read where they exist, every further column is an attribute.
`data.columns` renames them. The delimiter (`,` `;` `|` or tab) is the one that finds the columns.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from data.delimited import first_line, read_delimited
from data.raw import Columns, RawData, ReaderConfig, describe_all, events_table, items_table
from recsys.errors import DataError

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

DELIMITERS = (",", "\t", ";", "|")
# No date before the year 5138 has so many seconds: such a column counts milliseconds.
MILLISECONDS = 100_000_000_000


def files(config: ReaderConfig) -> dict[str, Path]:
    """`interactions`, and `items` where given."""
    found = {"interactions": config.path}
    if config.items is not None:
        found["items"] = config.items
    return found


def read(config: ReaderConfig) -> RawData:
    """Read tables with named columns.

    Raises:
        DataError: a missing column, a value of the wrong type, or a file that is no table.
    """
    paths, columns = files(config), config.columns
    path = paths["interactions"]
    table = _read(path, (columns.user, columns.item), {columns.rating: pa.float32()})
    columns_read = {"user": table[columns.user], "item": table[columns.item]}
    late = 0
    if columns.timestamp in table.column_names:
        columns_read["timestamp"], late = _seconds(table, columns.timestamp, path)
    if columns.rating in table.column_names:
        columns_read["rating"] = _cast(table, columns.rating, pa.float32(), path)
    rows, counts = _with_ids(
        pa.table(columns_read), ("user", "item"), "rows_without_user_or_item_dropped"
    )
    counts["timestamps_in_milliseconds"] = late
    events = events_table(**{name: rows[name] for name in rows.column_names})
    described = None
    if "items" in paths:
        described = _read(paths["items"], (columns.item,), {})
        described, dropped = _with_ids(described, (columns.item,), "item_rows_without_id_dropped")
        first = _first_of_each(described[columns.item])
        dropped["repeated_item_rows_dropped"] = described.num_rows - len(first)
        described = described.take(pa.array(first))
        counts |= dropped
    catalogue, counts["items_without_metadata"] = _items(described, columns, events)
    return RawData(events, catalogue, counts=counts)


def _read(path: Path, needed: tuple[str, ...], types: dict[str, pa.DataType]) -> pa.Table:
    """The table in a file; the columns `needed` are ids, that is strings, as they are written."""
    types = types | dict.fromkeys(needed, pa.string())
    if path.suffix == ".parquet":
        try:
            table = pq.read_table(path)
        except (pa.ArrowInvalid, OSError) as error:
            raise DataError(f"{path}: not a parquet file: {error}") from error
        header: list[str] = table.column_names
    else:
        line = first_line(path)
        delimiter = next((d for d in DELIMITERS if needed[0] in _names(line, d)), ",")
        header = _names(line, delimiter)
    for name in needed:
        if header.count(name) != 1:
            raise DataError(
                f"{path}: want one column {name!r}, the header has {', '.join(header)[:120]!r}; "
                "say what the columns are called, for example --set data.columns.user=userId"
            )
    if path.suffix != ".parquet":
        table = read_delimited(path, delimiter, types=types)
    if not table.num_rows:
        raise DataError(f"{path}: no rows in it")
    return table


def _names(line: str, delimiter: str) -> list[str]:
    return [name.strip().strip('"') for name in line.split(delimiter)]


def _texts(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Ids as strings; null becomes the empty one."""
    return pc.fill_null(pc.cast(column, pa.string()), "")


def _cast(table: pa.Table, name: str, kind: pa.DataType, path: Path) -> pa.ChunkedArray:
    try:
        return pc.cast(table[name], kind, safe=False)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise DataError(f"{path}: column {name!r} is not numeric: {error}") from error


def _seconds(table: pa.Table, name: str, path: Path) -> tuple[pa.ChunkedArray, int]:
    """A time column as unix seconds, and how many of its values counted milliseconds."""
    column = table[name]
    kind = column.type
    if pa.types.is_floating(kind):
        column = pc.if_else(pc.is_finite(column), column, None)
    odd = pc.is_null(column)
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):  # a column of one kind is typed
        odd = pc.invert(pc.match_substring_regex(pc.fill_null(column, ""), r"^\d+(\.\d*)?$"))
    row = pc.index(odd, True).as_py()
    if row >= 0:
        raise DataError(
            f"{path}: column {name!r} has {column[row].as_py()!r} in data row {row + 1}; "
            "write unix seconds or ISO dates throughout"
        )
    if pa.types.is_date(kind) or pa.types.is_timestamp(kind):
        return pc.cast(pc.cast(column, pa.timestamp("s"), safe=False), pa.int64()), 0
    seconds = pc.cast(_cast(table, name, pa.float64(), path), pa.int64(), safe=False)
    late = pc.greater(seconds, MILLISECONDS)
    return pc.if_else(late, pc.divide(seconds, 1000), seconds), pc.sum(late).as_py() or 0


def _with_ids(
    table: pa.Table, names: tuple[str, ...], reason: str
) -> tuple[pa.Table, dict[str, int]]:
    """The rows whose ids are all there, as strings, and how many have gone."""
    whole = pa.chunked_array([np.ones(table.num_rows, bool)])
    for name in names:
        place = table.column_names.index(name)
        table = table.set_column(place, name, _texts(table[name]))
        whole = pc.and_(whole, pc.not_equal(table[name], ""))
    kept = table.filter(whole)
    return kept, {reason: table.num_rows - kept.num_rows}


def _first_of_each(column: pa.ChunkedArray) -> NDArray[np.int64]:
    """Ascending rows at which a value appears for the first time."""
    indices = column.combine_chunks().dictionary_encode().indices.to_numpy()
    return np.sort(np.unique(indices, return_index=True)[1])


def _items(table: pa.Table | None, columns: Columns, events: pa.Table) -> tuple[pa.Table, int]:
    """The catalogue in the order of the items file, then of first appearance."""
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
    """A column as one of the canonical kinds; texts with `|` in them are lists."""
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
