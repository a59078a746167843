"""Layouts of text files that are no tables with named columns; each is refused with a way out.

The way out is a setting, or a command that writes the table.
"""

from __future__ import annotations

import csv
import io
import json
import re
import shlex
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from recsys.data.column_words import EVENT_FIELDS, EVENT_WORDS, ITEM_WORDS, rank
from recsys.data.opening import TableFile
from recsys.data.texts import as_text
from recsys.data.time_formats import TimeRules, share_of_times
from recsys.errors import DataError

HEAD = 1 << 16  # bytes that show the layout
LINES = 1000
FEW_LINES = 5  # below this, lengths of lines say nothing
SAME_LENGTH = 0.6  # of the lines of a table
VALUE = r"[\d.,:/ TZ+-]*\d[\d.,:/ TZ+-]*"  # a number, a date or a time is no name of a column
NUMBERED = re.compile(r"(item|product|produkt|artikel|article|sku|producto|prodotto)s?[ _-]?\d+")
SEPARATORS = (";", "|", ",", " + ")
MOST_KNOWN = 0.9  # of the parts of cells that are in the items file
SEVERAL, REPEATED = 0.1, 0.5  # shares of cells with several items, and of distinct parts in them
AFTER = r"[^\s,;|]+ ?[xX×*] ?\d+"  # p0 x2
BEFORE = r"\d+ ?[xX×*] ?[^\s,;|]+"  # 2x p0
PIECES = "|".join(rf"^{one}(\s*[,;|]\s*{one})+$" for one in (AFTER, BEFORE))
LIST = r"^\s*\[[^{]*\]\s*$"  # of JSON or Python
RECORDS = r"^\s*\[?\s*\{.*[:=].*\}\s*\]?\s*$"
CODES = r"^[^\s,;|+]*\d[^\s,;|+]*$"
MOST_NUMBERED = 3  # columns such as `Item 1`, `Item 2` from which a row is a basket


def refuse_other_layouts(file: TableFile) -> None:
    """Refuse a text file with `::` between its columns, or with one basket on each line.

    Raises:
        DataError: it is one; the message has a command that writes a table.
    """
    if file.kind != "delimited":
        return
    lines = _lines(file)
    first = lines[0] if lines else ""
    if first.count("::") >= 2 or (first.count("::") == 1 and len(file.columns) == 1):
        raise _with_double_colons(file, lines)
    numbered = [n for n, c in enumerate(file.names) if NUMBERED.fullmatch(c.lower())]
    if len(numbered) >= MOST_NUMBERED:
        what = (
            f"the columns {file.names[numbered[0]]!r} to {file.names[numbered[-1]]!r} hold baskets"
        )
        raise _of_baskets(file, what, file.names[: numbered[0]], " if number > 1")
    marks = [mark for mark in ("\t", ";", "|", ",") if any(mark in line for line in lines)]
    mark = file.delimiter if len(file.columns) > 1 else (*marks, " ")[0]
    rows = [row for row in csv.reader(io.StringIO("\n".join(lines)), delimiter=mark) if row]
    lengths = Counter(map(len, rows))
    if len(rows) < FEW_LINES or len(lengths) < 2:
        return
    if max(lengths.values()) < SAME_LENGTH * len(rows) and not _known(rows[0]):
        what = f"the lines have {min(lengths)} to {max(lengths)} values, so each is a basket"
        raise _of_baskets(replace(file, delimiter=mark), what, _before_items(rows), "")


def _before_items(rows: list[list[str]]) -> list[str]:
    """Names of the columns before the items of a basket, none of whose values is an item."""
    names: list[str] = []
    for place in range(min(map(len, rows)) - 1):
        values = [row[place] for row in rows]
        if not {*values}.isdisjoint(value for row in rows for value in row[place + 1 :]):
            break
        is_user = "user" not in names and len({*values}) < len(values)
        names.append("user" if is_user else f"column{place + 1}")
    return names


def refuse_without_header(path: Path, rows: pa.Table, named: bool, of_items: bool = False) -> None:
    """Refuse a file whose first line holds values instead of names.

    Args:
        path: of the file.
        rows: its first rows, with the first line as names.
        named: whether the settings name columns. Numbers from 0 may then be names.
        of_items: whether the file describes items, whose columns no setting names.

    Raises:
        DataError: the message has the setting that names the columns.
    """
    names = rows.column_names
    known = _known(names)
    counted = names == [str(place) for place in range(len(names))]
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
        likely = _likely_names(rows.columns)
        setting = shlex.quote(f"data.column_names=[{', '.join(likely)}]")
        order = "" if "timestamp" in likely else " --column timestamp=file-order"
        advice = (
            f"name the columns with --set {setting}{order} (correct the names if they do not fit; "
            "column4 and so on are not read, and may be rating, quantity or type)"
        )
        if of_items:
            advice = "write a line of names above the rows, such as item,title"
        raise DataError(
            f"{path}: the first line holds values ({shown}) and no names of columns; {advice}"
        )


def _known(names: list[str]) -> int:
    """How many names are those of a role."""
    words = (*EVENT_WORDS.values(), *EVENT_FIELDS.values(), *ITEM_WORDS.values())
    return sum(any(rank(name, groups) is not None for groups in words) for name in names)


def _likely_names(columns: list[pa.ChunkedArray]) -> list[str]:
    """Names for columns without any: the time by its content; user and item in order."""
    rules = TimeRules("auto", "UTC", None, 0)
    free, names = iter(["user", "item"]), []
    for place, column in enumerate(columns):
        is_time = "timestamp" not in names and share_of_times(column, rules)[1] > 0.5
        several = pc.count_distinct(column).as_py() > 1 or len(column) < FEW_LINES
        other = f"column{place + 1}"
        names.append("timestamp" if is_time else next(free, other) if several else other)
    return names


def _rewritten(file: TableFile, names: list[str], rows: str) -> str:
    """A command that writes a table and reads it.

    Args:
        file: is read as the list `lines`.
        names: of the columns.
        rows: Python that makes the rows.
    """
    copy = shlex.quote(str(file.path.with_name(f"{file.path.name.partition('.')[0]}-table.csv")))
    name, packed, encoding = (
        json.dumps(text, ensure_ascii=False)
        for text in (str(file.path), file.compression or "", file.encoding.replace("-8", "-8-sig"))
    )
    program = (
        "import csv, io, pyarrow, sys; "
        f"stream = pyarrow.input_stream({name}, compression={packed} or None); "
        f'lines = list(io.TextIOWrapper(stream, {encoding}, newline="")); out = csv.writer('
        f"sys.stdout); out.writerow({json.dumps(names, ensure_ascii=False)}); out.writerows({rows})"
    )
    order = "" if "timestamp" in names else " --column timestamp=file-order"
    python = f"{shlex.quote(sys.executable)} -X utf8 -c {shlex.quote(program)}"
    return f"{python} > {copy} && recsys run {copy}{order}"


def _with_double_colons(file: TableFile, lines: list[str]) -> DataError:
    first, *others = (line.split("::") for line in lines)
    names, known = first, int(_known(first) > 0)
    if not known:
        same = [parts for parts in (first, *others) if len(parts) == len(first)]
        names = _likely_names([pa.chunked_array([column]) for column in zip(*same, strict=True)])
    rows = f'line.rstrip().split("::") for line in lines[{known}:]'
    return DataError(
        f"{file.path}: '::' divides the columns, which is not read; divide them by commas, with "
        f"names above them (correct them if they do not fit): {_rewritten(file, names, rows)}"
    )


def _of_baskets(file: TableFile, what: str, before: list[str], condition: str) -> DataError:
    rows = (
        f"[number, *row[:{len(before)}], item.strip()] for number, row in "
        f"enumerate(csv.reader(lines, delimiter={json.dumps(file.delimiter)}), 1){condition} "
        f"for item in row[{len(before)}:] if item.strip()"
    )
    return DataError(
        f"{file.path}: {what}; write one row for each item, with the number of the basket as the "
        f"order: {_rewritten(file, ['order', *before, 'item'], rows)}"
    )


def _lines(file: TableFile) -> list[str]:
    with pa.input_stream(str(file.path), compression=file.compression) as stream:
        head = bytes(stream.read(HEAD))
    lines = head.decode(file.encoding, errors="replace").removeprefix("\ufeff").splitlines()
    return [line for line in lines[:-1] or lines if line][:LINES]


def item_separator(
    given: str | None, name: str, cells: pa.ChunkedArray, known: pa.ChunkedArray
) -> str | None:
    """What divides the items of one cell; None where each cell is one item.

    Args:
        given: by the settings; `none` keeps cells as they are.
        name: of the column.
        cells: of the first rows.
        known: ids of the items file; empty without one.
    """
    if given is not None:
        return None if given == "none" else given
    lists = cells.filter(pc.match_substring_regex(cells, LIST))
    if len(lists) > (1 - SEVERAL) * len(cells):
        return ","
    for mark in SEPARATORS:
        several = cells.filter(pc.match_substring(cells, mark)).combine_chunks()
        if not len(several):
            continue
        parts = pc.utf8_trim_whitespace(pc.list_flatten(pc.split_pattern(several, mark)))
        parts = parts.filter(pc.not_equal(parts, ""))
        if len(known):
            whole, each = (pc.is_in(values, value_set=known.combine_chunks())
                           for values in (several, parts))  # fmt: skip
            if not pc.any(whole).as_py() and pc.mean(pc.cast(each, "double")).as_py() >= MOST_KNOWN:
                return mark
            continue
        plural = rank(name, EVENT_WORDS["item"]) == rank("items", EVENT_WORDS["item"])
        repeated = pc.count_distinct(parts).as_py() <= REPEATED * len(parts)
        if not repeated or len(several) < SEVERAL * len(cells):
            continue
        if plural:
            return mark
        if pc.all(pc.match_substring_regex(parts, CODES)).as_py():
            raise DataError(
                f"cells of column {name!r} look like several items ({several[0]}): --set "
                f"'data.clean.item_separator=\"{mark}\"' makes a row of each, --set "
                "data.clean.item_separator=none keeps a cell as one item"
            )
    return None


def refuse_pieces_in_cells(path: Path, name: str, cells: pa.ChunkedArray) -> None:
    """Refuse cells such as `p0 x2, p6 x1`, several items with numbers of pieces, and records.

    Raises:
        DataError: the message has a command that leaves the numbers out, or says what is read.
    """
    records = cells.filter(pc.match_substring_regex(cells, RECORDS))
    if len(records) > SEVERAL * len(cells):
        raise DataError(
            f"{path}: cells of column {name!r} hold records ({records[0].as_py()[:60]}), which are "
            "not read; write one row for each item, or JSON lines (.jsonl), of which lists are read"
        )
    several = cells.filter(pc.match_substring_regex(cells, PIECES))
    if len(several) < SEVERAL * len(cells) or not len(several):
        return
    mark = re.findall(r"[,;|]", several[0].as_py())[-1]
    copy = shlex.quote(str(path.with_name(f"{path.name.partition('.')[0]}-items{path.suffix}")))
    # The blank keeps it from other columns, with ids such as `max1` and sizes such as `10x20`.
    expression = r"s/( [xX]| ?[×*]) ?[0-9]+( *[],;|\t\"]|$)/\2/g"
    if re.match(BEFORE, several[0].as_py()):
        expression = r"s/(^|[],;|\t\"] *)[0-9]+ ?([xX] |[×*] ?)/\1/g"
    raise DataError(
        f"{path}: cells of column {name!r} hold items with numbers of pieces ({several[0]}), which "
        "are not read; leave the numbers out, or write one row for each item with a column "
        f"'quantity': sed -E '{expression}' {shlex.quote(str(path))} > {copy} && recsys run {copy} "
        f"--set 'data.clean.item_separator=\"{mark}\"'"
    )


def split_items(table: pa.Table, name: str, mark: str) -> pa.Table:
    """One row for each item of the cells of a column."""
    cells = pc.fill_null(as_text(table[name]), "").combine_chunks()
    bare = pc.replace_substring_regex(cells, r"^\s*\[|\]\s*$|[\"']", "")
    cells = pc.if_else(pc.match_substring_regex(cells, LIST), bare, cells)
    parts = pc.split_pattern(cells, mark)
    items, rows = pc.utf8_trim_whitespace(pc.list_flatten(parts)), pc.list_parent_indices(parts)
    keep = pc.or_(pc.not_equal(items, ""), pc.equal(cells.take(rows), ""))
    made = table.take(rows.filter(keep))
    return made.set_column(table.column_names.index(name), name, items.filter(keep))
