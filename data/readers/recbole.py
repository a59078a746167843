"""RecBole's atomic files: `X.inter`, and beside it `X.item` and `X.user`, with typed headers.

A header has the names and types of the fields (`user_id:token`, `genres:token_seq`,
`timestamp:float`). Columns are separated by tabs, the values of a sequence by blanks. The path is
the `.inter` file or a folder with one. `data.columns` names the fields of user, item, time and
rating; each name is also tried with the suffix `_id`. The canonical data have no attributes of
users, so the file of users is only checked and counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from recsys.data.delimited import delimited_batches, first_line, read_delimited
from recsys.data.files import find_one
from recsys.data.raw import (
    EventStream,
    ItemCatalog,
    ReaderConfig,
    describe_all,
    events_table,
    items_table,
)
from recsys.data.time_formats import unix_seconds
from recsys.errors import DataError

KINDS = {
    "token": pa.string(),
    "token_seq": pa.string(),
    "float": pa.float64(),
    "float_seq": pa.string(),
}
TITLES = ("title", "name")  # suffixes of a field that is the title if none has the given name


def files(config: ReaderConfig) -> dict[str, Path]:
    """The files by role: `interactions`, and `items` and `users` if found.

    Raises:
        DataError: a folder with no or with several `.inter` files.
    """
    path = find_one(config.path, "*.inter")
    paths = {"interactions": path}
    for role, explicit, suffix in (("items", config.items, ".item"), ("users", None, ".user")):
        beside = path.with_suffix(suffix)
        if explicit or beside.is_file():
            paths[role] = explicit or beside
    return paths


def read(config: ReaderConfig) -> EventStream:
    """Read interactions part by part; the items must fit in memory.

    Raises:
        DataError: a header without types, a missing field, or a value of the wrong type, when the
            iteration reaches the error.
    """
    paths = files(config)
    counts: Counter[str] = Counter()
    return EventStream(
        _events(paths["interactions"], config, counts),
        lambda events: _catalog(paths, config, events),
        counts,
    )


def _header(path: Path) -> dict[str, str]:
    """Read the header: field -> type."""
    fields = {}
    for column in first_line(path).split("\t"):
        name, _, kind = column.partition(":")
        if kind not in KINDS or name in fields:
            raise DataError(
                f"{path}:1: {column!r} is not a field and its type, such as 'user_id:token' "
                f"({', '.join(KINDS)}), once each"
            )
        fields[name] = kind
    return fields


def _field(fields: dict[str, str], name: str) -> str | None:
    return next((candidate for candidate in (name, f"{name}_id") if candidate in fields), None)


def _needed(fields: dict[str, str], name: str, path: Path) -> str:
    field = _field(fields, name)
    if field is None:
        raise DataError(
            f"{path}: no field {name!r} or '{name}_id' among {', '.join(fields)}; "
            "name it with --set data.columns.user=..., .item=..."
        )
    return field


def _events(path: Path, config: ReaderConfig, counts: Counter[str]) -> Iterator[pa.Table]:
    fields, columns = _header(path), config.columns
    user = _needed(fields, columns.user or "user", path)
    item = _needed(fields, columns.item or "item", path)
    time = _field(fields, columns.timestamp or "timestamp")
    rating = _field(fields, columns.rating or "rating")
    used = [name for name in (user, item, time, rating) if name]
    types = {f"{name}:{fields[name]}": KINDS[fields[name]] for name in used}
    row = 0
    for table in delimited_batches(path, "\t", types=types, columns=list(types), quote=False):
        table = table.rename_columns(used)
        whole = pc.and_(pc.not_equal(table[user], ""), pc.not_equal(table[item], ""))
        times, below = None, None
        if time:
            moments = unix_seconds(
                table[time], time, path, (row + 1).__add__, config.time_unit, counts
            )
            times, below = moments.second.filter(whole), moments.nanosecond.filter(whole)
        row += table.num_rows
        counts["rows_without_user_or_item_dropped"] += table.num_rows - pc.sum(whole).as_py()
        table = table.filter(whole)
        ratings = pc.cast(table[rating], pa.float32()) if rating else None
        yield events_table(
            table[user], table[item], timestamp=times, nanosecond=below, rating=ratings
        )


def _catalog(paths: dict[str, Path], config: ReaderConfig, events: pa.Table) -> ItemCatalog:
    counts: Counter[str] = Counter()
    if "users" in paths:
        fields = _header(paths["users"])
        _needed(fields, config.columns.user or "user", paths["users"])
        counts["user_rows_not_kept"] = _table(paths["users"], fields).num_rows
    if "items" not in paths:
        ids, counts["items_without_metadata"] = describe_all([], events)
        return ItemCatalog(items_table(ids, {}, {}, {}), None, dict(counts))
    path = paths["items"]
    fields = _header(path)
    item = _needed(fields, config.columns.item or "item", path)
    table = _table(path, fields)
    rows = {name: i for i, name in reversed(list(enumerate(table[item].to_pylist()))) if name}
    rows = dict(sorted(rows.items(), key=lambda entry: entry[1]))
    counts["repeated_item_rows_dropped"] = table.num_rows - len(rows)
    title = _field(fields, config.columns.title or "title") or next(
        (n for n, kind in fields.items() if n.endswith(TITLES) and kind.startswith("token")), None
    )
    text = _field(fields, config.columns.text or "text")
    first_rows = pa.array(rows.values(), pa.int64())  # typed: there may be none
    words = {
        name: dict(zip(rows, table[name].take(first_rows).to_pylist(), strict=True))
        for name in (title, text)
        if name
    }
    ids, counts["items_without_metadata"] = describe_all(rows, events)
    order = pa.array([rows.get(name) for name in ids], pa.int64())
    attributes = {
        name: _attribute(table[name], kind, f"{path}: field {name!r}").take(order)
        for name, kind in fields.items()
        if name not in (item, title, text)
    }
    titles, texts = words.get(title or "", {}), words.get(text or "", {})
    texts = {name: text or "" for name, text in texts.items()}
    return ItemCatalog(items_table(ids, titles, texts, attributes), None, dict(counts))


def _table(path: Path, fields: dict[str, str]) -> pa.Table:
    types = {f"{name}:{kind}": KINDS[kind] for name, kind in fields.items()}
    table = read_delimited(path, "\t", types=types, quote=False)
    return table.rename_columns(list(fields))


def _attribute(column: pa.ChunkedArray, kind: str, where: str) -> pa.Array:
    values = column.combine_chunks()
    if kind == "float":
        return values
    if kind == "token":
        return pc.if_else(pc.equal(values, ""), None, values)
    lists = [[part for part in (text or "").split(" ") if part] for text in values.to_pylist()]
    if kind == "token_seq":
        return pa.array(lists, pa.list_(pa.string()))
    try:
        numbers = [[float(part) for part in parts] for parts in lists]
    except ValueError as error:
        raise DataError(f"{where}: {error}; its type says float_seq") from error
    return pa.array(numbers, pa.list_(pa.float32()))
