"""Stage `draft`: a small model that proposes what the target will say, trained on the same task."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from recsys.artifacts import read_manifest, up_to_date
from recsys.models.checkpoint import architecture, build, load_model, save_model
from recsys.prompts import PromptConfig, PromptEncoder
from recsys.vocabulary import Vocabulary
from training.initialise import initialise_from_centroids, initialise_from_model
from training.supervised import (
    Material,
    SupervisedConfig,
    describe,
    finish,
    open_checkpoints,
    settings_of,
    train_supervised,
)
from training.target import MODEL

if TYPE_CHECKING:
    from pathlib import Path

    from recsys.pipeline import Context


@dataclass(frozen=True)
class DraftConfig(SupervisedConfig):
    """Section `draft`. Vocabulary and prompt window are the target's.

    Attributes:
        layers: decoder layers.
        init_from_target: take the target's sizes and start as its embeddings, head and first
            layers; otherwise the preset's sizes and random weights.
    """

    layers: int = 1
    init_from_target: bool = True
    epochs: int = 10
    evaluate_every: int = 5


def stage(context: Context) -> Path:
    """Write the `draft` artifact of a run: `model/`, `vocabulary.json`, `log.jsonl`.

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
    if not context.force and up_to_date(path, "draft", settings, parents):
        return path
    checkpoints = open_checkpoints(context, "draft", settings, parents)
    material = Material.load(workspace)
    vocabulary = Vocabulary.load(target)
    torch.manual_seed(seed)
    if config.init_from_target:
        model: Any = cut(load_model(target / MODEL, dtype=torch.float32), config.layers)
    else:
        sizes = architecture(config.preset, config.architecture)
        model = build(replace(sizes, layers=config.layers), vocabulary)
        if material.centroids is not None:
            initialise_from_centroids(model, vocabulary, material.centroids)
    prompt = PromptConfig(**manifest.config["prompt"])
    encoder = PromptEncoder(vocabulary.encode(material.codes), vocabulary.prefix, prompt)
    progress = train_supervised(
        model, material.dataset, encoder, config, checkpoints,
        name="draft", pad=vocabulary.pad, seed=seed,
    )  # fmt: skip
    info = describe(progress, config, model)
    with finish(path, "draft", settings, parents, info, checkpoints) as folder:
        save_model(model, folder / MODEL)
        vocabulary.save(folder)
    return path


def cut(target: Any, layers: int) -> Any:
    """A new model of the target's widths with only its first `layers` layers, and their weights."""
    if hasattr(target, "peft_config"):
        target = target.merge_and_unload()
    config = copy.deepcopy(target.config)
    config.num_hidden_layers = min(layers, config.num_hidden_layers)
    draft = type(target)(config)
    initialise_from_model(draft, target)
    return draft
