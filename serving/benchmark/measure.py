"""Measure: what is asked of a server, phase by phase, as plain values for a report."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from recsys.errors import RecsysError
from recsys.progress import say
from recsys.serving.benchmark.client import Client, Reply, Request
from recsys.serving.benchmark.load import OK, Load, Run
from recsys.serving.benchmark.process import Server, Usage
from recsys.serving.benchmark.workload import Workload

Row = dict[str, Any]
WARM_S = 2.0
BLOCK = 25
REST_S = 2.0


@dataclass(frozen=True)
class Options:
    """What to measure.

    Attributes:
        concurrencies: clients of each closed loop.
        rates: requests a second of each open loop.
        seconds: of each loop.
        k: items of a plain request.
        singles: requests of one client beside as many direct calls; 0 leaves them out.
        checks: mixed requests whose answers under load are compared with those alone; 0 for none.
        check_clients: clients that ask them.
        events: users whose events are sent meanwhile; 0 for none.
        seed: of the requests.
    """

    concurrencies: tuple[int, ...] = (1, 8, 32, 64)
    rates: tuple[float, ...] = ()
    seconds: float = 10.0
    k: int = 10
    singles: int = 200
    checks: int = 5000
    check_clients: int = 64
    events: int = 20
    seed: int = 0


class Bench:
    """One server under load."""

    def __init__(self, server: Server, bundle: Path, options: Options, key: str | None) -> None:
        """Measure `server`, which serves `bundle`."""
        self.server, self.bundle, self.options = server, bundle, options
        self.client = Client(server.host, server.port, key)
        self.workload = Workload(bundle, options.seed)

    async def first_answer(self) -> Row:
        """The first answer of a server just ready, against the median of those that follow."""
        requests = self.workload.plain(self.options.k)
        first = await Load(self.client).closed(islice(requests, 1), 1)
        rest = await Load(self.client).closed(islice(requests, 100), 1)
        if not first.latency_ms or not rest.latency_ms:
            raise RecsysError(f"the server answers {dict(first.statuses + rest.statuses)}")
        return {
            "first_ms": round(first.latency_ms[0], 2),
            "median_ms": _ms(rest, 50),
            "ready_s": round(self.server.start_s, 2),
        }

    async def warm_up(self) -> None:
        """Load nobody looks at: memory grows to its size, batches have been seen."""
        most = max(self.options.concurrencies, default=1)
        await Load(self.client).closed(self.workload.plain(self.options.k), most, seconds=WARM_S)

    async def single(self, settings: Sequence[str]) -> Row:
        """One client against direct calls, in turn by blocks, so that both share the weather."""
        served: list[float] = []
        direct: list[tuple[float, float]] = []
        cpu_s = 0.0
        requests = self.workload.plain(self.options.k)
        async with _direct(self.bundle, settings) as answer:
            for warm in (True, *(False,) * max(1, self.options.singles // BLOCK)):
                block = list(islice(requests, 2 * BLOCK))
                before = self.server.usage()
                run = await Load(self.client).closed(iter(block[:BLOCK]), 1)
                after = self.server.usage()
                times = [await answer(request.body) for request in block[BLOCK:]]
                if not warm:
                    served += run.latency_ms
                    direct += times
                    if before is not None and after is not None:
                        cpu_s += after.cpu_s - before.cpu_s
        ours, theirs = float(np.median(served)), np.median(direct, axis=0)
        return {
            "requests": len(served),
            "service_p50_ms": round(ours, 2),
            "direct_p50_ms": round(float(theirs[0]), 2),
            "bound_ms": round(1.2 * float(theirs[0]) + 3, 2),
            "service_cpu_ms": round(cpu_s * 1000 / len(served), 2),
            "direct_cpu_ms": round(float(theirs[1]), 2),
        }

    async def closed(self, clients: int) -> Row:
        """Throughput and latency of so many clients."""
        requests = self.workload.plain(self.options.k)
        return await self._row(
            {"clients": clients},
            Load(self.client).closed(requests, clients, seconds=self.options.seconds),
        )

    async def open(self, rate: float) -> Row:
        """Latency where requests come at a rate."""
        requests = self.workload.plain(self.options.k)
        return await self._row(
            {"asked_rate": round(rate, 1)},
            Load(self.client).open(
                requests, rate, seconds=self.options.seconds, seed=self.options.seed
            ),
        )

    async def equality(self) -> Row:
        """Answers under load against the same alone: items, scores, counts, certificates.

        Events of other users are sent in between, each user's in order, every tenth twice. In the
        end each user's history must hold each event once.
        """
        options = self.options
        requests = list(islice(self.workload.mixed(), options.checks))
        alone: dict[int, Any] = {}
        refused: dict[str, int] = {}
        for place, request in enumerate(requests):
            reply = await self.client.send(request)
            if reply.status in OK:
                alone[place] = _comparable(reply)
            else:
                code = reply.json().get("code", str(reply.status))
                refused[code] = refused.get(code, 0) + 1
        before = await self._at_rest()
        seen: dict[int, Any] = {}
        places = {id(request): place for place, request in enumerate(requests)}

        def watch(request: Request, reply: Reply) -> None:
            seen[places[id(request)]] = _comparable(reply)

        order = np.random.default_rng(options.seed).permutation(sorted(alone))
        load = Load(self.client, watch)
        writing = asyncio.create_task(_Writer(self).run(options.events))
        run = await load.closed(iter([requests[i] for i in order]), options.check_clients)
        writer = await writing
        after = await self._at_rest(before)
        wrong = [place for place in alone if place in seen and seen[place] != alone[place]]
        return {
            "requests": len(requests),
            "clients": options.check_clients,
            "refused_alone": refused,
            "compared": len(seen),
            "different": len(wrong),
            "first_different": _difference(alone[wrong[0]], seen[wrong[0]]) if wrong else None,
            "errors": run.errors,
            "rate": round(run.rate, 1),
            "p99_ms": _ms(run, 99),
            "events": writer,
            "before": None if before is None else asdict(before),
            "after": None if after is None else asdict(after),
        }

    async def _at_rest(self, before: Usage | None = None) -> Usage | None:
        """What the server holds without connections; waits until it is no more than `before`."""
        self.client.close()
        end = time.perf_counter() + REST_S
        while True:
            await asyncio.sleep(0.2)
            usage = self.server.usage()
            if usage is None or time.perf_counter() > end:
                return usage
            if before is not None and usage.open_files <= before.open_files:
                return usage

    async def _row(self, head: Row, running: Any) -> Row:
        before = self.server.usage()
        run: Run = await running
        after = self.server.usage()
        row = {
            **head,
            "answers": len(run.latency_ms),
            "rate": round(run.rate, 1),
            "p50_ms": _ms(run, 50),
            "p95_ms": _ms(run, 95),
            "p99_ms": _ms(run, 99),
            "errors": run.errors,
            "statuses": {str(k): v for k, v in sorted(run.statuses.items())},
            "generator_cpu": round(run.generator_cpu, 3),
            "server_cpu": None,
            "server_cpu_ms": None,
        }
        if before is not None and after is not None:
            cpu_s = after.cpu_s - before.cpu_s
            row["server_cpu"] = round(cpu_s / run.seconds, 3)
            row["server_cpu_ms"] = round(cpu_s * 1000 / max(1, len(run.latency_ms)), 2)
        return row


class _Writer:
    """Sends events of users that nobody else asks for, and looks whether they arrived."""

    def __init__(self, bench: Bench) -> None:
        self._client, self._workload = bench.client, bench.workload
        self._sent: dict[str, list[str]] = {}
        self._batches = self._accepted = self._duplicates = self._failed = 0

    async def run(self, users: int, batches: int = 10) -> Row | None:
        if not users:
            return None
        for user, events in islice(self._workload.events(users), users * batches):
            self._batches += 1
            await self._send(user, events)
            if self._batches % 10 == 0:
                await self._send(user, events, again=True)
        wrong = 0
        for user, items in self._sent.items():
            reply = await self._client.send(Request("GET", f"/v1/users/{user}/history?limit=1000"))
            if reply.status not in OK or _items(reply.json()) != items:
                wrong += 1
            await self._client.send(Request("DELETE", f"/v1/users/{user}"))
        return {
            "batches": self._batches,
            "accepted": self._accepted,
            "duplicates": self._duplicates,
            "failed": self._failed,
            "users": len(self._sent),
            "wrong_histories": wrong,
        }

    async def _send(self, user: str, events: list[Any], *, again: bool = False) -> None:
        reply = await self._client.send(Request.post("/v1/events", {"events": events}))
        if reply.status not in OK:
            self._failed += 1
            return
        told = reply.json()
        self._accepted += told["accepted"]
        self._duplicates += told["duplicates"]
        if not again:
            self._sent.setdefault(user, []).extend(event["item"] for event in events)


def _items(history: Any) -> list[str]:
    """Items of a history, oldest first."""
    events = history.get("events") or history.get("items") or []
    timed = all(isinstance(event, dict) for event in events)
    if not timed:
        return list(events)
    ordered = sorted(events, key=lambda event: event["timestamp"])
    return [event.get("item") or event["item_id"] for event in ordered]


@contextlib.asynccontextmanager
async def _direct(bundle: Path, settings: Sequence[str]) -> AsyncIterator[Any]:
    """A call that has a request's body answered by a recommender alone: wall and CPU ms."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "recsys.serving.benchmark.direct", str(bundle)),
        *(f"serve.{key}" for key in settings),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdin is not None  # noqa: S101 - both were asked for
    assert process.stdout is not None  # noqa: S101
    try:
        if (await process.stdout.readline()).strip() != b"ready":
            raise RecsysError("a recommender alone could not be loaded; see above")
        stdin, stdout = process.stdin, process.stdout

        async def answer(body: bytes) -> tuple[float, float]:
            stdin.write(body + b"\n")
            wall, cpu = (await stdout.readline()).split()
            return float(wall), float(cpu)

        yield answer
    finally:
        process.stdin.close()
        await process.wait()


def _comparable(reply: Reply) -> Any:
    """What of an answer must not depend on the load."""
    body = reply.json()
    return {
        key: body.get(key)
        for key in ("items", "history_items", "unknown_items", "eligible_items", "certificate")
    }


def _difference(alone: Any, under_load: Any) -> Any:
    for key in alone:
        if alone[key] != under_load[key]:
            return {"field": key, "alone": alone[key], "under_load": under_load[key]}
    return None


def _middle(firsts: Sequence[Row]) -> Row:
    """Of several starts, the one in the middle by how much slower the first answer was."""
    ordered = sorted(firsts, key=lambda row: row["first_ms"] / row["median_ms"])
    return {**ordered[len(ordered) // 2], "starts": len(ordered)}


def _ms(run: Run, q: float) -> float | None:
    found = run.percentile(q)
    return None if found is None else round(found, 2)


async def first_answer(server: Server, bundle: Path, options: Options) -> Row:
    """`Bench.first_answer` of one server, and nothing else of it."""
    bench = Bench(server, bundle, options, None)
    try:
        return await bench.first_answer()
    finally:
        bench.client.close()


async def measure(
    server: Server,
    bundle: Path,
    options: Options,
    settings: Sequence[str],
    key: str | None = None,
    firsts: Sequence[Row] = (),
) -> Row:
    """All phases on one server.

    Args:
        server: that is asked.
        bundle: that it serves.
        options: what to measure.
        settings: of the server, for the direct calls.
        key: API key.
        firsts: `first_answer` of servers that were started before.

    Returns:
        `first`, `single`, `closed`, `open`, `equality` and `verdicts`; a phase that was left out is
        None or empty.
    """
    bench = Bench(server, bundle, options, key)
    found: Row = {"options": asdict(options), "first": None, "single": None, "equality": None}
    try:
        if server.process is not None:
            found["first"] = _middle([*firsts, await bench.first_answer()])
        await bench.warm_up()
        if options.singles and server.process is not None:
            say("one client against direct calls ...")
            found["single"] = await bench.single(settings)
        found["closed"] = []
        for clients in options.concurrencies:
            say(f"{clients} clients ...")
            found["closed"].append(await bench.closed(clients))
        peak = max((row["rate"] for row in found["closed"]), default=0.0)
        found["open"] = []
        for rate in (*options.rates, *((0.7 * peak,) if peak else ())):
            say(f"{rate:.0f} requests a second ...")
            found["open"].append(await bench.open(rate))
        if options.checks:
            say(f"{options.checks} answers under load against the same alone ...")
            found["equality"] = await bench.equality()
    finally:
        bench.client.close()
    found["verdicts"] = list(verdicts(found))
    return found


def verdicts(found: Row) -> Iterator[Row]:
    """What was found, against the bounds that the service is held to."""

    def verdict(name: str, figure: float, bound: float, *, at_least: bool = False) -> Row:
        met = figure >= bound if at_least else figure <= bound
        return {"name": name, "figure": round(figure, 3), "bound": round(bound, 3), "met": met}

    if found["first"]:
        first = found["first"]
        yield verdict("first answer / median", first["first_ms"] / first["median_ms"], 2)
    if found["single"]:
        single = found["single"]
        yield verdict(
            "one client's p50, ms (1.2 × direct + 3)", single["service_p50_ms"], single["bound_ms"]
        )
    rates = {row["clients"]: row["rate"] for row in found["closed"]}
    if rates.get(1) and 32 in rates:
        yield verdict("throughput, 32 clients / one", rates[32] / rates[1], 4, at_least=True)
    if found["open"] and found["open"][-1]["p50_ms"]:
        row = found["open"][-1]
        yield verdict("p99 / p50 at 70 % of the peak", row["p99_ms"] / row["p50_ms"], 4)
    loops = [*found["closed"], *found["open"]]
    yield verdict("errors in all loops", sum(row["errors"] for row in loops), 0)
    if found["equality"]:
        equality = found["equality"]
        yield verdict("answers that load changed", equality["different"], 0)
        alone = equality["requests"] - sum(equality["refused_alone"].values())
        yield verdict("mixed requests without an answer", alone - equality["compared"], 0)
        if events := equality["events"]:
            lost = events["wrong_histories"] + events["failed"]
            yield verdict("users with a lost or doubled event", lost, 0)
        if equality["before"] and equality["after"]:
            left = equality["after"]["open_files"] - equality["before"]["open_files"]
            # the store opens one for each thread that first comes to it
            left -= max(0, equality["after"]["threads"] - equality["before"]["threads"])
            yield verdict("open files that the load left behind", left, 0)
