"""Attack a service with one client, and measure what others notice.

    OMP_NUM_THREADS=1 python benchmarks/abuse.py --seconds 10

A server is started on a small random bundle, with a key for the attacker and one for a victim. The
attacks run one after the other, in a process of their own with a lower priority and from another
address, as if it were another machine. Meanwhile four connections of the victim ask for
recommendations, and `/health/live` is asked on new connections. Between attacks the same is
measured in quiet. For each attack, the table has the longest answer of `/health/live`, the victim's
p99 and its failures, and how much the memory of the server exceeds that before the first attack.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import itertools
import json
import multiprocessing
import os
import random
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from recsys.artifacts import write_artifact
from recsys.benchmark.environment import environment
from recsys.bundle import CATALOG, EVAL, PROMPTS, TARGET
from recsys.catalog import Catalog
from recsys.models.checkpoint import build, save_model
from recsys.serving import auth
from recsys.serving.benchmark.process import Server, start_server
from recsys.testing import byte_level_tokenizer, tiny_model
from recsys.vocabulary import Vocabulary

ITEMS, CODES = 2_000, 16
VICTIMS, PAUSE_S = 4, 0.05
VICTIM = "127.0.0.2"  # its address, another one than the attacker's; all of 127/8 is this machine
QUIET_S = 3.0
RECOMMEND, BATCH = "/v1/recommendations", "/v1/recommendations/batch"
Attack = Callable[["Target"], Awaitable[None]]
ATTACKS: dict[str, tuple[int, Attack]] = {}


def write_bundle(path: Path, seed: int = 0) -> None:
    """Write a bundle of `ITEMS` items whose model has random weights."""
    torch.manual_seed(seed)
    rng = np.random.default_rng(0)
    flat = rng.choice(CODES**3, ITEMS, replace=False)
    codes = np.stack(np.unravel_index(flat, (CODES,) * 3), axis=1).astype(np.int32)
    table = pa.table(
        {
            "item_id": [f"B{i:04d}" for i in range(ITEMS)],
            "title": [f"Thing no. {i}" for i in range(ITEMS)],
            "text": [""] * ITEMS,
            "price": [float(i % 100) for i in range(ITEMS)],
        }
    )
    vocabulary = Vocabulary.from_levels([CODES] * 3)
    with write_artifact(path, "bundle") as folder:
        for part in (CATALOG, EVAL):
            (folder / part).mkdir()
        Catalog(table, codes).save(folder / CATALOG)
        (folder / EVAL / "validation.json").write_text(json.dumps({"x": [0.5] * 200_000}))
        vocabulary.save(folder)
        (folder / PROMPTS).write_text(json.dumps({"max_items": 20, "block": 5}))
        save_model(build("tiny", vocabulary), folder / TARGET)


# A client that may do what HTTP clients do not


@dataclass
class Target:
    """The server as a client sees it."""

    host: str
    port: int
    key: str
    count: Any = None  # of what was done: connections and answers
    source: str = "127.0.0.1"  # the client's address

    def did(self) -> None:
        """Count a connection or an answer."""
        if self.count is not None:
            self.count.value += 1

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A new connection."""
        self.did()
        source = (self.source, 0)
        return await asyncio.open_connection(self.host, self.port, local_addr=source)

    def head(self, method: str, path: str, *more: str, length: int | None = None) -> bytes:
        """The head of a request."""
        lines = [f"{method} {path} HTTP/1.1", "Host: localhost", *more]
        lines += [f"Authorization: Bearer {self.key}", "Content-Type: application/json"]
        if length is not None:
            lines.append(f"Content-Length: {length}")
        return ("\r\n".join(lines) + "\r\n\r\n").encode()

    async def send(self, path: str, body: Any = None, method: str = "POST") -> None:
        """Send the same request again and again on one connection, which is replaced if closed."""
        raw = body if isinstance(body, bytes) else b"" if body is None else dump(body)
        message = self.head(method, path, length=len(raw)) + raw
        while True:
            with contextlib.suppress(OSError, asyncio.IncompleteReadError):
                reader, writer = await self.connect()
                try:
                    while True:
                        writer.write(message)
                        await read_answer(reader)
                        self.did()
                finally:
                    writer.close()
            await asyncio.sleep(0.01)


def dump(value: Any) -> bytes:
    """JSON without spaces."""
    return json.dumps(value, separators=(",", ":")).encode()


async def read_answer(reader: asyncio.StreamReader) -> int:
    """Read one answer; its status."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
    length = head.partition("content-length: ")[2].split("\r\n")[0]
    await reader.readexactly(int(length or 0))
    return int(head.split()[1])


# Attacks: each is run on a number of connections at once


def attack(connections: int) -> Callable[[Attack], Attack]:
    """Declare an attack."""

    def declare(function: Attack) -> Attack:
        ATTACKS[function.__name__.replace("_", " ")] = connections, function
        return function

    return declare


@attack(2)
async def names_twice(to: Target) -> None:
    """One object with 90,000 names, the last one twice."""
    names = [f'"n{i}":0' for i in range(85_000)]
    await to.send(RECOMMEND, ("{" + ",".join([*names, names[-1]]) + "}").encode())


@attack(2)
async def deep_filters(to: Target) -> None:
    """Groups within groups, with quotes to escape."""
    wanted: Any = {"key": '"\\' * 200, "any": ['"' * 100 + str(i) for i in range(500)]}
    for _ in range(15):
        wanted = {"must": [wanted]}
    await to.send(RECOMMEND, {"history": ["B0001"], "filter": wanted})


@attack(2)
async def wide_filters(to: Target) -> None:
    """As many clauses as a filter may have, in many boosts, different each time."""
    for number in itertools.count():
        clauses = [{"key": "price", "range": {"lt": i + number / 1000}} for i in range(150)]
        boosts = [{"filter": {"should": clauses}, "weight": i / 10} for i in range(66)]
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.5):
                await to.send(RECOMMEND, {"history": ["B0001"], "boosts": boosts})


@attack(8)
async def endless_headers(to: Target) -> None:
    """Header lines without an end."""
    while True:
        with contextlib.suppress(OSError):
            _, writer = await to.connect()
            writer.write(b"GET / HTTP/1.1\r\nHost: localhost\r\n")
            while True:
                writer.write(b"x-name: value\r\n" * 1000)
                await writer.drain()
        await asyncio.sleep(0.01)


@attack(1)
async def idle_connections(to: Target) -> None:
    """Very many connections that send nothing."""
    held = []
    while True:
        with contextlib.suppress(OSError):
            held.append(await to.connect())
        if len(held) > 800:
            held.pop(0)[1].close()
        await asyncio.sleep(0.001)


@attack(100)
async def slow_bodies(to: Target) -> None:
    """A body at some bytes a second, after most of it."""
    while True:
        with contextlib.suppress(OSError):
            reader, writer = await to.connect()
            writer.write(to.head("POST", RECOMMEND, length=900_000) + b" " * 300_000)
            while not reader.at_eof():
                writer.write(b" ")
                await writer.drain()
                await asyncio.sleep(0.2)
        await asyncio.sleep(0.01)


@attack(2)
async def greedy_batches(to: Target) -> None:
    """Batches of the most expensive requests."""
    one = {"history": ["B0001"] * 50, "k": 200, "diversity": 0.5, "include": ["trace"]}
    await to.send(BATCH, {"requests": [one] * 100})


@attack(16)
async def greedy_requests(to: Target) -> None:
    """Expensive requests one by one."""
    await to.send(RECOMMEND, {"history": ["B0002"] * 50, "k": 200, "guarantee": "global"})


@attack(4)
async def invalid_batches(to: Target) -> None:
    """As many values as a body may have, all of them wrong."""
    wrong = {"history": [1] * 240, "exclude_items": [None] * 240}
    await to.send(BATCH, {"requests": [wrong] * 100})


@attack(4)
async def unknown_fields(to: Target) -> None:
    """Large bodies of unknown fields."""
    wrong = {f"f{i}": 0 for i in range(250)}
    await to.send(BATCH, {"requests": [wrong] * 100})


@attack(4)
async def valid_large_batches(to: Target) -> None:
    """As many values as a body may have, in valid requests of the longest ids."""
    one = {"history": ["ab" * 8] * 440, "exclude_items": ["B1"] * 50}
    await to.send(BATCH, {"requests": [one] * 99})


@attack(4)
async def too_many_values(to: Target) -> None:
    """The longest body, of short texts."""
    await to.send(BATCH, {"requests": [{"history": ["ab"] * 1900}] * 95})


@attack(4)
async def very_many_lists(to: Target) -> None:
    """As many empty lists as a body may have."""
    await to.send(RECOMMEND, b"[" + b"[]," * 24_000 + b"[]]")


@attack(8)
async def evaluations(to: Target) -> None:
    """The largest file that a read key may have."""
    await to.send("/v1/evaluation", method="GET")


@attack(40)
async def metrics(to: Target) -> None:
    """All metrics, without a pause."""
    await to.send("/metrics", method="GET")


@attack(40)
async def statistics(to: Target) -> None:
    """The figures of the page, without a pause."""
    await to.send("/v1/stats", method="GET")


@attack(40)
async def histories(to: Target) -> None:
    """The longest page of a history."""
    events = dump({"events": [{"user": "long", "item": "B0001"}] * 1000})
    reader, writer = await to.connect()
    writer.write(to.head("POST", "/v1/events", length=len(events)) + events)
    await read_answer(reader)
    writer.close()
    await to.send("/v1/users/long/history?limit=1000", method="GET")


@attack(4)
async def upserts(to: Target) -> None:
    """Large changes of the catalog."""
    items = [{"item_id": f"N{i}", "like": "B0001", "title": "x" * 50} for i in range(1000)]
    await to.send("/v1/items", {"items": items})


@attack(4)
async def event_batches(to: Target) -> None:
    """As many events as a batch may have."""
    await to.send("/v1/events", {"events": [{"user": "u", "item": "B0001"}] * 5000})


@attack(4)
async def tiny_pieces(to: Target) -> None:
    """A body in chunks of one byte."""
    while True:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            reader, writer = await to.connect()
            writer.write(to.head("POST", RECOMMEND, "Transfer-Encoding: chunked"))
            writer.write(b"1\r\n \r\n" * 100_000 + b"0\r\n\r\n")
            await reader.read()
            writer.close()
        await asyncio.sleep(0.01)


@attack(4)
async def pipelines(to: Target) -> None:
    """Thousands of requests without reading an answer."""
    while True:
        with contextlib.suppress(OSError):
            _, writer = await to.connect()
            for _ in range(2000):
                writer.write(to.head("GET", "/v1/items?limit=200"))
                await writer.drain()
            writer.close()
        await asyncio.sleep(0.01)


@attack(4)
async def connections_without_end(to: Target) -> None:
    """New connections, again and again."""
    while True:
        with contextlib.suppress(OSError):
            for _, writer in [await to.connect() for _ in range(20)]:
                writer.close()
        await asyncio.sleep(0.005)


@attack(4)
async def garbage(to: Target) -> None:
    """Bytes that are not HTTP."""
    noise = random.Random(0).randbytes(200_000)
    while True:
        with contextlib.suppress(OSError):
            reader, writer = await to.connect()
            writer.write(noise)
            await reader.read()
            writer.close()
        await asyncio.sleep(0.01)


@attack(4)
async def wrong_keys(to: Target) -> None:
    """Guessing keys."""
    await Target(to.host, to.port, "rk_" + "x" * 43, to.count).send("/v1/stats", method="GET")


@attack(4)
async def large_ranks(to: Target) -> None:
    """Ranking as many items as one may."""
    items = [f"B{i:04d}" for i in range(1000)]
    await to.send("/v1/rank", {"history": items[:100], "items": items})


@attack(2)
async def hostile_schemas(to: Target) -> None:
    """Schemas for texts, each a new one: ordinary, of much memory, and of much time, by turns."""
    for number in itertools.count():
        names = [f"{number}-{i}" for i in range(11 if number % 3 else 6)]
        parts: list[Any] = [
            {"anyOf": [{"properties": {name + x: {"type": "integer"}}} for x in "ab"]}
            for name in names
        ]
        if number % 3 == 2:
            parts = [{"pattern": f"[ab]*a[ab]{{{i}}}{number}"} for i in range(5, 25)]
        form = {"type": "json", "schema": {"allOf": parts}}
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(1):
                await to.send("/v1/texts", {"prompt": "A", "format": form, "max_tokens": 8})


def run_attacks(to: Target, orders: Any) -> None:
    """The attacker's process: each order is the name of an attack, the next one ends it."""
    os.nice(10)

    async def until_ordered(name: str) -> None:
        connections, function = ATTACKS[name]
        tasks = [asyncio.create_task(function(to)) for _ in range(connections)]
        await asyncio.to_thread(orders.recv)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    to.did()
    with contextlib.suppress(EOFError):  # the measurement has ended
        while (name := orders.recv()) is not None:
            asyncio.run(until_ordered(name))


# What others notice


@dataclass
class Notes:
    """What was measured in a period: seconds of answers, and failures."""

    live: list[float] = field(default_factory=list)
    victim: list[float] = field(default_factory=list)
    failed: int = 0
    rss: int = 0

    @property
    def p99_ms(self) -> float:
        """The victim's p99."""
        return 1000 * float(np.percentile(self.victim, 99)) if self.victim else float("nan")

    @property
    def live_ms(self) -> float:
        """The longest answer of `/health/live`."""
        return 1000 * max(self.live, default=float("nan"))


async def check_health(to: Target, notes: Notes) -> None:
    """Ask for `/health/live` on new connections; one that is not answered counts 10 s."""
    while True:
        start, status = time.perf_counter(), 0
        with contextlib.suppress(OSError, TimeoutError, asyncio.IncompleteReadError):
            async with asyncio.timeout(10):
                reader, writer = await to.connect()
                writer.write(to.head("GET", "/health/live"))
                status = await read_answer(reader)
                writer.close()
        notes.live.append(time.perf_counter() - start if status == 200 else 10.0)
        await asyncio.sleep(0.02)


async def ask(to: Target, notes: Notes, number: int) -> None:
    """A victim: ordinary requests, one after the other, with pauses."""
    rng = random.Random(number)
    connection: Any = None
    while True:
        history = [f"B{rng.randrange(ITEMS):04d}" for _ in range(rng.randint(1, 30))]
        body = dump({"history": history, "k": 10})
        start, status = time.perf_counter(), 0
        for _ in range(2):  # a connection that was closed while it was idle is replaced, once
            fresh = connection is None
            try:
                connection = connection or await to.connect()
                connection[1].write(to.head("POST", RECOMMEND, length=len(body)) + body)
                status = await read_answer(connection[0])
                break
            except (OSError, asyncio.IncompleteReadError):
                connection = None
                if fresh:
                    break
        notes.victim.append(time.perf_counter() - start)
        notes.failed += status != 200
        await asyncio.sleep(rng.expovariate(1 / PAUSE_S))


async def watch_memory(server: Server, notes: Notes) -> None:
    """Note the largest memory."""
    while True:
        usage = server.usage()
        notes.rss = max(notes.rss, usage.rss_bytes if usage else 0)
        await asyncio.sleep(0.05)


async def measure(server: Server, to: Target, seconds: float) -> Notes:
    """Measure for some seconds."""
    notes = Notes()
    tasks = [asyncio.create_task(ask(to, notes, number)) for number in range(VICTIMS)]
    tasks.append(asyncio.create_task(check_health(to, notes)))
    tasks.append(asyncio.create_task(watch_memory(server, notes)))
    await asyncio.sleep(seconds)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return notes


async def compare(names: list[str], seconds: float, folder: Path) -> dict[str, Any]:
    """Run the attacks; their figures."""
    bundle, keys = folder / "bundle", folder / "keys.json"
    write_bundle(bundle)
    attacker, victim = (auth.create(keys, name, "write") for name in ("attacker", "victim"))
    # No address is a proxy's, so that limits for each address hold.
    settings = [f"keys={keys}", "max_connections=300", "threads=1", "forwarded_allow_ips=::1"]
    tiny_model("llama-gqa", 352).save_pretrained(folder / "texts")
    byte_level_tokenizer(["Thing no. 1"], 330).save_pretrained(folder / "texts")
    settings.append(f"explainer={folder / 'texts'}")
    rows: dict[str, Any] = {}
    spawn = multiprocessing.get_context("spawn")
    async with start_server(bundle, settings) as server:
        process = server.process
        assert process is not None
        to = Target(server.host, server.port, victim, source=VICTIM)
        orders, ordered = spawn.Pipe()
        count = spawn.Value("q", 0)
        child = spawn.Process(
            target=run_attacks,
            args=(Target(server.host, server.port, attacker, count), ordered),
            daemon=True,
        )
        child.start()
        while not count.value:  # it imports
            await asyncio.sleep(0.1)
        gc.collect()
        gc.freeze()  # else a collection of what is imported here counts as slow answers
        await measure(server, to, QUIET_S)  # warm up
        quiets = [await measure(server, to, 2 * QUIET_S)]
        before = quiets[0].rss
        for name in names:
            done = count.value
            orders.send(name)
            await asyncio.sleep(0.5)
            under = await measure(server, to, seconds)
            orders.send("end")
            await asyncio.sleep(0.5)
            quiets.append(await measure(server, to, QUIET_S))
            near = Notes(victim=quiets[-1].victim + quiets[-2].victim)
            rows[name] = {
                "live_ms": round(under.live_ms),
                "victim_p99_ms": round(under.p99_ms, 1),
                "quiet_p99_ms": round(near.p99_ms, 1),
                "ratio": round(under.p99_ms / near.p99_ms, 2),
                "asked": len(under.victim),
                "failed": under.failed,
                "rss_growth_mb": round((under.rss - before) / 2**20),
                "alive": process.poll() is None,
                "done": count.value - done,
            }
            print(
                f"{name:24} live {rows[name]['live_ms']:6} ms   victim p99 "
                f"{under.p99_ms:7.1f} ms, quiet {near.p99_ms:6.1f}, ratio "
                f"{rows[name]['ratio']:5.2f}   failed {under.failed}/{len(under.victim)}   "
                f"memory {rows[name]['rss_growth_mb']:+5} MB   alive {rows[name]['alive']}   "
                f"done {count.value - done}",
                flush=True,
            )
        quiet = Notes(
            live=[s for q in quiets for s in q.live], failed=sum(q.failed for q in quiets)
        )
        print(f"quiet: live {quiet.live_ms:.0f} ms, failed {quiet.failed}", flush=True)
    return {"attacks": rows, "quiet_live_ms": round(quiet.live_ms)}


def main() -> None:
    """Run the attacks that are named, or all."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("attacks", nargs="*", help=f"of: {', '.join(ATTACKS)}")
    parser.add_argument("--seconds", type=float, default=10.0, help="of each attack")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="recsys-abuse-") as folder:
        names = options.attacks or list(ATTACKS)
        found = asyncio.run(compare(names, options.seconds, Path(folder)))
    rows = found["attacks"].values()
    worst = {
        "live_ms": max(row["live_ms"] for row in rows),
        "ratio": max(row["ratio"] for row in rows),
        "failed": sum(row["failed"] for row in rows),
        "rss_growth_mb": max(row["rss_growth_mb"] for row in rows),
        "alive": all(row["alive"] for row in rows),
    }
    print("worst: " + ", ".join(f"{name} {value}" for name, value in worst.items()))
    print(json.dumps({**found, "worst": worst, **environment()}))


if __name__ == "__main__":
    main()
