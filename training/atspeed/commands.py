"""`recsys benchmark atspeed`. Nothing heavy is imported at the top."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from recsys.benchmark.result import asked
from recsys.config import Settings
from recsys.options import ConfigFile, Force, Json, Name, Overrides

if TYPE_CHECKING:  # the command loads these when it runs
    from recsys.training.atspeed.run import Options

MINUTES = 1.0
# A toy: everything is made and asked in seconds, and nothing is learned.
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


def atspeed(
    parts: Annotated[
        str | None,
        typer.Option(help="What to run, a list of: table,ablations,effects,nodes,recall."),
    ] = None,
    init: Annotated[
        str, typer.Option(help="Drafts start from: scratch, target (its first layers), or both.")
    ] = "both",
    seeds: Annotated[int, typer.Option(min=1, help="Drafts of each kind, one a seed.")] = 1,
    minutes: Annotated[
        float | None,
        typer.Option(help=f"Training of a draft, at most (draft.max_minutes, else {MINUTES})."),
    ] = None,
    users: Annotated[
        int | None,
        typer.Option(
            min=1, help="Test users whose passes are counted (200; 100 with large trees)."
        ),
    ] = None,
    timed: Annotated[
        int | None, typer.Option(min=1, help="Of them, whose requests are timed (20).")
    ] = None,
    recall_users: Annotated[
        int | None, typer.Option(min=1, help="Test users whose lists are measured (1000).")
    ] = None,
    workers: Annotated[
        int, typer.Option(min=1, help="Processes side by side, one thread each.")
    ] = 2,
    quick: Annotated[
        bool, typer.Option("--quick", help="A toy run in seconds; its figures mean nothing.")
    ] = False,
    out: Annotated[
        Path | None, typer.Option(help="Folder for report.html, plots and result.json.")
    ] = None,
    config: ConfigFile = None,
    set_: Overrides = None,
    name: Name = None,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """AtSpeed's tables with this run's target: every objective, next to the published figures.

    Makes the target, the teacher data and a draft for each objective, as far as they are not there,
    and asks them for test users' items. Prints tables, and one JSON line last. A run that was
    stopped goes on where it was.

    Example: recsys benchmark atspeed --config configs/atspeed-beauty.yaml --out var/reports/atspeed
    """
    from rich.console import Console

    from recsys.benchmark.environment import environment
    from recsys.pipeline import Context
    from recsys.progress import say
    from recsys.training.atspeed import report
    from recsys.training.atspeed.findings import findings
    from recsys.training.atspeed.run import experiment

    settings = _settings(config, set_, name, quick)
    options = _options(settings, parts, init, seeds, minutes, workers, quick)
    options = _users(options, users, timed, recall_users)
    before = environment()
    document = experiment(Context.of(settings, force=force), options)
    document |= {
        **asked(quick=quick),
        **environment(),
        "load_before": before["load"],
    }
    document["findings"] = findings(document)
    if not as_json:
        report.show(document, Console())
    if out is not None:
        report.write(document, out)
        say(f"report: {out / 'report.html'}")
    typer.echo(json.dumps(document))


def _settings(
    config: Path | None, overrides: list[str] | None, name: str | None, quick: bool
) -> Settings:
    from recsys.config import Settings
    from recsys.errors import ConfigError
    from recsys.pipeline import SECTIONS

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


def _options(
    settings: Settings,
    parts: str | None,
    init: str,
    seeds: int,
    minutes: float | None,
    workers: int,
    quick: bool,
) -> Options:
    from recsys.errors import ConfigError
    from recsys.training.atspeed.lineup import Budget, Init
    from recsys.training.atspeed.run import PARTS, Options

    chosen = tuple(parts.replace(",", " ").split()) if parts is not None else PARTS
    for part in chosen:
        if part not in PARTS:
            raise ConfigError(f"--parts {part!r} is not one of {', '.join(PARTS)}")
    if not chosen:
        raise ConfigError(f"--parts: want a list of {', '.join(PARTS)}")
    inits: dict[str, tuple[Init, ...]] = {
        "scratch": ("scratch",),
        "target": ("target",),
        "both": ("scratch", "target"),
    }
    if init not in inits:
        raise ConfigError(f"--init {init!r} is not scratch, target or both")
    budget = minutes or settings.values.get("draft", {}).get("max_minutes") or MINUTES
    small: dict[str, Any] = {}
    if quick:
        small = {
            "users": 6, "node_users": 5, "timed": 2, "hf_timed": 1, "recall_users": 10,
            "ks": (1, 3), "drafts": 6, "studied": (3,), "widths": (3, 6), "node_ks": (3,),
            "nodes": (8, 16), "recall_ks": (3,),
        }  # fmt: skip
    return Options(
        parts=chosen,
        inits=inits[init],
        seeds=tuple(range(seeds)),
        budget=Budget(float(budget)),
        workers=workers,
        **small,
    )


def _users(options: Options, users: int | None, timed: int | None, recall: int | None) -> Options:
    from dataclasses import replace

    asked = {"users": users, "timed": timed, "recall_users": recall}
    if users is not None:
        asked["node_users"] = min(users, options.node_users)
    return replace(options, **{k: v for k, v in asked.items() if v is not None})  # type: ignore[arg-type]
