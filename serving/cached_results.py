"""Results for all clients that take a while to make: each is made seldom, and once for all."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Hashable
from contextvars import Context
from typing import Generic, TypeVar

T = TypeVar("T")
REST = 9.0  # the least time between two results, in durations of making one


class CachedResults(Generic[T]):
    """Results by keys, which are made again when somebody asks and they are old.

    However many ask, making takes at most a tenth of the time, and one result is made at a time.
    Whoever asks meanwhile gets the one before, unless that is twice as old, and otherwise waits.

    Attributes:
        kept_s: the age from which on a result is old, in seconds.
    """

    def __init__(self, kept_s: float) -> None:
        self.kept_s = kept_s
        self._results: dict[Hashable, tuple[float, T]] = {}  # until when, and the result
        self._making: dict[Hashable, asyncio.Task[T]] = {}
        self._turn = asyncio.Lock()

    async def get(self, key: Hashable, make: Callable[[], Awaitable[T]]) -> T:
        """The result of this key, made by `make`; whatever that raises."""
        now = time.monotonic()
        until, result = self._results.get(key, (0.0, None))
        if result is not None and now < until:
            return result
        making = self._making.get(key)
        if making is None:
            # In an empty context, and to the end if the caller is cancelled: it is of no client.
            making = asyncio.create_task(self._make(key, make), context=Context())
            self._making[key] = making
            making.add_done_callback(lambda task: self._made(key, task))
        if result is not None and now < until + self.kept_s:
            return result
        return await asyncio.shield(making)

    async def close(self) -> None:
        """Stop making results."""
        making = [*self._making.values()]
        for task in making:
            task.cancel()
        await asyncio.gather(*making, return_exceptions=True)

    async def _make(self, key: Hashable, make: Callable[[], Awaitable[T]]) -> T:
        async with self._turn:
            start = time.monotonic()
            result = await make()
            end = time.monotonic()
        until = max(start + self.kept_s, end + REST * (end - start))
        self._results[key] = until, result
        return result

    def _made(self, key: Hashable, task: asyncio.Task[T]) -> None:
        del self._making[key]
        if not task.cancelled():
            task.exception()  # a failure is for those who wait; without them, nobody needs to know
