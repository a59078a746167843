"""Batcher: gathers requests by size and age, hands batches on, brings each answer home.

It knows queues, deadlines and the event loop; it does not know what a request is, and no torch.

A lone request never waits for company: the batcher waits only if it has reason to expect more,
namely the batch before was larger and has just ended, so its clients are about to ask again. It
waits as long as that batch took, and `max_wait_ms` at most: one large batch costs less than two
small ones, and while Python's lock is shared, sending answers beside a batch slows that batch
by as much as it saves.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

PATIENCE = 1.0  # share of the time that the last batch took

RequestT = TypeVar("RequestT")
ResultT = TypeVar("ResultT")


class QueueFullError(Exception):
    """As many requests are waiting as the queue holds."""


class DeadlineExceededError(Exception):
    """The request's deadline passed before its answer was there."""


class ClosedError(Exception):
    """The batcher is draining and takes no more requests."""


@dataclass(frozen=True)
class Answer(Generic[ResultT]):
    """A result and how it came about.

    Attributes:
        result: what the worker returned for this request.
        queue_s: seconds from arrival until the batch began.
        compute_s: seconds that the batch took.
        batch_size: requests in the batch.
    """

    result: ResultT
    queue_s: float
    compute_s: float
    batch_size: int


@dataclass(eq=False)
class _Waiting(Generic[RequestT, ResultT]):
    request: RequestT
    arrived: float
    deadline: float
    future: asyncio.Future[Answer[ResultT]]


class Batcher(Generic[RequestT, ResultT]):
    """Runs `run` on batches, one at a time, in order of arrival."""

    def __init__(
        self,
        run: Callable[[Sequence[RequestT]], Awaitable[Sequence[ResultT]]],
        *,
        max_batch: int,
        max_wait_ms: float,
        queue_limit: int,
    ) -> None:
        """Make a batcher; `start` it inside the event loop that will use it.

        Args:
            run: batch in, results out, in the same order.
            max_batch: requests in a batch at most.
            max_wait_ms: age at which the oldest request no longer waits for others, whatever the
                last batch took.
            queue_limit: waiting requests at most (those being computed do not count).
        """
        self._run = run
        self._max_batch = max_batch
        self._max_wait_s = max_wait_ms / 1000
        self._queue_limit = queue_limit
        self._waiting: deque[_Waiting[RequestT, ResultT]] = deque()
        self._wake = asyncio.Event()
        self._closing = self._running = False
        self._last_size = 1
        self._last_end = float("-inf")
        self._last_took = 0.0
        self._collector: asyncio.Task[None] | None = None

    def __len__(self) -> int:
        """Requests waiting (those being computed do not count)."""
        return len(self._waiting)

    @property
    def busy(self) -> bool:
        """Whether a request waits or is computed."""
        return self._running or bool(self._waiting)

    def start(self) -> None:
        """Begin to answer."""
        self._collector = asyncio.create_task(self._collect(), name="batcher")

    async def close(self) -> None:
        """Refuse new requests, answer those that wait, and return when all are answered."""
        self._closing = True
        self._wake.set()
        if self._collector is not None:
            await self._collector

    async def submit(self, request: RequestT, *, deadline: float) -> Answer[ResultT]:
        """Wait for the answer to `request`. Cancelling the call gives its place back.

        Args:
            request: handed to `run` as it is.
            deadline: time on the event loop's clock (seconds).

        Raises:
            QueueFullError: no place to wait.
            DeadlineExceededError: the deadline passed.
            ClosedError: the batcher is draining.
        """
        if self._closing:
            raise ClosedError
        if len(self._waiting) >= self._queue_limit:
            raise QueueFullError
        loop = asyncio.get_running_loop()
        waiting = _Waiting[RequestT, ResultT](request, loop.time(), deadline, loop.create_future())
        self._waiting.append(waiting)
        self._wake.set()
        try:
            async with asyncio.timeout_at(deadline) as timeout:
                return await waiting.future
        except TimeoutError:
            if timeout.expired():
                raise DeadlineExceededError from None
            raise  # the worker's own
        finally:
            if waiting.future.cancelled():
                with contextlib.suppress(ValueError):  # it may be being computed already
                    self._waiting.remove(waiting)

    async def _collect(self) -> None:
        while True:
            while not self._waiting:
                if self._closing:
                    return
                self._wake.clear()
                await self._wake.wait()
            await self._gather()
            if batch := self._take():
                self._running = True
                await self._answer(batch)
                self._running = False

    async def _gather(self) -> None:
        """Wait until a batch is worth starting (or no one waits any more)."""
        loop = asyncio.get_running_loop()
        while self._waiting and not self._closing:
            patience = min(self._max_wait_s, PATIENCE * self._last_took)
            recent = loop.time() - self._last_end <= patience
            expected = self._last_size if recent else 1
            age = loop.time() - self._waiting[0].arrived
            if len(self._waiting) >= expected or age >= patience:
                return
            self._wake.clear()
            try:
                async with asyncio.timeout(patience - age):
                    await self._wake.wait()
            except TimeoutError:
                return

    def _take(self) -> list[_Waiting[RequestT, ResultT]]:
        """The next batch; what has expired is answered here and never computed."""
        now = asyncio.get_running_loop().time()
        batch: list[_Waiting[RequestT, ResultT]] = []
        while self._waiting and len(batch) < self._max_batch:
            waiting = self._waiting.popleft()
            if waiting.future.done():
                continue
            if now >= waiting.deadline:
                waiting.future.set_exception(DeadlineExceededError())
            else:
                batch.append(waiting)
        return batch

    async def _answer(self, batch: list[_Waiting[RequestT, ResultT]]) -> None:
        loop = asyncio.get_running_loop()
        start = loop.time()
        try:
            results = await self._run([waiting.request for waiting in batch])
            if len(results) != len(batch):
                raise RuntimeError(f"{len(results)} results for a batch of {len(batch)}")
        except Exception as error:
            await self._answer_apart(batch, error)
            return
        end = loop.time()
        self._last_size, self._last_end, self._last_took = len(batch), end, end - start
        for waiting, result in zip(batch, results, strict=True):
            if not waiting.future.done():
                waiting.future.set_result(
                    Answer(result, start - waiting.arrived, end - start, len(batch))
                )

    async def _answer_apart(
        self, batch: list[_Waiting[RequestT, ResultT]], error: Exception
    ) -> None:
        """After a failure: one bad request must not take its batch mates down with it."""
        if len(batch) > 1:
            for waiting in batch:
                await self._answer([waiting])
        elif not batch[0].future.done():
            batch[0].future.set_exception(error)
