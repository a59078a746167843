"""The smallest fleet that is fast enough, and its memory.

The largest rate at which one replica keeps its percentiles under the limits is found by simulation.
The fleet has enough replicas for the peak, and spare ones. It is then simulated as a whole, with
one replica dying at the peak.
"""

import math
from dataclasses import asdict, dataclass, replace
from typing import Any

from recsys.errors import ConfigError
from recsys.serving.capacity.costs import Costs
from recsys.serving.capacity.memory import Memory
from recsys.serving.capacity.simulation import Fleet, Loss, simulate
from recsys.serving.capacity.traffic import Traffic

DAY_S = 86_400
LEAST, MOST = 20_000, 2_000_000  # requests of a simulation
STEPS = 9  # of the search for a replica's rate: to a part in five hundred
SIMULATED_REPLICAS = 64  # of a larger fleet, so many are simulated with their share of the traffic
OUTAGE_S = 20.0
BURST_S, BURSTS = 2.0, 10  # length of a burst, and number of bursts in a simulation


@dataclass(frozen=True)
class Needs:
    """Requirements of the service.

    Attributes:
        users: with a history.
        items: of the catalog.
        rate: requests a second at the peak.
        p50_ms, p99_ms: largest latencies at the peak; None for no limit.
        new: share of requests whose history no replica keeps.
        burst: rate of bursts over the calm rate. Bursts last 2 s and take a tenth of the time.
        events: of a user's history, on average.
        spare: replicas that may be lost at the peak.
        per_machine: replicas on one machine.
    """

    users: int
    items: int
    rate: float
    p50_ms: float | None = None
    p99_ms: float | None = 100.0
    new: float = 0.2
    burst: float = 1.0
    events: int = 20
    spare: int = 1
    per_machine: int = 1

    @staticmethod
    def rate_of(daily_users: float, requests_each: float, peak: float) -> float:
        """Requests in the busiest second of a day, which has `peak` times the mean rate."""
        return daily_users * requests_each / DAY_S * peak

    def met(self, p50_ms: float, p99_ms: float) -> bool:
        """Whether latencies are within the limits."""
        limits = ((self.p50_ms, p50_ms), (self.p99_ms, p99_ms))
        return all(limit is None or found <= limit for limit, found in limits)


def plan(
    costs: Costs, needs: Needs, memory: Memory, fleet: Fleet | None = None, *, seed: int = 0
) -> dict[str, Any]:
    """Plan a fleet with the settings of `fleet`; its number of replicas and losses are replaced.

    Returns:
        `rate_each` that one replica can answer, `replicas`, `machines`, the fleet at the peak
        (`peak`) and while a replica is lost (`outage`), `memory`, and the replicas under other
        conditions (`drivers`).

    Raises:
        ConfigError: not even an idle replica is fast enough.
    """
    fleet = replace(fleet or Fleet(), replicas=1, losses=())
    each = find_rate(costs, needs, fleet, seed=seed)
    total = max(1, math.ceil(needs.rate / each)) + needs.spare
    whole = replace(fleet, replicas=total)
    lose = needs.spare and total > 1
    others = {
        "every history kept": replace(needs, new=0.0),
        "no history kept": replace(needs, new=1.0),
        "twice the p99": replace(needs, p99_ms=needs.p99_ms and 2 * needs.p99_ms),
        "bursts of three times": replace(needs, burst=3.0),
    }
    return {
        "needs": asdict(needs),
        "rate_each": round(each, 2),
        "replicas": total,
        "machines": math.ceil(total / needs.per_machine),
        "peak": _simulate(costs, needs, whole, seed),
        "outage": _simulate(costs, needs, whole, seed, lose=True) if lose else None,
        "memory": memory.of(needs.items, needs.users, needs.events, whole, needs.per_machine),
        "drivers": {
            name: _plan_replicas(costs, other, fleet, seed)
            for name, other in others.items()
            if other != needs
        },
    }


def find_rate(costs: Costs, needs: Needs, fleet: Fleet, *, seed: int = 0) -> float:
    """Largest rate at which one replica keeps the latencies within the limits.

    Raises:
        ConfigError: not even an idle replica does.
    """

    def latencies(rate: float) -> tuple[float, float]:
        found = simulate(costs, _traffic(needs, rate, LEAST, needs.rate / rate), fleet, seed=seed)
        if found.counts()["answered"] < 0.999 * len(found.status):
            return math.inf, math.inf
        p50, p99 = found.latency_ms(50, 99)
        return p50, p99

    high = 1e3 * fleet.max_batch / costs.mean_ms(fleet.max_batch)
    low = high / 1000
    if not needs.met(*(idle := latencies(low))):
        raise ConfigError(
            f"an idle replica answers in {idle[0]:.1f} ms (p50) and {idle[1]:.1f} ms (p99), and "
            "more replicas do not change that; relax --p50 or --p99, or use a smaller model or a "
            "faster machine"
        )
    for _ in range(STEPS):
        middle = (low + high) / 2
        low, high = (middle, high) if needs.met(*latencies(middle)) else (low, middle)
    return low


def _plan_replicas(costs: Costs, needs: Needs, fleet: Fleet, seed: int) -> dict[str, Any]:
    """Rate and number of replicas; 0 and None where no number is enough."""
    try:
        rate = find_rate(costs, needs, fleet, seed=seed)
    except ConfigError:
        return {"rate_each": 0.0, "replicas": None}
    return {"rate_each": round(rate, 2), "replicas": math.ceil(needs.rate / rate) + needs.spare}


def _traffic(needs: Needs, rate: float, requests: int, share: float) -> Traffic:
    """Traffic of so many requests by a part of the users, 1 in `share`."""
    users = max(1, round(needs.users / max(1.0, share)))
    made = Traffic(rate, requests, users, new=needs.new, burst=needs.burst, burst_s=BURST_S)
    if needs.burst == 1:
        return made
    return replace(made, requests=max(requests, int(rate * BURSTS * BURST_S / made.burst_share)))


def _simulate(
    costs: Costs, needs: Needs, fleet: Fleet, seed: int, *, lose: bool = False
) -> dict[str, Any]:
    """Simulate the fleet at the peak; of a large one, a part with its part of the traffic."""
    number = min(fleet.replicas, SIMULATED_REPLICAS)
    part = replace(fleet, replicas=max(2, number) if lose else number)
    share = fleet.replicas / part.replicas
    rate = needs.rate / share
    requests = int(min(MOST, max(LEAST, rate * OUTAGE_S * 2)))
    if lose:
        start = requests / rate / 4
        part = replace(part, losses=(Loss(0, start, start + OUTAGE_S),))
    return simulate(costs, _traffic(needs, rate, requests, share), part, seed=seed).summary()
