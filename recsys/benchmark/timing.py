"""Clocks read fairly: every side once a round, in another order each round; medians and spreads.

A busy machine is then busy for all, and sides are compared by the ratio within each round, which
what changes from round to round (the requests, the neighbours' load) touches least.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np


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


@dataclass(frozen=True)
class Times:
    """Seconds of one side, round by round.

    Attributes:
        wall: that passed.
        cpu: that this process computed, in all threads; neighbours hardly touch it, but a device's
            time is not in it.
    """

    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)


def interleaved(sides: Mapping[str, Side], rounds: int, *, seed: int = 0) -> dict[str, Times]:
    """Times of each side in each round that it took part in.

    Args:
        sides: by name.
        rounds: how many.
        seed: of the order within each round.
    """
    rng = np.random.default_rng(seed)
    names, times = list(sides), {name: Times() for name in sides}
    for number in range(rounds):
        for place in rng.permutation(len(names)):
            side = sides[names[place]]
            if side.rounds is not None and number >= side.rounds:
                continue
            if side.prepare is not None:
                side.prepare(number)
            start, cpu = time.perf_counter(), time.process_time()
            side.run(number)
            times[names[place]].cpu.append(time.process_time() - cpu)
            times[names[place]].wall.append(time.perf_counter() - start)
    return times


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
