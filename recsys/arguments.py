"""Checks of what a caller passes to a search: whole numbers, lists of rows, one entry a request.

Every check raises a `ValueError` that names the argument, the value and what is wanted, before any
memory is allocated or any model is run.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

_MOST_SHOWN = 60  # characters
MOST_BEAMS = 1_000_000
"""Most beams, slots or nodes; an answer has a row for every beam that is asked for."""
MOST_NODES = 1 << 14
"""Most nodes of a tree for candidates: a tree holds a flag for every pair of its nodes."""
MIN_TEMPERATURE = 1e-4
"""Below it logits divided by the temperature lose the noise that a sample is drawn by."""


def whole_number(name: str, value: Any, least: int = 1, most: int = MOST_BEAMS) -> int:
    """`value` as an `int`.

    Raises:
        ValueError: it is no whole number (a bool is none), below `least` or above `most`.
    """
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
    """`value` as a `float`.

    Raises:
        ValueError: it is not finite, or below `MIN_TEMPERATURE`.
    """
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not (MIN_TEMPERATURE <= number < math.inf):
        raise ValueError(
            f"temperature must be finite and at least {MIN_TEMPERATURE}, got {value!r}; "
            "without seeds a search has no temperature"
        )
    return number


def integers(name: str, values: ArrayLike) -> NDArray[np.int64]:
    """(n,) int64 of a list of integers, empty or not.

    Raises:
        ValueError: anything but a flat list of integers, such as floats, which would be cut, bools,
            a single number, or lists in the list.
    """
    try:
        array = np.asarray(values)
    except ValueError:  # lists of unequal lengths in the list
        array = np.zeros((1, 1))
    if array.ndim != 1:
        raise ValueError(f"{name} must be a flat list of integers, got {_shown(values)}")
    if array.size and array.dtype.kind not in "iu":
        raise ValueError(f"{name} must hold integers, got {array.dtype}: {_shown(values)}")
    if array.dtype == np.uint64 and array.size and array.max() > np.iinfo(np.int64).max:
        raise ValueError(f"{name} has {array.max()}; the largest integer is 2^63 - 1")
    return array.astype(np.int64, copy=False)


def _shown(value: Any) -> str:
    """A value in a message, not longer than a line."""
    text = repr(value)
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}…"


def strings(name: str, values: Iterable[str]) -> Iterable[str]:
    """The values, if they are strings.

    Raises:
        ValueError: one string, whose characters would be taken for values, or something else.
    """
    if isinstance(values, str | bytes):
        raise ValueError(f"{name} must be a list of strings, got {_shown(values)}")
    values = list(values)
    for value in values:
        if not isinstance(value, str):
            raise ValueError(f"{name} must be a list of strings, got one of {_shown(value)}")
    return values


def one_each(name: str, values: Sequence[Any], requests: int) -> None:
    """Raise unless there is one value a request.

    Raises:
        ValueError: another number of values.
    """
    if isinstance(values, str | bytes | Mapping | Set) or not hasattr(values, "__len__"):
        raise ValueError(f"{name} must be a list with one entry a prompt, got {_shown(values)}")
    if len(values) != requests:
        raise ValueError(f"{name} has {len(values)} entries for {requests} prompts")


def rows_of_requests(
    name: str, values: Sequence[ArrayLike], requests: int, num_rows: int
) -> list[NDArray[np.int64]]:
    """(n,) int64 trie rows of each request.

    Raises:
        ValueError: another number of lists than requests, or a row that the trie does not have.
    """
    one_each(name, values, requests)
    found = []
    for request, listed in enumerate(values):
        rows = integers(f"{name} of request {request}", listed)
        if len(rows) and (rows.min() < 0 or rows.max() >= num_rows):
            row = rows[(rows < 0) | (rows >= num_rows)][0]
            raise ValueError(
                f"{name} of request {request} has row {row}; rows lie in 0 .. {num_rows - 1}"
            )
        found.append(rows)
    return found
