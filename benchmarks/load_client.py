"""The client of `serve.py`: closed loops of a number of clients, and open loops at given times."""

from __future__ import annotations

import asyncio
import gc
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Self

import aiohttp
import numpy as np
from servers import Server

OK = range(200, 300)


@dataclass(frozen=True)
class Reply:
    """The answer to a request.

    Attributes:
        request: the JSON that was sent.
        status: of HTTP; 0 where the connection broke.
        body: of the answer.
        latency_ms: from when the request was due until the whole answer was there.
    """

    request: bytes
    status: int
    body: bytes
    latency_ms: float


@dataclass
class Run:
    """The result of a load.

    Attributes:
        generator_s: processor seconds of this process.
        server_s: processor seconds of the server; 0 for one that we did not start.
        latency_ms: of the good answers, in the order in which they arrived.
        replies: all answers in that order, if they were to be kept.
    """

    seconds: float = 0.0
    generator_s: float = 0.0
    server_s: float = 0.0
    latency_ms: list[float] = field(default_factory=list)
    statuses: Counter[int] = field(default_factory=Counter)
    replies: list[Reply] = field(default_factory=list)

    @property
    def errors(self) -> int:
        """Number of answers that were not good."""
        return sum(self.statuses.values()) - len(self.latency_ms)

    def percentile(self, q: float) -> float | None:
        """Percentile of the latency in ms; None without a good answer."""
        return round(float(np.percentile(self.latency_ms, q)), 3) if self.latency_ms else None


class Client:
    """Posts JSON to one address over connections that are kept. Use it as a context manager."""

    def __init__(self, server: Server, path: str, key: str | None = None) -> None:
        self._server, self._url = server, server.url + path
        self._headers = {"Content-Type": "application/json"}
        if key is not None:
            self._headers["Authorization"] = f"Bearer {key}"

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=3600),
            headers=self._headers,
            timeout=aiohttp.ClientTimeout(total=None),
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def send(self, request: bytes, due: float | None = None) -> Reply:
        """Send a request that was due at a time of `time.perf_counter`, by default now."""
        due = time.perf_counter() if due is None else due
        try:
            async with self._session.post(self._url, data=request) as answer:
                status, body = answer.status, await answer.read()
        except (aiohttp.ClientError, OSError):
            status, body = 0, b""
        return Reply(request, status, body, (time.perf_counter() - due) * 1e3)

    async def closed(
        self,
        requests: Iterator[bytes],
        clients: int,
        *,
        seconds: float = float("inf"),
        keep: bool = False,
    ) -> Run:
        """Send requests from so many clients until the time is over or the requests end.

        The clients share the requests; `keep` keeps the replies.
        """
        end, run = time.perf_counter() + seconds, Run()

        async def repeat() -> None:
            while time.perf_counter() < end and (request := next(requests, None)) is not None:
                _note(run, await self.send(request), keep)

        return await self._timed(run, asyncio.gather(*(repeat() for _ in range(clients))))

    async def open(self, requests: Iterable[bytes], due: Iterable[float]) -> Run:
        """Send each request when it is due, whatever the answers to the others do.

        There are at least as many requests as times; `due` are seconds from now, ascending.
        """
        run, start = Run(), time.perf_counter()

        async def one(request: bytes, at: float) -> None:
            _note(run, await self.send(request, at), keep=False)

        async def send_all() -> None:
            async with asyncio.TaskGroup() as tasks:
                for at, request in zip(due, requests, strict=False):
                    if (wait := start + at - time.perf_counter()) > 0:
                        await asyncio.sleep(wait)
                    tasks.create_task(one(request, start + at))

        return await self._timed(run, send_all())

    async def _timed(self, run: Run, load: Any) -> Run:
        """Wait for a load and note its time; no garbage is collected meanwhile."""
        before, start, own = self._server_s(), time.perf_counter(), time.process_time()
        gc.disable()
        try:
            await load
        finally:
            gc.enable()
        run.seconds = time.perf_counter() - start
        run.generator_s = time.process_time() - own
        run.server_s = self._server_s() - before
        return run

    def _server_s(self) -> float:
        usage = self._server.usage()
        return 0.0 if usage is None else usage.cpu_s


def _note(run: Run, reply: Reply, keep: bool) -> None:
    run.statuses[reply.status] += 1
    if reply.status in OK:
        run.latency_ms.append(reply.latency_ms)
    if keep:
        run.replies.append(reply)
