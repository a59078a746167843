"""Processor time that the service takes for an answer besides the library's.

    python benchmarks/service_cpu.py --bundle var/bundles/demo --clients 1,8,32

The bundle's recommender answers each `k` once; all later batches get that answer at once. Requests
go through the server's own protocol, application, batcher, store and log (to a file), without
sockets, in this process. Printed are the processor time of all threads and of the event loop for an
answer, as the lower quartile and the median over groups of 100 requests, and the latency.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import uvicorn

from recsys.recommender import Recommender, RecommendRequest, RecommendResult
from recsys.serving import logs
from recsys.serving.app import create_app
from recsys.serving.benchmark.workload import Workload
from recsys.serving.server import SWITCH_S, http_server
from recsys.serving.service import Phase
from recsys.serving.settings import ServingSettings

GROUP = 100


class Prepared:
    """A recommender whose answers are computed once for each k."""

    def __init__(self, recommender: Recommender) -> None:
        self._recommender = recommender
        self._kept: dict[int, RecommendResult] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._recommender, name)

    def recommend_batch(self, requests: Sequence[RecommendRequest]) -> list[RecommendResult]:
        """The kept answers."""
        for request in requests:
            if request.k not in self._kept:
                (self._kept[request.k],) = self._recommender.recommend_batch([request])
        return [self._kept[request.k] for request in requests]


class Wire(asyncio.Transport):
    """A transport that keeps what is written until an answer is complete."""

    def __init__(self) -> None:
        super().__init__({"peername": ("127.0.0.1", 1), "sockname": ("127.0.0.1", 8000)})
        self._written = b""
        self.answered: asyncio.Future[bytes] | None = None

    def write(self, data: Any) -> None:
        """Collect a part of an answer."""
        self._written += data
        head, end, body = self._written.partition(b"\r\n\r\n")
        length = head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0]
        if end and len(body) >= int(length) and self.answered is not None:
            self.answered.set_result(self._written)
            self._written = b""

    def is_closing(self) -> bool:
        """Whether it is closed: never."""
        return False

    def get_write_buffer_size(self) -> int:
        """Bytes that are not read yet: none."""
        return 0

    def close(self) -> None:
        """Close nothing."""


def messages(bundle: Path) -> Iterator[bytes]:
    """Requests as a usual client sends them."""
    for request in Workload(bundle).plain():
        yield (
            b"POST /v1/recommendations HTTP/1.1\r\nHost: 127.0.0.1:8000\r\nAccept: */*\r\n"
            b"Accept-Encoding: gzip, deflate\r\nUser-Agent: Python/3.11 aiohttp/3.14\r\n"
            b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n%b"
            % (len(request.body), request.body)
        )


async def send(make: Any, requests: Sequence[bytes], clients: int) -> list[float]:
    """Send requests from so many clients, each its next one after an answer; the latencies."""
    left, latencies = iter(requests), []

    async def one() -> None:
        wire = Wire()
        connection = make()
        connection.connection_made(wire)
        for request in left:
            start = time.perf_counter()
            wire.answered = asyncio.get_running_loop().create_future()
            connection.data_received(request)
            answer = await wire.answered
            latencies.append(time.perf_counter() - start)
            if not answer.startswith(b"HTTP/1.1 200 "):
                raise SystemExit(answer.decode())
        connection.connection_lost(None)

    await asyncio.gather(*(one() for _ in range(clients)))
    return latencies


def serve(server: uvicorn.Server) -> Any:
    """What makes connections of a server that does not listen."""
    config = server.config
    config.load()
    server.lifespan = config.lifespan_class(config)

    def make() -> Any:
        kind: Any = config.http_protocol_class
        return kind(config=config, server_state=server.server_state, app_state={})

    return make


async def measure(bundle: Path, clients: Sequence[int], groups: int, folder: Path) -> None:
    """Start the service, send requests and print."""
    settings = ServingSettings(bundle=bundle, histories=None, store=folder / "s.db", keys=None)
    prepared: Any = Prepared(Recommender.load(bundle))
    app = create_app(settings, recommender=prepared)
    server = http_server(app, settings)
    make = serve(server)
    await server.lifespan.startup()
    while app.state.service.phase is Phase.STARTING:
        await asyncio.sleep(0.01)
    if app.state.service.failure is not None:
        raise app.state.service.failure
    requests = messages(bundle)
    for count in clients:
        await send(make, list(islice(requests, 4 * GROUP)), count)
        all_us, loop_us, latencies = [], [], []
        for _ in range(groups):
            some = list(islice(requests, GROUP))
            before = time.process_time(), time.thread_time()
            latencies += await send(make, some, count)
            all_us.append((time.process_time() - before[0]) / GROUP * 1e6)
            loop_us.append((time.thread_time() - before[1]) / GROUP * 1e6)
        low, middle, _ = statistics.quantiles(all_us, n=4)
        print(
            f"{count:3} clients: {low:4.0f} us of all threads (median {middle:.0f}), "
            f"{statistics.quantiles(loop_us, n=4)[0]:4.0f} of the event loop, "
            f"p50 {statistics.median(latencies) * 1e3:.2f} ms"
        )
    await server.lifespan.shutdown()


def main() -> None:
    """Read the options."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--bundle", type=Path, required=True)
    parser.add_argument("--clients", default="1,8,32")
    parser.add_argument("--groups", type=int, default=20)
    given = parser.parse_args()
    sys.setswitchinterval(SWITCH_S)
    with tempfile.TemporaryDirectory() as folder, Path(folder, "log").open("w") as log:
        logs.configure(log)
        clients = [int(count) for count in given.clients.split(",")]
        run = measure(given.bundle, clients, given.groups, Path(folder))
        # The event loop of the server: uvloop where it is installed.
        with asyncio.Runner(loop_factory=uvicorn.Config(None).get_loop_factory()) as runner:
            runner.run(run)


if __name__ == "__main__":
    main()
