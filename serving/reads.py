"""Reads: calls that need no model, limited in number and time like requests that do."""

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

from recsys.serving.batcher import QueueFullError, until
from recsys.serving.settings import ServingSettings
from recsys.serving.worker import DecodeWorker

T = TypeVar("T")


class Reads:
    """Runs functions on the helper threads: a limited number, each with a deadline."""

    def __init__(self, settings: ServingSettings, worker: DecodeWorker) -> None:
        self._limit = settings.queue_limit
        self._patience_s = settings.deadline_ms / 1000
        self._worker = worker
        self._under_way = 0

    async def __call__(
        self, function: Callable[..., T], *arguments: Any, deadline: float | None = None
    ) -> T:
        """Call `function` off the event loop and return its result. It runs no model.

        Cancelling the call frees its place; a function that runs already is not interrupted. The
        deadline is on the event loop's clock, by default that of a request which arrives now.

        Raises:
            QueueFullError: the limit of calls is reached.
            DeadlineExceededError: the deadline passed.
        """
        if self._under_way >= self._limit:
            raise QueueFullError
        if deadline is None:
            deadline = asyncio.get_running_loop().time() + self._patience_s
        self._under_way += 1
        try:
            async with until(deadline):
                return await self._worker.read(function, *arguments)
        finally:
            self._under_way -= 1
