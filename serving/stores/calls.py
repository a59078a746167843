"""Calls of a store: reads on a few threads, and writes on the one that writes.

Group commit: writes that arrive while one is synced to disk share the next sync. The writing thread
takes all queued writes, commits them as one group, and then resolves their futures. So many writers
share the cost of a sync, and a single writer does not wait for others.
"""

import asyncio
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import sqlalchemy as sa

from recsys.serving.stores.database import Database
from recsys.serving.stores.records import Event, Observer, StoreError

T = TypeVar("T")
Run = Callable[[Callable[[], Any]], Awaitable[Any]]  # calls a function on another thread
MAX_WAITING = 10_000
MAX_GROUP_EVENTS = 5_000
IDLE_S = 0.5


@dataclass(slots=True)
class Write:
    """A write: events to append, or a change.

    Attributes:
        change: called with a connection in the transaction of the group.
        erases: whether it erases a user.
        done: resolved after the commit.
    """

    events: Sequence[Event] = ()
    change: Callable[[Any], Any] | None = None
    erases: bool = False
    done: Future[Any] = field(default_factory=Future)


class GroupWriter:
    """The writing thread and its queue."""

    def __init__(self, commit: Callable[[list[Write]], list[Any]]) -> None:
        """Start the thread.

        `commit` makes a group durable and returns a result or an exception for each write. If it
        raises, every write of the group fails. It is also called with an empty group every `IDLE_S`
        seconds.
        """
        self._commit = commit
        self._waiting: deque[Write] = deque()
        self._wake = threading.Condition()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="store-writer", daemon=True)
        self._thread.start()

    def submit(self, write: Write) -> Future[Any]:
        """Queue a write.

        Raises:
            StoreError: the store is closed, or the queue is full.
        """
        with self._wake:
            if self._closing:
                raise StoreError("the store is closed")
            if len(self._waiting) >= MAX_WAITING:
                raise StoreError(f"{MAX_WAITING} writes wait already; the disk does not keep up")
            self._waiting.append(write)
            self._wake.notify()
        return write.done

    def close(self) -> None:
        """Write what is queued, then end the thread."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        self._thread.join()

    def _run(self) -> None:
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._waiting or self._closing, timeout=IDLE_S)
                group = self._take()
                last = self._closing and not self._waiting
            # A write whose caller has given up is dropped.
            group = [write for write in group if write.done.set_running_or_notify_cancel()]
            try:
                outcomes = self._commit(group)
            except BaseException as error:  # every write of the group fails
                outcomes = [error] * len(group)
            for write, outcome in zip(group, outcomes, strict=True):
                if isinstance(outcome, BaseException):
                    write.done.set_exception(outcome)
                else:
                    write.done.set_result(outcome)
            if last:
                return

    def _take(self) -> list[Write]:
        group: list[Write] = []
        events = 0
        while self._waiting and (not group or events < MAX_GROUP_EVENTS):
            group.append(self._waiting.popleft())
            events += len(group[-1].events)
        return group


class Calls:
    """What the tables of a store read and write through.

    Attributes:
        database: where the rows are.
        is_closed: whether nothing can be written any more.
    """

    def __init__(self, database: Database, observer: Observer | None) -> None:
        """Start the threads that read; writing begins with `start`."""
        self.database, self.is_closed = database, False
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
            try:
                return await asyncio.wrap_future(self._writer.submit(write))
            finally:
                del write  # else its error and this frame keep each other, and its events

    async def change(self, operation: str, change: Callable[[sa.Connection], T]) -> T:
        """Make a change that affects no history durable (`write`)."""
        result: T = await self.write(operation, Write(change=change))
        return result

    def close(self) -> None:
        """Write what is queued, and end the threads."""
        self.is_closed = True
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
                self._observer(operation, time.perf_counter() - start)
