"""Reads whether items are available: yes and no in several languages, or the number in stock."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable

import pyarrow as pa
import pyarrow.compute as pc

from recsys.data.column_words import words
from recsys.data.texts import each_value
from recsys.event_names import normalised

YES, NO = words("yes"), words("no")
PLAIN = dict.fromkeys(words("plain_yes"), True) | dict.fromkeys(words("plain_no"), False)
MISSING = frozenset(("", "null", "none", "nan", "undefined", "na", "nat", "nv"))
ZEROS = re.compile(r"[0\s!-/:-@\[-`{-~]*$")  # also an empty date, such as 0000-00-00
NO_DATE = re.compile(r"(0001|1753|1899|1900|1970)-(01|12)-(01|30|31)([T ]00:00|$)")
MARKS = {"✓": True, "✔": True, "да": True, "нет": False}
NUMBER = re.compile(r"-?\d{1,9}([.,]\d+)?", re.ASCII)


def share_of_answers(texts: pa.ChunkedArray) -> float:
    """The share of values that say whether an item is available; 0 if no item is.

    A shop that has everything today may sell out tomorrow, so one answer for all items is enough.
    """
    answers = read_available(texts).drop_null()
    some = pc.any(answers).as_py() or len(texts) < 2
    return len(answers) / len(texts) if len(texts) and some else 0.0


def plain_answer(text: str) -> bool | None:
    """Yes or no, also as 1 and 0; None for everything else.

    >>> [plain_answer(text) for text in ("Ja", "0.0", "7", "")]
    [True, False, None, None]
    """
    return MARKS.get(text.lower(), PLAIN.get(normalised(re.sub(r"[.,]0+$", "", text))))


def is_missing(text: str) -> bool:
    """Whether a value stands for none, such as `n/a` or an empty date."""
    if ZEROS.match(text) or NO_DATE.match(text):
        return True
    return text.isascii() and normalised(text) in MISSING


def answers(texts: pa.ChunkedArray, rows: int, answer: Callable[[str], bool | None]) -> float:
    """The share of filled values that have an answer; 0 if it is yes for all of several `rows`."""
    said: Counter[bool | None] = Counter()
    for row in pc.value_counts(texts).to_pylist():
        meaning = answer(row["values"])
        if meaning is not None or not is_missing(row["values"]):
            said[meaning] += row["counts"]
    if 1 < rows == said[True] or not said:
        return 0.0
    return 1 - said[None] / said.total()


def each(texts: pa.ChunkedArray, test: Callable[[str], bool]) -> pa.ChunkedArray:
    """(rows,) bool: whether each text passes a test; false where it is missing."""
    return pc.fill_null(each_value(texts, test, pa.bool_()), False)


def read_available(texts: pa.ChunkedArray) -> pa.ChunkedArray:
    """Whether items are available: (items,) bool, null where a word or number says nothing."""

    def read(text: str) -> bool | None:
        if NUMBER.fullmatch(text):
            return float(text.replace(",", ".")) > 0
        key = normalised(text) or text
        return True if key in YES else False if key in NO else None

    return each_value(texts, read, pa.bool_())
