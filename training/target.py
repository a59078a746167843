"""Stage `target`: the model that recommends, trained on histories of semantic IDs."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch

from recsys.artifacts import up_to_date
from recsys.errors import ConfigError
from recsys.models.checkpoint import architecture, build, save_model
from recsys.pipeline import Context
from recsys.prompts import PromptConfig, PromptEncoder
from recsys.training import sasrec
from recsys.training.initialise import initialise_from_centroids
from recsys.training.pretrained import LoraSettings, add_lora, load_base
from recsys.training.refresh import load_deployed, open_bundle
from recsys.training.supervised import (
    Material,
    SupervisedConfig,
    describe,
    finish,
    open_checkpoints,
    settings_of,
    train_supervised,
)
from recsys.training.validation import Validation
from recsys.vocabulary import Vocabulary

MODEL = "model"


@dataclass(frozen=True)
class TargetConfig(SupervisedConfig):
    """Section `target`.

    Attributes:
        init_from_centroids: start new token embeddings from the quantiser's centroids.
        agreement: see `recsys.training.objective.NextToken`, as for the next two.
        exit_layer: see there.
        soft_labels: share of the target that is what others say (`recsys.training.soft_labels`).
        soft_labels_from: who they are: other users, by `item-item`, or the run's `sasrec`.
        prompt: how much of a history the model sees, here and wherever the target is used.
        base: folder of a pretrained LLaMA checkpoint with its tokenizer; replaces the preset.
        instruction: text in front of a history, for a pretrained model.
        refresh: a bundle whose target is adapted to the run's data, instead of a new model; codes,
            vocabulary and prompt stay the bundle's.
        lora: how a pretrained or deployed model is adapted.
    """

    init_from_centroids: bool = True
    agreement: float = 0.0
    exit_layer: int = 1
    soft_labels: float = 0.0
    soft_labels_from: Literal["item-item", "sasrec"] = "item-item"
    prompt: PromptConfig = field(default_factory=PromptConfig)
    base: Path | None = None
    instruction: str = "Items of one customer, oldest first:"
    refresh: Path | None = None
    lora: LoraSettings = field(default_factory=LoraSettings)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.agreement < 0:
            raise ConfigError(f"agreement: want at least 0, got {self.agreement}")
        if self.exit_layer < 1:
            raise ConfigError(f"exit_layer: want at least 1, got {self.exit_layer}")
        if not 0 <= self.soft_labels < 1:
            raise ConfigError(f"soft_labels: want 0 <= soft_labels < 1, got {self.soft_labels}")
        if self.base is not None and self.refresh is not None:
            raise ConfigError("base and refresh: a target starts from one of them; leave one out")


def stage(context: Context) -> Path:
    """Write the `target` artifact of a run: `model/`, `vocabulary.json`, `log.jsonl`.

    Raises:
        ConfigError: settings that do not fit each other or the data.
        ArtifactError: data set, IDs, the pretrained checkpoint or the bundle are missing.
    """
    workspace, seed = context.workspace, context.settings.seed
    config = context.settings.section("target", TargetConfig)
    path, parents = workspace.run("target"), Material.digests(workspace)
    deployed = None
    if config.refresh is not None:
        deployed = open_bundle(config.refresh, workspace)
        config = replace(config, prompt=deployed.prompt)
        parents["bundle"] = deployed.manifest.digest
    teacher = None
    if config.soft_labels and config.soft_labels_from == "sasrec":
        teacher, parents[sasrec.KIND] = sasrec.wanted(context, "target.soft_labels_from")
    settings = settings_of(config, seed)
    settings.pop("refresh")  # the bundle is named among the parents, wherever it lies
    if not context.force and up_to_date(path, "target", settings, parents):
        return path
    checkpoints = open_checkpoints(context, "target", settings, parents)
    material = Material.load(workspace)
    torch.manual_seed(seed)
    model: Any
    tokenizer = None
    if deployed is not None:
        vocabulary = deployed.vocabulary
        model, tokenizer = load_deployed(deployed, material)
    elif config.base is not None:
        model, tokenizer, vocabulary = load_base(
            config.base, material.level_sizes, config.instruction
        )
    else:
        vocabulary = Vocabulary.from_levels(material.level_sizes)
        model = build(architecture(config.preset, config.architecture), vocabulary)
    if deployed is None and config.init_from_centroids and material.centroids is not None:
        initialise_from_centroids(model, vocabulary, material.centroids)
    encoder = PromptEncoder(vocabulary.encode(material.codes), vocabulary.prefix, config.prompt)
    before: dict[str, float] = {}
    if deployed is not None:
        ask = Validation.of(model, encoder, material.dataset, config.eval_users, config.eval_beams)
        before = ask() if len(ask.examples) else {}
    if deployed is not None or config.base is not None:
        model = add_lora(model, vocabulary, config.lora)
    progress = train_supervised(
        model, material.dataset, encoder, config, checkpoints,
        name="target", pad=vocabulary.pad, seed=seed,
        exit_layer=config.exit_layer, agreement=config.agreement, soft_labels=config.soft_labels,
        teacher=teacher,
    )  # fmt: skip
    info = describe(progress, config.eval_users, model)
    if before:
        info["validation_before"] = before
    with finish(path, "target", settings, parents, info, checkpoints) as folder:
        save_model(model, folder / MODEL, merge=config.lora.merge)
        if tokenizer is not None:
            tokenizer.save_pretrained(str(folder / MODEL))
        vocabulary.save(folder)
    return path
