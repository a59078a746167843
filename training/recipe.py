"""Stage `recipe`: chooses settings of the semantic IDs and of the target by trials on validation.

The settings of the run are tried first, and then each trial on top of what has been chosen so far.
A trial is a short training run; its settings are kept if NDCG@10 on validation is higher by more
than two standard errors of the paired difference. All trials share the stage's part of the budget.
If that is too short for four passes over the training windows, as far as a tenth of a trial tells,
all trials train on a sample of them, or on a smaller one if the first trial has no time for two.
For less than a small sample there are no trials.
"""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from numpy.typing import NDArray
from rich.table import Table

from recsys.artifacts import Workspace
from recsys.config import as_dict
from recsys.dataset import Dataset
from recsys.pipeline import RECIPE, Context
from recsys.progress import console, say
from recsys.training import ids, sasrec, target
from recsys.training.settings import IdsConfig, RecipeConfig
from recsys.training.validation import Validation

KIND = RECIPE
FILE = "recipe.yaml"
ERRORS = 2.0  # standard errors that a gain must exceed; short runs and several trials add noise
LEAST_USERS = 50  # of validation; differences of fewer are noise
LEAST_EPOCHS = 2  # of a trial; differences after less are noise, too
AIMED_EPOCHS = 2 * LEAST_EPOCHS  # so that a machine that slows down still reaches them
LEAST_SHARE = 1 / 16  # of the training windows; trials on fewer show nothing
MEASURED = 0.1  # of a trial's time, in which the speed is measured
LEAST_MEASURED = 1 / 30  # minutes of that, as the first steps are slow
TRAINED = 0.6  # of a trial's time; the rest is for IDs, soft labels and validation
AS_SET = "as set"  # the trial of the run's own settings


def stage(context: Context) -> Path | None:
    """Write the `recipe` artifact of a run; without trials, or with a parent, return None.

    The manifest's `info` has `chosen`, the settings that were kept, and `trials`: the name and the
    settings of each, NDCG@10, its gain over the best one before with its standard error, and
    whether it was kept; `window_share` is the share of the training windows that they used.
    `recipe.yaml` has the run's settings with the chosen ones and without trials, for `--config`.

    Raises:
        ArtifactError: the data set or the SASRec model is missing.
    """
    settings, workspace = context.settings, context.workspace
    config = settings.section(KIND, RecipeConfig)
    # What was given on the command line is not tried otherwise.
    trials = {
        name: trial
        for name, trial in config.trials.items()
        if not any(text.partition("=")[0] in settings.explicit_keys for text in trial)
    }
    if not trials or context.parent is not None:  # the settings that it chose hold on
        return None
    parents = workspace.digests("dataset")
    if (known := sasrec.trained(context)) is not None:
        parents[sasrec.KIND] = known[1]
    made_with = {
        **as_dict(replace(config, trials=trials)),
        "settings": {key: settings.values.get(key) for key in (ids.KIND, target.KIND)},
        "seed": settings.seed,
        "minutes": context.minutes,
    }
    output = context.output(KIND, made_with, parents)
    if output.is_current():
        return output.path
    start = time.perf_counter()
    # The sample that the budget allows is for all trials together.
    users = context.sample(KIND, config.users)
    if not settings.sets(KIND, "users"):
        users = max(users // (len(trials) + 1), 2 * LEAST_USERS)
    examples = Dataset.load(workspace.dataset).validation().sample(users)
    info: dict[str, Any] = {"chosen": [], "trials": [], "users": len(examples)}
    with output.write(info) as folder:
        if len(examples) >= LEAST_USERS:
            scratch = _make_scratch(workspace, folder)
            info |= _run(replace(context, workspace=scratch), users, trials)
            _keep_ids(context, info["chosen"], scratch)
            shutil.rmtree(scratch.home)
        final = settings.overridden(info["chosen"]).values
        kept = {key: value for key, value in final.items() if key not in ("name", "data", KIND)}
        (folder / FILE).write_text(yaml.safe_dump(kept, sort_keys=False), encoding="utf-8")
        info["seconds"] = round(time.perf_counter() - start, 1)
    _show(info)
    return output.path


def _run(context: Context, users: int, trials: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    """Run trials one after the other until the time is spent; see `stage` for the result."""
    share = context.share(KIND)
    minutes = None if share is None else TRAINED * share / (len(trials) + 1)
    end = math.inf if share is None else time.monotonic() + 60 * share
    passes = math.inf if minutes is None else _passes(context, minutes)
    if passes < LEAST_SHARE * LEAST_EPOCHS:
        return {}
    train = partial(_train, context, users, minutes)
    for _ in range(2):  # again if it was slower than what was measured before
        window_share = min(max(passes / AIMED_EPOCHS, LEAST_SHARE), 1.0)
        sample = [] if window_share == 1 else [f"target.window_share={window_share}"]
        begun = time.monotonic()
        gains, epochs = train(sample)
        if epochs >= LEAST_EPOCHS or minutes is None or window_share == LEAST_SHARE:
            break
        passes = epochs * window_share
    # A trial is begun only if it will end in time, as far as the first one can tell.
    end -= time.monotonic() - begun
    rows = [_row(AS_SET, [], gains)]
    chosen: list[str] = []
    for name, trial in trials.items() if epochs >= LEAST_EPOCHS else ():
        if time.monotonic() > end:
            break
        best, _ = train([*sample, *chosen, *trial])
        rows.append(row := _row(name, trial, best, gains))
        if row["kept"]:
            gains, chosen = best, [*chosen, *trial]
    return {"chosen": chosen, "trials": rows, "window_share": window_share}


def _passes(context: Context, minutes: float) -> float:
    """Passes over the training windows for which there is time, measured by training for less."""
    part = max(MEASURED * minutes, LEAST_MEASURED)
    return minutes / part * _fit(context, None, [f"target.max_minutes={part}"])[1]


def _train(
    context: Context, users: int, minutes: float | None, overrides: Sequence[str]
) -> tuple[NDArray[np.float64], float]:
    """NDCG@10 of each of so many validation users after a short training run, and its epochs."""
    context, epochs = _fit(context, minutes, overrides)
    trained = target.TrainedTarget.load(context.workspace)
    dataset = Dataset.load(context.workspace.dataset)
    model = trained.load_model(trained.device)
    return Validation.of(model, trained.encoder, dataset, users).gains(), epochs


def _fit(context: Context, minutes: float | None, texts: Sequence[str]) -> tuple[Context, float]:
    """Make IDs and target of a trial; its context, and epochs with the part of the last one."""
    # One validation is enough, with the users of all trials.
    settings = replace(context.settings, internals=True)
    settings = settings.overridden(["target.evaluate_every=0", *texts])
    own_limit = (settings.values.get(target.KIND) or {}).get("max_minutes")
    if minutes is not None and own_limit is None:
        settings = settings.overridden([f"target.max_minutes={minutes}"])
    context = replace(context, settings=settings)
    ids.stage(context)
    target.stage(context)
    return context, context.workspace.manifest(target.KIND).info["passes"]


def _row(
    name: str,
    trial: Sequence[str],
    gains: NDArray[np.float64],
    best: NDArray[np.float64] | None = None,
) -> dict[str, Any]:
    """What is known of a trial, next to the best one before."""
    row: dict[str, Any] = {"name": name, "settings": list(trial), "ndcg@10": float(gains.mean())}
    if best is None:
        return row | {"kept": True}
    gap = gains - best
    error = float(gap.std() / len(gap) ** 0.5)
    return row | {
        "gain": float(gap.mean()),
        "error": error,
        "kept": bool(gap.mean() > ERRORS * error),
    }


def _make_scratch(workspace: Workspace, folder: Path) -> Workspace:
    """A workspace in a folder that reads data set and SASRec of another one."""
    scratch = Workspace((folder / "trials").resolve(), workspace.name)
    for kind in ("dataset", sasrec.KIND):
        scratch.path(kind).parent.mkdir(parents=True)
        if workspace.path(kind).is_dir():
            scratch.path(kind).symlink_to(workspace.path(kind).resolve())
    return scratch


def _keep_ids(context: Context, chosen: Sequence[str], scratch: Workspace) -> None:
    """Let the run have the semantic IDs of the last trial, if it would make the same."""
    made, own = replace(context, workspace=scratch).made(ids.KIND), context.workspace.path(ids.KIND)
    config = as_dict(context.settings.overridden(chosen).section(ids.KIND, IdsConfig))
    if made is not None and all(made.config.get(key) == config[key] for key in config):
        shutil.rmtree(own, ignore_errors=True)
        shutil.move(scratch.path(ids.KIND), own)


def _show(info: Mapping[str, Any]) -> None:
    if not info["trials"]:
        few = info["users"] < LEAST_USERS
        why = f"there are fewer than {LEAST_USERS} validation users" if few else "time is too short"
        say(f"recipe: no trials, since {why}")
        return
    title = f"Recipe: trials on {info['users']} validation users"
    if info["window_share"] < 1:
        title += f", trained on {info['window_share']:.1%} of the windows"
    table = Table(title=title, title_justify="left")
    for heading in ("trial", "settings", "NDCG@10", "gain", "kept"):
        table.add_column(heading)
    for row in info["trials"]:
        gain = f"{row['gain']:+.4f} ± {row['error']:.4f}" if "gain" in row else ""
        settings, is_kept = "\n".join(row["settings"]), "yes" if row["kept"] else "no"
        table.add_row(row["name"], settings, f"{row['ndcg@10']:.4f}", gain, is_kept)
    console.print(table)
    if len(info["trials"]) == 1:
        say("recipe: the time for trials was too short for further ones; --minutes gives more")
