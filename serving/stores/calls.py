"""Calls of a store: reads on a few threads, and writes on the one that writes."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar

import sqlalchemy as sa

from recsys.serving.stores.database import Database
from recsys.serving.stores.group import GroupWriter, Write
from recsys.serving.stores.records import Observer

T = TypeVar("T")
Run = Callable[[Callable[[], Any]], Awaitable[Any]]  # calls a function on another thread


class Calls:
    """What the tables of a store read and write through.

    Attributes:
        database: where the rows are.
    """

    def __init__(self, database: Database, observer: Observer | None) -> None:
        """Start the threads that read; writing begins with `start`."""
        self.database = database
        self._observer = observer
        self._readers = ThreadPoolExecutor(database.readers, thread_name_prefix="store-reader")
        self._limited: Run = self._at_once

    def start(self, commit: Callable[[list[Write]], list[Any]]) -> None:
        """Start the thread that writes; `commit` is that of `GroupWriter`."""
        self._writer = GroupWriter(commit)

    def limit_reads(self, limited: Callable[[Callable[..., Future[Any]]], Run]) -> None:
        """Limit the reads that wait; `limited` gets the function that gives one to the threads."""
        self._limited = limited(self._readers.submit)

    async def read(self, operation: str, function: Callable[[], T], *, limited: bool = True) -> T:
        """Call a function that reads on another thread; `limited` if clients ask for it."""
        with self._counted(operation):
            result: T = await (self._limited if limited else self._at_once)(function)
            return result

    async def rows(self, operation: str, query: sa.Select[Any], make: Callable[..., T]) -> list[T]:
        """What `make` returns for the columns of each row, called on the other thread (`read`)."""
        read = self.database.read
        return await self.read(operation, lambda: [make(*row) for row in read(query)])

    async def write(self, operation: str, write: Write) -> Any:
        """Make a write durable, in a transaction with others."""
        with self._counted(operation):
            return await asyncio.wrap_future(self._writer.submit(write))

    async def change(self, operation: str, change: Callable[[sa.Connection], T]) -> T:
        """Make a change that affects no history durable (`write`)."""
        result: T = await self.write(operation, Write(change=change))
        return result

    def close(self) -> None:
        """Write what is queued, and end the threads."""
        self._writer.close()
        self._readers.shutdown()

    async def _at_once(self, function: Callable[[], T]) -> T:
        return await asyncio.wrap_future(self._readers.submit(function))

    @contextmanager
    def _counted(self, operation: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            if self._observer is not None:
                self._observer.store_call(operation, time.perf_counter() - start)
