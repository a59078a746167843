"""Reads: what is asked of a catalog and needs no model, bounded like what waits for one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

from recsys.serving.batcher import DeadlineExceededError, QueueFullError
from recsys.serving.settings import ServingSettings
from recsys.serving.worker import DecodeWorker

T = TypeVar("T")


class Reads:
    """Calls on the engine's helpers: so many at once, each with a deadline."""

    def __init__(self, settings: ServingSettings, engine: DecodeWorker) -> None:
        """Nothing waits yet."""
        self._limit = settings.queue_limit
        self._patience_s = settings.deadline_ms / 1000
        self._engine = engine
        self._under_way = 0

    async def __call__(
        self, function: Callable[..., T], *arguments: Any, deadline: float | None = None
    ) -> T:
        """What `function` returns, called off the event loop.

        Cancelling the call gives its place back; what runs already is run to its end.

        Args:
            function: that blocks, and asks no model.
            *arguments: of it.
            deadline: time on the event loop's clock; by default as long from now as any request
                may take.

        Raises:
            QueueFullError: as many calls are under way as may wait.
            DeadlineExceededError: the deadline passed.
        """
        if self._under_way >= self._limit:
            raise QueueFullError
        if deadline is None:
            deadline = asyncio.get_running_loop().time() + self._patience_s
        self._under_way += 1
        try:
            async with asyncio.timeout_at(deadline) as timeout:
                return await self._engine.read(function, *arguments)
        except TimeoutError:
            if timeout.expired():
                raise DeadlineExceededError from None
            raise  # of the function
        finally:
            self._under_way -= 1
