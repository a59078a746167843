"""The live catalog: items are added and removed while requests are answered. NumPy, no models.

A batch is decoded over one `Epoch`, which never changes; `Epochs` makes the next one. Additions
build a new trie, shared by concurrent callers, and replace the old one. A removal keeps the trie
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
from typing import Any, TypeVar

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
from recsys.errors import ItemError
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


class _Call:
    """The items of one call of `upsert`, and its outcome."""

    def __init__(self, items: Sequence[NewItem], table: pa.Table) -> None:
        """A waiting call; `table` holds the same items as columns."""
        self.items, self.table = items, table
        self.epoch: Epoch | None = None
        self.error: BaseException | None = None
        self.woken = threading.Event()  # it has an outcome, or has to lead the calls that wait


class Epochs:
    """The current epoch and the making of the next one; safe for any number of threads."""

    def __init__(
        self,
        bundle: Bundle,
        filter_bytes: int = 1 << 28,
        *,
        coder: ItemCoder | None = None,
        describe: Callable[[pa.Table], LaterItems | None] | None = None,
        prepare: Callable[[ItemTrie], object] = lambda trie: None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Begin with the bundle's own catalog.

        Masks of filters may take `filter_bytes`. `coder` finds codes of new items, if the bundle
        has an item encoder; `describe` finds what retrieval knows of them. `prepare` is called with
        each new trie before it is used. `clock` says
        the unix seconds that availability depends on.
        """
        self._vocabulary, self._coder, self._prepare = bundle.vocabulary, coder, prepare
        self._describe = describe
        self._filter_bytes = filter_bytes
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
        filters = FilterCache(trie, columns, filter_bytes, left=left)
        self._epoch = Epoch(0, catalog, trie, encoder, filters, left, unavailable)
        self._waiting: list[_Call] = []
        self._led = False  # whether a call is leading those that wait
        self._rested = 0.0  # when the next build may begin, on the monotonic clock
        self._queue, self._build, self._publish = (threading.Lock() for _ in range(3))
        self._compacting = False
        self._rooms = _Growing(), _Growing(), _Growing()  # records, codes and tokens

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

        Calls that arrive while a trie is built share the next one. If two of them have the same
        item, the later call wins. The ids of a call are distinct, and `like` may refer to an
        earlier item of it.

        Returns:
            The first epoch that has them.

        Raises:
            ItemError: an item is malformed or cannot be placed; the text names item and field.
        """
        added = self._epoch.catalog.added
        items = [added.completed(item) for item in items]
        table = table_of(items, added.base.items.schema, self._vocabulary.level_sizes)
        call = _Call(items, table)
        if not items:
            return self._epoch
        with self._queue:
            self._waiting.append(call)
            leads, self._led = not self._led, True
        if not leads:
            call.woken.wait()
        if call.epoch is None and call.error is None:
            self._lead(call)
        if call.error is not None:
            raise call.error
        assert call.epoch is not None  # noqa: S101 - for the type checker
        return call.epoch

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
                filters=FilterCache(
                    trie, before.attributes, self._filter_bytes, left=left, after=before
                ),
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
            filters = FilterCache(
                epoch.trie, before.attributes, self._filter_bytes, left=left, after=before
            )
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
                self._make([])
        return self._epoch

    def _compact(self) -> None:
        try:
            self.compact()
        finally:
            self._compacting = False

    def _lead(self, own: _Call) -> None:
        """Handle all waiting calls, then let one of those that arrived meanwhile lead the rest."""
        calls: list[_Call] = []
        try:
            # Building uses at most half of one core; calls gather during the pause.
            time.sleep(max(0.0, self._rested - time.monotonic()))
            with self._queue:
                calls, self._waiting = self._waiting, []
            start = time.thread_time()  # time spent waiting for other threads does not count
            with self._build:
                self._commit(calls)
            self._rested = time.monotonic() + time.thread_time() - start
        finally:  # even if this thread is interrupted during the pause
            with self._queue:
                self._waiting = [call for call in self._waiting if call is not own]
                following = self._waiting[:1]
                self._led = bool(following)
            for call in (*following, *calls):
                if call is not own:
                    call.woken.set()

    def _commit(self, calls: Sequence[_Call]) -> None:
        """Publish the items of the calls as one epoch; each call gets the epoch or an error."""
        try:
            epoch = self._epoch
            placement = Placement(epoch.catalog, epoch.trie, self._vocabulary, self._coder)
            placement.encode([(call.items, call.table) for call in calls])
            taken = []
            for call in calls:
                try:
                    taken.append((call, placement.codes_of(call.items)))
                except ItemError as error:
                    call.error = error
            if taken:
                made = self._make([(call.items, call.table, codes) for call, codes in taken])
                for call, _ in taken:
                    call.epoch = made
        except BaseException as error:  # no caller may wait for ever
            for call in calls:
                call.error = call.error or error

    def _make(self, news: Sequence[tuple[Sequence[NewItem], pa.Table, NDArray[np.int32]]]) -> Epoch:
        """Publish an epoch with new items, their rows and codes; the caller holds `_build`."""
        seen = self._epoch
        catalog, tokens = seen.catalog, seen.encoder.item_tokens
        added, record, codes = catalog.added, catalog.record, catalog.codes
        base = len(added.base)
        rows = np.arange(len(catalog))
        # if no items are left, the old trie and its numbers are kept
        if catalog.is_wasteful and (news or catalog.alive.any()):
            # a removed item of the bundle has its first record again
            record = np.where(catalog.alive, record, rows).astype(np.int32)
            rows = np.flatnonzero(catalog.alive | (rows < base))
            added, record = added.kept(rows, record[rows])
            codes, tokens = codes[rows], tokens[rows]
        for _, table, _ in news:
            added.extend(table)
            if self._describe is not None:
                added.describe(self._describe(table))
        positions = [added.append(item) for items, _, _ in news for item in items]
        dense, records = np.array(positions, np.int32).reshape(-1, 2).T
        new_codes = np.concatenate([codes[:0], *(c for _, _, c in news)])
        size = base + len(added.ids)
        fresh = bool((dense < len(record)).any())
        records_room, codes_room, tokens_room = self._rooms
        record = records_room.longer(record, size, fresh=fresh)
        codes = codes_room.longer(codes, size, fresh=fresh)
        tokens = tokens_room.longer(tokens, size, fresh=fresh)
        # of an item that came twice, the last record counts
        record[dense], codes[dense] = records, new_codes
        tokens[dense] = self._vocabulary.encode(new_codes)
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
            filters = FilterCache(
                trie, attributes, self._filter_bytes, left=left, after=now.filters
            )
            later = None if added.content is None else added.content.take(record[base:] - base)
            catalog = EpochCatalog(added, record, codes, alive, later)
            self._epoch = Epoch(now.number + 1, catalog, trie, encoder, filters, left, unavailable)
            return self._epoch


class _Growing:
    """An array that grows at its end; every epoch has a view of its beginning."""

    def __init__(self) -> None:
        """Nothing is allocated yet."""
        self._room: NDArray[Any] | None = None

    def longer(self, array: NDArray[T], size: int, *, fresh: bool) -> NDArray[T]:
        """The array extended to `size` rows; the new ones are zero, and `array` does not change.

        With `fresh` it is copied, because its rows will be written.
        """
        room = self._room
        if fresh or room is None or array.base is not room or len(room) < size:
            room = self._room = np.empty((size + size // 8, *array.shape[1:]), array.dtype)
            room[: len(array)] = array
        longer: NDArray[T] = room[:size]
        longer[len(array) :] = 0
        return longer


def _attributes(trie: ItemTrie, added: AddedItems, record: NDArray[np.int32]) -> EpochAttributes:
    return EpochAttributes(added.base.items, trie.row_items, added=added.table(), record=record)


def build_trie(tokens: NDArray[np.int64], alive: NDArray[np.bool_]) -> ItemTrie:
    """The trie of the items that are alive, under their own numbers."""
    if alive.all():
        return ItemTrie.build(tokens)
    items = np.flatnonzero(alive).astype(np.int32)
    trie = ItemTrie.build(tokens[items])
    item_row = np.full(len(tokens), -1, np.int32)
    item_row[items] = trie.item_row
    return replace(trie, row_items=items[trie.row_items], item_row=item_row, on_devices={})
