"""Meter: the time that Python computes for one connection, on the event loop and other threads."""

import time
from collections.abc import Callable, Coroutine, Generator
from functools import partial
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Meter:
    """Adds up processor time, in seconds.

    >>> meter = Meter()
    >>> meter.add(0.25)
    >>> meter.take(), meter.take()
    (0.25, 0.0)
    """

    def __init__(self) -> None:
        self._seconds = 0.0

    def take(self) -> float:
        """The seconds since the last call, which begin at zero again."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def add(self, seconds: float) -> None:
        """Count what was computed, on any thread."""
        self._seconds += seconds

    async def run(self, answer: Coroutine[Any, Any, T]) -> T:
        """Await a coroutine, and count the time of its steps; those of other tasks do not count."""
        return await _Steps(answer, self)


class _Steps(Generic[T]):
    def __init__(self, inner: Coroutine[Any, Any, T], meter: Meter) -> None:
        self._inner, self._meter = inner, meter

    def __await__(self) -> Generator[Any, Any, T]:
        step: Callable[[], Any] = partial(self._inner.send, None)
        while True:
            start = time.thread_time()
            try:
                wanted = step()
            except StopIteration as end:
                return end.value  # type: ignore[no-any-return]
            finally:
                self._meter.add(time.thread_time() - start)
            try:
                step = partial(self._inner.send, (yield wanted))
            except BaseException as error:  # a cancellation, too
                step = partial(self._inner.throw, error)
