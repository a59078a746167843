"""Next-item training of a model on a data set with semantic IDs: what target and draft share."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from numpy.typing import NDArray

from recsys.artifacts import Workspace, read_manifest, write_artifact
from recsys.config import as_dict
from recsys.dataset import Dataset
from recsys.errors import ConfigError
from recsys.pipeline import Context
from recsys.prompts import PromptEncoder
from recsys.retrieval import SasRec
from recsys.training.batches import TrainingBatches
from recsys.training.loop import LOG, LoopConfig, autocast_dtype, fit
from recsys.training.objective import NextToken
from recsys.training.soft_labels import SoftLabels
from recsys.training.state import Checkpoints, Progress
from recsys.training.validation import Validation


@dataclass(frozen=True)
class SupervisedConfig(LoopConfig):
    """Sizes, batches, regularisation and validation, on top of `LoopConfig`.

    Attributes:
        preset: sizes of a model from scratch: `tiny`, `small` or `base`.
        architecture: sizes that differ from the preset's (`recsys.models.checkpoint.Architecture`).
        batch_tokens: most tokens of a batch, padding included.
        min_context: items that must stand before an item for it to be asked; 0 also asks the first.
        item_dropout: share of items left out of a history, anew each epoch.
        embedding_dropout: of the token embeddings.
        label_smoothing: share of a token's probability spread over the vocabulary.
        eval_users: validation users that are ranked, a fixed sample.
        eval_beams: width of their beam search.
    """

    preset: str = "tiny"
    architecture: dict[str, Any] = field(default_factory=dict)
    batch_tokens: int = 4096
    min_context: int = 1
    item_dropout: float = 0.1
    embedding_dropout: float = 0.0
    label_smoothing: float = 0.05
    eval_users: int = 1000
    eval_beams: int = 20

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("item_dropout", "embedding_dropout", "label_smoothing"):
            if not 0 <= getattr(self, name) < 1:
                raise ConfigError(f"{name}: want 0 <= {name} < 1, got {getattr(self, name)}")
        if self.eval_beams < 10:
            raise ConfigError(f"eval_beams: NDCG@10 needs at least 10, got {self.eval_beams}")


@dataclass(frozen=True)
class Material:
    """What training reads: a data set and its semantic IDs.

    Attributes:
        dataset: canonical data.
        codes: (items, L) int32.
        centroids: (L, V, D) float32, None for imported IDs.
        parents: digests of both artifacts.
    """

    dataset: Dataset
    codes: NDArray[np.int32]
    centroids: NDArray[np.float32] | None
    parents: dict[str, str]

    @staticmethod
    def digests(workspace: Workspace) -> dict[str, str]:
        """Digests of the data set and IDs of a workspace.

        Raises:
            ArtifactError: one of them is missing.
        """
        return {
            "dataset": Dataset.manifest(workspace.dataset).digest,
            "ids": read_manifest(workspace.run("ids"), "ids").digest,
        }

    @classmethod
    def load(cls, workspace: Workspace) -> Material:
        """Read both artifacts."""
        from safetensors.numpy import load_file

        ids = workspace.run("ids")
        file = ids / "centroids.safetensors"
        return cls(
            Dataset.load(workspace.dataset),
            np.load(ids / "codes.npy", allow_pickle=False),
            load_file(file)["centroids"] if file.exists() else None,
            cls.digests(workspace),
        )

    @property
    def level_sizes(self) -> list[int]:
        """Codes of each level: the quantiser's, or as many as imported IDs use."""
        if self.centroids is not None:
            return [self.centroids.shape[1]] * self.codes.shape[1]
        return [int(size) for size in self.codes.max(axis=0) + 1]


def train_supervised(
    model: Any,
    dataset: Dataset,
    encoder: PromptEncoder,
    config: SupervisedConfig,
    checkpoints: Checkpoints,
    *,
    name: str,
    pad: int = 0,
    seed: int = 0,
    watch: Callable[[], dict[str, float]] | None = None,
    exit_layer: int = 1,
    agreement: float = 0.0,
    soft_labels: float = 0.0,
    teacher: SasRec | None = None,
) -> Progress:
    """Train `model` in place on the training histories, validated on validation users.

    Args:
        model: a causal LM, or a peft model of one.
        dataset: only its training events are trained on.
        encoder: history -> prompt; windows, prefix and tokens are taken from it.
        config: how.
        checkpoints: where state is kept meanwhile.
        name: shown in front of the progress.
        pad: token that fills rows.
        seed: of everything random.
        watch: more metrics for the log, asked for with each validation.
        exit_layer: see `NextToken`.
        agreement: see `NextToken`.
        soft_labels: see `NextToken`; above 0 they are made of the training histories.
        teacher: that makes them; None for item-item.
    """
    batches = windows(dataset, encoder, config, pad=pad, seed=seed)
    if soft_labels:
        histories = dataset.train_histories
        soft = (
            SoftLabels.of(histories, len(dataset.item_ids))
            if teacher is None
            else SoftLabels.of_sasrec(teacher, histories)
        )
        batches = replace(batches, soft=soft)
    module = NextToken(
        model,
        label_smoothing=config.label_smoothing,
        dropout=config.embedding_dropout,
        dtype=training_dtype(model, config),
        exit_layer=exit_layer,
        agreement=agreement,
        soft_labels=soft_labels,
    )
    validation = Validation.of(model, encoder, dataset, config.eval_users, config.eval_beams)

    def validate() -> dict[str, float]:
        return {**validation(), **(watch() if watch is not None else {})}

    progress = fit(
        module,
        batches,
        config,
        checkpoints,
        name=name,
        validate=validate if len(validation.examples) else None,
        seed=seed,
    )
    model.eval()
    return progress


def windows(
    dataset: Dataset, encoder: PromptEncoder, config: SupervisedConfig, *, pad: int, seed: int
) -> TrainingBatches:
    """Batches over the training histories, windowed as serving will ask.

    Raises:
        ConfigError: nothing to train on.
    """
    batches = TrainingBatches.of(
        dataset.train_histories,
        encoder.config,
        encoder.item_tokens,
        min_context=config.min_context,
        prefix=encoder.prefix,
        pad=pad,
        max_tokens=config.batch_tokens,
        item_dropout=config.item_dropout,
        seed=seed,
    )
    if not len(batches.windows.first):
        raise ConfigError("no user has two training events, so there is nothing to train on")
    return batches


def training_dtype(model: Any, config: LoopConfig) -> torch.dtype:
    """What matrix products run in; on a CPU the model is set to the attention that is quick there.

    torch's fused attention is slow backward in bf16 on a CPU: ten times eager's time.
    """
    device = Accelerator().device
    if device.type == "cpu":
        causal = model.get_base_model() if hasattr(model, "get_base_model") else model
        causal.set_attn_implementation("eager")
    return autocast_dtype(config.precision, device)


def describe(progress: Progress, eval_users: int, model: Any) -> dict[str, Any]:
    """What a manifest says of a training run."""
    validation = {**progress.best, "users": eval_users, "seen_items": "masked"}
    return {
        "parameters": sum(p.numel() for p in model.parameters()),
        "trained_parameters": sum(p.numel() for p in model.parameters() if p.requires_grad),
        "epochs": progress.epoch,
        "steps": progress.step,
        "seconds": round(progress.seconds, 1),
        "validation": validation if progress.best else {},
    }


def settings_of(config: object, seed: int) -> dict[str, Any]:
    """Plain values that identify a run."""
    return json.loads(json.dumps({**as_dict(config), "seed": seed}))  # type: ignore[no-any-return]


def open_checkpoints(
    context: Context, kind: str, settings: dict[str, Any], parents: dict[str, str]
) -> Checkpoints:
    """Checkpoints of the run that makes artifact `kind`; forcing it starts anew."""
    checkpoints = Checkpoints(
        context.workspace.run(f"{kind}.checkpoint"), {**settings, "parents": parents}
    )
    accelerator = Accelerator()
    if context.force and accelerator.is_main_process:
        checkpoints.remove()
    accelerator.wait_for_everyone()
    return checkpoints


@contextmanager
def finish(
    path: Path,
    kind: str,
    settings: dict[str, Any],
    parents: dict[str, str],
    info: dict[str, Any],
    checkpoints: Checkpoints,
) -> Iterator[Path]:
    """Write the artifact of a finished run: the body writes the model, the log is moved in.

    Every process runs the body, each on a folder of its own; only the main one's is kept.
    """
    accelerator = Accelerator()
    if accelerator.is_main_process:
        with write_artifact(path, kind, config=settings, parents=parents, info=info) as folder:
            yield folder
            shutil.copyfile(checkpoints.folder / LOG, folder / LOG)
        checkpoints.remove()
    else:
        with tempfile.TemporaryDirectory() as scratch:
            yield Path(scratch)
    accelerator.wait_for_everyone()
