"""Cells that hold several items, or numbers of pieces beside an item."""

from __future__ import annotations

import ast
import json
import re
import shlex
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from recsys.data.advice import command_of
from recsys.data.column_words import EVENT_WORDS, rank
from recsys.data.report import sentence
from recsys.data.texts import as_text, each_value
from recsys.errors import DataError

MOST_CELLS = 5_000  # distinct cells that are looked at, and as many with marks of any kind
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


class ItemCells(NamedTuple):
    """How the cells of a column hold items.

    Attributes:
        mark: divides the items of a cell; `LISTS` for lists in brackets; None where a cell is one.
        numbers: the key of `NUMBERS` for the numbers of pieces beside items; None without any.
    """

    mark: str | None
    numbers: str | None

    def split(
        self, table: pa.Table, name: str, beside: Iterable[str] = ()
    ) -> tuple[pa.Table, pa.ChunkedArray, pa.Array]:
        """One row for each item of the cells of a column, without numbers of pieces.

        Cells of columns `beside` with as many parts, such as the titles, are divided as well.

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
        made, length = table.take(rows), pc.list_value_length(parts)
        for column in beside if len(several) else ():
            texts = pc.fill_null(as_text(table[column]), "")
            texts = each_value(texts, lambda w: DIVIDED.join(_parts(w, mark)), pa.string())
            others = pc.split_pattern(texts, DIVIDED).combine_chunks()
            same = pc.equal(pc.list_value_length(others), length).take(rows)
            place = pc.subtract(np.arange(len(rows)), parts.offsets.take(rows))
            place = pc.if_else(same, pc.add(place, others.offsets.take(rows)), None)
            own = pc.coalesce(others.flatten().take(place), as_text(made[column]))
            made = made.set_column(made.column_names.index(column), column, own)
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
    often = rows >= SEVERAL * every or mark == "\n"  # which no name has
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
        command = f": {command_of(program, path, 'lines.jsonl')}"
        break
    return DataError(sentence("records", path=path, name=name, shown=cell[:60], command=command))
