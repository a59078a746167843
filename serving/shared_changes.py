"""Changes that processes with one store share: each makes those that the others have written."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any, Generic, TypeVar

from recsys.serving.batcher import QueueFullError
from recsys.serving.stores.journal import OutdatedError
from recsys.serving.stores.records import StoreError
from recsys.serving.stores.store import Store

StateT = TypeVar("StateT")
Change = Callable[[dict[str, Any]], None]
LOOK_S = 1.0  # between two looks at the store
MAX_CHANGES = 32  # of one kind, waiting and under way


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
    """Makes the changes of other processes, about once a second, while holding `_changing`."""

    def __init__(self, store: Store, name: str, logger: logging.Logger) -> None:
        """Nothing is read yet; `name` is that of the changes in the store."""
        self._store, self._name, self._logger = store, name, logger
        self._changing = ChangeLock()
        self._following: asyncio.Task[None] | None = None

    def follow(self) -> None:
        """Start to look for changes of other processes."""
        self._following = asyncio.create_task(self._follow(), name=self._name)

    async def close(self) -> None:
        """Stop following."""
        if self._following is not None:
            self._following.cancel()
            await asyncio.gather(self._following, return_exceptions=True)

    @abstractmethod
    async def _catch_up(self) -> None:
        """Make the changes since the last call."""

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


class SharedState(Follower, Generic[StateT]):
    """A JSON object of the store that all processes have.

    It is changed in transactions: a change knows all changes before it, of whatever process.

    Attributes:
        _state: what `_read` made of the object; replaced on the event loop alone, so it does not
            change between two statements there.
    """

    _state: StateT
    _revision: str | None = None  # of what this process has

    async def start(self) -> None:
        """Read the object, and follow the changes of other processes."""
        await self._catch_up()
        self.follow()

    @abstractmethod
    def _read(self, stored: dict[str, Any]) -> StateT:
        """The state of this object; called on another thread, since it may be large."""

    async def _catch_up(self) -> None:
        state = self._store.state
        revision = await state.revision(self._name)
        if revision != self._revision:
            await self._have(revision, await state.get(self._name) or {})

    async def _change(self, check: Callable[[], Awaitable[Change | None]]) -> None:
        """Alter the object in a transaction, and have the result.

        `check` is awaited with all changes before it, and again if another process makes one
        meanwhile. It returns what alters the object, on the writing thread, or None.
        """
        while True:
            await self._catch_up()
            if (change := await check()) is None:
                return
            with contextlib.suppress(OutdatedError):
                written = await self._store.state.change(self._name, change, self._revision)
                await self._have(*written)
                return

    async def _have(self, revision: str | None, stored: dict[str, Any]) -> None:
        self._state = await asyncio.to_thread(self._read, stored)
        self._revision = revision
