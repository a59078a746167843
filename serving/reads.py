"""Reads: calls that need no model, limited in number and time like requests that do.

Those on the helper threads and those of the store are told apart, so neither waits for the other.

While a thread computes in Python, all others wait for Python's global lock again and again. After a
call of more than `LONG_S`, its client therefore rests for `REST` times as long before its next one,
unless it is the only client.
"""

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

from recsys.serving.batcher import QueueFullError, until
from recsys.serving.fair_queue import FairQueue
from recsys.serving.limits import CALLER, Caller
from recsys.serving.settings import ServingSettings

T = TypeVar("T")
LONG_S, REST = 0.005, 4.0


class Reads:
    """Runs functions on a few threads: a limited number, each with a deadline.

    Clients share the threads fairly, and a full queue is left by the newest call of the client with
    the most work.
    """

    def __init__(
        self,
        settings: ServingSettings,
        submit: Callable[..., Future[Any]],
        threads: int,
        *,
        rests: bool = True,
    ) -> None:
        """Run what is called by `submit`, which has this number of threads for it.

        If `rests`, a client waits after a long call, `REST` times as long as that has computed, and
        calls are on its meter. Calls that run a model do neither, as batches of the worker.
        """
        self._limit = settings.queue_limit
        self._patience_s = settings.deadline_ms / 1000
        self._submit = submit
        self._waiting: FairQueue[_Call] = FairQueue()
        self._rests: dict[str, asyncio.TimerHandle] = {}  # of each client that rests, its end
        self._free, self._has_rests = threads, rests
        self._under_way = 0

    async def __call__(
        self,
        function: Callable[..., T],
        *arguments: Any,
        deadline: float | None = None,
        work: float = 1.0,
    ) -> T:
        """Call `function` off the event loop and return its result.

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
            if not crowded_out.turn.done():  # it was not cancelled a moment ago
                crowded_out.turn.set_exception(QueueFullError())
        if deadline is None:
            deadline = caller.deadline or loop.time() + self._patience_s
        call = _Call(caller, loop.create_future())
        self._waiting.push(call, caller.name, work)
        self._under_way += 1
        self._let_in()
        running: Future[T] | None = None
        try:
            async with until(deadline):
                await call.turn
                running = self._submit(call.timed, function, *arguments)
                # The thread is busy until the function returns, whether anyone waits or not.
                running.add_done_callback(lambda _: loop.call_soon_threadsafe(self._done, call))
                return await asyncio.wrap_future(running)
        finally:
            self._under_way -= 1
            if call.turn.cancelled():
                self._waiting.remove(call, caller.name)
            elif running is None and call.turn.exception() is None:  # cancelled before its turn
                self._done(call)

    def _let_in(self) -> None:
        while self._free and (call := self._waiting.pop(self._may_begin)) is not None:
            if not call.turn.done():
                call.turn.set_result(None)
                self._free -= 1

    def _may_begin(self, call: "_Call") -> bool:
        return call.caller.name not in self._rests

    def _done(self, call: "_Call") -> None:
        self._free += 1
        client = call.caller.name
        if self._has_rests:
            call.caller.meter.add(call.took)
        if self._has_rests and call.took > LONG_S and not call.caller.is_alone():
            loop = asyncio.get_running_loop()
            start = loop.time()
            if rest := self._rests.pop(client, None):
                rest.cancel()
                start = rest.when()
            end = start + REST * call.took
            self._rests[client] = loop.call_at(end, self._end_rest, client)
        self._let_in()

    def _end_rest(self, client: str) -> None:
        del self._rests[client]
        self._let_in()


@dataclass(eq=False)
class _Call:
    """A call that waits or runs: its client, its turn, and the processor time that it took."""

    caller: Caller
    turn: asyncio.Future[None]
    took: float = 0.0

    def timed(self, function: Callable[..., T], *arguments: Any) -> T:
        start = time.thread_time()
        try:
            return function(*arguments)
        finally:
            self.took = time.thread_time() - start
