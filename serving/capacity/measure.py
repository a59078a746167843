"""Measure: real replicas under an open load, and what their answers cost.

The load is that of the simulation (`recsys.serving.capacity.traffic`), sent over HTTP. Each answer
reports where its time went; the client records when it arrived.
"""

from __future__ import annotations

import asyncio
import gc
import json
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from recsys.errors import RecsysError
from recsys.serving.benchmark.client import Client, ConnectionLostError, Request
from recsys.serving.benchmark.process import Server, started
from recsys.serving.benchmark.workload import RECOMMEND, Workload
from recsys.serving.capacity.costs import Costs, Level
from recsys.serving.capacity.traffic import NEW_USERS, Traffic, owners

LONGEST = 20  # items of a history
# Open loads, as shares of what a replica computes one by one; closed ones, by clients, for the
# sizes that open loads hardly reach, which count as a load of their own.
LOADS, CLOSED, CROWDED = (0.25, 0.5, 0.8), (2, 4, 8, 16, 32, 64), 1.5
USERS, NEW = 200, 0.2


@dataclass(frozen=True)
class Seen:
    """Answers that came back, in the order in which they came.

    Attributes:
        replica: (n,) who gave it.
        latency_ms: (n,) since it was due.
        queue_ms, batch_ms: (n,) in the batcher, and in its batch.
        size: (n,) requests of its batch.
        cold: (n,) nobody had asked with this history before.
        seconds: that it all took.
        bad: requests that were not answered.
        cpu_s: processor seconds of the servers.
        generator_s: processor seconds of the load.
    """

    replica: NDArray[np.int64]
    latency_ms: NDArray[np.float64]
    queue_ms: NDArray[np.float64]
    batch_ms: NDArray[np.float64]
    size: NDArray[np.int64]
    cold: NDArray[np.bool_]
    seconds: float
    bad: int
    cpu_s: float
    generator_s: float

    def __len__(self) -> int:
        return len(self.size)

    def percentile(self, q: float) -> float:
        """Of the latency, in ms."""
        return float(np.percentile(self.latency_ms, q))

    @classmethod
    def join(cls, parts: Sequence[Seen]) -> Seen:
        """Several loads as one, their replicas kept apart."""
        columns: dict[str, Any] = {
            name: np.concatenate([getattr(part, name) for part in parts])
            for name in ("replica", "latency_ms", "queue_ms", "batch_ms", "size", "cold")
        }
        for name in ("seconds", "bad", "cpu_s", "generator_s"):
            columns[name] = sum(getattr(part, name) for part in parts)
        return cls(**columns)

    def cold_in_batch(self) -> NDArray[np.int64]:
        """(n,) cold requests of each one's batch; -1 where it is not clear who was in it.

        Answers of a batch are sent one behind the other.
        """
        found = np.full(len(self), -1, np.int64)
        for replica in np.unique(self.replica):
            (mine,) = (self.replica == replica).nonzero()
            place = 0
            while place < len(mine):
                size = int(self.size[mine[place]])
                rows = mine[place : place + size]
                alike = (self.size[rows] == size) & (self.batch_ms[rows] == self.batch_ms[rows[0]])
                if len(rows) == size and alike.all():
                    found[rows] = self.cold[rows].sum()
                    place += size
                else:
                    place += 1
        return found


@asynccontextmanager
async def replicas(
    bundle: Path, count: int, settings: Sequence[str] = ()
) -> AsyncIterator[list[Server]]:
    """So many servers of a bundle, one thread each, on free ports of this machine."""
    told = ["threads=1", *settings]
    async with AsyncExitStack() as stack:
        yield [await stack.enter_async_context(started(bundle, told)) for _ in range(count)]


class Crowd:
    """People who ask: those who come back with a history of theirs, and strangers."""

    def __init__(
        self, servers: Sequence[Server], bundle: Path, users: int, *, k: int, seed: int
    ) -> None:
        """Talk to `servers` about the items of `bundle`, as one of `users` people or as anybody."""
        self._servers, self._k = servers, k
        self._clients = [Client(server.host, server.port) for server in servers]
        self._items = np.array(Workload(bundle).item_ids)
        self._rng = np.random.default_rng(seed)
        self._known = [self._request() for _ in range(users)]

    def close(self) -> None:
        """Hang up."""
        for client in self._clients:
            client.close()

    async def meet(self) -> None:
        """Each of the known users asks once, so that their histories are kept."""
        whose = owners(np.arange(len(self._known)), len(self._clients))
        for request, owner in zip(self._known, whose.tolist(), strict=True):
            reply = await self._clients[owner].send(request)
            if reply.status != 200:
                raise RecsysError(f"a replica answers {reply.status}: {reply.body[:300]!r}")

    async def ask(self, traffic: Traffic, *, seed: int) -> Seen:
        """An open load: requests when they are due, each to the replica of its user."""
        rng = np.random.default_rng(seed)
        due, users = traffic.arrivals(rng), traffic.askers(rng)
        where = owners(users, len(self._clients)).tolist()
        cold = users >= NEW_USERS
        requests = [
            self._request() if new else self._known[user]
            for new, user in zip(cold.tolist(), users.tolist(), strict=True)
        ]
        got: list[tuple[int, float, int, bytes]] = []

        async def one(number: int) -> None:
            at = start + float(due[number])
            try:
                reply = await self._clients[where[number]].send(requests[number])
            except (OSError, ConnectionLostError):
                return
            got.append((number, time.perf_counter() - at, reply.status, reply.body))

        async def all_of_them() -> None:
            tasks = set()
            for number, at in enumerate(due.tolist()):
                if (wait := start + at - time.perf_counter()) > 0:
                    await asyncio.sleep(wait)
                task = asyncio.create_task(one(number))
                tasks.add(task)
                task.add_done_callback(tasks.discard)
            await asyncio.gather(*tasks)

        await self._connect(16)
        used = self._cpu_s()
        gc.collect()
        gc.disable()  # or it would be measured
        try:
            start, own = time.perf_counter(), time.process_time()
            await all_of_them()
            seconds, own = time.perf_counter() - start, time.process_time() - own
        finally:
            gc.enable()
        return self._seen(got, len(due), cold, where, seconds, self._cpu_s() - used, own)

    async def crowd(self, clients: int, *, seconds: float) -> Seen:
        """A closed load: so many clients of each replica ask as soon as they are answered."""
        got: list[tuple[int, float, int, bytes]] = []
        where: list[int] = []
        mine = owners(np.arange(len(self._known)), len(self._clients))

        async def one(replica: int, first: int) -> None:
            (users,) = (mine == replica).nonzero()
            at = first
            while time.perf_counter() < end:
                began = time.perf_counter()
                request = self._known[users[at % len(users)]]
                reply = await self._clients[replica].send(request)
                got.append((len(where), time.perf_counter() - began, reply.status, reply.body))
                where.append(replica)
                at += clients

        await self._connect(clients)
        used, own, begin = self._cpu_s(), time.process_time(), time.perf_counter()
        end = begin + seconds
        count = len(self._clients)
        await asyncio.gather(*(one(r, c) for r in range(count) for c in range(clients)))
        seconds, own = time.perf_counter() - begin, time.process_time() - own
        cold = np.zeros(len(where), bool)
        return self._seen(got, len(got), cold, where, seconds, self._cpu_s() - used, own)

    def _seen(
        self,
        got: Sequence[tuple[int, float, int, bytes]],
        asked: int,
        cold: NDArray[np.bool_],
        where: Sequence[int],
        seconds: float,
        cpu_s: float,
        generator_s: float,
    ) -> Seen:
        rows = []
        for number, latency, status, body in got:
            if status != 200:
                continue
            told = json.loads(body)["timing"]
            rows.append(
                (
                    where[number], latency * 1e3, told["queue_ms"], told["compute_ms"],
                    told["batch_size"], bool(cold[number]),
                )
            )  # fmt: skip
        if not rows:
            raise RecsysError("no request was answered")
        replica, latency_ms, queue, batch, size, new = map(np.array, zip(*rows, strict=True))
        bad = asked - len(rows)
        return Seen(replica, latency_ms, queue, batch, size, new, seconds, bad, cpu_s, generator_s)

    def _request(self) -> Request:
        items = self._rng.choice(self._items, self._rng.integers(1, LONGEST + 1))
        body = {"history": items.tolist(), "k": self._k, "include": ["timing"]}
        return Request.post(RECOMMEND, body)

    def _cpu_s(self) -> float:
        usages = [server.usage() for server in self._servers]
        return sum(usage.cpu_s for usage in usages if usage is not None)

    async def _connect(self, count: int) -> None:
        for client in self._clients:
            await client.connect(count)


def cold_ms(parts: Sequence[Seen]) -> float:
    """What a history that was not kept adds to its batch, of requests that were alone in theirs.

    Of both kinds the slowest tenth is left out, so that a few interruptions do not decide.
    """
    differences, weights = [], []
    for seen in parts:
        alone = seen.size == 1
        kinds = [np.sort(seen.batch_ms[alone & (seen.cold == new)]) for new in (True, False)]
        if min(map(len, kinds)) < 10:
            continue
        means = [values[: len(values) * 9 // 10].mean() for values in kinds]
        differences.append(means[0] - means[1])
        weights.append(min(map(len, kinds)))
    return max(0.0, float(np.average(differences, weights=weights))) if weights else 0.0


def level(rate: float, seen: Seen, cold: float) -> Level:
    """Measured requests as costs.

    Args:
        rate: requests a second of each replica.
        seen: of them all.
        cold: what a cold request adds to its batch, ms.
    """
    colds = seen.cold_in_batch()
    kept = colds >= 0
    batch = np.maximum(seen.batch_ms - cold * colds, 0.1 * seen.batch_ms)
    other = seen.latency_ms - seen.queue_ms - seen.batch_ms
    return Level(rate, seen.size[kept], batch[kept], other[kept])


def costs_of(parts: Sequence[tuple[float, Seen]], about: dict[str, object]) -> Costs:
    """A cost model of loads by rate a replica, in any order; those of one rate count together."""
    cold = cold_ms([seen for _, seen in parts])
    rates = sorted({rate for rate, _ in parts})
    levels = [
        level(rate, Seen.join([seen for other, seen in parts if other == rate]), cold)
        for rate in rates
    ]
    return Costs(tuple(levels), cold, about)


async def measure_one(
    bundle: Path, *, k: int = 10, seconds: float, settings: Sequence[str] = (), seed: int = 0
) -> Costs:
    """The cost model of one replica that has the machine to itself and the load.

    Open loads at several rates, a fifth of the requests with new histories, and closed ones for the
    sizes of batches that open loads hardly reach.

    Args:
        bundle: what it serves.
        k: items asked for.
        seconds: of each load.
        settings: `key=value` of the section `serve`.
        seed: of the requests.
    """
    async with replicas(bundle, 1, settings) as servers:
        crowd = Crowd(servers, bundle, USERS, k=k, seed=seed)
        await crowd.meet()
        each = rate_alone(await crowd.crowd(1, seconds=seconds / 2))
        parts = []
        for number, load in enumerate(LOADS):
            traffic = Traffic(
                load * each, max(50, round(load * each * seconds)), users=USERS, new=NEW
            )
            parts.append((load * each, await crowd.ask(traffic, seed=seed + number)))
        for clients in CLOSED:
            seen = await crowd.crowd(clients, seconds=seconds / 4)
            parts.append((CROWDED * each, seen))
        crowd.close()
    return costs_of(parts, {"bundle": bundle.name, "replicas": 1, "k": k})


def rate_alone(seen: Seen) -> float:
    """Requests a second that a replica computes one at a time."""
    return 1e3 / float(np.median(seen.batch_ms[seen.size == 1]))
