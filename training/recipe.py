"""Stage `recipe`: chooses settings of the semantic IDs and of the target by trials on validation.

The settings of the run are tried first, and then each trial on top of what has been chosen so far.
A trial is a short training run; its settings are kept if NDCG@10 on validation is higher by more
than two standard errors of the paired difference. All trials share the stage's part of the budget.
If that is too short for two passes over the training windows, as far as the speed of this machine
tells, all trials train on a sample of them; for less than a small sample there are no trials.
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
from recsys.training.settings import IdsConfig, RecipeConfig, TargetConfig
from recsys.training.validation import Validation

KIND = RECIPE
FILE = "recipe.yaml"
ERRORS = 2.0  # standard errors that a gain must exceed; short runs and several trials add noise
LEAST_USERS = 50  # of validation; differences of fewer are noise
LEAST_EPOCHS = 2  # of a trial; differences after less are noise, too
LEAST_SHARE = 1 / 16  # of the training windows; trials on fewer show nothing
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
        if not any(text.partition("=")[0] in settings.given for text in trial)
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
    window_share = 1.0 if minutes is None else min(_passes(context, minutes) / LEAST_EPOCHS, 1.0)
    if window_share < LEAST_SHARE:
        return {}
    sample = [] if window_share == 1 else [f"target.window_share={window_share}"]
    train = partial(_train, context, users, minutes)
    begun = time.monotonic()
    gains, epochs = train(sample)
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
    """Passes over the training windows for which a target has time on this machine."""
    stats = Dataset.manifest(context.workspace.dataset).info["stats"]
    sizes = ids.level_sizes(context.settings.section(ids.KIND, IdsConfig), stats["items"])
    rate = target.tokens_per_second(context.settings.section(target.KIND, TargetConfig), sizes)
    return float(60 * minutes * rate / (stats["interactions"] * len(sizes)))


def _train(
    context: Context, users: int, minutes: float | None, overrides: Sequence[str]
) -> tuple[NDArray[np.float64], int]:
    """NDCG@10 of each of so many validation users after a short training run, and its epochs."""
    # One validation is enough, with the users of all trials.
    settings = replace(context.settings, internals=True).overridden(
        ["target.evaluate_every=0", *overrides]
    )
    own_limit = (settings.values.get(target.KIND) or {}).get("max_minutes")
    if minutes is not None and own_limit is None:
        settings = settings.overridden([f"target.max_minutes={minutes}"])
    context = replace(context, settings=settings)
    ids.stage(context)
    target.stage(context)
    trained = target.TrainedTarget.load(context.workspace)
    dataset = Dataset.load(context.workspace.dataset)
    model = trained.load_model(trained.device)
    epochs = context.workspace.manifest(target.KIND).info["epochs"]
    return Validation.of(model, trained.encoder, dataset, users).gains(), epochs


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
