"""Fair timing, and what a result must say of the machine it was measured on.

Every side runs once a round, in another order each round: a busy machine is then busy for all
sides. Sides are compared by the ratio of their times within each round, which changes least with
the requests and with other work on the machine.
"""

from __future__ import annotations

import os
import platform
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch

from recsys import __version__

Row = dict[str, Any]


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


def time_interleaved(sides: Mapping[str, Side], rounds: int) -> dict[str, list[float]]:
    """Seconds of all sides by name, one for each round that a side took part in."""
    rng = np.random.default_rng(0)
    names: list[str] = list(sides)
    times: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(rounds):
        for index in rng.permutation(len(names)):
            side = sides[names[index]]
            if side.rounds is not None and number >= side.rounds:
                continue
            if side.prepare is not None:
                side.prepare(number)
            start = time.perf_counter()
            side.run(number)
            times[names[index]].append(time.perf_counter() - start)
    return times


def summarize(values: Sequence[float]) -> dict[str, float]:
    """Median, quartiles and 99th percentile."""
    percentiles = np.percentile(values, (50, 25, 75, 99))
    names = ("p50", "p25", "p75", "p99")
    return {name: round(float(p), 3) for name, p in zip(names, percentiles, strict=True)}


def milliseconds(seconds: Sequence[float]) -> dict[str, float]:
    """`summarize` of seconds in milliseconds."""
    return summarize([1000 * s for s in seconds])


def compare_times(slow: Sequence[float], fast: Sequence[float]) -> dict[str, float] | None:
    """Median and quartiles of `slow / fast` over the rounds that both have, which come first.

    None without such a round.

    >>> compare_times([4, 4, 90], [1, 2, 30])["p50"]
    3.0
    """
    common = min(len(slow), len(fast))
    if not common:
        return None
    ratios = summarize(np.divide(slow[:common], fast[:common]).tolist())
    return {key: ratios[key] for key in ("p50", "p25", "p75")}


def environment() -> Row:
    """Commit, processor, load, versions and threads, as plain values."""
    return {
        "commit": _commit(),
        "cpu": _processor(),
        "cores": os.cpu_count(),
        "load": [round(x, 2) for x in os.getloadavg()],
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "recsys": __version__,
        **{name: version(name) for name in ("torch", "transformers")},
    }


def _commit() -> str | None:
    """Of the code that runs, wherever it is run from; None outside a checkout."""
    command = ["git", "-C", os.fspath(Path(__file__).parent), "describe", "--always", "--dirty"]
    try:
        answer = subprocess.run([*command, "--exclude=*"], capture_output=True, text=True)
    except FileNotFoundError:
        return None
    return answer.stdout.strip() or None


def _processor() -> str:
    file = Path("/proc/cpuinfo")
    lines = file.read_text(encoding="utf-8").splitlines() if file.is_file() else []
    names = {line.split(":")[1].strip() for line in lines if line.startswith("model name")}
    return ", ".join(sorted(names)) or platform.processor()
