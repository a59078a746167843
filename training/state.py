"""Checkpoints: the training state on disk, from which a killed run resumes with the same result.

A checkpoint is a folder `step-<n>` that is written under another name and renamed, so that it is
always complete; then the previous one is removed. Tensors are safetensors, numbers are JSON.

The main process writes, and a run may be resumed with another number of processes.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import nn

from recsys.errors import ArtifactError

TENSORS = "tensors.safetensors"
STATE = "state.json"
_WEIGHT, _BEST, _OPTIMIZER, _RNG = "weight.", "best.", "optimizer.", "rng."


@dataclass
class Progress:
    """The progress of a training run.

    Attributes:
        epoch: finished epochs.
        batch: batches of the current epoch that were trained on.
        step: optimizer steps taken.
        tokens: tokens that this process has trained on.
        seconds: training time, including earlier parts of a resumed run.
        loss_sum: of the steps since the last line of the log.
        loss_steps: number of these steps.
        evaluated: step of the last validation, -1 before the first.
        best: metrics of the best validation, empty before the first.
        stale: validations since then.
        log_bytes: length of the log.
        device: kind of the device that trains.
    """

    epoch: int = 0
    batch: int = 0
    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    loss_sum: float = 0.0
    loss_steps: int = 0
    evaluated: int = -1
    best: dict[str, float] = field(default_factory=dict)
    stale: int = 0
    log_bytes: int = 0
    device: str = "cpu"


class Checkpoints:
    """The checkpoints of one run.

    Attributes:
        folder: of the checkpoints; it need not exist.
        run: identity of the run (settings and parents); other runs' checkpoints are ignored.
    """

    def __init__(self, folder: Path, run: dict[str, Any]) -> None:
        """Use `folder` for the run that `run` (plain values) identifies."""
        self.folder, self.run = folder, json.loads(json.dumps(run, default=str))

    def save(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        progress: Progress,
        best: dict[str, torch.Tensor],
    ) -> None:
        """Write a checkpoint, then remove older ones. All processes must call it."""
        names = _names(model)
        tensors = {_WEIGHT + name: p.detach() for name, p in names.items()}
        for name, parameter in names.items():
            for key, value in optimizer.state.get(parameter, {}).items():
                tensors[f"{_OPTIMIZER}{key}.{name}"] = value
        # Each process has its own random numbers for dropout.
        for kind, states in _generators(names.values()).items():
            tensors |= {f"{_RNG}{kind}.{rank}": state for rank, state in enumerate(states)}
        if _rank() == 0:
            tensors |= {_BEST + name: value for name, value in best.items()}
            self._write(tensors, progress)

    def _write(self, tensors: dict[str, torch.Tensor], progress: Progress) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        final = self.folder / f"step-{progress.step}"
        temporary = self.folder / f".step-{progress.step}"
        shutil.rmtree(temporary, ignore_errors=True)  # left by a crash
        temporary.mkdir()
        contiguous = {k: v.detach().cpu().contiguous().clone() for k, v in tensors.items()}
        save_file(contiguous, temporary / TENSORS)
        state = {"run": self.run, "progress": asdict(progress)}
        (temporary / STATE).write_text(json.dumps(state), encoding="utf-8")
        for file in temporary.iterdir():
            with file.open("rb") as stream:
                os.fsync(stream.fileno())
        shutil.rmtree(final, ignore_errors=True)
        temporary.rename(final)
        for other in self.folder.glob("*step-*"):
            if other != final:
                shutil.rmtree(other, ignore_errors=True)

    def load(
        self, model: nn.Module, optimizer: torch.optim.Optimizer
    ) -> tuple[Progress, dict[str, torch.Tensor]] | None:
        """Load the newest checkpoint into `model`, `optimizer` and torch's random generators.

        Returns:
            progress and the best weights, or None if there is no checkpoint of the run.

        Raises:
            ArtifactError: a checkpoint of this run does not fit the model.
        """
        folders = sorted(self.folder.glob("step-*"), key=lambda p: int(p.name[5:]), reverse=True)
        for folder in folders:
            state = json.loads((folder / STATE).read_text(encoding="utf-8"))
            if state["run"] == self.run:
                return Progress(**state["progress"]), self._restore(folder, model, optimizer)
        return None

    def remove(self) -> None:
        """Delete all checkpoints."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def _restore(
        self, folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer
    ) -> dict[str, torch.Tensor]:
        tensors = load_file(folder / TENSORS)
        names = _names(model)
        stored = {k.removeprefix(_WEIGHT) for k in tensors if k.startswith(_WEIGHT)}
        if stored != set(names):
            odd = sorted(stored ^ set(names))[0]
            raise ArtifactError(
                f"{folder} does not fit the model (parameter {odd}); use --force to start again"
            )
        model.load_state_dict({name: tensors[_WEIGHT + name] for name in names}, strict=False)
        for key, value in tensors.items():
            if key.startswith(_OPTIMIZER):
                slot, _, name = key.removeprefix(_OPTIMIZER).partition(".")
                parameter = names[name]
                optimizer.state[parameter][slot] = value.to(parameter.device)
        mine = {kind: f"{_RNG}{kind}.{_rank()}" for kind in ("cpu", "cuda")}
        if mine["cpu"] in tensors:  # an additional process keeps its new state
            torch.set_rng_state(tensors[mine["cpu"]])
        if torch.cuda.is_available() and mine["cuda"] in tensors:
            torch.cuda.set_rng_state(tensors[mine["cuda"]])
        return {k.removeprefix(_BEST): v for k, v in tensors.items() if k.startswith(_BEST)}


def trainable_state(model: nn.Module) -> dict[str, torch.Tensor]:
    """A copy of the trained parameters on the host."""
    return {name: p.detach().cpu().clone() for name, p in _names(model).items()}


def _rank() -> int:
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def _generators(parameters: Iterable[nn.Parameter]) -> dict[str, list[torch.Tensor]]:
    """States of torch's random generators where parameters are: kind -> one per process."""
    states = {"cpu": torch.get_rng_state()}
    if any(parameter.device.type == "cuda" for parameter in parameters):
        states["cuda"] = torch.cuda.get_rng_state()
    gathered = [states]
    if dist.is_available() and dist.is_initialized():
        gathered = [states] * dist.get_world_size()
        dist.all_gather_object(gathered, states)
    return {kind: [states_of_process[kind] for states_of_process in gathered] for kind in states}


def _names(model: nn.Module) -> dict[str, nn.Parameter]:
    """Trained parameters by name; a tied matrix appears once."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad}
