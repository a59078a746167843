"""The service on a GPU: answers a second, and whether answers under load are those to one client.

    python benchmarks/gpu_service.py var/bundles/demo --out service.jsonl

Starts `recsys serve` on a free port with a store of its own, on the GPU if there is one, with
captured decodes. Requests with random histories are sent by one client, then in another order by
`--clients` at once. Answers may differ by rounding, because batches of other sizes run by other
kernels: a list counts as `tied` if it is the same but for items whose scores are within `TIE`, and
as `different` otherwise. Each row is written to `--out` at once, as a line of JSON.
"""

from __future__ import annotations

import argparse
import json
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from http.client import HTTPConnection
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch

from recsys.bundle import CATALOG
from recsys.catalog import Catalog
from recsys.testing import same_ranking

Answer = list[tuple[tuple[int, ...], float]]
TIE = 1e-3  # of scores in float32, whose lists are ranked by up to two more models
ADDRESS = re.compile(r"answers at http://\[?([^\]\s]+?)\]?:(\d+), try")
LONGEST, K = 20, 10


@contextmanager
def served(bundle: Path, device: str) -> Iterator[tuple[str, int]]:
    """Host and port of a service, once it is ready; it ends with the block."""
    with tempfile.TemporaryDirectory(prefix="recsys-gpu-") as folder:
        log = Path(folder, "log")
        own = {"store": Path(folder, "store.db"), "histories": "null", "keys": "null"}
        settings = {**own, "device": device, "rate_limit": "null"}
        if device == "cuda":
            settings["capture"] = "decodes"
        command = [sys.executable, "-m", "recsys", "serve", "--bundle", str(bundle), "--port", "0"]
        for name, value in settings.items():
            command += ["--set", f"serve.{name}={value}"]
        with log.open("wb") as out:
            process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=out)
        try:
            while (found := ADDRESS.search(" ".join(log.read_text().split()))) is None:
                if process.poll() is not None:
                    raise RuntimeError(f"the service ended: {log.read_text()[-1500:]}")
                time.sleep(0.05)
            yield found[1], int(found[2])
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


class Clients:
    """A number of clients that send requests at once, each over a connection of its own."""

    def __init__(self, address: tuple[str, int], count: int) -> None:
        """Connect to a service when requests are sent."""
        self._address, self._count = address, count
        self._own, self._all = threading.local(), ExitStack()

    def send(self, bodies: Sequence[bytes]) -> tuple[list[Answer], dict[str, Any]]:
        """All answers, in the order of the requests, and the row of the load.

        Raises:
            RuntimeError: a request was refused.
        """
        start = time.perf_counter()
        with self._all, ThreadPoolExecutor(self._count) as pool:
            found = list(pool.map(self._post, bodies))
        seconds = time.perf_counter() - start
        p50, p99 = np.percentile([1e3 * taken for taken, _ in found], [50, 99])
        row = {
            "kind": "load",
            "clients": self._count,
            "requests": len(bodies),
            "per_second": round(len(bodies) / seconds, 1),
            "p50_ms": round(float(p50), 2),
            "p99_ms": round(float(p99), 2),
        }
        return [answer for _, answer in found], row

    def _post(self, body: bytes) -> tuple[float, Answer]:
        if not hasattr(self._own, "connection"):
            self._own.connection = HTTPConnection(*self._address, timeout=60)
            self._all.callback(self._own.connection.close)
        start = time.perf_counter()
        headers = {"Content-Type": "application/json"}
        self._own.connection.request("POST", "/v1/recommendations", body, headers)
        reply = self._own.connection.getresponse()
        text = reply.read()
        taken = time.perf_counter() - start
        if reply.status != 200:
            raise RuntimeError(f"{reply.status}: {text[:300]!r}")
        items = json.loads(text)["items"]
        return taken, [((item["item_id"],), item["score"]) for item in items]


def compare(alone: Sequence[Answer], together: Sequence[Answer]) -> dict[str, Any]:
    """How many answers are the same to the bit, tied or different; the largest gap of a score."""
    counts, gap = {"same": 0, "tied": 0, "different": 0}, 0.0
    for mine, theirs in zip(together, alone, strict=True):
        scores = dict(theirs)
        gap = max([gap, *(abs(score - scores[item]) for item, score in mine if item in scores)])
        tied = same_ranking(mine, theirs, tolerance=TIE, tie=TIE)
        counts["same" if mine == theirs else "tied" if tied else "different"] += 1
    return {"kind": "equality", **counts, "largest_gap": float(f"{gap:.3g}")}


def draw_requests(bundle: Path, count: int) -> list[bytes]:
    """Requests with random histories."""
    items, rng = Catalog.load(bundle / CATALOG).item_ids, np.random.default_rng(0)
    ends = rng.integers(1, LONGEST + 1, count).cumsum()
    drawn = rng.integers(0, len(items), ends[-1])
    return [
        json.dumps({"history": [items[i] for i in drawn[a:b]], "k": K}).encode()
        for a, b in pairwise([0, *ends.tolist()])
    ]


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--out", type=Path, required=True, help="rows are added to this file")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    bodies = draw_requests(args.bundle, args.requests)
    order = np.random.default_rng(1).permutation(len(bodies)).tolist()
    with args.out.open("a", encoding="utf-8") as out:

        def add(row: dict[str, Any]) -> None:
            print(json.dumps(row), file=out, flush=True)
            print(json.dumps(row), flush=True)

        start = time.perf_counter()
        with served(args.bundle, device) as address:
            add(
                {
                    "kind": "ready",
                    "device": device,
                    "seconds": round(time.perf_counter() - start, 1),
                }
            )
            Clients(address, 1).send(bodies[:20])
            alone, row = Clients(address, 1).send(bodies)
            add(row)
            mixed, row = Clients(address, args.clients).send([bodies[i] for i in order])
            add(row)
            together = dict(zip(order, mixed, strict=True))
            add(compare(alone, [together[i] for i in range(len(bodies))]))


if __name__ == "__main__":
    main()
