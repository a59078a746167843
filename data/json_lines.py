"""Reads JSON lines block by block with Arrow, and line by line where a block is damaged."""

from __future__ import annotations

import codecs
import json
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json

from recsys.data.column_words import EVENT_WORDS, rank
from recsys.data.damage import Damage
from recsys.errors import DataError
from recsys.event_names import level

NAME = re.compile(rb'"([^"\\]*)"\s*:')
CELLS_PER_BYTE, FEW_CELLS = 16, 1_000_000
NUMERAL = rb"(-?\d[\d.eE+-]*)"
EXACT = 2**53  # larger numbers lose digits as floating numbers
MOST_REPEATED = 1 << 28  # bytes of records that are repeated for each entry of their lists


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


def json_table(block: bytes, first: int, damage: Damage, *, explode: str | None = None) -> pa.Table:
    """The objects of a block of lines, the first of which has the number `first`.

    Fields of records become columns such as `customer.id`. Each record of the list `explode`
    becomes a row, as for the lines of an order.

    Raises:
        pa.ArrowInvalid: so many names that most cells of the table would be empty.
        DataError: so long records around long lists that repeating them would fill the memory.
    """
    written, lines = len(set(NAME.findall(block))), block.rstrip().count(b"\n") + 1
    if written * lines > max(FEW_CELLS, CELLS_PER_BYTE * len(block)):
        raise pa.ArrowInvalid(
            f"lines {first} to {first + lines - 1} have {written} different names; put what "
            "differs from line to line into one field, as a list"
        )
    options = pa.json.ReadOptions(use_threads=False, block_size=len(block) + 1)
    try:
        table = pa.json.read_json(pa.BufferReader(block), options)
        written_as = [field.with_type(_with_texts(field.type)) for field in table.schema]
        if any(not field.equals(as_) for field, as_ in zip(table.schema, written_as, strict=True)):
            parsing = pa.json.ParseOptions(explicit_schema=pa.schema(written_as))
            table = pa.json.read_json(pa.BufferReader(block), options, parsing)
        if names := _long_numbers(table, block):
            again = _quoted(block, names)
            if again == block:
                raise pa.ArrowInvalid("lists in lists with long numbers")
            return json_table(again, first, damage, explode=explode)
        return exploded(flatten(table), explode)
    except pa.ArrowInvalid:  # a damaged line, or a column of mixed types: read line by line
        rows: list[dict[str, Any]] = []
        for number, line in enumerate(block.splitlines(), first):
            if not line.strip():
                continue
            try:
                row = json.loads(line, parse_int=_Digits, parse_float=_decimal)
                if not isinstance(row, dict):
                    raise TypeError("not an object")
                parts = _parts(row, explode)
                rows += [{name: _plain(value) for name, value in part.items()} for part in parts]
            except DataError:
                raise
            except (ValueError, TypeError, RecursionError):
                damage.add(number, line[:60].decode(errors="replace"))
        _check_repeated(sum(len(value or "") for row in rows for value in row.values()))
        columns = dict.fromkeys(name for row in rows for name in row)
        return pa.table(
            {name: pa.array([row.get(name) for row in rows], pa.string()) for name in columns}
        )


class _Digits(str):
    """A number as it is written."""


def _decimal(written: str) -> float | _Digits:
    """A number with decimals or an exponent; large whole ones stay as they are written."""
    value = float(written)
    if not value.is_integer():
        return value
    return _Digits(int(value)) if abs(value) < EXACT else _Digits(written)


def _long_numbers(table: pa.Table, block: bytes) -> list[bytes]:
    """Names of fields with whole numbers that Arrow has read as floating ones and rounded."""
    names: dict[str, None] = {}
    for field, column in zip(table.schema, table.columns, strict=True):
        names |= dict.fromkeys(_rounded(field.name, field.type, column))
    found = []
    for name in map(str.encode, names):
        key = rb'"%b"\s*:\s*' % re.escape(name)
        if not re.search(key, block):
            raise pa.ArrowInvalid("a name with escaped letters")
        if re.search(key + rb"(?:\[[^\]]*?)?-?\d{16}", block):
            found.append(name)
    return found


def _rounded(name: str, kind: pa.DataType, column: pa.ChunkedArray) -> list[str]:
    """The names of a field or of the fields in it that have rounded numbers."""
    if pa.types.is_struct(kind):
        inner = zip(kind, column.flatten(), strict=True)
        return [text for one, values in inner for text in _rounded(one.name, one.type, values)]
    if pa.types.is_list(kind):
        return _rounded(name, kind.value_type, pc.list_flatten(column))
    if not pa.types.is_floating(kind):
        return []
    size = pc.max(pc.abs(column)).as_py()
    return [name] if size is not None and size >= EXACT else []


def _quoted(block: bytes, names: list[bytes]) -> bytes:
    """A block in which the numbers of some fields are strings: their digits stay.

    A name with its quotes before a colon is never inside a string, where quotes are escaped.
    """
    for name in names:
        key = rb'("%b"\s*:\s*)' % re.escape(name)
        block = re.sub(key + NUMERAL, rb'\1"\2"', block)
        block = re.sub(
            key + rb'(\[[^\[\]{}"]*\])',
            lambda match: match[1] + re.sub(NUMERAL, rb'"\1"', match[2]),
            block,
        )
    return block


def _with_texts(kind: pa.DataType) -> pa.DataType:
    """A type with texts for times: Arrow drops the zone of times that it recognises."""
    if pa.types.is_timestamp(kind):
        return pa.string()
    if pa.types.is_struct(kind):
        return pa.struct([field.with_type(_with_texts(field.type)) for field in kind])
    return pa.list_(_with_texts(kind.value_type)) if pa.types.is_list(kind) else kind


def flatten(table: pa.Table) -> pa.Table:
    """The fields of records as columns, however deep."""
    while any(pa.types.is_struct(kind) for kind in table.schema.types):
        table = table.flatten()
    if len(set(table.column_names)) < table.num_columns:
        raise pa.ArrowInvalid("a field has the name of a column")  # {"a": {"b": 1}, "a.b": 2}
    return table


def lists_of_records(block: bytes) -> dict[str, set[str]]:
    """The lists of records in a block of lines, with the names of their fields.

    A later block may have further such lists, which the first lines do not have.
    """
    found: defaultdict[str, set[str]] = defaultdict(set)
    for line in block.splitlines():
        try:
            fields = _fields(json.loads(line))
        except (ValueError, TypeError, AttributeError, RecursionError):
            continue  # `json_table` counts damaged lines
        for name, value in fields.items():
            if _has_records(value):
                found[name].update(*(_fields(record, f"{name}.") for record in value))
    return dict(found)


def lines_with_new_names(blocks: Iterable[bytes], known: set[bytes], most: int) -> bytes:
    """Lines of later blocks, one for each name that no earlier line has; `most` at most."""
    known, lines = set(known), []
    for block in blocks:
        for name in set(NAME.findall(block)) - known:
            at = block.find(b'"' + name + b'"')
            end = block.find(b"\n", at)
            lines.append(block[block.rfind(b"\n", 0, at) + 1 : end if end >= 0 else len(block)])
            known.add(name)
            if len(lines) == most:
                return b"\n".join(lines)
    return b"\n".join(lines)


def list_of_items(lists: Mapping[str, Iterable[str]]) -> str | None:
    """The list of which each record is a row: the only one, or the only one with items.

    >>> list_of_items({"lines": ["lines.sku"], "taxes": ["taxes.rate"], "refunds": ["refunds.sku"]})
    'lines'

    Args:
        lists: names of lists of records, each with the names of its fields.
    """
    named = [
        name
        for name, fields in lists.items()
        if level(name) != 0  # such as `refunds`
        and any(rank(field, EVENT_WORDS["item"]) is not None for field in fields)
    ]
    for found in (list(lists), named):
        if len(found) == 1:
            return found[0]
    return None


def exploded(table: pa.Table, name: str | None) -> pa.Table:
    """A row for each record of a list, if the table has such a list."""
    if name not in table.column_names or not holds_records(table[name].type):
        return table
    lists = pa.concat_arrays(table[name].chunks)
    around, of = table.drop_columns([name]), pc.list_parent_indices(lists)
    texts = [c for c in around.columns if pa.types.is_string(c.type)]
    sizes = [pc.fill_null(pc.binary_length(c), 0).combine_chunks().take(of) for c in texts]
    _check_repeated(sum(pc.sum(size).as_py() or 0 for size in sizes))
    rows = around.take(of)
    return flatten(rows.append_column(name, pc.list_flatten(lists)))


def _check_repeated(size: int) -> None:
    if size > MOST_REPEATED:
        raise DataError(
            f"repeated for each entry of their lists, the records around take {size:,} bytes; "
            "write one line for each entry, with what it needs"
        )


def holds_records(kind: pa.DataType) -> bool:
    """Whether it is a type of lists of records."""
    is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind)
    return bool(is_list and pa.types.is_struct(kind.value_type))


def _fields(row: dict[str, Any], before: str = "") -> dict[str, Any]:
    """As `flatten`, for one object."""
    found: dict[str, Any] = {}
    for name, value in row.items():
        inner = _fields(value, f"{before}{name}.") if isinstance(value, dict) else None
        found |= {f"{before}{name}": value} if inner is None else inner
    return found


def _parts(row: dict[str, Any], name: str | None) -> list[dict[str, Any]]:
    """As `_exploded`, for one object."""
    fields = _fields(row)
    if name is None or not _has_records(fields.get(name)):
        return [fields]
    parts = fields.pop(name)
    _check_repeated(16 * len(parts) * len(fields))  # texts are shared here, places are not
    return [fields | _fields(part, f"{name}.") for part in parts]


def _has_records(value: Any) -> bool:
    """Whether a value is a list of records, at least one."""
    return isinstance(value, list) and bool(value) and all(isinstance(v, dict) for v in value)


def _plain(value: Any) -> str | None:
    """A value as it stands in the file, as a string; null is None."""
    if value is None or isinstance(value, str):
        (value or "").encode()  # half of a surrogate pair is an error
        return value
    return "|".join(map(str, value)) if isinstance(value, list) else json.dumps(value)
