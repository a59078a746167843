"""Checks of the arguments of a search, before memory is allocated or a model runs.

Every check raises a `ValueError` with the name of the argument, its value and what is allowed.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Mapping, Sequence, Set
from itertools import chain, groupby
from typing import Any
from unicodedata import combining, normalize

import numpy as np
from numpy.typing import ArrayLike, NDArray

_MOST_SHOWN = 60  # characters
_SHORT = 256  # characters of which `normalize` costs no more than sorting them
_INTEGER = np.dtype(np.int64)
MOST_BEAMS = 1_000_000
"""Most beams, slots or nodes; an answer has a row for every beam."""
MOST_NODES = 1 << 14
"""Most nodes of a tree for candidates: a tree has a flag for every pair of its nodes."""
MIN_TEMPERATURE = 1e-4
"""Lowest temperature: below it, logits divided by it are too large to add sampling noise to."""
MOST_PINS = 200
"""Most items that a rule may pin."""
MOST_CAPS = 8
"""Most attributes of which a rule may cap the values."""


def whole_number(name: str, value: Any, least: int = 1, most: int = MOST_BEAMS) -> int:
    """Convert `value` to an `int` from `least` to `most`; a bool is not a whole number."""
    try:
        number = None if isinstance(value, bool | np.bool_) else operator.index(value)
    except TypeError:
        number = None
    if number is None:
        raise ValueError(f"{name} must be a whole number, got {_shown(value)}")
    if number < least:
        raise ValueError(f"{name} must be at least {least}, got {number}")
    if number > most:
        raise ValueError(f"{name} must be at most {most}, got {number}")
    return number


def temperature(value: Any) -> float:
    """Convert a temperature to a finite `float` of at least `MIN_TEMPERATURE`."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not (MIN_TEMPERATURE <= number < math.inf):
        raise ValueError(
            f"temperature must be finite and at least {MIN_TEMPERATURE}, got {value!r}; "
            "omit the seeds to search without a temperature"
        )
    return number


def integers(name: str, values: ArrayLike) -> NDArray[np.int64]:
    """Convert a flat list of integers, possibly empty, to (n,) int64; bools and floats are none."""
    if type(values) is np.ndarray and values.dtype is _INTEGER and values.ndim == 1:
        return values
    try:
        array = np.asarray(values)
    except ValueError:  # nested lists of unequal lengths
        array = np.zeros((1, 1))
    if array.ndim != 1:
        raise ValueError(f"{name} must be a flat list of integers, got {_shown(values)}")
    if array.size and array.dtype.kind not in "iu":
        raise ValueError(f"{name} must hold integers, got {array.dtype}: {_shown(values)}")
    if array.dtype == np.uint64 and array.size and array.max() > np.iinfo(np.int64).max:
        raise ValueError(f"{name} has {array.max()}; the largest integer is 2^63 - 1")
    return array.astype(np.int64, copy=False)


def _shown(value: Any) -> str:
    """A value for a message, shortened to a line."""
    text = repr(value)
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}…"


def strings(name: str, values: Iterable[str]) -> list[str]:
    """The values, `spelled`; ValueError for a single string, or a member that is none."""
    if isinstance(values, str | bytes):
        raise ValueError(f"{name} must be a list of strings, got {_shown(values)}")
    values = list(values)
    for value in values:
        if not isinstance(value, str):
            raise ValueError(f"{name} must be a list of strings, got one of {_shown(value)}")
    return [*map(spelled, values)]


def spelled(text: str) -> str:
    """The one spelling in Unicode (NFC) that an id has, as in prepared data.

    `normalize` moves a mark past all those before it that shall stand behind it, which is quadratic
    in their number: a long text gets the order of its marks before.
    """
    if len(text) > _SHORT and not text.isascii():
        letters = "".join(normalize("NFD", letter) for letter in text)
        runs = groupby(letters, lambda letter: combining(letter) > 0)
        parts = (sorted(run, key=combining) if is_marks else run for is_marks, run in runs)
        text = "".join(chain.from_iterable(parts))
    return normalize("NFC", text)


def counts(name: str, values: Mapping[str, int]) -> None:
    """Check a mapping from strings to whole numbers of at least 1."""
    if not isinstance(values, Mapping):
        raise ValueError(f"{name}: must map names to whole numbers, got {_shown(values)}")
    strings(name, values)
    for key, count in values.items():
        whole_number(f"{name}.{key}:", count)


def one_each(name: str, values: Sequence[Any], requests: int) -> None:
    """Check that `values` is a list with one value per request."""
    if isinstance(values, str | bytes | Mapping | Set) or not hasattr(values, "__len__"):
        raise ValueError(f"{name} must be a list with one entry per prompt, got {_shown(values)}")
    if len(values) != requests:
        raise ValueError(f"{name} has {len(values)} entries for {requests} prompts")


def rows_of_requests(
    name: str, values: Sequence[ArrayLike], requests: int, num_rows: int
) -> list[NDArray[np.int64]]:
    """Convert the rows of each request to (n,) int64 and check their range."""
    one_each(name, values, requests)
    parts = []
    for request, listed in enumerate(values):
        rows = integers(f"{name} of request {request}", listed)
        if len(rows) and (rows.min() < 0 or rows.max() >= num_rows):
            row = rows[(rows < 0) | (rows >= num_rows)][0]
            raise ValueError(
                f"{name} of request {request} has row {row}; rows lie in 0 .. {num_rows - 1}"
            )
        parts.append(rows)
    return parts
