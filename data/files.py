"""Outside files, read with care: as UTF-8, and with errors that name file and line.

Gzip is told by the first bytes, not by the name.
"""

from __future__ import annotations

import gzip
import json
import os
import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from recsys.errors import DataError

GZIP = b"\x1f\x8b"
MAX_LINE = 1 << 26  # bytes; a record is never so long
MAX_DIGITS = 18  # what surely fits 64 bits
_HALF = re.compile(r"\\u[dD][89a-fA-F]")  # escapes that make a character in pairs only
_INTEGERS = re.compile(rf"(?:[ \t\r\n]|[0-9]{{1,{MAX_DIGITS}}}(?![0-9]))*")


def read_text(path: Path, encoding: str = "utf-8") -> str:
    """The text of a file that must not be empty.

    Raises:
        DataError: missing, empty, or not in `encoding` (the line is named).
    """
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise DataError(f"{path}: {error.strerror or error}") from error
    if not raw.strip():
        raise DataError(f"{path}: the file is empty")
    return decode(raw, path, encoding)


def decode(raw: bytes, path: Path, encoding: str = "utf-8") -> str:
    """The content of a file as text, without a byte order mark.

    Raises:
        DataError: not in `encoding`; the line is named.
    """
    try:
        return raw.decode(encoding).removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise DataError(
            f"{path}:{line}: byte {raw[error.start]:#04x} is not {encoding.upper()}; "
            "convert the file, for example with iconv"
        ) from error


def decode_line(raw: bytes, path: Path, line: int) -> str:
    """One line as text.

    Raises:
        DataError: not UTF-8.
    """
    try:
        return raw.decode("utf-8-sig" if line == 1 else "utf-8")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path}:{line}: byte {raw[error.start]:#04x} is not UTF-8; "
            "convert the file, for example with iconv"
        ) from error


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file.

    Raises:
        DataError: not JSON (cut off, for example), not an object, or a key that stands twice.
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            (repeated, _), *_ = Counter(key for key, _ in pairs).most_common(1)
            raise DataError(f"{path}: key {repeated!r} stands twice")
        return found

    text = read_text(path)
    value = parsed(partial(json.loads, object_pairs_hook=unique), text, path)
    if not isinstance(value, dict):
        raise DataError(f"{path}: expected a JSON object, found {type(value).__name__}")
    return value


def parsed(
    parse: Callable[[str], Any],
    text: str,
    path: Path,
    line: int | None = None,
    fault: str = "not valid JSON",
) -> Any:
    """The value that a text writes out; whatever the parser raises becomes an error with its place.

    Args:
        parse: `json.loads` or `ast.literal_eval`.
        text: a whole file, or one line of it.
        path: of the file, for errors.
        line: the line that the text is.
        fault: what to say of a text that cannot be parsed.

    Raises:
        DataError: it cannot be parsed, or a text in it holds half a character.
    """
    where = f"{path}:{line}" if line else str(path)
    try:
        value = parse(text)
        if _HALF.search(text):
            "".join(_texts(value)).encode()
    except DataError:
        raise
    except json.JSONDecodeError as error:
        whole = "" if text.rstrip().endswith(("}", "]")) else "; the file looks cut off"
        raise DataError(f"{path}:{line or error.lineno}: {fault}: {error.msg}{whole}") from error
    except UnicodeEncodeError as error:
        half = error.object[error.start].encode("unicode_escape").decode()
        raise DataError(
            f"{where}: a text holds {half}, which is half a character; take it out of the file"
        ) from error
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError) as error:
        raise DataError(f"{where}: {fault}: {str(error)[:120]}") from error
    return value


def _texts(value: Any) -> Iterator[str]:
    """All texts in a value, at any depth."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for pair in value.items():
            yield from _texts(pair)
    elif isinstance(value, (list, tuple, set)):
        for part in value:
            yield from _texts(part)


def read_lines(path: Path) -> Iterator[tuple[int, str]]:
    """The lines that are not empty, with their numbers, of a file that may be large and gzipped.

    Raises:
        DataError: missing, empty, cut off, damaged, a line without end, or not UTF-8.
    """
    line, size = 0, 0
    try:
        with path.open("rb") as raw:
            zipped = raw.read(2) == GZIP
            raw.seek(0)
            stream = gzip.GzipFile(fileobj=raw) if zipped else raw
            try:
                while content := stream.readline(MAX_LINE):
                    line += 1
                    size += len(content)
                    if len(content) == MAX_LINE:
                        raise DataError(f"{path}:{line}: longer than {MAX_LINE >> 20} MiB")
                    if text := decode_line(content, path, line).strip():
                        yield line, text
            except (EOFError, zlib.error, gzip.BadGzipFile) as error:
                raise damaged_gzip(path, raw.tell(), size, line, error) from error
    except OSError as error:
        raise DataError(f"{path}: {error.strerror or error}") from error
    if not size:
        raise DataError(f"{path}: the file is empty")


def check_gzip(path: Path) -> None:
    """Read a gzipped file to its end; other files pass.

    Raises:
        DataError: it is cut off or damaged; the text says where and what to do.
    """
    size = lines = 0
    with path.open("rb") as raw:
        if raw.read(2) != GZIP:
            return
        raw.seek(0)
        try:
            with gzip.GzipFile(fileobj=raw) as stream:
                while content := stream.read(1 << 20):
                    size += len(content)
                    lines += content.count(b"\n")
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise damaged_gzip(path, raw.tell(), size, lines, error) from error


def damaged_gzip(path: Path, place: int, size: int, lines: int, error: Exception) -> DataError:
    """What to say of a gzipped file that ends too early or is damaged."""
    what = "is cut off" if isinstance(error, EOFError) else f"is damaged ({error})"
    return DataError(
        f"{path}: the gzip file {what} at byte {place:,} of {path.stat().st_size:,}; before that "
        f"{size:,} bytes ({lines:,} lines) could be read. Download it again (recsys data download "
        "goes on where it stopped), or keep what is whole: "
        f"gzip -dc {path.name} | head -n {lines} > part"
    )


def number(key: str, path: Path) -> int:
    """The number that a JSON key writes out.

    Raises:
        DataError: it is none.
    """
    if not key.isdecimal() or len(key) > MAX_DIGITS or key != str(int(key)):
        raise DataError(f"{path}: item {key!r}: expected a number as key")
    return int(key)


def find_one(path: Path, pattern: str) -> Path:
    """The file at `path`, or the only file in the folder `path` that matches `pattern`.

    Raises:
        DataError: a folder with no or with several such files.
    """
    if not path.is_dir():
        return path
    inside = sorted(path.glob(pattern))
    if len(inside) != 1:
        raise DataError(f"{path}: holds {len(inside)} files {pattern}; name one as data.path")
    return inside[0]


def is_cut(path: Path) -> bool:
    """Whether the last line has no end: written by hand, or cut off."""
    with path.open("rb") as stream:
        stream.seek(-1, os.SEEK_END)
        return stream.read() != b"\n"


def read_integer_lines(path: Path) -> list[list[int]]:
    """Lines of blank-separated non-negative integers; empty lines are left out.

    Raises:
        DataError: anything else stands there; the text names the line.
    """
    text = read_text(path)
    if not _INTEGERS.fullmatch(text):
        for row, line in enumerate(text.split("\n"), 1):
            if not _INTEGERS.fullmatch(line):
                odd = next(t for t in re.split("[ \t\r]+", line) if not _INTEGERS.fullmatch(t))
                raise DataError(
                    f"{path}:{row}: expected integers separated by blanks, found {odd[:40]!r}"
                )
    return [[int(token) for token in line.split()] for line in text.split("\n") if line.strip()]
