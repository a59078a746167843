"""Outside files, read with care: whole, as UTF-8, and with errors that name file and line."""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from typing import TYPE_CHECKING, Any

from recsys.errors import DataError

if TYPE_CHECKING:
    from pathlib import Path


MAX_DIGITS = 18  # what surely fits 64 bits
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
    try:
        value = json.loads(text, object_pairs_hook=unique)
    except json.JSONDecodeError as error:
        whole = "" if text.rstrip().endswith(("}", "]")) else "; the file looks cut off"
        raise DataError(f"{path}:{error.lineno}: not valid JSON: {error.msg}{whole}") from error
    if not isinstance(value, dict):
        raise DataError(f"{path}: expected a JSON object, found {type(value).__name__}")
    return value


def number(key: str, path: Path) -> int:
    """The number that a JSON key writes out.

    Raises:
        DataError: it is none.
    """
    if not key.isdecimal() or len(key) > MAX_DIGITS or key != str(int(key)):
        raise DataError(f"{path}: item {key!r}: expected a number as key")
    return int(key)


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
