"""How often does the gate let a retrained version pass? Its rule on invented shops.

The champion puts the next item of a user at a rank of its list of ten with probability HIT, at a
random rank, and nowhere otherwise. The challenger agrees with it on most events. It loses a share
of the hits, and finds as many others as it needs for the true difference. Users are asked for one
event, or for up to five (`recsys.evaluation.gate.replays`); a user's hits are alike.

    python benchmarks/gate.py
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from reporting import Report, Table, begin, publish, read_options

from recsys.evaluation.compare import compare_rankers
from recsys.evaluation.verdict import CHALLENGER, CHAMPION, GateConfig, decide

HIT = 0.12  # of the champion; NDCG@10 is about half of it
CHANGED = 0.35  # of the champion's hits that the challenger has not, without any difference
USERS = (200, 2_000, 20_000)
LOST = (0.0, 0.05, 0.2)
EVENTS = (1, 5)


def ranks(
    rng: np.random.Generator, users: int, events: int, lost: float
) -> list[NDArray[np.int64]]:
    """Ranks from 1 of the next items in the lists of challenger and champion; 0 for none."""
    liking = rng.beta(1, 1 / HIT - 1, users).repeat(events)  # users differ a lot
    champion = np.where(rng.random(len(liking)) < liking, rng.integers(1, 11, len(liking)), 0)
    kept = (champion > 0) & (rng.random(len(liking)) >= CHANGED + lost)
    found = liking * CHANGED / np.maximum(1 - liking, 1e-9)  # as many as without a difference
    new = (champion == 0) & (rng.random(len(liking)) < found)
    challenger = np.where(kept, champion, np.where(new, rng.integers(1, 11, len(liking)), 0))
    return [challenger, champion]


def offered(rng: np.random.Generator, users: int, events: int, lost: float) -> bool:
    """Whether the gate offers the challenger on one draw of users."""
    names = np.arange(users).repeat(events)
    tables = [
        pa.table(
            {
                "ranker": [name] * len(names), "seen": ["masked"] * len(names), "user_id": names,
                "rank": found, "target_popularity": np.ones(len(names), np.int64),
                "targets": np.ones(len(names), np.int64),
            }
        )
        for name, found in zip((CHALLENGER, CHAMPION), ranks(rng, users, events, lost), strict=True)
    ]  # fmt: skip
    rows = compare_rankers(pa.concat_tables(tables), CHALLENGER, CHAMPION, resamples=300)
    found = {
        "window": {"users": users},
        "comparisons": rows,
        "coverage": {"gap": {"high": 0.0}},
        "latency_ms": {CHALLENGER: None, CHAMPION: None},
    }
    return not decide(found, GateConfig())


def share(users: int, events: int, lost: float, draws: int, seed: int = 0) -> float:
    """The share of draws in which the gate offers a challenger that truly loses `lost`."""
    rng = np.random.default_rng([seed, users, events, round(100 * lost)])
    return float(np.mean([offered(rng, users, events, lost) for _ in range(draws)]))


@dataclass(frozen=True)
class Options:
    """How much is drawn.

    Attributes:
        draws: for each figure; a quarter of them for the largest shop.
    """

    draws: int = 400


def main(argv: Sequence[str] | None = None) -> None:
    """Print the share of draws in which the gate offers the challenger, and one JSON line."""
    options, run = read_options(Options, __doc__, {"draws": 4}, argv)
    document = begin("gate", options, run)
    document["offered"], lines = [], []
    for events, users in product(EVENTS, USERS):
        count = options.draws if users < max(USERS) else options.draws // 4  # a draw takes its time
        shares = {f"{-lost:+.0%}": share(users, events, lost, count) for lost in LOST}
        document["offered"].append({"events": events, "users": users, **shares})
        lines.append([str(users), str(events), *(f"{value:.2f}" for value in shares.values())])
    table = Table("Challenger offered", ("users", "events", *shares), lines)
    publish(document, Report([table]), run.out)


if __name__ == "__main__":
    main()
