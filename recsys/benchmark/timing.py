"""Fair timing: every side runs once a round, in another order each round.

A busy machine is then busy for all sides. Sides are compared by the ratio of their times within
each round, which changes least with the requests and with other work on the machine.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np


@dataclass(frozen=True)
class Side:
    """One of the things that are compared.

    Attributes:
        run: does the work of round r; it must wait for what it queues on a device.
        prepare: called before `run` and not timed.
        rounds: the side takes part in this many first rounds; None for all.
    """

    run: Callable[[int], object]
    prepare: Callable[[int], object] | None = None
    rounds: int | None = None


@dataclass(frozen=True)
class Times:
    """Seconds of one side, round by round.

    Attributes:
        wall: elapsed time.
        cpu: processor time of this process, in all threads. Other work on the machine hardly
            changes it. It does not include the time of a device.
    """

    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)


def time_interleaved(sides: Mapping[str, Side], rounds: int, *, seed: int = 0) -> dict[str, Times]:
    """Time all sides.

    Args:
        sides: by name.
        rounds: number of rounds.
        seed: of the order of sides within each round.

    Returns:
        Times by name, one for each round that the side took part in.
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


def summarize(values: Sequence[float], digits: int = 3) -> dict[str, float]:
    """Median, quartiles and 99th percentile."""
    found = np.percentile(values, (50, 25, 75, 99))
    return dict(
        zip(("p50", "p25", "p75", "p99"), (round(float(v), digits) for v in found), strict=True)
    )


def compare_times(slow: Sequence[float], fast: Sequence[float]) -> dict[str, float] | None:
    """Median and quartiles of `slow / fast` over the rounds that both have, which come first.

    None without such a round.

    >>> compare_times([4, 4, 90], [1, 2, 30])["p50"]
    3.0
    """
    common = min(len(slow), len(fast))
    if not common:
        return None
    found = summarize(np.divide(slow[:common], fast[:common]).tolist())
    return {key: found[key] for key in ("p50", "p25", "p75")}
