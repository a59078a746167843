"""Training of the drafts and their teacher data, in several processes.

Each task is one stage of one variant. A stage whose artifact is up to date returns at once, so an
experiment that was stopped continues where it was.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from recsys.artifacts import read_manifest
from recsys.pipeline import Context
from recsys.progress import say
from recsys.training import draft, teacher
from recsys.training.atspeed.lineup import DraftSpace, Variant, derive_settings

Run = Callable[[Callable[[Any], Any], Sequence[Any]], list[Any]]

R = TypeVar("R")


@contextmanager
def workers(count: int) -> Iterator[Run]:
    """A map over processes of one thread each; with one worker, over this process."""
    if count == 1:
        yield lambda function, tasks: [function(task) for task in tasks]
        return
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(count, spawn, torch.set_num_threads, (1,)) as pool:
        yield lambda function, tasks: list(pool.map(function, tasks))


@dataclass(frozen=True)
class Task:
    """One stage of one variant.

    Attributes:
        kind: `teacher` or `draft`.
        variant: the draft.
        context: settings and workspace of the run.
        minutes: training time of a draft, at most.
    """

    kind: str
    variant: Variant
    context: Context
    minutes: float

    def __call__(self) -> dict[str, Any]:
        """Run the stage and describe its artifact as a plain row."""
        start = time.perf_counter()
        workspace = DraftSpace.seen_by(self.context.workspace, self.variant)
        settings = derive_settings(
            self.context.settings, self.variant, self.minutes, self.context.workspace
        )
        context = Context(settings, workspace, self.context.force)
        if self.kind == "teacher":
            info = read_manifest(teacher.stage(context)).info
            row = {"teacher": self.variant.teacher, **info}
        else:
            path = draft.stage(context)
            info = read_manifest(path).info
            row = {
                "draft": self.variant.key,
                "objective": self.variant.objective,
                "title": self.variant.title,
                "init": self.variant.init,
                "seed": self.variant.seed,
                **{k: info[k] for k in ("parameters", "epochs", "steps", "seconds")},
            }
        seconds = time.perf_counter() - start
        say(f"{self.kind} {row[self.kind]}: {seconds:.0f} s")
        return {**row, "spent": round(seconds, 1)}


def call(task: Callable[[], R]) -> R:
    """Run a task."""
    return task()


def produce(
    variants: Sequence[Variant], context: Context, minutes: float, run: Run
) -> list[dict[str, Any]]:
    """Make all teachers and drafts, in waves: each needs only what an earlier one made.

    Returns:
        A row for each task: its name and size, its time now (`spent`) and, for drafts, its training
        time (`seconds`).
    """
    rows: list[dict[str, Any]] = []
    for wave in range(3):
        tasks = [Task("draft", v, context, minutes) for v in variants if v.wave == wave]
        ahead = _first_of_teacher(v for v in variants if v.wave == wave + 1)
        rows += run(call, [*(Task("teacher", v, context, minutes) for v in ahead), *tasks])
    return rows


def _first_of_teacher(variants: Iterable[Variant]) -> list[Variant]:
    """One variant for each teacher that they need."""
    found: dict[str, Variant] = {}
    for variant in variants:
        found.setdefault(variant.teacher, variant)
    return list(found.values())
