"""Load for half an hour with a fault every minute: is an event lost, or an answer wrong?

    OMP_NUM_THREADS=1 python tests/stress/soak.py --minutes 30
    OMP_NUM_THREADS=1 python tests/stress/soak.py --minutes 30 --store sqlite

A server is started on one of two small bundles with the same items and different random weights,
with a store on a small tmpfs. Recommendations by user and by history, filters among them, and
events arrive at random times, at 70 % of the rate that a closed loop of 32 clients reaches before.
Users come and go, so that histories have the same lengths at any time. A fault is injected at the
start of each minute, in rotation:

- store locked: another connection holds a lock for writing (PostgreSQL: for any use);
- database killed: all processes of PostgreSQL by SIGKILL, and started again after 5 s;
- disk full: the file system of the store has no byte left (where no tmpfs may be mounted, with
  SQLite: the server may not write to files, by RLIMIT_FSIZE);
- alias swap: the alias `champion` gets the other bundle;
- upserts: items are added, replaced and removed without a pause.

Whatever is not acknowledged is sent again until it is. When the service has stopped, each answer is
compared, bit for bit, with that of the library alone: the same bundle, history and items. If an
event or a change was under way during the request, the answer may be that of before or of after.
The store must have every acknowledged event, once and in order. Errors may be 429, 503 and 504
only, with `Retry-After`. Memory is the median of the last ten seconds of a minute; its verdict
compares the last minute with the one after each fault came once. The last line is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import torch
from harness import environment, write_bundle
from servers import start_server
from soak_faults import BUNDLES, Fault, Place, faults, placed, start_again
from soak_load import ALLOWED, FIRST, LAST, Load, Minute, User
from soak_oracle import replay

from recsys.serving.stores import open_store

SHARE, PEAK_S = 0.7, 10.0


async def soak(options: argparse.Namespace, place: Place, folder: Path) -> dict[str, Any]:
    """Run it; the verdicts."""
    own = [f"store={place.store}", "threads=1"]
    minutes: list[dict[str, Any]] = []
    kinds = faults(place)
    limits = aiohttp.TCPConnector(limit=0, keepalive_timeout=3)
    timeout = aiohttp.ClientTimeout(total=60)
    journal = folder / "journal"
    async with (
        start_server(folder / BUNDLES[0], own) as server,
        aiohttp.ClientSession(connector=limits, timeout=timeout) as session,
    ):
        with journal.open("wb") as file:
            load = Load(server, session, file)
            seeds = [load.some_items(load.rng.randint(FIRST, LAST)) for _ in load.users]
            await asyncio.gather(*map(load.record, load.users, seeds))
            await load.peak(PEAK_S / 2)  # warm up
            peak = await load.peak(PEAK_S)
            rate = SHARE * peak
            print(f"peak {peak:.0f}/s, load {rate:.0f}/s, {place}", flush=True)
            count = round(60 * options.minutes / options.every)
            loading = asyncio.create_task(load.open(rate, count * options.every))
            async for minute in run_minutes(load, place, kinds, count, options.every):
                minutes.append(minute)
                print(json.dumps(minute), flush=True)
            await loading
    print(f"stopped; comparing {journal.stat().st_size / 1e6:.0f} MB of answers", flush=True)
    torch.set_num_threads(1)
    oracle = replay(folder, BUNDLES[0], journal)
    if place.postgres is not None:
        start_again(place)
    lost = await find_lost(place, load.gone + load.users)
    for text in oracle.wrong:
        print(f"WRONG: {text}")
    for text, times in load.refused.most_common(10):
        print(f"NOT ALLOWED, {times} times: {text}")
    errors: Counter[str] = Counter()
    for minute in minutes:
        errors.update(minute["errors"])
    others = sum(n for status, n in errors.items() if int(status) not in ALLOWED)
    without = sum(minute["without_retry_after"] for minute in minutes)
    first, last = minutes[min(len(kinds) + 1, len(minutes) - 1)]["rss_mb"], minutes[-1]["rss_mb"]
    return {
        "peak": round(peak, 1),
        "requests": sum(minute["requests"] for minute in minutes),
        "answers_compared": oracle.counts["answers"],
        "wrong_answers": oracle.counts["wrong"],
        **lost,
        "errors": dict(errors),
        "errors_not_allowed": others,
        "errors_without_retry_after": without,
        "reconnected": load.reconnected,
        "rss_mb": [minutes[1]["rss_mb"], first, last],
        "verdicts": {
            "no_event_lost": not (lost["lost"] or lost["doubled"] or lost["out_of_order"]),
            "no_answer_wrong": not oracle.counts["wrong"],
            "errors_allowed": not others and not without,
            "memory_flat": bool(first and last) and abs(last / first - 1) <= 0.03,
        },
        "minutes": minutes,
    }


async def run_minutes(
    load: Load, place: Place, kinds: dict[str, Fault], count: int, every: float
) -> Any:
    """Inject the faults and yield a row for each minute; the first and the last have none."""
    rotation: Iterator[tuple[str, Fault]] = itertools.cycle(kinds.items())
    start = time.monotonic()
    for number in range(count):
        load.minute = minute = Minute()
        fault: Any = None
        if 0 < number < count - 1:
            minute.fault, inject = next(rotation)
            fault = asyncio.ensure_future(inject(load, place))
        while (left := start + (number + 1) * every - time.monotonic()) > 0:
            usage = load.server.usage()
            if usage is not None:
                minute.rss.append(usage.rss_bytes)
            await asyncio.sleep(min(1.0, left))
        if fault is not None:
            await fault
        yield minute.row(number)


async def find_lost(place: Place, users: list[User]) -> dict[str, int]:
    """Compare the store with what was acknowledged."""
    store = open_store(place.store)
    bad = {"events": 0, "lost": 0, "doubled": 0, "out_of_order": 0}
    try:
        stored = Counter(event.event_id for event in store.history.export())
        bad["doubled"] = sum(count > 1 for count in stored.values())
        for user in users:
            expected = user.histories(float("inf"))[0]
            history = await store.history.read(user.name, len(expected) + 100)
            items = [] if history is None else history.items
            bad["events"] += len(expected)
            bad["lost"] += sum((Counter(expected) - Counter(items)).values())
            bad["out_of_order"] += sorted(items) == sorted(expected) and items != expected
    finally:
        store.close()
    return bad


def main() -> int:
    """Run it; 1 if a verdict is bad."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--every", type=float, default=60.0, help="seconds of a minute, for trials")
    parser.add_argument("--store", choices=("postgres", "sqlite"), default="postgres")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="soak-") as name:
        folder = Path(name)
        folder.chmod(0o711)  # PostgreSQL runs as a user of its own
        for seed, bundle in enumerate(BUNDLES):  # of the same items; only their weights differ
            write_bundle(folder / bundle, seed)
        with placed(options.store, folder) as place:
            verdict = asyncio.run(soak(options, place, folder))
    print(json.dumps({"store": options.store, **verdict, **environment()}))
    return int(not all(verdict["verdicts"].values()))


if __name__ == "__main__":
    sys.exit(main())
