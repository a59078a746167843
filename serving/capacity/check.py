"""Check: what the simulation predicts for two replicas, beside what two replicas do.

The cost model is fitted to loads of some rates, the prediction is made for others in between, and
neither knows the other's requests. Both kinds of loads are run in turn, in several rounds, so that
what else the machine does falls on both alike. While costs are measured all replicas are equally
busy, since they share cores with each other and with the load.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recsys.errors import ConfigError
from recsys.progress import say
from recsys.serving.capacity.measure import Crowd, Seen, costs_of, rate_alone, replicas
from recsys.serving.capacity.simulation import Fleet, simulate
from recsys.serving.capacity.traffic import Traffic

BOUND = 0.15
SIMULATED = 200_000  # requests a level: so many that the prediction itself does not wobble
ALONE_S = 3.0  # of one client asking, by which loads are chosen


@dataclass(frozen=True)
class Trial:
    """What is run.

    Attributes:
        replicas: servers.
        fitted: loads that costs are taken from, as shares of what a replica does one by one.
        predicted: loads that are predicted and measured.
        fit_requests, check_requests: of each load, in all rounds.
        rounds: in which they are run.
        users: people who come back.
        new: share of requests of others.
        k: items asked for.
    """

    replicas: int = 2
    fitted: tuple[float, ...] = (0.3, 0.5, 0.7, 0.9)
    predicted: tuple[float, ...] = (0.4, 0.6, 0.8)
    fit_requests: int = 4200
    check_requests: int = 5100
    rounds: int = 3
    users: int = 400
    new: float = 0.2
    k: int = 10

    def __post_init__(self) -> None:
        if set(self.fitted) & set(self.predicted):
            raise ConfigError("a load that is fitted cannot be predicted")

    @classmethod
    def quick(cls, k: int) -> Trial:
        """One that takes seconds and shows only that it runs."""
        return cls(
            fitted=(0.2, 0.6), predicted=(0.4,), fit_requests=60, check_requests=60, rounds=1,
            users=20, k=k,
        )  # fmt: skip


async def check(
    bundle: Path, trial: Trial, *, settings: Sequence[str] = (), seed: int = 0
) -> dict[str, Any]:
    """Run replicas, fit, predict, compare.

    Returns:
        `levels`, one for each predicted load: rate, requests, predicted and measured p50 and p99,
        errors; `worst` error; `costs`, the fitted model; how busy the machine was.
    """
    async with replicas(bundle, trial.replicas, settings) as servers:
        crowd = Crowd(servers, bundle, trial.users, k=trial.k, seed=seed)
        await crowd.meet()
        alone = await crowd.crowd(1, seconds=ALONE_S)
        each = rate_alone(alone)
        say(
            f"a request alone takes {1e3 / each:.1f} ms; loads are shares of {each:.0f}/s a replica"
        )
        parts: dict[float, list[Seen]] = {load: [] for load in trial.fitted + trial.predicted}
        for turn in range(trial.rounds):
            for number, load in enumerate(sorted(parts)):
                wanted = trial.fit_requests if load in trial.fitted else trial.check_requests
                traffic = _traffic(trial, load * each, -(-wanted // trial.rounds))
                seen = await crowd.ask(traffic, seed=seed + 1000 * turn + number)
                parts[load].append(seen)
            say(f"round {turn + 1} of {trial.rounds}")
        crowd.close()
    joined = {load: Seen.join(some) for load, some in parts.items()}
    fitted = [(load * each, joined[load]) for load in trial.fitted]
    costs = costs_of(fitted, {"bundle": bundle.name, "replicas": trial.replicas, "k": trial.k})
    levels = []
    for load in trial.predicted:
        traffic = _traffic(trial, load * each, SIMULATED)
        played = simulate(costs, traffic, Fleet(trial.replicas), seed=seed)
        levels.append(_compare(load, traffic.rate, played.latency_ms(50, 99), joined[load]))
    errors = [abs(level[f"{name}_error"]) for level in levels for name in ("p50", "p99")]
    return {
        "alone_ms": round(1e3 / each, 3),
        "cold_ms": round(costs.cold_ms, 3),
        "line_ms": [round(part, 3) for part in costs.line],
        "levels": levels,
        "worst": round(max(errors), 4),
        "bound": BOUND,
        "met": max(errors) <= BOUND and not any(level["bad"] for level in levels),
        "costs": costs,
    }


def _traffic(trial: Trial, rate_each: float, requests: int) -> Traffic:
    return Traffic(rate_each * trial.replicas, requests, users=trial.users, new=trial.new)


def _compare(load: float, rate: float, predicted: Sequence[float], seen: Seen) -> dict[str, Any]:
    found: dict[str, Any] = {
        "load": load,
        "rate": round(rate, 1),
        "requests": len(seen),
        "bad": seen.bad,
        "batch_size": round(len(seen) / float((1 / seen.size).sum()), 3),
        "server_cores": round(seen.cpu_s / seen.seconds, 3),
        "generator_cores": round(seen.generator_s / seen.seconds, 3),
    }
    for name, value in zip(("p50", "p99"), predicted, strict=True):
        measured = seen.percentile(float(name[1:]))
        found[f"{name}_predicted_ms"] = round(value, 3)
        found[f"{name}_measured_ms"] = round(measured, 3)
        found[f"{name}_error"] = round(value / measured - 1, 4)
    return found
