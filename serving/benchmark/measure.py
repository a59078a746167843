"""The phases of `recsys benchmark serve`: loops, equality under load, and the soak."""

import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from recsys.errors import ConfigError, RecsysError
from recsys.progress import say
from recsys.serving.benchmark.client import OK, Client, Reply, Request, Run
from recsys.serving.benchmark.process import Server
from recsys.serving.benchmark.workload import Workload

Row = dict[str, Any]
WARM_S = 2.0  # of load before anything is measured
CHECK_LOOPS = 3  # how long requests are sent alone, in durations of a loop
SOAK_CLIENTS, SAMPLES = 8, 120
WARM_SHARE, FLAT = 0.2, 0.03  # of a soak: its warm-up, and the change of memory that counts as flat
# Fields of an answer that must not depend on the load.
COMPARED = ("items", "history_items", "unknown_items", "eligible_items", "certificate")


@dataclass(frozen=True)
class Options:
    """What to measure.

    Attributes:
        concurrencies: clients of each closed loop.
        rates: requests a second of each open loop; 70 % of the peak is added.
        seconds: duration of each loop.
        checks: mixed requests whose answers under load are compared with those alone; 0 for none.
            Fewer if they take longer alone than `CHECK_LOOPS` loops.
    """

    concurrencies: tuple[int, ...] = (1, 8, 32, 64)
    rates: tuple[float, ...] = ()
    seconds: float = 10.0
    k: int = 10
    checks: int = 5000
    seed: int = 0


async def measure(server: Server, bundle: Path, options: Options, key: str | None = None) -> Row:
    """All phases but the soak.

    Returns:
        `closed` and `open`, a row for each loop, and `equality`, or None where it was left out.

    Raises:
        RecsysError: the server does not answer a plain request.
    """
    workload = Workload(bundle, options.seed)
    found: Row = {"options": asdict(options), "closed": [], "open": [], "equality": None}
    async with Client([server], key) as client:
        first = await client.send(next(workload.plain(options.k)))
        if first.status not in OK:
            raise RecsysError(f"{server.url} answers {first.status}: {first.body[:300]!r}")
        most = max(options.concurrencies, default=1)
        await client.closed(workload.plain(options.k), most, seconds=WARM_S)
        for clients in options.concurrencies:
            say(f"{clients} clients ...")
            requests = workload.plain(options.k)
            run = await client.closed(requests, clients, seconds=options.seconds)
            found["closed"].append({"clients": clients, **_describe(run)})
        peak = max((row["rate"] for row in found["closed"]), default=0.0)
        for rate in (*options.rates, *((0.7 * peak,) if peak else ())):
            say(f"{rate:.0f} requests a second ...")
            due = draw_arrivals(rate, options.seconds, options.seed)
            run = await client.open(workload.plain(options.k), due)
            found["open"].append({"sent_rate": round(rate, 1), **_describe(run)})
        if options.checks:
            say(f"{options.checks} answers under load and alone ...")
            found["equality"] = await compare(client, workload, options)
    return found


def draw_arrivals(rate: float, seconds: float, seed: int) -> list[float]:
    """Times at which requests are due: a Poisson process of `rate` a second."""
    count = int(2 * rate * seconds) + 100
    times = np.random.default_rng(seed).exponential(1 / rate, count).cumsum()
    found: list[float] = times[times < seconds].tolist()
    return found


def _describe(run: Run) -> Row:
    answers = max(1, len(run.latency_ms))
    return {
        "answers": len(run.latency_ms),
        "rate": round(run.rate, 1),
        "p50_ms": run.percentile(50),
        "p95_ms": run.percentile(95),
        "p99_ms": run.percentile(99),
        "errors": run.errors,
        "statuses": {str(status): n for status, n in sorted(run.statuses.items())},
        "generator_cpu": round(run.generator_s / run.seconds, 3),
        "server_cpu": round(run.server_s / run.seconds, 3),
        "server_cpu_ms": round(run.server_s * 1000 / answers, 2),
    }


async def compare(client: Client, workload: Workload, options: Options) -> Row:
    """Send mixed requests one by one, then again under load, and compare the answers."""
    requests: list[Request] = []
    alone: dict[int, Row] = {}
    refused: Counter[str] = Counter()
    end = time.perf_counter() + CHECK_LOOPS * options.seconds
    for request in islice(workload.mixed(), options.checks):
        if time.perf_counter() > end:
            break
        requests.append(request)
        reply = await client.send(request)
        if reply.status in OK:
            alone[id(request)] = _comparable(reply)
        else:
            refused[str(reply.status)] += 1
    good = [request for request in requests if id(request) in alone]
    order = np.random.default_rng(options.seed).permutation(len(good))
    clients = max(options.concurrencies, default=1)
    run = await client.closed(iter([good[i] for i in order]), clients, keep=True)
    replies = [reply for reply in run.replies if reply.status in OK]
    pairs = [(alone[id(reply.request)], _comparable(reply)) for reply in replies]
    different = [pair for pair in pairs if pair[0] != pair[1]]
    return {
        "requests": len(requests),
        "clients": clients,
        "refused_alone": dict(refused),
        "compared": len(pairs),
        "different": len(different),
        "first_different": _difference(*different[0]) if different else None,
        "errors": run.errors,
        "rate": round(run.rate, 1),
        "p99_ms": run.percentile(99),
    }


def _comparable(reply: Reply) -> Row:
    body = reply.json()
    return {name: body.get(name) for name in COMPARED}


def _difference(alone: Row, under_load: Row) -> Row:
    name = next(name for name in COMPARED if alone[name] != under_load[name])
    return {"field": name, "alone": alone[name], "under_load": under_load[name]}


async def soak(server: Server, bundle: Path, *, minutes: float, seed: int) -> Row:
    """Send mixed requests for so many minutes and sample the server's memory.

    Raises:
        ConfigError: the server is not our process, or the soak is too short.
    """
    if server.usage() is None:
        raise ConfigError("--soak observes the server's process; leave --url out")
    start, seconds, samples = time.perf_counter(), minutes * 60, []

    async def sample() -> None:
        while (usage := server.usage()) is not None:
            elapsed = time.perf_counter() - start
            samples.append(
                {
                    "s": round(elapsed, 1),
                    "rss_mb": round(usage.rss_bytes / 2**20, 2),
                    "open_files": usage.open_files,
                    "threads": usage.threads,
                }
            )
            if len(samples) % 12 == 1:
                say(f"{elapsed / 60:.1f} min: {samples[-1]['rss_mb']:.0f} MB")
            await asyncio.sleep(max(0.5, seconds / SAMPLES))

    sampling = asyncio.create_task(sample())
    async with Client([server]) as client:
        requests = Workload(bundle, seed).mixed()
        run = await client.closed(requests, SOAK_CLIENTS, seconds=seconds)
    sampling.cancel()
    with suppress(asyncio.CancelledError):
        await sampling
    return {
        "minutes": minutes,
        "clients": SOAK_CLIENTS,
        **_describe(run),
        **fit_drift(samples),
        "samples": samples,
    }


def fit_drift(samples: Sequence[Row]) -> Row:
    """How memory, files and threads changed after the warm-up.

    Returns:
        `rss_mb` (mean), `rss_change` (of a fitted line from end to end, as a share of the mean),
        `flat`, and the first and last counts of `open_files` and `threads`.

    Raises:
        ConfigError: fewer than three samples.
    """
    kept = samples[int(len(samples) * WARM_SHARE) :]
    if len(kept) < 3:
        raise ConfigError("--soak is too short: fewer than three samples after the warm-up")
    times, rss = (np.array([sample[name] for sample in kept]) for name in ("s", "rss_mb"))
    change = float(np.polyfit(times, rss, 1)[0] * (times[-1] - times[0]) / rss.mean())
    return {
        "rss_mb": round(float(rss.mean()), 1),
        "rss_change": round(change, 4),
        "flat": bool(abs(change) <= FLAT),
        "open_files": [kept[0]["open_files"], kept[-1]["open_files"]],
        "threads": [kept[0]["threads"], kept[-1]["threads"]],
    }
