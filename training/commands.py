"""Commands that make models: `recsys ids`, `recsys train`, `recsys bundle`.

Each takes the settings of a run alone (`--config`, `--set`, `--name`, `--seed`, `--force`).
Nothing heavy is imported at the top, because `recsys --help` reads this module.
"""

from __future__ import annotations

import json
from importlib import import_module

import typer

from recsys.options import Json, RunOptions, expand_options

ids = typer.Typer(no_args_is_help=True, add_completion=False, rich_markup_mode="rich")
train = typer.Typer(no_args_is_help=True, add_completion=False, rich_markup_mode="rich")


@ids.callback()
def _ids() -> None:
    """Semantic IDs: give each item of a data set a short code, and similar items similar codes."""


@train.callback()
def _train() -> None:
    """Train the model that recommends, and the small one that speeds it up.

    Both read the data set and the semantic IDs of a run. Training that was stopped or killed
    continues from its last checkpoint when the same command is given again.
    docs/distributed.md says how to train on several processes.
    """


@ids.command("train")
@expand_options
def ids_train(*, run: RunOptions, as_json: Json = False) -> None:
    """Learn semantic IDs from items' texts, attributes and co-occurrence, and report their health.

    IDs that are up to date are only reported: codes used, perplexity, collisions.

    Example: recsys ids train --name beauty --set ids.method=rq-kmeans
    """
    from recsys.training.ids import print_report, stage

    print_report(run.context().with_recipe().run(stage), as_json)


@train.command("target")
@expand_options
def train_target(*, run: RunOptions, as_json: Json = False) -> None:
    """Train the target to predict the semantic ID of the next item.

    Example: recsys train target --config configs/beauty.yaml --set target.max_minutes=5
    """
    _make(run, "target", "stage", as_json)


@train.command("teacher")
@expand_options
def train_teacher(*, run: RunOptions, as_json: Json = False) -> None:
    """Store the target's top K of training histories, for drafts to learn from.

    The beam search of each history is stored level by level, with the target's log-probs of the
    allowed tokens at its nodes. A run that was stopped continues after its last shard.

    Example: recsys train teacher --config configs/atspeed-beauty.yaml --set teacher.beams=20
    """
    _make(run, "teacher", "stage", as_json)


@train.command("draft")
@expand_options
def train_draft(*, run: RunOptions, as_json: Json = False) -> None:
    """Train the draft: a small model with the target's vocabulary, cut from the target by default.

    It is aligned to the target; docs/alignment.md has the objectives. `recsys run` trains one only
    where answers use it.

    Example: recsys train draft --config configs/atspeed-beauty.yaml --set draft.objective=seqkd
    """
    _make(run, "draft", "train", as_json)


@expand_options
def bundle(run: RunOptions) -> None:
    """Gather catalog, models and retrieval into the one directory that is served.

    Example: recsys bundle --name beauty
    """
    context = run.context().with_recipe()
    from recsys.training.bundle import stage

    typer.echo(f"bundle: {context.run(stage)}")


def _make(run: RunOptions, kind: str, stage: str, as_json: bool) -> None:
    """Run a stage of training and print its outcome, for people or as JSON."""
    from recsys.artifacts import read_manifest

    module = import_module(f"recsys.training.{kind}")
    path = run.context().with_recipe().run(getattr(module, stage))
    info = read_manifest(path, kind).info
    if as_json:
        typer.echo(json.dumps({"path": str(path), **info}))
        return
    typer.echo(f"{kind}: {path}")
    shown = [
        f"{name} {value:,}" if isinstance(value, int) else f"{name} {value:.4f}"
        for name, value in {**info, **info.get("validation", {})}.items()
        if isinstance(value, int | float)
    ]
    typer.echo("  " + ", ".join(shown))
