"""Layouts of text files that are no tables with named columns; each is refused with a way out.

The way out is a setting, or a command that writes the table.
"""

from __future__ import annotations

import ast
import csv
import io
import json
import re
import shlex
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice, permutations
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from recsys.data.column_words import EVENT_FIELDS, EVENT_WORDS, known_names, rank
from recsys.data.files import Damage
from recsys.data.opening import TableFile, open_table
from recsys.data.report import sentence
from recsys.data.sample import Sample, share_of
from recsys.data.spreadsheets import is_spreadsheet
from recsys.data.texts import as_text, each_value, examples
from recsys.data.time_formats import TimeRules, share_of_times
from recsys.errors import DataError

LINES, LONGEST = 1000, 1 << 20  # lines that show the layout, and characters of one
MOST_CELLS = 5_000  # distinct cells that are looked at, and as many with marks of any kind
FEW_LINES = 5  # below this, lengths of lines say nothing
SAME_LENGTH = 0.6  # of the lines of a table
VALUE = r"[\d.,:/ TZ+-]*\d[\d.,:/ TZ+-]*"  # a number, a date or a time is no name of a column
NUMBERED = re.compile(r"(.*?)[\s_.-]*(\d+)[\s_.-]*(\D*)")
ITEMS = re.compile(
    "(line ?)?(item|product|produkt|artikel|article|sku|producto|prodotto)s?"
    "([ _-]?(id|nr|no|code|name))?"
)
LISTS = "[]"  # the mark of cells of which only those in brackets are lists
OF_LISTS = ("<br>", "<br/>", "<br />", "\n", "\t", ";", "|")  # hardly in the name of one item
SEPARATORS = (*OF_LISTS, ",", " + ", " & ", " / ", " and ", " und ")
BETWEEN_CODES = ("&", "+", "/", " ")  # which names of single items have as well
MOST_KNOWN = 0.9  # of the parts of cells that are in the items file, or that are codes
SEVERAL, REPEATED = 0.1, 0.5  # shares of cells with several items, and of distinct parts in them
MIXED = 0.3  # share of the later parts of cells that are first in others: of names, hardly any are
# Lists of JSON and Python, arrays of PostgreSQL and of NumPy.
LIST = r"^\s*(?:\[[^{\[]*\]|\([^{\[(]*\)|\{[^{\[]*\})\s*$"
# Lists that are no ids such as {0A-1}: with a mark, in quotes, numbers of JSON, or codes of NumPy.
SURE_LIST = re.compile(r"""[,;|]|^\s*[\[({]\s*["']|^\s*\[\s*\d+\s*\]\s*$|\d\S*\s+\S*\d""")
FIELD = r"\{\s*[\"']?[^\s,:={}\"']+[\"']?\s*[:=]"
RECORDS = rf"^\s*[\[({{]?\s*{FIELD}.*\}}\s*[\])}}]?\s*$|^\s*[\[(]\s*[\[(].*[\])]$"
TOKEN = re.compile(
    r"""(?P<json>"(?:[^"\\]|\\.)*")|'(?P<quoted>(?:[^'\\]|\\.)*)'|(?P<bare>[^\s,;|][^,;|]*)"""
)
DIVIDED = "\x1f"  # between the items of a cell while it is split
CODE = re.compile(r"[^\s,;|+&/]*\d[^\s,;|+&/]*")
# Numbers of pieces beside an item: 2x p0, p0 x2; and p0:2, p0 (2), which may also be ids.
NUMBERS = {
    "before": r"^(?P<pieces>[+-]?\d{1,4}) ?(?:[xX] |[×*] ?)(?P<item>\S.*)$",
    "after": r"^(?P<item>.*\S)(?: [xX] ?| ?[×*] ?)(?P<pieces>[+-]?\d{1,4})$",
    "colon": r"^(?P<item>[^:=]*[^\s:=])(?: ?[:=] ?| ?\((?:[xX] ?)?)(?P<pieces>[+-]?\d{1,4})\)?$",
}
SINGLE = 0.4  # share of numbers of pieces that are 1, if they are no part of ids
LABEL = r"^([^,;|\t:]+):\s+"  # of a basket: T0: milk, tea
# How much of an item is in a basket, where each item has a column; and none of it.
PIECES = r"(?i)^(\d{1,3}(\.0+)?|true|false|yes|no|x|[tfyn])$"
NO_PIECES = r"(?i)^(0(\.0+)?|false|no|[fn])?$"
FEW_ITEMS = 3  # columns with items that some basket has
# Records such as Product ID: 1, Product Qty: 2 | Product ID: 3, Product Qty: 1
LISTED = r"^\s*\pL[\pL ]*:[^,|]*,\s*\pL[\pL ]*:"
PAIR = re.compile(r"\s*([^:,|]+?):\s*(.*?)\s*(?:,(?=[^:,|]+:)|$)")


class Layout(NamedTuple):
    """A file that is no table with a row for each item, and its rows as such a table.

    Attributes:
        key: of the sentence that describes it.
        names: of the columns of the table.
        rows: of the table.
        said: values for the sentence.
    """

    key: str
    names: list[str]
    rows: Iterable[Sequence[Any]]
    said: Mapping[str, Any]


def refuse_other_layouts(file: TableFile, *, named: bool = False) -> None:
    """Refuse a file with one order on each line, or a text file with `::` between its columns.

    Args:
        file: of events or items.
        named: whether the column of items is known.

    Raises:
        DataError: it is one; the message has a command that writes a table.
    """
    layout = _other_layout(file, named=named)
    if layout is not None:
        path = json.dumps(str(file.path), ensure_ascii=False)
        program = f"from recsys.data.layouts import print_table; print_table({path})"
        order = "" if _has_role("timestamp", layout.names) else " --column timestamp=file-order"
        order += " --column user=order" if layout.key == "only_items" else ""
        command = f"{_command(program, file.path, 'table.csv')}{order}"
        raise DataError(sentence(layout.key, path=file.path, command=command, **layout.said))


def print_table(path: str) -> None:
    """Print a file of another layout as a table, which `refuse_other_layouts` advises."""
    layout = _other_layout(open_table(Path(path)))
    out = csv.writer(sys.stdout, lineterminator="\n")
    if layout is not None:
        out.writerow(layout.names)
        out.writerows(layout.rows)


def refuse_orders_beside_lines(files: Sequence[TableFile], items: str = "") -> None:
    """Refuse a file of lines of orders beside one that says who made each order, and when.

    Args:
        files: both, in any order.
        items: the file of items, for the command.

    Raises:
        DataError: they are such files; the message has the command that joins them.
    """
    for lines, orders in permutations(files, 2):
        of_lines, of_orders = (
            {role for role in ("item", "user", "timestamp") if _has_role(role, file.names)}
            for file in (lines, orders)
        )
        keys = [n for n in lines.names if rank(n, EVENT_WORDS["session"][:2]) is not None]
        pairs = [(own, own) for own in keys if own in orders.names]
        pairs += [(own, name) for own in keys for name in orders.names if name.lower() == "id"]
        if pairs and "item" in of_lines and of_orders - of_lines and "item" not in of_orders:
            texts = (str(lines.path), str(orders.path), *pairs[0])
            arguments = ", ".join(json.dumps(text, ensure_ascii=False) for text in texts)
            program = f"from recsys.data.layouts import print_lines; print_lines({arguments})"
            command = _command(program, lines.path, "joined.csv")
            command += f" --items {shlex.quote(items)}" * bool(items)
            said = {"path": lines.path, "other": orders.path.name, "command": command}
            raise DataError(sentence("orders_and_lines", **said))


def print_lines(lines: str, orders: str, own: str, other: str) -> None:
    """Print lines with the columns of their orders, as `refuse_orders_beside_lines` advises."""
    tables = (open_table(Path(path)).read(Damage()) for path in (lines, orders))
    made, every = (pa.table([*map(as_text, t.columns)], t.column_names).to_pandas() for t in tables)
    every = every[every[other].fillna("") != ""].drop_duplicates(other).rename(columns={other: own})
    made.merge(every, "left", own, suffixes=("", " of order")).to_csv(sys.stdout, index=False)


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
    marks = [mark for mark in ("\t", ";", "|", ",") if any(mark in line for line in lines)]
    labelled = all(re.match(LABEL, line) for line in lines)
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
    before = _before_items([row[:2] for row in rows] if labelled else rows)
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
    lists = [n for n, values in texts.items() if share_of(values, LISTED) >= MOST_KNOWN][:1]
    is_wide = len(counts) >= len(file.names) / 2
    is_wide = is_wide and sum(map(bool, bought.values())) >= FEW_ITEMS
    inside = counts if is_wide else lists
    others = [name for name in file.names if name not in inside]
    is_named = _has_role("item", others) or any(rank(n, EVENT_FIELDS["title"]) == 0 for n in others)
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


def _before_items(rows: list[list[str]]) -> list[str]:
    """Names of the columns before the items of a basket, none of whose values is an item."""
    names: list[str] = []
    for number in range(min(map(len, rows)) - 1):
        values = [row[number] for row in rows]
        if not {*values}.isdisjoint(value for row in rows for value in row[number + 1 :]):
            break
        is_user = "user" not in names and len({*values}) < len(values)
        names.append("user" if is_user else f"column{number + 1}")
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
    order = [] if _has_role("session", others) else ["order"]
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


def _has_role(role: str, names: list[str]) -> bool:
    return any(rank(name, EVENT_WORDS[role]) is not None for name in names)


def _command(program: str, path: Path, end: str) -> str:
    """A command that writes a copy of a file with a program, and reads it."""
    copy = shlex.quote(str(path.with_name(f"{path.name.partition('.')[0]}-{end}")))
    python = f"{shlex.quote(sys.executable)} -X utf8 -c {shlex.quote(program)}"
    return f"{python} > {copy} && recsys run {copy}"


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

    Args:
        sample: of the file, with the first line as names.
        named: whether the settings name columns. Numbers from 0 may then be names.
        of_items: whether the file describes items, whose columns no setting names.
        mapping: role -> column of earlier files.

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


class ItemCells(NamedTuple):
    """How the cells of a column hold items.

    Attributes:
        mark: divides the items of a cell; `LISTS` for lists in brackets; None where a cell is one.
        numbers: the key of `NUMBERS` for the numbers of pieces beside items; None without any.
    """

    mark: str | None
    numbers: str | None

    def split(self, table: pa.Table, name: str) -> tuple[pa.Table, pa.ChunkedArray, pa.Array]:
        """One row for each item of the cells of a column, without numbers of pieces.

        Returns:
            the rows, the cells that had several items, and the items that had a number.
        """
        texts = cells = pc.fill_null(as_text(table[name]), "")
        if self.mark is not None:
            mark = self.mark
            texts = each_value(cells, lambda w: DIVIDED.join(_parts(w, mark)), pa.string())
        parts = pc.split_pattern(texts.combine_chunks(), DIVIDED)
        items, rows = pc.utf8_trim_whitespace(pc.list_flatten(parts)), pc.list_parent_indices(parts)
        several = cells.filter(pc.greater(pc.list_value_length(parts), 1))
        numbered = items[:0]
        if self.numbers is not None:
            matches = pc.extract_regex(items, NUMBERS[self.numbers])
            numbered = items.filter(pc.is_valid(matches))
            items = pc.coalesce(pc.struct_field(matches, "item"), items)
        made = table.take(rows)
        position = table.column_names.index(name)
        return made.set_column(position, name, pa.chunked_array([items])), several, numbered


def _parts(cell: str, mark: str) -> list[str]:
    """The items of a cell, at least one, which is empty in an empty cell.

    >>> _parts('["a, b", "c"]', LISTS), _parts("('P4', 'P8')", ","), _parts("[4 8]", LISTS)
    (['a, b', 'c'], ['P4', 'P8'], ['4', '8'])
    >>> _parts("P4; P8;", ";"), _parts("P4, P8", LISTS), _parts("{}", LISTS)
    (['P4', 'P8'], ['P4, P8'], [''])
    """
    parts = [cell] if mark == LISTS else cell.split(mark)
    if re.match(LIST, cell) and (mark == LISTS or SURE_LIST.search(cell)):
        parts = []
        for token in TOKEN.finditer(cell.strip()[1:-1]):
            text = token["bare"] or re.sub(r"\\(.)", r"\1", token["quoted"] or "")
            codes = text.split()
            if token["json"]:
                try:
                    text = json.loads(token["json"])
                except ValueError:
                    text = token["json"][1:-1]
            is_row = token["bare"] and all(map(CODE.fullmatch, codes)) and _bare(text) == text
            parts += codes if is_row else [text]
    return [part for part in map(str.strip, parts) if part] or [""]


def item_cells(
    path: Path, chosen: str | None, name: str, cells: pa.ChunkedArray, known: pa.ChunkedArray
) -> ItemCells:
    """How the cells of a column hold items, by the first rows.

    Args:
        path: of the file, for errors.
        chosen: what divides the items by the settings; `none` keeps cells as they are.
        name: of the column.
        cells: of the first rows, without missing ones.
        known: ids of the items file; empty without one.

    Raises:
        DataError: cells with records, with pieces below 1, or with what may be several items; the
            message has a command or a setting that decides.
    """
    if chosen == "none":
        return ItemCells(None, None)
    records = cells.filter(pc.match_substring_regex(cells, RECORDS))
    if len(records) > SEVERAL * len(cells):
        raise _with_records(path, name, records[0].as_py())
    marked = pc.match_substring_regex(cells, r"[^\pL\pN_.-]")
    counts: dict[str, int] = {}
    for some in (cells.filter(marked), cells.filter(pc.invert(marked))):
        counts |= Counter(some.to_pylist()).most_common(MOST_CELLS)
    ids = set(known.to_pylist())
    is_plural = rank(name, EVENT_WORDS["item"]) == rank("items", EVENT_WORDS["item"])
    mark = chosen or next(
        filter(None, (_divides(m, name, counts, ids, is_plural) for m in
                      (LISTS, *SEPARATORS, *BETWEEN_CODES))), None,
    )  # fmt: skip
    parts: Counter[str] = Counter()
    for cell, rows in counts.items():
        for part in _parts(cell, mark) if mark else [cell]:
            parts[part] += rows
    return ItemCells(mark, _numbers(path, name, parts, is_list=mark is not None))


def parts_repeat(values: pa.ChunkedArray) -> bool:
    """Whether the parts of cells, of which no two may be alike, are mostly those of others."""
    parts = pc.list_flatten(pc.split_pattern_regex(values, r"[^\pL\pN_-]+"))
    return bool(REPEATED * len(parts) > pc.count_distinct(parts).as_py())


def _divides(
    mark: str, name: str, counts: Mapping[str, int], ids: set[str], is_plural: bool
) -> str | None:
    """The mark, if it divides items in cells (`counts` of their rows); None if it does not.

    The name of the column may be a plural. A DataError says that the mark may divide items.
    """
    several = [c for c in counts if (re.match(LIST, c) if mark == LISTS else mark in c.strip())]
    rows, every = sum(counts[cell] for cell in several), sum(counts.values())
    sure = sum(counts[cell] for cell in several if mark != LISTS or SURE_LIST.search(cell))
    if not sure:
        return None
    if mark == LISTS and rows > (1 - SEVERAL) * every and 2 * sure > rows:
        return mark
    if mark in SEPARATORS:
        inside = [part for cell in several for part in _parts(cell, mark)]
        if sum(_bare(part) != part for part in inside) >= MOST_KNOWN * len(inside):
            return mark
    parts = {cell: [_bare(part) for part in _parts(cell, mark)] for cell in counts}
    inside = [part for cell in several for part in parts[cell]]
    if ids and mark != LISTS:
        known = sum(part in ids for part in inside) >= MOST_KNOWN * len(inside)
        return mark if known and ids.isdisjoint(several) else None
    first = {cell_parts[0] for cell_parts in parts.values()}
    later = {part for cell in several for part in parts[cell][1:]}
    is_mixed = len(later) > 1 and len(later & first) >= MIXED * len(later)
    are_codes = sum(map(bool, map(CODE.fullmatch, inside))) >= MOST_KNOWN * len(inside)
    if is_mixed and (mark == LISTS or (is_plural and (are_codes or mark in SEPARATORS))):
        return mark
    often = rows >= SEVERAL * every
    of_rows = [part for cell in several for part in parts[cell] * counts[cell]]
    if are_codes and mark in SEPARATORS:
        is_mixed = is_mixed or (often and len({*of_rows}) <= REPEATED * len(of_rows))
    elif mark == LISTS:
        is_mixed = often
    elif not are_codes:
        is_mixed = is_mixed or (is_plural and mark in OF_LISTS)
        is_mixed = is_mixed and often and mark in SEPARATORS and (is_plural or mark != " + ")
    if is_mixed:
        setting = shlex.quote(f"data.clean.item_separator={json.dumps(mark)}")
        raise DataError(sentence("may_be_several", name=name, shown=several[0], setting=setting))
    return None


def _bare(part: str) -> str:
    """An item without a number of pieces beside it."""
    match = next(filter(None, (re.match(form, part) for form in NUMBERS.values())), None)
    return match["item"] if match else part


def _numbers(path: Path, name: str, parts: Mapping[str, int], *, is_list: bool) -> str | None:
    """Where numbers of pieces stand beside items; None if there are none.

    The `parts` are items, perhaps with such numbers, and their rows.

    A DataError says that a number is below 1, which may be a return.
    """
    for position, form in NUMBERS.items():
        matches = {part: match for part in parts if (match := re.match(form, part))}
        rows = sum(parts[part] for part in matches)
        pieces = Counter(match["item"] for match in matches.values())
        again = sum(pieces[m["item"]] > 1 or m["item"] in parts for m in matches.values())
        single = sum(parts[part] for part, match in matches.items() if int(match["pieces"]) == 1)
        pieces_of_one = sum(parts[item] for item in pieces)
        most, recurs = rows >= MOST_KNOWN * sum(parts.values()), again >= REPEATED * len(matches)
        is_sure = most or (recurs and (is_list or all(map(CODE.fullmatch, pieces))))
        if position == "colon":
            is_sure = (
                is_sure
                and recurs
                and len(pieces) > 2
                and single + pieces_of_one >= SINGLE * (rows + pieces_of_one)
            )
        elif not is_list:
            is_sure = is_sure and recurs
        if not matches or rows < SEVERAL * sum(parts.values()) or not is_sure:
            continue
        if below := next((part for part, m in matches.items() if int(m["pieces"]) < 1), None):
            raise DataError(sentence("pieces_below_1", path=path, name=name, shown=below))
        return position
    return None


def _with_records(path: Path, name: str, cell: str) -> DataError:
    """The error for cells with records, with a command that reads those of JSON and Python."""
    command = ""
    for reader in ("json.loads", "ast.literal_eval"):
        try:
            (json.loads if reader == "json.loads" else ast.literal_eval)(cell)
        except (ValueError, SyntaxError):
            continue
        program = (
            "import ast, json, pathlib; from recsys.data.opening import open_table; "
            f"rows = (row for batch in open_table(pathlib.Path({str(path)!r})).batches() "
            f"for row in batch.to_pylist()); [print(json.dumps(row | {{{name!r}: "
            f"{reader}(row[{name!r}] or '[]')}})) for row in rows]"
        )
        command = f": {_command(program, path, 'lines.jsonl')}"
        break
    return DataError(sentence("records", path=path, name=name, shown=cell[:60], command=command))
