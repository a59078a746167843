"""Reads JSON lines with DuckDB: fields of records become columns, and numbers keep their digits."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import duckdb
import pyarrow as pa
import pyarrow.compute as pc

from recsys.data.column_words import EVENT_WORDS, ITEM_WORDS, rank
from recsys.data.files import Damage
from recsys.data.report import sentence
from recsys.data.texts import as_text
from recsys.errors import DataError
from recsys.event_names import level

CELLS_PER_BYTE, FEW_CELLS = 16, 1_000_000
# Numbers behind a name become texts, so that DuckDB does not write them anew: 1.50 as 1.5.
KEY = r'([{,]\s*"(?:[^"\\]|\\.)*"\s*:\s*)'
NUMBER, CODE = KEY + r"(-?\d[\d.eE+-]*)", KEY + r"(0\d[\d.]*)"  # 007 is no JSON
RETURN = r'(?i):\s*"[a-z _]*(refund|return|cancel|chargeback)[a-z_]*"'  # a type of events
MOST_REPEATED = 1 << 28  # bytes of records that are repeated for each entry of their lists
IS_OBJECT = "coalesce(CASE WHEN json_valid(line) THEN json_type(line) = 'OBJECT' END, false)"
# One line of each form: the types of all lines are those of these.
FORMS = "CREATE TABLE forms (form VARCHAR PRIMARY KEY, line VARCHAR, number BIGINT)"
NEW_FORMS = f"""
    INSERT OR IGNORE INTO forms
    SELECT CAST(json_structure(line) AS VARCHAR), arg_min(line, number), min(number)
    FROM (SELECT line, number FROM lines WHERE {IS_OBJECT}) GROUP BY 1
"""  # noqa: S608
AMOUNTS = (ITEM_WORDS["price"], *(EVENT_WORDS[role] for role in ("quantity", "rating")))
TYPES = {"BIGINT": pa.int64(), "UBIGINT": pa.int64(), "DOUBLE": pa.float64(), "BOOLEAN": pa.bool_()}


class Field(NamedTuple):
    """A field of the objects in a file.

    Attributes:
        name: such as `customer.id`.
        pointer: where it is in an object, or in a record of the list that makes the rows.
        kind: its type in DuckDB (`JSON` for different types), or a list with the type of the
            entries.
        of_list: whether it is in a record of the list that makes the rows.
        outer: where an object without such records has it, as an event with one item.
    """

    name: str
    pointer: str
    kind: Any
    of_list: bool = False
    outer: str = ""


def line_blocks(stream: Any, size: int) -> Iterator[tuple[bytes, int]]:
    """Blocks of whole lines of about `size` bytes, with the number of their first line."""
    line, rest = 1, stream.read(3)
    rest = b"" if rest == codecs.BOM_UTF8 else rest
    while block := bytes(stream.read(size)):
        whole, newline, end = (rest + block).rpartition(b"\n")
        rest = end
        if newline:
            yield whole + newline, line
            line += whole.count(b"\n") + 1
    if rest.strip():
        yield rest, line


def find_fields(blocks: Iterable[tuple[bytes, int]]) -> list[Field]:
    """The fields of all objects in a file; lines that are no objects are left out.

    Raises:
        pa.ArrowInvalid: no line is an object, or there are so many names that most cells of the
            table would be empty.
    """
    lines = size = 0
    with duckdb.connect(":memory:") as connection:
        connection.execute(FORMS)
        for block, first in blocks:
            batch = _lines(block, first)
            lines, size = lines + batch.num_rows, size + len(block)
            connection.register("lines", pa.Table.from_batches([batch]))
            connection.execute(NEW_FORMS).fetchall()
        ((structure,),) = connection.sql(
            "SELECT json_group_structure(CAST(line AS JSON)) FROM (FROM forms ORDER BY number)"
        ).fetchall()
    kinds = json.loads(structure) if structure else None
    if not isinstance(kinds, dict):
        raise pa.ArrowInvalid("no line is a JSON object")
    fields = list(_fields(kinds))
    if len(fields) * lines > max(FEW_CELLS, CELLS_PER_BYTE * size):
        raise pa.ArrowInvalid(sentence("different_names", lines=lines, names=len(fields)))
    return list({field.name: field for field in fields}.values())


def _fields(structure: Mapping[str, Any], name: str = "", pointer: str = "") -> Iterator[Field]:
    for key, kind in structure.items():
        at = f"{pointer}/{key.replace('~', '~0').replace('/', '~1')}"
        if isinstance(kind, dict):
            yield from _fields(kind, f"{name}{key}.", at)
        else:
            yield Field(f"{name}{key}", at, kind)


def lists_of_records(fields: Iterable[Field]) -> dict[str, tuple[Field, list[str]]]:
    """The lists of records, or else of items, by name, with the names of their fields."""
    lists = [field for field in fields if isinstance(field.kind, list)]
    records = [field for field in lists if isinstance(field.kind[0], dict)]
    plain = [field for field in lists if isinstance(field.kind[0], str) and is_of_items(field.name)]
    return {f.name: (f, [entry.name for entry in _entries(f)]) for f in records or plain}


def _entries(field: Field) -> list[Field]:
    """The fields of the records of a list, or the list itself if its entries are plain values."""
    if isinstance(field.kind[0], dict):
        return list(_fields(field.kind[0], f"{field.name}."))
    return [Field(field.name, "$", field.kind[0])]


def is_of_items(name: str) -> bool:
    """Whether a list, by its name, holds items."""
    return rank(name, EVENT_WORDS["item"]) is not None


def explode_records(fields: Iterable[Field], records: Field, block: bytes) -> list[Field]:
    """The fields where each entry of a list is a row: the other fields, and those of an entry.

    A field of an item beside the list, such as `product_id` beside `products`, is that of an entry,
    unless a line of the first `block` has both.
    """
    at = records.pointer.rpartition("/")[0]
    inside = [f._replace(of_list=True, outer=at + f.pointer) for f in _entries(records)]
    beside = {field.pointer for field in fields} & {field.outer for field in inside}
    beside = beside if any(is_of_items(at.rpartition("/")[2]) for at in beside) else set()
    beside = set() if _has_both(block, records, beside) else beside
    others = [f for f in fields if f is not records and f.pointer not in beside]
    return others + [f if f.outer in beside else f._replace(outer="") for f in inside]


def _has_both(block: bytes, records: Field, beside: Collection[str]) -> bool:
    """Whether a line has entries of a list, and beside them one of these fields."""
    own = " OR ".join(f"json_extract_string(line, {_text(at)}) <> ''" for at in beside) or "false"
    size = f"json_array_length(line, {_text(records.pointer)})"
    with duckdb.connect(":memory:") as connection:
        connection.register("lines", pa.Table.from_batches([_lines(block, 1)]))
        both = f"SELECT 1 FROM lines WHERE {IS_OBJECT} AND {size} > 0 AND ({own}) LIMIT 1"  # noqa: S608
        return bool(connection.sql(both).fetchall())


def json_table(
    connection: duckdb.DuckDBPyConnection,
    block: bytes,
    first: int,
    fields: Sequence[Field],
    records: Field | None,
    damage: Damage,
) -> pa.Table:
    """The objects of a block of lines, of which `first` is the number of the first one.

    Each record of the list `records`, if there is one, is a row, as the lines of an order are.

    Raises:
        DataError: so long records around long lists that repeating them would fill the memory.
    """
    if records is not None and records.kind == ["DOUBLE"]:
        block = _with_texts(block, records.name.rpartition(".")[2])
    lines = _lines(block, first, NUMBER)
    connection.register("lines", pa.Table.from_batches([lines]))
    damaged = connection.sql(
        f"SELECT number, line FROM lines WHERE trim(line) <> '' AND NOT {IS_OBJECT}"  # noqa: S608
    )
    for number, line in damaged.fetchall():
        damage.add(number, line)
    rows = f"(SELECT line FROM lines WHERE {IS_OBJECT})"  # noqa: S608
    if records is not None:
        at = _text(records.pointer)
        entries = f"from_json(json_extract(line, {at}), '[\"JSON\"]')"
        ((size,),) = connection.sql(
            f"""
            SELECT coalesce(sum(
                (strlen(line) - strlen(json_extract_string(line, {at}))) * len({entries})
            ), 0) FROM {rows}
            """  # noqa: S608
        ).fetchall()
        _check_repeated(int(size))
        own = [f.outer for f in fields if f.outer and is_of_items(f.name)]
        alone = [f"json_extract_string(line, {_text(at)}) <> ''" for at in own]
        alone += [f"regexp_matches(line, '{RETURN}')"]
        some = f"WHEN {' OR '.join(alone)} THEN [NULL] ELSE [] END"
        one = f"CASE WHEN len({entries}) > 0 THEN {entries} {some}"
        rows = f"(SELECT line, unnest({one}) AS record FROM {rows})"  # noqa: S608
    columns = ", ".join(f"{_value(field)} AS c{n}" for n, field in enumerate(fields))
    table = connection.sql(f"SELECT {columns} FROM {rows}").to_arrow_table()  # noqa: S608
    made = [_typed(column, field) for column, field in zip(table.columns, fields, strict=True)]
    return pa.table(made, names=[field.name for field in fields])


def _lines(block: bytes, first: int, numbers: str = CODE) -> pa.RecordBatch:
    """The lines, with some numbers as texts."""
    lines = block.splitlines()
    texts = pa.array(lines, pa.binary()).cast(pa.string())
    texts = pc.replace_substring_regex(texts, numbers, r'\1"\2"')
    return pa.record_batch({"line": texts, "number": pa.array(range(first, first + len(lines)))})


def _with_texts(block: bytes, name: str) -> bytes:
    """Lines in which the numbers of the lists with a name are texts.

    >>> _with_texts(b'{"items": [1.50, 2]}', "items")
    b'{"items": ["1.50","2"]}'
    """
    lists = rb'("%s"\s*:\s*\[)([-+\d.eE,\s]+)\]' % re.escape(name.encode())

    def with_quotes(match: re.Match[bytes]) -> bytes:
        numbers = (b'"%s"' % number.strip() for number in match[2].split(b","))
        return match[1] + b",".join(numbers) + b"]"

    return re.sub(lists, with_quotes, block)


def _value(field: Field) -> str:
    """The value of a field in SQL: texts, or lists of texts, of numbers or of records."""
    where = f"{'record' if field.of_list else 'line'}, {_text(field.pointer)}"
    text, value = f"json_extract_string({where})", f"json_extract({where})"
    if field.outer:
        outer = f"line, {_text(field.outer)}"
        text = f"CASE WHEN record IS NULL THEN json_extract_string({outer}) ELSE {text} END"
    texts = f"from_json({value}, '[\"VARCHAR\"]')"
    if field.kind == "JSON":  # texts in some lines, and lists in others
        joined = f"array_to_string({texts}, '|')"
        return f"CASE json_type({value}) WHEN 'ARRAY' THEN {joined} ELSE {text} END"
    if isinstance(field.kind, str):
        return text
    if field.kind == ["DOUBLE"]:
        return f"from_json({value}, '[\"DOUBLE\"]')"
    if isinstance(field.kind[0], str):
        return texts
    return f"list_transform(from_json({value}, '[\"JSON\"]'), lambda r: {{'json': r}})"


def _text(value: str) -> str:
    """A text in SQL."""
    return "'" + value.replace("'", "''") + "'"


def _typed(column: pa.ChunkedArray, field: Field) -> pa.ChunkedArray:
    """Numbers and answers as such: amounts, and what is written in the same way again."""
    if not isinstance(field.kind, str) or field.kind not in TYPES:
        return column
    try:
        converted = pc.cast(column, TYPES[field.kind])
    except pa.ArrowInvalid:
        return column
    same = any(rank(field.name, names) is not None for names in AMOUNTS)
    same = same or pc.all(pc.equal(as_text(converted), column)).as_py() is not False
    return converted if same else column


def flatten(table: pa.Table) -> pa.Table:
    """The fields of records as columns, however deep."""
    while any(pa.types.is_struct(kind) for kind in table.schema.types):
        table = table.flatten()
    if len(set(table.column_names)) < table.num_columns:
        raise pa.ArrowInvalid("a field has the name of a column")  # {"a": {"b": 1}, "a.b": 2}
    return table


def list_of_items(lists: Mapping[str, Iterable[str]]) -> str | None:
    """The list of which each record is a row: the only one, or by fields the only one with items.

    >>> list_of_items({"lines": ["lines.sku"], "taxes": ["taxes.rate"], "refunds": ["refunds.sku"]})
    'lines'
    """
    others = [name for name in lists if level(name) != 0]  # such as `refunds`
    named = [name for name in others if any(map(is_of_items, lists[name]))]
    return next((names[0] for names in (others, named) if len(names) == 1), None)


def exploded(table: pa.Table, name: str | None) -> pa.Table:
    """A row for each entry of a list, if the table has such a list."""
    if name not in table.column_names or not is_list(table[name].type):
        return table
    lists = pa.concat_arrays(table[name].chunks)
    around, of = table.drop_columns([name]), pc.list_parent_indices(lists)
    texts = [c for c in around.columns if pa.types.is_string(c.type)]
    sizes = [pc.fill_null(pc.binary_length(c), 0).combine_chunks().take(of) for c in texts]
    _check_repeated(sum(pc.sum(size).as_py() or 0 for size in sizes))
    rows = around.take(of)
    return flatten(pa.table([*rows.columns, pc.list_flatten(lists)], [*rows.column_names, name]))


def _check_repeated(size: int) -> None:
    if size > MOST_REPEATED:
        raise DataError(sentence("repeated_records", size=size))


def is_list(kind: pa.DataType) -> bool:
    """Whether it is a type of lists."""
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind))
