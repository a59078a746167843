"""Stage `target`: the model that recommends, trained on histories of semantic IDs."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path  # noqa: TC003 - recsys.config resolves the annotation
from typing import TYPE_CHECKING, Any

import torch

from recsys.artifacts import up_to_date
from recsys.models.checkpoint import architecture, build, save_model
from recsys.prompts import PromptConfig, PromptEncoder
from recsys.vocabulary import Vocabulary
from training.initialise import initialise_from_centroids
from training.pretrained import LoraSettings, add_lora, load_base
from training.supervised import (
    Material,
    SupervisedConfig,
    describe,
    finish,
    open_checkpoints,
    settings_of,
    train_supervised,
)

if TYPE_CHECKING:
    from recsys.pipeline import Context

MODEL = "model"


@dataclass(frozen=True)
class TargetConfig(SupervisedConfig):
    """Section `target`.

    Attributes:
        init_from_centroids: start token embeddings from the quantiser's centroids.
        prompt: how much of a history the model sees, here and wherever the target is used.
        base: folder of a pretrained LLaMA checkpoint with its tokenizer; replaces the preset.
        instruction: text in front of a history, for a pretrained model.
        lora: how a pretrained model is adapted.
    """

    init_from_centroids: bool = True
    prompt: PromptConfig = field(default_factory=PromptConfig)
    base: Path | None = None
    instruction: str = "Items of one customer, oldest first:"
    lora: LoraSettings = field(default_factory=LoraSettings)


def stage(context: Context) -> Path:
    """Write the `target` artifact of a run: `model/`, `vocabulary.json`, `log.jsonl`.

    Raises:
        ConfigError: settings that do not fit each other or the data.
        ArtifactError: data set, IDs or the pretrained checkpoint are missing.
    """
    workspace, seed = context.workspace, context.settings.seed
    config = context.settings.section("target", TargetConfig)
    path, settings = workspace.run("target"), settings_of(config, seed)
    parents = Material.digests(workspace)
    if not context.force and up_to_date(path, "target", settings, parents):
        return path
    checkpoints = open_checkpoints(context, "target", settings, parents)
    material = Material.load(workspace)
    torch.manual_seed(seed)
    tokenizer = None
    if config.base is None:
        vocabulary = Vocabulary.from_levels(material.level_sizes)
        model: Any = build(architecture(config.preset, config.architecture), vocabulary)
    else:
        model, tokenizer, vocabulary = load_base(
            config.base, material.level_sizes, config.instruction
        )
    if config.init_from_centroids and material.centroids is not None:
        initialise_from_centroids(model, vocabulary, material.centroids)
    if config.base is not None:
        model = add_lora(model, vocabulary, config.lora)
    encoder = PromptEncoder(vocabulary.encode(material.codes), vocabulary.prefix, config.prompt)
    progress = train_supervised(
        model, material.dataset, encoder, config, checkpoints,
        name="target", pad=vocabulary.pad, seed=seed,
    )  # fmt: skip
    info = describe(progress, config, model)
    with finish(path, "target", settings, parents, info, checkpoints) as folder:
        save_model(model, folder / MODEL, merge=config.lora.merge)
        if tokenizer is not None:
            tokenizer.save_pretrained(str(folder / MODEL))
        vocabulary.save(folder)
    return path
