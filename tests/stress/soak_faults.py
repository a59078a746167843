"""The faults of `soak.py`, and the servers and file systems that they need."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import resource
import signal
import sqlite3
import subprocess
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from harness import some_item

BUNDLES = ("a", "b")
RECOMMEND, UPSERT = "/v1/recommendations", "/v1/items"
FAULT_S, DOWN_S = 8.0, 5.0
DISK_MB = 400
SERVERS = Path(__file__).parents[1] / "serving" / "stores" / "conftest.py"


@dataclass
class Place:
    """Where the store is, and the servers that the service uses."""

    store: str
    folder: Path
    mounted: bool
    postgres: Any = None

    def __str__(self) -> str:
        kind = "SQLite" if self.postgres is None else "PostgreSQL"
        disk = "a tmpfs" if self.mounted else "an ordinary disk"
        return f"{kind} on {disk}"


Fault = Callable[[Any, Place], Awaitable[None]]  # called with the `Load`


async def lock_store(load: Any, place: Place) -> None:
    """Hold a lock that excludes the service."""

    def hold() -> None:
        lock: Any
        if place.postgres is None:
            lock = sqlite3.connect(place.store, timeout=10, isolation_level=None)
            lock.execute("BEGIN IMMEDIATE")
        else:
            import psycopg

            while True:
                lock = psycopg.connect(place.store)
                try:
                    lock.execute("LOCK TABLE events, state IN ACCESS EXCLUSIVE MODE")
                    break
                except psycopg.errors.DeadlockDetected:  # the service locks them in another order
                    lock.close()
        time.sleep(FAULT_S)
        lock.rollback()
        lock.close()

    await asyncio.to_thread(hold)


async def kill_database(load: Any, place: Place) -> None:
    """Kill PostgreSQL and start it again."""
    place.postgres.freeze(signal.SIGKILL)
    await asyncio.sleep(DOWN_S)
    await asyncio.to_thread(start_again, place)


def start_again(place: Place) -> None:
    """Start PostgreSQL if it does not run."""
    with contextlib.suppress(AssertionError):  # it runs, or its processes are just ending
        place.postgres.run("pg_ctl", "status", "-D", f"{place.postgres.home}/data")
        return
    for last in (False, False, True):
        try:
            place.postgres.start()
            return
        except AssertionError:
            if last:
                raise
            time.sleep(2)


async def fill_disk(load: Any, place: Place) -> None:
    """Leave the store no space."""
    assert load.server.process is not None
    if not place.mounted:
        limits = resource.prlimit(load.server.process.pid, resource.RLIMIT_FSIZE)
        resource.prlimit(load.server.process.pid, resource.RLIMIT_FSIZE, (0, limits[1]))
        await asyncio.sleep(FAULT_S)
        resource.prlimit(load.server.process.pid, resource.RLIMIT_FSIZE, limits)
        return
    filler = place.folder / "filler"

    def fill() -> None:
        end = time.monotonic() + FAULT_S
        with filler.open("wb", buffering=0) as file:
            while time.monotonic() < end:
                for size in (1 << 20, 4096):
                    with contextlib.suppress(OSError):
                        while file.write(bytes(size)) == size:
                            pass
                time.sleep(0.05)
        filler.unlink()

    await asyncio.to_thread(fill)
    if place.postgres is not None:
        await asyncio.sleep(2)
        await asyncio.to_thread(start_again, place)


async def swap(load: Any, place: Place) -> None:
    """Give the alias the other bundle."""
    load.bundle = BUNDLES[1 - BUNDLES.index(load.bundle)]
    await load.change("swap", load.bundle, "PUT", "/v1/aliases/champion", {"bundle": load.bundle})


async def upsert(load: Any, place: Place) -> None:
    """Add, replace and remove items, from a fixed set of names."""
    rng, end = load.rng, time.monotonic() + FAULT_S
    there: list[str] = []
    while time.monotonic() < end or there:
        if time.monotonic() < end:
            names = rng.sample([f"N{i}" for i in range(200)], 40)
            items = [
                {"item_id": name, "like": some_item(rng), "title": name,
                 "attributes": {"price": float(rng.randrange(100))}}
                for name in names
            ]  # fmt: skip
            await load.change(
                "items", partial(placed_items, items), "POST", UPSERT, {"items": items}
            )
            there = sorted({*there, *names})
        for name in rng.sample(there, min(len(there), 5)):
            there.remove(name)
            gone = [{"op": "remove", "item_id": name}]
            await load.change("items", gone, "DELETE", f"{UPSERT}/{name}", None)


def placed_items(items: list[dict[str, Any]], answer: Any) -> list[dict[str, Any]]:
    """Records of the journal of items that were added."""
    return [
        {**item, "op": "upsert", "text": "", "semantic_id": made["semantic_id"]}
        for item, made in zip(items, answer["items"], strict=True)
    ]


def faults(place: Place) -> dict[str, Fault]:
    """The faults that this machine and this store can have."""
    found: dict[str, Fault] = {"store locked": lock_store}
    if place.postgres is not None:
        found["database killed"] = kill_database
    if place.mounted or place.postgres is None:
        found["disk full"] = fill_disk
    return {**found, "alias swap": swap, "upserts": upsert}


@contextlib.contextmanager
def placed(kind: str, folder: Path) -> Iterator[Place]:
    """A store of this kind on a small file system."""
    spec = importlib.util.spec_from_file_location("servers", SERVERS)
    assert spec is not None
    assert spec.loader is not None
    servers = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(servers)  # the tests start the same servers
    disk = folder / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK_MB}m", "tmpfs", str(disk)]
    with contextlib.ExitStack() as stack:
        mounted = subprocess.run(mount, check=False, stderr=subprocess.DEVNULL).returncode == 0
        if mounted:
            stack.callback(subprocess.run, ["umount", "-l", str(disk)], check=False)
        place = Place(str(disk / "histories.db"), disk, mounted)
        if kind == "postgres":
            home = disk / "postgres"
            home.mkdir()
            binaries = sorted(Path("/usr/lib/postgresql").glob("*/bin"))[-1]
            place.postgres = servers.Postgres(binaries, home)
            servers.start_somewhere(place.postgres)
            stack.callback(place.postgres.stop)
            place.store = place.postgres.url
        yield place
