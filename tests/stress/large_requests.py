"""What ordinary requests wait for while another client sends large ones, in one run.

    OMP_NUM_THREADS=1 python tests/stress/large_requests.py var/bundles/beauty

A server with one thread is started on the bundle. One client asks for ten items, with pauses; the
other asks for a large list again and again, of a kind that each row names. Printed are percentiles
of the time that the first client waits, in milliseconds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import threading
import time
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import numpy as np
from harness import environment
from rich.console import Console
from rich.table import Table
from servers import Server, start_server

from recsys.recommender import Recommender

LARGE: dict[str, dict[str, Any]] = {
    "nobody": {},
    "200 items": {"k": 200},
    "200 items, with a trace": {"k": 200, "include": ["trace"]},
    "200 items, global": {"k": 200, "guarantee": "global"},
    "100 items, global, with a boost": {
        "k": 100,
        "guarantee": "global",
        "boosts": [{"filter": {"must": [{"key": "title", "exists": True}]}, "weight": 0.1}],
    },
}
PAUSE_S, SETTLE_S = 0.03, 0.5


class Client:
    """One connection, from an address of its own, so that it counts as another client."""

    def __init__(self, server: Server, address: str) -> None:
        """Connect."""
        self._connection = HTTPConnection(server.host, server.port, 60, (address, 0))

    def ask(self, body: dict[str, Any]) -> float:
        """Ask for recommendations; the seconds until the answer."""
        start = time.perf_counter()
        headers = {"Content-Type": "application/json"}
        self._connection.request("POST", "/v1/recommendations", json.dumps(body), headers)
        answer = self._connection.getresponse()
        answer.read()
        if answer.status != 200:
            raise RuntimeError(f"status {answer.status} for {body}")
        return time.perf_counter() - start


def measure(server: Server, items: list[str], more: dict[str, Any], seconds: float) -> list[float]:
    """Milliseconds that each ordinary request took beside large ones, which have `more` fields."""
    rng, ended = random.Random(0), threading.Event()
    victim = Client(server, "127.0.0.2")

    def attack() -> None:
        client = Client(server, "127.0.0.3")
        while not ended.is_set():
            client.ask({"history": items[:50], **more})

    attacker = threading.Thread(target=attack)
    if more:
        attacker.start()
    time.sleep(SETTLE_S)
    took, end = [], time.monotonic() + seconds
    while time.monotonic() < end:
        history = rng.sample(items, rng.randint(5, 30))
        took.append(1000 * victim.ask({"history": history, "k": 10}))
        time.sleep(rng.expovariate(1 / PAUSE_S))
    ended.set()
    if more:
        attacker.join()
    return took


async def run(bundle: Path, seconds: float) -> None:
    """Print a table."""
    items = Recommender.load(bundle).catalog.item_ids[:1000]
    table = Table("the other client asks for", "p50", "p90", "p99", "requests")
    async with start_server(bundle, ["threads=1"]) as server:
        await asyncio.to_thread(measure, server, items, {}, 2.0)  # warm up
        for name, more in LARGE.items():
            took = await asyncio.to_thread(measure, server, items, more, seconds)
            percentiles = (f"{value:.1f}" for value in np.percentile(took, (50, 90, 99)))
            table.add_row(name, *percentiles, str(len(took)))
    Console(width=100).print(table)
    print(json.dumps(environment()))


def main() -> None:
    """Read the arguments."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--seconds", type=float, default=8.0, help="of each row")
    options = parser.parse_args()
    asyncio.run(run(options.bundle, options.seconds))


if __name__ == "__main__":
    main()
