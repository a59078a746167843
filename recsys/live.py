"""The hot catalog: items come and go while requests are answered. NumPy only, no models.

What a batch sees of the catalog is one `Epoch`, which never changes; `Epochs` makes the next one.
Additions build a new trie, those of several callers together, and swap it in as a whole. A removal
keeps the trie and hides the item behind the mask that filters use, so it takes effect at once; a
trie is always built without what is hidden, and in the background once that is much.

Dense numbers of the bundle's items stay for good, those of added items until one is removed. An
added item that was removed is forgotten; one of the bundle is still understood where histories name
it.
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
from recsys.bundle import Bundle
from recsys.constraint import ItemTrie
from recsys.constraint.filter_cache import FilterCache
from recsys.constraint.filters import ItemFilter
from recsys.constraint.mask import RowMask
from recsys.errors import ItemError
from recsys.live_catalog import FIXED, AddedItems, EpochAttributes, EpochCatalog, NewItem
from recsys.placement import ItemCoder, Placement, table_of
from recsys.prompts import PromptEncoder

__all__ = ["Epoch", "Epochs", "NewItem"]

T = TypeVar("T", bound=np.generic)
_FORGET = 4096  # removed items that are not worth the room they would give back
_HIDDEN = 1 / 8  # of a trie's items, that make it worth building without them


@dataclass(frozen=True, eq=False)
class Epoch:
    """The catalog as one batch sees it.

    Attributes:
        number: 0 is the bundle's own; every change makes the next one.
        catalog: items; `index` finds those that can be recommended, `known` also the bundle's that
            were removed. Rows of removed items stay: look at `alive`.
        trie: of those that can be recommended, at least.
        encoder: history -> tokens.
        filters: row masks of filters, without the removed items.
        left: (items of the trie,) bool, whether each can be recommended, by place in
            `trie.row_items`; None if all can.
    """

    number: int
    catalog: EpochCatalog
    trie: ItemTrie
    encoder: PromptEncoder
    filters: FilterCache
    left: NDArray[np.bool_] | None = None

    @property
    def alive(self) -> NDArray[np.bool_]:
        """(items,) bool, whether an item can be recommended."""
        return self.catalog.alive

    @cached_property
    def num_items(self) -> int:
        """Items that can be recommended."""
        return int(np.count_nonzero(self.alive))

    @cached_property
    def mask(self) -> RowMask | None:
        """What the trie holds beside removed items; None where it has none."""
        return None if self.left is None else RowMask.of(self.trie, self.left)

    def allowed(self, wanted: ItemFilter | None) -> RowMask | None:
        """What a filter leaves of the catalog; None for everything.

        Raises:
            FilterError: the filter does not fit the items' attributes.
        """
        return self.mask if wanted is None else self.filters.mask(wanted)

    def excluded_rows(self, items: NDArray[np.integer], mask: RowMask | None) -> NDArray[np.int32]:
        """Rows that hold nothing but these items (`ItemTrie.excluded_rows`), removed or not."""
        items = items[self.trie.item_row[items] >= 0]
        return self.trie.excluded_rows(items) if mask is None else mask.excluded_rows(items)

    def count_eligible(self, excluded: NDArray[np.integer], mask: RowMask | None) -> int:
        """Number of items that can be recommended, of those that a mask allows.

        Args:
            excluded: dense items that must not be; removed ones and repetitions do not matter.
            mask: as `allowed` gives it.
        """
        hidden = np.unique(excluded)
        hidden = hidden[self.alive[hidden]]
        if mask is None:
            return self.num_items - len(hidden)
        _, places = self.trie.places_of(np.unique(self.trie.item_row[hidden]))
        inside = np.isin(self.trie.row_items[places], hidden) & mask.items[places]
        return mask.eligible - int(np.count_nonzero(inside))

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
    """What one caller wants to add, and how that went."""

    def __init__(self, items: Sequence[NewItem], table: pa.Table) -> None:
        self.items, self.table = items, table
        self.epoch: Epoch | None = None
        self.error: BaseException | None = None
        self.woken = threading.Event()  # it has been answered, or is to answer all that wait


class Epochs:
    """The current epoch, and how the next one comes about; for any number of threads."""

    def __init__(
        self,
        bundle: Bundle,
        filter_bytes: int = 1 << 28,
        *,
        coder: ItemCoder | None = None,
        prepare: Callable[[ItemTrie], object] = lambda trie: None,
    ) -> None:
        """Begin with the bundle's own catalog.

        Args:
            bundle: parts of a bundle.
            filter_bytes: memory for masks of filters.
            coder: finds codes of new items; None if the bundle has nothing to do so with.
            prepare: called with each new trie before anything is decoded over it.
        """
        self._vocabulary, self._coder, self._prepare = bundle.vocabulary, coder, prepare
        self._filter_bytes = filter_bytes
        size = len(bundle.catalog)
        added, record = AddedItems(bundle.catalog), np.arange(size, dtype=np.int32)
        alive = np.ones(size, np.bool_)
        catalog = EpochCatalog(added, record, bundle.catalog.codes, alive)
        encoder = bundle.encoder
        trie = ItemTrie.build(encoder.item_tokens)
        columns = EpochAttributes.of(trie.row_items, added.columns, record)
        filters = FilterCache(trie, columns, filter_bytes)
        filters.prepare()
        self._epoch = Epoch(0, catalog, trie, encoder, filters)
        self._waiting: list[_Call] = []
        self._led = False  # somebody is about to answer those that wait
        self._rested = 0.0  # on the monotonic clock
        self._queue, self._build, self._publish = (threading.Lock() for _ in range(3))
        self._compacting = False
        self._rooms = _Growing(), _Growing(), _Growing()  # records, codes and tokens

    @property
    def current(self) -> Epoch:
        """The newest epoch."""
        return self._epoch

    def upsert(self, items: Sequence[NewItem]) -> Epoch:
        """Add items, or replace those that are there; all of them or, on an error, none.

        Callers that come while a trie is built share the next one. Of two that name one item the
        later one wins.

        Args:
            items: of distinct ids; `like` may name one before it.

        Returns:
            The first epoch that has them.

        Raises:
            ItemError: an item is malformed or cannot be placed; the text names item and field.
        """
        items = list(items)
        schema = self._epoch.catalog.added.base.items.schema
        call = _Call(items, table_of(items, schema, self._vocabulary.level_sizes))
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
        """Take items away; no batch that begins afterwards recommends them.

        Args:
            item_ids: outside ids; unknown ones and repetitions are passed over.

        Returns:
            Those that were there.
        """
        wanted = list(dict.fromkeys(arguments.strings("item_ids", item_ids)))
        with self._publish:
            epoch = self._epoch
            found = epoch.catalog.index(wanted)
            there = [name for name, item in zip(wanted, found, strict=True) if item >= 0]
            items = found[found >= 0]
            if not len(items):
                return []
            catalog, trie, before = epoch.catalog, epoch.trie, epoch.filters
            alive = catalog.alive.copy()
            alive[items] = False
            left = np.ones(len(trie.row_items), np.bool_)
            if epoch.left is not None:
                left = epoch.left.copy()
            which, places = trie.places_of(trie.item_row[items])
            left[places[trie.row_items[places] == items[which]]] = False
            self._epoch = replace(
                epoch,
                number=epoch.number + 1,
                catalog=EpochCatalog(catalog.added, catalog.record, catalog.codes, alive),
                filters=FilterCache(
                    trie, before.attributes, self._filter_bytes, left=left, after=before
                ),
                left=left,
            )
            hidden = len(left) - int(np.count_nonzero(left))
            many = hidden > max(_FORGET, _HIDDEN * len(left)) and not self._compacting
            self._compacting |= many
        if many:
            threading.Thread(target=self._compact, name="compaction", daemon=True).start()
        return there

    def compact(self) -> Epoch:
        """Build the trie anew without what is hidden; answers stay as they are."""
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
        """Answer all calls that wait, and have the next one lead those that came meanwhile."""
        calls: list[_Call] = []
        try:
            # Building takes half of one core's time at most: while it rests, calls gather.
            time.sleep(max(0.0, self._rested - time.monotonic()))
            with self._queue:
                calls, self._waiting = self._waiting, []
            start = time.thread_time()  # what waits for others is no reason to wait longer
            with self._build:
                self._commit(calls)
            self._rested = time.monotonic() + time.thread_time() - start
        finally:  # even if this thread is interrupted while it rests
            with self._queue:
                self._waiting = [call for call in self._waiting if call is not own]
                following = self._waiting[:1]
                self._led = bool(following)
            for call in (*following, *calls):
                if call is not own:
                    call.woken.set()

    def _commit(self, calls: Sequence[_Call]) -> None:
        """Publish what the calls want as one epoch; each gets that or an error."""
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
        except BaseException as error:  # nobody may wait for an answer that does not come
            for call in calls:
                call.error = call.error or error

    def _make(self, news: Sequence[tuple[Sequence[NewItem], pa.Table, NDArray[np.int32]]]) -> Epoch:
        """Build and publish the next epoch; `_build` is held.

        Args:
            news: items, their rows and their codes, in the order in which they came.
        """
        seen = self._epoch
        catalog, tokens = seen.catalog, seen.encoder.item_tokens
        added, record, codes = catalog.added, catalog.record, catalog.codes
        base = len(added.base)
        kept = np.arange(len(catalog))
        gone = int(np.count_nonzero(~catalog.alive[base:]))
        live = len(catalog) - base - gone
        many = gone > max(_FORGET, (len(catalog) - base) // 2)
        many |= len(added.records) > 2 * live + _FORGET  # records that others have replaced
        # the old trie is kept where nothing is left to build one of, and so are its numbers
        if many and (news or catalog.alive.any()):
            kept = np.flatnonzero(catalog.alive | (kept < base))
            added, record = added.kept(kept, record[kept])
            codes, tokens = codes[kept], tokens[kept]
        for _, table, _ in news:
            added.columns.extend(table)
        places = [added.append(item) for items, _, _ in news for item in items]
        dense, records = np.array(places, np.int32).reshape(-1, 2).T
        new_codes = np.concatenate([codes[:0], *(c for _, _, c in news)])
        size = base + len(added.ids)
        fresh = bool((dense < len(record)).any())
        records_room, codes_room, tokens_room = self._rooms
        record = records_room.longer(record, size, fresh=fresh)
        codes = codes_room.longer(codes, size, fresh=fresh)
        tokens = tokens_room.longer(tokens, size, fresh=fresh)
        # a record that came twice: the last one stays
        record[dense], codes[dense] = records, new_codes
        tokens[dense] = self._vocabulary.encode(new_codes)
        alive = np.zeros(size, np.bool_)
        alive[: len(kept)] = catalog.alive[kept]
        alive[dense] = True
        trie = _build(tokens, alive) if alive.any() else seen.trie
        self._prepare(trie)
        attributes = EpochAttributes.of(trie.row_items, added.columns, record)
        encoder = replace(seen.encoder, item_tokens=tokens)
        with self._publish:
            now = self._epoch
            # what was removed while the trie was built stays so
            alive[: len(kept)] = now.alive[kept]
            alive[dense] = True
            left: NDArray[np.bool_] | None = alive[trie.row_items]
            left = None if left is None or left.all() else left
            filters = FilterCache(
                trie, attributes, self._filter_bytes, left=left, after=now.filters
            )
            catalog = EpochCatalog(added, record, codes, alive)
            self._epoch = Epoch(now.number + 1, catalog, trie, encoder, filters, left)
            return self._epoch


class _Growing:
    """An array that epochs see beginnings of: what has been added lies behind what they look at."""

    def __init__(self) -> None:
        self._room: NDArray[Any] | None = None

    def longer(self, array: NDArray[T], size: int, *, fresh: bool) -> NDArray[T]:
        """The array with `size` rows; those behind its own are zero.

        Args:
            array: what was here last, or any other; it stays as it is.
            size: rows.
            fresh: rows of the array itself are going to be written.
        """
        room = self._room
        if fresh or room is None or array.base is not room or len(room) < size:
            room = self._room = np.empty((size + size // 8, *array.shape[1:]), array.dtype)
            room[: len(array)] = array
        longer: NDArray[T] = room[:size]
        longer[len(array) :] = 0
        return longer


def _build(tokens: NDArray[np.int64], alive: NDArray[np.bool_]) -> ItemTrie:
    """The trie of the items that are alive, under their own numbers."""
    if alive.all():
        return ItemTrie.build(tokens)
    items = np.flatnonzero(alive).astype(np.int32)
    trie = ItemTrie.build(tokens[items])
    item_row = np.full(len(tokens), -1, np.int32)
    item_row[items] = trie.item_row
    return replace(trie, row_items=items[trie.row_items], item_row=item_row, on_devices={})
