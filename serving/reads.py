"""Reads: calls that need no model, limited in number and time like requests that do.

Those on the helper threads and those of the store are told apart, so neither waits for the other.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from recsys.serving.batcher import QueueFullError, until
from recsys.serving.fair_queue import FairQueue
from recsys.serving.limits import CALLER
from recsys.serving.settings import ServingSettings

T = TypeVar("T")


class Reads:
    """Runs functions on a few threads: a limited number, each with a deadline.

    Clients share the threads fairly, and a full queue is left by the newest call of the client with
    the most work.
    """

    def __init__(
        self, settings: ServingSettings, submit: Callable[..., Future[Any]], threads: int
    ) -> None:
        """Run what is called by `submit`, which has this number of threads for it."""
        self._limit = settings.queue_limit
        self._patience_s = settings.deadline_ms / 1000
        self._submit = submit
        self._waiting: FairQueue[asyncio.Future[None]] = FairQueue()
        self._free = threads
        self._under_way = 0

    async def __call__(
        self,
        function: Callable[..., T],
        *arguments: Any,
        deadline: float | None = None,
        work: float = 1.0,
    ) -> T:
        """Call `function` off the event loop and return its result. It runs no model.

        Cancelling the call frees its place; a function that runs already is not interrupted. The
        deadline is on the event loop's clock, by default that of the request; `work` counts for the
        client's share.

        Raises:
            QueueFullError: the limit of calls is reached.
            DeadlineExceededError: the deadline passed.
        """
        caller, loop = CALLER.get(), asyncio.get_running_loop()
        if self._under_way >= self._limit:
            crowded_out = self._waiting.crowd_out(caller.name, work)
            if crowded_out is None:
                raise QueueFullError
            crowded_out.set_exception(QueueFullError())
        if deadline is None:
            deadline = caller.deadline or loop.time() + self._patience_s
        turn = loop.create_future()
        self._waiting.push(turn, caller.name, work)
        self._under_way += 1
        self._let_in()
        running: Future[T] | None = None
        try:
            async with until(deadline):
                await turn
                running = self._submit(function, *arguments)
                # The thread is busy until the function returns, whether anyone waits or not.
                running.add_done_callback(lambda _: loop.call_soon_threadsafe(self._done))
                return await asyncio.wrap_future(running)
        finally:
            self._under_way -= 1
            if turn.cancelled():
                self._waiting.remove(turn, caller.name)
            elif running is None and turn.exception() is None:  # cancelled just before its turn
                self._done()

    def _let_in(self) -> None:
        while self._free and (turn := self._waiting.pop()) is not None:
            if not turn.done():
                turn.set_result(None)
                self._free -= 1

    def _done(self) -> None:
        self._free += 1
        self._let_in()
