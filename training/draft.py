"""Stage `draft`: a small model that predicts what the target will generate.

It starts as the target's first layers, at random, or as a pretrained checkpoint with the target's
tokenizer, and is trained on the next items alone (sft) or aligned to the target by one of the
objectives of `recsys.training.alignment`. A run makes one only where its answers will use it.
"""

from __future__ import annotations

import copy
import math
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from recsys.bundle import DRAFT
from recsys.config import as_dict
from recsys.constraint import ItemTrie
from recsys.constraint.transitions import DeviceTrie
from recsys.dataset import Dataset
from recsys.devices import AUTO, CPU
from recsys.errors import ConfigError
from recsys.loading import answering_device
from recsys.models.architecture import architecture
from recsys.models.checkpoint import build, load_model, save_model
from recsys.pipeline import LEAST_MINUTES, SHARES, Context
from recsys.progress import say
from recsys.prompts import PromptEncoder
from recsys.training import teacher
from recsys.training.alignment import TreeAlignment, TreeBatches
from recsys.training.device import on_chosen_device
from recsys.training.initialise import initialise_from_centroids
from recsys.training.loop import Data, fit
from recsys.training.objective import NextToken, WordDistillation
from recsys.training.pretrained import add_lora, load_draft_base, load_tokenizer
from recsys.training.settings import (
    ON_TREES,
    ON_WORDS,
    OURS,
    TRIED,
    DraftConfig,
    Objective,
)
from recsys.training.state import Checkpoints, Progress
from recsys.training.supervised import (
    TRAINED,
    Material,
    budget,
    describe,
    open_checkpoints,
    sampled,
    training_batches,
    training_dtype,
    write_trained,
)
from recsys.training.target import MODEL, TrainedTarget
from recsys.training.teacher import Teacher
from recsys.training.validation import Validation, acceptance

KIND = "draft"
TAUGHT, TRIED_FOR = 0.3, 0.4  # of the stage's time, the most for teacher data, and for trials
LEAST_FOR_TRIALS = 2.0  # minutes of the stage
Run = Callable[[DraftConfig, Checkpoints], tuple[Any, Any, Progress]]


def stage(context: Context) -> Path | None:
    """Write the `draft` artifact of a run whose answers use one (`train`); otherwise say why not.

    A run has a draft if its configuration names an objective or a checkpoint for it, if it or its
    parent has one already, or if the target answers on an accelerator, where the planner may choose
    speculation.

    Raises:
        ConfigError, ArtifactError: as `train`.
    """
    config, workspace = context.settings.section(KIND, DraftConfig), context.workspace
    is_named = config.objective != AUTO or config.base is not None
    if not is_named and context.made(KIND) is None and _served(context) is None:
        target = TrainedTarget.load(workspace)
        if answering_device(target.folder / MODEL, target.encoder) == CPU:
            name = workspace.name
            say(
                "draft: none, since a CPU answers sooner by plain beam search; one is trained by: "
                f"recsys train draft --name {name} && recsys bundle --name {name}"
            )
            return None
    return train(context)


def _served(context: Context) -> Path | None:
    """The draft of the run's parent, if there is one."""
    folder = None if context.parent is None else context.parent.bundle / DRAFT
    return folder if folder is not None and folder.is_dir() else None


def train(context: Context) -> Path:
    """Write the `draft` artifact: `model/`, `vocabulary.json`, `log.jsonl`.

    An objective that learns from the teacher's trees makes the `teacher` artifact first, unless it
    is current. What that and trials of objectives take counts as time of the stage. The manifest's
    `info` has the `objective`, and in `trials` what each objective reached on validation.

    Raises:
        ConfigError: settings that do not fit each other or the data.
        ArtifactError: data set, IDs or target are missing.
    """
    workspace, seed = context.workspace, context.settings.seed
    config = sampled(context.settings.section(KIND, DraftConfig), KIND, context)
    minutes = context.share(KIND) if config.max_minutes is None else config.max_minutes
    begun, limit = time.monotonic(), math.inf if minutes is None else minutes
    parents = workspace.digests("dataset", "ids", "target")
    if context.parent is not None:
        parents |= context.parent.digests("bundle")
    learners = [replace(config, objective=name) for name in _objectives(config, context)]
    if any(learner.objective in ON_TREES for learner in learners):
        level_tokens = any(learner.alignment.on_levels for learner in learners)
        teacher.stage(replace(context, force=False), level_tokens, TAUGHT * limit)
        parents |= workspace.digests(teacher.KIND)
    settings = as_dict(config) | {"seed": seed} | budget(config, context)
    output = context.output(KIND, settings, parents)
    if output.is_current():
        return output.path
    target = TrainedTarget.load(workspace)
    run = partial(_run, context, Material.load(workspace), target)
    trials = _compare(run, learners, TRIED_FOR * limit) if len(learners) > 1 else {}
    passes = {name: metrics["target_passes"] for name, metrics in trials.items()}
    config = min(learners, key=lambda learner: passes.get(learner.objective, math.inf))
    checkpoints = open_checkpoints(output)
    left = limit - (time.monotonic() - begun) / 60
    if minutes is not None:
        part = 1 if config.max_minutes is not None else TRAINED
        config = replace(config, max_minutes=max(part * left, LEAST_MINUTES))
    model, tokenizer, progress = run(config, checkpoints)
    info = {**describe(progress, config.eval_users, model), "objective": config.objective}
    if trials:
        info["trials"] = trials
    if progress.best and "recall@10" not in progress.best:
        info["validation"] = {**progress.best, "users": config.accept_users}
    with write_trained(output, checkpoints, info) as folder:
        save_model(model, folder / MODEL, merge=config.lora is None or config.lora.merge)
        if tokenizer is not None:
            tokenizer.save_pretrained(str(folder / MODEL))
        target.vocabulary.save(folder)
    return output.path


def _objectives(config: DraftConfig, context: Context) -> Sequence[Objective]:
    """What a draft of these settings may learn: several where the time allows trials.

    The clock does not decide it, so that a run that is continued asks for the same teacher data.
    """
    if config.objective != AUTO:
        return (config.objective,)
    minutes = config.max_minutes or SHARES[KIND] * (context.minutes or 0)
    return TRIED if minutes >= LEAST_FOR_TRIALS and config.accept_users else (OURS,)


def _compare(
    run: Run, learners: Sequence[DraftConfig], minutes: float
) -> dict[str, dict[str, float]]:
    """Objective -> acceptance on validation, of drafts that are trained for equal times.

    Empty if there are no validation users.
    """
    measured: dict[str, dict[str, float]] = {}
    for learner in learners:
        # One validation is enough, at the end.
        short = replace(learner, max_minutes=minutes / len(learners), evaluate_every=1 << 30)
        with tempfile.TemporaryDirectory() as folder:
            _, _, progress = run(short, Checkpoints(Path(folder), {}))
        if progress.best:
            measured[learner.objective] = progress.best
    return measured


def _run(
    context: Context,
    material: Material,
    target: TrainedTarget,
    config: DraftConfig,
    checkpoints: Checkpoints,
) -> tuple[Any, Any, Progress]:
    """A trained draft, its tokenizer or None, and how the training went."""
    seed = context.settings.seed
    torch.manual_seed(seed)
    model, tokenizer = start(config, target, material, _served(context))
    on_trees = config.objective in ON_TREES
    data = Teacher.load(context.workspace.run(teacher.KIND)) if on_trees else None
    progress = train_draft(
        model, target.load_model(), material.dataset, target.encoder, config, checkpoints,
        data=data, seed=seed,
    )  # fmt: skip
    return model, tokenizer, progress


def start(
    config: DraftConfig, target: TrainedTarget, material: Material, served: Path | None = None
) -> tuple[Any, Any]:
    """A draft before training, and its tokenizer or None.

    It is the target's first layers, a pretrained checkpoint, or random weights in its own sizes.
    With `served`, the draft of the run's parent, one that was made from a checkpoint continues from
    it instead, with its adapter merged, and any other one of the same sizes has its weights.

    Raises:
        ConfigError: a checkpoint with another vocabulary than the target's.
    """
    vocabulary, tokenizer = target.vocabulary, None
    is_cut = config.base is None and config.init_from_target
    if config.base is not None and served is not None:
        model, tokenizer = load_model(served, dtype=torch.float32), load_tokenizer(served)
    elif config.base is not None:
        model, tokenizer = load_draft_base(config.base, target.folder / MODEL, vocabulary)
    elif is_cut:
        model = cut(target.load_model(), config.layers)
    else:
        sizes = architecture(config.preset, config.architecture)
        model = build(replace(sizes, layers=config.layers), vocabulary)
    if served is not None and config.base is None:
        theirs, own = load_model(served, dtype=torch.float32).state_dict(), model.state_dict()
        if {k: v.shape for k, v in theirs.items()} == {k: v.shape for k, v in own.items()}:
            model.load_state_dict(theirs)
    elif served is None and material.centroids is not None and not is_cut:
        initialise_from_centroids(model, vocabulary, material.centroids)
    return model if config.lora is None else add_lora(model, vocabulary, config.lora), tokenizer


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
        sizes = config.accept_beams, config.accept_nodes
        validations.append(partial(acceptance, target, model, prompts, trie, *sizes))

    def validate() -> dict[str, float]:
        return {name: value for measure in validations for name, value in measure().items()}

    def make(device: torch.device, model: Any, target: Any) -> nn.Module:
        target.to(device)
        dtype, smoothing = training_dtype(model, config, device), config.label_smoothing
        if data is not None:
            return TreeAlignment(
                model, DeviceTrie.of(trie, device), config.alignment,
                target=target if config.alignment.on_whole else None,
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
        on_levels = config.alignment.on_levels
        if on_levels and not data.config.level_tokens:
            raise ConfigError(
                "draft.objective: the teacher data lack the tokens of the levels, which it "
                "compares; run `recsys train teacher` again with this objective"
            )
        batches = TreeBatches(
            data.prompts, data.trees, encoder, trie, config.batch_tokens,
            seed=seed, level_tokens=on_levels,
        )  # fmt: skip
    module, device = on_chosen_device(KIND, [model, target], make, batches, config)
    return fit(
        module, batches, config, checkpoints,
        name=KIND, validate=validate if validations else None, seed=seed, device=device,
    )  # fmt: skip


def cut(target: Any, layers: int) -> Any:
    """A new model with the target's widths and weights, but only its first `layers` layers."""
    if hasattr(target, "peft_config"):
        target = target.merge_and_unload()
    config = copy.deepcopy(target.config)
    config.num_hidden_layers = min(layers, config.num_hidden_layers)
    draft = type(target)(config)
    draft.load_state_dict(target.state_dict(), strict=False)  # but for the further layers
    return draft
