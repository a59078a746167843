"""The catalogue as a resource: items looked at, put and taken away, and changes that survive.

A change is made in every loaded model and then kept in the store's journal; only then is it
acknowledged. The journal is replayed on each model that is loaded later. It is one for all bundles,
since they recommend from one shop's catalogue: codes that a change was given by one bundle are used
for that bundle again, and are found anew for another.
"""

from __future__ import annotations

import asyncio
import logging
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np
import pyarrow.compute as pc

from recsys.errors import RecsysError
from recsys.live import NewItem
from serving.schemas.items import Branch, Item, ItemPage

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from recsys.catalog import Catalog
    from recsys.live import Epoch
    from serving.engine import Recommends
    from serving.metrics import Metrics
    from serving.models import Model, Models
    from serving.schemas.items import ItemQuery, NewItemBody
    from serving.stores import Store

logger = logging.getLogger("serving.catalogue")
JOURNAL = "catalogue"


class UnknownItemError(LookupError):
    """The catalogue has no such item."""


def item_of(catalog: Catalog, row: int) -> Item:
    """One item of the catalogue."""
    return Item.model_construct(
        item_id=catalog.item_id(row),
        title=catalog.title(row),
        semantic_id=catalog.codes[row].tolist(),
        metadata=metadata(catalog, row),
    )


def metadata(catalog: Catalog, row: int) -> dict[str, Any]:
    """Attributes of one item; a number that is not one becomes null."""
    return {
        key: None if isinstance(value, float) and not math.isfinite(value) else value
        for key, value in catalog.attributes(row).items()
    }


def find(catalog: Catalog, item_id: str) -> int:
    """The row of an item.

    Raises:
        UnknownItemError: there is none of this id.
    """
    row = catalog.find(item_id)
    if row < 0:
        raise UnknownItemError(f"The model has no item {item_id!r}.")
    return row


@dataclass(frozen=True)
class Shelf:
    """The items of one epoch in the order of their semantic IDs.

    Attributes:
        epoch: that it shows.
        rows: (n,) dense items.
        codes: (n, L) of each.
    """

    epoch: Epoch
    rows: NDArray[np.intp]
    codes: NDArray[np.int32]

    @classmethod
    def of(cls, epoch: Epoch) -> Shelf:
        """Sort an epoch's items."""
        rows = np.flatnonzero(epoch.alive)
        codes = epoch.catalog.codes[rows]
        order = np.lexsort(codes.T[::-1])
        return cls(epoch, rows[order], codes[order])

    def page(self, prefix: Sequence[int], text: str, start: int, limit: int) -> ItemPage:
        """Items below a prefix whose id or title contains the text."""
        first, last = 0, len(self.rows)
        for level, code in enumerate(prefix):
            column = self.codes[first:last, level]
            first, last = first + np.searchsorted(column, [code, code + 1])
        places = np.arange(first, last)
        if text:
            found = self._containing(text)
            places = places[found[self.rows[places]]]
        children: list[Branch] = []
        if len(prefix) < self.codes.shape[1]:
            codes, counts = np.unique(self.codes[places, len(prefix)], return_counts=True)
            children = [
                Branch(code=c, items=n)
                for c, n in zip(codes.tolist(), counts.tolist(), strict=True)
            ]
        shown = self.rows[places[start : start + limit]].tolist()
        end = start + len(shown)
        return ItemPage(
            items=[item_of(self.epoch.catalog, row) for row in shown],
            total=len(places),
            next=str(end) if shown and end < len(places) else None,
            prefix=list(prefix),
            children=children,
        )

    def _containing(self, text: str) -> NDArray[np.bool_]:
        """(items,) bool."""
        table = self.epoch.catalog.items
        hits = [
            pc.fill_null(pc.match_substring(table[name], text, ignore_case=True), False)
            for name in ("item_id", "title")
        ]
        return np.asarray(pc.or_(*hits).to_numpy())


class Catalogue:
    """What the service does to items, in all loaded models at once."""

    def __init__(self, models: Models, metrics: Metrics) -> None:
        """Make it for these models; changes are kept once `store` is set."""
        self.store: Store | None = None
        self._models, self._metrics = models, metrics
        self._changing = asyncio.Lock()
        self._shelves: WeakKeyDictionary[Recommends, Shelf] = WeakKeyDictionary()

    async def browse(self, query: ItemQuery) -> ItemPage:
        """A page of the catalogue.

        Raises:
            UnknownModelError: of the alias.
        """
        prefix = [int(code) for code in query.prefix.replace(",", ".").split(".") if code]
        with self._models.lease(query.model) as model:
            return await asyncio.to_thread(
                self._page, model.recommender, prefix, query.q, int(query.cursor or 0), query.limit
            )

    async def upsert(self, items: Sequence[NewItemBody]) -> tuple[int, list[Item]]:
        """Put items into the catalogue, in place of those of their ids; all or, on an error, none.

        Returns:
            The champion's epoch that has them, and the items.

        Raises:
            ItemError: one is malformed, or no place is found for it.
            StoreError: they are recommended, but would not be after a restart; ask again.
        """
        news = [
            NewItem(i.item_id, i.title, i.text, i.attributes, i.semantic_id, i.like) for i in items
        ]
        async with self._changing:
            with self._models.lease() as model:
                epoch = await asyncio.to_thread(model.recommender.upsert, news)
                catalog = epoch.catalog
                found = [item_of(catalog, catalog.find(new.item_id)) for new in news]
                records = [_record(model, new, item) for new, item in zip(news, found, strict=True)]
                for other in self._models.loaded:
                    if other is not model:
                        await asyncio.to_thread(_apply, other, records)
            await self._keep(records)
        return epoch.number, found

    async def remove(self, item_id: str) -> None:
        """Take an item away.

        Raises:
            UnknownItemError: there is none of this id.
            StoreError: it is gone, but would be back after a restart; ask again.
        """
        async with self._changing:
            there = []
            for model in self._models.loaded:
                there += await asyncio.to_thread(model.recommender.remove, [item_id])
            if not there and not await self._is_unkept(item_id):
                raise UnknownItemError(f"The model has no item {item_id!r}.")
            await self._keep([{"op": "remove", "item_id": item_id}])

    async def _is_unkept(self, item_id: str) -> bool:
        """Whether the item was taken away before, and the store could not keep that."""
        if self.store is None:
            return False
        records = await self.store.journal(JOURNAL)
        last = {record["item_id"]: record["op"] for record in records}.get(item_id)
        catalogs = [model.recommender.catalog for model in self._models.loaded]
        return last == "upsert" or (
            last is None and any((catalog.known([item_id]) >= 0).any() for catalog in catalogs)
        )

    async def replay(self, model: Model) -> None:
        """Bring a model that was just loaded up to date."""
        async with self._changing:
            records = [] if self.store is None else await self.store.journal(JOURNAL)
            if records:
                await asyncio.to_thread(_apply, model, records)
        self._count(model)

    def _page(
        self, recommender: Recommends, prefix: list[int], text: str, start: int, limit: int
    ) -> ItemPage:
        epoch = recommender.epoch
        shelf = self._shelves.get(recommender)
        if shelf is None or shelf.epoch is not epoch:
            shelf = self._shelves[recommender] = Shelf.of(epoch)
        return shelf.page(prefix[: epoch.catalog.codes.shape[1]], text, start, limit)

    async def _keep(self, records: list[dict[str, Any]]) -> None:
        for model in self._models.loaded:
            self._count(model)
        if self.store is not None:
            await self.store.journal_append(JOURNAL, records)

    def _count(self, model: Model) -> None:
        epoch = model.recommender.epoch
        self._metrics.catalogue(model.name, epoch.number, epoch.num_items)


def _record(model: Model, new: NewItem, placed: Item) -> dict[str, Any]:
    """What the journal keeps of an item, with the codes that it was given."""
    return {
        "op": "upsert",
        "version": model.version,
        "item_id": new.item_id,
        "title": new.title,
        "text": new.text,
        "attributes": dict(new.attributes),
        "semantic_id": placed.semantic_id,
        "like": new.like,
    }


def _apply(model: Model, records: Sequence[dict[str, Any]]) -> None:
    """Make changes in a model; one that it refuses is logged and passed over."""
    last = {record["item_id"]: record for record in records}
    news, gone = [], []
    for record in last.values():
        if record["op"] == "remove":
            gone.append(record["item_id"])
            continue
        # by its codes where they mean something, or else by what it was given
        place = "semantic_id" if record["version"] == model.version else "like"
        names = ("item_id", "title", "text", "attributes", place)
        news.append(NewItem(**{name: record[name] for name in names}))
    model.recommender.remove(gone)
    try:
        model.recommender.upsert(news)
    except RecsysError:
        for new in news:  # the others must not suffer from one
            try:
                model.recommender.upsert([new])
            except RecsysError as error:
                logger.warning("%s does not take a changed item: %s", model.name, error)
