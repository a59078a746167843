"""Load: requests in a closed loop of so many clients, or in an open one at a rate.

In a closed loop each client asks again as soon as it is answered, so a slow server is asked less.
In an open one requests come when they come (Poisson), each is timed from when it was due, and a
server that falls behind shows it.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np

from recsys.serving.benchmark.client import Client, ConnectionLostError, Reply, Request

OK = range(200, 300)


@dataclass
class Run:
    """What came of a load.

    Attributes:
        seconds: that it took.
        latency_ms: of the good answers, in order of their end.
        statuses: answers by status; 0 for a connection that broke.
        generator_cpu: share of one core that making the load took.
    """

    seconds: float = 0.0
    latency_ms: list[float] = field(default_factory=list)
    statuses: Counter[int] = field(default_factory=Counter)
    generator_cpu: float = 0.0

    @property
    def rate(self) -> float:
        """Good answers a second."""
        return len(self.latency_ms) / self.seconds if self.seconds else 0.0

    @property
    def errors(self) -> int:
        """Answers that were not good."""
        return sum(self.statuses.values()) - len(self.latency_ms)

    def percentile(self, q: float) -> float | None:
        """Of the latency, in milliseconds; None without a good answer."""
        return float(np.percentile(self.latency_ms, q)) if self.latency_ms else None


class Load:
    """Makes loads with one client."""

    def __init__(
        self, client: Client, watch: Callable[[Request, Reply], None] | None = None
    ) -> None:
        """Send by `client`; `watch` sees each good answer."""
        self._client, self._watch = client, watch

    async def closed(
        self, requests: Iterator[Request], clients: int, *, seconds: float | None = None
    ) -> Run:
        """Ask in turn from so many clients, until the time is up or the requests end."""
        await self._client.connect(clients)
        run, cpu, start = Run(), time.process_time(), time.perf_counter()
        end = float("inf") if seconds is None else start + seconds

        async def one() -> None:
            while time.perf_counter() < end:
                request = next(requests, None)
                if request is None:
                    return
                await self._send(run, request, time.perf_counter())

        await asyncio.gather(*(one() for _ in range(clients)))
        return _finish(run, start, cpu)

    async def open(
        self, requests: Iterator[Request], rate: float, *, seconds: float, seed: int = 0
    ) -> Run:
        """Ask at `rate` requests a second on average, whatever the answers do."""
        rng = np.random.default_rng(seed)
        await self._client.connect(8)
        run, cpu, start = Run(), time.process_time(), time.perf_counter()
        due, asked = start, set()
        while (due := due + rng.exponential(1 / rate)) < start + seconds:
            if (wait := due - time.perf_counter()) > 0:
                await asyncio.sleep(wait)
            task = asyncio.create_task(self._send(run, next(requests), due))
            asked.add(task)
            task.add_done_callback(asked.discard)
        await asyncio.gather(*asked)
        return _finish(run, start, cpu)

    async def _send(self, run: Run, request: Request, since: float) -> None:
        try:
            reply = await self._client.send(request)
        except (OSError, ConnectionLostError):
            run.statuses[0] += 1
            return
        run.statuses[reply.status] += 1
        if reply.status in OK:
            run.latency_ms.append((time.perf_counter() - since) * 1000)
            if self._watch is not None:
                self._watch(request, reply)


def _finish(run: Run, start: float, cpu: float) -> Run:
    run.seconds = time.perf_counter() - start
    run.generator_cpu = (time.process_time() - cpu) / run.seconds
    return run
