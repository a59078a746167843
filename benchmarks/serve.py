"""A service under load: latency and throughput.

    OMP_NUM_THREADS=1 python benchmarks/serve.py --bundle var/bundles/demo --out var/reports/serve
    RECSYS_API_KEY=rk_... python benchmarks/serve.py --bundle var/bundles/demo --url http://10.0.0.7:8000

A server of the bundle is started with a store of its own, or one that runs is used. In a closed
loop each client sends its next request when its last one is answered, so a slow server gets fewer
requests. In an open loop requests are sent when they are due, and their latency counts from then,
so a server that falls behind shows it (no coordinated omission). Server and load generator share
the machine; the last column is the generator's share of it. Lists that one client gets are compared
with those that all clients get at once: batches of other sizes may run by other kernels, so a list
is `tied` if it is the same but for items whose scores are within `TIE`, or else `different`. Needs
the `dev` extra.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
from huggingface import Ranking, same_ranking
from load_client import OK, Client, Run
from measuring import Row
from reporting import Report, Table, begin, publish, read_options
from servers import Server, start_server

from recsys.artifacts import read_manifest
from recsys.bundle import CATALOG
from recsys.catalog import Catalog
from recsys.errors import ConfigError, RecsysError
from recsys.progress import say

RECOMMEND = "/v1/recommendations"
WARM_S = 2.0  # of load before anything is measured
SHARE = 0.7  # of the peak of the closed loops, the rate of the open loop
COMPARED = 200  # requests whose lists are compared
TIE = 1e-3  # of scores in float32, whose lists are ranked by up to two more models
COLUMNS = {
    "answers": "answers", "rate": "1/s", "p50_ms": "p50 ms", "p95_ms": "p95 ms",
    "p99_ms": "p99 ms", "errors": "errors", "server_cpu": "cores",
    "server_cpu_ms": "CPU ms", "server_mb": "MB", "generator_cpu": "generator cores",
}  # fmt: skip


def draw_requests(bundle: Path) -> Iterator[bytes]:
    """Requests with random histories of 1 to 20 items, without end, the same each time."""
    item_ids, rng = Catalog.load(bundle / CATALOG).item_ids, np.random.default_rng(0)
    while True:
        items = rng.integers(0, len(item_ids), rng.integers(1, 21))
        yield json.dumps({"history": [item_ids[i] for i in items], "k": 10}).encode()


@dataclass(frozen=True)
class Options:
    """What is measured.

    Attributes:
        bundle: that is served.
        url: a server of the bundle that runs already, http://HOST:PORT; else one is started. It
            gets the API key $RECSYS_API_KEY.
        settings: of the server that is started, as key=value of the section `serve`.
        concurrency: clients of each closed loop.
        seconds: duration of each loop.
    """

    bundle: Path = Path("var/bundles/demo")
    url: str | None = None
    settings: list[str] = field(default_factory=list)
    concurrency: list[int] = field(default_factory=lambda: [1, 8, 32, 64])
    seconds: float = 10.0


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print tables and one JSON line."""
    quick = {"concurrency": [1, 8], "seconds": 1.0}
    options, run = read_options(Options, __doc__, quick, argv)
    document = begin("serve", options, run)
    document["version"] = read_manifest(options.bundle, "bundle").digest
    document |= asyncio.run(start_and_measure(options))
    publish(document, report(document), run.out)


async def start_and_measure(options: Options) -> Row:
    """Measure the server of `options.url`, or one that is started for it."""
    if options.url is None:
        async with start_server(options.bundle, options.settings) as server:
            return await measure(server, options)
    where = urlsplit(options.url)
    if where.scheme != "http" or where.hostname is None:
        raise ConfigError(f"--url {options.url}: expected http://HOST:PORT")
    return await measure(Server(where.hostname, where.port or 80), options)


async def measure(server: Server, options: Options) -> Row:
    """All phases.

    Returns:
        `closed` and `open`, a row for each loop, and `lists`, what `compare` counts.

    Raises:
        RecsysError: the server does not answer a plain request, or one whose list is compared.
    """
    requests = draw_requests(options.bundle)
    phases: Row = {"closed": [], "open": []}
    async with Client(server, RECOMMEND, os.environ.get("RECSYS_API_KEY")) as client:
        first = await client.send(next(requests))
        if first.status not in OK:
            raise RecsysError(f"{server.url} answers {first.status}: {first.body[:300]!r}")
        most = max(options.concurrency, default=1)
        await client.closed(requests, most, seconds=WARM_S)
        for clients in options.concurrency:
            say(f"{clients} clients ...")
            run = await client.closed(requests, clients, seconds=options.seconds)
            phases["closed"].append({"clients": clients, **_describe(run, server)})
        if rate := SHARE * max((row["rate"] for row in phases["closed"]), default=0.0):
            say(f"{rate:.0f} requests a second ...")
            due = draw_arrivals(rate, options.seconds)
            run = await client.open(requests, due)
            phases["open"].append({"sent_rate": round(rate, 1), **_describe(run, server)})
        compared = list(islice(requests, COMPARED))
        runs = [await client.closed(iter(compared), n, keep=True) for n in (1, most)]
        phases["lists"] = compare(*map(_lists, runs))
    return phases


def compare(alone: Sequence[Ranking], together: Sequence[Ranking]) -> Row:
    """How many lists are the same to the bit, tied or different."""
    counts = {"same": 0, "tied": 0, "different": 0}
    for mine, theirs in zip(together, alone, strict=True):
        tied = same_ranking(mine, theirs, tolerance=TIE, tie=TIE)
        counts["same" if mine == theirs else "tied" if tied else "different"] += 1
    return counts


def _lists(run: Run) -> list[Ranking]:
    """The list of each request, in an order of the requests."""
    for reply in run.replies:
        if reply.status not in OK:
            raise RecsysError(f"{reply.request!r} is answered {reply.status}: {reply.body[:300]!r}")
    answers = {reply.request: json.loads(reply.body)["items"] for reply in run.replies}
    ordered = [answers[request] for request in sorted(answers)]
    return [[(item["item_id"], item["score"]) for item in items] for items in ordered]


def draw_arrivals(rate: float, seconds: float) -> list[float]:
    """Times at which requests are due: a Poisson process of `rate` a second."""
    count = int(2 * rate * seconds) + 100
    times = np.random.default_rng(0).exponential(1 / rate, count).cumsum()
    arrivals: list[float] = times[times < seconds].tolist()
    return arrivals


def _describe(run: Run, server: Server) -> Row:
    usage = server.usage()
    answers = max(1, len(run.latency_ms))
    return {
        "answers": len(run.latency_ms),
        "rate": round(len(run.latency_ms) / run.seconds, 1),
        "p50_ms": run.percentile(50),
        "p95_ms": run.percentile(95),
        "p99_ms": run.percentile(99),
        "errors": run.errors,
        "statuses": {str(status): n for status, n in sorted(run.statuses.items())},
        "generator_cpu": round(run.generator_s / run.seconds, 3),
        "server_cpu": round(run.server_s / run.seconds, 3),
        "server_cpu_ms": round(run.server_s * 1000 / answers, 2),
        "server_mb": None if usage is None else round(usage.rss_bytes / 2**20),
    }


def report(document: Row) -> Report:
    """What is shown: a table for each kind of loop."""
    tables = []
    for name, key in (("closed", "clients"), ("open", "sent_rate")):
        if rows := document[name]:
            cells = [[_cell(row[column]) for column in (key, *COLUMNS)] for row in rows]
            columns = (key.replace("_", " "), *COLUMNS.values())
            tables.append(Table(f"{name.capitalize()} loop", columns, cells, words=0))
    counts = ", ".join(f"{number} {name}" for name, number in document["lists"].items())
    return Report(tables, [f"Lists of one client and of all clients at once: {counts}."])


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:,.2f}" if isinstance(value, float) else f"{value:,}"


if __name__ == "__main__":
    main()
