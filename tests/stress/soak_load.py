"""The load of `soak.py`: users, their requests, and what was answered in each minute."""

from __future__ import annotations

import asyncio
import itertools
import json
import pickle
import random
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, BinaryIO

import aiohttp
import numpy as np
from harness import some_item
from servers import Server
from soak_faults import BUNDLES, RECOMMEND
from soak_oracle import COMPARED

USERS = 400  # at any time
FIRST, LAST = 5, 50  # events that a user begins with, and with which another user comes instead
CLIENTS = 32  # of the closed loop
ALLOWED = (429, 503, 504)  # statuses


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

    def row(self, number: int) -> dict[str, Any]:
        """Its row of the table."""
        p50, p99 = np.percentile(self.latency_ms or [float("nan")], [50, 99]).tolist()
        return {
            "minute": number,
            "fault": self.fault,
            "requests": sum(self.statuses.values()),
            "errors": {str(s): n for s, n in sorted(self.statuses.items()) if not 200 <= s < 300},
            "without_retry_after": self.without_retry,
            "p50_ms": round(p50, 1),
            "p99_ms": round(p99, 1),
            "rss_mb": round(float(np.median(self.rss[-10:])) / 2**20, 1) if self.rss else None,
        }


class Load:
    """Requests to the server; answers and changes go to a journal for the oracle."""

    def __init__(self, server: Server, session: aiohttp.ClientSession, journal: BinaryIO) -> None:
        self.server, self.session, self.journal = server, session, journal
        self.names = (f"u{i}" for i in itertools.count())
        self.users = [User(next(self.names)) for _ in range(USERS)]
        self.gone: list[User] = []
        self.minute = Minute()
        self.reconnected = 0
        self.refused: Counter[str] = Counter()
        self.rng = random.Random(0)
        self.ids = itertools.count()
        self.bundle = BUNDLES[0]
        self.changing = False
        self.answered_meanwhile: list[tuple[Any, ...]] = []

    async def send(
        self, method: str, path: str, body: Any, due: float | None = None, *, repeated: bool = False
    ) -> tuple[int, Any]:
        """Send a request and count its answer; status 0 where there was none.

        A latency is counted for requests that have a time at which they are due. A removal whose
        answer was lost may have been made, so a repeated one that finds no such item counts as made
        (204).
        """
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
        if due is not None:
            minute.latency_ms.append(1000 * (time.perf_counter() - due))
        if status >= 400 and not (retry or "").isdigit():
            minute.without_retry += 1
        if status not in (*ALLOWED, 0) and status >= 400:
            self.refused[f"{path}: {status} {text[:300]!r}"] += 1
        return status, json.loads(text) if text else None

    async def insist(self, method: str, path: str, body: Any) -> Any:
        """Send a change until it is acknowledged; the answer."""
        status, answer = await self.send(method, path, body)
        while not 200 <= status < 300:
            await asyncio.sleep(0.5)
            status, answer = await self.send(method, path, body, repeated=True)
        return answer

    def note(self, *message: Any) -> None:
        """Write a message for the oracle."""
        pickle.dump(message, self.journal)

    async def change(self, what: str, value: Any, method: str, path: str, body: Any) -> Any:
        """Make a change of items or of the alias; the answer.

        `value` is what the oracle is told, or makes that of the answer. Answers to requests of the
        meantime may be those after the change, so the oracle gets them behind it.
        """
        self.changing = True
        answer = await self.insist(method, path, body)
        self.note("change", what, value(answer) if callable(value) else value, time.monotonic())
        self.changing = False
        for message in self.answered_meanwhile:
            self.note(*message)
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
        await self.insist("POST", "/v1/events", {"events": events})
        batch[1] = time.monotonic()
        user.busy = False

    async def recommend(self, due: float) -> None:
        """Ask for a recommendation, and keep the answer for the oracle."""
        rng = self.rng
        body: dict[str, Any] = {"k": rng.choice((5, 10, 20))}
        user = None
        if rng.random() < 0.5:
            user = rng.choice(self.users)
            body["user"] = user.name
        else:
            body["history"] = self.some_items(rng.randint(1, 25))
        if rng.random() < 0.2:
            low = rng.randrange(80)
            body["filter"] = {"must": [{"key": "price", "range": {"gte": low, "lt": low + 20}}]}
        if rng.random() < 0.2:
            body["exclude_items"] = self.some_items(20)
        sent = time.monotonic()
        status, answer = await self.send("POST", RECOMMEND, body, due)
        if status == 200:
            histories = [body["history"]] if user is None else user.histories(sent)
            compared = {name: answer.get(name) for name in (*COMPARED, "model")}
            message = ("answer", body, histories, compared, sent)
            if self.changing:
                self.answered_meanwhile.append(message)
            else:
                self.note(*message)

    async def request(self, due: float) -> None:
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
            while (now := time.perf_counter()) < end:
                await self.request(now)

        await asyncio.gather(*(repeat() for _ in range(CLIENTS)))
        return (self.minute.statuses[200] - before) / seconds

    async def open(self, rate: float, seconds: float) -> None:
        """Send requests when they are due, a Poisson process, whatever becomes of the others."""
        start, at, waits = time.perf_counter(), 0.0, random.Random(1)
        async with asyncio.TaskGroup() as tasks:
            while (at := at + waits.expovariate(rate)) < seconds:
                if (wait := start + at - time.perf_counter()) > 0:
                    await asyncio.sleep(wait)
                tasks.create_task(self.request(start + at))
