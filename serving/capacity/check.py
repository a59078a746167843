"""Check of the simulation: its prediction for two replicas beside what two replicas do.

Costs are fitted to loads of some rates and the prediction is made for rates in between. Both kinds
of loads are run in turn, in several rounds, so that other work on the machine affects both alike.
All replicas are equally busy while costs are measured, since they share cores with each other and
with the load generator.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from recsys.progress import say
from recsys.serving.benchmark.client import Client
from recsys.serving.capacity.measure import (
    Crowd,
    Seen,
    estimate_rate_alone,
    fit_costs,
    start_replicas,
)
from recsys.serving.capacity.simulation import Fleet, simulate
from recsys.serving.capacity.traffic import Traffic

BOUND = 0.15
SIMULATED = 200_000  # requests of a prediction, enough that the seed hardly changes it
ALONE_S = 3.0  # duration of the load of one client, by which the other loads are chosen
REPLICAS = 2
NEW = 0.2  # share of requests with a new history


@dataclass(frozen=True)
class Trial:
    """What is run.

    Attributes:
        fitted: loads that costs are taken from, as shares of the rate of requests one by one.
        predicted: loads that are predicted and measured.
        requests: of each load, in all rounds.
    """

    fitted: tuple[float, ...] = (0.3, 0.5, 0.7, 0.9)
    predicted: tuple[float, ...] = (0.4, 0.6, 0.8)
    requests: int = 5100
    rounds: int = 3
    users: int = 400
    k: int = 10

    @classmethod
    def quick(cls, k: int) -> Self:
        """A trial of seconds, which shows only that everything runs."""
        return cls((0.2, 0.6), (0.4,), requests=60, rounds=1, users=20, k=k)


async def check(
    bundle: Path, trial: Trial, *, settings: Sequence[str] = (), seed: int = 0
) -> dict[str, Any]:
    """Run replicas, fit, predict, compare.

    Returns:
        `levels`, one for each predicted load: rate, requests, predicted and measured p50 and p99,
        errors; `worst` error; `costs`, the fitted model.
    """

    def traffic(rate_each: float, requests: int) -> Traffic:
        return Traffic(rate_each * REPLICAS, requests, users=trial.users, new=NEW)

    async with start_replicas(bundle, REPLICAS, settings) as servers, Client(servers) as client:
        crowd = Crowd(client, REPLICAS, bundle, trial.users, k=trial.k, seed=seed)
        await crowd.meet()
        each = estimate_rate_alone(await crowd.closed(1, seconds=ALONE_S))
        say(f"a request alone takes {1e3 / each:.1f} ms")
        parts: dict[float, list[Seen]] = {load: [] for load in trial.fitted + trial.predicted}
        for turn in range(trial.rounds):
            for number, load in enumerate(sorted(parts)):
                requests = traffic(load * each, -(-trial.requests // trial.rounds))
                parts[load].append(await crowd.open(requests, seed=seed + 1000 * turn + number))
            say(f"round {turn + 1} of {trial.rounds}")
    joined = {load: Seen.join(some) for load, some in parts.items()}
    about = {"bundle": bundle.name, "replicas": REPLICAS, "k": trial.k}
    costs = fit_costs([(load * each, joined[load]) for load in trial.fitted], about)
    levels = []
    for load in trial.predicted:
        requests = traffic(load * each, SIMULATED)
        simulated = simulate(costs, requests, Fleet(REPLICAS), seed=seed)
        row = {"load": load, "rate": round(requests.rate, 1)}
        levels.append(row | compare(simulated.latency_ms(50, 99), joined[load]))
    worst = max(abs(level[f"{name}_error"]) for level in levels for name in ("p50", "p99"))
    return {
        "alone_ms": round(1e3 / each, 3),
        "levels": levels,
        "worst": worst,
        "bound": BOUND,
        "met": worst <= BOUND and not any(level["bad"] for level in levels),
        "costs": costs,
    }


def compare(predicted: Sequence[float], seen: Seen) -> dict[str, Any]:
    """Predicted p50 and p99 beside those that were measured."""
    found: dict[str, Any] = {
        "requests": len(seen.answers),
        "bad": seen.bad,
        "batch_size": round(len(seen.answers) / float((1 / seen.answers["size"]).sum()), 3),
        "server_cores": round(seen.server_s / seen.seconds, 3),
        "generator_cores": round(seen.generator_s / seen.seconds, 3),
    }
    for name, value in zip(("p50", "p99"), predicted, strict=True):
        measured = seen.percentile(float(name[1:]))
        found[f"{name}_predicted_ms"] = round(value, 3)
        found[f"{name}_measured_ms"] = round(measured, 3)
        found[f"{name}_error"] = round(value / measured - 1, 4)
    return found
