"""Simulation of a fleet of replicas that answers a traffic.

Replicas affect each other only when one is lost or comes back. Between two such moments each one is
simulated alone, a batch at a time. The rule by which a batch starts is that of
`recsys.serving.batcher`, in closed form.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from recsys.serving.batcher import PATIENCE
from recsys.serving.capacity.costs import DRAWS, Costs
from recsys.serving.capacity.traffic import NEW_USERS, Traffic, assign_owners

ANSWERED, REFUSED, EXPIRED, FAILED = range(4)
STATUSES = ("answered", "refused", "expired", "failed")
_TOGETHER = 1 << 16  # requests that are routed at once


@dataclass(frozen=True)
class Loss:
    """A replica dies; at `back_s` another one takes its place, without any history."""

    replica: int
    at_s: float
    back_s: float = float("inf")


@dataclass(frozen=True)
class Fleet:
    """Replicas, and the router that sends each user's requests to the replica of that user.

    Attributes:
        replicas: their number. Each knows the histories of its users from the start.
        max_batch, max_wait_ms, queue_limit, deadline_ms: as in `ServingSettings`.
        losses: replicas that die.
        detect_ms: time until a request to a dead replica is sent to another one, and until the
            router knows of the loss.
        tries: replicas that a request is sent to, at most.
    """

    replicas: int = 1
    max_batch: int = 32
    max_wait_ms: float = 40.0
    queue_limit: int = 256
    deadline_ms: float = 5000.0
    losses: tuple[Loss, ...] = ()
    detect_ms: float = 1000.0
    tries: int = 3


@dataclass(frozen=True)
class Outcome:
    """The outcome of each request, in order of arrival.

    Attributes:
        arrived: (n,) s.
        latency_s: (n,) from its arrival to its end, whatever the status.
        status: (n,) int8 place in `STATUSES`.
        replica: (n,) int32 at which it ended; -1 for none.
        batch: (n,) int32 size of its batch; 0 where it was in none.
        queue_s: (n,) from its arrival at that replica until its batch started.
        cold: (n,) whether its history was not kept where it was sent last.
        tries: (n,) int16 number of replicas that it was sent to.
        busy_s: (replicas,) seconds that each one computed.
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
        """Percentiles of the answered requests; NaN without any."""
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
        """Figures for a table."""
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
    """Simulate a fleet. The same arguments give the same outcome, bit for bit.

    Costs are taken at this traffic's rate per replica; the default fleet is one replica.
    """
    return _Run(costs, traffic, fleet or Fleet(), seed).run()


@dataclass(eq=False)
class _Replica:
    """One replica: the requests that wait there, and what it has computed."""

    number: int
    fleet: Fleet
    table: Sequence[tuple[list[float], list[float]]]
    up: bool = True
    # What waits, by arrival: its time, its number, and the seconds that it adds to its batch.
    times: list[float] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    work: list[float] = field(default_factory=list)
    # The last batch: its end, size and seconds.
    free: float = float("-inf")
    last: int = 1
    took: float = 0.0
    # Batches, each with its place in `batched` and `arrived`, size, start, end and other time.
    batches: list[tuple[int, int, float, float, float]] = field(default_factory=list)
    batched: list[int] = field(default_factory=list)
    arrived: list[float] = field(default_factory=list)
    refused: list[tuple[int, float]] = field(default_factory=list)
    expired: list[tuple[int, float]] = field(default_factory=list)
    # Users whose histories it keeps: those that it owns, until it dies, and those that it met.
    reborn: bool = False
    met: set[int] = field(default_factory=set)

    def cold(self, users: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Whether the history of each user is not kept; from now on it is."""
        missed = users >= NEW_USERS
        mine = (assign_owners(users, self.fleet.replicas) == self.number) & (not self.reborn)
        for place in (~missed & ~mine).nonzero()[0].tolist():
            user = int(users[place])
            missed[place] = user not in self.met
            self.met.add(user)
        return missed

    def advance(self, until: float, numbers: Sequence[int]) -> None:
        """Compute the batches that start before `until` (s); all earlier requests are here.

        `numbers` are random places in the table, one for each request that waits.
        """
        fleet, times, ids, work = self.fleet, self.times, self.ids, self.work
        wait, deadline = fleet.max_wait_ms / 1e3, fleet.deadline_ms / 1e3
        limit, most = fleet.queue_limit, fleet.max_batch
        free, last, took = self.free, self.last, self.took
        table, draws = self.table, iter(numbers)
        slow = any(work)
        at = 0  # everything before it has left the queue
        while at < len(times):
            oldest = times[at]
            start = now = max(oldest, free)
            patience = min(wait, PATIENCE * took)
            if last > 1 and now - free <= patience and now - oldest < patience:
                # Wait until as many requests are here as in the last batch, until the oldest has
                # waited long enough, or until one arrives when the last batch is not recent.
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
                for column in (times, ids, work):
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
                seconds += sum(work[at:stop])
            free, last, took = start + seconds, size, seconds
            self.batches.append((len(self.batched), size, start, free, other[draw]))
            self.batched += ids[at:stop]
            self.arrived += times[at:stop]
            at = stop
        self.free, self.last, self.took = free, last, took
        for column in (times, ids, work):
            del column[:at]

    def lose(self, now: float) -> list[int]:
        """Die; returns the requests that wait here or are being computed."""
        lost = list(self.ids)
        if self.batches and self.batches[-1][3] > now:
            first, *_ = self.batches.pop()
            lost = self.batched[first:] + lost
            del self.batched[first:], self.arrived[first:]
        for column in (self.times, self.ids, self.work):
            column.clear()
        self.met.clear()
        self.up, self.reborn, self.free, self.last = False, True, float("-inf"), 1
        return lost


class _Run:
    """One call of `simulate`."""

    def __init__(self, costs: Costs, traffic: Traffic, fleet: Fleet, seed: int) -> None:
        self.fleet = fleet
        self.rng = np.random.default_rng(seed)
        self.arrived, self.users = traffic.arrivals(self.rng), traffic.askers(self.rng)
        self.cold_s = costs.cold_ms / 1e3
        table = costs.draws(traffic.rate / fleet.replicas, fleet.max_batch, self.rng)
        self.replicas = [_Replica(number, fleet, table) for number in range(fleet.replicas)]
        self.known_up = np.ones(fleet.replicas, bool)  # as far as the router knows
        self.cold = np.zeros(traffic.requests, bool)
        self.tries = np.zeros(traffic.requests, np.int16)
        self.resent: list[tuple[float, int]] = []
        self.failed: list[tuple[int, float]] = []

    def run(self) -> Outcome:
        """Simulate the segments between moments at which something changes, then the rest."""
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
        while self.resent:  # no replica was up; they are tried again until they have failed
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
        """Route the requests before `until`, and let all replicas compute until then."""
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
        replica.advance(until, self.rng.integers(0, DRAWS, len(replica.times)).tolist())

    def _fail(self, ids: NDArray[np.int64], times: NDArray[np.float64]) -> None:
        """Send the requests to another replica, or count them as failed after enough tries."""
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
        owner = assign_owners(self.users[ids], self.fleet.replicas)
        gone = ~self.known_up[owner]
        # The users of a dead replica are spread over all others.
        owner[gone] = up[assign_owners(self.users[ids[gone]], len(up), salt=1)]
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
            for ended, outcome, after in (
                (replica.refused, REFUSED, 0.0),
                (replica.expired, EXPIRED, deadline),
            ):
                for request, time in ended:
                    end[request], status[request], where[request] = time + after, outcome, number
        for request, time in self.failed:
            end[request], status[request] = time, FAILED
        latency = end - self.arrived
        return Outcome(
            self.arrived, latency, status, where, size, queue, self.cold, self.tries, np.array(busy)
        )
