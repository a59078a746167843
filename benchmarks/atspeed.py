"""AtSpeed's tables and ablations with this project's models, beside the published figures.

    python benchmarks/atspeed.py --config configs/atspeed-beauty.yaml --out var/reports/atspeed
    python benchmarks/atspeed.py --quick

The parts are in `atspeed_tables/`; docs/alignment.md says how to read the output.
"""

from __future__ import annotations

import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, cast

import typer
from atspeed_tables.lineup import BUDGETS, OBJECTIVES, Budget
from atspeed_tables.report import report as report_atspeed
from atspeed_tables.run import PARTS, Options, experiment

from recsys.benchmark import report
from recsys.benchmark.options import Out, numbers, words
from recsys.config import Settings
from recsys.errors import ConfigError
from recsys.options import ConfigFile, Force, Json, Name, Overrides, Quick
from recsys.pipeline import SECTIONS, Context

MINUTES = 1.0
# Settings and options of a toy run, which takes seconds and learns nothing.
QUICK: dict[str, Any] = {
    "name": "atspeed-quick",
    "data": {"source": "synthetic", "synthetic": {"users": 300, "items": 240}},
    "ids": {"method": "rq-kmeans", "levels": 3, "codebook_size": 8},
    "target": {
        "epochs": 1, "evaluate_every": 0, "threads": 1, "precision": "float32",
        "architecture": {"hidden_size": 32, "intermediate_size": 64},
        "prompt": {"max_items": 6, "block": 2},
    },
    "teacher": {"histories": 60, "beams": 5},
    "draft": {"threads": 1, "precision": "float32", "max_minutes": 0.002},
}  # fmt: skip
QUICK_OPTIONS: dict[str, Any] = {
    "users": 6, "timed": 2, "recall_users": 10, "ks": (1, 3), "drafts": 6,
    "studied": (3,), "widths": (3, 6), "recall_ks": (3,), "steps": 3,
}  # fmt: skip
INIT_OPTIONS: dict[str, Any] = {
    "scratch": ("scratch",), "target": ("target",), "both": ("scratch", "target")
}  # fmt: skip


def atspeed(
    parts: Annotated[
        str | None,
        typer.Option(help="What to run, a list of: table,ablations,effects,recall."),
    ] = None,
    objectives: Annotated[
        str | None, typer.Option(help="Objectives whose drafts are compared, a list (all).")
    ] = None,
    init: Annotated[
        str, typer.Option(help="Drafts start from: scratch, target (its first layers), or both.")
    ] = "both",
    seeds: Annotated[int, typer.Option(min=1, help="Drafts of each kind, one a seed.")] = 1,
    minutes: Annotated[
        float | None,
        typer.Option(help=f"Training of a draft, at most (draft.max_minutes, else {MINUTES})."),
    ] = None,
    budgets: Annotated[
        str,
        typer.Option(help="What compared drafts have in common, a list of: time,steps."),
    ] = "time,steps",
    steps: Annotated[
        int | None, typer.Option(min=1, help="Steps of a draft, where steps are equal (1000).")
    ] = None,
    ks: Annotated[
        str | None, typer.Option(help="Numbers of beams in the tables (1,3,5,10,20).")
    ] = None,
    users: Annotated[
        int | None,
        typer.Option(min=1, help="Test users whose accepted levels are counted (200)."),
    ] = None,
    timed: Annotated[
        int | None, typer.Option(min=1, help="Test users whose requests are timed (20).")
    ] = None,
    recall_users: Annotated[
        int | None, typer.Option(min=1, help="Test users whose lists are measured (1000).")
    ] = None,
    workers: Annotated[
        int, typer.Option(min=1, help="Processes side by side, one thread each.")
    ] = 2,
    stop_after: Annotated[
        float | None,
        typer.Option(min=0, help="Minutes after which no draft and no figure is begun any more."),
    ] = None,
    quick: Quick = False,
    out: Out = None,
    config: ConfigFile = None,
    set_: Overrides = None,
    name: Name = None,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Measure AtSpeed's tables with this run's target, next to the published figures.

    Makes the target, the teacher data and a draft for each objective where they are missing, and
    measures them on test users. Prints tables, and one JSON line last. Drafts and figures are kept
    as they end: a run that was stopped, or that --stop-after ended, continues where it was.
    """
    if init not in INIT_OPTIONS:
        raise ConfigError(f"--init {init!r} is not one of {', '.join(INIT_OPTIONS)}")
    settings = _settings(config, set_, name, quick)
    options = Options(
        parts=PARTS if parts is None else words("--parts", parts, PARTS),
        objectives=words(
            "--objectives", ",".join(OBJECTIVES) if objectives is None else objectives, OBJECTIVES
        ),
        inits=INIT_OPTIONS[init],
        seeds=tuple(range(seeds)),
        budgets=cast("tuple[Budget, ...]", words("--budgets", budgets, tuple(BUDGETS))),
        minutes=float(settings.values.get("draft", {}).get("max_minutes") or MINUTES),
        workers=workers,
        **(QUICK_OPTIONS if quick else {}),
    )
    given: dict[str, Any] = {
        "ks": None if ks is None else numbers("--ks", ks), "steps": steps, "users": users,
        "timed": timed, "recall_users": recall_users, "stop_after": stop_after, "minutes": minutes,
    }  # fmt: skip
    options = replace(options, **{k: v for k, v in given.items() if v is not None})
    document = report.begin("atspeed", quick=quick, out=out)
    document["command"] = shlex.join(["python", *sys.argv])
    document |= experiment(Context.of(settings, force=force), options)
    report.publish(document, report_atspeed(document), out, as_json=as_json)


def _settings(
    config: Path | None, overrides: list[str] | None, name: str | None, quick: bool
) -> Settings:
    if quick and config is not None:
        raise ConfigError("--quick has a data set of its own; leave --config out")
    settings = Settings.load(config, overrides or (), known=SECTIONS, name=name)
    if not quick:
        return settings
    merged = dict(QUICK)
    for key, value in settings.values.items():
        known = merged.get(key)
        merged[key] = {**known, **value} if isinstance(known, dict) else value
    return Settings(merged)


if __name__ == "__main__":
    typer.run(atspeed)
