"""Plan: the smallest fleet that is quick enough, and the memory that it takes.

How much one replica can be asked is found by simulation, not by a formula: the largest rate at
which its percentiles stay under the targets. The fleet is that many replicas and those that may be
lost, and is then simulated as a whole, with one of them dying at the peak.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from typing import Any

from recsys.errors import ConfigError
from recsys.serving.capacity.costs import Costs
from recsys.serving.capacity.memory import Memory
from recsys.serving.capacity.simulation import Fleet, Loss, simulate
from recsys.serving.capacity.traffic import Traffic

DAY_S = 86_400
PLAYED = 20_000  # requests by which a rate is judged
STEPS = 9  # of the search for a replica's rate: to a part in five hundred
MOST_PLAYED = 2_000_000
SIMULATED_REPLICAS = 64  # of larger fleets, so many are played with their share of the traffic
OUTAGE_S = 20.0
BURST_S, CYCLES = 2.0, 10  # of a burst; bursts that must be seen before a rate is judged


@dataclass(frozen=True)
class Needs:
    """What is asked of the service.

    Attributes:
        users: people whose histories are known.
        items: of the catalog.
        rate: requests a second at the peak.
        p50_ms, p99_ms: what latencies may be at the peak; None for no matter.
        new: share of requests whose history no replica has kept.
        burst: how many times the calm rate bursts have, which last 2 s, a tenth of the time.
        skew: of the users' Zipf law.
        events: of a user's history, on average.
        spare: replicas that may be lost at the peak.
        per_machine: replicas of a machine.
    """

    users: int
    items: int
    rate: float
    p50_ms: float | None = None
    p99_ms: float | None = 100.0
    new: float = 0.2
    burst: float = 1.0
    skew: float = 0.0
    events: int = 20
    spare: int = 1
    per_machine: int = 1

    def __post_init__(self) -> None:
        for name, least in (("users", 1), ("items", 1), ("events", 0), ("spare", 0)):
            if getattr(self, name) < least:
                raise ConfigError(f"{name}: want at least {least}, got {getattr(self, name)}")
        if self.rate <= 0 or self.per_machine < 1:
            raise ConfigError(
                f"rate, per_machine: want more than 0, got {self.rate}, {self.per_machine}"
            )
        for name in ("p50_ms", "p99_ms"):
            if (value := getattr(self, name)) is not None and value <= 0:
                raise ConfigError(f"{name}: want more than 0, got {value}")

    @staticmethod
    def rate_of(daily_users: float, requests_each: float, peak: float) -> float:
        """Requests a second at the peak of a day.

        Args:
            daily_users: who come on a day.
            requests_each: that each makes.
            peak: how many times the day's mean the busiest second has.
        """
        return daily_users * requests_each / DAY_S * peak

    def met(self, p50_ms: float, p99_ms: float) -> bool:
        """Whether latencies are as wanted."""
        wanted = ((self.p50_ms, p50_ms), (self.p99_ms, p99_ms))
        return all(limit is None or found <= limit for limit, found in wanted)


def plan(
    costs: Costs, needs: Needs, memory: Memory, fleet: Fleet | None = None, *, seed: int = 0
) -> dict[str, Any]:
    """How many replicas it takes.

    Args:
        costs: of one replica.
        needs: what is asked.
        memory: what a replica and the store hold.
        fleet: settings of the replicas; their number and losses are ours.
        seed: of the simulations.

    Returns:
        `rate_each` that one replica bears, `replicas`, `machines`, the fleet at the peak (`peak`)
        and while one of it is lost (`outage`), `memory`, and what else it could cost (`drivers`).

    Raises:
        ConfigError: not even an idle replica is as quick as wanted.
    """
    fleet = replace(fleet or Fleet(), replicas=1, losses=())
    bears = rate_each(costs, needs, fleet, seed=seed)
    working = max(1, math.ceil(needs.rate / bears))
    total = working + needs.spare
    peak = _play(costs, needs, replace(fleet, replicas=total), seed)
    outage = None
    if needs.spare and total > 1:
        outage = _play(costs, needs, replace(fleet, replicas=total), seed, lose=True)
    machines = math.ceil(total / needs.per_machine)
    return {
        "needs": asdict(needs),
        "rate_each": round(bears, 2),
        "replicas": total,
        "machines": machines,
        "peak": peak,
        "outage": outage,
        "memory": memory.of(
            needs.items,
            needs.users,
            needs.events,
            replace(fleet, replicas=total),
            needs.per_machine,
        ),
        "drivers": _drivers(costs, needs, fleet, bears, seed),
    }


def rate_each(costs: Costs, needs: Needs, fleet: Fleet, *, seed: int = 0) -> float:
    """Requests a second that one replica answers as quickly as wanted.

    Raises:
        ConfigError: not even when it has hardly anything to do.
    """

    def quick(rate: float) -> bool:
        traffic = _traffic(needs, rate, PLAYED, needs.rate / rate)
        found = simulate(costs, traffic, fleet, seed=seed)
        lost = len(found.status) - found.counts()["answered"]
        return lost <= len(found.status) // 1000 and needs.met(*found.latency_ms(50, 99))

    low, high = 0.0, 1e3 * fleet.max_batch / costs.mean_ms(fleet.max_batch)
    idle = high / 1000
    if not quick(idle):
        traffic = _traffic(needs, idle, PLAYED, needs.rate / idle)
        p50, p99 = simulate(costs, traffic, fleet, seed=seed).latency_ms(50, 99)
        raise ConfigError(
            f"a replica that has hardly anything to do answers in {p50:.1f} ms (p50) and "
            f"{p99:.1f} ms (p99): more replicas do not make it quicker; ask for less, or measure "
            "a smaller model or a faster machine"
        )
    low = idle
    for _ in range(STEPS):
        middle = (low + high) / 2
        low, high = (middle, high) if quick(middle) else (low, middle)
    return low


def _traffic(needs: Needs, rate: float, requests: int, replicas: float) -> Traffic:
    """Of one replica or of all: a replica has its share of the users."""
    users = max(1, round(needs.users / max(1.0, replicas)))
    made = Traffic(
        rate, requests, users, skew=needs.skew, new=needs.new, burst=needs.burst, burst_s=BURST_S
    )
    if needs.burst == 1:
        return made
    return replace(made, requests=max(requests, int(rate * CYCLES * BURST_S / made.burst_share)))


def _play(
    costs: Costs, needs: Needs, fleet: Fleet, seed: int, *, lose: bool = False
) -> dict[str, Any]:
    """The fleet at the peak; a large one by a part of it with its part of the traffic."""
    share = min(1.0, SIMULATED_REPLICAS / fleet.replicas)
    played = replace(fleet, replicas=max(2 if lose else 1, round(fleet.replicas * share)))
    rate = needs.rate * played.replicas / fleet.replicas
    requests = int(min(MOST_PLAYED, max(PLAYED, rate * OUTAGE_S * 2)))
    if lose:
        begin = requests / rate / 4
        played = replace(played, losses=(Loss(0, begin, begin + OUTAGE_S),))
    traffic = _traffic(needs, rate, requests, fleet.replicas / played.replicas)
    return simulate(costs, traffic, played, seed=seed).summary()


def _drivers(
    costs: Costs, needs: Needs, fleet: Fleet, bears: float, seed: int
) -> dict[str, dict[str, Any]]:
    """What a replica would bear if one thing were otherwise: where the machines come from."""
    others = {
        "every history kept": replace(needs, new=0.0),
        "no history kept": replace(needs, new=1.0),
        "twice the time (p99)": replace(needs, p99_ms=needs.p99_ms and 2 * needs.p99_ms),
        "bursts of three times": replace(needs, burst=3.0),
    }
    found = {}
    for name, other in others.items():
        if other == needs:
            continue
        try:
            rate = rate_each(costs, other, fleet, seed=seed)
        except ConfigError:  # then it cannot be done at all
            rate = 0.0
        replicas = math.ceil(needs.rate / rate) + needs.spare if rate else None
        found[name] = {"rate_each": round(rate, 2), "replicas": replicas}
    return found
