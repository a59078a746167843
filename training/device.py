"""Where a stage trains: on a GPU if there is one and a step takes less time there.

A single process measures a few steps of the stage's own model and batches on both devices.
`accelerate launch` and `torchrun` name the device for their processes, as the variable
`ACCELERATE_USE_CPU` (yes or no) does for a process without them.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Sequence
from itertools import cycle, islice
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn

from recsys.devices import AUTO, GPU, choose_device, typical_seconds
from recsys.progress import say
from recsys.training.loop import Data, Inputs, make_optimizer
from recsys.training.settings import LoopConfig

LAUNCHED = ("ACCELERATE_USE_CPU", "LOCAL_RANK")
BY_NAME = "ACCELERATE_USE_CPU=no takes it all the same, and ACCELERATE_USE_CPU=yes the CPU"
BATCHES = 4
LIMIT_S = 2.0  # of the steps on one device that count; the last one may end later
LARGE_STEP = 2e11  # operations, which take two CPU cores some seconds
Make = Callable[..., nn.Module]


def on_chosen_device(
    name: str, models: Sequence[nn.Module], make: Make, data: Data, config: LoopConfig
) -> tuple[nn.Module, torch.device]:
    """The loss module of a stage, made for the device where it is trained soonest.

    Steps are measured on copies of the models, and with another state of torch's generators, so
    what is trained afterwards does not depend on the measurement.

    Args:
        name: of the stage, for progress and the log.
        models: those that run in a step, the trained one first.
        make: (device, *models) -> the loss module. It moves all models but the first.
        data: the batches.
        config: of the optimizer.

    Raises:
        Exception: what a step raises on the CPU.
    """
    device = Accelerator().device
    if device.type == GPU and not any(variable in os.environ for variable in LAUNCHED):
        batches = list(islice(data.epoch(0), BATCHES))
        parameters = sum(p.numel() for model in models for p in model.parameters())
        large = not batches or 6 * parameters * max(b.size for b in batches) > LARGE_STEP

        def measure(device: str) -> float:
            module = make(torch.device(device), *copy.deepcopy(list(models)))
            return step_seconds(module.to(device), batches, config, torch.device(device))

        chosen = choose_device(
            AUTO, f"training of {name}", measure, large=large, by_name=BY_NAME,
            show=lambda times: say(f"{name}: a step takes {times}"),
        )  # fmt: skip
        device = torch.device(chosen)
    return make(device, *models), device


def step_seconds(
    module: nn.Module, batches: Sequence[Inputs], config: LoopConfig, device: torch.device
) -> float:
    """Typical time of a step with one batch, on a device that has the module."""
    optimizer, source = make_optimizer(module, config), cycle(batches)

    def step() -> float:
        inputs: Any = [torch.from_numpy(array).to(device) for array in next(source).inputs]
        loss = module(*inputs)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())  # waits for the device

    with torch.random.fork_rng(devices=[device] if device.type == GPU else []):
        module.train()
        return typical_seconds(step, LIMIT_S)
