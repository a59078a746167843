"""One experiment: target, drafts, accepted levels, times, accuracy; a document of plain rows.

Only this evaluates test users. Training and its choices see the other splits only.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import NamedTuple

import torch
from measuring import Row

from atspeed_tables import paper
from atspeed_tables.lineup import (
    ABLATIONS,
    OBJECTIVES,
    PRINTED,
    RELAXED,
    STRICT,
    DraftSpace,
    Variant,
    derive_settings,
    list_variants,
)
from atspeed_tables.measure import (
    Lists,
    Question,
    Sample,
    answer_question,
    compare_accepted,
    compare_accuracy,
    describe,
    load_draft,
    load_scene,
    measure_lists,
    measure_walltimes,
)
from recsys.artifacts import Workspace, read_manifest
from recsys.pipeline import Context
from recsys.pipeline import run as run_stages
from recsys.progress import say
from recsys.training import draft

PARTS = ("table", "ablations", "recall")
VERIFICATIONS = {"strict": STRICT, "relaxed": RELAXED}
COUNTED = (*VERIFICATIONS, "released")  # in the table of accepted levels
TEMPERATURES = (0.5, 1.0)  # of the samples in table 2


@dataclass(frozen=True)
class Options:
    """What is run.

    Attributes:
        config: YAML file of settings.
        parts: of the experiment.
        seeds: drafts of each kind, one a seed.
        steps: of the training of each draft.
        users: test users whose accepted levels are counted.
        timed: test users whose requests are timed.
        recall_users: test users whose recommendations are measured.
        ks: K of the table and the ablations.
        drafts: N.
        recall_ks: K of the recommendations.
    """

    config: Path | None = None
    parts: list[str] = field(default_factory=lambda: [*PARTS], metadata={"choices": PARTS})
    seeds: int = 1
    steps: int = 1000
    users: int = 200
    timed: int = 20
    recall_users: int = 1000
    ks: list[int] = field(default_factory=lambda: [*paper.KS])
    drafts: int = paper.DRAFTS
    recall_ks: list[int] = field(default_factory=lambda: [5, 10])


class Cell(NamedTuple):
    """One figure of accepted levels: of a draft with the first seed, used in one way."""

    part: str
    variant: Variant
    question: Question


def experiment(context: Context, options: Options) -> Row:
    """Run all of it.

    Data, IDs and target of the run are made first where they are missing.

    Returns:
        `drafts`, `target` and a list of rows for each part that was run.
    """
    run_stages(context, ("data", "ids", "target"))
    torch.set_num_threads(1)
    base, parts = context.workspace, options.parts
    cells = [cell for cell in list_cells(options) if cell.part in parts]
    info = read_manifest(base.run("target"), "target").info
    document: Row = {"run": base.name}
    document["target"] = {k: info[k] for k in ("parameters", "epochs", "seconds", "validation")}
    variants = list_variants(parts)
    drafts = [variant.of(seed) for seed in range(options.seeds) for variant in variants]
    # Those of a mixture come last: they need the SFT draft of their seed.
    drafts.sort(key=lambda variant: variant.objective == PRINTED)
    document["drafts"] = [_train(variant, context, options.steps) for variant in drafts]
    if "recall" in parts:
        document["recall"] = _recall(base, options)
    for cell in cells:
        document.setdefault(cell.part, []).append(_row(cell, base, options))
    if "table" in parts:
        plain = [v for v in variants if not v.change]
        models = {v.objective: load_draft(DraftSpace.seen_by(base, v)) for v in plain}
        questions = [Question(k, v, options.drafts) for v, k in product(VERIFICATIONS, options.ks)]
        scene = load_scene(base, options.users)
        document["speed"] = measure_walltimes(scene, models, questions, options.timed)
    return document


def _train(variant: Variant, context: Context, steps: int) -> Row:
    """Make a draft, and its teacher data, where they are missing; the draft's size and time."""
    workspace = DraftSpace.seen_by(context.workspace, variant)
    settings = derive_settings(context.settings, variant, steps, context.workspace)
    info = read_manifest(draft.train(Context(settings, workspace, context.force))).info
    say(f"draft {variant.key}")
    return {
        "draft": variant.key,
        **{name: getattr(variant, name) for name in ("objective", "title", "seed")},
        **{name: info[name] for name in ("parameters", "epochs", "steps", "seconds")},
    }


def list_cells(options: Options) -> Iterator[Cell]:
    """Cells of all parts."""
    n = options.drafts
    for objective, verification, k in product(OBJECTIVES, COUNTED, options.ks):
        yield Cell("table", Variant(objective), Question(k, verification, n))
    for (verification, objective), k in product(VERIFICATIONS.items(), options.ks):
        question = Question(k, verification, n)
        yield Cell("ablations", Variant(objective), question)
        for change, ablation in ABLATIONS[objective].items():
            ablated = Variant(objective, 0, change, {"ablations": [ablation]})
            yield Cell("ablations", ablated, question)


def _row(cell: Cell, base: Workspace, options: Options) -> Row:
    """The row of a cell, over all seeds."""

    def samples(variant: Variant) -> list[Sample]:
        spaces = [DraftSpace.seen_by(base, variant.of(seed)) for seed in range(options.seeds)]
        return [answer_question(base, space, cell.question, options.users) for space in spaces]

    own = samples(cell.variant)
    names = ("objective", "change", "title")
    row = {name: getattr(cell.variant, name) for name in names} | describe(own)
    if not cell.variant.change:
        return row
    return {**row, "gain": compare_accepted(own, samples(Variant(cell.variant.objective)))}


def _recall(base: Workspace, options: Options) -> list[Row]:
    """Accuracy of the target, searched and sampled, and of strict and relaxed verification."""
    strict, relaxed = (DraftSpace.seen_by(base, Variant(name)) for name in VERIFICATIONS.values())
    lists: list[Lists] = []
    for k in options.recall_ks:
        question = Question(k, "strict", options.drafts)
        lists += [Lists("target", question), Lists(STRICT, question, strict)]
        for heat in TEMPERATURES:
            question = Question(k, "relaxed", options.drafts, temperature=heat)
            lists += [Lists("target", question), Lists(RELAXED, question, relaxed)]
    answers = [measure_lists(base, kind, options.recall_users) for kind in lists]
    return compare_accuracy(lists, answers)
