"""Kill processes that write to a store: is every acknowledged event there, and no erased id?

    python tests/stress/kill_store.py --kills 200
    python tests/stress/kill_store.py --kills 100 --store postgresql://localhost/scratch

The kinds of rounds take turns; after each kill the next round continues with the same files:

- `events`: 16 writers append batches of three events. Lost counts acknowledged batches that are not
  stored, batches that are stored in part, and batches that are stored twice after all were sent
  again.
- `erasures`: a writer appends events of users and erases some. Lost is an acknowledged event of
  another user. Left is the id of an erased user in the bytes of the file or its log after the next
  start.

With `--store`, there are only rounds of events, in a store whose contents do not matter.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import sys
import tempfile
from collections import Counter
from itertools import count
from pathlib import Path
from typing import Any

from killer import Killer, Report, events_of, run_rounds

from recsys.serving.stores import open_store
from recsys.serving.stores.store import Store

WRITERS, BATCH = 16, 3
KILLER = Killer((), ())  # by time only: threads write


class Events:
    """Appends batches, one user each, from many writers of one process."""

    def __init__(self, location: str) -> None:
        self.location = location
        open_store(location).close()

    def work(self, name: str, report: Report) -> None:
        """The child's life."""

        async def writer(opened: Store, number: int) -> None:
            for n in count():
                user = f"{name}-{number}-{n}"
                report("try", user)
                await opened.history.append(events_of(user, BATCH))
                report("ack", user)

        async def write() -> None:
            opened = open_store(self.location)
            await asyncio.gather(*(writer(opened, number) for number in range(WRITERS)))

        asyncio.run(write())

    def round(self, number: int) -> Counter[str]:
        """Kill the child once and count what is wrong."""
        words = KILLER.run(self.work, number, 1, by_line=())
        begun = sorted({user for word, user in words if word == "try"})
        acknowledged = {user for word, user in words if word == "ack"}

        async def look() -> Counter[str]:
            opened = open_store(self.location)
            try:
                stored = {user: len(await opened.history.events(user, 2 * BATCH)) for user in begun}
                bad = Counter(
                    missing=sum(stored[user] == 0 for user in acknowledged),
                    torn=sum(0 < events < BATCH for events in stored.values()),
                )
                for user in begun:
                    await opened.history.append(events_of(user, BATCH))
                again = [len(await opened.history.events(user, 2 * BATCH)) for user in begun]
                bad["doubled"] = sum(events != BATCH for events in again)
                return bad
            finally:
                opened.close()

        bad = asyncio.run(look())
        if bad.total():
            print(f"round {number}: {+bad}")
        return Counter(
            acknowledged=len(acknowledged),
            unanswered=len(begun) - len(acknowledged),
            lost=bad.total(),
        )


class Erasures:
    """Appends events and erases some of their users."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / "histories.db"
        open_store(self.file).close()

    def work(self, name: str, report: Report) -> None:
        """A writer's life."""

        async def write() -> None:
            opened = open_store(self.file)
            for n in count():
                keep, gone = f"keep-{name}-{n}", f"gone-{name}-{n}-{os.urandom(8).hex()}"
                report("try", keep)
                for user in (keep, gone):
                    await opened.history.append(events_of(user, 20))
                report("ack", keep)
                await opened.history.erase(gone)
                report("erased", gone)

        asyncio.run(write())

    def round(self, number: int) -> Counter[str]:
        """Kill the writer once and count what is wrong."""
        words = KILLER.run(self.work, number, 1, by_line=())
        acknowledged = {user for word, user in words if word == "ack"}
        erased = [user for word, user in words if word == "erased"]

        async def look() -> int:
            opened = open_store(self.file)
            try:
                lost = sum(
                    [len(await opened.history.events(user, 99)) != 20 for user in acknowledged]
                )
                lost += sum([len(await opened.history.events(user, 99)) != 0 for user in erased])
                await opened.prepare()  # does what a kill left to do
            finally:
                opened.close()
            return lost

        lost = asyncio.run(look())
        return Counter(
            acknowledged=len(acknowledged) + len(erased),
            unanswered=sum(word == "try" for word, _ in words) - len(acknowledged),
            lost=lost,
            left=count_ids(self.file, erased),
        )


def count_ids(file: Path, users: list[str]) -> int:
    """Number of the users whose ids are in the bytes of the file or its log."""
    content = b"".join(part.read_bytes() for part in file.parent.glob(f"{file.name}*"))
    return sum(user.encode() in content for user in users)


def main() -> int:
    """Run the rounds; 1 if anything was lost or left."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=200, help="rounds")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--store", help="path or URL: rounds of events in this store only")
    options = parser.parse_args()
    random.seed(options.seed)
    with tempfile.TemporaryDirectory() as folder:
        kinds: dict[str, Any] = {"events": Events(options.store or f"{folder}/events.db")}
        if options.store is None:
            kinds["erasures"] = Erasures(Path(folder))
        return run_rounds(kinds, options.kills)


if __name__ == "__main__":
    sys.exit(main())
