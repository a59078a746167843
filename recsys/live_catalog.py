"""Storage of a catalog that changes, in which a new epoch copies as little as possible. NumPy only.

A *record* is what is known of an item: from the bundle, or from a later update. Records and ids
only grow, and all epochs share them. An epoch has arrays of its own (the record of each
item, its codes, whether it can be recommended) and never reads beyond their ends.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import repeat
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from recsys.arguments import spelled
from recsys.availability import AVAILABLE
from recsys.catalog import Catalog
from recsys.constraint.attributes import Attributes, Column, read_column
from recsys.retrieval.later import LaterItems

FIXED = ("item_id", "title", "text")
TOP = "_top"  # the end of the name of a column with the first values of lists
MOST_WASTE = 1 / 32  # share of a catalog's bytes that removed and replaced records may have
LEAST_WASTE = 1 << 16  # bytes that are not worth the time to free them
MOST_CHUNKS = 64  # of the table of added records, before they are joined


@dataclass(frozen=True)
class NewItem:
    """An item to add, or the new state of an existing item.

    >>> NewItem("B0999", "Rose soap", attributes={"price": 3.5}, like="B0012").semantic_id is None
    True

    Attributes:
        item_id: outside id.
        title: for display.
        text: with title and attributes, the input of the item encoder.
        attributes: for filters; attributes that are not given are missing.
        semantic_id: its codes, 0-based. If None, an existing item keeps its codes, a removed item
            of the bundle gets its codes back, and any other item is placed.
        like: id of an item that it is placed beside.
    """

    item_id: str
    title: str = ""
    text: str = ""
    attributes: Mapping[str, Any] = field(default_factory=dict)
    semantic_id: Sequence[int] | None = None
    like: str | None = None

    def __post_init__(self) -> None:
        for name in ("item_id", "like"):
            if isinstance(value := getattr(self, name), str):
                object.__setattr__(self, name, spelled(value))


class AddedItems:
    """Items and records that were added after the bundle was made. Existing entries never change.

    Attributes:
        base: the bundle's catalog; its items and records come first.
        ids: outside ids of the added items.
        index: place of each in `ids`.
        titles: of the added records.
        rows: the added records, in the schema of the bundle's items.
        sizes: (records,) bytes of each; of records that were added together, their mean.
        content: what retrieval knows of the added records; None if it knows nothing.
    """

    def __init__(self, base: Catalog) -> None:
        """Begin with the bundle's items."""
        self.base = base
        self.content: LaterItems | None = None
        self.ids: list[str] = []
        self.index: dict[str, int] = {}
        self.titles: list[str] = []
        self.rows, self.sizes = base.items.slice(0, 0), np.empty(0)

    @cached_property
    def derived(self) -> dict[str, str]:
        """`derived_columns` of the bundle's items."""
        return derived_columns(self.base.items)

    def completed(self, item: NewItem) -> NewItem:
        """The item with the values of derived columns that it does not give itself."""
        attributes = item.attributes
        if not isinstance(attributes, Mapping):
            return item  # refused later
        derived = {
            name: attributes[source][0]
            for source, name in self.derived.items()
            if name not in attributes
            and isinstance(attributes.get(source), list | tuple)
            and attributes[source]
        }
        return replace(item, attributes={**attributes, **derived}) if derived else item

    def find(self, item_id: str) -> int:
        """Dense number of an id that has one in any epoch, or -1."""
        item = self.base.find(item_id)
        if item < 0 and (position := self.index.get(item_id)) is not None:
            return len(self.base) + position
        return item

    def extend(self, rows: pa.Table, content: LaterItems | None = None) -> NDArray[np.int32]:
        """Add records, and what retrieval knows of them; returns the dense number of each one."""
        added_ids = rows["item_id"].to_pylist()
        for item_id in added_ids:
            if self.find(item_id) < 0:
                self.ids.append(item_id)
                self.index[item_id] = len(self.ids) - 1  # after `ids`, for concurrent readers
        self.titles += rows["title"].to_pylist()
        self.rows = pa.concat_tables([self.rows, rows])
        mean = rows.nbytes / max(1, len(rows))
        self.sizes = np.append(self.sizes, np.full(len(rows), mean))
        if self.rows.column(0).num_chunks > MOST_CHUNKS:
            self.rows = self.rows.combine_chunks()
        if content is not None:
            self.content = content if self.content is None else self.content.followed_by(content)
        return np.array([self.find(item_id) for item_id in added_ids], np.int32)

    def kept(
        self, items: NDArray[np.int64], record: NDArray[np.int32]
    ) -> tuple[AddedItems, NDArray[np.int32]]:
        """A copy with these items only, renumbered in their order, and the records' numbers there.

        `items` are dense numbers, ascending, all of the bundle's among them; `record` has the
        record of each.
        """
        size = len(self.base)
        copy = AddedItems(self.base)
        copy.ids = [self.ids[i - size] for i in items[size:].tolist()]
        copy.index = {item_id: i for i, item_id in enumerate(copy.ids)}
        new = np.flatnonzero(record >= size)
        copy.titles = [self.titles[r - size] for r in record[new].tolist()]
        copy.rows, copy.sizes = (
            _taken(self.rows, record[new] - size),
            self.sizes[record[new] - size],
        )
        if self.content is not None:
            copy.content = self.content.take(record[new] - size)
        renumbered = record.copy()
        renumbered[new] = size + np.arange(len(new))
        return copy, renumbered


@dataclass(frozen=True, eq=False)
class EpochCatalog:
    """The catalog of one epoch, read like a `Catalog`. Rows of removed items stay.

    Attributes:
        added: items and records behind the bundle's.
        record: (items,) int32, the record of each item.
        codes: (items, L) int32 semantic IDs.
        alive: (items,) bool, whether an item can be recommended.
        later: what retrieval knows of the items behind the bundle's; None if it knows nothing.
    """

    added: AddedItems
    record: NDArray[np.int32]
    codes: NDArray[np.int32]
    alive: NDArray[np.bool_]
    later: LaterItems | None = None

    def __len__(self) -> int:
        return len(self.codes)

    @property
    def is_wasteful(self) -> bool:
        """Whether removed and replaced records take more than a small share of the memory."""
        sizes, base = self.added.sizes, self.added.base
        record = self.record[self.alive]
        live = sizes[record[record >= len(base)] - len(base)].sum()
        most = max(LEAST_WASTE, MOST_WASTE * (base.items.nbytes + live))
        return bool(sizes.sum() - live > most)

    @cached_property
    def items(self) -> pa.Table:
        """The epoch's items in dense order, as `Catalog.items`; built on first use."""
        base = self.added.base
        if len(self.record) == len(base) and (self.record < len(base)).all():
            return base.items
        return pa.concat_tables([base.items, self.added.rows]).take(pa.array(self.record))

    @cached_property
    def item_ids(self) -> list[str]:
        """Outside ids in dense order, including removed items."""
        base = self.added.base
        return [*base.item_ids, *self.added.ids[: len(self) - len(base)]]

    @cached_property
    def titles(self) -> list[str]:
        """Titles in dense order."""
        return [self.title(i) for i in range(len(self))]

    def item_id(self, item: int) -> str:
        """Outside id of one item."""
        base = self.added.base
        return base.item_ids[item] if item < len(base) else self.added.ids[item - len(base)]

    def title(self, item: int) -> str:
        """Title of one item."""
        base, record = self.added.base, int(self.record[item])
        return base.titles[record] if record < len(base) else self.added.titles[record - len(base)]

    def find(self, item_id: str) -> int:
        """Dense item of an outside id; -1 where it cannot be recommended."""
        item = self.added.find(item_id)
        return item if 0 <= item < len(self.alive) and self.alive[item] else -1

    def index(self, item_ids: Iterable[str]) -> NDArray[np.int32]:
        """Dense items of outside ids; -1 where one cannot be recommended."""
        return self._alive(self._numbers(list(item_ids)))

    def known(self, item_ids: Iterable[str]) -> NDArray[np.int32]:
        """As `index`, and also removed items of the bundle."""
        numbers = self._numbers(list(item_ids))
        return np.where(numbers < len(self.added.base), numbers, self._alive(numbers))

    def knows_any(self, item_ids: Sequence[str]) -> bool:
        """Whether `known` finds one of the items."""
        return self.added.base.knows_any(item_ids) or any(
            self.find(item_id) >= 0 for item_id in self.added.index.keys() & set(item_ids)
        )

    def _numbers(self, item_ids: list[str]) -> NDArray[np.int32]:
        """Dense numbers of outside ids that have one in any epoch, else -1."""
        base = self.added.base
        numbers = base.index(item_ids)
        if self.added.index and (missing := np.flatnonzero(numbers < 0)).size:
            rest = [item_ids[position] for position in missing.tolist()]
            added_numbers = np.fromiter(map(self.added.index.get, rest, repeat(-1)), np.int32)
            numbers[missing] = np.where(added_numbers < 0, -1, added_numbers + len(base))
        return numbers

    def _alive(self, numbers: NDArray[np.int32]) -> NDArray[np.int32]:
        """Dense numbers, with -1 for those that cannot be recommended in this epoch."""
        there = (numbers >= 0) & (numbers < len(self.alive))
        there[there] = self.alive[numbers[there]]
        return np.where(there, numbers, np.int32(-1))

    def described(self, items: Sequence[int]) -> list[tuple[str, str]]:
        """Outside id and title of each of some items."""
        base, size = self.added.base, len(self.added.base)
        if all(i < size for i in items):
            records = self.record[items].tolist()
            if all(r < size for r in records):
                ids, titles = base.item_ids, base.titles
                return [(ids[i], titles[r]) for i, r in zip(items, records, strict=True)]
        return [(self.item_id(i), self.title(i)) for i in items]

    def row(self, item: int) -> dict[str, Any]:
        """All columns of one item except its codes."""
        base, record = self.added.base, int(self.record[item])
        rows, position = base.items, record
        if record >= len(base):
            rows, position = self.added.rows, record - len(base)
        return dict(rows.slice(position, 1).to_pylist()[0])

    def attributes(self, item: int) -> dict[str, Any]:
        """Attribute columns of one item; without `available` where it was never set."""
        known = {k: v for k, v in self.row(item).items() if k not in FIXED}
        if known.get(AVAILABLE, True) is None:
            del known[AVAILABLE]
        return known


def derived_columns(items: pa.Table) -> dict[str, str]:
    """Columns that hold the first value of a list, by the list's name: category -> category_top.

    Only where this is true of every item.
    """
    sources: dict[str, str] = {}
    for name in items.column_names if items.num_rows else ():
        top = f"{name}{TOP}"
        if top not in items.column_names or not pa.types.is_list(items[name].type):
            continue
        lists = items[name].combine_chunks()
        filled = pc.fill_null(pc.greater(pc.list_value_length(lists), 0), False)
        first = pc.list_flatten(pc.list_slice(lists.filter(filled), 0, 1))
        records = items[top].combine_chunks()
        if first.equals(records.filter(filled)) and records.filter(
            pc.invert(filled)
        ).null_count == len(records) - len(first):
            sources[name] = top
    return sources


def settable(catalog: Catalog) -> Catalog:
    """The catalog with a column `available`, so that it can be set live; missing means yes."""
    if AVAILABLE in catalog.items.column_names:
        return catalog
    nothing = pa.nulls(len(catalog), pa.bool_())
    return replace(catalog, items=catalog.items.append_column(AVAILABLE, nothing))


@dataclass(frozen=True, kw_only=True)
class EpochAttributes(Attributes):
    """Columns of an epoch's items, from those of all records.

    Attributes:
        added: the added records, which come behind the bundle's.
        record: (items,) the record of each item.
    """

    added: pa.Table
    record: NDArray[np.int32]

    def _make(self, name: str) -> Column:
        if name not in self.table.column_names:
            return super()._make(name)
        parts = [table.select([name]) for table in (self.table, self.added)]
        values = pa.concat_tables(parts).unify_dictionaries()[name]
        return read_column(name, values, self.record[self.order])


def _taken(table: pa.Table, rows: NDArray[np.integer]) -> pa.Table:
    """Some rows of a table, and of its dictionaries what they need."""
    taken = table.take(pa.array(rows)).combine_chunks()
    for column, field_ in enumerate(taken.schema):
        if pa.types.is_dictionary(field_.type):
            plain = taken[field_.name].cast(field_.type.value_type)
            taken = taken.set_column(column, field_, plain.dictionary_encode().cast(field_.type))
    return taken
