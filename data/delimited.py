"""Delimited files through Arrow, with errors that name file, line and column."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Literal

import pyarrow as pa
import pyarrow.csv

from data.files import read_text
from recsys.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

_WHERE = re.compile(r"(?:In CSV column #(\d+): )?(?:CSV parse error: )?(?:Row #(\d+): )?(.*)", re.S)


def first_line(path: Path) -> str:
    """The header of a file, without a byte order mark; `.gz` and the like are opened.

    Raises:
        DataError: missing, empty, or not UTF-8.
    """
    try:
        with pa.input_stream(str(path)) as stream:
            raw: bytes = stream.read(1 << 16).split(b"\n", 1)[0].rstrip(b"\r")
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error}") from error
    if not raw.strip():
        raise DataError(f"{path}: the file is empty, or its first line is")
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path}:1: not UTF-8 text; convert the file, for example with iconv"
        ) from error


def read_delimited(
    path: Path,
    delimiter: str,
    *,
    types: Mapping[str, pa.DataType],
    names: Sequence[str] | None = None,
    encoding: str = "utf-8",
    quote: str | Literal[False] = '"',
) -> pa.Table:
    """A whole file as a table.

    Args:
        path: the file; `.gz` and the like are opened.
        delimiter: one character.
        types: column -> type; other columns take the type that fits.
        names: of the columns, for a file without a header.
        encoding: of the text.
        quote: what encloses a value that holds the delimiter; False where nothing does.

    Raises:
        DataError: empty, no rows, wrong number of fields, wrong type, or not in `encoding`.
    """
    try:
        table = pa.csv.read_csv(
            str(path),
            pa.csv.ReadOptions(column_names=names, encoding=encoding, use_threads=False),
            pa.csv.ParseOptions(delimiter=delimiter, quote_char=quote, newlines_in_values=True),
            pa.csv.ConvertOptions(column_types=dict(types)),
        )
    except pa.ArrowInvalid as error:
        if "UTF8" in str(error):
            read_text(path, encoding)  # names the line
        raise DataError(
            _located(path, str(error), names or first_line(path).split(delimiter))
        ) from error
    except (OSError, UnicodeError) as error:
        raise DataError(f"{path}: cannot be read: {error}") from error
    if not table.num_rows:
        raise DataError(f"{path}: no rows in it")
    return table


def _located(path: Path, message: str, names: Sequence[str]) -> str:
    """Arrow's message with the file, the line and the column's name in front."""
    match = _WHERE.match(message)
    column, row, text = match.groups() if match else (None, None, message)
    where = f"{path}:{row}" if row else str(path)
    what = f"column {names[int(column)]!r}: " if column and int(column) < len(names) else ""
    line = text.split("\n", 1)[0]
    return f"{where}: {what}{line[:160]}"
