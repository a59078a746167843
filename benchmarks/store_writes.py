"""How many events a second does a store acknowledge, and how long does one wait for it?

    python benchmarks/store_writes.py
    python benchmarks/store_writes.py --store postgresql://localhost/scratch

Each writer sends its next batch when the last one is acknowledged. Without `--store`, a SQLite file
in the current folder is used, because a temporary folder may lie in memory; it is deleted.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
import uuid
from itertools import count
from pathlib import Path

from recsys.serving.stores import Event, Store, open_store
from recsys.serving.stores.records import content_digest

LOADS = ((1, 1), (32, 1), (1, 100), (32, 100))


async def load(store: Store, writers: int, batch: int, seconds: float) -> dict[str, float]:
    """Figures of so many writers with batches of this size."""
    run = uuid.uuid4().hex
    waits: list[float] = []
    stop = time.perf_counter() + seconds

    async def writer(number: int) -> None:
        for n in count():
            names = [f"{run}-{number}-{n}-{i}" for i in range(batch)]
            events = [
                Event(name, f"u{number}", "item", "view", n, digest=content_digest(name))
                for name in names
            ]
            start = time.perf_counter()
            await store.append(events)
            waits.append(time.perf_counter() - start)
            if start > stop:
                return

    start = time.perf_counter()
    await asyncio.gather(*(writer(number) for number in range(writers)))
    wall = time.perf_counter() - start
    p99 = statistics.quantiles(waits, n=100)[98]
    return {
        "writers": writers,
        "batch": batch,
        "events_per_s": round(len(waits) * batch / wall),
        "p50_ms": round(statistics.median(waits) * 1000, 2),
        "p99_ms": round(p99 * 1000, 2),
    }


async def main() -> None:
    """Measure and print: a table, and the same as one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--store", help="path or URL")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder:
        store = open_store(options.store or str(Path(folder) / "writes.db"))
        try:
            rows = [await load(store, *sizes, options.seconds) for sizes in LOADS]
        finally:
            store.close()
    print("writers  batch  events/s  p50 ms  p99 ms")
    for row in rows:
        print(
            f"{row['writers']:7}  {row['batch']:5}  {row['events_per_s']:8}  {row['p50_ms']:6}"
            f"  {row['p99_ms']:6}"
        )
    print(json.dumps(rows))


if __name__ == "__main__":
    asyncio.run(main())
