"""Attributes: columns of the item table, laid out for filtering; each is read on first use.

The entries of a column are in the order of `ItemTrie.row_items`, so that the result of a filter
applies to the rows of the trie without a gather. Words are numbered, so a filter compares small
integers. A list matches a condition if any of its elements does.
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
"""Maps a slice of items to whether each of them passes; the caller must not write to the array.

Filters are evaluated slice by slice, so that intermediate arrays stay in the processor's cache.
"""
_FEW = 4  # up to this many values are compared one by one


@dataclass(frozen=True, eq=False)
class Column:
    """One attribute of n items, with m elements in all; m = n unless it holds lists.

    Attributes:
        name: name of the attribute.
        kind: kind of the elements.
        values: (m,) int64 or float64 numbers; int32 numbers of words for other kinds, -1 where an
            element is missing.
        known: (m,) bool, False where an element is missing.
        words: number of each distinct word or truth value.
        starts: (n + 1,) int32 start of each item's elements; None if the column holds no lists.
    """

    name: str
    kind: Kind
    values: NDArray[Any]
    known: NDArray[np.bool_]
    words: dict[Any, int]
    starts: NDArray[np.int32] | None = None

    @cached_property
    def numbering(self) -> tuple[NDArray[Any], NDArray[np.intp]]:
        """Distinct numbers, ascending, and the index of each element among them."""
        distinct, number = np.unique(self.values, return_inverse=True)
        return distinct, number

    def one_of(self, choices: Sequence[Scalar]) -> Test:
        """Test whether items have one of the values, which are of the column's kind."""
        values, known = self.values, self.known
        if self.kind != "number":
            numbers = [self.words[v] for v in choices if v in self.words]
            if len(numbers) <= _FEW:
                return self._any(lambda part: _equal(values[part], numbers))
            table = np.zeros(len(self.words) + 1, np.bool_)
            table[numbers] = True  # the last entry, at -1, is that of missing elements
            return self._any(lambda part: table.take(values[part]))
        if len(choices) <= _FEW:
            return self._any(lambda part: _equal(values[part], choices) & known[part])
        distinct, number = self.numbering
        whole = distinct.dtype.kind == "i"
        fitting = [v for v in choices if isinstance(v, int) or not whole]
        table = np.isin(distinct, np.array(fitting, distinct.dtype))
        return self._any(lambda part: table.take(number[part]) & known[part])

    def within(self, bounds: Sequence[tuple[str, int | float]]) -> Test:
        """Test whether items have a number within all bounds: (`gt` ... `lte`, number)."""

        def test(part: slice) -> NDArray[np.bool_]:
            matches = self.known[part].copy()
            for name, bound in bounds:
                matches &= _COMPARE[name](self.values[part], bound)
            return matches

        return self._any(test)

    def exists(self) -> Test:
        """Test whether items have any value."""
        return self._any(lambda part: self.known[part])

    def _any(self, elements: Test) -> Test:
        """A test of items that passes if any of an item's elements passes."""
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


def _equal(values: NDArray[Any], targets: Sequence[Scalar]) -> NDArray[np.bool_]:
    """Whether each of the values is one of a few."""
    matches = np.zeros(len(values), np.bool_)
    for value in targets:
        matches |= values == value
    return matches


_COMPARE = {"gt": np.greater, "gte": np.greater_equal, "lt": np.less, "lte": np.less_equal}


@dataclass(frozen=True, eq=False)
class Attributes:
    """The columns of a table of items.

    Attributes:
        table: row i is dense item i.
        order: (items,) dense items, in the order of the columns.
    """

    table: pa.Table
    order: NDArray[np.int32]
    _columns: dict[str, Column] = field(default_factory=dict, repr=False)

    def column(self, name: str) -> Column:
        """Get a column; it is read on first use.

        Raises:
            FilterError: there is no such column, or no filter supports its type.
        """
        column = self._columns.get(name)
        if column is None:
            # Two threads may both make it; one of the equal results stays.
            column = self._columns[name] = self._make(name)
        return column

    def _make(self, name: str) -> Column:
        if name not in self.table.column_names:
            known = ", ".join(self.table.column_names)
            raise FilterError(f"no attribute {name[:60]!r}; items have {known}")
        return read_column(name, self.table[name], self.order)


def _numbers(array: pa.Array) -> pa.Array:
    """Numbers as int64 if all are whole and fit, so that comparisons are exact, else float64."""
    of = array.type.value_type if pa.types.is_dictionary(array.type) else array.type
    if pa.types.is_integer(of):
        try:
            return pc.cast(array, pa.int64())
        except pa.ArrowInvalid:  # beyond 2^63
            pass
    return pc.cast(array, pa.float64(), safe=False)


def read_column(name: str, values: pa.ChunkedArray, order: NDArray[np.int32]) -> Column:
    """Lay out a column for the rows in this order; FilterError as `Attributes.column`."""
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
        raise FilterError(
            f"attribute {name!r} is of type {array.type}, which filters do not support"
        )
    if not pa.types.is_dictionary(array.type):
        array = array.dictionary_encode()
    codes = pc.fill_null(array.indices, -1).to_numpy(zero_copy_only=False)
    words: dict[Any, int] = {}
    # a dictionary may repeat a word, and may hold a missing one
    number = [
        -1 if w is None else words.setdefault(w, len(words)) for w in array.dictionary.to_pylist()
    ]
    codes = np.array([*number, -1], np.int32)[codes]
    kind: Kind = "truth value" if pa.types.is_boolean(of) else "text"
    return Column(name, kind, codes, codes >= 0, words, starts)
