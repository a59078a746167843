"""Reads the sheets of a spreadsheet (.xlsx, .xls, .ods) as text."""

from __future__ import annotations

from datetime import date, datetime, time, timedelta
from functools import lru_cache
from pathlib import Path
from typing import Any

import pyarrow as pa
from rich.markup import escape

from recsys.errors import DataError
from recsys.progress import say

SUFFIXES = (".xlsx", ".xlsm", ".xls", ".ods")


def is_spreadsheet(path: Path) -> bool:
    """Whether a file has the name of a spreadsheet."""
    return path.suffix.lower() in SUFFIXES


def read_spreadsheet(path: Path) -> pa.Table:
    """The rows of the first sheet with rows, and of the sheets with the same names of columns.

    A whole number has no decimal place, and times are ISO texts. The sheets that are not read are
    named in the terminal.

    Raises:
        DataError: no readable spreadsheet, or no sheet with two rows.
    """
    stat = path.stat()
    return _read(path, stat.st_mtime_ns, stat.st_size)


@lru_cache(2)  # a file is read for its columns, for its days and for its rows
def _read(path: Path, _changed: int, _size: int) -> pa.Table:
    from python_calamine import CalamineError, CalamineWorkbook

    header: list[str] | None = None
    rows: list[list[str | None]] = []
    others = []
    try:
        workbook = CalamineWorkbook.from_path(str(path))
        for name in workbook.sheet_names:
            sheet = workbook.get_sheet_by_name(name).to_python(skip_empty_area=True)
            filled = [row for row in sheet if any(cell != "" for cell in row)]
            if len(filled) < 2:
                continue
            names = [_text(cell) or "" for cell in filled[0]]
            if header is not None and names != header:
                others.append(name)
                continue
            header = names
            rows += [[_text(cell) for cell in row] for row in filled[1:]]
    except (CalamineError, OSError, ValueError) as error:
        raise DataError(f"{path}: no readable spreadsheet: {error}; save it as CSV") from error
    if header is None:
        raise DataError(f"{path}: no sheet has names of columns and rows below them")
    if others:
        listed = escape(", ".join(others))
        say(f"data: sheets of {escape(path.name)} with other columns are not read: {listed}")
    columns = [pa.array(column, pa.string()) for column in zip(*rows, strict=True)]
    return pa.table(columns, names=header)


def _text(cell: Any) -> str | None:
    """A cell as text; None for an empty one."""
    if isinstance(cell, bool):
        return str(cell).lower()
    if isinstance(cell, float):
        return str(int(cell)) if cell.is_integer() and abs(cell) < 2**53 else repr(cell)
    if isinstance(cell, datetime):
        return cell.isoformat(" ")
    if isinstance(cell, (date, time, timedelta)):
        return str(cell)
    text = str(cell).strip()
    return text or None
