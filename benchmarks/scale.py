"""How the road from events to a service grows with the catalogue.

    OMP_NUM_THREADS=2 python benchmarks/scale.py --items 10000 100000 --home var/scale

Each size is an invented shop: items in groups of about 100, each of which three others of its group
follow, and customers who like three groups. `recsys run` walks the road (`run.log` has its quality)
and a service answers one client and 32, and takes 1,000 new items. Exponents are slopes on
logarithmic scales: 1 is linear. Stages that train use their share of the budget; their tokens a
second say how the work grows. Sizes measured in the same folder are not measured again. Needs the
`dev` extra.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import serve
from load_client import OK, Client
from measuring import Row
from pyarrow import csv
from reporting import Report, Table, begin, publish, read_options
from servers import start_server

from recsys.errors import RecsysError

STAGE = re.compile(r"(\w+) → .*\((\S+) s\)\n")
MIB = 2**20
EVENTS = 12  # of each item, on average
NEW_ITEMS = 1000
DAY, FIRST_DAY = 86400, 1_735_689_600  # in seconds


@dataclass(frozen=True)
class Options:
    """Sizes of the catalogue, the budget of a run, and the duration of a load of the service."""

    items: list[int] = field(default_factory=lambda: [10_000, 100_000])
    minutes: float = 20.0
    home: Path = Path("var/scale")
    seconds: float = 10.0


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print tables and one JSON line."""
    quick = {"items": [300, 600], "minutes": 0.5, "seconds": 0.5}
    options, run = read_options(Options, __doc__, quick, argv)
    sizes = [measure(items, options) for items in sorted(options.items)]
    publish(begin("scale", options, run) | {"sizes": sizes}, report(sizes), run.out)


def measure(items: int, options: Options) -> Row:
    """The figures of one size by name."""
    home = options.home / str(items)
    bundle = home / "bundles" / "shop"
    row: Row = {"items": items, "events": _once(home / "shop.json", lambda: make_shop(items, home))}
    row |= _once(home / "road.json", lambda: walk(home, options.minutes))
    row["bundle MiB"] = sum(f.stat().st_size for f in bundle.rglob("*") if f.is_file()) / MIB
    return row | _once(home / "service.json", lambda: asyncio.run(load(bundle, options.seconds)))


def _once(file: Path, make: Callable[[], Any]) -> Any:
    """What is made, or what was stored when it was made."""
    if not file.is_file():
        made = make()
        file.write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")
    return json.loads(file.read_text(encoding="utf-8"))


def make_shop(items: int, folder: Path) -> int:
    """Write `events.csv` and `products.csv` of an invented shop; return the number of events."""
    rng = np.random.default_rng(0)
    groups, customers = max(10, items // 100), items * 4 // 5
    group = np.sort(rng.integers(0, groups, items))
    first, size = np.searchsorted(group, np.arange(groups)), np.bincount(group, minlength=groups)
    next_ones = first[group, None] + (rng.random((items, 3)) * size[group, None]).astype(int)
    weight = 1 / (1 + rng.permutation(items)) ** 0.7
    lengths = 3 + rng.poisson(EVENTS * items / customers - 3, customers)
    customer, begins = np.repeat(np.arange(customers), lengths), np.cumsum(lengths) - lengths
    total, kind = len(customer), rng.random(len(customer))
    liked = rng.integers(0, groups, (customers, 3))[customer, rng.integers(0, 3, total)]
    of_liked = first[liked] + (rng.random(total) ** 2 * size[liked]).astype(int)
    chosen = rng.choice(items, total, p=weight / weight.sum())
    chosen = np.where((kind < 0.35) & (size[liked] > 0), of_liked, chosen)
    for position in range(1, int(lengths.max())):
        at = begins[lengths > position] + position
        at = at[kind[at] > 0.5]
        chosen[at] = next_ones[chosen[at - 1], rng.integers(0, 3, len(at))]
    passed = np.cumsum(rng.exponential(2 * DAY, total))
    start = FIRST_DAY + rng.integers(0, 300 * DAY, customers) - passed[begins]
    times = pa.array((start[customer] + passed).astype("datetime64[s]"))
    name = rng.permutation(items)
    folder.mkdir(parents=True, exist_ok=True)
    table = pa.table({"customer": customer, "sku": name[chosen], "time": times})
    csv.write_csv(table, folder / "events.csv")
    kinds = rng.integers(0, 50, (items, 2))
    titles = [f"style{a} make{b} thing{g}" for (a, b), g in zip(kinds, group, strict=True)]
    products = pa.table({"sku": name, "title": titles, "category": [f"group {g}" for g in group]})
    csv.write_csv(products, folder / "products.csv")
    return total


def walk(home: Path, minutes: float) -> Row:
    """Run the road: seconds and peak memory of each stage, and the speed of training."""
    files = str(home / "events.csv"), "--items", str(home / "products.csv")
    command = [sys.executable, "-m", "recsys", "run", *files, "--name", "shop"]
    process = subprocess.Popen(
        [*command, "--minutes", str(minutes)], env={**os.environ, "RECSYS_HOME": str(home)},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    row, begun, used = Row(), time.monotonic(), 0.0
    with process.stdout or sys.stdin as output, (home / "run.log").open("w", 1, "utf-8") as log:
        for line in output:
            log.write(f"{time.monotonic() - begun:7.1f} {line}")
            if stage := STAGE.match(line):
                times = psutil.Process(process.pid).cpu_times()
                row[f"{stage[1]} s"] = float(stage[2])
                row[f"{stage[1]} CPU s"] = times.user + times.system - used
                row[f"{stage[1]} peak MiB"] = _peak(process.pid)
                used = times.user + times.system
    if process.wait():
        raise RecsysError(f"the run failed; see {home / 'run.log'}")
    row |= {"whole road s": time.monotonic() - begun, "whole road CPU s": used}
    row["whole road peak MiB"] = max(row[name] for name in row if name.endswith("MiB"))
    for name in ("sasrec", "target"):
        *_, last = (home / "runs" / "shop" / name / "log.jsonl").open(encoding="utf-8")
        trained = json.loads(last)
        row[f"{name} tokens/s"] = trained["tokens"] / trained["seconds"]
    return row


def _peak(pid: int) -> float:
    """Most memory of a process since the last call, in MiB; Linux begins anew for the "5"."""
    status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    Path(f"/proc/{pid}/clear_refs").write_text("5", encoding="utf-8")
    peak = next(line for line in status.splitlines() if line.startswith("VmHWM"))
    return int(peak.split()[1]) / 1024


async def load(bundle: Path, seconds: float) -> Row:
    """Start of a service, latency for one and for 32 clients, an upsert, and memory."""
    begun, row = time.monotonic(), Row()
    start = start_server(bundle, ("deadline_ms=60000",))
    async with start as server, Client(server, "/v1/items") as client:
        row["start of the service s"] = time.monotonic() - begun
        loads = await serve.measure(server, serve.Options(bundle, None, [], [1, 32], seconds))
        for run in loads["closed"]:
            for figure in ("p50_ms", "p99_ms", "rate", "server_cpu_ms"):
                row[f"{run['clients']} clients {serve.COLUMNS[figure]}"] = run[figure]
        row["service MiB"] = float(loads["closed"][-1]["server_mb"])
        news = [{"item_id": f"new {i}", "title": f"oak thing {i % 90}"} for i in range(NEW_ITEMS)]
        reply = await client.send(json.dumps({"items": news}).encode())
        if reply.status not in OK:
            raise RecsysError(f"the upsert is answered {reply.status}: {reply.body[:300]!r}")
        row[f"upsert of {NEW_ITEMS:,} items s"] = reply.latency_ms / 1000
    return row


def report(sizes: Sequence[Row]) -> Report:
    """Figures by size, without those that are 0, and their exponents."""
    pairs = list(pairwise(sizes))
    rows = [
        [name, *(f"{size[name]:,.4g}" for size in sizes), *(_slope(name, *p) for p in pairs)]
        for name in sizes[-1]
        if name != "items" and all(size[name] for size in sizes)
    ]
    columns = ["", *(f"{size['items']:,} items" for size in sizes)]
    slopes = [f"exponent to {size['items']:,}" for size in sizes[1:]]
    return Report([Table("The road and the service", [*columns, *slopes], rows)])


def _slope(name: str, small: Row, large: Row) -> str:
    growth = [math.log(large[key] / small[key]) for key in (name, "items")]
    return f"{growth[0] / growth[1]:.2f}"


if __name__ == "__main__":
    main()
