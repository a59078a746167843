"""Finds out how a program wrote delimited text: delimiter, escapes, and rows that end with one."""

from __future__ import annotations

import csv
import io
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any

from recsys.data.column_words import known_names

DELIMITERS = (",", "\t", ";", "|", "\x01", "^", "~")  # Hive writes the fifth
FIRST_ROWS = 1000  # that show how a file is written
FEW_ROWS = 5  # below this, blanks do not divide columns
FITTING = 0.9  # of the rows that have as many values as the first line
MOST_ABOVE = 20  # lines above the names of the columns
BEHIND = "\x1f behind the last column"
BLOCK = 1 << 20  # bytes read at a time
ESCAPED = re.compile(rb'\\(["\\])')  # a quote or a backslash, behind a backslash


def first_of_table(rows: Sequence[Sequence[str]]) -> int:
    """The number of the row that names the columns, below titles and names of groups, if any.

    >>> first_of_table([["Orders of May"], [], ["Customer", "SKU", "Date"], ["c1", "p1", "1"]])
    2
    """
    filled = [sum(map(bool, row)) for row in rows[: MOST_ABOVE + 1]]
    longest = sorted(range(len(filled)), key=filled.__getitem__, reverse=True)
    number = next((n for n in longest if filled[n] > 1 and known_names(rows[n]) > 1), 0)
    return number if max(filled[:number], default=0) < filled[number] else 0


def lines_above(text: str) -> tuple[str, ...]:
    """The lines above the names of the columns, such as a title or `sep=;`."""
    lines = [line.rstrip("\r") for line in text.split("\n", MOST_ABOVE + 1)[: MOST_ABOVE + 1]]
    blanks = str.maketrans(dict.fromkeys(DELIMITERS, " "))
    whole = [re.sub('"[^"]*"', lambda cell: cell[0].translate(blanks), line) for line in lines]
    numbers = {}
    for delimiter in DELIMITERS:
        rows = [line.split(delimiter) for line in whole]
        number = first_of_table(rows)
        numbers[len(rows[number])] = number
    above = lines[: numbers[max(numbers)]]
    is_split = any(line.count('"') % 2 for line in above)  # a quoted name has several lines
    return tuple(above) if any(above) and not is_split else ()


def header(text: str) -> tuple[str, list[str]]:
    r"""The delimiter that divides the first line into most columns, and the columns.

    One that divides nearly all rows as the first line goes first: cells may hold lists.

    >>> header("p0;a|b|c\np1;a\np2;b|c\n")
    (';', ['p0', 'a|b|c'])
    """
    columns_by = {mark: next(iter(_rows(text, mark, 1)), []) for mark in DELIMITERS}
    divides = [mark for mark, columns in columns_by.items() if len(columns) > 1]
    rows_by = {mark: _rows(text, mark) for mark in divides if len(divides) > 1}
    fits = {
        mark: sum(len(row) == len(columns_by[mark]) for row in rows) >= FITTING * len(rows)
        for mark, rows in rows_by.items()
    }
    delimiter = max(columns_by, key=lambda mark: (fits.get(mark, False), len(columns_by[mark])))
    columns = columns_by[delimiter]
    if len(columns) == 1:
        rows = [line.rstrip().split(" ") for line in text.splitlines()[:FIRST_ROWS]]
        if len(rows) >= FEW_ROWS and len(rows[0]) > 1 and len({*map(len, rows[:-1])}) == 1:
            return " ", rows[0]
    return delimiter, columns


def names_of_values(text: str, delimiter: str, columns: Sequence[str]) -> tuple[str, ...]:
    """Names of the values of a row, where the header has other than most of the first rows.

    Rows may end with delimiters that the header does not have, or the other way round. Empty if
    header and rows agree, or disagree in another way.
    """
    if any("\n" in name for name in columns):
        return ()
    behind: Counter[int] = Counter()
    for row in _rows(text, delimiter):
        more = len(row) - len(columns)
        behind[more if not any(row[len(columns) :]) else 0] += 1
    more = behind.most_common(1)[0][0] if behind else 0
    if more > 0:
        return (*columns, *(f"{BEHIND} {number}" for number in range(more)))
    return tuple(columns[:more]) if more < 0 and not any(columns[more:]) else ()


def _rows(text: str, delimiter: str, end: int = FIRST_ROWS, /, **dialect: Any) -> list[list[str]]:
    """The rows behind the header but the last, which may be cut off; with `end` 1, the header."""
    lines = io.StringIO(text.replace("\0", " "), newline="")
    try:
        rows = list(islice(csv.reader(lines, delimiter=delimiter, **dialect), end > 1, end))
    except csv.Error:
        return []
    return [row for row in rows[: -1 if len(rows) > 1 else None] if row]


def has_escapes(blocks: Iterable[bytes], text: str, delimiter: str, columns: int) -> bool:
    r"""Whether quotes inside quoted values have a backslash before them, as Spark writes them.

    More of the first rows then have as many values as the header, or a later quote stands where
    none can. A backslash before the closing quote of a value is a letter of it, as in `"C:\"`.
    """
    if '\\"' in text:
        escaped, doubled = (
            sum(len(row) == columns for row in _rows(text, delimiter, **dialect))
            for dialect in ({"doublequote": False, "escapechar": "\\"}, {})
        )
        if escaped != doubled:
            return escaped > doubled
    mark = re.escape(delimiter.encode())
    inside = rb'(?:^|[\n%b])"(?:[^"\\\n]|\\[^"\n]|"")*\\"[^"\r\n%b]' % (mark, mark)
    return any(b'\\"' in block and re.search(inside, block) for block in blocks)


class WithDoubledQuotes(io.RawIOBase):
    """Delimited text in which each quote is doubled that had a backslash before it."""

    def __init__(self, stream: Any) -> None:
        self._stream, self._ready, self._held = stream, b"", b""

    def readable(self) -> bool:
        """True: it can be read."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Fill a buffer with the next bytes; 0 at the end."""
        while not self._ready:
            block = bytes(self._stream.read(BLOCK))
            if not (block or self._held):
                return 0
            whole = self._held + block
            end = len(whole.rstrip(b"\\")) if block else len(whole)
            whole, self._held = whole[:end], whole[end:]  # a pair may go on in the next block
            self._ready = ESCAPED.sub(lambda pair: b'""' if pair[1] == b'"' else b"\\", whole)
        size = min(len(buffer), len(self._ready))
        buffer[:size], self._ready = self._ready[:size], self._ready[size:]
        return size
