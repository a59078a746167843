"""Kill processes that write artifacts, keys, events, snapshots: is anything lost, does all start?

    python benchmarks/kill_artifacts.py --kills 200

Each round starts writers in processes of their own and kills them by SIGKILL: at a random time, or
at a random line of the code that writes. The kinds of rounds take turns:

- `artifact`: two writers replace the same artifact. Lost is an artifact that is not there, that
  does not fit its manifest, or that is older than an acknowledged one.
- `two renames`: the same where the file system cannot exchange two folders.
- `keys`: three writers create and revoke keys of the same file. Lost is an acknowledged key that is
  not there, or a revoked one that is.
- `events`: see `kill_store.py`, which counts lost, torn, doubled and missed batches.
- `erasures`: a writer appends events of users and erases some. Lost is an acknowledged event of
  another user. Left is the id of an erased user in the bytes of the file or its log after the next
  start.
- `snapshot`: one process appends events, another replaces a snapshot of the store. Lost is a
  snapshot that cannot be restored, or that has not what was acknowledged before it began.
- `restore`: a writer restores a snapshot into an empty store, and another one over it. Lost is a
  store that is neither as before nor as the snapshot, that is older than acknowledged, or that has
  no keys.

In the other kinds, left are temporary files after the next change. After each kill the next round
continues with the same files, as after a crash.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Collection
from itertools import count
from pathlib import Path
from types import FrameType
from typing import Any

from kill_store import Reader, check, kill_once

from recsys import artifacts, locks
from recsys.artifacts import verify, write_artifact
from recsys.errors import LockedError, RecsysError
from recsys.serving import auth, snapshots
from recsys.serving.auth import Keyring
from recsys.serving.snapshots import restore_snapshot, write_snapshot
from recsys.serving.stores import open_store, store
from recsys.serving.stores.records import Event, content_digest

Report = Callable[..., None]
TRACED = {artifacts.__file__, auth.__file__, locks.__file__, snapshots.__file__, store.__file__}
# Kinds of random lines: of all (a bit more than writing an artifact executes), and of the functions
# in which files change their places.
ALL_LINES, MOVES = 800, 40
MOVING = {
    "_replace",
    "_exchange",
    "_restore_old",
    "_write",
    "mark",
    "locked",
    "_acquire",
    "load",
    "write_snapshot",
}
SECONDS = 0.3


def die_at_some_line() -> None:
    """Have this process killed after a random number of lines of the files `TRACED`."""
    moves = random.random() < 0.5
    left = [random.randrange(1, MOVES if moves else ALL_LINES)]

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        if frame.f_code.co_filename not in TRACED:
            return None
        if moves and frame.f_code.co_name not in MOVING:
            return None
        if event == "line":
            left[0] -= 1
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)
        return trace

    sys.settrace(trace)


def killed(
    work: Callable[[str, Report], None],
    round_: int,
    writers: int,
    *,
    by_line: Collection[int] = range(3),
) -> list[list[str]]:
    """Run writers and kill each; returns the words that they reported, in order.

    Args:
        work: called with the writer's name, and a function that reports words.
        round_: number of the round.
        writers: number of processes.
        by_line: writers, by number, of which some are killed at a line: those whose work is in the
            main thread.
    """
    receiving, sending = os.pipe()
    children = []
    for number in range(writers):
        lines = number in by_line and random.random() < 0.5
        seed = random.random()
        child = os.fork()
        if child == 0:
            os.close(receiving)
            try:
                name = f"{round_}-{number}"
                random.seed(seed)
                if lines:
                    die_at_some_line()
                work(name, lambda *words: os.write(sending, (" ".join(words) + "\n").encode()))
            finally:
                os._exit(1)  # an error, which the statuses show
        children.append((child, lines))
    os.close(sending)
    time.sleep(random.uniform(0.0, SECONDS))
    for child, lines in children:
        if not lines:
            os.kill(child, signal.SIGKILL)
    text = b""
    while more := os.read(receiving, 65536):
        text += more
    os.close(receiving)
    for child, _ in children:
        _, status = os.waitpid(child, 0)
        if os.waitstatus_to_exitcode(status) != -signal.SIGKILL:
            raise AssertionError(f"a writer ended by itself: {status}")
    return [line.split() for line in text.decode().splitlines()]


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

    def round(self, round_: int) -> Counter[str]:
        """Kill the writers once and count what is wrong."""
        before = verify(self.path).info["version"]
        words = killed(self.work, round_, 2)
        refused = {version for word, version, _ in words if word == "no"}
        acknowledged = {version for word, version, _ in words if word == "ack"}
        last = {writer: version for word, version, writer in words if word == "ack"}
        begun = {version for word, version, _ in words if word == "try"}
        allowed = (begun - acknowledged - refused) | set(last.values())
        allowed |= set() if acknowledged else {before}
        try:
            manifest = verify(self.path, "bundle")
            text = (self.path / "0.txt").read_text()
            version = manifest.info["version"]
            lost = version not in allowed or text != version * 2000
        except (RecsysError, OSError) as error:
            print(f"round {round_}: {error}")
            lost = True
        self.write(f"{round_}-next")  # clears away what the dead left
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

    def round(self, round_: int) -> Counter[str]:
        """Kill the writers once and count what is wrong."""
        words = killed(self.work, round_, 3)
        created = {line[1]: line[2] for line in words if line[0] == "create"}
        begun = {line[1] for line in words if line[0] == "begin"}
        revoked = {line[1] for line in words if line[0] == "revoke"}
        expected = self.standing | {k: s for k, s in created.items() if k not in begun}
        ring = Keyring(self.file)  # it starts
        lost = sum(ring.find(secret) is None for secret in expected.values())
        lost += sum(ring.find(created[name]) is not None for name in revoked)
        self.standing = dict(list(expected.items())[:20])
        for key in auth.read(self.file):
            if key.name not in self.standing:
                auth.revoke(self.file, key.name)
        auth.create(self.file, f"next-{round_}", "read")  # clears away what the dead left
        auth.revoke(self.file, f"next-{round_}")
        names = {file.name for file in self.file.parent.iterdir()}
        return Counter(
            acknowledged=len(created) + len(revoked),
            unanswered=sum(line[0] == "try" for line in words) - len(created)
            + len(begun) - len(revoked),
            lost=lost,
            left=int(not names <= {"keys.json", ".keys.json.in-use"}),
        )  # fmt: skip


class Events:
    """Appends events, as `kill_store.py`."""

    def __init__(self, folder: Path) -> None:
        self.location = str(folder / "events.db")
        self.reader = Reader()
        open_store(self.location).close()

    def round(self, round_: int) -> Counter[str]:
        """Kill the writers once and count what is wrong."""
        begun, acknowledged = kill_once(self.location, round_)
        bad = asyncio.run(check(self.location, begun, acknowledged, self.reader))
        return Counter(
            acknowledged=len(acknowledged),
            unanswered=len(begun - acknowledged),
            lost=sum(bad.values()),
        )


class Erasures:
    """Appends events and erases some of their users."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / "histories.db"
        open_store(self.file).close()

    def work(self, name: str, report: Report) -> None:
        """A writer's life."""

        async def write() -> None:
            for n in count():
                keep, gone = f"keep-{name}-{n}", f"gone-{name}-{n}-{os.urandom(8).hex()}"
                report("try", keep)
                for user in (keep, gone):
                    await store.append([_event(f"{user}-{i}", user) for i in range(20)])
                report("ack", keep)
                await store.erase(gone)
                report("erased", gone)

        store = open_store(self.file)
        asyncio.run(write())

    def round(self, round_: int) -> Counter[str]:
        """Kill the writers once and count what is wrong."""
        words = killed(self.work, round_, 1, by_line=())
        acknowledged = {line[1] for line in words if line[0] == "ack"}
        erased = {line[1] for line in words if line[0] == "erased"}

        async def look() -> int:
            store = open_store(self.file)
            try:
                lost = sum([len(await store.events(user, 99)) != 20 for user in acknowledged])
                lost += sum([len(await store.events(user, 99)) != 0 for user in erased])
                await store.state_put("round", round_)  # begins with what a kill left to do
            finally:
                store.close()
            return lost

        lost = asyncio.run(look())
        content = b"".join(file.read_bytes() for file in self.file.parent.glob("histories.db*"))
        return Counter(
            acknowledged=len(acknowledged) + len(erased),
            unanswered=sum(line[0] == "try" for line in words) - len(acknowledged),
            lost=lost,
            left=sum(user.encode() in content for user in erased),
        )


class Snapshots:
    """Replaces a snapshot of a store while events are appended."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.file = folder, folder / "out" / "snapshot.zip"
        self.file.parent.mkdir()
        self.write()

    def write(self) -> None:
        """Replace the snapshot."""
        opened = open_store(self.folder / "histories.db")
        try:
            write_snapshot(opened, self.file)
        finally:
            opened.close()

    def work(self, name: str, report: Report) -> None:
        """The life of the writer, or of the process that makes snapshots."""

        async def append() -> None:
            opened = open_store(self.folder / "histories.db")
            for n in count():
                user = f"{name}-{n}"
                report("try", user)
                await opened.append([_event(f"{user}-{i}", user) for i in range(20)])
                report("ack", user)

        if name.endswith("-0"):
            asyncio.run(append())
        for n in count():
            report("begin", f"{name}-{n}")
            self.write()
            report("written", f"{name}-{n}")

    def round(self, round_: int) -> Counter[str]:
        """Kill both once and count what is wrong."""
        words = killed(self.work, round_, 2, by_line=[1])
        done = [place for word, place in words if word == "written"]
        began = words.index(["begin", done[-1]]) if done else 0
        expected = {user for word, user in words[:began] if word == "ack"}
        target = self.folder / "restored.db"
        try:
            users = _restored(self.file, target)
            lost = len(expected - users.keys()) + sum(found != 20 for found in users.values())
        except RecsysError as error:
            print(f"round {round_}: {error}")
            lost = 1
        for file in self.folder.glob("restored.db*"):
            file.unlink()
        self.write()  # clears away what the dead left
        return Counter(
            acknowledged=len(done) + sum(word == "ack" for word, _ in words),
            unanswered=sum(word in ("try", "begin") for word, _ in words)
            - len(done) - sum(word == "ack" for word, _ in words),
            lost=lost,
            left=int([file.name for file in self.file.parent.iterdir()] != [self.file.name]),
        )  # fmt: skip


class Restores:
    """Restores a snapshot into an empty store, then another one over it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        auth.create(folder / "keys.json", "first", "admin")
        opened = open_store(folder / "histories.db")
        for user in ("one", "two"):
            events = [_event(f"{user}-{i}", user) for i in range(200)]
            asyncio.run(opened.append(events))
            write_snapshot(opened, folder / f"{user}.zip", folder / "keys.json")
        opened.close()

    def restore(self, place: Path, user: str) -> None:
        """Restore the snapshot that has this user as its last one."""
        opened = open_store(place / "store.db")
        try:
            snapshot = self.folder / f"{user}.zip"
            restore_snapshot(opened, snapshot, place / "keys.json", replace=user == "two")
        finally:
            opened.close()

    def work(self, name: str, report: Report) -> None:
        """A writer's life."""
        for n in count():
            place = self.folder / f"at-{name}-{n}"
            for user in ("one", "two"):
                report("try", str(place), user)
                self.restore(place, user)
                report("ack", str(place), user)

    def round(self, round_: int) -> Counter[str]:
        """Kill the writer once and count what is wrong."""
        words = killed(self.work, round_, 1)
        wrong = left = 0
        for place in {line[1] for line in words}:
            tried = {user for word, where, user in words if (word, where) == ("try", place)}
            done = {user for word, where, user in words if (word, where) == ("ack", place)}
            found = _users(Path(place) / "store.db")
            states: list[dict[str, int]] = [{}, {"one": 200}, {"one": 200, "two": 200}]
            wrong += found not in states[len(done) : len(tried) + 1]
            wrong += bool(found) and not (Path(place) / "keys.json").exists()
            self.restore(Path(place), "two")
            wrong += _users(Path(place) / "store.db") != states[2]
            names = {file.name for file in Path(place).iterdir()}
            left += not names <= {"store.db", "keys.json", ".keys.json.in-use"}
            shutil.rmtree(place)
        acknowledged = sum(line[0] == "ack" for line in words)
        return Counter(
            acknowledged=acknowledged,
            unanswered=len(words) - 2 * acknowledged,
            lost=wrong,
            left=left,
        )


def _restored(snapshot: Path, place: Path) -> dict[str, int]:
    """Restore a snapshot into a new store and count the events of each user."""
    opened = open_store(place)
    try:
        restore_snapshot(opened, snapshot)
    finally:
        opened.close()
    return _users(place)


def _users(place: Path) -> dict[str, int]:
    """Number of events of each user of a store."""
    opened = open_store(place)
    try:
        return Counter(event.user for event in opened.export())
    finally:
        opened.close()


def _event(event_id: str, user: str) -> Event:
    return Event(event_id, user, "item", "view", 1, digest=content_digest(event_id))


def main() -> int:
    """Run the rounds; 1 if anything was lost or left."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=200, help="rounds; some kill several writers")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    random.seed(options.seed)
    totals: dict[str, Counter[str]] = {}
    with tempfile.TemporaryDirectory() as folder:
        places = [Path(folder) / str(n) for n in range(7)]
        for place in places:
            place.mkdir()
        kinds: dict[str, Any] = {
            "artifact": Artifacts(places[0], renames=False),
            "two renames": Artifacts(places[1], renames=True),
            "keys": Keys(places[2]),
            "events": Events(places[3]),
            "erasures": Erasures(places[4]),
            "snapshot": Snapshots(places[5]),
            "restore": Restores(places[6]),
        }
        for round_ in range(options.kills):
            name = list(kinds)[round_ % len(kinds)]
            totals.setdefault(name, Counter())["rounds"] += 1
            totals[name] += kinds[name].round(round_)
    columns = ("rounds", "acknowledged", "unanswered", "lost", "left")
    print(f"{'':12}", *(f"{column:>13}" for column in columns))
    for name, found in totals.items():
        print(f"{name:12}", *(f"{found[column]:13,}" for column in columns))
    return int(any(found["lost"] or found["left"] for found in totals.values()))


if __name__ == "__main__":
    sys.exit(main())
