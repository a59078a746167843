"""Attributes: columns of what is known of items, laid out for filtering; each read when first used.

Rows of a column lie in the order in which a trie groups items (`ItemTrie.row_items`), so that what
a filter says of items is what it says of rows, without a gather. Words are numbered, so a filter
compares small integers. A list column matches where any of its elements does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from recsys.errors import FilterError

Kind = Literal["text", "number", "truth value"]
Scalar = str | int | float | bool
Test = Callable[[slice], "NDArray[np.bool_]"]
"""Of some items in a row, `start` to `stop` of a slice, which pass; the array may not be written.

Filters are evaluated in parts, so that what they make on the way stays in a processor's cache.
"""
_FEW = 4  # values that are compared one by one


@dataclass(frozen=True, eq=False)
class Column:
    """One attribute of n items, with m elements in all; m = n unless it holds lists.

    Attributes:
        name: the attribute's.
        kind: of the elements.
        values: (m,) int64 or float64 numbers; int32 places in `words` for other kinds, -1 where an
            element is missing.
        known: (m,) bool, False where an element is missing.
        words: place of each distinct word or truth value.
        starts: (n + 1,) int32 where each item's elements begin; None unless it holds lists.
    """

    name: str
    kind: Kind
    values: NDArray[Any]
    known: NDArray[np.bool_]
    words: dict[Any, int]
    starts: NDArray[np.int32] | None = None

    @cached_property
    def numbering(self) -> tuple[NDArray[Any], NDArray[np.intp]]:
        """Distinct numbers, ascending, and the place of each element among them."""
        distinct, place = np.unique(self.values, return_inverse=True)
        return distinct, place

    def one_of(self, wanted: Sequence[Scalar]) -> Test:
        """Whether items have one of the values, which are of the column's kind."""
        values, known = self.values, self.known
        if self.kind != "number":
            places = [self.words[v] for v in wanted if v in self.words]
            if len(places) <= _FEW:
                return self._any(lambda part: _equal(values[part], places))
            table = np.zeros(len(self.words) + 1, np.bool_)
            table[places] = True  # the last entry is a missing element's: place -1
            return self._any(lambda part: table.take(values[part]))
        if len(wanted) <= _FEW:
            return self._any(lambda part: _equal(values[part], wanted) & known[part])
        distinct, place = self.numbering
        whole = distinct.dtype.kind == "i"
        fitting = [v for v in wanted if isinstance(v, int) or not whole]
        table = np.isin(distinct, np.array(fitting, distinct.dtype))
        return self._any(lambda part: table.take(place[part]) & known[part])

    def within(self, bounds: Sequence[tuple[str, int | float]]) -> Test:
        """Whether items have a number within all of the bounds: (`gt` ... `lte`, number)."""

        def test(part: slice) -> NDArray[np.bool_]:
            found = self.known[part].copy()
            for name, bound in bounds:
                found &= _COMPARE[name](self.values[part], bound)
            return found

        return self._any(test)

    def exists(self) -> Test:
        """Whether items have any value."""
        return self._any(lambda part: self.known[part])

    def _any(self, elements: Test) -> Test:
        """A test of items from one of elements: whether any of an item's passes."""
        starts = self.starts
        if starts is None:
            return elements

        def test(part: slice) -> NDArray[np.bool_]:
            here = starts[part.start : part.stop + 1]
            first, last = here[[0, -1]].tolist()
            before = np.zeros(last - first + 1, np.int32)
            np.cumsum(elements(slice(first, last)), dtype=np.int32, out=before[1:])
            at = before.take(here - first)
            return np.asarray(at[1:] > at[:-1])

        return test


def _equal(values: NDArray[Any], wanted: Sequence[Scalar]) -> NDArray[np.bool_]:
    """Whether each of the values is one of a few."""
    found = np.zeros(len(values), np.bool_)
    for value in wanted:
        found |= values == value
    return found


_COMPARE = {"gt": np.greater, "gte": np.greater_equal, "lt": np.less, "lte": np.less_equal}


@dataclass(frozen=True, eq=False)
class Attributes:
    """The columns of a table of items.

    Attributes:
        table: row i is dense item i.
        order: (items,) the order that columns are laid out in.
    """

    table: pa.Table
    order: NDArray[np.int32]
    _columns: dict[str, Column] = field(default_factory=dict, repr=False)

    def column(self, name: str) -> Column:
        """One column; read on first use.

        Raises:
            FilterError: there is none, or not of a type that can be filtered by.
        """
        found = self._columns.get(name)
        if found is None:
            if name not in self.table.column_names:
                known = ", ".join(self.table.column_names)
                raise FilterError(f"no attribute {name[:60]!r}; items have {known}")
            # two threads may both read it; one of the equal results stays
            found = self._columns[name] = _read(name, self.table[name], self.order)
        return found


def _numbers(array: pa.Array) -> pa.Array:
    """Numbers as int64 where they are whole and fit, which compares them exactly, else float64."""
    of = array.type.value_type if pa.types.is_dictionary(array.type) else array.type
    if pa.types.is_integer(of):
        try:
            return pc.cast(array, pa.int64())
        except pa.ArrowInvalid:  # beyond 2^63
            pass
    return pc.cast(array, pa.float64(), safe=False)


def _read(name: str, values: pa.ChunkedArray, order: NDArray[np.int32]) -> Column:
    array = values.take(pa.array(order)).combine_chunks()
    if isinstance(array, pa.ChunkedArray):  # of no or of one chunk, by version
        array = pa.concat_arrays(array.chunks)
    starts = None
    if pa.types.is_list(array.type) or pa.types.is_large_list(array.type):
        lengths = pc.fill_null(pc.list_value_length(array), 0).to_numpy(zero_copy_only=False)
        starts = np.append(0, np.cumsum(lengths)).astype(np.int32)
        array = array.flatten()
    known = array.is_valid().to_numpy(zero_copy_only=False)
    of = array.type.value_type if pa.types.is_dictionary(array.type) else array.type
    if pa.types.is_integer(of) or pa.types.is_floating(of):
        numbers = _numbers(array)
        filled = pc.fill_null(numbers, 0).to_numpy(zero_copy_only=False)
        return Column(name, "number", filled, known & ~np.isnan(filled), {}, starts)
    if pa.types.is_null(of):
        array = array.cast(pa.string())
    elif not (pa.types.is_string(of) or pa.types.is_large_string(of) or pa.types.is_boolean(of)):
        raise FilterError(f"attribute {name!r} is of type {array.type}, which no filter knows")
    if not pa.types.is_dictionary(array.type):
        array = array.dictionary_encode()
    codes = pc.fill_null(array.indices, -1).to_numpy(zero_copy_only=False)
    words: dict[Any, int] = {}
    # a dictionary may repeat a word, and may hold a missing one
    place = [
        -1 if w is None else words.setdefault(w, len(words)) for w in array.dictionary.to_pylist()
    ]
    codes = np.array([*place, -1], np.int32)[codes]
    kind: Kind = "truth value" if pa.types.is_boolean(of) else "text"
    return Column(name, kind, codes, codes >= 0, words, starts)
