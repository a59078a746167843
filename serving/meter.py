"""Meter: the processor time that one connection takes on the event loop."""

import time
from collections.abc import Callable, Coroutine, Generator, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Meter:
    """Adds up processor time of this thread.

    >>> meter = Meter()
    >>> with meter.running():
    ...     total = sum(range(1000))
    >>> meter.take() > 0, meter.take()
    (True, 0.0)
    """

    def __init__(self) -> None:
        self._seconds = 0.0

    def take(self) -> float:
        """The seconds since the last call, which begin at zero again."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    @contextmanager
    def running(self) -> Iterator[None]:
        """Count the time of the block, which does not await anything."""
        start = time.thread_time()
        try:
            yield
        finally:
            self._seconds += time.thread_time() - start

    async def run(self, answer: Coroutine[Any, Any, T]) -> T:
        """Await a coroutine, and count the time of its steps; those of other tasks do not count."""
        return await _Steps(answer, self)


class _Steps(Generic[T]):
    def __init__(self, inner: Coroutine[Any, Any, T], meter: Meter) -> None:
        self._inner, self._meter = inner, meter

    def __await__(self) -> Generator[Any, Any, T]:
        step: Callable[[], Any] = partial(self._inner.send, None)
        while True:
            try:
                with self._meter.running():
                    wanted = step()
            except StopIteration as end:
                return end.value  # type: ignore[no-any-return]
            try:
                step = partial(self._inner.send, (yield wanted))
            except BaseException as error:  # a cancellation, too
                step = partial(self._inner.throw, error)
