"""Batcher: gathers requests into batches, and returns each result to its caller.

A single request does not wait for others. The batcher waits only if more requests are likely: when
the previous batch was larger and has just ended, its clients are about to send their next requests.
It waits as long as that batch took, and at most `max_wait_ms`. One large batch takes less time than
two small ones; and because of Python's global lock, sending responses during a batch delays the
batch by as much time as an earlier start would save.

Requests are answered in order of arrival. A batch holds a limited amount of work, in units of an
ordinary request (`limits.work_of`). Rates of clients are limited before (`limits.RateLimit`).
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Generic, TypeVar

PATIENCE = 1.0  # share of the time that the last batch took
MUCH = 4.0  # units of work; requests of more have a batcher of their own on a CPU

RequestT = TypeVar("RequestT")
ResultT = TypeVar("ResultT")


class QueueFullError(Exception):
    """The queue is full."""


class DeadlineExceededError(Exception):
    """The deadline of the request passed before its result was available."""


class ClosedError(Exception):
    """The batcher is closing and accepts no more requests."""


@asynccontextmanager
async def until(deadline: float | None) -> AsyncIterator[None]:
    """Cancel the block at a time on the event loop's clock, in seconds; None for never.

    Raises:
        DeadlineExceededError: that time came.
    """
    timeout = asyncio.timeout_at(deadline)
    try:
        async with timeout:
            yield
    except TimeoutError:
        if timeout.expired():
            raise DeadlineExceededError from None
        raise


@dataclass(frozen=True)
class Answer(Generic[ResultT]):
    """A result, with the size of its batch, its time in the queue, and that of the batch."""

    result: ResultT
    queue_s: float
    compute_s: float
    batch_size: int


@dataclass(eq=False)
class _Waiting(Generic[RequestT, ResultT]):
    request: RequestT
    arrived: float
    deadline: float
    work: float
    future: asyncio.Future[Answer[ResultT]]


class Batcher(Generic[RequestT, ResultT]):
    """Runs `run` on batches, one at a time, in order of arrival.

    >>> async def double(batch):
    ...     return [2 * number for number in batch]
    >>> async def main():
    ...     batcher = Batcher(double, max_batch=8, max_wait_ms=10, queue_limit=100)
    ...     batcher.start()
    ...     deadline = asyncio.get_running_loop().time() + 60
    ...     answer = await batcher.submit(21, deadline=deadline)
    ...     await batcher.close()
    ...     return answer.result, answer.batch_size
    >>> asyncio.run(main())
    (42, 1)
    """

    def __init__(
        self,
        run: Callable[[Sequence[RequestT]], Awaitable[Sequence[ResultT]]],
        *,
        max_batch: int,
        max_wait_ms: float,
        queue_limit: int,
    ) -> None:
        """Create a batcher; `start` it in the event loop that will use it.

        `run` takes a batch and returns its results in the same order. The oldest request waits for
        others for `max_wait_ms` at most; `queue_limit` does not count those being computed. A batch
        has at most `max_batch` requests and as many units of work, or a single request.
        """
        self._run = run
        self._max_batch = max_batch
        self._max_wait_s = max_wait_ms / 1000
        self._queue_limit = queue_limit
        self._waiting: deque[_Waiting[RequestT, ResultT]] = deque()
        self._wake = asyncio.Event()
        self._closing = False
        self._last_size = 1
        self._last_end = float("-inf")
        self._last_took = 0.0
        self._collector: asyncio.Task[None] | None = None

    def __len__(self) -> int:
        """Number of waiting requests, without those being computed."""
        return len(self._waiting)

    def start(self) -> None:
        """Start to run batches."""
        self._collector = asyncio.create_task(self._collect(), name="batcher")

    async def close(self) -> None:
        """Refuse new requests, and return when the waiting ones are answered."""
        self._closing = True
        self._wake.set()
        if self._collector is not None:
            await self._collector

    async def submit(
        self, request: RequestT, *, deadline: float, work: float = 1.0
    ) -> Answer[ResultT]:
        """Wait for the answer to `request`. Cancelling the call frees its place in the queue.

        `deadline` is a time on the event loop's clock, in seconds.

        Raises:
            QueueFullError: the queue is full.
            DeadlineExceededError: the deadline passed.
            ClosedError: the batcher is closing.
        """
        if self._closing:
            raise ClosedError
        if len(self._waiting) >= self._queue_limit:
            raise QueueFullError
        loop = asyncio.get_running_loop()
        waiting = _Waiting[RequestT, ResultT](
            request, loop.time(), deadline, work, loop.create_future()
        )
        self._waiting.append(waiting)
        self._wake.set()
        try:
            async with until(deadline):
                return await waiting.future
        finally:
            if waiting.future.cancelled() and waiting in self._waiting:  # in no batch yet
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
                await self._answer(batch)

    async def _gather(self) -> None:
        """Wait until a batch should start, or no request waits any more."""
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
        """Take the next batch; expired requests fail here and are not computed."""
        now = asyncio.get_running_loop().time()
        batch: list[_Waiting[RequestT, ResultT]] = []
        left = float(self._max_batch)
        while self._waiting and len(batch) < self._max_batch:
            if batch and self._waiting[0].work > left:
                break
            waiting = self._waiting.popleft()
            if waiting.future.done():
                continue
            if now >= waiting.deadline:
                waiting.future.set_exception(DeadlineExceededError())
            else:
                batch.append(waiting)
                left -= waiting.work
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
        """After a failure, run each request alone, so that only the bad one fails."""
        if len(batch) > 1:
            for waiting in batch:
                await self._answer([waiting])
        elif not batch[0].future.done():
            batch[0].future.set_exception(error)
