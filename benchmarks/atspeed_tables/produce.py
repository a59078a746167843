"""Training of the drafts and their teacher data.

Each task is one stage of one variant. A stage whose artifact is up to date returns at once, so an
experiment that was stopped continues where it was.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from atspeed_tables.lineup import DraftSpace, Variant, derive_settings
from recsys.artifacts import read_manifest
from recsys.pipeline import Context
from recsys.progress import say
from recsys.training import draft, teacher


def run_stage(kind: str, variant: Variant, context: Context, steps: int) -> dict[str, Any]:
    """Run a stage of one variant and describe its artifact as a plain row.

    Args:
        kind: `teacher` or `draft`.
        variant: the draft.
        context: settings and workspace of the run.
        steps: of the training of drafts.
    """
    workspace = DraftSpace.seen_by(context.workspace, variant)
    settings = derive_settings(context.settings, variant, steps, context.workspace)
    own = Context(settings, workspace, context.force)
    if kind == "teacher":
        row = {"teacher": variant.teacher, **read_manifest(teacher.stage(own)).info}
    else:
        info = read_manifest(draft.stage(own)).info
        row = {
            "draft": variant.key,
            "objective": variant.objective,
            "title": variant.title,
            "seed": variant.seed,
            **{k: info[k] for k in ("parameters", "epochs", "steps", "seconds")},
        }
    say(f"{kind} {row[kind]}")
    return row


def produce(variants: Sequence[Variant], context: Context, steps: int) -> list[dict[str, Any]]:
    """Make all teachers and drafts, in waves: each needs only what an earlier one made.

    Returns:
        A row for each task: its name and size, and for drafts the training time.
    """
    rows: list[dict[str, Any]] = []
    for wave in range(3):
        teachers = {v.teacher: v for v in variants if v.wave == wave + 1}
        stages = [("teacher", v) for v in teachers.values()]
        stages += [("draft", v) for v in variants if v.wave == wave]
        rows += [run_stage(kind, v, context, steps) for kind, v in stages]
    return rows
