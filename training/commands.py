"""Commands that make models: `recsys ids`, `recsys train`, `recsys bundle`.

Nothing heavy is imported at the top, because `recsys --help` reads this module.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer

from recsys.options import ConfigFile, Json, Name, RunOptions, expand_options

ids = typer.Typer(no_args_is_help=True, add_completion=False, rich_markup_mode="rich")
train = typer.Typer(no_args_is_help=True, add_completion=False, rich_markup_mode="rich")

Preset = Annotated[
    str | None,
    typer.Option(help="Sizes of a model from scratch: tiny (0.6M), small (3M) or base (19M)."),
]
Epochs = Annotated[int | None, typer.Option(help="Passes over the training windows, at most.")]
MaxMinutes = Annotated[
    float | None,
    typer.Option(help="Time budget; the learning rate then follows the clock to its end."),
]


@dataclass(frozen=True)
class TargetOptions:
    """Options of `recsys train target`: settings of section `target`."""

    preset: Preset = None
    base: Annotated[
        Path | None,
        typer.Option(
            help="Folder of a pretrained LLaMA checkpoint with its tokenizer; it is given the "
            "semantic tokens and adapted with LoRA, instead of a model from scratch."
        ),
    ] = None
    epochs: Epochs = None
    max_minutes: MaxMinutes = None


@dataclass(frozen=True)
class TeacherOptions:
    """Options of `recsys train teacher`: settings of section `teacher`."""

    source: Annotated[
        str | None,
        typer.Option(help="Whose top K is stored: target, or mixture (of target and draft)."),
    ] = None
    beams: Annotated[int | None, typer.Option(help="K, sequences stored per history.")] = None


@dataclass(frozen=True)
class DraftOptions:
    """Options of `recsys train draft`: settings of section `draft`."""

    objective: Annotated[
        str | None,
        typer.Option(
            help="auto, sft, wordkd, tvdkd, seqkd, atspeed-s (renormalised), atspeed-s-eq4 (as "
            "printed), atspeed-r, tree-kd, margin-kd, or state-kd (small networks that read the "
            "target's state, instead of a small model)."
        ),
    ] = None
    base: Annotated[
        Path | None,
        typer.Option(
            help="Folder of a pretrained checkpoint with the target's tokenizer, instead of the "
            "target's first layers; --set draft.lora.rank=16 adapts it with LoRA."
        ),
    ] = None
    preset: Preset = None
    epochs: Epochs = None
    max_minutes: MaxMinutes = None


@ids.callback()
def _ids() -> None:
    """Semantic IDs: give each item of a data set a short code, and similar items similar codes."""


@train.callback()
def _train() -> None:
    """Train the model that recommends, and the small one that speeds it up.

    Both read the data set and the semantic IDs of a run. Training that was stopped or killed
    continues from its last checkpoint when the same command is given again.

    On four GPUs: accelerate launch --num-processes 4 .venv/bin/recsys train target ...
    On two cores: ACCELERATE_USE_CPU=1 torchrun --nproc-per-node 2 .venv/bin/recsys train target ...
    """


@ids.command("train")
@expand_options
def ids_train(
    *,
    method: Annotated[
        str | None,
        typer.Option(help="rq-vae, rq-kmeans, or imported (with the data set)."),
    ] = None,
    run: RunOptions,
    as_json: Json = False,
) -> None:
    """Learn semantic IDs from items' texts, attributes and co-occurrence, and report their health.

    Example: recsys ids train --name beauty --method rq-vae
    """
    context = run.context(ids={"method": method}).with_recipe()
    from recsys.training.ids import print_report, stage

    print_report(context.run(stage), as_json)


@ids.command("report")
def ids_report(name: Name = None, config: ConfigFile = None, as_json: Json = False) -> None:
    """Print the health of a run's semantic IDs: codes used, perplexity, collisions.

    Example: recsys ids report --name beauty
    """
    context = RunOptions(config, name=name).context()
    from recsys.training.ids import print_report

    print_report(context.workspace.run("ids"), as_json)


@train.command("target")
@expand_options
def train_target(*, own: TargetOptions, run: RunOptions, as_json: Json = False) -> None:
    """Train the target to predict the semantic ID of the next item.

    Example: recsys train target --config configs/beauty.yaml --max-minutes 5
    """
    context = run.context(target=asdict(own)).with_recipe()
    from recsys.training.target import stage

    _report(context.run(stage), "target", as_json)


@train.command("teacher")
@expand_options
def train_teacher(*, own: TeacherOptions, run: RunOptions, as_json: Json = False) -> None:
    """Store the target's top K of training histories, for drafts to learn from.

    The beam search of each history is stored level by level, with the target's log-probs of the
    allowed tokens at its nodes. A run that was stopped continues after its last shard.

    Example: recsys train teacher --config configs/atspeed-beauty.yaml --beams 20
    """
    context = run.context(teacher=asdict(own)).with_recipe()
    from recsys.artifacts import read_manifest
    from recsys.training.teacher import stage

    path = context.run(stage)
    info = read_manifest(path, "teacher").info
    if as_json:
        typer.echo(json.dumps({"path": str(path), **info}))
        return
    typer.echo(f"teacher: {path}")
    typer.echo(f"  {info['histories']:,} histories, {info['bytes'] / 1e6:.0f} MB")


@train.command("draft")
@expand_options
def train_draft(
    *,
    own: DraftOptions,
    run: RunOptions,
    as_json: Json = False,
) -> None:
    """Train the draft: a small model with the target's vocabulary, cut from the target by default.

    It is aligned to the target; docs/alignment.md has the objectives. `recsys run` trains one only
    where answers use it.

    Example: recsys train draft --config configs/atspeed-beauty.yaml --objective margin-kd
    """
    context = run.context(draft=asdict(own)).with_recipe()
    from recsys.training.draft import train

    _report(context.run(train), "draft", as_json)


@expand_options
def bundle(run: RunOptions) -> None:
    """Gather catalog, vocabulary, target and draft into the one directory that is served.

    Example: recsys bundle --name beauty
    """
    context = run.context().with_recipe()
    from recsys.training.bundle import stage

    typer.echo(f"bundle: {context.run(stage)}")


def _report(path: Path, kind: str, as_json: bool) -> None:
    """Print the outcome of a training run, for people or as JSON."""
    from recsys.artifacts import read_manifest

    info = read_manifest(path, kind).info
    if as_json:
        typer.echo(json.dumps({"path": str(path), **info}))
        return
    typer.echo(f"{kind}: {path}")
    typer.echo(
        f"  {info['parameters']:,} parameters, {info['epochs']} epochs, {info['seconds']:.0f} s"
    )
    validation = info["validation"]
    if "recall@10" in validation:
        typer.echo(
            f"  validation: recall@10 {validation['recall@10']:.4f}, "
            f"NDCG@10 {validation['ndcg@10']:.4f}"
            f" ({validation['users']} users, seen items masked)"
        )
    if "accepted_levels" in validation:
        typer.echo(
            f"  drafting: {validation['accepted_levels']:.2f} levels accepted, "
            f"{validation['target_passes']:.2f} target passes a request on validation"
        )
