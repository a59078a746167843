"""Layouts of text files that are no tables with named columns; each is refused with a way out.

The way out is a setting, or a command that writes the table.
"""

from __future__ import annotations

import csv
import io
import re
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from recsys.data.advice import call_of
from recsys.data.column_words import EVENT_FIELDS, EVENT_WORDS, has_role, known_names, rank
from recsys.data.day_orders import share_of_times
from recsys.data.item_cells import MOST_KNOWN
from recsys.data.opening import TableFile, open_table
from recsys.data.report import sentence
from recsys.data.sample import Sample, share_of
from recsys.data.spreadsheets import is_spreadsheet
from recsys.data.texts import as_text, examples
from recsys.data.time_formats import TimeRules
from recsys.errors import DataError

LINES, LONGEST = 1000, 1 << 20  # lines that show the layout, and characters of one
FEW_LINES = 5  # below this, lengths of lines say nothing
VALUE = r"[\d.,:/ TZ+-]*\d[\d.,:/ TZ+-]*"  # a number, a date or a time is no name of a column
NUMBERED = re.compile(r"(.*?)[\s_.-]*(\d+)[\s_.-]*(\D*)")
ITEMS = re.compile(
    "(line ?)?(item|product|produkt|artikel|article|sku|producto|prodotto)s?"
    "([ _-]?(id|nr|no|code|name))?"
)
# What divides the columns of a page, and its rows.
RULE, BLANKS, RULED = r"\s*\|\s*", r"\s{2,}|\t+", r"[\s|+:=-]*"
# How much of an item is in a basket, where each item has a column; and none of it.
PIECES = r"(?i)^(\d{1,3}(\.0+)?|true|false|yes|no|x|[tfyn])$"
NO_PIECES = r"(?i)^(0(\.0+)?|false|no|[fn])?$"
# Records such as Product ID: 1, Product Qty: 2 | Product ID: 3, Product Qty: 1
# The first pattern costs next to nothing, and the second much even for a few texts.
LISTED = (":[^,|]*,[^:]*:", r"^\s*\pL[\pL ]*:[^,|]*,\s*\pL[\pL ]*:")
PAIR = re.compile(r"\s*([^:,|]+?):\s*(.*?)\s*(?:,(?=[^:,|]+:)|$)")


class Layout(NamedTuple):
    """A file that is no table with a row for each item, and its rows as such a table.

    Its `key` is that of the sentence that describes it, with the values `said`.
    """

    key: str
    names: list[str]
    rows: Iterable[Sequence[Any]]
    said: Mapping[str, Any]


def refuse_other_layouts(file: TableFile, *, named: bool = False) -> None:
    """Refuse a file with one order on each line, or a text file with `::` between its columns.

    Where the column of items is known (`named`), other columns are no items.

    Raises:
        DataError: it is one; the message has a command that writes a table.
    """
    layout = _other_layout(file, named=named)
    if layout is not None:
        order = "" if has_role("timestamp", layout.names) else " --column timestamp=file-order"
        order += " --column user=order" if layout.key == "only_items" else ""
        command = f"{call_of(print_table, file.path, 'table.csv')}{order}"
        raise DataError(sentence(layout.key, path=file.path, command=command, **layout.said))


def print_table(path: str) -> None:
    """Print a file of another layout as a table, which `refuse_other_layouts` advises."""
    layout = _other_layout(open_table(Path(path)))
    out = csv.writer(sys.stdout, lineterminator="\n")
    if layout is not None:
        out.writerow(layout.names)
        out.writerows(layout.rows)


def _other_layout(file: TableFile, *, named: bool = False) -> Layout | None:
    if file.kind != "json" and len(numbers := _numbered(file.names)) > 1:
        first = next(n for n in file.names if n in next(iter(numbers.values())))
        sample = Sample(file.path, file.sample(LINES))
        values = sample.texts(first)
        # An order has a first item: a column that is empty or says no is an item itself.
        has_first = len(values) == sample.table.num_rows and share_of(values, NO_PIECES) == 0
        if has_first or share_of(values, PIECES) < 1:
            return _with_numbers(file, numbers)
    if file.kind == "delimited" and (layout := _of_lines(file)) is not None:
        return layout
    return None if named else _without_items(file)


def _of_lines(file: TableFile) -> Layout | None:
    """A text file with `::` or, as on a page, blanks or lines between its columns."""
    lines = list(islice(filter(None, _lines(file)), LINES))
    first = lines[0] if lines else ""
    if first.count("::") >= 2 or (first.count("::") == 1 and len(file.columns) == 1):
        return _with_double_colons(file, [line.split("::") for line in lines])
    if file.delimiter in (" ", "|") or len(file.columns) == 1:
        header = next((line for line in lines if not re.fullmatch(RULED, line)), "").strip()
        framed, mark = header.startswith("|"), RULE if "|" in header else BLANKS
        every = (line.strip() for line in _lines(file) if not re.fullmatch(RULED, line))
        shown = (line.removeprefix("|").removesuffix("|") if framed else line for line in every)
        cells = (re.split(mark, line.strip()) for line in shown)
        names = next(cells, [])
        if known_names(names) > 1 and (framed or "  " in header):
            return Layout("aligned", names, cells, {})
    return None


def _without_items(file: TableFile) -> Layout | None:
    """A table without a column of items, or with nothing else: records are in one column."""
    if len(file.names) == 1 and rank(file.names[0], EVENT_WORDS["item"]) is not None:
        return _with_records_of(file, "only_items", [], file.names, lambda _: [[]], {})
    sample = Sample(file.path, file.sample(LINES))
    texts = {name: sample.texts(name) for name, count in sample.counts.items() if count == 1}
    lists = (n for n in texts if all(share_of(texts[n], p) >= MOST_KNOWN for p in LISTED))
    inside = next(lists, None)
    others = [name for name in file.names if name != inside]
    is_named = has_role("item", others) or any(rank(n, EVENT_FIELDS["title"]) == 0 for n in others)
    if inside is None or is_named:
        return None
    cells = texts[inside].to_pylist()
    fields = dict.fromkeys(name for cell in cells for name, _ in PAIR.findall(cell))

    def records(row: Mapping[str, Any]) -> Iterator[list[Any]]:
        named = (dict(PAIR.findall(part)) for part in str(row[inside] or "").split("|"))
        yield from ([*map(record.get, fields)] for record in named)

    said = {"first": inside, "shown": examples(texts[inside])[:60]}
    return _with_records_of(file, "fields", [*fields], others, records, said)


def _with_double_colons(file: TableFile, rows: list[list[str]]) -> Layout:
    names, known = rows[0], int(known_names(rows[0]) > 0)
    if not known:
        same = [row for row in rows if len(row) == len(names)]
        names = _likely_names([pa.chunked_array([column]) for column in zip(*same, strict=True)])
    every = (line.split("::") for line in islice(_lines(file), known, None))
    return Layout("double_colons", names, every, {})


def _with_numbers(file: TableFile, numbers: Mapping[str, Mapping[str, str]]) -> Layout:
    """Orders with columns such as `Item 1`; the other columns stand in the row of each item."""
    named = [name for columns in numbers.values() for name in columns]
    others = [name for name in file.names if name not in named]
    bases = dict.fromkeys(base for columns in numbers.values() for base in columns.values())

    def records(row: Mapping[str, Any]) -> Iterator[list[Any]]:
        for columns in numbers.values():
            values = {base: row[name] for name, base in columns.items()}
            if any(values[base] for base in values if ITEMS.match(base.lower())):
                yield [*map(values.get, bases)]

    said = {"first": named[0], "last": named[-1]}
    return _with_records_of(file, "wide", [*bases], others, records, said)


def _with_records_of(
    file: TableFile,
    key: str,
    names: list[str],
    others: list[str],
    records: Callable[[Mapping[str, Any]], Iterable[list[Any]]],
    said: Mapping[str, Any],
) -> Layout:
    """A row for each record of a row: the values of the other columns, and those of `names`."""
    order = [] if has_role("session", others) else ["order"]
    every = (row for batch in file.batches() for row in batch.to_pylist())
    rows = (
        [*([number] if order else []), *map(row.get, others), *record]
        for number, row in enumerate(every, 1)
        for record in records(row)
    )
    return Layout(key, [*order, *others, *names], rows, said)


def _numbered(names: list[str]) -> dict[str, dict[str, str]]:
    """Number -> name of a column -> name without the number, for columns such as `Item 1 SKU`.

    Empty if no column with a number is called item.

    >>> _numbered(["Order", "Item 1", "Qty 1", "Item 2", "Line 3"])
    {'1': {'Item 1': 'Item', 'Qty 1': 'Qty'}, '2': {'Item 2': 'Item'}}
    """
    parts = [(name, match) for name in names if (match := NUMBERED.fullmatch(name))]
    of_items = {match[2] for _, match in parts if ITEMS.fullmatch(match[1].lower())}
    numbers: dict[str, dict[str, str]] = {}
    for name, match in parts:
        if match[2] in of_items:
            numbers.setdefault(match[2], {})[name] = f"{match[1]} {match[3]}".strip()
    return numbers


def _lines(file: TableFile) -> Iterator[str]:
    """The lines of a text file below those that are not read."""
    encoding = file.encoding.replace("utf-8", "utf-8-sig")
    with pa.input_stream(str(file.path), compression=file.compression) as stream:
        lines = io.TextIOWrapper(stream, encoding, errors="replace")
        every = iter(lambda: lines.readline(LONGEST), "")
        for line in islice(every, len(file.above), None):
            yield line.rstrip("\n")


def refuse_without_header(
    sample: Sample, named: bool, of_items: bool = False, mapping: Mapping[str, str] | None = None
) -> None:
    """Refuse a file whose first line holds values instead of names.

    Where the settings name columns (`named`), numbers from 0 may be names.

    Raises:
        DataError: the message has the setting that names the columns.
    """
    rows, path = sample.table, sample.path
    names = rows.column_names
    known = known_names(names)
    counted = names == [str(number) for number in range(len(names))]
    if known > 1 or (named and (counted or known)):
        return
    values = any(name and re.fullmatch(VALUE, name) for name in names)
    again = any(
        pc.any(pc.equal(as_text(column), name)).as_py()
        for name, column in zip(names, rows.columns, strict=True)
        if name and not pa.types.is_nested(column.type)
    )
    if len(names) > 1 and (values or (not known and (again or len(set(names)) < len(names)))):
        shown = ", ".join(names)[:80]
        likely = [(mapping or {}).get(name, name) for name in _likely_names(rows.columns)]
        setting = shlex.quote(f"data.column_names=[{', '.join(likely)}]")
        order = "" if mapping or "timestamp" in likely else " --column timestamp=file-order"
        advice = sentence("name_columns", setting=setting, order=order)
        if of_items or is_spreadsheet(path):
            example = "item,title" if of_items else ",".join(likely)
            advice = f"write a line of names above the rows, such as {example}"
        raise DataError(sentence("without_header", path=path, shown=shown, advice=advice))


def _likely_names(columns: list[pa.ChunkedArray]) -> list[str]:
    """Names for columns without any: the time by its content; user and item in order."""
    rules = TimeRules("auto", "UTC", None, 0)
    free, names = iter(["user", "item"]), []
    for number, column in enumerate(columns):
        is_time = "timestamp" not in names and share_of_times(column, rules)[1] > 0.5
        several = pc.count_distinct(column).as_py() > 1 or len(column) < FEW_LINES
        other = f"column{number + 1}"
        names.append("timestamp" if is_time else next(free, other) if several else other)
    return names
