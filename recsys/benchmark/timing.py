"""Clocks read fairly: every side once a round, in another order each round; medians and spreads.

A busy machine is then busy for all, and sides are compared by the ratio within each round, which
what changes from round to round (the requests, the neighbours' load) touches least.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence


@dataclass(frozen=True)
class Side:
    """One of the ways that are compared.

    Attributes:
        run: does round r's work, to the end: nothing may be left queued on a device.
        prepare: is called before it and not timed.
        rounds: takes part in the first so many rounds only; None for all.
    """

    run: Callable[[int], object]
    prepare: Callable[[int], object] | None = None
    rounds: int | None = None


def interleaved(sides: Mapping[str, Side], rounds: int, *, seed: int = 0) -> dict[str, list[float]]:
    """Seconds of each side in each round that it took part in.

    Args:
        sides: by name.
        rounds: how many.
        seed: of the order within each round.
    """
    rng = np.random.default_rng(seed)
    names, seconds = list(sides), {name: list[float]() for name in sides}
    for number in range(rounds):
        for place in rng.permutation(len(names)):
            side = sides[names[place]]
            if side.rounds is not None and number >= side.rounds:
                continue
            if side.prepare is not None:
                side.prepare(number)
            start = time.perf_counter()
            side.run(number)
            seconds[names[place]].append(time.perf_counter() - start)
    return seconds


def spread(values: Sequence[float], digits: int = 3) -> dict[str, float]:
    """Median, quartiles and 99th percentile."""
    found = np.percentile(values, (50, 25, 75, 99))
    return dict(
        zip(("p50", "p25", "p75", "p99"), (round(float(v), digits) for v in found), strict=True)
    )


def ratio(slow: Sequence[float], fast: Sequence[float]) -> dict[str, float] | None:
    """How many times as long `slow` takes: spread of the ratios within the rounds both have.

    None without such a round. Rounds that a side misses are the last ones.
    """
    common = min(len(slow), len(fast))
    if not common:
        return None
    found = spread(np.divide(slow[:common], fast[:common]).tolist())
    return {key: found[key] for key in ("p50", "p25", "p75")}
