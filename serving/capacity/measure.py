"""Measuring replicas: servers under the load of `traffic`, and what their answers cost.

Each answer reports how long it was queued and computed. The client notes when it arrived.
"""

from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Self

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from recsys.errors import RecsysError
from recsys.serving.benchmark.client import OK, Client, Request, Run
from recsys.serving.benchmark.process import Server, start_server
from recsys.serving.benchmark.workload import RECOMMEND, Workload
from recsys.serving.capacity.costs import Costs, Level
from recsys.serving.capacity.traffic import NEW_USERS, Traffic, assign_owners

LONGEST = 20  # items of a history
# Open loads, as shares of the rate at which a replica computes requests one by one. Closed loads,
# by clients, give batches of sizes that open loads hardly reach; they count as one more load.
LOADS, CLOSED, CROWDED = (0.25, 0.5, 0.8), (2, 4, 8, 16, 32, 64), 1.5
USERS, NEW = 200, 0.2
COLD = "cold"  # label of a request with a new history
COLUMNS = ("replica", "latency_ms", "queue_ms", "batch_ms", "size", "cold")


@dataclass(frozen=True)
class Seen:
    """Answers of a load, in the order in which they arrived.

    Attributes:
        answers: a row for each, with `replica` that answered; `latency_ms` since the request was
            due; `queue_ms` and `batch_ms` in the batcher and in the batch; `size` of the batch;
            `cold`, whether no request had this history before.
        seconds: duration of the load.
        bad: number of requests without an answer.
        server_s, generator_s: processor seconds of the servers and of the load generator.
    """

    answers: pd.DataFrame
    seconds: float
    bad: int
    server_s: float
    generator_s: float

    def percentile(self, q: float) -> float:
        """Percentile of the latency in ms."""
        return float(np.percentile(self.answers["latency_ms"], q))

    @classmethod
    def of(cls, run: Run) -> Self:
        """Read the answers of a load, whose replies were kept.

        Raises:
            RecsysError: no request was answered.
        """
        rows = []
        for reply in run.replies:
            if reply.status in OK:
                timing = reply.json()["timing"]
                times = (reply.latency_ms, timing["queue_ms"], timing["compute_ms"])
                cold = reply.request.label == COLD
                rows.append((reply.request.server, *times, timing["batch_size"], cold))
        if not rows:
            raise RecsysError(f"no request was answered; statuses: {dict(run.statuses)}")
        bad = len(run.replies) - len(rows)
        answers = pd.DataFrame(rows, columns=COLUMNS)
        return cls(answers, run.seconds, bad, run.server_s, run.generator_s)

    @classmethod
    def join(cls, parts: Sequence[Self]) -> Self:
        """Several loads as one, one after another."""
        answers = pd.concat([part.answers for part in parts], ignore_index=True)
        totals = [
            sum(getattr(part, name) for part in parts)
            for name in ("seconds", "bad", "server_s", "generator_s")
        ]
        return cls(answers, *totals)

    def cold_in_batch(self) -> NDArray[np.int64]:
        """(n,) cold requests in the batch of each request; -1 where its batch is not known.

        The answers of a batch are sent one after another, with the same size and batch time.
        """
        found = self.answers.sort_values("replica", kind="stable")
        alike = ["replica", "size", "batch_ms"]
        run = (found[alike] != found[alike].shift()).any(axis=1).cumsum()
        batch = found.groupby(run).cumcount() // found["size"]
        whole = found.groupby([run, batch])["cold"]
        is_whole = whole.transform("size") == found["size"]
        cold = whole.transform("sum").where(is_whole, -1)
        return np.asarray(cold.sort_index(), np.int64)


@asynccontextmanager
async def start_replicas(
    bundle: Path, number: int, settings: Sequence[str] = ()
) -> AsyncIterator[list[Server]]:
    """So many servers of a bundle, one thread each, on free ports of this machine."""
    async with AsyncExitStack() as stack:
        yield [
            await stack.enter_async_context(start_server(bundle, ["threads=1", *settings]))
            for _ in range(number)
        ]


class Crowd:
    """Users, each of one replica: those who come back with their history, and new ones."""

    def __init__(
        self, client: Client, replicas: int, bundle: Path, users: int, *, k: int, seed: int
    ) -> None:
        self._client, self._replicas, self._k = client, replicas, k
        self._items = np.array(Workload(bundle).item_ids)
        self._rng = np.random.default_rng(seed)
        self._known = [
            self._request(owner) for owner in assign_owners(np.arange(users), replicas).tolist()
        ]

    async def meet(self) -> None:
        """Send each known user's request once, so that the replicas keep their histories."""
        for request in self._known:
            reply = await self._client.send(request)
            if reply.status not in OK:
                raise RecsysError(f"a replica answers {reply.status}: {reply.body[:300]!r}")

    async def open(self, traffic: Traffic, *, seed: int) -> Seen:
        """Send the requests of a traffic when they are due, each to the replica of its user."""
        rng = np.random.default_rng(seed)
        due, users = traffic.arrivals(rng), traffic.askers(rng)
        requests = [
            self._request(owner, new=True) if user >= NEW_USERS else self._known[user]
            for user, owner in zip(
                users.tolist(), assign_owners(users, self._replicas).tolist(), strict=True
            )
        ]
        return Seen.of(await self._client.open(requests, due.tolist(), keep=True))

    async def closed(self, clients: int, *, seconds: float) -> Seen:
        """Send requests of known users from so many clients of each replica in turn."""
        requests = self._take_turns()
        number = clients * self._replicas
        return Seen.of(await self._client.closed(requests, number, seconds=seconds, keep=True))

    def _take_turns(self) -> Iterator[Request]:
        groups = [[r for r in self._known if r.server == n] for n in range(self._replicas)]
        for turn in count():
            for group in groups:
                yield group[turn % len(group)]

    def _request(self, server: int, *, new: bool = False) -> Request:
        """A request with a random history."""
        items = self._rng.choice(self._items, self._rng.integers(1, LONGEST + 1))
        body = {"history": items.tolist(), "k": self._k, "include": ["timing"]}
        return Request.post(RECOMMEND, body, server, COLD if new else "")


def estimate_cold_ms(parts: Sequence[Seen]) -> float:
    """Time that a history that is not kept adds to its batch, from requests alone in theirs.

    The slowest tenth of both kinds is left out, so that a few interruptions do not decide.
    """
    differences, weights = [], []
    for seen in parts:
        alone = seen.answers[seen.answers["size"] == 1]
        kinds = [np.sort(alone["batch_ms"][alone["cold"] == new]) for new in (True, False)]
        if min(map(len, kinds)) < 10:
            continue
        means = [values[: len(values) * 9 // 10].mean() for values in kinds]
        differences.append(means[0] - means[1])
        weights.append(min(map(len, kinds)))
    return max(0.0, float(np.average(differences, weights=weights))) if weights else 0.0


def fit_costs(parts: Sequence[tuple[float, Seen]], about: dict[str, object]) -> Costs:
    """A cost model of loads, given with their requests a second of each replica, in any order.

    Loads of one rate count together.
    """
    cold = estimate_cold_ms([seen for _, seen in parts])
    levels = []
    for rate in sorted({rate for rate, _ in parts}):
        seen = Seen.join([seen for other, seen in parts if other == rate])
        colds = seen.cold_in_batch()
        kept, colds = seen.answers[colds >= 0], colds[colds >= 0]
        batch = np.maximum(kept["batch_ms"] - cold * colds, 0.1 * kept["batch_ms"])
        other_ms = kept["latency_ms"] - kept["queue_ms"] - kept["batch_ms"]
        levels.append(Level(rate, *(np.asarray(part) for part in (kept["size"], batch, other_ms))))
    return Costs(tuple(levels), cold, about)


async def measure_one(
    bundle: Path, *, k: int = 10, seconds: float, settings: Sequence[str] = (), seed: int = 0
) -> Costs:
    """The cost model of one replica, which shares the machine only with the load generator.

    A fifth of the requests of open loads have new histories. Closed loads give large batches.
    Each load takes so many `seconds`; `settings` are `key=value` of the section `serve`.
    """
    async with start_replicas(bundle, 1, settings) as servers, Client(servers) as client:
        crowd = Crowd(client, 1, bundle, USERS, k=k, seed=seed)
        await crowd.meet()
        each = estimate_rate_alone(await crowd.closed(1, seconds=seconds / 2))
        parts = []
        for number, load in enumerate(LOADS):
            requests = max(50, round(load * each * seconds))
            traffic = Traffic(load * each, requests, users=USERS, new=NEW)
            parts.append((load * each, await crowd.open(traffic, seed=seed + number)))
        for clients in CLOSED:
            parts.append((CROWDED * each, await crowd.closed(clients, seconds=seconds / 4)))
    return fit_costs(parts, {"bundle": bundle.name, "replicas": 1, "k": k})


def estimate_rate_alone(seen: Seen) -> float:
    """Requests a second that a replica computes one at a time."""
    return 1e3 / float(seen.answers["batch_ms"][seen.answers["size"] == 1].median())
