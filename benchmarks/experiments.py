"""Look at simulated experiments after every batch of users: how often is the interval wrong?

    python benchmarks/experiments.py

A user has a propensity to follow an answer, drawn from a beta distribution, and gets a few answers
that they follow independently; the service's value of a user is the share that they followed. The
arms are compared by the service's code (`recsys.serving.sequential`) after every 200 users. Users
are drawn into arms at random; that the service's hash does the same is tested apart. An experiment
counts as covered if the interval had the true difference at every look, and as a finding if it
excluded 0 at some look. For comparison: the same looks with a z-test at 5 % over answers, as if
answers were independent and there was only one look.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import time
from dataclasses import dataclass

import numpy as np
from scipy import stats

from recsys.serving import experiments, sequential
from recsys.serving.schemas.experiments import ExperimentBody

SALT = bytes(32)
ALPHA = 1 - experiments.LEVEL
SPREAD = 10.0  # a + b of the beta distribution: users differ much


@dataclass(frozen=True)
class Case:
    """Rates of the first and the second arm, the share of the second, and their drift.

    With drift, both rates vary like a wave between 0.5 and 1.5 times their values.
    """

    name: str
    first: float
    second: float
    share: float = 0.5
    drift: bool = False

    def rates(self, users: int) -> tuple[np.ndarray, np.ndarray]:
        """(users,) rates of the arms for the users in their order."""
        wave = 1 + 0.5 * np.sin(np.arange(users) / users * 6 * np.pi) * self.drift
        return self.first * wave, self.second * wave


CASES = (
    Case("A/A", 0.05, 0.05),
    Case("A/A, share 10 %", 0.05, 0.05, share=0.1),
    Case("A/A, rare", 0.002, 0.002),
    Case("A/A, frequent", 0.6, 0.6),
    Case("A/A, drift", 0.05, 0.05, drift=True),
    Case("A/B, +20 %", 0.05, 0.06),
    Case("A/B, -20 %", 0.05, 0.04),
    Case("A/B, +20 %, share 10 %", 0.05, 0.06, share=0.1),
    Case("A/B, +20 %, drift", 0.05, 0.06, drift=True),
)


def run(case: Case, users: int, every: int, seed: int) -> dict[str, float]:
    """Simulate one experiment."""
    rng = np.random.default_rng(seed)
    looks = np.arange(every, users + 1, every)
    treated = rng.random(users) < case.share
    first, second = case.rates(users)
    rate = np.where(treated, second, first)
    shown = 1 + rng.poisson(2, users)
    followed = rng.binomial(shown, rng.beta(SPREAD * rate, SPREAD * (1 - rate)))
    estimate, low, high = sequential.compare(followed / shown, treated, case.share, ALPHA, looks)
    truth = (np.cumsum(second - first) / np.arange(1, users + 1))[looks - 1]
    found = (low > 0) | (high < 0)
    right = np.sign(estimate) == np.sign(case.second - case.first)
    return {
        "covered": bool(((low <= truth) & (truth <= high)).all()),
        "found": bool(found.any()),
        "right": bool((found & right).any()),
        "users": int(looks[found.argmax()]) if found.any() else users,
        "width": float(high[-1] - low[-1]),
        "z_test": bool((_z(treated, shown, followed)[looks - 1] > stats.norm.ppf(0.975)).any()),
    }


def _z(treated: np.ndarray, shown: np.ndarray, followed: np.ndarray) -> np.ndarray:
    """(users,) absolute z of two proportions of answers, after each user."""
    n1, n0 = np.cumsum(shown * treated), np.cumsum(shown * ~treated)
    k1, k0 = np.cumsum(followed * treated), np.cumsum(followed * ~treated)
    pooled = (k1 + k0) / (n1 + n0)
    with np.errstate(divide="ignore", invalid="ignore"):
        error = np.sqrt(pooled * (1 - pooled) * (1 / n1 + 1 / n0))
        return np.nan_to_num(np.abs(k1 / n1 - k0 / n0) / error)


def check_hash(users: int) -> float:
    """P-value of chi-square: do users fall into arms of 50, 30 and 20 % by the service's hash?"""
    arms = [("a", 5.0), ("b", 3.0), ("c", 2.0)]
    body = ExperimentBody.model_validate(
        {"arms": [{"alias": alias, "weight": weight} for alias, weight in arms]}
    )
    experiment = experiments.Experiment("benchmark", "benchmark", body, 0, None)
    names = [experiment.arm_of(f"user-{n}", SALT) for n in range(users)]
    counts = [names.count(alias) for alias, _ in arms]
    return float(stats.chisquare(counts, users * np.array(body.shares)).pvalue)


def main() -> None:
    """Print a table, and a line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--experiments", type=int, default=1_000)
    parser.add_argument("--users", type=int, default=20_000)
    parser.add_argument("--every", type=int, default=200)
    options = parser.parse_args()
    start = time.process_time()
    print(
        f"{options.experiments:,} experiments of {options.users:,} users each, looked at after "
        f"every {options.every} users"
    )
    print(f"chi-square of the arms of 100,000 users: p = {check_hash(100_000):.2f}")
    head = ("covered", "found", "z-test found", "median users", "median width")
    print(f"{'':<24}" + "".join(f"{name:>14}" for name in head))
    rows = {}
    for number, case in enumerate(CASES):
        done = [
            run(case, options.users, options.every, 1_000_000 * number + seed)
            for seed in range(options.experiments)
        ]
        row = {name: float(np.mean([one[name] for one in done])) for name in done[0]}
        row |= {name: float(np.median([one[name] for one in done])) for name in ("users", "width")}
        rows[case.name] = row
        when = f"{row['users']:,.0f}" if row["found"] > 0.5 else "-"
        print(
            f"{case.name:<24}{row['covered']:>14.1%}{row['found']:>14.1%}{row['z_test']:>14.1%}"
            f"{when:>14}{row['width']:>14.4f}"
        )
    print(
        "covered: the interval (95 %) had the true difference at every look; found: it excluded 0 "
        "at some look; median users: until then, of both arms; width: at the end"
    )
    seconds = time.process_time() - start
    print(f"{seconds:.0f} s of processor time")
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    ).stdout.strip()
    print(json.dumps({"commit": commit, "python": platform.python_version(), "cases": rows}))


if __name__ == "__main__":
    main()
