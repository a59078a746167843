"""Calls off the event loop that need no model, limited in number and time like requests that do.

Those on the helper threads and those of the store have limits of their own, so neither waits for
the other.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from recsys.serving.batcher import QueueFullError, until
from recsys.serving.limits import CALLER
from recsys.serving.settings import ServingSettings

T = TypeVar("T")
AT_ONCE = 4  # calls whose results may be in memory before the event loop takes them


class OffLoop:
    """Runs functions on the threads of `submit`: a limited number, each with a deadline."""

    def __init__(self, settings: ServingSettings, submit: Callable[..., Future[Any]]) -> None:
        """Run what is called by `submit`, which calls it on a thread, in order of arrival."""
        self._limit = settings.queue_limit
        self._patience_s = settings.deadline_ms / 1000
        self._submit = submit
        self._under_way, self._slots = 0, asyncio.Semaphore(AT_ONCE)

    async def __call__(
        self, function: Callable[..., T], *arguments: Any, deadline: float | None = None
    ) -> T:
        """Call `function` off the event loop and return its result.

        A cancelled call that has not begun is not made; a function that runs already is not
        interrupted. The deadline is on the event loop's clock, by default that of the request.

        Raises:
            QueueFullError: the limit of calls is reached.
            DeadlineExceededError: the deadline passed.
        """
        if self._under_way >= self._limit:
            raise QueueFullError
        if deadline is None:
            now = asyncio.get_running_loop().time()
            deadline = CALLER.get().deadline or now + self._patience_s
        self._under_way += 1
        try:
            async with until(deadline), self._slots:
                return await asyncio.wrap_future(self._submit(function, *arguments))
        finally:
            self._under_way -= 1
