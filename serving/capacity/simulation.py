"""Simulation: a fleet of replicas answers a traffic, event by event, in far less than its time.

Replicas touch each other only where one is lost or comes back. Between two such moments each is
played alone, a batch at a time; everything a request at a time is arrays. The rule by which a batch
begins is that of `recsys.serving.batcher`, in closed form.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from recsys.errors import ConfigError
from recsys.serving.batcher import PATIENCE
from recsys.serving.capacity.costs import DRAWS, Costs
from recsys.serving.capacity.traffic import NEW_USERS, Traffic, owners

ANSWERED, REFUSED, EXPIRED, FAILED = range(4)
STATUSES = ("answered", "refused", "expired", "failed")
_TOGETHER = 1 << 16  # requests that are routed at once


@dataclass(frozen=True)
class Loss:
    """A replica dies.

    Attributes:
        replica: which.
        at_s: when.
        back_s: when another stands in its place, with nothing kept.
    """

    replica: int
    at_s: float
    back_s: float = float("inf")


@dataclass(frozen=True)
class Fleet:
    """Replicas, and who sends them requests.

    Attributes:
        replicas: how many.
        routing: `user` sends each user to a replica of their own, which keeps their history; `turn`
            sends requests to all in turn.
        max_batch, max_wait_ms, queue_limit, deadline_ms: as in `ServingSettings`.
        kept: users whose history a replica keeps, those who came last; nothing is kept at first.
            None keeps all, and the users of a replica are known to it from the start.
        losses: replicas that die.
        detect_ms: until a request to a dead replica is sent to another, and until the router knows.
        tries: replicas that a request is sent to at most.
        extra_share: share of requests that need a pass more (of speculation that failed).
        extra_ms: what a batch takes longer with one of them or more.
    """

    replicas: int = 1
    routing: Literal["user", "turn"] = "user"
    max_batch: int = 32
    max_wait_ms: float = 40.0
    queue_limit: int = 256
    deadline_ms: float = 5000.0
    kept: int | None = None
    losses: tuple[Loss, ...] = ()
    detect_ms: float = 1000.0
    tries: int = 3
    extra_share: float = 0.0
    extra_ms: float = 0.0

    def __post_init__(self) -> None:
        for name in ("replicas", "max_batch", "queue_limit", "tries"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}: want at least 1, got {getattr(self, name)}")
        for name in ("max_wait_ms", "deadline_ms", "detect_ms", "extra_ms"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name}: want at least 0, got {getattr(self, name)}")
        if self.routing not in ("user", "turn"):
            raise ConfigError(f"routing: want user or turn, got {self.routing!r}")
        for loss in self.losses:
            if not 0 <= loss.replica < self.replicas or not loss.at_s < loss.back_s:
                raise ConfigError(f"losses: {loss} is not of this fleet, or ends before it begins")


@dataclass(frozen=True)
class Outcome:
    """What became of each request, in order of arrival.

    Attributes:
        arrived: (n,) s.
        latency_s: (n,) from arrival to the end of it, whatever that was.
        status: (n,) int8 place in `STATUSES`.
        replica: (n,) int32 that it ended at; -1 for none.
        batch: (n,) int32 requests of its batch; 0 where it was in none.
        queue_s: (n,) from its arrival at that replica until its batch began.
        cold: (n,) its history was not kept where it was last sent.
        tries: (n,) int16 replicas that it was sent to.
        busy_s: (replicas,) seconds that each computed.
    """

    arrived: NDArray[np.float64]
    latency_s: NDArray[np.float64]
    status: NDArray[np.int8]
    replica: NDArray[np.int32]
    batch: NDArray[np.int32]
    queue_s: NDArray[np.float64]
    cold: NDArray[np.bool_]
    tries: NDArray[np.int16]
    busy_s: NDArray[np.float64]

    def latency_ms(self, *percentiles: float) -> list[float]:
        """Percentiles of the answered; NaN where none is."""
        good = self.latency_s[self.status == ANSWERED]
        if not len(good):
            return [float("nan")] * len(percentiles)
        return [float(p) * 1e3 for p in np.percentile(good, percentiles)]

    def counts(self) -> dict[str, int]:
        """Requests by status."""
        return dict(
            zip(STATUSES, np.bincount(self.status, minlength=len(STATUSES)).tolist(), strict=True)
        )

    def summary(self) -> dict[str, float]:
        """What a table says."""
        p50, p95, p99 = self.latency_ms(50, 95, 99)
        seconds = float(self.arrived[-1] - self.arrived[0]) or 1.0
        sizes = self.batch[self.batch > 0]
        return {
            "requests": len(self.arrived),
            **self.counts(),
            "rate": round(len(self.arrived) / seconds, 2),
            "p50_ms": round(p50, 3),
            "p95_ms": round(p95, 3),
            "p99_ms": round(p99, 3),
            "batch_size": round(len(sizes) / float((1 / sizes).sum()) if len(sizes) else 0.0, 3),
            "busy": round(float(self.busy_s.mean()) / seconds, 4),
            "hits": round(1 - float(self.cold.mean()), 4),
            "retried": int((self.tries > 1).sum()),
        }


def simulate(
    costs: Costs, traffic: Traffic, fleet: Fleet | None = None, *, seed: int = 0
) -> Outcome:
    """Play a fleet.

    The same arguments give the same outcome, bit for bit.

    Args:
        costs: of one replica; taken at this traffic's rate per replica.
        traffic: who asks when.
        fleet: who answers; one replica by default.
        seed: of everything random.
    """
    return _Play(costs, traffic, fleet or Fleet(), seed).run()


@dataclass(eq=False)
class _Replica:
    """One replica: what waits there, and what was computed."""

    number: int
    fleet: Fleet
    table: Sequence[tuple[list[float], list[float]]]
    up: bool = True
    reborn: bool = False
    # What waits, by arrival: when it came, number of the request, seconds that it adds to its
    # batch, whether it needs a pass more.
    times: list[float] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    work: list[float] = field(default_factory=list)
    extra: list[bool] = field(default_factory=list)
    # The batch before: its end, size and seconds.
    free: float = float("-inf")
    last: int = 1
    took: float = 0.0
    # Batches, each with its place in `batched` and `arrived`, size, begin, end and other time.
    batches: list[tuple[int, int, float, float, float]] = field(default_factory=list)
    batched: list[int] = field(default_factory=list)
    arrived: list[float] = field(default_factory=list)
    refused: list[tuple[int, float]] = field(default_factory=list)
    expired: list[tuple[int, float]] = field(default_factory=list)
    kept: OrderedDict[int, None] = field(default_factory=OrderedDict)

    def cold(self, users: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Whether each user's history is not kept; keeps it."""
        kept, most = self.kept, self.fleet.kept
        if most is None and not self.reborn and self.fleet.routing == "user":
            mine = (owners(users, self.fleet.replicas) == self.number) & (users < NEW_USERS)
        else:
            mine = np.zeros(len(users), bool)
        (asked,) = (~mine).nonzero()
        missed = np.zeros(len(users), bool)
        for place, user in zip(asked.tolist(), users[asked].tolist(), strict=True):
            if user in kept:
                kept.move_to_end(user)
                continue
            missed[place] = True
            kept[user] = None
            if most is not None and len(kept) > most:
                kept.popitem(last=False)
        return missed

    def advance(self, until: float, numbers: Sequence[int]) -> None:
        """Compute the batches that begin before `until`; all that comes before then is here.

        Args:
            until: s.
            numbers: random places in the table, one for each that waits.
        """
        fleet, times, ids, work, extra = self.fleet, self.times, self.ids, self.work, self.extra
        wait, deadline = fleet.max_wait_ms / 1e3, fleet.deadline_ms / 1e3
        limit, most, longer = fleet.queue_limit, fleet.max_batch, fleet.extra_ms / 1e3
        free, last, took = self.free, self.last, self.took
        table, draws = self.table, iter(numbers)
        slow = any(work) or any(extra)
        at = 0  # everything before it has left the queue
        while at < len(times):
            oldest = times[at]
            start = now = max(oldest, free)
            patience = min(wait, PATIENCE * took)
            if last > 1 and now - free <= patience and now - oldest < patience:
                # Worth waiting for company: until so many are here, the oldest has waited long
                # enough, or somebody comes when the batch before is no longer recent.
                full = at + last - 1
                if full >= len(times) or times[full] > now:
                    start = oldest + patience
                    if full < len(times):
                        start = min(start, times[full])
                    late = bisect_right(times, free + patience, at + 1)
                    if late < len(times):
                        start = min(start, times[late])
            if start >= until:
                break
            stop = bisect_right(times, start, at)
            if stop - at > limit:
                first = at + limit
                self.refused += zip(ids[first:stop], times[first:stop], strict=True)
                for column in (times, ids, work, extra):
                    del column[first:stop]
                stop = first
            while at < stop and times[at] + deadline <= start:
                self.expired.append((ids[at], times[at]))
                at += 1
            size = min(stop - at, most)
            if not size:
                continue
            stop = at + size
            batch, other = table[size]
            draw = next(draws)
            seconds = batch[draw]
            if slow:
                seconds += sum(work[at:stop]) + (longer if any(extra[at:stop]) else 0.0)
            free, last, took = start + seconds, size, seconds
            self.batches.append((len(self.batched), size, start, free, other[draw]))
            self.batched += ids[at:stop]
            self.arrived += times[at:stop]
            at = stop
        self.free, self.last, self.took = free, last, took
        for column in (times, ids, work, extra):
            del column[:at]

    def lose(self, now: float) -> list[int]:
        """Die: the requests that wait here or are being computed, which nobody answers."""
        lost = list(self.ids)
        if self.batches and self.batches[-1][3] > now:
            first, *_ = self.batches.pop()
            lost = self.batched[first:] + lost
            del self.batched[first:], self.arrived[first:]
        for column in (self.times, self.ids, self.work, self.extra):
            column.clear()
        self.kept.clear()
        self.up, self.reborn, self.free, self.last = False, True, float("-inf"), 1
        return lost


class _Play:
    """One call of `simulate`."""

    def __init__(self, costs: Costs, traffic: Traffic, fleet: Fleet, seed: int) -> None:
        self.fleet = fleet
        self.rng = np.random.default_rng(seed)
        self.arrived, self.users = traffic.arrivals(self.rng), traffic.askers(self.rng)
        self.cold_s = costs.cold_ms / 1e3
        self.extra = self.rng.random(traffic.requests) < fleet.extra_share
        table = costs.draws(traffic.rate / fleet.replicas, fleet.max_batch, self.rng)
        self.replicas = [_Replica(number, fleet, table) for number in range(fleet.replicas)]
        self.known_up = np.ones(fleet.replicas, bool)  # as the router knows it
        self.turn = 0
        self.cold = np.zeros(traffic.requests, bool)
        self.tries = np.zeros(traffic.requests, np.int16)
        self.resent: list[tuple[float, int]] = []
        self.failed: list[tuple[int, float]] = []

    def run(self) -> Outcome:
        """All segments between moments at which something changes, then the rest."""
        changes: list[tuple[float, int, str]] = []
        detect = self.fleet.detect_ms / 1e3
        for loss in self.fleet.losses:
            changes.append((loss.at_s, loss.replica, "dies"))
            if loss.at_s + detect < loss.back_s:
                changes.append((loss.at_s + detect, loss.replica, "missed"))
            changes.append((loss.back_s, loss.replica, "back"))
        many = self.arrived[_TOGETHER::_TOGETHER].tolist()
        moments = sorted({time for time, *_ in changes if np.isfinite(time)} | set(many))
        place, change = 0, sorted(changes)
        for moment in moments:
            stop = int(np.searchsorted(self.arrived, moment, side="left"))
            self._segment(np.arange(place, stop), moment)
            place = stop
            while change and change[0][0] <= moment:
                _, replica, what = change.pop(0)
                self._change(replica, what, moment)
        self._segment(np.arange(place, len(self.arrived)), float("inf"))
        while self.resent:  # nobody was there; all of them are tried until they have failed
            self._segment(np.arange(0), float("inf"))
        return self._outcome()

    def _change(self, replica: int, what: str, now: float) -> None:
        if what == "dies":
            lost = np.array(self.replicas[replica].lose(now), np.int64)
            self._fail(lost, np.full(len(lost), now + self.fleet.detect_ms / 1e3))
        elif what == "missed":
            self.known_up[replica] = False
        else:
            self.replicas[replica].up = self.known_up[replica] = True

    def _segment(self, new: NDArray[np.int64], until: float) -> None:
        """Route what comes before `until`, and let all replicas compute until then."""
        due = [(time, request) for time, request in self.resent if time < until]
        self.resent = [(time, request) for time, request in self.resent if time >= until]
        again = np.array([request for _, request in due], np.int64)
        ids = np.concatenate([new, again])
        times = np.concatenate([self.arrived[new], [time for time, _ in due]])
        order = np.argsort(times, kind="stable")
        ids, times = ids[order], times[order]
        self.tries[ids] += 1
        owner = self._route(ids)
        detect = self.fleet.detect_ms / 1e3
        by_owner = np.argsort(owner, kind="stable")
        cuts = np.searchsorted(owner[by_owner], np.arange(self.fleet.replicas + 1))
        for number, replica in enumerate(self.replicas):
            mine = by_owner[cuts[number] : cuts[number + 1]]
            if replica.up:
                self._send(replica, ids[mine], times[mine], until)
            else:
                self._fail(ids[mine], times[mine] + detect)
        nobody = by_owner[: cuts[0]]
        self._fail(ids[nobody], times[nobody] + detect)

    def _send(
        self,
        replica: _Replica,
        ids: NDArray[np.int64],
        times: NDArray[np.float64],
        until: float,
    ) -> None:
        if len(ids):
            replica.times += times.tolist()
            replica.ids += ids.tolist()
            if self.cold_s:
                self.cold[ids] = replica.cold(self.users[ids])
            replica.work += (self.cold[ids] * self.cold_s).tolist()
            replica.extra += self.extra[ids].tolist()
        replica.advance(until, self.rng.integers(0, DRAWS, len(replica.times)).tolist())

    def _fail(self, ids: NDArray[np.int64], times: NDArray[np.float64]) -> None:
        """Send to another replica, unless that was tried often enough."""
        for request, time in zip(ids.tolist(), times.tolist(), strict=True):
            if self.tries[request] < self.fleet.tries:
                self.resent.append((time, request))
            else:
                self.failed.append((request, time))

    def _route(self, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """A replica for each request, -1 where none is known to be up."""
        (up,) = self.known_up.nonzero()
        if not len(up):
            return np.full(len(ids), -1)
        if self.fleet.routing == "turn":
            turns = (self.turn + np.arange(len(ids))) % len(up)
            self.turn += len(ids)
            return up[turns]
        owner = owners(self.users[ids], self.fleet.replicas)
        gone = ~self.known_up[owner]
        # The users of a dead replica are spread over all others.
        owner[gone] = up[owners(self.users[ids[gone]], len(up), salt=1)]
        return owner

    def _outcome(self) -> Outcome:
        count = len(self.arrived)
        end, queue = np.zeros(count), np.zeros(count)
        status = np.full(count, -1, np.int8)
        where, size = np.full(count, -1, np.int32), np.zeros(count, np.int32)
        deadline = self.fleet.deadline_ms / 1e3
        busy = []
        for number, replica in enumerate(self.replicas):
            table = np.array(replica.batches).reshape(-1, 5)
            sizes = table[:, 1].astype(np.int64)
            ids, arrived = np.array(replica.batched, np.int64), np.array(replica.arrived)
            start, stop, other = np.repeat(table[:, 2:], sizes, axis=0).T
            late = stop > arrived + deadline
            end[ids] = np.where(late, arrived + deadline, stop + other)
            status[ids] = np.where(late, EXPIRED, ANSWERED)
            queue[ids], size[ids], where[ids] = start - arrived, np.repeat(sizes, sizes), number
            busy.append(float((table[:, 3] - table[:, 2]).sum()))
            for ended, told, after in (
                (replica.refused, REFUSED, 0.0),
                (replica.expired, EXPIRED, deadline),
            ):
                for request, time in ended:
                    end[request], status[request], where[request] = time + after, told, number
        for request, time in self.failed:
            end[request], status[request] = time, FAILED
        latency = end - self.arrived
        return Outcome(
            self.arrived, latency, status, where, size, queue, self.cold, self.tries, np.array(busy)
        )
