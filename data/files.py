"""Outside files, read with care: whole, as UTF-8, and with errors that name file and line."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

from recsys.errors import DataError

if TYPE_CHECKING:
    from pathlib import Path


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
    try:
        return raw.decode(encoding)
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
            seen: set[str] = set()
            repeated = next(k for k, _ in pairs if k in seen or seen.add(k))  # type: ignore[func-returns-value]
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


_INTEGERS = re.compile(r"[0-9 \t\r\n]*")


def read_integer_lines(path: Path) -> list[list[int]]:
    """Lines of blank-separated non-negative integers; empty lines are left out.

    Raises:
        DataError: anything else stands there; the text names the line.
    """
    text = read_text(path)
    if not _INTEGERS.fullmatch(text):
        for number, line in enumerate(text.split("\n"), 1):
            if not _INTEGERS.fullmatch(line):
                odd = next(t for t in line.split() if not _INTEGERS.fullmatch(t))
                raise DataError(
                    f"{path}:{number}: expected integers separated by blanks, found {odd[:40]!r}"
                )
    return [[int(token) for token in line.split()] for line in text.split("\n") if line.strip()]
