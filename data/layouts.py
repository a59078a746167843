"""Layouts of files with an order on each line, or without names; each is refused with a way out.

The way out is a setting, or a command that writes the table.
"""

from __future__ import annotations

import csv
import io
import re
import shlex
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from itertools import islice
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from recsys.data.advice import call_of
from recsys.data.column_words import has_role, known_names
from recsys.data.day_orders import share_of_times
from recsys.data.opening import TableFile, open_table
from recsys.data.report import sentence
from recsys.data.sample import Sample, share_of
from recsys.data.spreadsheets import is_spreadsheet
from recsys.data.texts import as_text
from recsys.data.time_formats import TimeRules
from recsys.errors import DataError

LINES, LONGEST = 1000, 1 << 20  # lines that show the layout, and characters of one
SAME_LENGTH = 0.6  # of the lines of a table
LABEL = r"[^,;|\t:]+:\s"  # of a basket, as T0: milk, tea; a label is no item
MARKS = ("\t", ";", "|", ",")
FEW_LINES = 5  # below this, lengths of lines say nothing
VALUE = r"[\d.,:/ TZ+-]*\d[\d.,:/ TZ+-]*"  # a number, a date or a time is no name of a column
NUMBERED = re.compile(r"(.*?)[\s_.-]*(\d+)[\s_.-]*(\D*)")
ITEMS = re.compile(
    "(line ?)?(item|product|produkt|artikel|article|sku|producto|prodotto)s?"
    "([ _-]?(id|nr|no|code|name))?"
)
# How much of an item is in a basket, where each item has a column; and none of it.
PIECES = r"(?i)^(\d{1,3}(\.0+)?|true|false|yes|no|x|[tfyn])$"
NO_PIECES = r"(?i)^(0(\.0+)?|false|no|[fn])?$"


def refuse_wide_orders(file: TableFile) -> None:
    """Refuse a file with one order on each line, whose items have columns such as `Item 1`.

    Raises:
        DataError: it is one; the message has a command that writes a table.
    """
    if numbers := _columns_of_items(file):
        named = [name for columns in numbers.values() for name in columns]
        timed = has_role("timestamp", [name for name in file.names if name not in named])
        command = call_of(print_lines_of_orders, file.path, "table.csv")
        command += "" if timed else " --column timestamp=file-order"
        said = {"first": named[0], "last": named[-1], "command": command}
        raise DataError(sentence("wide", path=file.path, **said))


def print_lines_of_orders(path: str) -> None:
    """Print a row for each item of such orders, with the other columns in each."""
    file = open_table(Path(path))
    numbers = _columns_of_items(file)
    others = [name for name in file.names if not any(name in own for own in numbers.values())]
    bases = [*dict.fromkeys(base for own in numbers.values() for base in own.values())]
    order = [] if has_role("session", others) else ["order"]
    out = csv.writer(sys.stdout, lineterminator="\n")
    out.writerow([*order, *others, *bases])
    every = (row for batch in file.batches() for row in batch.to_pylist())
    for number, row in enumerate(every, 1):
        for own in numbers.values():
            values = {base: row[name] for name, base in own.items()}
            if any(values[base] for base in values if ITEMS.match(base.lower())):
                before = [number] if order else []
                out.writerow([*before, *map(row.get, others), *map(values.get, bases)])


def refuse_other_lines(file: TableFile) -> None:
    """Refuse a text file with `::` between its columns, or with a basket on each line.

    Raises:
        DataError: it is one; the message has a command that writes a table.
    """
    text = list(islice(filter(None, _lines(file)), LINES)) if file.kind == "delimited" else []
    marks = [file.delimiter] if len(file.columns) > 1 else [m for m in MARKS if m in "".join(text)]
    colons = text[0].count("::") if text else 0
    mark = "::" if colons > 1 or (colons and len(file.columns) == 1) else (*marks, " ")[0]
    rows: list[list[str]] = []
    with suppress(csv.Error):  # an unclosed quote, or a very long text: no basket
        rows = list(_divided(text, mark))
    if mark == "::":
        whole = [row for row in rows if len(row) == len(rows[0])]
        columns = [pa.chunked_array([values]) for values in zip(*whole, strict=True)]
        key, names = "double_colons", [] if known_names(rows[0]) else _likely_names(columns)
    elif _are_baskets(rows) and not all(re.match(LABEL, line) for line in text):
        key, names = "baskets", ["order", *_before_items(rows), "item"]
    else:
        return
    command = call_of(print_lines, file.path, "table.csv", mark, *names)
    command += "" if has_role("timestamp", names or rows[0]) else " --column timestamp=file-order"
    raise DataError(sentence(key, path=file.path, command=command))


def print_lines(path: str, mark: str, *names: str) -> None:
    """Print such a file as a table with these names: with a row for each item of a basket."""
    out = csv.writer(sys.stdout, lineterminator="\n")
    out.writerows([names] if names else [])
    own = len(names) - 2
    for number, row in enumerate(_divided(_lines(open_table(Path(path))), mark), 1):
        items = ([number, *row[:own], item.strip()] for item in row[own:] if item.strip())
        out.writerows([row] if mark == "::" else items)


def _before_items(rows: list[list[str]]) -> list[str]:
    """Names of the columns before the items of a basket, none of whose values is an item."""
    names: list[str] = []
    for number in range(min(map(len, rows)) - 1):
        values = [row[number] for row in rows]
        if not {*values}.isdisjoint(value for row in rows for value in row[number + 1 :]):
            break
        times = share_of_times(pa.chunked_array([values]), TimeRules("auto", "UTC", None, 0))[1]
        is_user = "user" not in names and len({*values}) < len(values)
        other = "user" if is_user else f"column{number + 1}"
        names.append("timestamp" if times > SAME_LENGTH and "timestamp" not in names else other)
    return names


def _divided(lines: Iterable[str], mark: str) -> Iterable[list[str]]:
    if mark == "::":
        return (line.split("::") for line in lines if line)
    return csv.reader(lines, delimiter=mark)


def _are_baskets(rows: list[list[str]]) -> bool:
    """Whether lengths differ, or texts of the first row are in other columns of other rows.

    >>> rows = [["tea", "jam", "ink"], ["jam", "ink", "tea"]] * 3
    >>> _are_baskets(rows), _are_baskets([["u1", "tea", "view"], ["u2", "tea", "view"]] * 3)
    (True, False)
    """
    if len(rows) < FEW_LINES or known_names(rows[0]):
        return False
    lengths = Counter(map(len, rows))
    columns = [{row[n] for row in rows[1:] if n < len(row)} for n in range(max(lengths))]
    moved = [
        text for place, text in enumerate(rows[0]) if not re.fullmatch(VALUE, text)
        and any(text in column for n, column in enumerate(columns) if n != place)
    ]  # fmt: skip
    is_table = max(lengths.values()) >= SAME_LENGTH * len(rows)
    return not is_table or (max(lengths) > 2 and len(moved) >= min(2, len(rows[0])))


def _lines(file: TableFile) -> Iterator[str]:
    """The lines of a text file below those that are not read."""
    encoding = file.encoding.replace("utf-8", "utf-8-sig")
    with pa.input_stream(str(file.path), compression=file.compression) as stream:
        lines = io.TextIOWrapper(stream, encoding, errors="replace")
        every = iter(lambda: lines.readline(LONGEST), "")
        for line in islice(every, len(file.above), None):
            yield line.rstrip("\n")


def _columns_of_items(file: TableFile) -> dict[str, dict[str, str]]:
    """As `_numbered`; empty where the columns say which items an order has, as yes or 2."""
    numbers = _numbered(file.names) if file.kind != "json" else {}
    if len(numbers) < 2:
        return {}
    sample = Sample(file.path, file.sample(LINES))
    values = sample.texts(next(n for n in file.names if n in next(iter(numbers.values()))))
    # An order has a first item: a column that is empty or says no is an item itself.
    has_first = len(values) == sample.table.num_rows and share_of(values, NO_PIECES) == 0
    return numbers if has_first or share_of(values, PIECES) < 1 else {}


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
