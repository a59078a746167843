"""The training loop: steps, schedule, validation, checkpoints, log.

`fit` takes a loss module, batches and a validation callback. accelerate connects processes, so the
same program runs on a CPU, a GPU, or several under `accelerate launch`, where each process has all
parameters and batches of its own (DDP).
"""

from __future__ import annotations

import atexit
import json
import math
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import islice
from typing import Any, Protocol

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from numpy.typing import NDArray
from torch import nn

from recsys.errors import ConfigError
from recsys.progress import Bar, say, track
from recsys.training.settings import LoopConfig
from recsys.training.state import Checkpoints, Progress, trainable_state

LOG = "log.jsonl"
LOG_EVERY_STEPS = 50
BETAS = (0.9, 0.98)  # of AdamW
CLIP = 1.0  # largest norm of the gradient
UNTIMED = 0.05  # first part of a time budget, which the schedule does not count
CHECKPOINTS = 0.05  # of the time, at most; those of a large model are written less often


@atexit.register
def _leave_process_group() -> None:
    """Leave the process group in order: a process that merely exits may abort the others."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


class Inputs(Protocol):
    """One batch."""

    @property
    def inputs(self) -> tuple[NDArray[Any], ...]:
        """Arguments of the loss module."""

    @property
    def size(self) -> int:
        """Number of tokens, padding included."""


class Data(Protocol):
    """The batches of all epochs (`recsys.training.batches.TrainingBatches`)."""

    def epoch(self, epoch: int, start: int = 0) -> Iterator[Inputs]:
        """Batches of one epoch from number `start` on."""

    def count(self, epoch: int = 0) -> int:
        """Number of batches of an epoch."""


def autocast_dtype(precision: str, device: torch.device) -> torch.dtype:
    """bfloat16 or float32, as `precision` says for `device`."""
    if precision == "auto":
        if device.type == "cuda":
            fast = torch.cuda.is_bf16_supported(including_emulation=False)
        else:
            fast = device.type == "cpu" and torch.cpu._is_avx512_bf16_supported()
        return torch.bfloat16 if fast else torch.float32
    return torch.bfloat16 if precision == "bf16" else torch.float32


def fit(
    module: nn.Module,
    data: Data,
    config: LoopConfig,
    checkpoints: Checkpoints,
    *,
    name: str,
    validate: Callable[[], dict[str, float]] | None = None,
    seed: int = 0,
    device: torch.device | None = None,
) -> Progress:
    """Train `module` in place.

    It ends in evaluation mode with the weights of the best validation, or with the last weights if
    there was none. A run that was killed continues from its newest checkpoint; with a time budget
    it has the time that was left. On a CPU, the same call gives the same bits, interrupted or not,
    if its steps fit into the time budget.

    Args:
        module: a batch's inputs -> scalar loss (`recsys.training.objective.NextToken`).
        data: batches by epoch and number.
        config: the settings.
        checkpoints: where state and `log.jsonl` are stored.
        name: of the model, for progress and messages.
        validate: called on the main process with the module in evaluation mode; returns metrics.
            Larger values of the first one are better; it selects the weights and is shown.
        seed: of dropout inside the model.
        device: of a single process (`recsys.training.device`); None is what accelerate chooses.

    Returns:
        Progress at the end, with the metrics of the selected weights.

    Raises:
        ConfigError: the loss is not finite.
    """
    device = device or Accelerator().device
    return _Run(module, data, config, checkpoints, name, validate, seed, device).train()


@dataclass
class _Run:
    """One call of `fit`, with its arguments."""

    module: nn.Module
    data: Data
    config: LoopConfig
    checkpoints: Checkpoints
    name: str
    validate: Callable[[], dict[str, float]] | None
    seed: int
    device: torch.device

    def __post_init__(self) -> None:
        module, config, checkpoints = self.module, self.config, self.checkpoints
        self.shown: dict[str, float] = {}  # the first metric of the last validation
        self.accelerator = Accelerator()
        self.world, self.main = self.accelerator.num_processes, self.accelerator.is_main_process
        torch.manual_seed(self.seed + self.accelerator.process_index)
        self.optimizer = make_optimizer(module.to(self.device), config)
        resumed = checkpoints.load(module, self.optimizer)
        self.progress, self.best = resumed or (Progress(), {})
        self.progress.device = self.device.type
        if resumed:
            at, spent = self.progress.step, self.progress.seconds
            say(f"{self.name}: resuming at step {at} after {spent:.0f} s")
        if self.main:
            say(f"{self.name}: on {self.device}")
        self.wrapped = self.accelerator.prepare(module, device_placement=[False])
        self.loss = torch.tensor(self.progress.loss_sum, device=self.device)
        self.start = time.monotonic() - self.progress.seconds
        in_epoch = -(-self.data.count() // self.world)
        epochs = max(config.epochs, -(-config.min_steps // in_epoch))
        steps = epochs * in_epoch
        self.total_steps = min(steps, config.max_steps or steps)
        # As many validations as `epochs` passes would have, up to rounding.
        self.evaluate_every = config.evaluate_every * epochs // config.epochs
        self.budget_s = (config.max_minutes or math.inf) * 60
        self.saved, self.pause = time.monotonic(), 60 * config.checkpoint_minutes
        self.log = checkpoints.folder / LOG
        if self.main:  # what was written after the checkpoint is written again
            checkpoints.folder.mkdir(parents=True, exist_ok=True)
            with self.log.open("ab") as stream:
                stream.truncate(self.progress.log_bytes)

    @property
    def seconds(self) -> float:
        """Training time, including earlier parts of a resumed run."""
        return time.monotonic() - self.start

    def train(self) -> Progress:
        """Train until a budget is spent or validation no longer improves."""
        progress, patience = self.progress, self.config.patience
        timed = not math.isinf(self.budget_s)
        left = self.budget_s - self.seconds if timed else self.total_steps - progress.step
        shown = track(self.name, max(left, 0)) if self.main else nullcontext()
        with shown as bar:
            while self._spent() < 1 and not 0 < patience <= progress.stale:
                self._epoch(bar, timed)
                every = self.evaluate_every
                if progress.batch == 0 and every and progress.epoch % every == 0:
                    self._evaluate()
        if self.config.evaluate_every and progress.evaluated != progress.step:
            self._evaluate()
        else:
            self._checkpoint()
        if self.best:
            self.module.load_state_dict(self.best, strict=False)
        self.module.eval()
        return progress

    def _epoch(self, bar: Bar | None, timed: bool) -> None:
        """Train to the end of the epoch or of the budget."""
        progress = self.progress
        batches = self.data.epoch(progress.epoch, progress.batch)
        last = time.monotonic()
        while step := list(islice(batches, self.world)):
            share = self._spent()
            if share >= 1:
                return
            self._step(step, share)
            now = time.monotonic()
            rate = progress.tokens / self.seconds
            amount = now - last if timed else 1
            if bar is not None:
                bar.advance(amount, epoch=progress.epoch + 1.0, tokens_per_s=rate, **self.shown)
            last = now
            if progress.step % LOG_EVERY_STEPS == 0:
                self._write_loss()
            if self._agree(now - self.saved > self.pause):
                self._checkpoint()
        progress.epoch, progress.batch = progress.epoch + 1, 0

    def _step(self, group: list[Inputs], share: float) -> None:
        """One optimizer step on this process's batch of the group."""
        progress, accelerator = self.progress, self.accelerator
        batch = group[accelerator.process_index % len(group)]
        rate = self._learning_rate(share)
        for parameters in self.optimizer.param_groups:
            parameters["lr"] = rate
        inputs = [
            torch.from_numpy(array).to(self.device, non_blocking=True) for array in batch.inputs
        ]
        loss = self.wrapped(*inputs)
        accelerator.backward(loss)
        self.loss += loss.detach()
        progress.tokens += batch.size
        clip_gradients(self.module)
        self.optimizer.step()
        self.optimizer.zero_grad()
        progress.step += 1
        progress.loss_steps += 1
        progress.batch += len(group)

    def _learning_rate(self, share: float) -> float:
        """Linear warm-up by steps, then a cosine over the spent share of the budget."""
        cosine = 0.5 * (1 + math.cos(math.pi * min(share, 1.0)))
        warmup = min(1.0, (self.progress.step + 1) / max(self.config.warmup_steps, 1))
        return self.config.learning_rate * warmup * cosine

    def _spent(self) -> float:
        """Spent share of the budget; all processes use the value of the main process.

        The share of the time rises from 0, at `UNTIMED` of the budget, to 1. If it started at once,
        it would exceed the share of the steps as long as these are few, even in a run that has
        time enough, and the learning rate would depend on the clock.
        """
        timed = (self.seconds / self.budget_s - UNTIMED) / (1 - UNTIMED)
        return float(self._agree(max(self.progress.step / self.total_steps, timed)))

    def _evaluate(self) -> None:
        progress = self.progress
        metrics: dict[str, float] = {}
        if self.validate is not None and self.main:
            self.module.eval()
            metrics = self.validate()
            self.module.train()
        metrics = self._agree(metrics)
        progress.evaluated = progress.step
        if metrics:
            metric, value = next(iter(metrics.items()))
            self.shown = {metric: value}
            if not progress.best or value > progress.best[metric]:
                progress.best, progress.stale = metrics, 0
                self.best = trainable_state(self.module)
            else:
                progress.stale += 1
            self._write(metrics)
            if self.main:
                shown = "  ".join(f"{k} {v:.4f}" for k, v in metrics.items())
                say(f"{self.name}: epoch {progress.epoch}, {self.seconds:.0f} s: {shown}")
        self._checkpoint()

    def _write_loss(self) -> None:
        progress = self.progress
        loss = self.loss.item() / progress.loss_steps
        if not math.isfinite(loss):
            raise ConfigError(
                f"{self.name}: the loss is {loss} at step {progress.step}; lower learning_rate, "
                "or set precision: float32"
            )
        values = {
            "loss": loss,
            "learning_rate": self.optimizer.param_groups[0]["lr"],
            "tokens_per_s": self.world * progress.tokens / self.seconds,
        }
        self._write(values)
        self.loss.zero_()
        progress.loss_steps = 0

    def _write(self, values: dict[str, float]) -> None:
        """Add a line to `log.jsonl`, with the progress."""
        if self.main:
            line = {name: getattr(self.progress, name) for name in ("step", "epoch", "tokens")}
            line["seconds"] = round(self.seconds, 2)
            line |= {key: round(value, 6) for key, value in values.items()}
            with self.log.open("a", encoding="utf-8") as stream:
                stream.write(json.dumps(line) + "\n")

    def _checkpoint(self) -> None:
        begun = time.monotonic()
        self.progress.seconds, self.progress.loss_sum = self.seconds, self.loss.item()
        if self.main:
            self.progress.log_bytes = self.log.stat().st_size
        self.checkpoints.save(self.module, self.optimizer, self.progress, self.best)
        self.accelerator.wait_for_everyone()
        self.saved = time.monotonic()
        if self.pause:  # 0 asks for one after each step
            self.pause = max(self.pause, (self.saved - begun) / CHECKPOINTS)

    def _agree(self, value: Any) -> Any:
        """The main process's value, on all processes."""
        return broadcast_object_list([value])[0] if self.world > 1 else value


def clip_gradients(module: nn.Module) -> None:
    """Scale all gradients so that their common norm is at most `CLIP`."""
    gradients = []
    for parameter in module.parameters():
        if parameter.grad is not None and parameter.grad.is_sparse:
            parameter.grad = parameter.grad.coalesce()
            gradients.append(parameter.grad.values())
        elif parameter.grad is not None:
            gradients.append(parameter.grad)
    scale = CLIP / (torch.nn.utils.get_total_norm(gradients) + 1e-6)
    torch._foreach_mul_(gradients, scale.clamp(max=1.0))


def make_optimizer(module: nn.Module, config: LoopConfig) -> torch.optim.Optimizer:
    """AdamW with weight decay on matrices only; of sparse embeddings, the rows with gradients."""
    sparse = (m for m in module.modules() if isinstance(m, nn.Embedding) and m.sparse)
    tables = {p for m in sparse for p in m.parameters()}
    trained = [p for p in module.parameters() if p.requires_grad and p not in tables]
    groups = [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    if tables:
        return AdamOfRows(groups, list(tables), config.learning_rate)
    return torch.optim.AdamW(groups, lr=config.learning_rate, betas=BETAS, fused=True)


class AdamOfRows(torch.optim.AdamW):
    """AdamW, and for tables with sparse gradients `SparseAdam`, which changes their rows alone.

    A step then takes as long for a table of a million rows as for one of a thousand.
    """

    def __init__(
        self, groups: list[dict[str, Any]], tables: list[nn.Parameter], learning_rate: float
    ) -> None:
        super().__init__(groups, lr=learning_rate, betas=BETAS, fused=True)
        self._rows = torch.optim.SparseAdam(tables, lr=learning_rate, betas=BETAS)
        self._rows.state = self.state  # one for checkpoints, which store tensors
        for table in tables:
            self.state[table] = {
                "step": torch.zeros(()),
                "exp_avg": torch.zeros_like(table),
                "exp_avg_sq": torch.zeros_like(table),
            }

    def step(self, closure: Any = None) -> Any:
        """Change all parameters with gradients."""
        result = super().step(closure)
        self._rows.param_groups[0]["lr"] = self.param_groups[0]["lr"]
        self._rows.step()  # type: ignore[no-untyped-call]
        return result

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients."""
        super().zero_grad(set_to_none)
        self._rows.zero_grad(set_to_none)
