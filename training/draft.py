"""Stage `draft`: a small model that proposes what the target will say.

It starts as the target's first layers (or at random), and is trained on the next items alone (sft)
or aligned to the target by one of the objectives of `recsys.training.alignment`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

import torch

from recsys.artifacts import read_manifest, up_to_date
from recsys.constraint import ItemTrie
from recsys.constraint.transitions import DeviceTrie
from recsys.dataset import Dataset
from recsys.errors import ConfigError
from recsys.models.checkpoint import architecture, build, load_model, save_model
from recsys.pipeline import Context
from recsys.prompts import PromptConfig, PromptEncoder
from recsys.training import acceptance, teacher
from recsys.training.acceptance import Acceptance
from recsys.training.alignment import (
    ON_TREES,
    ON_WORDS,
    AlignmentSettings,
    Objective,
    TreeAlignment,
    TreeBatches,
    WordDistillation,
)
from recsys.training.initialise import initialise_from_centroids, initialise_from_model
from recsys.training.loop import Data, fit
from recsys.training.on_policy import OnPolicyBatches
from recsys.training.state import Checkpoints, Progress
from recsys.training.supervised import (
    Material,
    SupervisedConfig,
    describe,
    finish,
    open_checkpoints,
    settings_of,
    train_supervised,
    training_dtype,
    windows,
)
from recsys.training.target import MODEL
from recsys.training.teacher import Teacher
from recsys.vocabulary import Vocabulary

# Objectives whose optimum is the target itself need no other loss beside them.
_COMPLETE = ("tree-kd", "beam-kd")


@dataclass(frozen=True)
class DraftConfig(SupervisedConfig):
    """Section `draft`. Vocabulary and prompt window are the target's.

    Attributes:
        layers: decoder layers.
        init_from_target: take the target's sizes and start as its embeddings, head and first
            layers; otherwise the preset's sizes and random weights.
        objective: what it learns: `sft` (next items) or one of the alignments.
        alpha: weight of the alignment loss; None takes .5, or 1 for tree-kd and beam-kd.
        beam_steps: see `AlignmentSettings`, as for the next six.
        density: keep AtSpeed-S's density regularisation.
        constrained: compare distributions over allowed tokens only.
        top_k: learn from all K sequences of a history.
        tree_attention: run a history's tree as one row.
        temperature: of beam-kd.
        flatten: of tree-kd.
        on_policy: batches after which the teacher's trees are searched anew, in the mixture of the
            target and the draft as it is then; 0 keeps to the teacher artifact.
        accept_users: validation users whose requests are verified at each validation; 0 for none.
        accept_beams: K of these requests.
        accept_nodes: nodes of their draft trees.
    """

    layers: int = 1
    init_from_target: bool = True
    objective: Objective = "sft"
    alpha: float | None = None
    beam_steps: Literal["all", "last"] = "all"
    density: bool = True
    constrained: bool = True
    top_k: bool = True
    tree_attention: bool = True
    temperature: float = 2.0
    flatten: float = 2.0
    on_policy: int = 0
    accept_users: int = 200
    accept_beams: int = 20
    accept_nodes: int = 256
    epochs: int = 10
    evaluate_every: int = 5

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.alpha is not None and not 0 <= self.alpha <= 1:
            raise ConfigError(f"alpha: want 0 <= alpha <= 1, got {self.alpha}")
        if self.alpha == 1 and self.objective == "atspeed-s" and self.density:
            raise ConfigError(
                "alpha: 1 leaves AtSpeed-S without the recommendation loss, and all of the draft's "
                "probability would go to one token; use less, or density: false"
            )
        for name in ("temperature", "flatten"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"{name}: want more than 0, got {getattr(self, name)}")

    @property
    def alignment(self) -> AlignmentSettings:
        """The objective's own settings."""
        own = {f.name: getattr(self, f.name) for f in fields(AlignmentSettings)}
        if self.alpha is None:
            own["alpha"] = 1.0 if self.objective in _COMPLETE else 0.5
        return AlignmentSettings(**own)


def stage(context: Context) -> Path:
    """Write the `draft` artifact of a run: `model/`, `vocabulary.json`, `log.jsonl`.

    An objective that learns from the teacher's trees makes the `teacher` artifact first, if it is
    not there or not up to date.

    Raises:
        ConfigError: settings that do not fit each other or the data.
        ArtifactError: data set, IDs or target are missing.
    """
    workspace, seed = context.workspace, context.settings.seed
    config = context.settings.section("draft", DraftConfig)
    path, settings = workspace.run("draft"), settings_of(config, seed)
    target = workspace.run("target")
    manifest = read_manifest(target, "target")
    parents = {**Material.digests(workspace), "target": manifest.digest}
    data: Teacher | None = None
    if config.objective in ON_TREES:
        source = teacher.stage(replace(context, force=False))
        parents["teacher"] = read_manifest(source, teacher.KIND).digest
    if not context.force and up_to_date(path, "draft", settings, parents):
        return path
    if config.objective in ON_TREES:
        data = teacher.Teacher.load(source)
    checkpoints = open_checkpoints(context, "draft", settings, parents)
    material = Material.load(workspace)
    vocabulary = Vocabulary.load(target)
    torch.manual_seed(seed)
    model = start(config, load_model(target / MODEL, dtype=torch.float32), vocabulary, material)
    prompt = PromptConfig(**manifest.config["prompt"])
    encoder = PromptEncoder(vocabulary.encode(material.codes), vocabulary.prefix, prompt)
    progress = train_draft(
        model, load_model(target / MODEL, dtype=torch.float32), material.dataset, encoder, config,
        checkpoints, data=data, pad=vocabulary.pad, seed=seed,
    )  # fmt: skip
    info = {**describe(progress, config.eval_users, model), "objective": config.objective}
    if progress.best and "recall@10" not in progress.best:
        info["validation"] = {**progress.best, "users": config.accept_users}
    with finish(path, "draft", settings, parents, info, checkpoints) as folder:
        save_model(model, folder / MODEL)
        vocabulary.save(folder)
    return path


def start(config: DraftConfig, target: Any, vocabulary: Vocabulary, material: Material) -> Any:
    """A draft before training: the target cut, or random weights in the draft's own sizes."""
    if config.init_from_target:
        return cut(target, config.layers)
    sizes = architecture(config.preset, config.architecture)
    model = build(replace(sizes, layers=config.layers), vocabulary)
    if material.centroids is not None:
        initialise_from_centroids(model, vocabulary, material.centroids)
    return model


def train_draft(
    model: Any,
    target: Any,
    dataset: Dataset,
    encoder: PromptEncoder,
    config: DraftConfig,
    checkpoints: Checkpoints,
    *,
    data: Teacher | None = None,
    pad: int = 0,
    seed: int = 0,
) -> Progress:
    """Train a draft in place by any objective, watched by its acceptance on validation users.

    Args:
        model: the draft.
        target: the model it drafts for, with the same vocabulary.
        dataset: only its training events are trained on.
        encoder: history -> prompt, the target's.
        config: how.
        checkpoints: where state is kept meanwhile.
        data: what the teacher found; wanted by the objectives that learn from trees.
        pad: token that fills rows.
        seed: of everything random.

    Raises:
        ConfigError: nothing to train on.
        ValueError: an objective that wants teacher data, without any.
    """
    watch: Callable[[], dict[str, float]] | None = None
    if config.accept_users and len(dataset.examples("valid")):
        watch = Acceptance.of(
            target, model, encoder, dataset,
            users=config.accept_users, num_beams=config.accept_beams, nodes=config.accept_nodes,
        )  # fmt: skip
    if config.objective == "sft":
        return train_supervised(
            model, dataset, encoder, config, checkpoints,
            name="draft", pad=pad, seed=seed, watch=watch,
        )  # fmt: skip
    dtype = training_dtype(model, config)
    asked = target if config.objective in ON_WORDS or not config.constrained else None
    batches: Data
    if config.objective in ON_WORDS:
        batches = windows(dataset, encoder, config, pad=pad, seed=seed)
        module: torch.nn.Module = WordDistillation(
            model, asked, config.alignment, label_smoothing=config.label_smoothing, dtype=dtype
        )
    else:
        if data is None:
            raise ValueError(
                f"objective {config.objective!r} learns from teacher data; pass `data`"
            )
        trie = ItemTrie.build(encoder.item_tokens)
        batches = trees = TreeBatches(
            data.prompts, data.trees, encoder, trie, pad,
            config.batch_tokens, config.min_context, seed,
        )  # fmt: skip
        if config.on_policy:
            batches = OnPolicyBatches(
                trees, target.to(model.device), model, checkpoints.folder,
                every=config.on_policy, num_beams=data.config.beams, mixture=data.config.mixture,
            )  # fmt: skip
        module = TreeAlignment(
            model, DeviceTrie.of(trie, model.device), config.alignment,
            target=asked, label_smoothing=config.label_smoothing, dtype=dtype,
        )  # fmt: skip
    progress = fit(
        module, batches, config, checkpoints,
        name="draft", validate=watch, metric=acceptance.METRIC, seed=seed,
    )  # fmt: skip
    model.eval()
    return progress


def cut(target: Any, layers: int) -> Any:
    """A new model of the target's widths with only its first `layers` layers, and their weights."""
    if hasattr(target, "peft_config"):
        target = target.merge_and_unload()
    config = copy.deepcopy(target.config)
    config.num_hidden_layers = min(layers, config.num_hidden_layers)
    draft = type(target)(config)
    initialise_from_model(draft, target)
    return draft
