"""Training state on disk: what a run needs to go on after a SIGKILL as if nothing had happened.

A checkpoint is a folder `step-<n>` written under another name and renamed, so it is there whole or
not at all; the one before is removed only then. Tensors are safetensors, numbers are JSON.
"""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file, save_file

from recsys.errors import ArtifactError

if TYPE_CHECKING:
    from pathlib import Path

    from torch import nn

TENSORS = "tensors.safetensors"
STATE = "state.json"
_WEIGHT, _BEST, _OPTIMIZER, _RNG = "weight.", "best.", "optimizer.", "rng."


@dataclass
class Progress:
    """Where a run stands.

    Attributes:
        epoch: epochs finished.
        batch: batches of the current epoch that were trained on.
        step: optimizer steps taken.
        tokens: tokens trained on by this process.
        seconds: time spent, over all sittings.
        loss_sum: of the steps since the last line of the log.
        loss_steps: how many these are.
        evaluated: step of the last validation, -1 before the first.
        best: metrics of the best validation, empty before the first.
        stale: validations since then.
        log_bytes: length of the log.
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


class Checkpoints:
    """The checkpoints of one run.

    Attributes:
        folder: where they lie; may not exist yet.
        run: identity of the run (settings and parents); checkpoints of another one are not resumed.
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
        """Write a checkpoint and then remove older ones."""
        names = _names(model)
        tensors = {_WEIGHT + name: p.detach() for name, p in names.items()}
        tensors |= {_BEST + name: value for name, value in best.items()}
        tensors[_RNG + "cpu"] = torch.get_rng_state()
        if torch.cuda.is_available():
            tensors[_RNG + "cuda"] = torch.cuda.get_rng_state()
        for name, parameter in names.items():
            for key, value in optimizer.state.get(parameter, {}).items():
                tensors[f"{_OPTIMIZER}{key}.{name}"] = value
        self.folder.mkdir(parents=True, exist_ok=True)
        final = self.folder / f"step-{progress.step}"
        temporary = self.folder / f".step-{progress.step}"
        shutil.rmtree(temporary, ignore_errors=True)  # of a crash
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
        """Put the newest checkpoint into `model`, `optimizer` and torch's random generators.

        Returns:
            Progress and the best weights; None where there is nothing to resume.

        Raises:
            ArtifactError: a checkpoint of this run that does not fit the model.
        """
        found = sorted(self.folder.glob("step-*"), key=lambda p: int(p.name[5:]), reverse=True)
        for folder in found:
            state = json.loads((folder / STATE).read_text(encoding="utf-8"))
            if state["run"] == self.run:
                return Progress(**state["progress"]), self._restore(folder, model, optimizer)
        return None

    def remove(self) -> None:
        """Delete all of it: the run is finished."""
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
                f"{folder} does not fit the model (parameter {odd}); use --force to start anew"
            )
        with torch.no_grad():
            for name, parameter in names.items():
                parameter.copy_(tensors[_WEIGHT + name])
        for key, value in tensors.items():
            if key.startswith(_OPTIMIZER):
                slot, _, name = key.removeprefix(_OPTIMIZER).partition(".")
                parameter = names[name]
                optimizer.state[parameter][slot] = value.to(parameter.device)
        torch.set_rng_state(tensors[_RNG + "cpu"])
        if torch.cuda.is_available() and _RNG + "cuda" in tensors:
            torch.cuda.set_rng_state(tensors[_RNG + "cuda"])
        return {k.removeprefix(_BEST): v for k, v in tensors.items() if k.startswith(_BEST)}


def trainable_state(model: nn.Module) -> dict[str, torch.Tensor]:
    """A copy of the trained parameters, on the host."""
    return {name: p.detach().cpu().clone() for name, p in _names(model).items()}


def restore_trainable(model: nn.Module, state: dict[str, torch.Tensor]) -> None:
    """Put `trainable_state` back."""
    with torch.no_grad():
        for name, parameter in _names(model).items():
            parameter.copy_(state[name])


def _names(model: nn.Module) -> dict[str, nn.Parameter]:
    """Trained parameters by name; a tied matrix appears once."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad}
