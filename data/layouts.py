"""Layouts of text files that are no tables with named columns; each is refused with a way out.

The way out is a setting, or a command that writes the table.
"""

from __future__ import annotations

import csv
import io
import re
import shlex
import sys
from collections import Counter
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
SAME_LENGTH = 0.6  # of the lines of a table
VALUE = r"[\d.,:/ TZ+-]*\d[\d.,:/ TZ+-]*"  # a number, a date or a time is no name of a column
NUMBERED = re.compile(r"(.*?)[\s_.-]*(\d+)[\s_.-]*(\D*)")
ITEMS = re.compile(
    "(line ?)?(item|product|produkt|artikel|article|sku|producto|prodotto)s?"
    "([ _-]?(id|nr|no|code|name))?"
)
LABEL = r"^([^,;|\t:]+)(?::\s+|\t(?=[^\t]*[,;|][^\t]*$))"  # of a basket: T0: milk, tea
# What divides the columns of a page, and its rows.
RULE, BLANKS, RULED = r"\s*\|\s*", r"\s{2,}|\t+", r"[\s|+:=-]*"
# How much of an item is in a basket, where each item has a column; and none of it.
PIECES = r"(?i)^(\d{1,3}(\.0+)?|true|false|yes|no|x|[tfyn])$"
NO_PIECES = r"(?i)^(0(\.0+)?|false|no|[fn])?$"
FEW_ITEMS = 3  # columns with items that some basket has
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
    """A text file with `::` between its columns, or a basket on each line."""
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
    labelled = all(re.match(LABEL, line) for line in lines)
    bare = [re.sub(LABEL, "", line) if labelled else line for line in lines]
    marks = [mark for mark in ("\t", ";", "|", ",") if any(mark in line for line in bare)]
    is_divided = len(file.columns) > 1 and not labelled
    mark = file.delimiter if is_divided else (*marks, " ")[0]

    def divided(lines: Iterable[str]) -> Iterator[list[str]]:
        if labelled:
            lines = (re.sub(LABEL, rf"\1{mark}", line) for line in lines)
        return csv.reader(lines, delimiter=mark)

    rows = [row for row in divided(lines) if row]
    lengths = Counter(map(len, rows))
    is_table = not rows or max(lengths.values()) >= SAME_LENGTH * len(rows) or known_names(rows[0])
    if len(rows) < FEW_LINES or (is_table and not labelled and not _are_baskets(rows)):
        return None
    before = _before_items([row[:2] for row in rows] if labelled else rows, labelled=labelled)
    baskets = (
        [number, *row[: len(before)], item.strip()]
        for number, row in enumerate(divided(_lines(file)), 1)
        for item in row[len(before) :]
        if item.strip()
    )
    said = {"sizes": " to ".join(map(str, sorted({min(lengths), max(lengths)})))}
    return Layout("baskets", ["order", *before, "item"], baskets, said)


def _are_baskets(rows: list[list[str]]) -> bool:
    """Whether texts of the first row are in other columns of other rows, as items of baskets are.

    >>> rows = [["tea", "jam", "ink"], ["jam", "ink", "tea"]]
    >>> _are_baskets(rows), _are_baskets([["u1", "tea", "view"], ["u2", "tea", "view"]])
    (True, False)
    """
    length = max(map(len, rows))
    columns = [{row[n] for row in rows[1:] if n < len(row)} for n in range(length)]
    moved = [
        text for place, text in enumerate(rows[0]) if not re.fullmatch(VALUE, text)
        and any(text in column for n, column in enumerate(columns) if n != place)
    ]  # fmt: skip
    return length > 2 and len(moved) >= min(2, len(rows[0]))


def _without_items(file: TableFile) -> Layout | None:
    """A table without a column of items: each item has a column, or records are in one."""
    if len(file.names) == 1 and rank(file.names[0], EVENT_WORDS["item"]) is not None:
        return _with_records_of(file, "only_items", [], file.names, lambda _: [[]], {})
    sample = Sample(file.path, file.sample(LINES))
    texts = {name: sample.texts(name) for name, count in sample.counts.items() if count == 1}
    bought = {name: _bought(name, values, sample) for name, values in texts.items()}
    counts = [name for name, rows in bought.items() if rows is not None]
    listed = (n for n in texts if all(share_of(texts[n], p) >= MOST_KNOWN for p in LISTED))
    lists = [*islice(listed, 1)]
    is_wide = 2 * len(counts) >= len(file.names) and sum(map(bool, bought.values())) >= FEW_ITEMS
    inside = counts if is_wide else lists
    others = [name for name in file.names if name not in inside]
    is_named = has_role("item", others) or any(rank(n, EVENT_FIELDS["title"]) == 0 for n in others)
    if not inside or is_named:
        return None
    cells = [PAIR.findall(cell) for cell in ([] if is_wide else texts[inside[0]].to_pylist())]
    fields = dict.fromkeys(name for cell in cells for name, _ in cell)

    def records(row: Mapping[str, Any]) -> Iterator[list[Any]]:
        cell = {name: str("" if row[name] is None else row[name]) for name in inside}
        if is_wide:
            some = [(n, text) for n, text in cell.items() if not re.match(NO_PIECES, text)]
            yield from ([n, text if text[0].isdigit() else 1] for n, text in some)
        else:
            named = (dict(PAIR.findall(part)) for part in cell[inside[0]].split("|"))
            yield from ([*map(record.get, fields)] for record in named)

    said = {"first": inside[0], "last": inside[-1], "shown": examples(texts[inside[0]])[:60]}
    key, names = ("columns_of_items", ["item", "quantity"]) if is_wide else ("fields", [*fields])
    return _with_records_of(file, key, names, others, records, said)


def _bought(name: str, values: pa.ChunkedArray, sample: Sample) -> int | None:
    """The baskets with the item of this name; None if the column does not count pieces of one."""
    is_other = known_names([name]) and rank(name, EVENT_WORDS["item"]) is None
    rows = round(len(values) * (1 - share_of(values, NO_PIECES)))
    if is_other or rows == sample.table.num_rows or (len(values) and share_of(values, PIECES) < 1):
        return None
    return rows


def _before_items(rows: list[list[str]], *, labelled: bool) -> list[str]:
    """Names of the columns before the items of a basket, none of whose values is an item."""
    names: list[str] = []
    for number in range(min(map(len, rows)) - 1):
        values = [row[number] for row in rows]
        if not {*values}.isdisjoint(value for row in rows for value in row[number + 1 :]):
            break
        times = share_of_times(pa.chunked_array([values]), TimeRules("auto", "UTC", None, 0))[1]
        is_user = "user" not in names and (labelled or len({*values}) < len(values))
        other = "user" if is_user else f"column{number + 1}"
        names.append("timestamp" if times > SAME_LENGTH and "timestamp" not in names else other)
    return names


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
