"""Kill a process that writes events many times: is every acknowledged event stored?

    python benchmarks/kill_store.py --rounds 100
    python benchmarks/kill_store.py --rounds 100 --store postgresql://localhost/scratch

A child opens the store, and 16 writers append batches of three events. The name of each batch goes
through a pipe once the store has acknowledged it. The child is killed by SIGKILL at a random time,
and the store is opened again. Lost is an acknowledged batch that is not stored. Torn is a batch
that is stored in part. Doubled is a batch that is stored twice after everything was sent again.
Missed is a batch that a reader of changes, who reads on after each kill, has not read completely
and once. Use a store whose contents do not matter.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from itertools import count
from pathlib import Path

from recsys.serving.stores import open_store
from recsys.serving.stores.records import Event, content_digest
from recsys.serving.stores.store import Store

WRITERS = 16
BATCH = 3
PATIENCE_S = 30.0  # a server may notice late that a killed process has left


def batch_of(name: str) -> list[Event]:
    """The events of the batch of this name."""
    return [
        Event(f"{name}/{i}", name, f"item-{i}", "view", i, digest=content_digest(name, i))
        for i in range(BATCH)
    ]


def write(location: str, round_: int, pipe: int) -> None:
    """The child: append until killed."""

    async def writer(number: int) -> None:
        for n in count():
            name = f"{round_}-{number}-{n}"
            os.write(pipe, f"try {name}\n".encode())
            await store.append(batch_of(name))
            os.write(pipe, f"ack {name}\n".encode())

    async def all_of_them() -> None:
        await asyncio.gather(*(writer(number) for number in range(WRITERS)))

    store = open_store(location)
    asyncio.run(all_of_them())


def kill_once(location: str, round_: int) -> tuple[set[str], set[str]]:
    """One child's life: the batches that it began and those that were acknowledged."""
    receiving, sending = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(receiving)
        try:
            write(location, round_, sending)
        finally:
            os._exit(1)
    os.close(sending)
    text = b""
    while b"ack" not in text:  # it has begun
        text += os.read(receiving, 65536)
    deadline = time.monotonic() + random.uniform(0.0, 0.15)
    os.set_blocking(receiving, False)
    while time.monotonic() < deadline:
        try:
            text += os.read(receiving, 65536)
        except BlockingIOError:
            time.sleep(0.0005)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    os.set_blocking(receiving, True)
    while more := os.read(receiving, 65536):
        text += more
    os.close(receiving)
    words = [line.split() for line in text.decode().splitlines()]
    began = {line[1] for line in words if line[0] == "try"}
    return began, {line[1] for line in words if line[0] == "ack"}


class Reader:
    """Reads changes from where it was, until it has everything or `PATIENCE_S` have passed."""

    def __init__(self) -> None:
        self.place: tuple[int, ...] = ()

    async def missed(self, store: Store, names: set[str]) -> int:
        """The number of these batches that were not read completely and once."""
        found: Counter[str] = Counter()
        end = time.monotonic() + PATIENCE_S
        while found.total() < len(names) * BATCH and time.monotonic() < end:
            for change in await store.changes(self.place, 1_000):
                self.place = change.place
                if change.event is not None and change.event.user in names:
                    found[change.event.user] += 1
        return sum(found[name] != BATCH for name in names)


async def check(
    location: str, began: set[str], acknowledged: set[str], reader: Reader
) -> Counter[str]:
    """Look at the store after a kill, then send all again and look once more."""
    store = open_store(location)
    try:
        found = Counter({name: len(await store.events(name, 2 * BATCH)) for name in sorted(began)})
        bad = Counter(
            lost=sum(found[name] == 0 for name in acknowledged),
            torn=sum(0 < found[name] < BATCH for name in began),
        )
        for name in began:
            await store.append(batch_of(name))
        bad["doubled"] = sum([len(await store.events(name, 2 * BATCH)) != BATCH for name in began])
        bad["missed"] = await reader.missed(store, began)
    finally:
        store.close()
    return bad


def main() -> int:
    """Run the rounds; 1 if anything was lost, torn, doubled or missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--store", help="path or URL (default: a SQLite file that is deleted)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        location = options.store or str(Path(folder) / "kill.db")
        open_store(location).close()
        totals: Counter[str] = Counter()
        reader = Reader()
        for round_ in range(options.rounds):
            began, acknowledged = kill_once(location, round_)
            totals["acknowledged"] += len(acknowledged)
            totals["unanswered"] += len(began - acknowledged)
            totals += asyncio.run(check(location, began, acknowledged, reader))
    print(
        f"{options.rounds} kills, {totals['acknowledged']} batches of {BATCH} events acknowledged, "
        f"{totals['unanswered']} unanswered: {totals['lost']} lost, {totals['torn']} torn, "
        f"{totals['doubled']} doubled, {totals['missed']} missed"
    )
    return int(any(totals[name] for name in ("lost", "torn", "doubled", "missed")))


if __name__ == "__main__":
    sys.exit(main())
