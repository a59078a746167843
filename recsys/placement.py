"""Placement: checks of items to add, and codes for them. NumPy only, no models.

A placed item gets the codes that its encoder computes, except that its last code is the nearest one
that no item below the same prefix has. If none is free, the item shares a leaf.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from recsys.constraint import ItemTrie
from recsys.errors import ItemError, shown
from recsys.live_catalog import FIXED, EpochCatalog, NewItem
from recsys.vocabulary import Vocabulary

MOST_CHARACTERS = 512  # of an id
Encoded = tuple[tuple[int, ...], NDArray[np.float32]]
"""The codes of an item, and its distances to the codes of the last level."""


class ItemCoder(Protocol):
    """Computes the codes of items (`recsys.semantic_ids.encoder`)."""

    def encode(self, items: pa.Table) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        """(n, L) codes of items, and (n, V) distances to the codes of the last level."""

    def beside(self, code: int) -> NDArray[np.float32]:
        """(V,) distances of the last level's codes from one of them."""


def table_of(items: Sequence[NewItem], schema: pa.Schema, level_sizes: Sequence[int]) -> pa.Table:
    """Check items, and turn them into rows of a catalog.

    Raises:
        ItemError: a field is malformed, a code out of range, an attribute unknown or of another
            type, or an id given twice.
    """
    seen = set()
    for number, item in enumerate(items):
        _check(item, number, schema)
        if item.semantic_id is not None:
            _check_codes(item, level_sizes)
        if item.item_id in seen:
            raise ItemError(f"item {item.item_id!r}: item_id is given twice; send it once")
        seen.add(item.item_id)
    columns = {name: [getattr(item, name) for item in items] for name in FIXED}
    for name in schema.names:
        if name not in columns:
            columns[name] = [item.attributes.get(name) for item in items]
    return pa.table(
        [_column(columns[name], schema.field(name).type, name, items) for name in schema.names],
        names=schema.names,
    )


def _check(item: NewItem, number: int, schema: pa.Schema) -> None:
    if not isinstance(item.item_id, str) or not 0 < len(item.item_id) <= MOST_CHARACTERS:
        raise ItemError(
            f"items[{number}]: item_id: want text of 1 to {MOST_CHARACTERS} characters, "
            f"got {shown(item.item_id)}"
        )
    at = f"item {item.item_id!r}"
    for name in ("title", "text"):
        if not isinstance(getattr(item, name), str):
            raise ItemError(f"{at}: {name}: want text, got {shown(getattr(item, name))}")
    if not isinstance(item.attributes, Mapping):
        raise ItemError(f"{at}: attributes: want an object, got {shown(item.attributes)}")
    for name in item.attributes:
        if name in FIXED or name not in schema.names:
            known = ", ".join(n for n in schema.names if n not in FIXED) or "none"
            hint = ""
            if re.search("stock|avail", str(name), re.IGNORECASE):
                hint = "; whether an item may be recommended is 'available': true or false"
            raise ItemError(
                f"{at}: attributes: no attribute {shown(name)}; this catalog has {known}{hint}"
            )
    if item.like is not None and not isinstance(item.like, str):
        raise ItemError(f"{at}: like: want the id of an item, got {shown(item.like)}")
    if item.semantic_id is not None and item.like is not None:
        raise ItemError(f"{at}: semantic_id and like: want one of them, got both")


def _check_codes(item: NewItem, sizes: Sequence[int]) -> None:
    at, codes = f"item {item.item_id!r}: semantic_id", item.semantic_id
    if isinstance(codes, np.ndarray):
        codes = codes.tolist()
    if not isinstance(codes, list | tuple) or len(codes) != len(sizes):
        raise ItemError(f"{at}: want {len(sizes)} codes, got {shown(codes)}")
    for level, (code, size) in enumerate(zip(codes, sizes, strict=True), 1):
        whole = isinstance(code, int | np.integer) and not isinstance(code, bool)
        if not whole or not 0 <= code < size:
            raise ItemError(
                f"{at}: want 0 to {size - 1} at level {level}, got {shown(code)}; the model knows "
                "no others"
            )


def _column(values: list[Any], of: pa.DataType, name: str, items: Sequence[NewItem]) -> pa.Array:
    plain = of.value_type if pa.types.is_dictionary(of) else of
    try:
        if all(_fits(value, plain) for value in values):
            array = pa.array(values, plain)
            return array.dictionary_encode().cast(of) if plain is not of else array
    except (pa.ArrowException, OverflowError):
        pass  # the item is identified below
    for value, item in zip(values, items, strict=True):
        try:
            wrong = not _fits(value, plain)
            pa.array([value], plain)
        except (pa.ArrowException, OverflowError, TypeError, ValueError):
            wrong = True
        if wrong:
            where = name if name in FIXED else f"attributes.{name}"
            raise ItemError(f"item {item.item_id!r}: {where}: want {_name(of)}, got {shown(value)}")
    raise ItemError(f"items: {name}: want {_name(of)}")


def _fits(value: Any, of: pa.DataType) -> bool:
    """Whether a value is of a type, without the conversions of Arrow (such as 1.5 -> 1)."""
    if value is None:
        return True
    if pa.types.is_list(of) or pa.types.is_large_list(of):
        return isinstance(value, list | tuple) and all(_fits(v, of.value_type) for v in value)
    if pa.types.is_integer(of):
        return isinstance(value, int) and not isinstance(value, bool)
    if pa.types.is_floating(of):
        return isinstance(value, int | float) and not isinstance(value, bool)
    if pa.types.is_boolean(of):
        return isinstance(value, bool)
    if pa.types.is_string(of) or pa.types.is_large_string(of):
        return isinstance(value, str)
    return True


def _name(of: pa.DataType) -> str:
    if pa.types.is_dictionary(of):
        return _name(of.value_type)
    if pa.types.is_list(of) or pa.types.is_large_list(of):
        return f"a list of {_name(of.value_type)}"
    if pa.types.is_integer(of):
        return "a whole number"
    if pa.types.is_floating(of):
        return "a number"
    if pa.types.is_boolean(of):
        return "true or false"
    if pa.types.is_null(of):
        return "nothing, as every item of the bundle has"
    return "text" if pa.types.is_string(of) or pa.types.is_large_string(of) else str(of)


class Placement:
    """Codes for the items that are added to one epoch; earlier items take codes first."""

    def __init__(
        self,
        catalog: EpochCatalog,
        trie: ItemTrie,
        vocabulary: Vocabulary,
        coder: ItemCoder | None,
    ) -> None:
        """Begin with an epoch's catalog, and a trie that contains all its items."""
        self._catalog, self._trie, self._coder = catalog, trie, coder
        self._vocabulary = vocabulary
        self._new: dict[str, tuple[int, ...]] = {}
        self._taken: dict[tuple[int, ...], set[int]] = {}

    def codes_of(self, items: Sequence[NewItem], table: pa.Table) -> NDArray[np.int32]:
        """(n, L) codes of some items, which come with their rows; one encoder call has them all.

        Raises:
            ItemError: `like` refers to an unknown item, or there is no way to place an item.
        """
        encoded = {}
        missing = [
            i for i, item in enumerate(items) if item.like is None and self._given(item) is None
        ]
        if missing and self._coder is not None:
            codes_of, far = self._coder.encode(table.take(pa.array(missing)))
            pairs = zip(map(_tuple, codes_of), far, strict=True)
            encoded = dict(zip(missing, pairs, strict=True))
        for i, item in enumerate(items):
            codes = self._given(item)
            if codes is None:
                codes = self._free(*self._meant(item, encoded.get(i)))
            self._new[item.item_id] = codes
            self._below(codes[:-1]).add(codes[-1])
        size = self._vocabulary.num_levels
        return np.array([self._new[i.item_id] for i in items], np.int32).reshape(-1, size)

    def _given(self, item: NewItem) -> tuple[int, ...] | None:
        """Codes that an item has without placement; None if it has to be placed."""
        if item.semantic_id is not None:
            return _tuple(item.semantic_id)
        if item.like is not None:
            return None
        there = self._catalog.find(item.item_id)
        if there >= 0:
            return _tuple(self._catalog.codes[there])
        base = self._catalog.added.base
        there = base.find(item.item_id)
        return _tuple(base.codes[there]) if there >= 0 else None

    def _meant(self, item: NewItem, encoded: Encoded | None) -> Encoded:
        """The codes that an item gets if they are free, and distances to the last level's codes."""
        if item.like is None:
            if encoded is None:
                raise ItemError(
                    f"item {item.item_id!r}: semantic_id: this bundle has no item encoder to find "
                    "one with; give semantic_id, or like with the id of an item to be beside"
                )
            return encoded
        codes = self._new.get(item.like)
        if codes is None:
            there = self._catalog.find(item.like)
            if there < 0:
                raise ItemError(
                    f"item {item.item_id!r}: like: the catalog has no item {shown(item.like)}"
                )
            codes = _tuple(self._catalog.codes[there])
        if self._coder is not None:
            return codes, self._coder.beside(codes[-1])
        size = self._vocabulary.level_sizes[-1]  # without centroids there are no distances
        return codes, ((np.arange(size) - codes[-1]) % size).astype(np.float32)

    def _free(self, codes: tuple[int, ...], far: NDArray[np.float32]) -> tuple[int, ...]:
        """The codes, with the nearest last code that is free if no other item may have them."""
        taken = self._below(codes[:-1])
        if codes[-1] not in taken:
            return codes
        if len(taken) >= len(far):
            return codes
        far = far.copy()
        far[list(taken)] = np.inf
        return (*codes[:-1], int(far.argmin()))

    def _below(self, prefix: tuple[int, ...]) -> set[int]:
        """The last codes below a prefix that are taken."""
        taken = self._taken.get(prefix)
        if taken is None:
            taken = self._taken[prefix] = self._in_trie(prefix)
        return taken

    def _in_trie(self, prefix: tuple[int, ...]) -> set[int]:
        trie, offsets = self._trie, self._vocabulary.level_offsets
        low, high = 0, trie.num_rows
        for column, code, offset in zip(trie.rows.T, prefix, offsets, strict=False):
            token = code + offset
            low, high = (
                bisect_left(column, token, low, high),
                bisect_right(column, token, low, high),
            )
        _, positions = trie.places_of(np.arange(low, high))
        alive = self._catalog.alive[trie.row_items[positions]]
        rows = trie.item_row[trie.row_items[positions[alive]]]
        return set((trie.rows[rows, -1] - offsets[-1]).tolist())


def _tuple(codes: Any) -> tuple[int, ...]:
    return tuple(int(code) for code in codes)
