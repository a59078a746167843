"""Stage `sasrec`: SASRec with sampled softmax, a recommender of items without semantic IDs.

SASRec is a baseline and a teacher: semantic IDs may be learned from its item vectors
(`ids.features.collaborative`), and the target from its top-k lists (`recsys.training.soft_labels`).
It is trained like the target: each event of a history is predicted from the events before it, with
soft labels from other users.

All item vectors have the same length, which is learned: an item is then not ranked high for being
frequent alone, as long vectors are (`docs/experiments.md` has the gain).

Sampled softmax (Jean et al., 2015): the partition function sums over the target item, its soft
label, the history, and a uniform sample of all items, whose terms are multiplied by items / sample.
With as many negatives as items it is the full softmax without the later items of the row (and
without item 0, the padding), which the user does choose. The items of the history must be included
because input and output vectors are the same: when they were rarely sampled, they received four
fifths of the probability.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import nn

from recsys.bundle import Bundle, load_sasrec
from recsys.config import as_dict
from recsys.dataset import Dataset
from recsys.errors import ArtifactError, ConfigError
from recsys.pipeline import Context
from recsys.prompts import PromptEncoder
from recsys.retrieval import SasRec, digest
from recsys.retrieval.sasrec import ITEMS, NORM, POSITIONS
from recsys.semantic_ids.features import build_features
from recsys.training import supervised
from recsys.training.batches import TrainingBatches
from recsys.training.device import on_chosen_device
from recsys.training.loop import autocast_dtype, fit
from recsys.training.objective import soft_cross_entropy
from recsys.training.parent import open_parent
from recsys.training.settings import SasRecConfig
from recsys.training.state import Checkpoints, Progress
from recsys.training.supervised import (
    budget,
    describe,
    open_checkpoints,
    sampled,
    with_labels,
    within_budget,
    write_trained,
)
from recsys.training.validation import TOP, discounted_gains, ranking_metrics

KIND = "sasrec"
FEATURES = "item_features.npy"
LABELS = 8  # items of a soft label
SPREAD = 0.02  # standard deviation of initial weights
LENGTH = 2.0  # initial length of item vectors
NOTHING = -1e9  # logit of an excluded item
LARGE = 1 << 15  # items from which a step looks at those of its batch alone
ITEMS_AT_A_TIME = 1 << 16  # bounds memory, as items have a few hundred features


def stage(context: Context) -> Path | None:
    """Write the `sasrec` artifact of a run with `SasRec.save`; without epochs return None.

    `item_features.npy` has the item features, if the model has any.

    Raises:
        ConfigError: no user has two training events, or the data lack the features.
        ArtifactError: the data set is missing.
    """
    workspace, seed = context.workspace, context.settings.seed
    config = sampled(context.settings.section(KIND, SasRecConfig), KIND, context)
    if not config.epochs:
        return None
    settings = as_dict(config) | {"seed": seed} | budget(config, context)
    parents, parent = workspace.digests("dataset"), open_parent(context)
    if parent is not None:
        parents["bundle"] = parent.manifest.digest
    output = context.output(KIND, settings, parents)
    if output.is_current():
        return output.path
    checkpoints = open_checkpoints(output)
    dataset = Dataset.load(workspace.dataset)
    torch.manual_seed(seed)
    served = None if parent is None else load_sasrec(parent.path, len(parent.catalog), trained=True)
    content = None
    if parent is None or served is None:
        content = _fit_features(context, dataset)
        model = SasRecModel(len(dataset.item_ids), config, content)
    else:
        model = _continued(served, parent, dataset, config)

    batches = training_batches(dataset, config, context)
    batches = with_labels(batches, dataset, config, KIND, context, LABELS)
    examples = dataset.validation().sample(config.eval_users)

    def validate() -> dict[str, float]:
        items, _ = model.frozen().rank(examples.histories, TOP, exclude_seen=True)
        return ranking_metrics(discounted_gains(items == examples.targets.items[:, None]))

    limited, measure = within_budget(config, KIND, context), validate if len(examples) else None
    progress = train(model, batches, limited, checkpoints, measure, seed=seed)
    info = describe(progress, config.eval_users, model)
    info["fitted_on"] = digest(dataset.train_histories)
    with write_trained(output, checkpoints, info) as folder:
        model.frozen().save(folder)
        if content is not None:  # they take long, and retrieval has them, too
            np.save(folder / FEATURES, content, allow_pickle=False)
    return output.path


def train(
    model: SasRecModel,
    batches: TrainingBatches,
    config: SasRecConfig,
    checkpoints: Checkpoints,
    validate: Callable[[], dict[str, float]] | None = None,
    *,
    name: str = KIND,
    seed: int,
) -> Progress:
    """Train a model in place (`recsys.training.loop.fit`)."""

    def make(device: torch.device, model: SasRecModel) -> SampledSoftmax:
        return SampledSoftmax(model, config, autocast_dtype(config.precision, device))

    module, device = on_chosen_device(KIND, [model], make, batches, config)
    return fit(
        module, batches, config, checkpoints,
        name=name, validate=validate, seed=seed, device=device,
    )  # fmt: skip


def _continued(
    served: SasRec, parent: Bundle, dataset: Dataset, config: SasRecConfig
) -> SasRecModel:
    """The parent's model for the items of a data set, to be trained further.

    Item vectors have no features beside them: the parent's contain them already. A new item starts
    with the vectors of the items with the nearest content, as the service ranks it.

    Raises:
        ConfigError: the settings have other sizes than the parent's model.
    """
    ids = dataset.item_ids.tolist()
    numbers = parent.catalog.index(ids)
    model = SasRecModel(len(ids), config, None)
    vectors = model.items.weight.detach().numpy().copy()
    vectors[numbers >= 0] = served.vectors[numbers[numbers >= 0]]
    new = np.flatnonzero(numbers < 0)
    known = parent.retrieval
    later = None
    if len(new) and known is not None:
        later = replace(known, sasrec=served).describe(dataset.items.take(pa.array(new)))
    if later is not None and later.sasrec is not None:
        near = ~np.isnan(later.sasrec).any(axis=1)
        vectors[new[near]] = later.sasrec[near]
    try:
        load_weights(model, served, vectors)
    except RuntimeError as error:
        raise ConfigError(
            f"sasrec: {parent.path} has a SASRec of other sizes; use the settings that it was made "
            "with, or sasrec.epochs=0"
        ) from error
    return model


def load_weights(model: SasRecModel, served: SasRec, vectors: NDArray[np.float32]) -> None:
    """Give a model without features the weights of a finished one, and (items, D) vectors.

    Raises:
        RuntimeError: the sizes differ.
    """
    weights = {name: torch.from_numpy(np.array(w)) for name, w in served.weights.items()}
    model.load_state_dict(
        {
            "items.weight": torch.from_numpy(vectors),
            "length": torch.from_numpy(served.vectors).norm(dim=1).mean(),
            "positions.weight": weights.pop(POSITIONS),
            **{
                f"encoder.{name}": weight
                for name, weight in weights.items()
                if name.startswith(("layers.", f"{NORM}."))
            },
        }
    )


def features(context: Context, dataset: Dataset) -> NDArray[np.float32] | None:
    """(items, F) item features of the run's trained SASRec, or None if it has none.

    Raises:
        ConfigError: the data lack the features.
    """
    file = context.workspace.run(KIND) / FEATURES
    if file.is_file() and context.settings.section(KIND, SasRecConfig).epochs:
        saved: NDArray[np.float32] = np.load(file, "r", allow_pickle=False)
        return saved
    return _fit_features(context, dataset)


def _fit_features(context: Context, dataset: Dataset) -> NDArray[np.float32] | None:
    """The same, fitted to the data set."""
    config = context.settings.section(KIND, SasRecConfig)
    chosen = config.item_features
    weights = chosen.text_weight, chosen.attribute_weight, chosen.collaborative_weight
    if not config.epochs or not any(weights):
        return None
    histories, seed = dataset.train_histories, context.settings.seed
    return build_features(dataset.items, histories, chosen, seed).matrix


def trained(context: Context) -> tuple[SasRec, str] | None:
    """The SASRec model of a run and its digest, or None if the settings have no epochs."""
    return load(context) if context.settings.section(KIND, SasRecConfig).epochs else None


def load(context: Context) -> tuple[SasRec, str]:
    """The SASRec model of a run and its digest.

    Raises:
        ArtifactError: it is missing, damaged, or of another data set.
    """
    path = context.workspace.run(KIND)
    if not path.is_dir():
        raise ArtifactError(f"{path} is not there; `recsys run --until sasrec` makes it")
    manifest = context.workspace.manifest(KIND)
    if manifest.parents["dataset"] != context.workspace.manifest("dataset").digest:
        raise ArtifactError(
            f"{path} was made from another dataset; run `recsys run --until sasrec` again"
        )
    try:
        return SasRec.load(path), manifest.digest
    except (OSError, ValueError) as error:
        raise ArtifactError(f"{path}: {error}; train it again") from error


class SasRecModel(nn.Module):
    """The model in training; `frozen` makes the model for ranking."""

    def __init__(
        self, num_items: int, config: SasRecConfig, features: NDArray[np.floating[Any]] | None
    ) -> None:
        """Draw small random weights.

        Args:
            num_items: items of the catalog.
            config: sizes and dropout.
            features: (items, F), or None.
        """
        super().__init__()
        self._config = config
        # Not every kind of process group can add up sparse gradients.
        by_rows = num_items >= LARGE and not config.weight_decay and not dist.is_initialized()
        self.items = nn.Embedding(num_items, config.hidden, sparse=by_rows)
        self.length = nn.Parameter(torch.tensor(LENGTH))
        self.positions = nn.Embedding(config.window.max_items, config.hidden)
        layer = nn.TransformerEncoderLayer(
            config.hidden,
            config.heads,
            4 * config.hidden,
            config.dropout,
            batch_first=True,
            norm_first=True,
        )
        self.encoder = nn.TransformerEncoder(
            layer, config.layers, nn.LayerNorm(config.hidden), enable_nested_tensor=False
        )
        self.project: nn.Linear | None = None
        if features is not None:
            rows = torch.from_numpy(np.asarray(features, np.float32))
            rows = nn.functional.normalize(rows, dim=1).mul_(rows.shape[1] ** 0.5)
            self.register_buffer("features", rows, persistent=False)
            self.project = nn.Linear(rows.shape[1], config.hidden, bias=False)
            nn.init.normal_(self.project.weight, std=SPREAD * rows.shape[1] ** -0.5)
        for table in (self.items, self.positions):
            nn.init.normal_(table.weight, std=SPREAD)

    def vectors(self, items: torch.Tensor) -> torch.Tensor:
        """(n, D) vectors of n items."""
        vectors: torch.Tensor = self.items(items)
        if self.project is not None:
            vectors = vectors + self.project(self.features[items])  # type: ignore[index]
        return nn.functional.normalize(vectors.float(), dim=-1) * self.length

    def forward(self, vectors: torch.Tensor) -> torch.Tensor:
        """(B, T, D) states of (B, T, D) item vectors, padded on the right."""
        length = vectors.shape[1]
        inputs = nn.functional.dropout(
            vectors + self.positions.weight[:length], self._config.dropout, self.training
        )
        mask = nn.Transformer.generate_square_subsequent_mask(length, inputs.device, inputs.dtype)
        states: torch.Tensor = self.encoder(inputs, mask=mask, is_causal=True)
        return states

    @torch.no_grad()
    def frozen(self) -> SasRec:
        """A copy of the weights, with features added to the item vectors."""
        everything = torch.arange(len(self.items.weight), device=self.items.weight.device)
        weights = {
            ITEMS: torch.cat(
                [self.vectors(some) for some in torch.split(everything, ITEMS_AT_A_TIME)]
            ),
            POSITIONS: self.positions.weight,
        }
        for name, weight in self.encoder.named_parameters():
            weights[name if name.startswith("layers.") else f"{NORM}.{name.split('.')[1]}"] = weight
        arrays = {
            name: weight.detach().float().cpu().numpy().copy() for name, weight in weights.items()
        }
        return SasRec(arrays, self._config.heads, self._config.window)


class SampledSoftmax(nn.Module):
    """The loss of a batch, for `recsys.training.loop.fit`."""

    def __init__(self, model: SasRecModel, config: SasRecConfig, dtype: torch.dtype) -> None:
        """Wrap `model`; matrix products are computed in `dtype`."""
        super().__init__()
        self.model = model
        self._config, self._dtype = config, dtype

    def forward(
        self,
        tokens: torch.Tensor,
        loss: torch.Tensor,
        soft_tokens: torch.Tensor | None = None,
        soft_shares: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Mean loss of the events to predict.

        Args:
            tokens: (B, T) int64 items, padded on the right with any item.
            loss: (B, T) bool, the events that carry loss.
            soft_tokens: (N, k, 1) int64 items of the soft labels of the N events with loss.
            soft_shares: (N, k) their shares, which add up to 1 or to 0.
        """
        size = len(self.model.items.weight)
        asked = loss[:, 1:]
        own = tokens[:, 1:][asked][:, None]
        shares = torch.ones_like(own, dtype=torch.float32)
        if soft_tokens is not None and soft_shares is not None:
            own, shares = self._with_soft(own, soft_tokens[..., 0], soft_shares)
        negative = self._sample(size, tokens.device)
        read = tokens[:, :-1]
        everything = torch.cat([read.flatten(), own.flatten(), negative])
        used, position = torch.unique(everything, return_inverse=True)
        with torch.autocast(tokens.device.type, self._dtype, enabled=self._dtype != torch.float32):
            vectors = self.model.vectors(used)
            inputs = vectors[position[: read.numel()]].view(*read.shape, -1)
            states = self.model(inputs)
            past = (states @ inputs.transpose(1, 2)).float()[asked]
            states = states[asked]
            mine = vectors[position[read.numel() : -len(negative)]].view(*own.shape, -1)
            positive = (mine * states[:, None]).sum(-1).float()
            others = (states @ vectors[position[-len(negative) :]].T).float()
        at = negative.new_full((size,), len(negative)).index_put(
            (negative,), torch.arange(len(negative), device=negative.device)
        )
        history = read.repeat_interleave(asked.sum(1), dim=0)
        known = torch.zeros(len(own), len(negative) + 1, dtype=torch.bool, device=own.device)
        known.scatter_(1, at[own], value=True).scatter_(1, at[history], value=True)
        others = others + math.log(size / len(negative))
        others = others.masked_fill(known[:, :-1], NOTHING)
        later = torch.arange(read.shape[1], device=read.device) > asked.nonzero()[:, 1:]
        past = past.masked_fill(later | (history[..., None] == own[:, None]).any(-1), NOTHING)
        positive = positive.masked_fill(shares < 0, NOTHING)
        targets = torch.arange(own.shape[1], device=own.device).expand_as(own)
        return soft_cross_entropy(
            torch.cat([positive, past, others], dim=1), targets, shares.clamp(min=0)
        )

    def _sample(self, size: int, device: torch.device) -> torch.Tensor:
        """Different negative items, all equally likely; of many items, as many as draws give."""
        if size < LARGE:
            return torch.randperm(size, device=device)[: self._config.negatives]
        drawn = torch.randint(size, (self._config.negatives,), device=device)
        return torch.as_tensor(torch.unique(drawn))

    def _with_soft(
        self, own: torch.Tensor, soft: torch.Tensor, soft_shares: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(N, 1 + k) items and their shares, each item once; the share of an unused place is -1."""
        share = self._config.soft_labels
        again = soft == own
        there = soft_shares > 0
        hard = torch.where(there.any(1), 1 - share, 1.0) + share * (soft_shares * again).sum(1)
        counts = there & ~again
        mixed = torch.where(counts, share * soft_shares, -1.0)
        soft = torch.where(counts, soft, own)
        return torch.cat([own, soft], dim=1), torch.cat([hard[:, None], mixed], dim=1)


def training_batches(dataset: Dataset, config: SasRecConfig, context: Context) -> TrainingBatches:
    """Training histories as rows of items, without soft labels."""
    encoder = PromptEncoder(np.arange(len(dataset.item_ids))[:, None], (), config.window)
    return supervised.training_batches(dataset, encoder, config, context.settings.seed)
