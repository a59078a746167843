"""Following a store's journal: a process makes the changes that other processes have written."""

from __future__ import annotations

import asyncio
import logging
import uuid
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from recsys.serving.stores.records import StoreError, now_ms
from recsys.serving.stores.store import Store

LOOK_S = 1.0  # between two looks at the journal


async def follow(
    changing: asyncio.Lock, catch_up: Callable[[], Awaitable[object]], logger: logging.Logger
) -> None:
    """Call `catch_up` every `LOOK_S` seconds while holding `changing`, until cancelled.

    Failures are logged and do not end it.
    """
    while True:
        await asyncio.sleep(LOOK_S)
        try:
            async with changing:
                await catch_up()
        except StoreError:
            pass  # the store logs it, and when it works again
        except Exception:
            logger.exception("changes of other processes could not be read")


class JournalFollower(ABC):
    """What the records of a journal amount to, in all processes that share a store.

    Each change is a record; no record is replaced. A record that cannot take effect at its place
    has none in any process. Changes are made while holding `changing`.
    """

    def __init__(self, store: Store, journal: str, logger: logging.Logger) -> None:
        """Without records; `start` reads them."""
        self._store, self._journal, self._logger = store, journal, logger
        self._seen = 0  # place in the journal of the last record that was applied
        self._changing = asyncio.Lock()
        self._following: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Read the records, and follow the changes of other processes."""
        await self._catch_up()
        self._following = asyncio.create_task(
            follow(self._changing, self._catch_up, self._logger), name=self._journal
        )

    async def close(self) -> None:
        """Stop following."""
        if self._following is not None:
            self._following.cancel()
            await asyncio.gather(self._following, return_exceptions=True)

    @abstractmethod
    def _apply(self, record: Mapping[str, Any]) -> bool:
        """Make a change; returns whether it had an effect."""

    async def _write(self, change: Mapping[str, Any], by: str | None) -> bool:
        """Write a change durably and make it; returns whether it had an effect."""
        record = {"id": uuid.uuid4().hex, "time_ms": now_ms(), "by": by, **change}
        await self._store.journal.append(self._journal, [record])
        return record["id"] in await self._catch_up()

    async def _catch_up(self) -> set[str]:
        """Make the changes since the last call; returns the ids of those that had an effect."""
        records = await self._store.journal.read(self._journal, self._seen)
        done = {record["id"] for _, record in records if self._apply(record)}
        self._seen = records[-1][0] if records else self._seen
        return done
