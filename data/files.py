"""Reads text, JSON and lines of outside files as UTF-8; errors name the file and the line.

Gzip is recognised by the first bytes, not by the file name. `Damage` counts rows that cannot be
read.
"""

from __future__ import annotations

import gzip
import json
import math
import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from recsys.data.report import sentence
from recsys.errors import DataError

GZIP = b"\x1f\x8b"
MAX_LINE = 1 << 26  # bytes; no record is that long
MAX_DIGITS = 18  # any such number fits in 64 bits
_HALF = re.compile(r"\\u[dD][89a-fA-F]")  # a surrogate; a character needs a pair of them
_INTEGERS = re.compile(rf"(?:[ \t\r\n]|[0-9]{{1,{MAX_DIGITS}}}(?![0-9]))*")


class NoRowsError(DataError):
    """A table with columns of some `names` has no rows, or none of its `rows` can be used."""

    def __init__(self, text: str, names: Sequence[str] = (), rows: int = 0) -> None:
        super().__init__(text)
        self.names, self.rows = names, rows


def read_text(path: Path, encoding: str = "utf-8") -> str:
    """Read a text file that must not be empty.

    Raises:
        DataError: missing, empty, or not in `encoding`; the message names the line.
    """
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise DataError(f"{path}: {error.strerror or error}") from error
    if not raw.strip():
        raise DataError(f"{path}: the file is empty")
    return decode(raw, path, encoding)


def decode(raw: bytes, path: Path, encoding: str = "utf-8", line: int | None = None) -> str:
    """Decode the content of a file, or one line of it, without a byte order mark.

    Raises:
        DataError: not in `encoding`; the message names the line.
    """
    try:
        return raw.decode(encoding).removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        line = line or raw.count(b"\n", 0, error.start) + 1
        said = {"path": path, "line": line, "byte": raw[error.start], "kind": encoding.upper()}
        raise DataError(sentence("other_encoding", **said)) from error


def read_json(path: Path) -> dict[str, Any]:
    """Read the JSON object in a file.

    Raises:
        DataError: not valid JSON, not an object, or a repeated key.
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        unique_pairs = dict(pairs)
        if len(unique_pairs) != len(pairs):
            (repeated, _), *_ = Counter(key for key, _ in pairs).most_common(1)
            raise DataError(f"{path}: key {repeated!r} occurs twice")
        return unique_pairs

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
    """Parse a text; any error of the parser becomes a DataError with the place, or with `fault`.

    Raises:
        DataError: it cannot be parsed, or a string in it contains a lone surrogate.
    """
    where = f"{path}:{line}" if line else str(path)
    try:
        value = parse(text)
        if _HALF.search(text):
            json.dumps(value, ensure_ascii=False, default=list).encode()
    except DataError:
        raise
    except json.JSONDecodeError as error:
        whole = "" if text.rstrip().endswith(("}", "]")) else "; the file looks cut off"
        raise DataError(f"{path}:{line or error.lineno}: {fault}: {error.msg}{whole}") from error
    except UnicodeEncodeError as error:
        half = error.object[error.start].encode("unicode_escape").decode()
        raise DataError(sentence("half_a_pair", where=where, half=half)) from error
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError) as error:
        raise DataError(f"{where}: {fault}: {str(error)[:120]}") from error
    return value


def read_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Read the non-empty lines of a file, which may be large and gzipped, with their numbers.

    Raises:
        DataError: missing, empty, cut off, damaged, a line that is too long, or not UTF-8.
    """
    line = 0
    try:
        with path.open("rb") as raw:
            zipped = raw.read(2) == GZIP
            raw.seek(0)
            stream = gzip.GzipFile(fileobj=raw) if zipped else raw
            while content := stream.readline(MAX_LINE):
                line += 1
                if len(content) == MAX_LINE:
                    raise DataError(f"{path}:{line}: longer than {MAX_LINE >> 20} MiB")
                if text := decode(content, path, line=line).strip():
                    yield line, text
    except (OSError, EOFError, zlib.error) as error:
        if path.is_file():
            check_gzip(path)
        raise DataError(f"{path}: {getattr(error, 'strerror', None) or error}") from error
    if not line:
        raise DataError(f"{path}: the file is empty")


def check_gzip(path: Path) -> None:
    """Read a gzipped file to its end; do nothing for other files.

    Raises:
        DataError: it is cut off or damaged; the message says where and what to do.
    """
    size = lines = 0
    with path.open("rb") as raw:
        if raw.read(2) != GZIP:
            return
        raw.seek(0)
        try:
            with gzip.GzipFile(fileobj=raw) as stream:
                while content := stream.read1(1 << 20):  # all that precedes the damage
                    size += len(content)
                    lines += content.count(b"\n")
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            damage = "is cut off" if isinstance(error, EOFError) else f"is damaged ({error})"
            said = {"position": raw.tell(), "every": path.stat().st_size, "size": size}
            text = sentence("damaged_gzip", path=path, damage=damage, lines=lines, **said)
            raise DataError(text) from error


def number(key: str, path: Path) -> int:
    """Convert a JSON key to the number that it spells.

    Raises:
        DataError: it is not a number.
    """
    if not key.isdecimal() or len(key) > MAX_DIGITS or key != str(int(key)):
        raise DataError(f"{path}: item {key!r}: expected a number as key")
    return int(key)


def read_integer_lines(path: Path) -> list[list[int]]:
    """Read lines of non-negative integers separated by blanks; empty lines are skipped.

    Raises:
        DataError: anything else in a line; the message names the line.
    """
    text = read_text(path)
    if not _INTEGERS.fullmatch(text):
        for row, line in enumerate(text.split("\n"), 1):
            if not _INTEGERS.fullmatch(line):
                odd = next(t for t in re.split("[ \t\r]+", line) if not _INTEGERS.fullmatch(t))
                raise DataError(sentence("no_integers", path=path, row=row, shown=odd[:40]))
    return [[int(token) for token in line.split()] for line in text.split("\n") if line.strip()]


@dataclass
class Damage:
    """Rows of a file that could not be read.

    Attributes:
        rows: number of damaged rows.
        examples: the first few, as line and content.
        good: number of rows that were read.
    """

    rows: int = 0
    examples: list[str] = field(default_factory=list)
    good: int = 0

    def add(self, line: int | None, text: str, rows: int = 1) -> None:
        """Count damaged rows, of which `text` is the first."""
        self.rows += rows
        if len(self.examples) < 3:
            where = f"line {line}: " if line else ""
            self.examples.append(f"{where}{text[:60]}")

    def drop(self, table: pa.Table, texts: pa.ChunkedArray, bad: pa.ChunkedArray) -> pa.Table:
        """Count the rows whose text in a column is bad, with the lines in it; return the others."""
        if not pc.any(bad).as_py():
            return table
        for text in texts.filter(bad).to_pylist():
            self.add(None, text, text.count("\n") + 1)
        return table.filter(pc.invert(bad))

    def check(self, path: Path, share: float) -> None:
        """Refuse a file of which more than a share of the rows is damaged.

        Raises:
            DataError: it is; the message shows the first damaged row.
        """
        damaged = self.rows / max(self.rows + self.good, 1)
        if damaged > share:
            said = {"every": self.rows + self.good, "shown": "; ".join(self.examples[:1])}
            enough = math.ceil(100 * damaged) / 100
            raise DataError(sentence("damaged", path=path, rows=self.rows, share=enough, **said))
