"""The live catalog: items are added and removed while requests are answered. NumPy, no models.

A batch is decoded over one `Epoch`, which never changes; `Epochs` makes the next one. Additions
build a new trie, one call after the other, and replace the old one. A removal keeps the trie
and hides the item with the mask that filters use, so it takes effect at once. Every new trie is
built without the hidden items; if many items are hidden, one is built in the background.

Items that are not available (`recsys.availability`) are hidden in the same way while that lasts,
but stay in the catalog.

Dense numbers of the bundle's items never change. Those of added items stay until the item is
removed. An added item that was removed is forgotten; a removed item of the bundle is still known in
histories.

Records of removed and replaced items are freed when they take more than a small share of the bytes
of the catalog, so memory is a function of the items that are there.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeVar

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from recsys import arguments
from recsys.availability import MINUTE, depends_on_time, standing_rule
from recsys.bundle import Bundle
from recsys.constraint import ItemTrie
from recsys.constraint.attributes import Attributes
from recsys.constraint.filter_cache import FilterCache
from recsys.constraint.filters import ItemFilter
from recsys.constraint.mask import RowMask
from recsys.live_catalog import (
    FIXED,
    AddedItems,
    EpochAttributes,
    EpochCatalog,
    NewItem,
    settable,
)
from recsys.placement import ItemCoder, Placement, table_of
from recsys.prompts import PromptEncoder
from recsys.retrieval.later import LaterItems

__all__ = ["Epoch", "Epochs", "NewItem"]

T = TypeVar("T", bound=np.generic)
_FORGET = 4096  # hidden items below which a new trie is not worth its time
_HIDDEN = 1 / 8  # share of hidden items above which the trie is built anew


@dataclass(frozen=True, eq=False)
class Epoch:
    """The catalog of one batch.

    Attributes:
        number: 0 for the bundle's own catalog; every change adds 1.
        catalog: items; `index` finds those that can be recommended, `known` also removed items of
            the bundle. Rows of removed items stay: see `alive`.
        trie: of the items that can be recommended, and perhaps of removed ones.
        encoder: history -> tokens.
        filters: row masks of filters, without the removed items.
        left: (items of the trie,) bool, whether each can be recommended, by place in
            `trie.row_items`; None if all can.
        unavailable: (items,) bool, items of the catalog that are not available now; None for none.
    """

    number: int
    catalog: EpochCatalog
    trie: ItemTrie
    encoder: PromptEncoder
    filters: FilterCache
    left: NDArray[np.bool_] | None = None
    unavailable: NDArray[np.bool_] | None = None

    @cached_property
    def alive(self) -> NDArray[np.bool_]:
        """(items,) bool, whether an item can be recommended."""
        alive = self.catalog.alive
        return alive if self.unavailable is None else alive & ~self.unavailable

    @cached_property
    def num_items(self) -> int:
        """Items that can be recommended."""
        return int(np.count_nonzero(self.alive))

    @cached_property
    def mask(self) -> RowMask | None:
        """The mask that hides removed items of the trie; None if it has none."""
        return None if self.left is None else RowMask.of(self.trie, self.left)

    def allowed(self, item_filter: ItemFilter | None) -> RowMask | None:
        """The mask of the items that a filter allows; None for all items.

        Raises:
            FilterError: the filter does not fit the items' attributes.
        """
        return self.mask if item_filter is None else self.filters.mask(item_filter)

    def excluded_rows(self, items: NDArray[np.integer], mask: RowMask | None) -> NDArray[np.int32]:
        """Rows that hold nothing but these items (`ItemTrie.excluded_rows`), removed or not."""
        items = items[self.trie.item_row[items] >= 0]
        return self.trie.excluded_rows(items) if mask is None else mask.excluded_rows(items)

    def count_eligible(self, excluded: NDArray[np.integer], mask: RowMask | None) -> int:
        """Number of items that can be recommended and that a mask (`allowed`) allows.

        Of the excluded dense items, removed ones and repetitions do not matter.
        """
        hidden = np.unique(excluded)
        hidden = hidden[self.alive[hidden]]
        if mask is None:
            return self.num_items - len(hidden)
        return mask.eligible - int(np.count_nonzero(mask.items[self.trie.item_places(hidden)]))

    def allows(self, item: int, mask: RowMask | None) -> bool:
        """Whether an item can be recommended under a mask of this epoch."""
        if self.trie.item_row[item] < 0:
            return False
        return mask is None or bool(mask.items[self.trie.item_places(np.asarray([item]))[0]])

    def item(self, item_id: str) -> NewItem | None:
        """An item as `upsert` would take it, with its codes; None if it cannot be recommended."""
        item = self.catalog.find(item_id)
        if item < 0:
            return None
        row = self.catalog.row(item)
        known = {k: v for k, v in row.items() if k not in FIXED and v is not None}
        codes = tuple(self.catalog.codes[item].tolist())
        return NewItem(item_id, str(row["title"]), str(row["text"]), known, codes)


class Epochs:
    """The current epoch and the making of the next one; safe for any number of threads."""

    def __init__(
        self,
        bundle: Bundle,
        *,
        coder: ItemCoder | None = None,
        describe: Callable[[pa.Table], LaterItems | None] | None = None,
        prepare: Callable[[ItemTrie], object] = lambda trie: None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Begin with the bundle's own catalog.

        `coder` finds codes of new items, if the bundle has an item encoder; `describe` finds what
        retrieval knows of them. `prepare` is called with each new trie before it is used. `clock`
        says the unix seconds that availability depends on.
        """
        self._vocabulary, self._coder, self._prepare = bundle.vocabulary, coder, prepare
        self._describe = describe
        size = len(bundle.catalog)
        added = AddedItems(settable(bundle.catalog))
        record = np.arange(size, dtype=np.int32)
        alive = np.ones(size, np.bool_)
        catalog = EpochCatalog(added, record, bundle.catalog.codes, alive)
        encoder = bundle.encoder
        trie = ItemTrie.build(encoder.item_tokens)
        columns = _attributes(trie, added, record)
        self._clock, self._minute = clock, int(clock()) // MINUTE
        left, unavailable = self._available(trie, columns, alive)
        filters = FilterCache(trie, columns, left=left)
        self._epoch = Epoch(0, catalog, trie, encoder, filters, left, unavailable)
        self._rested = 0.0  # when the next build may begin, on the monotonic clock
        self._build, self._publish = threading.Lock(), threading.Lock()
        self._compacting = False

    @property
    def current(self) -> Epoch:
        """The newest epoch; items that became available or unavailable make a new one."""
        minute = int(self._clock()) // MINUTE
        if minute != self._minute:
            self._minute = minute
            if depends_on_time(self._epoch.filters.attributes):
                self._refresh()
        return self._epoch

    def upsert(self, items: Sequence[NewItem]) -> Epoch:
        """Add items, or replace existing ones; all of them or, on an error, none.

        The ids of a call are distinct, and `like` may refer to an earlier item of it. A call waits
        for those before it.

        Returns:
            The first epoch that has them.

        Raises:
            ItemError: an item is malformed or cannot be placed; the text names item and field.
        """
        added = self._epoch.catalog.added
        items = [added.completed(item) for item in items]
        table = table_of(items, added.base.items.schema, self._vocabulary.level_sizes)
        if not items:
            return self._epoch
        with self._build:
            # Building uses at most half of one core.
            time.sleep(max(0.0, self._rested - time.monotonic()))
            start = time.thread_time()  # time spent waiting for other threads does not count
            epoch = self._epoch
            placement = Placement(epoch.catalog, epoch.trie, self._vocabulary, self._coder)
            made = self._make(table, placement.codes_of(items, table))
            self._rested = time.monotonic() + time.thread_time() - start
            return made

    def remove(self, item_ids: Iterable[str]) -> list[str]:
        """Remove items; no batch that begins afterwards recommends them.

        Unknown ids and repetitions are ignored. Returns the ids of the items that were removed.
        """
        ids = list(dict.fromkeys(arguments.strings("item_ids", item_ids)))
        with self._publish:
            epoch = self._epoch
            numbers = epoch.catalog.index(ids)
            there = [name for name, item in zip(ids, numbers, strict=True) if item >= 0]
            items = numbers[numbers >= 0]
            if not len(items):
                return []
            catalog, trie, before = epoch.catalog, epoch.trie, epoch.filters
            alive = catalog.alive.copy()
            alive[items] = False
            left = np.ones(len(trie.row_items), np.bool_)
            if epoch.left is not None:
                left = epoch.left.copy()
            left[trie.item_places(items)] = False
            self._epoch = replace(
                epoch,
                number=epoch.number + 1,
                catalog=replace(catalog, alive=alive),
                filters=FilterCache(trie, before.attributes, left=left, after=before),
                left=left,
            )
            hidden = int(np.count_nonzero(~alive[trie.row_items]))
            many = hidden > max(_FORGET, _HIDDEN * len(left))
            is_due = (many or self._epoch.catalog.is_wasteful) and not self._compacting
            self._compacting |= is_due
        if is_due:
            threading.Thread(target=self._compact, name="compaction", daemon=True).start()
        return there

    def _available(
        self, trie: ItemTrie, attributes: Attributes, alive: NDArray[np.bool_]
    ) -> tuple[NDArray[np.bool_] | None, NDArray[np.bool_] | None]:
        """`Epoch.left` and `Epoch.unavailable` now, of (items,) items that were not removed."""
        left = alive[trie.row_items]
        rule = standing_rule(attributes, self._minute * MINUTE)
        unavailable = None
        if rule is not None and not (passes := rule.evaluate(attributes)).all():
            left = left & passes
            unavailable = np.zeros(len(alive), np.bool_)
            unavailable[trie.row_items[~passes]] = True
        return (None if left.all() else left), unavailable

    def _refresh(self) -> None:
        """Publish an epoch if other items are available than in the current one."""
        with self._publish:
            epoch = self._epoch
            before = epoch.filters
            left, unavailable = self._available(epoch.trie, before.attributes, epoch.catalog.alive)
            was, now = epoch.unavailable, unavailable
            if (was is None and now is None) or (
                was is not None and now is not None and np.array_equal(was, now)
            ):
                return
            filters = FilterCache(epoch.trie, before.attributes, left=left, after=before)
            self._epoch = replace(
                epoch,
                number=epoch.number + 1,
                filters=filters,
                left=left,
                unavailable=unavailable,
            )

    def compact(self) -> Epoch:
        """Build the trie anew without the hidden items; answers do not change."""
        with self._build:
            if self._epoch.left is not None:
                catalog = self._epoch.catalog
                self._make(catalog.added.base.items.slice(0, 0), catalog.codes[:0])
        return self._epoch

    def _compact(self) -> None:
        try:
            self.compact()
        finally:
            self._compacting = False

    def _make(self, table: pa.Table, codes: NDArray[np.int32]) -> Epoch:
        """Publish an epoch with the rows and codes of new items; the caller holds `_build`."""
        seen = self._epoch
        catalog, tokens = seen.catalog, seen.encoder.item_tokens
        added, record, known = catalog.added, catalog.record, catalog.codes
        base = len(added.base)
        rows = np.arange(len(catalog))
        # if no items are left, the old trie and its numbers are kept
        if catalog.is_wasteful and (len(table) or catalog.alive.any()):
            # a removed item of the bundle has its first record again
            record = np.where(catalog.alive, record, rows).astype(np.int32)
            rows = np.flatnonzero(catalog.alive | (rows < base))
            added, record = added.kept(rows, record[rows])
            known, tokens = known[rows], tokens[rows]
        first = base + len(added.titles)  # record
        content = self._describe(table) if self._describe is not None and len(table) else None
        dense = added.extend(table, content)
        size = base + len(added.ids)
        record, known = _longer(record, size), _longer(known, size)
        tokens = _longer(tokens, size)
        record[dense] = first + np.arange(len(dense))
        known[dense], tokens[dense] = codes, self._vocabulary.encode(codes)
        alive = np.zeros(size, np.bool_)
        alive[: len(rows)] = catalog.alive[rows]
        alive[dense] = True
        trie = build_trie(tokens, alive) if alive.any() else seen.trie
        self._prepare(trie)
        attributes = _attributes(trie, added, record)
        encoder = replace(seen.encoder, item_tokens=tokens)
        with self._publish:
            now = self._epoch
            # items that were removed while the trie was built stay removed
            alive[: len(rows)] = now.catalog.alive[rows]
            alive[dense] = True
            left, unavailable = self._available(trie, attributes, alive)
            filters = FilterCache(trie, attributes, left=left, after=now.filters)
            later = None if added.content is None else added.content.take(record[base:] - base)
            catalog = EpochCatalog(added, record, known, alive, later)
            self._epoch = Epoch(now.number + 1, catalog, trie, encoder, filters, left, unavailable)
            return self._epoch


def _longer(array: NDArray[T], size: int) -> NDArray[T]:
    """A copy of `size` rows; the new ones are zero."""
    longer = np.zeros((size, *array.shape[1:]), array.dtype)
    longer[: len(array)] = array
    return longer


def _attributes(trie: ItemTrie, added: AddedItems, record: NDArray[np.int32]) -> EpochAttributes:
    return EpochAttributes(added.base.items, trie.row_items, added=added.rows, record=record)


def build_trie(tokens: NDArray[np.int64], alive: NDArray[np.bool_]) -> ItemTrie:
    """The trie of the items that are alive, under their own numbers."""
    if alive.all():
        return ItemTrie.build(tokens)
    items = np.flatnonzero(alive).astype(np.int32)
    trie = ItemTrie.build(tokens[items])
    item_row = np.full(len(tokens), -1, np.int32)
    item_row[items] = trie.item_row
    return replace(trie, row_items=items[trie.row_items], item_row=item_row, on_devices={})
