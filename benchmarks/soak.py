"""Load for half an hour with a fault every minute: is an event lost, or an answer wrong?

    OMP_NUM_THREADS=1 python benchmarks/soak.py --minutes 30
    OMP_NUM_THREADS=1 python benchmarks/soak.py --minutes 30 --store sqlite

A server is started on one of two small bundles with the same items and different random weights,
with a store on a small tmpfs and a cache in Redis. Recommendations by user and by history, filters
among them, and events arrive at random times, at 70 % of the rate that a closed loop of 32 clients
reaches before. Users come and go, so that histories have the same lengths at any time. A fault is
injected at the start of each minute, in rotation:

- store locked: another connection holds a lock for writing (PostgreSQL: for any use);
- database killed: all processes of PostgreSQL by SIGKILL, and started again after 5 s;
- Redis frozen: by SIGSTOP;
- disk full: the file system of the store has no byte left (where no tmpfs may be mounted, with
  SQLite: the server may not write to files, by RLIMIT_FSIZE);
- alias swap: the alias `champion` gets the other bundle;
- upserts: items are added, replaced and removed without a pause;
- slow clients: 100 connections from another address send a byte of a body now and then.

Whatever is not acknowledged is sent again until it is. Each answer is compared, bit for bit, with
that of the library alone, in another process: the same bundle, history and items. If an event or a
change was under way during the request, the answer may be that of before or of after. When the
service has stopped, its store must have every acknowledged event, once and in order. Memory is the
median of the last ten seconds of a minute; its verdict compares the last minute with the one after
each fault came once. The last line is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib.util
import itertools
import json
import multiprocessing
import os
import random
import resource
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import numpy as np
import torch
from abuse import ITEMS, write_bundle

from recsys.benchmark.environment import environment
from recsys.live import Epoch
from recsys.recommender import Recommender
from recsys.requests import RecommendResult
from recsys.serving import answers
from recsys.serving.benchmark.measure import draw_arrivals
from recsys.serving.benchmark.process import Server, start_server
from recsys.serving.catalog_changes import _apply, item_of
from recsys.serving.schemas.common import MAX_HISTORY
from recsys.serving.schemas.recommendations import RecommendationsRequest
from recsys.serving.stores import open_store
from recsys.serving.stores.records import TypedHistory

USERS = 400  # at any time
FIRST, LAST = 5, 50  # events that a user begins with, and with which another user comes instead
BUNDLES = ("a", "b")
SHARE, CLIENTS, PEAK_S = 0.7, 32, 10.0
FAULT_S, DOWN_S = 8.0, 5.0
TOGETHER = 32  # answers that the oracle computes at once
ALLOWED = (429, 503, 504)
DISK_MB = 400
COMPARED = ("items", "certificate", "history_items", "unknown_items", "eligible_items")
RECOMMEND, EVENTS, UPSERT = "/v1/recommendations", "/v1/events", "/v1/items"
SERVERS = Path(__file__).parents[1] / "tests" / "serving" / "stores" / "conftest.py"


# The library alone, in a process of its own


class Alone(Recommender):
    """A recommender that answers over an earlier epoch, if one is set."""

    pinned: Epoch | None = None

    @property
    def epoch(self) -> Epoch:
        """The epoch of the next answer."""
        return self.pinned or super().epoch


@dataclass
class State:
    """What the service may answer from between two times."""

    bundle: str
    recommender: Alone
    epoch: Epoch
    first: float
    last: float = float("inf")


class Oracle:
    """Answers with the library alone, in every state that was current during a request."""

    def __init__(self, bundles: Path) -> None:
        self.bundles = bundles
        self.records: dict[str, dict[str, Any]] = {}  # the journal
        self.states: list[State] = []
        self.counts: Counter[str] = Counter()
        self.wrong: list[str] = []
        self._put(BUNDLES[0], 0.0, 0.0)

    def change(self, what: str, value: Any, begun: float, done: float) -> None:
        """A change was sent, first at one time, and acknowledged at the other."""
        if what == "swap":
            self._put(value, begun, done)
            return
        now = self.states[-1]
        now.recommender.pinned = None
        placed = {}
        for record in value:
            placed[record["item_id"]] = record.get("semantic_id")
            self.records.pop(record["item_id"], None)
            self.records[record["item_id"]] = {**record, "version": _model(now).version}
        # Their codes are computed here, too, so these records are of no version.
        _apply(_model(now), [{**record, "version": ""} for record in value])
        catalog = now.recommender.catalog
        for name, codes in placed.items():
            own = item_of(catalog, catalog.find(name)).semantic_id if codes else None
            if own != codes:
                self._note(f"{name} was placed at {codes} and not at {own}")
        self._add(now.bundle, now.recommender, begun, done)

    def check(self, many: list[tuple[dict[str, Any], list[list[str]], Any, float]]) -> None:
        """Compare answers: the body, histories, answer and time of sending of each.

        They are computed together, from the latest state and history. Where that is not the answer,
        each other state and history of the time between the request and its answer is tried.
        """
        self.counts["answers"] += len(many)
        likely: dict[int, list[Any]] = {}
        for one in many:
            _, _, found, sent = one
            states = [
                s for s in self.states if s.last >= sent and s.bundle == found["model"]["name"]
            ]
            if states:
                likely.setdefault(id(states[-1]), []).append((states, one))
            else:
                self._note(f"the bundle of {found} was not current")
        for group in likely.values():
            wires = [(RecommendationsRequest.model_validate(body), all_of[-1])
                     for _, (body, all_of, _, _) in group]  # fmt: skip
            expected = self._answers(group[0][0][-1], wires)
            for (states, (body, histories, found, _)), (wire, _), first in zip(
                group, wires, expected, strict=True
            ):
                others = (
                    self._answers(state, [(wire, history)])[0]
                    for state in reversed(states)
                    for history in histories
                )
                if not any(same(answer, found) for answer in itertools.chain([first], others)):
                    differs = [name for name in COMPARED if first[name] != found[name]]
                    shown = {name: (found[name], first[name]) for name in differs}
                    self._note(f"{json.dumps(body)} ({found['model']}): {shown}")

    def _answers(self, state: State, wires: list[tuple[Any, list[str]]]) -> list[Any]:
        state.recommender.pinned = state.epoch
        requests = []
        for wire, history in wires:
            types = [] if wire.history is not None else ["view"] * len(history)
            latest = TypedHistory(history, types).latest(MAX_HISTORY)
            requests.append(answers.to_request(wire, latest, state.recommender))
        results: list[RecommendResult] = state.recommender.recommend_batch(requests)
        model: Any = SimpleNamespace(ref=lambda alias, number: None)
        return [
            json.loads(
                answers.response(wire, request, result, model, None).model_dump_json(
                    exclude_unset=True, include=set(COMPARED)
                )
            )
            for (wire, _), request, result in zip(wires, requests, results, strict=True)
        ]

    def _put(self, bundle: str, begun: float, done: float) -> None:
        recommender = Alone.load(self.bundles / bundle)
        state = State(bundle, recommender, recommender.epoch, begun)
        assert isinstance(recommender, Alone)
        _apply(_model(state), list(self.records.values()))  # type: ignore[arg-type]
        self._add(bundle, recommender, begun, done)

    def _add(self, bundle: str, recommender: Alone, begun: float, done: float) -> None:
        recommender.pinned = None
        if self.states:
            self.states[-1].last = done
        self.states.append(State(bundle, recommender, recommender.epoch, begun))
        self.states = [state for state in self.states if state.last > done - 60]

    def _note(self, text: str) -> None:
        self.counts["wrong"] += 1
        if len(self.wrong) < 10:
            self.wrong.append(text[:3000])


def same(answer: Any, found: Any) -> bool:
    """Whether an answer is that of the service, bit for bit."""
    return all(answer[name] == found[name] for name in COMPARED)


def _model(state: State) -> Any:
    """What `_apply` needs of a model."""
    recommender = state.recommender
    version = recommender.manifest.digest
    return SimpleNamespace(name=state.bundle, version=version, recommender=recommender)


def run_oracle(bundles: Path, messages: Any, verdict: Any, done: Any) -> None:
    """The oracle's process: changes and answers in the order of their arrival, until None."""
    os.nice(19)
    torch.set_num_threads(1)
    oracle = Oracle(bundles)
    waiting: list[Any] = []
    while True:
        message = messages.get()
        if message is not None and message[0] == "answer":
            waiting.append(message[1:])
            if len(waiting) < TOGETHER:
                continue
        oracle.check(waiting)
        done.value += len(waiting)
        waiting = []
        if message is None:
            break
        if message[0] == "change":
            oracle.change(*message[1:])
            done.value += 1
    verdict.send((dict(oracle.counts), oracle.wrong))


# The load


@dataclass
class User:
    """Batches of events of a user: when each was first sent, and acknowledged, and its items."""

    name: str
    batches: list[list[Any]] = field(default_factory=list)
    busy: bool = False

    @property
    def events(self) -> int:
        """Number of events."""
        return sum(len(items) for _, _, items in self.batches)

    def histories(self, sent: float) -> list[list[str]]:
        """The histories that the store may have had since a time."""
        known = sum(done <= sent for _, done, _ in self.batches)
        items = [items for _, _, items in self.batches]
        return [list(itertools.chain(*items[:n])) for n in range(known, len(items) + 1)]


@dataclass
class Minute:
    """What happened in one minute."""

    fault: str = "-"
    statuses: Counter[int] = field(default_factory=Counter)
    latency_ms: list[float] = field(default_factory=list)
    without_retry: int = 0
    rss: list[int] = field(default_factory=list)
    late_s: float = 0.0

    def row(self, number: int) -> dict[str, Any]:
        """Its row of the table."""
        errors = {str(s): n for s, n in sorted(self.statuses.items()) if not 200 <= s < 300}
        p50, p99 = np.percentile(self.latency_ms or [float("nan")], [50, 99]).tolist()
        return {
            "minute": number,
            "fault": self.fault,
            "requests": sum(self.statuses.values()),
            "errors": errors,
            "without_retry_after": self.without_retry,
            "p50_ms": round(p50, 1),
            "p99_ms": round(p99, 1),
            "load_late_ms": round(1000 * self.late_s),
            "rss_mb": round(float(np.median(self.rss[-10:])) / 2**20, 1) if self.rss else None,
        }


class Load:
    """Requests to the server, and what was answered."""

    def __init__(self, server: Server, session: aiohttp.ClientSession, messages: Any) -> None:
        self.server, self.session, self.messages = server, session, messages
        self.names = (f"u{i}" for i in itertools.count())
        self.users = [User(next(self.names)) for _ in range(USERS)]
        self.gone: list[User] = []
        self.minute = Minute()
        self.sent = 0  # messages to the oracle
        self.reconnected = 0
        self.refused: Counter[str] = Counter()
        self.rng = random.Random(0)
        self.tasks: set[asyncio.Task[None]] = set()
        self.ids = itertools.count()
        self.bundle = BUNDLES[0]
        self.changing = False
        self.answered_meanwhile: list[tuple[Any, ...]] = []

    async def send(
        self,
        method: str,
        path: str,
        body: Any,
        due: float | None = None,
        *,
        timed: bool = False,
        repeated: bool = False,
    ) -> tuple[int, Any]:
        """Send a request and count its answer; status 0 where there was none.

        A removal whose answer was lost may have been made, so a repeated one that finds no such
        item counts as made (204).
        """
        due = time.perf_counter() if due is None else due
        status, retry, text = 0, None, b""
        for again in (False, True):
            try:
                url = self.server.url + path
                async with self.session.request(method, url, json=body) as answer:
                    status, text = answer.status, await answer.read()
                    retry = answer.headers.get("Retry-After")
                if status == 404 and method == "DELETE" and (again or repeated):
                    status = 204
                break
            except (aiohttp.ClientError, TimeoutError) as error:  # it may just have been closed
                self.reconnected += 1
                if again or isinstance(error, TimeoutError):
                    self.refused[f"{path}: {type(error).__name__} {error}"] += 1
                    break
        minute = self.minute
        minute.statuses[status] += 1
        if timed:
            minute.latency_ms.append(1000 * (time.perf_counter() - due))
        if status >= 400 and not (retry or "").isdigit():
            minute.without_retry += 1
        if status not in (*ALLOWED, 0) and status >= 400:
            self.refused[f"{path}: {status} {text[:300]!r}"] += 1
        return status, json.loads(text) if text else None

    async def insist(self, method: str, path: str, body: Any) -> tuple[float, float, Any]:
        """Send a change until it is acknowledged: when sent, when acknowledged, the answer."""
        begun = time.monotonic()
        for attempt in itertools.count():
            status, answer = await self.send(method, path, body, repeated=attempt > 0)
            if 200 <= status < 300:
                return begun, time.monotonic(), answer
            await asyncio.sleep(0.5)
        raise AssertionError

    def tell(self, *message: Any) -> None:
        """Send the oracle a message."""
        self.sent += 1
        self.messages.put(message)

    async def change(self, what: str, value: Any, method: str, path: str, body: Any) -> Any:
        """Make a change of items or of the alias, and tell the oracle; the answer.

        `value` is what the oracle is told, or makes that of the answer.
        """
        self.changing = True
        begun, done, answer = await self.insist(method, path, body)
        self.tell("change", what, value(answer) if callable(value) else value, begun, done)
        self.changing = False
        for message in self.answered_meanwhile:
            self.tell(*message)
        self.answered_meanwhile.clear()
        return answer

    async def record(self, user: User, items: list[str]) -> None:
        """Store events of a user, one batch at a time."""
        events = [
            {"event_id": f"e{next(self.ids)}", "user": user.name, "item": item} for item in items
        ]
        batch: list[Any] = [time.monotonic(), float("inf"), items]
        user.busy = True
        user.batches.append(batch)
        await self.insist("POST", EVENTS, {"events": events})
        batch[1] = time.monotonic()
        user.busy = False

    async def recommend(self, due: float | None = None) -> None:
        """Ask for a recommendation, and let the oracle check the answer."""
        rng = self.rng
        body: dict[str, Any] = {"k": rng.choice((5, 10, 20))}
        user = None
        if rng.random() < 0.5:
            user = rng.choice(self.users)
            body["user"] = user.name
        else:
            body["history"] = [some_item(rng) for _ in range(rng.randint(1, 25))]
        if rng.random() < 0.2:
            low = rng.randrange(80)
            body["filter"] = {"must": [{"key": "price", "range": {"gte": low, "lt": low + 20}}]}
        if rng.random() < 0.2:
            body["exclude_items"] = [some_item(rng) for _ in range(20)]
        sent = time.monotonic()
        status, answer = await self.send("POST", RECOMMEND, body, due, timed=True)
        if status == 200:
            histories = [body["history"]] if user is None else user.histories(sent)
            found = {name: answer.get(name) for name in (*COMPARED, "model")}
            message = ("answer", body, histories, found, sent)
            if self.changing:  # the answer may be that after the change
                self.answered_meanwhile.append(message)
            else:
                self.tell(*message)

    async def one(self, due: float | None = None) -> None:
        """One request: mostly for a recommendation."""
        place = self.rng.randrange(USERS)
        user = self.users[place]
        if self.rng.random() >= 0.1 or user.busy:
            await self.recommend(due)
        elif user.events < LAST:
            await self.record(user, self.some_items(self.rng.randint(1, 3)))
        else:
            user.busy = True  # for good
            self.gone.append(user)
            new = User(next(self.names))
            await self.record(new, self.some_items(FIRST))
            self.users[place] = new

    def some_items(self, count: int) -> list[str]:
        """Items for events."""
        return [some_item(self.rng) for _ in range(count)]

    async def peak(self, seconds: float) -> float:
        """Answers a second to a closed loop."""
        end, before = time.perf_counter() + seconds, self.minute.statuses[200]

        async def repeat() -> None:
            while time.perf_counter() < end:
                await self.one()

        start = time.perf_counter()
        await asyncio.gather(*(repeat() for _ in range(CLIENTS)))
        return (self.minute.statuses[200] - before) / (time.perf_counter() - start)

    async def open(self, rate: float, seconds: float) -> None:
        """Send requests when they are due, whatever becomes of the others."""
        start = time.perf_counter()
        for at in draw_arrivals(rate, seconds, 0):
            if (wait := start + at - time.perf_counter()) > 0:
                await asyncio.sleep(wait)
            late = time.perf_counter() - start - at
            self.minute.late_s = max(self.minute.late_s, late)  # this process has no time
            task = asyncio.create_task(self.one(start + at))
            self.tasks.add(task)
            task.add_done_callback(self.tasks.discard)
        await asyncio.gather(*self.tasks)


def some_item(rng: random.Random) -> str:
    """An item of the bundles."""
    return f"B{rng.randrange(ITEMS):04d}"


# Faults


@dataclass
class Place:
    """Where the store is, and the servers that the service uses."""

    store: str
    folder: Path
    mounted: bool
    postgres: Any = None
    redis: Any = None


Fault = Callable[[Load, Place], Awaitable[None]]


async def lock_store(load: Load, place: Place) -> None:
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


async def kill_database(load: Load, place: Place) -> None:
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


async def freeze_redis(load: Load, place: Place) -> None:
    """Stop Redis without closing its connections."""
    place.redis.process.send_signal(signal.SIGSTOP)
    await asyncio.sleep(FAULT_S)
    place.redis.process.send_signal(signal.SIGCONT)


async def fill_disk(load: Load, place: Place) -> None:
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


async def swap(load: Load, place: Place) -> None:
    """Give the alias the other bundle."""
    load.bundle = BUNDLES[1 - BUNDLES.index(load.bundle)]
    await load.change("swap", load.bundle, "PUT", "/v1/aliases/champion", {"bundle": load.bundle})


async def upsert(load: Load, place: Place) -> None:
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


async def send_slowly(load: Load, place: Place) -> None:
    """Bodies at a few bytes a second, from another address."""

    async def one() -> None:
        while True:
            with contextlib.suppress(OSError):
                reader, writer = await asyncio.open_connection(
                    load.server.host, load.server.port, local_addr=("127.0.0.2", 0)
                )
                writer.write(
                    f"POST {RECOMMEND} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 900000\r\n"
                    "Content-Type: application/json\r\n\r\n".encode()
                    + b" " * 100_000
                )
                while not reader.at_eof():
                    writer.write(b" ")
                    await writer.drain()
                    await asyncio.sleep(0.2)
            await asyncio.sleep(0.05)

    slow = [asyncio.create_task(one()) for _ in range(100)]
    await asyncio.sleep(2 * FAULT_S)
    for task in slow:
        task.cancel()
    await asyncio.gather(*slow, return_exceptions=True)


def faults(place: Place) -> dict[str, Fault]:
    """The faults that this machine and this store can have."""
    found: dict[str, Fault] = {"store locked": lock_store}
    if place.postgres is not None:
        found["database killed"] = kill_database
    if place.redis is not None:
        found["Redis frozen"] = freeze_redis
    if place.mounted or place.postgres is None:
        found["disk full"] = fill_disk
    return {**found, "alias swap": swap, "upserts": upsert, "slow clients": send_slowly}


# The soak


async def soak(options: argparse.Namespace, place: Place, bundles: Path) -> dict[str, Any]:
    """Run it; the verdicts."""
    spawn = multiprocessing.get_context("spawn")
    messages, (verdict, told), done = spawn.Queue(), spawn.Pipe(duplex=False), spawn.Value("q", 0)
    oracle = spawn.Process(
        target=run_oracle, args=(bundles, messages, told, done), daemon=True, name="oracle"
    )
    oracle.start()
    own = [f"store={place.store}", "threads=1", "max_connections=4000"]
    if place.redis is not None:
        own.append(f"history_cache={place.redis.url}")
    minutes: list[dict[str, Any]] = []
    async with start_server(bundles / BUNDLES[0], own) as server:
        limits = aiohttp.TCPConnector(limit=0, keepalive_timeout=3)
        async with aiohttp.ClientSession(
            connector=limits, timeout=aiohttp.ClientTimeout(total=60)
        ) as session:
            load = Load(server, session, messages)
            seeds = [load.some_items(load.rng.randint(FIRST, LAST)) for _ in load.users]
            await asyncio.gather(*map(load.record, load.users, seeds))
            await load.peak(PEAK_S / 2)  # warm up
            peak = await load.peak(PEAK_S)
            rate = options.share * peak
            print(f"peak {peak:.0f}/s, load {rate:.0f}/s, {describe(place)}", flush=True)
            kinds = faults(place)
            count = round(60 * options.minutes / options.every)
            loading = asyncio.create_task(load.open(rate, count * options.every))
            await measure(load, place, kinds, minutes, count, options.every)
            await loading
        oracle_behind = load.sent - done.value
    print(f"stopped; the oracle has {oracle_behind} answers left", flush=True)
    messages.put(None)
    counts, wrong = await asyncio.to_thread(verdict.recv)
    oracle.join()
    if place.postgres is not None:
        await asyncio.to_thread(start_again, place)
    lost = await find_lost(place, load.gone + load.users)
    return summarise(load, minutes, counts, wrong, lost, len(kinds), peak)


async def measure(
    load: Load,
    place: Place,
    kinds: dict[str, Fault],
    minutes: list[dict[str, Any]],
    count: int,
    every: float,
) -> None:
    """Inject the faults and print a row each minute; the first and the last have none."""
    rotation: Iterator[tuple[str, Fault]] = itertools.cycle(kinds.items())
    start = time.monotonic()
    for number in range(count):
        load.minute = minute = Minute()
        fault: asyncio.Task[None] | None = None
        if 0 < number < count - 1:
            minute.fault, inject = next(rotation)
            fault = asyncio.create_task(inject(load, place))  # type: ignore[arg-type]
        while (left := start + (number + 1) * every - time.monotonic()) > 0:
            usage = load.server.usage()
            if usage is not None:
                minute.rss.append(usage.rss_bytes)
            await asyncio.sleep(min(1.0, left))
        if fault is not None:
            await fault
        minutes.append(minute.row(number))
        print(json.dumps(minutes[-1]), flush=True)


async def find_lost(place: Place, users: list[User]) -> dict[str, int]:
    """Compare the store with what was acknowledged."""
    store = open_store(place.store)
    bad: Counter[str] = Counter(lost=0, doubled=0, out_of_order=0, events=0)
    try:
        stored = Counter(event.event_id for event in store.export())
        bad["doubled"] = sum(count > 1 for count in stored.values())
        for user in users:
            expected = user.histories(float("inf"))[0]
            found = await store.history(user.name, len(expected) + 100) or []
            bad["events"] += len(expected)
            bad["lost"] += sum((Counter(expected) - Counter(found)).values())
            bad["out_of_order"] += sorted(found) == sorted(expected) and found != expected
    finally:
        store.close()
    return dict(bad)


def summarise(
    load: Load,
    minutes: list[dict[str, Any]],
    counts: dict[str, int],
    wrong: list[str],
    lost: dict[str, int],
    kinds: int,
    peak: float,
) -> dict[str, Any]:
    """The verdicts, with what they are made from."""
    for text in wrong:
        print(f"WRONG: {text}")
    for text, times in load.refused.most_common(10):
        print(f"NOT ALLOWED, {times} times: {text}")
    statuses: Counter[str] = Counter()
    for minute in minutes:
        statuses.update(minute["errors"])
    first = minutes[min(kinds + 1, len(minutes) - 1)]
    last = minutes[-1]
    change = last["rss_mb"] / first["rss_mb"] - 1
    others = {s: n for s, n in statuses.items() if int(s) not in ALLOWED}
    without = sum(minute["without_retry_after"] for minute in minutes)
    found = {
        "peak": round(peak, 1),
        "requests": sum(minute["requests"] for minute in minutes),
        "answers_compared": counts.get("answers", 0),
        "wrong_answers": counts.get("wrong", 0),
        **{name: lost[name] for name in ("events", "lost", "doubled", "out_of_order")},
        "errors": dict(statuses),
        "errors_not_allowed": sum(others.values()),
        "errors_without_retry_after": without,
        "reconnected": load.reconnected,
        "rss_mb": [minutes[1]["rss_mb"], first["rss_mb"], last["rss_mb"]],
        "rss_change": round(change, 4),
    }
    verdicts = {
        "no_event_lost": not (lost["lost"] or lost["doubled"] or lost["out_of_order"]),
        "no_answer_wrong": not counts.get("wrong"),
        "errors_allowed": not others and not without,
        "memory_flat": abs(change) <= 0.03,
    }
    return {**found, "verdicts": verdicts, "minutes": minutes}


def describe(place: Place) -> str:
    """The store, in words."""
    kind = "SQLite" if place.postgres is None else "PostgreSQL"
    disk = "a tmpfs" if place.mounted else "an ordinary disk"
    return f"{kind} on {disk}, {'Redis' if place.redis is not None else 'no Redis'}"


@contextlib.contextmanager
def placed(kind: str, folder: Path) -> Iterator[Place]:
    """A store of this kind on a small file system, and Redis if there is one."""
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
        if shutil.which("redis-server") is not None:
            place.redis = servers.Redis(folder)
            servers.start_somewhere(place.redis)
            stack.callback(place.redis.stop)
        yield place


def main() -> int:
    """Run it; 1 if a verdict is bad."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--every", type=float, default=60.0, help="seconds of a minute, for trials")
    parser.add_argument("--share", type=float, default=SHARE, help="of the peak")
    parser.add_argument("--store", choices=("postgres", "sqlite"), default="postgres")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="soak-") as name:
        folder = Path(name)
        folder.chmod(0o711)  # PostgreSQL runs as a user of its own
        (folder / "bundles").mkdir()
        for seed, name in enumerate(BUNDLES):  # of the same items; only their weights differ
            write_bundle(folder / "bundles" / name, seed)
        with placed(options.store, folder) as place:
            found = asyncio.run(soak(options, place, folder / "bundles"))
    print(json.dumps({"store": options.store, **found, **environment()}))
    return int(not all(found["verdicts"].values()))


if __name__ == "__main__":
    sys.exit(main())
