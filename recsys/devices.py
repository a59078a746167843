"""The device `auto`: a GPU where there is one and the model is worth it, or else the CPU.

A small model on a few cores answers before a GPU has been told what to do. So both are measured,
except for large models and where there is no GPU. Service, evaluation and training have this rule;
each measures its own work.
"""

from __future__ import annotations

import gc
import logging
import math
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final, TypeVar

T = TypeVar("T")

AUTO: Final = "auto"
CPU, GPU = "cpu", "cuda"
LARGE_BYTES = 1 << 30  # of weights; no CPU is measured with as many, which would take a while
WARM_UP, ROUNDS = 2, 7
BY_NAME = "device=cuda asks for it all the same, and device=cpu for none"

logger = logging.getLogger("recsys.devices")


def faster_device(*, cpu_s: float, gpu_s: float) -> str:
    """The device with the shorter time; the CPU if they are equal.

    >>> faster_device(cpu_s=0.0023, gpu_s=0.005), faster_device(cpu_s=0.9, gpu_s=0.009)
    ('cpu', 'cuda')
    """
    return GPU if gpu_s < cpu_s else CPU


def is_large(weights: Path) -> bool:
    """Whether the weights in a folder are too many to be measured on a CPU."""
    sizes = (file.stat().st_size for file in weights.glob("*.safetensors"))
    return sum(sizes) >= LARGE_BYTES


def choose_device(
    device: str,
    work: str,
    measure: Callable[[str], float],
    *,
    large: bool,
    by_name: str = BY_NAME,
    show: Callable[[str], object] = str,
) -> str:
    """The device that `device` names; for `auto`, what is faster here.

    The reason is logged. Nothing is if the device is named or torch finds no GPU. A GPU that raises
    when it is measured is not taken, and a warning names the error.

    Args:
        device: a torch device, or `auto`.
        work: what is measured, for the log.
        measure: the seconds of the work that is planned, on `cpu` or `cuda`. It is called only for
            `auto` on a machine with a GPU.
        large: the work takes too long on a CPU to be measured there, so a GPU that works is taken.
        by_name: how to have a device without a measurement, for the warning.
        show: takes the times if both devices were measured, for who does not see the log.

    Raises:
        Exception: what `measure` raises on the CPU.
    """
    if device != AUTO:
        return device
    import torch

    if not torch.cuda.is_available():
        return CPU
    fields: dict[str, object] = {"work": work, "large": large}
    chosen = GPU
    seconds = {} if large else {CPU: measure(CPU)}
    try:
        torch.zeros(1, device=GPU)  # raises if another process has the GPU for itself
        if not large:
            seconds[GPU] = measure(GPU)
    except Exception as error:
        warn_not_used("it could not be measured", work, error, by_name)
        return CPU
    if not large:
        show(", ".join(f"{1000 * taken:.1f} ms on {name}" for name, taken in seconds.items()))
        fields |= {f"{name}_ms": round(1000 * taken, 2) for name, taken in seconds.items()}
        chosen = faster_device(cpu_s=seconds[CPU], gpu_s=seconds[GPU])
    fields["device"] = chosen
    logger.info("device %s", fields, extra={"fields": fields})
    return chosen


def or_on_cpu(device: str, work: str, run: Callable[[str], T]) -> T:
    """The result of `run` on a device; for `auto`, on the CPU if the GPU's memory does not hold it.

    Raises:
        torch.OutOfMemoryError: another device than `auto` is too small.
    """
    import torch

    try:
        return run(device)
    except torch.OutOfMemoryError as error:
        if device != AUTO:
            raise
        problem = error.with_traceback(None)  # which refers to all that is there already
    gc.collect()  # captured passes and their model refer to each other
    torch.cuda.empty_cache()
    warn_not_used("its memory does not hold what it takes", work, problem)
    return run(CPU)


def warn_not_used(reason: str, work: str, error: Exception, by_name: str = BY_NAME) -> None:
    """Log that work which `auto` gave to a GPU runs on the CPU."""
    fields = {"work": work, "device": CPU, "error": f"{type(error).__name__}: {error}"}
    message = "the GPU is not used, since %s; %s: %s"
    logger.warning(message, reason, by_name, fields, extra={"fields": fields})


def typical_seconds(run: Callable[[], object], limit_s: float = math.inf) -> float:
    """The median time of `run`, which must wait for its device, behind two runs to warm up.

    Those may take long on a GPU, which is set up and compiles then. Of the others none but the
    first begins after `limit_s`.
    """
    for _ in range(WARM_UP):
        run()
    taken: list[float] = []
    end = time.perf_counter() + limit_s
    while len(taken) < ROUNDS and (start := time.perf_counter()) < end:
        run()
        taken.append(time.perf_counter() - start)
    return statistics.median(taken)
