"""Caps: at most n items of one attribute value in a list, such as two of a brand."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from recsys.constraint.attributes import Attributes, Column
from recsys.errors import FilterError


class Caps:
    """The values of the items that a list has so far, and how many of each it may have.

    An item with several values of an attribute counts for each of them, and one without a value
    counts for none.

    >>> import pyarrow as pa
    >>> brands = Attributes(pa.table({"brand": ["A", "A", "B"]}), np.arange(3, dtype=np.int32))
    >>> caps = Caps(brands, {"brand": 1})
    >>> caps.admit(0), caps.admit(1), caps.closed().tolist()
    (True, False, [True, True, False])
    """

    def __init__(self, attributes: Attributes, most: Mapping[str, int]) -> None:
        """Begin with an empty list, which may have at most `most[name]` items of one value.

        Raises:
            FilterError: items do not have an attribute; the text begins with `max_per.` and it.
        """
        self._size = len(attributes.order)
        self._columns: list[tuple[Column, int, Counter[int | float]]] = []
        for name, limit in most.items():
            try:
                self._columns.append((attributes.column(name), limit, Counter()))
            except FilterError as error:
                raise FilterError(f"max_per.{name}: {error}") from None

    def admit(self, row: int) -> bool:
        """Add the item at a place of the attributes' order, unless a cap forbids it."""
        values = [_values(column, row) for column, _, _ in self._columns]
        for (_, limit, counts), own in zip(self._columns, values, strict=True):
            if any(counts[value] >= limit for value in own):
                return False
        for (_, _, counts), own in zip(self._columns, values, strict=True):
            counts.update(own)
        return True

    def closed(self) -> NDArray[np.bool_]:
        """(items,) bool, the items that `admit` would refuse now, in the attributes' order."""
        closed = np.zeros(self._size, np.bool_)
        for column, limit, counts in self._columns:
            full = {value for value, count in counts.items() if count >= limit}
            if column.kind != "number":  # words have numbers here
                full = {word for word, number in column.words.items() if number in full}
            if full:
                closed |= column.one_of(list(full))(slice(0, self._size))
        return closed


def _values(column: Column, row: int) -> set[int | float]:
    """The distinct values of an item; words by their numbers."""
    part = slice(row, row + 1)
    if column.starts is not None:
        part = slice(*column.starts[row : row + 2].tolist())
    return set(column.values[part][column.known[part]].tolist())
