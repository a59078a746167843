"""Soak: the same load for a long time, and what the process holds meanwhile."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import numpy as np

from recsys.errors import ConfigError
from recsys.progress import say
from recsys.serving.benchmark.client import Client
from recsys.serving.benchmark.load import Load
from recsys.serving.benchmark.process import Server
from recsys.serving.benchmark.workload import Workload

WARM_SHARE = 0.2
FLAT = 0.03
SAMPLES = 120


async def soak(
    server: Server, bundle: Path, *, minutes: float, clients: int, rate: float | None, seed: int
) -> dict[str, Any]:
    """Mixed requests for so many minutes, memory looked at throughout.

    Memory is flat where the line fitted to it after the warm-up (the first fifth) changes by at
    most 3 % of its mean from end to end.

    Args:
        server: one that we started.
        bundle: that it serves.
        minutes: of the load.
        clients: of a closed loop.
        rate: of an open loop instead, requests a second.
        seed: of the requests.

    Raises:
        ConfigError: the process is not ours to look into.
    """
    if server.usage() is None:
        raise ConfigError("--soak looks into the server's process; leave --url out")
    client, workload = Client(server.host, server.port), Workload(bundle, seed)
    start, samples = time.perf_counter(), []
    seconds = minutes * 60

    async def look() -> None:
        while (elapsed := time.perf_counter() - start) < seconds:
            usage = server.usage()
            if usage is not None:
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

    load, looking = Load(client), asyncio.create_task(look())
    if rate is None:
        run = await load.closed(workload.mixed(), clients, seconds=seconds)
    else:
        run = await load.open(workload.mixed(), rate, seconds=seconds, seed=seed)
    await looking
    client.close()
    return {
        "minutes": minutes,
        "clients": None if rate is not None else clients,
        "rate": round(run.rate, 1),
        "answers": len(run.latency_ms),
        "errors": run.errors,
        "statuses": {str(k): v for k, v in sorted(run.statuses.items())},
        "p50_ms": run.percentile(50),
        "p99_ms": run.percentile(99),
        "generator_cpu": round(run.generator_cpu, 3),
        **drift(samples),
        "samples": samples,
    }


def drift(samples: list[dict[str, Any]]) -> dict[str, Any]:
    """How memory, files and threads changed after the warm-up.

    Returns:
        `rss_mb` (mean), `rss_change` (share of the mean, by a fitted line), `flat`, and first and
        last counts of open files and threads.
    """
    kept = samples[int(len(samples) * WARM_SHARE) :]
    if len(kept) < 3:
        raise ConfigError("--soak is too short: fewer than three samples after the warm-up")
    times = np.array([sample["s"] for sample in kept])
    rss = np.array([sample["rss_mb"] for sample in kept])
    slope = np.polyfit(times, rss, 1)[0]
    change = float(slope * (times[-1] - times[0]) / rss.mean())
    return {
        "rss_mb": round(float(rss.mean()), 1),
        "rss_change": round(change, 4),
        "flat": bool(abs(change) <= FLAT),
        "open_files": [kept[0]["open_files"], kept[-1]["open_files"]],
        "threads": [kept[0]["threads"], kept[-1]["threads"]],
    }
