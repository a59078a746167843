"""Changes of the live catalog: items are read, added, replaced and removed, durably.

A change is made in every loaded model and written to the store's journal before it is acknowledged.
The journal is replayed on each model that is loaded later. All bundles share one journal, since
they recommend from the same catalog. A record holds the codes that one bundle computed; they are
reused for that bundle, and computed again for another. Processes that share a store read the
journal once a second and make each other's changes.
"""

import asyncio
import json
import logging
from bisect import bisect_right
from collections.abc import AsyncIterator, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from recsys.errors import ItemError, RecsysError
from recsys.live import Epoch, NewItem
from recsys.live_catalog import EpochCatalog
from recsys.recommender import Recommender
from recsys.serving.errors import ProblemError
from recsys.serving.models import Model, Models
from recsys.serving.off_loop import OffLoop
from recsys.serving.schemas.common import as_json
from recsys.serving.schemas.items import (
    Branch,
    DescribedItem,
    Item,
    ItemBody,
    ItemPage,
    ItemPatch,
    ItemQuery,
)
from recsys.serving.shared_changes import Follower
from recsys.serving.stores.store import Store

logger = logging.getLogger("recsys.serving.catalog_changes")
JOURNAL = "catalogue"  # written in stores: changing it loses what they hold
NEAR, NEAR_ROWS = 3, 64
MOST_SHOWN = 16 << 10  # bytes of the attributes of an item as JSON, which answers repeat
PAGE = 1 << 18  # characters of a page, of up to four bytes each
T = TypeVar("T")


def find(catalog: EpochCatalog, item_id: str) -> int:
    """Find the row of an item; `ProblemError` if there is none with this id."""
    row = catalog.find(item_id)
    if row < 0:
        raise ProblemError("unknown_item", f"The model has no item {item_id!r}.")
    return row


def by_codes(catalog: EpochCatalog) -> NDArray[np.intp]:
    """Dense items in the order of their semantic IDs, and of their ids where those are equal.

    A restart does not change it.
    """
    rows = np.flatnonzero(catalog.alive)
    codes = catalog.codes[rows]
    order = np.lexsort(codes.T[::-1])
    rows, codes = rows[order], codes[order]
    same = (codes[1:] == codes[:-1]).all(axis=1)
    shared = np.flatnonzero((np.append(same, False) | np.append(False, same))[: len(rows)])
    leaf = np.append(0, np.cumsum(~same))[shared]
    table = pa.table({"leaf": leaf, "id": catalog.items["item_id"].take(rows[shared])})
    by_id = pc.sort_indices(table, [("leaf", "ascending"), ("id", "ascending")])
    rows[shared] = rows[shared[by_id.to_numpy()]]
    return rows


@dataclass(frozen=True)
class Shelf:
    """The items of a catalog; `rows` are `by_codes`."""

    catalog: EpochCatalog
    rows: NDArray[np.intp]

    @cached_property
    def codes(self) -> NDArray[np.int32]:
        """(n, L) codes."""
        return self.catalog.codes[self.rows]

    def page(self, prefix: Sequence[int], text: str, cursor: str, limit: int) -> ItemPage:
        """A page of the items with this prefix whose id or title contains the text.

        It ends early if they are large.

        `cursor` names the last item of the page before, by its codes and its id. It is a position
        in the order, so items that come or go between two pages move no others.
        """
        first, last = self._range(prefix)
        positions = np.arange(first, last)
        if text:
            matching = self._containing(text)
            positions = positions[matching[self.rows[positions]]]
        children: list[Branch] = []
        if len(prefix) < self.codes.shape[1]:
            codes, counts = np.unique(self.codes[positions, len(prefix)], return_counts=True)
            children = [
                Branch(code=c, items=n)
                for c, n in zip(codes.tolist(), counts.tolist(), strict=True)
            ]
        start = end = int(np.searchsorted(positions, self._after(cursor))) if cursor else 0
        items: list[Item] = []
        size = 0
        for row in self.rows[positions[start : start + limit]].tolist():
            items.append(Item.of(self.catalog, row))
            end, size = end + 1, size + len(str(items[-1]))
            if size > PAGE:
                break
        return ItemPage(
            items=items,
            total=len(positions),
            next=self._cursor(positions[end - 1]) if end < len(positions) else None,
            prefix=list(prefix),
            children=children,
        )

    def _range(self, prefix: Sequence[int]) -> tuple[int, int]:
        """Places of the items with these first codes; without any, that where they would be."""
        first, last = 0, len(self.rows)
        for level, code in enumerate(prefix):
            if first < last:
                bounds = np.searchsorted(self.codes[first:last, level], [code, code + 1])
                first, last = (bounds + first).tolist()
        return first, last

    def _cursor(self, position: int) -> str:
        codes = ".".join(map(str, self.codes[position].tolist()))
        return f"{codes}-{self._id(position)}"

    def _after(self, cursor: str) -> int:
        """The first place behind a cursor."""
        codes, _, item_id = cursor.partition("-")
        first, last = self._range([int(code) for code in codes.split(".")][: self.codes.shape[1]])
        return first + bisect_right(range(first, last), item_id, key=self._id)

    def _id(self, position: int) -> str:
        return self.catalog.item_id(int(self.rows[position]))

    def _containing(self, text: str) -> NDArray[np.bool_]:
        """(items,) whether the id or the title contains the text."""
        table = self.catalog.items
        hits = [
            pc.fill_null(pc.match_substring(table[name], text, ignore_case=True), False)
            for name in ("item_id", "title")
        ]
        return np.asarray(pc.or_(*hits).to_numpy())


class CatalogChanges(Follower):
    """Reads and changes the catalogs of all loaded models."""

    def __init__(self, store: Store, models: Models, off_loop: OffLoop) -> None:
        """Change the catalogs of these models; the store keeps the changes."""
        super().__init__(store, JOURNAL, logger)
        self._models, self._off_loop = models, off_loop
        self._seen = 0  # place in the journal of the last record that was taken
        # The order of the items of an epoch; the epoch itself would keep removed items in memory.
        self._orders: WeakKeyDictionary[Recommender, tuple[int, NDArray[np.intp]]]
        self._orders = WeakKeyDictionary()
        self._changes: set[asyncio.Task[Any]] = set()

    async def close(self) -> None:
        """Finish the changes under way, and stop following."""
        await asyncio.gather(*self._changes, return_exceptions=True)
        await super().close()

    async def browse(self, query: ItemQuery) -> bytes:
        """Read a page of the catalog: an `ItemPage` as JSON."""
        with self._models.lease(query.model) as model:
            return await self._off_loop(self._page, model.recommender, query)

    async def upsert(self, items: Sequence[ItemBody]) -> tuple[int, list[DescribedItem]]:
        """Add items to the catalog or replace them: all or, on an error, none.

        Returns the epoch of the champion that has them, and the items.

        Raises:
            ItemError: an item is malformed, or gets no semantic ID.
            QueueFullError: too many changes wait.
            StoreError: the items are recommended, but only until a restart; repeat the call.
        """
        return await self._finish(self._upsert(items))

    async def patch(self, item_id: str, changes: ItemPatch) -> tuple[int, DescribedItem]:
        """Change a part of an item; its codes and what is not given stay.

        Returns the epoch of the champion that has the item, and the item.

        Raises:
            ProblemError: there is no item with this id.
            ItemError, QueueFullError, StoreError: as `upsert`.
        """
        return await self._finish(self._patch(item_id, changes))

    async def remove(self, item_id: str) -> None:
        """Remove an item.

        Raises:
            ProblemError: there is no item with this id.
            QueueFullError: too many changes wait.
            StoreError: the store cannot take the change, and nothing is changed.
        """
        await self._finish(self._remove(item_id))

    async def _finish(self, change: Coroutine[Any, Any, T]) -> T:
        """Make a change, which goes on when its caller is cancelled: half of it would be wrong."""
        task = asyncio.create_task(change)
        self._changes.add(task)
        task.add_done_callback(self._changes.discard)
        return await asyncio.shield(task)

    async def _upsert(self, items: Sequence[ItemBody]) -> tuple[int, list[DescribedItem]]:
        news = [
            NewItem(i.item_id, i.title, i.text, i.attributes, i.semantic_id, i.like) for i in items
        ]
        for new in news:
            _check_size(new)
        async with self._changing.for_client():
            return await self._put(news)

    async def _patch(self, item_id: str, changes: ItemPatch) -> tuple[int, DescribedItem]:
        async with self._changing.for_client():
            await self._catch_up()  # with what other processes have changed
            with self._models.lease() as model:
                epoch = model.recommender.epoch
                old, added = epoch.item(item_id), epoch.catalog.added
            if old is None:
                raise ProblemError("unknown_item", f"The model has no item {item_id!r}.")
            stale = {added.derived.get(name) for name in changes.attributes}
            known = {key: value for key, value in old.attributes.items() if key not in stale}
            together = {**known, **changes.attributes}
            new = replace(
                old,
                title=old.title if changes.title is None else changes.title,
                text=old.text if changes.text is None else changes.text,
                attributes={key: value for key, value in together.items() if value is not None},
                semantic_id=None,  # it keeps its codes
            )
            _check_size(new, _size(old))  # it may stay as large as it was
            number, (item,) = await self._put([new])
        return number, item

    async def _put(self, news: Sequence[NewItem]) -> tuple[int, list[DescribedItem]]:
        """Add or replace items in all models; the caller holds the lock of changes."""
        with self._models.lease() as model:
            # A thousand items take a tenth of a second, for which the event loop must not stand.
            epoch, items, records = await asyncio.to_thread(_upsert, model, news)
            for other in self._models.loaded:
                if other is not model:
                    await asyncio.to_thread(_apply, other, records)
        await self._keep(records)
        return epoch.number, items

    async def _remove(self, item_id: str) -> None:
        async with self._changing.for_client():
            if not self._models.knows(item_id):  # another process may have just added it
                await self._catch_up()
                if not self._models.knows(item_id):
                    raise ProblemError("unknown_item", f"The model has no item {item_id!r}.")
            await self._keep([{"op": "remove", "item_id": item_id}])
            for model in self._models.loaded:
                await asyncio.to_thread(model.recommender.remove, [item_id])

    @asynccontextmanager
    async def joining(self, model: Model) -> AsyncIterator[None]:
        """Replay the journal on a model; it joins the loaded ones before the block ends.

        Changes wait for the block: the model would miss one that is made before it has joined.
        """
        async with self._changing:
            if model not in self._models.loaded:
                place = 0
                while records := await self._store.journal.read(JOURNAL, place):
                    await asyncio.to_thread(_apply, model, [record for _, record in records])
                    place = records[-1][0]
                if not self._models.loaded:
                    self._seen = place
            yield

    async def _catch_up(self) -> None:
        while records := await self._store.journal.read(JOURNAL, self._seen):
            changes = [record for _, record in records]
            for model in self._models.loaded:
                try:
                    await asyncio.to_thread(_apply, model, changes)
                except Exception:  # the other models still need the changes
                    logger.exception("%s: changes of other processes could not be made", model.name)
            self._seen = records[-1][0]

    def _page(self, recommender: Recommender, query: ItemQuery) -> bytes:
        epoch = recommender.epoch
        number, order = self._orders.get(recommender, (-1, None))
        if number != epoch.number or order is None:
            order = by_codes(epoch.catalog)
            self._orders[recommender] = epoch.number, order
        prefix = [int(code) for code in query.prefix.replace(",", ".").split(".") if code]
        prefix = prefix[: epoch.catalog.codes.shape[1]]
        shelf = Shelf(epoch.catalog, order)
        return as_json(shelf.page(prefix, query.q, query.cursor, query.limit))

    async def _keep(self, records: list[dict[str, Any]]) -> None:
        written = await self._store.journal.append(JOURNAL, records)
        if written.before == self._seen:  # otherwise there are changes of others between
            self._seen = written.last


def _size(item: NewItem) -> int:
    shown = [value for value in item.attributes.values() if isinstance(value, str | list)]
    return len(json.dumps(shown, ensure_ascii=False).encode())


def _check_size(new: NewItem, at_most: int = 0) -> None:
    if _size(new) > max(at_most, MOST_SHOWN):
        raise ItemError(
            f"item {new.item_id!r}: the texts and lists of its attributes have more than "
            f"{MOST_SHOWN:,} bytes as JSON; send shorter or fewer ones"
        )


def _upsert(
    model: Model, news: Sequence[NewItem]
) -> tuple[Epoch, list[DescribedItem], list[dict[str, Any]]]:
    """Add or replace items in a model: its epoch that has them, the items, and their records."""
    epoch = model.recommender.upsert(news)
    catalog = epoch.catalog
    items = [DescribedItem.of(catalog, catalog.find(new.item_id)) for new in news]
    pairs = zip(news, items, strict=True)
    return epoch, items, [_record(model, epoch, new, item) for new, item in pairs]


def _record(model: Model, epoch: Epoch, new: NewItem, placed: Item) -> dict[str, Any]:
    """The record of an item in the journal, with its codes."""
    return {
        "op": "upsert",
        "version": model.version,
        "item_id": new.item_id,
        "title": new.title,
        "text": new.text,
        "attributes": dict(new.attributes),
        "semantic_id": placed.semantic_id,
        "like": new.like,
        "near": _near(model, epoch, new.item_id),
    }


def _near(model: Model, epoch: Epoch, item_id: str) -> list[str]:
    """Items of the bundle that share most leading codes; another bundle may have them."""
    catalog, trie = epoch.catalog, epoch.trie
    item = catalog.find(item_id)
    row = int(trie.item_row[item])
    first, last = max(0, row - NEAR_ROWS), min(trie.num_rows, row + NEAR_ROWS + 1)
    around = trie.row_items[trie.row_item_start[first] : trie.row_item_start[last]]
    around = around[(around < len(model.recommender.bundle.catalog)) & (around != item)]
    shared = (catalog.codes[around] == catalog.codes[item]).cumprod(axis=1).sum(axis=1)
    best = around[np.argsort(-shared, kind="stable")[:NEAR]]
    return [catalog.item_id(i) for i in best.tolist()]


def _apply(model: Model, records: Sequence[dict[str, Any]]) -> None:
    """Make changes in a model; an item that it refuses at every place is logged and skipped."""
    last = {record["item_id"]: record for record in records}
    gone = [name for name, record in last.items() if record["op"] == "remove"]
    waiting = [
        (record, _places(model, record)) for record in last.values() if record["op"] == "upsert"
    ]
    # Removals come last: a new item may share the semantic ID of a removed one.
    while waiting:
        tried = [(record, positions, next(positions, None)) for record, positions in waiting]
        names = ("item_id", "title", "text", "attributes")
        placed = [(record, position) for record, _, position in tried if position is not None]
        news = [NewItem(**{name: record[name] for name in names}, **at) for record, at in placed]
        refused = _put(model, news)
        for record, _, position in tried:
            if position is None:
                logger.warning("%s refuses item %r", model.name, record["item_id"])
        waiting = [
            (record, positions)
            for record, positions, position in tried
            if position is not None and record["item_id"] in refused
        ]
    model.recommender.remove(gone)


def _places(model: Model, record: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Places for an item, the best first, as fields of `NewItem`."""
    if record["version"] == model.version:
        yield {"semantic_id": record["semantic_id"]}
        return
    catalog = model.recommender.bundle.catalog
    like, near = record["like"], record.get("near", [])
    if like is not None:
        yield {"like": like}
        if (row := catalog.find(like)) >= 0:  # it was removed from the catalog; the bundle has it
            yield {"semantic_id": catalog.codes[row].tolist()}
    yield {}  # computed from its text
    for row in (catalog.find(name) for name in near):
        if row >= 0:
            yield {"semantic_id": catalog.codes[row].tolist()}


def _put(model: Model, news: list[NewItem]) -> set[str]:
    """Add items to a model; returns the ids that it refuses, which are found by bisection."""
    try:
        model.recommender.upsert(news)
    except RecsysError as error:
        if len(news) == 1:
            logger.info("%s: %s", model.name, error)
            return {news[0].item_id}
        half = len(news) // 2
        return _put(model, news[:half]) | _put(model, news[half:])
    return set()
