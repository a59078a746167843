"""Following a store's journal: a process makes the changes that other processes have written."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from typing import Any

from recsys.serving.batcher import QueueFullError
from recsys.serving.stores.records import StoreError, now_ms
from recsys.serving.stores.store import Store

LOOK_S = 1.0  # between two looks at the journal
MAX_CHANGES = 32  # of one kind, waiting and under way
WHOLE = "whole"  # operation of the record that stands for all before it
MOST_CHANGES = 64  # after which a journal is written as one record
Placed = Sequence[tuple[int, dict[str, Any]]]


class ChangeLock(asyncio.Lock):
    """A lock for changes, for which few clients may wait."""

    _clients = 0

    @contextlib.contextmanager
    def counted(self) -> Iterator[None]:
        """Count a client's change in the block; `QueueFullError` if there are too many."""
        if self._clients >= MAX_CHANGES:
            raise QueueFullError
        self._clients += 1
        try:
            yield
        finally:
            self._clients -= 1

    @contextlib.asynccontextmanager
    async def for_client(self) -> AsyncIterator[None]:
        """Hold the lock for a client's change; `QueueFullError` as `counted`."""
        with self.counted():
            async with self:
                yield


class Follower(ABC):
    """Makes the changes of a journal once each, page by page, while holding `_changing`."""

    def __init__(self, store: Store, journal: str, logger: logging.Logger) -> None:
        """Nothing is read yet."""
        self._store, self._journal, self._logger = store, journal, logger
        self._seen = 0  # place in the journal of the last record that was taken
        self._changing = ChangeLock()
        self._following: asyncio.Task[None] | None = None

    def follow(self) -> None:
        """Start to look for changes of other processes."""
        self._following = asyncio.create_task(self._follow(), name=self._journal)

    async def close(self) -> None:
        """Stop following."""
        if self._following is not None:
            self._following.cancel()
            await asyncio.gather(self._following, return_exceptions=True)

    @abstractmethod
    async def _take(self, records: Placed) -> None:
        """Make the changes of a page of records."""

    async def _catch_up(self) -> None:
        """Make the changes since the last call."""
        while records := await self._store.journal.read(self._journal, self._seen):
            await self._take(records)
            self._seen = records[-1][0]

    async def _follow(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            try:
                async with self._changing:
                    await self._catch_up()
            except StoreError:
                pass  # the store logs it, and when it works again
            except Exception:
                self._logger.exception("changes of other processes could not be read")


class JournalFollower(Follower):
    """What the records of a journal amount to, in all processes that share a store.

    A record puts or deletes the thing of a name, adds to it, or gives an alias a value. One that
    cannot take effect at its place has none in any process. After `MOST_CHANGES`, a record with
    those that are still in effect replaces all before it.
    """

    def __init__(self, store: Store, journal: str, logger: logging.Logger) -> None:
        """Without records; `start` reads them."""
        super().__init__(store, journal, logger)
        self._since = 0  # records since the last one that replaced others
        self._written, self._done = "", False  # id of the last own record; whether it had an effect
        self._kept: dict[tuple[bool, str], list[Mapping[str, Any]]] = {}  # those still in effect

    async def start(self) -> None:
        """Read the records, and follow the changes of other processes."""
        await self._catch_up()
        self.follow()

    @abstractmethod
    def _apply(self, record: Mapping[str, Any]) -> bool:
        """Make a change; returns whether it had an effect."""

    @abstractmethod
    def _clear(self) -> None:
        """Begin without records."""

    async def _write(self, change: Mapping[str, Any], by: str | None) -> bool:
        """Write a change durably and make it; returns whether it had an effect."""
        record = {"id": uuid.uuid4().hex, "time_ms": now_ms(), "by": by, **change}
        await self._store.journal.append(self._journal, [record])
        self._written, self._done = record["id"], False
        await self._catch_up()
        if self._since > MOST_CHANGES:
            every = [*itertools.chain.from_iterable(self._kept.values())]
            whole = {"op": WHOLE, "after": self._seen, "records": every}
            with contextlib.suppress(StoreError):  # the change itself is kept
                await self._store.journal.append(self._journal, [whole], replacing=self._seen)
        return self._done

    async def _take(self, records: Placed) -> None:
        before = self._seen
        for place, record in records:
            self._since += 1
            if record["op"] != WHOLE:
                self._make(record)
            else:
                self._since = 0
                if record["after"] != before:
                    self._clear()
                    self._kept.clear()
                    for each in record["records"]:
                        self._make(each)
            before = place

    def _make(self, record: Mapping[str, Any]) -> None:
        if not self._apply(record):
            return
        self._done |= record["id"] == self._written
        op, key = record["op"], (record["op"] == "alias", record["name"])
        if op == "put":  # in the place of an earlier one: aliases follow their rules
            self._kept[key] = [record]
        elif op == "delete" or op == "alias":
            self._kept.pop(key, None)
            if record.get("value"):
                self._kept[key] = [record]
        else:
            self._kept[key].append(record)
