"""Stage `target`: the model that recommends, trained on histories of semantic IDs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate.utils import parse_flag_from_env
from torch import nn

from recsys.artifacts import Workspace
from recsys.bundle import Bundle
from recsys.config import as_dict
from recsys.devices import CPU
from recsys.models.architecture import architecture
from recsys.models.checkpoint import build, load_model, save_model
from recsys.pipeline import Context
from recsys.prompts import PromptConfig, PromptEncoder
from recsys.training import sasrec
from recsys.training.device import on_chosen_device
from recsys.training.initialise import initialise_from_centroids
from recsys.training.loop import fit
from recsys.training.objective import NextToken
from recsys.training.parent import load_target, open_parent
from recsys.training.pretrained import add_lora, load_base
from recsys.training.settings import TargetConfig, check_sasrec
from recsys.training.supervised import (
    Material,
    budget,
    describe,
    open_checkpoints,
    sampled,
    training_batches,
    training_dtype,
    with_labels,
    within_budget,
    write_trained,
)
from recsys.training.validation import Validation
from recsys.vocabulary import Vocabulary

KIND = "target"
MODEL = "model"
LABELS = 32  # items of a soft label


@dataclass(frozen=True)
class TrainedTarget:
    """The target of a run as the later stages read it.

    Attributes:
        folder: the artifact.
        vocabulary: codes <-> tokens.
        encoder: history -> prompt, over the items of the run.
        device: where it was trained, if it may still be used, or else the CPU.
    """

    folder: Path
    vocabulary: Vocabulary
    encoder: PromptEncoder
    device: str = CPU

    @classmethod
    def load(cls, workspace: Workspace) -> TrainedTarget:
        """Read everything but the weights.

        Raises:
            ArtifactError: the target or the semantic IDs are missing or damaged.
        """
        manifest = workspace.manifest(KIND)
        prompt = PromptConfig(**manifest.config["prompt"])
        folder = workspace.run(KIND)
        vocabulary = Vocabulary.load(folder)
        codes = np.load(workspace.run("ids") / "codes.npy", allow_pickle=False)
        may_use_gpu = torch.cuda.is_available() and not parse_flag_from_env("ACCELERATE_USE_CPU")
        device = manifest.info.get("device", CPU) if may_use_gpu else CPU
        return cls(folder, vocabulary, PromptEncoder.of(vocabulary, codes, prompt), device)

    def load_model(self, device: torch.device | str = "cpu") -> Any:
        """The model in float32."""
        return load_trained(self.folder, device)


def load_trained(folder: Path, device: torch.device | str = "cpu") -> Any:
    """The model of a `target` or `draft` artifact, in float32."""
    return load_model(folder / MODEL, dtype=torch.float32, device=device)


def stage(context: Context) -> Path:
    """Write the `target` artifact of a run: `model/`, `vocabulary.json`, `log.jsonl`.

    Raises:
        ConfigError: settings that do not fit each other or the data.
        ArtifactError: data set, IDs, the pretrained checkpoint or the parent's bundle are missing.
    """
    workspace, seed = context.workspace, context.settings.seed
    config = sampled(context.settings.section(KIND, TargetConfig), KIND, context)
    parents = workspace.digests("dataset", "ids")
    parent = open_parent(context)
    if parent is not None:
        config = replace(config, prompt=parent.prompt)
        parents["bundle"] = parent.manifest.digest
    teacher = None
    if config.soft_labels and config.soft_labels_from == "sasrec":
        check_sasrec(context.settings, "target.soft_labels_from")
        teacher, parents[sasrec.KIND] = sasrec.load(context)
    settings = as_dict(config) | {"seed": seed} | budget(config, context)
    output = context.output(KIND, settings, parents)
    if output.is_current():
        return output.path
    checkpoints = open_checkpoints(output)
    material = Material.load(workspace)
    torch.manual_seed(seed)
    model, tokenizer, vocabulary = _start(config, material, parent)
    encoder = PromptEncoder.of(vocabulary, material.codes, config.prompt)
    validate = Validation.of(model, encoder, material.dataset, config.eval_users)
    before = validate() if parent is not None and len(validate.examples) else {}
    if config.base is not None or (parent is not None and config.update == "lora"):
        model = add_lora(model, vocabulary, config.lora)
        validate = replace(validate, model=model)

    def make(device: torch.device, model: Any) -> nn.Module:
        return NextToken(
            model, label_smoothing=config.label_smoothing, dropout=config.embedding_dropout,
            dtype=training_dtype(model, config, device), exit_layer=config.exit_layer,
            agreement=config.agreement, soft_labels=config.soft_labels,
        )  # fmt: skip

    batches = training_batches(material.dataset, encoder, config, seed)
    if config.window_share < 1:
        batches = batches.sample(config.window_share)
    batches = with_labels(batches, material.dataset, config, KIND, context, LABELS, teacher)
    module, device = on_chosen_device(KIND, [model], make, batches, config)
    progress = fit(
        module,
        batches,
        within_budget(config, KIND, context),
        checkpoints,
        name=KIND,
        validate=validate if len(validate.examples) else None,
        seed=seed,
        device=device,
    )
    info = describe(progress, config.eval_users, model)
    info["passes"] = progress.epoch + progress.batch / batches.count(progress.epoch)
    if before:
        info["validation_before"] = before
    with write_trained(output, checkpoints, info) as folder:
        save_model(model, folder / MODEL, merge=config.lora.merge)
        if tokenizer is not None:
            tokenizer.save_pretrained(str(folder / MODEL))
        vocabulary.save(folder)
    return output.path


def _start(
    config: TargetConfig, material: Material, parent: Bundle | None
) -> tuple[Any, Any, Vocabulary]:
    """The model before training, its tokenizer or None, and its vocabulary."""
    if parent is not None:
        return *load_target(parent, material), parent.vocabulary
    tokenizer = None
    if config.base is not None:
        model, tokenizer, vocabulary = load_base(
            config.base, material.level_sizes, config.instruction
        )
    else:
        vocabulary = Vocabulary.from_levels(material.level_sizes)
        model = build(architecture(config.preset, config.architecture), vocabulary)
    if config.init_from_centroids and material.centroids is not None:
        initialise_from_centroids(model, vocabulary, material.centroids)
    return model, tokenizer, vocabulary
