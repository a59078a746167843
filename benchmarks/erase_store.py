"""Erase users of a large SQLite store: how long do answers and other writes wait?

    python benchmarks/erase_store.py --events 1000000

The store gets events of many users. Then users are erased one after another, and an event is
appended after each answer. Printed are the times of both, the time until the file is
rewritten, and the number of erased ids that a search finds in the bytes of the file and its log.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from recsys.serving.stores.records import Event, content_digest
from recsys.serving.stores.sqlite import SqliteStore

USERS = 100_000


def fill(store: SqliteStore, events: int) -> list[str]:
    """Insert events of random users; returns the users."""
    draw = random.Random(0)
    users = [f"{draw.getrandbits(64):016x}" for _ in range(USERS)]

    def rows() -> Iterator[tuple[Any, ...]]:
        for n in range(events):
            user, item = draw.choice(users), f"item-{draw.randrange(20_000)}"
            yield f"event-{n}", user, item, "view", n, None, None, None, content_digest(n), None

    connection = store._connect()
    connection.execute("BEGIN")
    store._bulk(connection.cursor(), rows())
    connection.execute("COMMIT")
    connection.close()
    return users


def count_left(file: Path, users: list[str]) -> int:
    """Number of the users whose ids are in the bytes of the file or its log."""
    content = b"".join(part.read_bytes() for part in file.parent.glob(f"{file.name}*"))
    return sum(user.encode() in content for user in users)


async def measure(file: Path, events: int, erased: int) -> None:
    """Fill, erase and print."""
    store = SqliteStore(file)
    users = fill(store, events)
    size = file.stat().st_size
    print(f"{events:,} events of {USERS:,} users, {size / 1e6:.0f} MB; {erased} erasures in a row")
    erasures, appends = [], []
    appended = 0.0
    for n, user in enumerate(users[:erased]):
        start = time.perf_counter()
        await store.erase(user)
        answered = time.perf_counter()
        await store.append([Event(f"new-{n}", "new", "x", "view", n, digest=content_digest(n))])
        appended = time.perf_counter()
        erasures.append(answered - start)
        appends.append(appended - answered)
    for name, seconds in (("erasure", erasures), ("append after it", appends)):
        middle = sorted(seconds)[len(seconds) // 2]
        print(f"{name}: median {1e3 * middle:.0f} ms, longest {1e3 * max(seconds):.0f} ms")
    left = count_left(file, users[:erased])
    while store._left is not None:
        await asyncio.sleep(0.05)
    seconds = time.perf_counter() - appended
    print(f"ids left in the bytes: {left} after the last answer, ", end="")
    print(f"{count_left(file, users[:erased])} after {seconds:.1f} s more")
    store.close()


def main() -> None:
    """Run it in a temporary folder."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--events", type=int, default=1_000_000)
    parser.add_argument("--erased", type=int, default=20)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(measure(Path(folder) / "store.db", options.events, options.erased))


if __name__ == "__main__":
    main()
