"""Stage `target`: the model that recommends, trained on histories of semantic IDs."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from accelerate import Accelerator

from recsys.artifacts import up_to_date, write_artifact
from recsys.models.checkpoint import architecture, build, save_model
from recsys.prompts import PromptConfig, PromptEncoder
from recsys.vocabulary import Vocabulary
from training.initialise import initialise_from_centroids
from training.loop import LOG
from training.state import Checkpoints
from training.supervised import (
    Material,
    SupervisedConfig,
    describe,
    settings_of,
    train_supervised,
)

if TYPE_CHECKING:
    from pathlib import Path

    from recsys.pipeline import Context

MODEL = "model"


@dataclass(frozen=True)
class TargetConfig(SupervisedConfig):
    """Section `target`.

    Attributes:
        init_from_centroids: start token embeddings from the quantiser's centroids.
        prompt: how much of a history the model sees, here and wherever the target is used.
    """

    init_from_centroids: bool = True
    prompt: PromptConfig = field(default_factory=PromptConfig)


def stage(context: Context) -> Path:
    """Write the `target` artifact of a run: `model/`, `vocabulary.json`, `log.jsonl`.

    Raises:
        ConfigError: settings that do not fit each other or the data.
        ArtifactError: data set or IDs are missing.
    """
    workspace, seed = context.workspace, context.settings.seed
    config = context.settings.section("target", TargetConfig)
    path, settings = workspace.run("target"), settings_of(config, seed)
    parents = Material.digests(workspace)
    if not context.force and up_to_date(path, "target", settings, parents):
        return path
    checkpoints = Checkpoints(workspace.run("target.checkpoint"), {**settings, "parents": parents})
    material = Material.load(workspace)
    torch.manual_seed(seed)
    vocabulary = Vocabulary.from_levels(material.level_sizes)
    model: Any = build(architecture(config.preset, config.architecture), vocabulary)
    if config.init_from_centroids and material.centroids is not None:
        initialise_from_centroids(model, vocabulary, material.centroids)
    encoder = PromptEncoder(vocabulary.encode(material.codes), vocabulary.prefix, config.prompt)
    progress = train_supervised(
        model, material.dataset, encoder, config, checkpoints,
        name="target", pad=vocabulary.pad, seed=seed,
    )  # fmt: skip
    accelerator = Accelerator()
    if accelerator.is_main_process:
        info = describe(progress, config, model.num_parameters())
        with write_artifact(path, "target", config=settings, parents=parents, info=info) as folder:
            (folder / MODEL).mkdir()
            save_model(model, folder / MODEL)
            vocabulary.save(folder)
            shutil.copyfile(checkpoints.folder / LOG, folder / LOG)
        checkpoints.remove()
    accelerator.wait_for_everyone()
    return path
