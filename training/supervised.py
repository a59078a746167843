"""What the training of target and draft shares: settings, data, batches, the finished artifact."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from accelerate import Accelerator
from numpy.typing import NDArray

from recsys.artifacts import Output, Workspace
from recsys.dataset import Dataset
from recsys.errors import ConfigError
from recsys.pipeline import Context
from recsys.prompts import PromptEncoder
from recsys.retrieval import SasRec
from recsys.semantic_ids.quantizer import Codebooks, pop_centroids
from recsys.training.batches import TrainingBatches
from recsys.training.loop import LOG, autocast_dtype
from recsys.training.settings import LoopConfig, SasRecConfig, SupervisedConfig, TargetConfig
from recsys.training.soft_labels import SoftLabels
from recsys.training.state import Checkpoints, Progress

TRAINED = 0.85  # of a stage's time
LABELS = 0.25  # of a stage's time, the most that soft labels may take
Limited = TypeVar("Limited", bound=LoopConfig)
Sampled = TypeVar("Sampled", bound=SasRecConfig | SupervisedConfig)


@dataclass(frozen=True)
class Material:
    """The input of training: a data set and its semantic IDs.

    Attributes:
        dataset: canonical data.
        codes: (items, L) int32.
        centroids: L arrays (V_l, D) float32, None for imported IDs.
    """

    dataset: Dataset
    codes: NDArray[np.int32]
    centroids: Codebooks | None

    @classmethod
    def load(cls, workspace: Workspace) -> Material:
        """Read both artifacts."""
        from safetensors.numpy import load_file

        ids = workspace.run("ids")
        file = ids / "centroids.safetensors"
        return cls(
            Dataset.load(workspace.dataset),
            np.load(ids / "codes.npy", allow_pickle=False),
            pop_centroids(load_file(file)) if file.exists() else None,
        )

    @property
    def level_sizes(self) -> list[int]:
        """Number of codes of each level: the quantiser's, or those that imported IDs use."""
        if self.centroids is not None:
            return [len(book) for book in self.centroids]
        return [int(size) for size in self.codes.max(axis=0) + 1]


def training_batches(
    dataset: Dataset, encoder: PromptEncoder, config: SasRecConfig | SupervisedConfig, seed: int
) -> TrainingBatches:
    """Batches over the training histories, cut into the windows that serving uses.

    Raises:
        ConfigError: nothing to train on.
    """
    batches = TrainingBatches.of(
        dataset.train_histories,
        encoder.config,
        encoder.item_tokens,
        prefix=encoder.prefix,
        pad=encoder.pad,
        max_tokens=config.batch_tokens,
        item_dropout=config.item_dropout,
        seed=seed,
    )
    if not len(batches.windows.first):
        raise ConfigError(
            "no user has two training events, so there is nothing to train on. With "
            "data.split=leave-one-out, a user with three events keeps one for training, and users "
            "with two, or with four or more, keep at least two; data.split=global-temporal splits "
            "the events of all users at the same dates"
        )
    return batches


def with_labels(
    batches: TrainingBatches,
    dataset: Dataset,
    config: SasRecConfig | TargetConfig,
    kind: str,
    context: Context,
    k: int,
    teacher: SasRec | None = None,
) -> TrainingBatches:
    """The batches with k soft labels of what they predict, if the settings ask for them."""
    if not config.soft_labels:
        return batches
    histories, events = dataset.train_histories, batches.predicted
    minutes = labels_minutes(config, kind, context)
    if teacher is None:
        labels = SoftLabels.of(histories, len(dataset.item_ids), k, minutes, events)
    else:
        labels = SoftLabels.of_sasrec(teacher, histories, k, minutes, events)
    return replace(batches, soft=labels)


def training_dtype(model: Any, config: LoopConfig, device: torch.device) -> torch.dtype:
    """The type of matrix products; on a CPU, also select the model's faster attention.

    On a CPU in bf16, the backward pass of torch's fused attention takes ten times as long as eager.
    """
    if device.type == "cpu":
        causal = model.get_base_model() if hasattr(model, "get_base_model") else model
        causal.set_attn_implementation("eager")
    return autocast_dtype(config.precision, device)


def describe(progress: Progress, eval_users: int, model: Any) -> dict[str, Any]:
    """The `info` of the manifest of a trained model; `device` is where it was trained."""
    validation = {**progress.best, "users": eval_users, "seen_items": "masked"}
    return {
        "parameters": sum(p.numel() for p in model.parameters()),
        "trained_parameters": sum(p.numel() for p in model.parameters() if p.requires_grad),
        "epochs": progress.epoch,
        "steps": progress.step,
        "seconds": round(progress.seconds, 1),
        "device": progress.device,
        "validation": validation if progress.best else {},
    }


def within_budget(config: Limited, kind: str, context: Context) -> Limited:
    """The settings of a stage with a time limit: its share of the run's budget, if it has no own.

    The limit depends on the clock, so it is no part of what an artifact is made with; the run's
    budget is (`budget`). The rest of the share is for the last validation and for writing.
    """
    if config.max_minutes is not None:
        return config
    share = context.share(kind)
    return config if share is None else replace(config, max_minutes=TRAINED * share)


def labels_minutes(config: LoopConfig, kind: str, context: Context) -> float | None:
    """Time limit of a stage's soft labels; None for no budget."""
    share = context.share(kind) if config.max_minutes is None else config.max_minutes
    return None if share is None else LABELS * share


def sampled(config: Sampled, kind: str, context: Context) -> Sampled:
    """The settings of a stage with the sample of validation users that fits the run's budget."""
    return replace(config, eval_users=context.sample(kind, config.eval_users, "eval_users"))


def budget(config: LoopConfig, context: Context) -> dict[str, float]:
    """The part of an artifact's settings that names the run's budget, if it limits the stage."""
    minutes = None if config.max_minutes is not None else context.minutes
    return {} if minutes is None else {"minutes": minutes}


def open_checkpoints(output: Output) -> Checkpoints:
    """Checkpoints of the training run that makes `output`; forcing it starts from the beginning."""
    checkpoints = Checkpoints(
        output.path.with_name(f"{output.kind}.checkpoint"),
        {**output.config, "parents": output.parents},
    )
    accelerator = Accelerator()
    if output.force and accelerator.is_main_process:
        checkpoints.remove()
    accelerator.wait_for_everyone()
    return checkpoints


@contextmanager
def write_trained(output: Output, checkpoints: Checkpoints, info: dict[str, Any]) -> Iterator[Path]:
    """Write the artifact of a finished training run: the body writes the model, then the log.

    Every process runs the body on a folder of its own; only the main process's folder is kept.
    """
    accelerator = Accelerator()
    if accelerator.is_main_process:
        with output.write(info) as folder:
            yield folder
            shutil.copyfile(checkpoints.folder / LOG, folder / LOG)
        checkpoints.remove()
    else:
        with tempfile.TemporaryDirectory() as scratch:
            yield Path(scratch)
    accelerator.wait_for_everyone()
