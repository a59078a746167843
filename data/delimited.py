"""Reads delimited files with Arrow; errors name the file, the line and the column."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv

from recsys.data.files import check_gzip, decode
from recsys.errors import DataError

_WHERE = re.compile(r"(?:In CSV column #(\d+): )?(?:CSV parse error: )?(?:Row #(\d+): )?(.*)", re.S)
BLOCK = 1 << 24  # bytes read at a time from a large file


def first_line(path: Path) -> str:
    """Read the first line of a file without a byte order mark; compressed files are opened.

    Raises:
        DataError: missing, empty, or not UTF-8.
    """
    try:
        raw = _content(path, 1 << 16).split(b"\n", 1)[0].rstrip(b"\r")
    except OSError as error:
        if path.is_file():
            check_gzip(path)
        raise DataError(f"{path}: cannot be read: {error}") from error
    if not raw.strip():
        raise DataError(f"{path}: the file is empty, or its first line is")
    return decode(raw, path)


def read_delimited(
    path: Path,
    delimiter: str,
    *,
    types: Mapping[str, pa.DataType],
    names: Sequence[str] | None = None,
    encoding: str = "utf-8",
    quote: str | Literal[False] = '"',
    required: Collection[str] = (),
) -> pa.Table:
    """Read a whole file as a table.

    Args:
        path: the file, which may be compressed.
        delimiter: one character.
        types: column -> type; the others are inferred from the first `BLOCK` bytes.
        names: of the columns, for a file without a header.
        encoding: of the text.
        quote: encloses values that contain the delimiter; False if there is no such character.
        required: columns that have a value in each row.

    Raises:
        DataError: empty, no rows, wrong number of fields, wrong type, not in `encoding`, or a row
            without a required value.
    """
    with _located_errors(path, names or (), delimiter, encoding):
        table = pa.csv.read_csv(
            str(path),
            pa.csv.ReadOptions(
                column_names=names, encoding=encoding, use_threads=False, block_size=BLOCK
            ),
            pa.csv.ParseOptions(delimiter=delimiter, quote_char=quote, newlines_in_values=True),
            pa.csv.ConvertOptions(column_types=dict(types)),
        )
    if any(pa.types.is_binary(kind) for kind in table.schema.types):  # text that is not valid
        decode(_content(path), path, encoding)
    if not table.num_rows:
        raise DataError(f"{path}: no rows in it")
    for name in required:
        empty = pc.or_kleene(
            pc.is_null(table[name]), pc.equal(pc.cast(table[name], pa.string()), "")
        )
        row = pc.index(empty, True).as_py()
        if row >= 0:
            raise DataError(f"{path}: column {name!r} is empty in data row {row + 1}")
    return table


@contextmanager
def _located_errors(
    path: Path, names: Sequence[str], delimiter: str, encoding: str
) -> Iterator[None]:
    """Convert Arrow's errors to a DataError that names the file, the line and the column."""
    try:
        yield
    except (pa.ArrowInvalid, pa.ArrowKeyError) as error:
        if "UTF8" in str(error):
            decode(_content(path), path, encoding)  # names the line
        raise DataError(
            _located(path, str(error), names or first_line(path).split(delimiter))
        ) from error
    except (OSError, UnicodeError) as error:
        if path.is_file():
            check_gzip(path)  # its error says where the file is cut off
        raise DataError(f"{path}: cannot be read: {error}") from error


def _content(path: Path, size: int | None = None) -> bytes:
    with pa.input_stream(str(path)) as stream:
        return bytes(stream.read(size))


def _located(path: Path, message: str, names: Sequence[str]) -> str:
    """Arrow's message after the file, the line and the name of the column."""
    match = _WHERE.match(message)
    column, row, text = match.groups() if match else (None, None, message)
    where = f"{path}:{row}" if row else str(path)
    column_name = f"column {names[int(column)]!r}: " if column and int(column) < len(names) else ""
    line = text.split("\n", 1)[0]
    return f"{where}: {column_name}{line[:160]}"
