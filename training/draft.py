"""Stage `draft`: a small model that predicts what the target will generate.

It starts as the target's first layers, at random, or as a pretrained checkpoint with the target's
tokenizer, and is trained on the next items alone (sft) or aligned to the target by one of the
objectives of `recsys.training.alignment`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from recsys.bundle import DRAFT
from recsys.config import as_dict
from recsys.constraint import ItemTrie
from recsys.constraint.transitions import DeviceTrie
from recsys.dataset import Dataset
from recsys.errors import ConfigError
from recsys.models.architecture import architecture
from recsys.models.checkpoint import build, load_model, save_model
from recsys.pipeline import Context
from recsys.prompts import PromptEncoder
from recsys.training import teacher
from recsys.training.alignment import TreeAlignment, TreeBatches, WordDistillation
from recsys.training.device import on_chosen_device
from recsys.training.initialise import initialise_from_centroids, initialise_from_model
from recsys.training.loop import Data, fit
from recsys.training.objective import NextToken
from recsys.training.pretrained import add_lora, load_draft_base, load_tokenizer
from recsys.training.settings import ON_TREES, ON_WORDS, DraftConfig
from recsys.training.state import Checkpoints, Progress
from recsys.training.supervised import (
    Material,
    budget,
    describe,
    open_checkpoints,
    sampled,
    training_batches,
    training_dtype,
    within_budget,
    write_trained,
)
from recsys.training.target import MODEL, TrainedTarget
from recsys.training.teacher import Teacher
from recsys.training.validation import Acceptance, Validation
from recsys.vocabulary import Vocabulary

KIND = "draft"


def stage(context: Context) -> Path:
    """Write the `draft` artifact of a run: `model/`, `vocabulary.json`, `log.jsonl`.

    An objective that learns from the teacher's trees makes the `teacher` artifact first, unless it
    is current.

    Raises:
        ConfigError: settings that do not fit each other or the data.
        ArtifactError: data set, IDs or target are missing.
    """
    workspace, seed = context.workspace, context.settings.seed
    config = sampled(context.settings.section(KIND, DraftConfig), KIND, context)
    parents = workspace.digests("dataset", "ids", "target")
    if context.parent is not None:
        parents |= context.parent.digests("bundle")
    if config.objective in ON_TREES:
        teacher.stage(replace(context, force=False))
        parents |= workspace.digests(teacher.KIND)
    settings = as_dict(config) | {"seed": seed} | budget(config, context)
    output = context.output(KIND, settings, parents)
    if output.is_current():
        return output.path
    data = Teacher.load(workspace.run(teacher.KIND)) if config.objective in ON_TREES else None
    checkpoints = open_checkpoints(output)
    material, target = Material.load(workspace), TrainedTarget.load(workspace)
    torch.manual_seed(seed)
    served = None if context.parent is None else context.parent.bundle / DRAFT
    if served is not None and served.is_dir() and config.base is not None:
        model, tokenizer = continue_pretrained(served, config, target.vocabulary)
    else:
        model, tokenizer = start(config, target, material)
        if served is not None:
            continue_from(served, model)
    progress = train_draft(
        model, target.load_model(), material.dataset, target.encoder,
        within_budget(config, KIND, context), checkpoints,
        data=data, seed=seed,
    )  # fmt: skip
    info = {**describe(progress, config.eval_users, model), "objective": config.objective}
    if progress.best and "recall@10" not in progress.best:
        info["validation"] = {**progress.best, "users": config.accept_users}
    with write_trained(output, checkpoints, info) as folder:
        save_model(model, folder / MODEL, merge=config.lora is None or config.lora.merge)
        if tokenizer is not None:
            tokenizer.save_pretrained(str(folder / MODEL))
        target.vocabulary.save(folder)
    return output.path


def start(config: DraftConfig, target: TrainedTarget, material: Material) -> tuple[Any, Any]:
    """A draft before training, and its tokenizer or None.

    It is the target's first layers, a pretrained checkpoint, or random weights in its own sizes.

    Raises:
        ConfigError: a checkpoint with another vocabulary than the target's.
    """
    vocabulary, tokenizer = target.vocabulary, None
    if config.base is not None:
        model, tokenizer = load_draft_base(config.base, target.folder / MODEL, vocabulary)
    elif config.init_from_target:
        return cut(target.load_model(), config.layers), None
    else:
        sizes = architecture(config.preset, config.architecture)
        model = build(replace(sizes, layers=config.layers), vocabulary)
    if material.centroids is not None:
        initialise_from_centroids(model, vocabulary, material.centroids)
    return model if config.lora is None else add_lora(model, vocabulary, config.lora), tokenizer


def continue_pretrained(
    served: Path, config: DraftConfig, vocabulary: Vocabulary
) -> tuple[Any, Any]:
    """The parent's draft, which was made from a checkpoint, and its tokenizer; `base` is not read.

    An adapter of it is merged. With `lora`, it gets a new one.
    """
    model = load_model(served, dtype=torch.float32)
    if config.lora is not None:
        model = add_lora(model, vocabulary, config.lora)
    return model, load_tokenizer(served)


def continue_from(parent: Path, model: Any) -> None:
    """Copy the weights of the parent's draft into a draft of the same sizes, in place.

    A draft of other sizes, or of no parent, starts as it is.
    """
    if not parent.is_dir():
        return
    served, own = load_model(parent, dtype=torch.float32).state_dict(), model.state_dict()
    if {k: v.shape for k, v in served.items()} == {k: v.shape for k, v in own.items()}:
        model.load_state_dict(served)


def train_draft(
    model: Any,
    target: Any,
    dataset: Dataset,
    encoder: PromptEncoder,
    config: DraftConfig,
    checkpoints: Checkpoints,
    *,
    data: Teacher | None = None,
    seed: int = 0,
) -> Progress:
    """Train a draft in place by any objective, validated by its acceptance.

    Args:
        model: the draft.
        target: the model it drafts for, with the same vocabulary; moved to the device of training.
        dataset: only its training events are trained on.
        encoder: history -> prompt, the target's.
        config: the settings.
        checkpoints: where the training state is stored.
        data: the teacher's trees, for the objectives that learn from them.
        seed: of everything random.

    Raises:
        ConfigError: nothing to train on.
        ValueError: an objective that learns from trees, without any.
    """
    if config.objective in ON_TREES and data is None:
        raise ValueError(f"objective {config.objective!r} learns from teacher data; pass `data`")
    trie = ItemTrie.build(encoder.item_tokens)
    validations: list[Callable[[], dict[str, float]]] = []
    if config.objective == "sft":
        ranking = Validation.of(model, encoder, dataset, config.eval_users)
        validations += [ranking] if len(ranking.examples) else []
    examples = dataset.examples("valid").sample(config.accept_users)
    if len(examples):
        prompts = encoder.encode_all(examples.histories)
        validations.append(
            Acceptance(target, model, prompts, trie, config.accept_beams, config.accept_nodes)
        )

    def validate() -> dict[str, float]:
        return {name: value for measure in validations for name, value in measure().items()}

    def make(device: torch.device, model: Any, target: Any) -> nn.Module:
        target.to(device)
        dtype, smoothing = training_dtype(model, config, device), config.label_smoothing
        if data is not None:
            return TreeAlignment(
                model, DeviceTrie.of(trie, device), config.alignment,
                target=None if config.alignment.constrained else target,
                label_smoothing=smoothing, dtype=dtype,
            )  # fmt: skip
        if config.objective in ON_WORDS:
            return WordDistillation(
                model, target, config.alignment, label_smoothing=smoothing, dtype=dtype
            )
        return NextToken(
            model, label_smoothing=smoothing, dropout=config.embedding_dropout, dtype=dtype
        )

    batches: Data
    if data is None:
        batches = training_batches(dataset, encoder, config, seed)
    else:
        batches = _tree_batches(trie, encoder, config, data, seed)
    module, device = on_chosen_device(KIND, [model, target], make, batches, config)
    return fit(
        module, batches, config, checkpoints,
        name=KIND, validate=validate if validations else None, seed=seed, device=device,
    )  # fmt: skip


def _tree_batches(
    trie: ItemTrie, encoder: PromptEncoder, config: DraftConfig, data: Teacher, seed: int
) -> TreeBatches:
    """The batches of an objective that learns from the teacher's trees."""
    on_levels = config.alignment.on_levels
    if on_levels and not data.config.level_tokens:
        raise ConfigError(
            "draft.objective: the teacher data lack the tokens of the levels, which atspeed-s "
            "compares; run `recsys train teacher` again with this objective"
        )
    return TreeBatches(
        data.prompts,
        data.trees,
        encoder,
        trie,
        config.batch_tokens,
        seed=seed,
        level_tokens=on_levels,
    )


def cut(target: Any, layers: int) -> Any:
    """A new model with the target's widths and weights, but only its first `layers` layers."""
    if hasattr(target, "peft_config"):
        target = target.merge_and_unload()
    config = copy.deepcopy(target.config)
    config.num_hidden_layers = min(layers, config.num_hidden_layers)
    draft = type(target)(config)
    initialise_from_model(draft, target)
    return draft
