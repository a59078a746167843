"""Kill processes that write artifacts, keys, backups: is anything lost, does all start again?

    python tests/stress/kill_artifacts.py --kills 200

Each round starts writers in processes of their own and kills them by SIGKILL, at a random time or
at a random line. The kinds of rounds take turns:

- `artifact`: two writers replace the same artifact. Lost is an artifact that is not there, that
  does not fit its manifest, or that is older than an acknowledged one.
- `two renames`: the same where the file system cannot exchange two folders.
- `keys`: three writers create and revoke keys of the same file. Lost is an acknowledged key that is
  not there, or a revoked one that is.

- `backup`: one process appends events, another backs up the store. Lost is a backup that is no
  store, or that has not what was acknowledged before it began.

Left are temporary files after the next change. After each kill the next round continues with the
same files, as after a crash.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import tempfile
from collections import Counter
from itertools import count
from pathlib import Path
from typing import Any

from killer import Killer, Report, events_of, run_rounds

from recsys import artifacts, locks
from recsys.artifacts import verify, write_artifact
from recsys.errors import LockedError, RecsysError
from recsys.serving import auth
from recsys.serving.auth import Keyring
from recsys.serving.stores import open_store, sqlite

MOVING = {
    "_replace", "_exchange", "_restore_old", "_write", "mark", "locked", "_acquire", "back_up",
}  # fmt: skip
KILLER = Killer((artifacts, auth, locks, sqlite), MOVING)


class Artifacts:
    """Replaces an artifact; `renames` makes the system one that cannot exchange folders."""

    def __init__(self, folder: Path, *, renames: bool) -> None:
        self.path = folder / "bundle"
        self.renames = renames
        self.write("start")

    def write(self, version: str) -> None:
        """Replace the artifact; each file has the version."""
        with write_artifact(self.path, "bundle", info={"version": version}) as folder:
            for number in range(5):
                (folder / f"{number}.txt").write_text(version * 2000)

    def work(self, name: str, report: Report) -> None:
        """A writer's life."""
        if self.renames:
            artifacts._exchange = lambda *_: False
        for n in count():
            report("try", f"{name}-{n}", name)
            try:
                self.write(f"{name}-{n}")
                report("ack", f"{name}-{n}", name)
            except LockedError:
                report("no", f"{name}-{n}", name)

    def round(self, number: int) -> Counter[str]:
        """Kill the writers once and count what is wrong."""
        before = verify(self.path).info["version"]
        words = KILLER.run(self.work, number, 2)
        refused = {version for word, version, _ in words if word == "no"}
        acknowledged = {version for word, version, _ in words if word == "ack"}
        last = {writer: version for word, version, writer in words if word == "ack"}
        begun = {version for word, version, _ in words if word == "try"}
        allowed = (begun - acknowledged - refused) | set(last.values())
        allowed |= set() if acknowledged else {before}
        try:
            version = verify(self.path, "bundle").info["version"]
            text = (self.path / "0.txt").read_text()
            lost = version not in allowed or text != version * 2000
        except (RecsysError, OSError) as error:
            print(f"round {number}: {error}")
            lost = True
        self.write(f"{number}-next")  # clears away what the dead left
        names = sorted(file.name for file in self.path.parent.iterdir())
        return Counter(
            acknowledged=len(acknowledged),
            unanswered=len(begun - acknowledged - refused),
            lost=int(lost),
            left=int(names != ["bundle"]),
        )


class Keys:
    """Creates and revokes keys."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / "keys.json"
        self.standing = {"first": auth.create(self.file, "first", "admin")}

    def work(self, name: str, report: Report) -> None:
        """A writer's life."""
        for n in count():
            key = f"k{name}-{n}"
            report("try", key)
            report("create", key, auth.create(self.file, key, "read"))
            if n % 2:
                report("begin", key)
                auth.revoke(self.file, key)
                report("revoke", key)

    def round(self, number: int) -> Counter[str]:
        """Kill the writers once and count what is wrong."""
        words = KILLER.run(self.work, number, 3)
        created = {line[1]: line[2] for line in words if line[0] == "create"}
        begun = {line[1] for line in words if line[0] == "begin"}
        revoked = {line[1] for line in words if line[0] == "revoke"}
        tried = sum(line[0] == "try" for line in words)
        expected = self.standing | {k: s for k, s in created.items() if k not in begun}
        ring = Keyring(self.file)  # it starts
        lost = sum(ring.find(secret) is None for secret in expected.values())
        lost += sum(ring.find(created[name]) is not None for name in revoked)
        self.standing = dict(list(expected.items())[:20])
        for key in auth.read(self.file):
            if key.name not in self.standing:
                auth.revoke(self.file, key.name)
        auth.create(self.file, f"next-{number}", "read")  # clears away what the dead left
        auth.revoke(self.file, f"next-{number}")
        names = {file.name for file in self.file.parent.iterdir()}
        return Counter(
            acknowledged=len(created) + len(revoked),
            unanswered=tried - len(created) + len(begun) - len(revoked),
            lost=lost,
            left=int(not names <= {"keys.json", ".keys.json.in-use"}),
        )


class Backups:
    """Backs up a store while events are appended."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.file = folder, folder / "out" / "backup.db"
        self.write()

    def write(self) -> None:
        """Replace the backup."""
        opened = open_store(self.folder / "histories.db")
        try:
            self.file.unlink(missing_ok=True)
            opened.database.back_up(self.file)
        finally:
            opened.close()

    def work(self, name: str, report: Report) -> None:
        """The life of the writer, or of the process that makes backups."""

        async def append() -> None:
            opened = open_store(self.folder / "histories.db")
            for n in count():
                report("try", f"{name}-{n}")
                await opened.history.append(events_of(f"{name}-{n}", 20))
                report("ack", f"{name}-{n}")

        if name.endswith("-0"):
            asyncio.run(append())
        for n in count():
            report("begin", f"{name}-{n}")
            self.write()
            report("written", f"{name}-{n}")

    def round(self, number: int) -> Counter[str]:
        """Kill both once and count what is wrong."""
        words = KILLER.run(self.work, number, 2, by_line=[1])
        written = [name for word, name in words if word == "written"]
        began = words.index(["begin", written[-1]]) if written else 0
        expected = {user for word, user in words[:began] if word == "ack"}
        lost = 0
        if self.file.exists():  # otherwise the last one was removed before the next was complete
            try:
                users = count_events(self.file)
                lost = len(expected - users.keys()) + sum(n != 20 for n in users.values())
            except RecsysError as error:
                print(f"round {number}: {error}")
                lost = 1
        self.write()  # clears away what the dead left
        done = sum(word in ("ack", "written") for word, _ in words)
        return Counter(
            acknowledged=done,
            unanswered=len(words) - 2 * done,
            lost=lost,
            left=int([file.name for file in self.file.parent.iterdir()] != [self.file.name]),
        )


def count_events(place: Path) -> dict[str, int]:
    """Number of events of each user of a store."""
    opened = open_store(place)
    try:
        return Counter(event.user for event in opened.history.export())
    finally:
        opened.close()


def main() -> int:
    """Run the rounds; 1 if anything was lost or left."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=200, help="rounds; each kills all its writers")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    random.seed(options.seed)
    with tempfile.TemporaryDirectory() as folder:
        places = [Path(folder) / str(n) for n in range(4)]
        for place in places:
            place.mkdir()
        kinds: dict[str, Any] = {
            "artifact": Artifacts(places[0], renames=False),
            "two renames": Artifacts(places[1], renames=True),
            "keys": Keys(places[2]),
            "backup": Backups(places[3]),
        }
        return run_rounds(kinds, options.kills)


if __name__ == "__main__":
    sys.exit(main())
