"""Reads the sheets of a spreadsheet (.xlsx, .xls, .ods) as text."""

from __future__ import annotations

import io
import re
import zipfile
import zlib
from datetime import date, datetime, time, timedelta
from functools import lru_cache
from pathlib import Path
from typing import Any

import pyarrow as pa
from rich.markup import escape

from recsys.data.column_words import has_role
from recsys.data.dialect import first_of_table
from recsys.data.files import NoRowsError
from recsys.data.report import sentence
from recsys.data.returns import kind_of_file
from recsys.errors import DataError
from recsys.progress import say

EVENTS, NO_ROWS = ("user", "item", "timestamp"), "no rows"
MARKS = {"is_return": "returns", "is_cancelled": "cancelled orders"}
MOST_DIGITS, LOST = 10**15, ".0"  # longer numbers have lost digits, and end as floating numbers do
DAY_AND_MONTH, FEW_DATES = re.compile(r"\s*(\d{1,2})[-/.](\d{1,2})[-/.]\d{2,4}\b"), 3
# A cell of some styles with a number, perhaps that of a formula: its tag, its style and its number.
CELL = (
    r'(<(?:\w+:)?c\b(?=[^<>]*\ss="({})")(?![^<>]*\st="[^n])[^<>]*[^</>])'
    r"(>(?:<(?:\w+:)?f\b[^<]*(?:</[^>]*>)?)?<(?:\w+:)?v>)(\d{{1,15}})<"
)
DAMAGED = (zipfile.BadZipFile, zlib.error)
SUFFIXES = (".xlsx", ".xlsm", ".xls", ".ods")


def is_spreadsheet(path: Path) -> bool:
    """Whether a file has the name of a spreadsheet."""
    return path.suffix.lower() in SUFFIXES


def read_spreadsheet(path: Path) -> pa.Table:
    """The rows of the first sheet with rows, and of the sheets with the same names of columns.

    A whole number of at most 15 digits has no decimal place, or the zeros of its format, and times
    are ISO texts. Lines with fewer values above the names of the columns are no part of the table.
    What is not read is said in the terminal. Where some sheets are called returns, or cancelled
    orders, a column such as `is_return` says so of their rows.

    Raises:
        DataError: no readable spreadsheet, or no sheet with two rows.
    """
    stat = path.stat()
    return _read(path, stat.st_mtime_ns, stat.st_size)


@lru_cache(2)  # a file is read for its columns, for its days and for its rows
def _read(path: Path, _changed: int, _size: int) -> pa.Table:
    from python_calamine import CalamineError, CalamineWorkbook, SheetVisibleEnum

    sheets: dict[str, list[list[Any]]] = {}  # from the names of the columns on
    rows: list[list[str | None]] = []
    marks: dict[str, list[str]] = {name: [] for name in MARKS}
    others: dict[str, str] = {}  # why they are not read
    above: list[str] = []
    try:
        workbook = CalamineWorkbook.from_object(_as_shown(path))
        for name in workbook.sheet_names:
            sheet = workbook.get_sheet_by_name(name).to_python(skip_empty_area=True)
            filled = [row for row in sheet if any(cell != "" for cell in row)]
            if len(filled) < 2:
                others |= {name: NO_ROWS} if filled else {}
                continue
            few = next((n for n, row in enumerate(filled) if sum(c != "" for c in row) > 1), 0)
            start = first_of_table([[_text(c) or "" for c in row] for row in filled[:30]]) or few
            above += [f"{name}: {_text(cell)}" for row in filled[:start] for cell in row if cell]
            sheets[name] = filled[start:]
        shown = {s.name for s in workbook.sheets_metadata if s.visible == SheetVisibleEnum.Visible}
    except (CalamineError, OSError, ValueError) as error:
        raise DataError(f"{path}: no readable spreadsheet: {error}; save it as CSV") from error
    if not sheets:
        raise NoRowsError(f"{path}: no sheet has names of columns and rows below them")
    if shown & sheets.keys():
        others |= {name: "hidden" for name in sheets if name not in shown}
        sheets = {name: every for name, every in sheets.items() if name in shown}
    for name, cells in sheets.items():
        _check_days(path, cells)
        sheets[name] = [[_text(cell) for cell in row] for row in cells]
    headers = {name: [cell or "" for cell in sheet[0]] for name, sheet in sheets.items()}
    counts = {n: sum(has_role(role, names) for role in EVENTS) for n, names in headers.items()}
    header = headers[max(counts, key=lambda name: (kind_of_file(name) is None, counts[name]))]
    for name, names in headers.items():
        if sorted(names) != sorted(header) or (names != header and len({*names}) < len(names)):
            others[name] = f"{len(sheets[name]) - 1:,} rows"
            continue
        positions = [*range(len(names))] if names == header else [names.index(n) for n in header]
        for column, kind in MARKS.items():
            marks[column] += [str(kind_of_file(name) == kind).lower()] * (len(sheets[name]) - 1)
        rows += [[row[position] for position in positions] for row in sheets[name][1:]]
    back = [n for n, why in others.items() if why != NO_ROWS and kind_of_file(n, headers.get(n))]
    if back:
        raise DataError(sentence("sheets_of_returns", path=path, names=", ".join(back)))
    for description, names in (
        ("sheets that are hidden or have other columns", [f"{n} ({others[n]})" for n in others]),
        ("lines above the names of the columns", above),
    ):
        if names:
            say(
                f"data: {escape(path.name)}: {description} are not read: {escape(', '.join(names))}"
            )
    columns = [pa.array(column, pa.string()) for column in zip(*rows, strict=True)]
    for column, answers in marks.items():
        if len({*answers}) > 1 and column not in header:
            columns, header = [*columns, pa.array(answers, pa.string())], [*header, column]
    return pa.table(columns, names=header)


def _check_days(path: Path, rows: list[list[Any]]) -> None:
    """Refuse dates of which a program has read the day as the month, where there is such a month.

    Raises:
        DataError: no date has a day above 12, and each of the dates that stayed texts has one.
    """
    for name, *cells in zip(*rows, strict=True):
        dates = [cell for cell in cells if isinstance(cell, date)]
        texts = [cell for cell in cells if isinstance(cell, str) and DAY_AND_MONTH.match(cell)]
        if len(dates) < FEW_DATES or not texts or any(cell.day > 12 for cell in dates):
            continue
        if all(max(map(int, DAY_AND_MONTH.findall(text)[0])) > 12 for text in texts):
            said = {"text": texts[0], "date": dates[0].isoformat()[:10]}
            raise DataError(sentence("swapped_days", path=path, name=name, **said))


def _as_shown(path: Path) -> Any:
    """What the reader opens: numbers are texts in it where their format is of zeros, as 00042."""

    def value(tag: str, name: str) -> str:
        return str((re.findall(rf'\s{name}="([^"]*)"', tag) or [""])[0])

    try:
        with zipfile.ZipFile(path) as parts:
            styles = parts.read("xl/styles.xml").decode()
            tags = re.findall(r"<(?:\w+:)?numFmt\b[^<>]*", styles)
            codes = {value(tag, "numFmtId"): value(tag, "formatCode") for tag in tags}
            cells = styles.partition("cellXfs")[2].partition("cellXfs")[0]
            tags = re.findall(r"<(?:\w+:)?xf\b[^<>]*", cells)
            formats = [codes.get(value(tag, "numFmtId"), "") for tag in tags]
            zeros = {str(n): len(code) for n, code in enumerate(formats) if re.match("00+$", code)}
            names = [n for n in parts.namelist() if zeros and n.endswith((".xml", ".rels"))]
            contents = {name: parts.read(name) for name in names}
            sheets = {n: contents[n].decode() for n in names if n.startswith("xl/worksheets/")}
    except (KeyError, NotImplementedError, RuntimeError, ValueError, *DAMAGED):
        return str(path)
    number = re.compile(CELL.format("|".join(zeros)))

    def shown(cell: re.Match[str]) -> str:
        tag = cell[1].replace(' t="n"', "")
        return f'{tag} t="str"{cell[3]}{cell[4].zfill(zeros[cell[2]])}<'

    with zipfile.ZipFile(made := io.BytesIO(), "w") as parts:
        for name, content in contents.items():
            parts.writestr(name, number.sub(shown, sheets[name]) if name in sheets else content)
    made.seek(0)
    return made if zeros else str(path)


def _text(cell: Any) -> str | None:
    """A cell as text; None for an empty one."""
    if isinstance(cell, bool):
        return str(cell).lower()
    if isinstance(cell, float):
        decimals = LOST * (abs(cell) >= MOST_DIGITS)
        return f"{int(cell)}{decimals}" if cell.is_integer() else repr(cell)
    if isinstance(cell, datetime):
        return cell.isoformat(" ")
    if isinstance(cell, (date, time, timedelta)):
        return str(cell)
    text = str(cell).strip()
    return text or None
