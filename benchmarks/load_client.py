"""The client of `serve.py`: closed loops of a number of clients, and open loops at given times."""

from __future__ import annotations

import asyncio
import gc
import json
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import aiohttp
import numpy as np

from recsys.testing import Server

OK = range(200, 300)


@dataclass(frozen=True)
class Request:
    """A request to one of the servers: `server` is its place among those of the client.

    The `label` is of the sender; it is not sent.
    """

    method: str
    path: str
    body: bytes = b""
    server: int = 0
    label: str = ""

    @classmethod
    def post(cls, path: str, body: Any, server: int = 0, label: str = "") -> Self:
        """A POST of a JSON value."""
        return cls("POST", path, json.dumps(body).encode(), server, label)


@dataclass(frozen=True)
class Reply:
    """The answer to a request.

    Attributes:
        request: that was sent.
        status: of HTTP; 0 where the connection broke.
        body: of the answer.
        latency_ms: from when the request was due until the whole answer was there.
    """

    request: Request
    status: int
    body: bytes
    latency_ms: float

    def json(self) -> Any:
        """The body as JSON."""
        return json.loads(self.body)


@dataclass
class Run:
    """The result of a load.

    Attributes:
        generator_s: processor seconds of this process.
        server_s: processor seconds of the servers; 0 for servers that we did not start.
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
    def rate(self) -> float:
        """Good answers a second."""
        return len(self.latency_ms) / self.seconds if self.seconds else 0.0

    @property
    def errors(self) -> int:
        """Number of answers that were not good."""
        return sum(self.statuses.values()) - len(self.latency_ms)

    def percentile(self, q: float) -> float | None:
        """Percentile of the latency in ms; None without a good answer."""
        return round(float(np.percentile(self.latency_ms, q)), 3) if self.latency_ms else None


class Client:
    """Sends requests to servers over connections that are kept. Use it as a context manager."""

    def __init__(self, servers: Sequence[Server], key: str | None = None) -> None:
        self._servers = servers
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

    async def send(self, request: Request, due: float | None = None) -> Reply:
        """Send a request that was due at a time of `time.perf_counter`, by default now."""
        due = time.perf_counter() if due is None else due
        url = self._servers[request.server].url + request.path
        try:
            async with self._session.request(request.method, url, data=request.body) as answer:
                status, body = answer.status, await answer.read()
        except (aiohttp.ClientError, OSError):
            status, body = 0, b""
        return Reply(request, status, body, (time.perf_counter() - due) * 1e3)

    async def closed(
        self,
        requests: Iterator[Request],
        clients: int,
        *,
        seconds: float | None = None,
        keep: bool = False,
    ) -> Run:
        """Send requests from so many clients until the time is over or the requests end.

        The clients share the requests; `keep` keeps the replies.
        """
        end = float("inf") if seconds is None else time.perf_counter() + seconds
        run = Run()

        async def repeat() -> None:
            while time.perf_counter() < end and (request := next(requests, None)) is not None:
                _note(run, await self.send(request), keep)

        return await self._timed(run, asyncio.gather(*(repeat() for _ in range(clients))))

    async def open(
        self, requests: Iterable[Request], due: Iterable[float], *, keep: bool = False
    ) -> Run:
        """Send each request when it is due, whatever the answers to the others do.

        There are at least as many requests as times; `due` are seconds from now, ascending.
        """
        run, start, tasks = Run(), time.perf_counter(), set()

        async def one(request: Request, at: float) -> None:
            _note(run, await self.send(request, at), keep)

        async def send_all() -> None:
            for at, request in zip(due, requests, strict=False):
                if (wait := start + at - time.perf_counter()) > 0:
                    await asyncio.sleep(wait)
                task = asyncio.create_task(one(request, start + at))
                tasks.add(task)
                task.add_done_callback(tasks.discard)
            await asyncio.gather(*tasks)

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
        usages = [server.usage() for server in self._servers]
        return sum(usage.cpu_s for usage in usages if usage is not None)


def _note(run: Run, reply: Reply, keep: bool) -> None:
    run.statuses[reply.status] += 1
    if reply.status in OK:
        run.latency_ms.append(reply.latency_ms)
    if keep:
        run.replies.append(reply)
