"""One experiment: target, drafts, accepted levels, times, accuracy; a document of plain rows.

Only this evaluates test users. Training and its choices see the other splits only.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path

import torch
from measuring import Row

from atspeed_tables import paper
from atspeed_tables.lineup import (
    ABLATIONS,
    OBJECTIVES,
    RELAXED,
    STRICT,
    DraftSpace,
    Variant,
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
)
from atspeed_tables.produce import produce
from atspeed_tables.speed import measure_walltimes
from recsys.artifacts import Workspace, read_manifest
from recsys.pipeline import Context
from recsys.pipeline import run as run_stages

PARTS = ("table", "ablations", "recall")
VERIFICATIONS = {"strict": STRICT, "relaxed": RELAXED}
COUNTED = (*VERIFICATIONS, "released")  # in the table of accepted levels
TEMPERATURES = (0.5, 1.0)  # of the samples in table 2


@dataclass(frozen=True)
class Options:
    """What is run.

    Attributes:
        config: YAML file of settings.
        settings: overrides of it, as section.key=value.
        name: of the run; names its folders under $RECSYS_HOME (var/).
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

    config: Path | None = field(default=None, metadata={"type": Path})
    settings: tuple[str, ...] = field(default=(), metadata={"type": str})
    name: str = ""
    parts: tuple[str, ...] = field(default=PARTS, metadata={"choices": PARTS})
    seeds: int = 1
    steps: int = 1000
    users: int = 200
    timed: int = 20
    recall_users: int = 1000
    ks: tuple[int, ...] = paper.KS
    drafts: int = paper.DRAFTS
    recall_ks: tuple[int, ...] = (5, 10)


@dataclass(frozen=True)
class Cell:
    """One figure of accepted levels.

    Attributes:
        part: of the experiment.
        variant: the draft, with the first seed.
        question: how it is used.
        against: the draft that its figure is compared with, or None.
    """

    part: str
    variant: Variant
    question: Question
    against: Variant | None = None


def experiment(context: Context, options: Options) -> Row:
    """Run all of it.

    Args:
        context: of a run. Data, IDs and target are made first where they are missing.
        options: what is run.

    Returns:
        `drafts`, `teachers`, `target` and a list of rows for each part that was run.
    """
    run_stages(context, ("data", "ids", "target"))
    torch.set_num_threads(1)
    base, parts = context.workspace, options.parts
    cells = [cell for cell in list_cells(options) if cell.part in parts]
    made: list[Row] = []
    info = read_manifest(base.run("target"), "target").info
    document: Row = {"run": base.name}
    document["target"] = {k: info[k] for k in ("parameters", "epochs", "seconds", "validation")}
    variants = list_variants(parts)
    for seed in range(options.seeds):
        made += produce([variant.of(seed) for variant in variants], context, options.steps)
    if "recall" in parts:
        document["recall"] = _recall(base, options)
    document["teachers"] = [row for row in made if "teacher" in row]
    document["drafts"] = [row for row in made if "draft" in row]
    for cell in cells:
        document.setdefault(cell.part, []).append(_row(cell, base, options))
    if "table" in parts:
        plain = [v for v in variants if not v.change]
        models = {v.objective: load_draft(DraftSpace.seen_by(base, v)) for v in plain}
        questions = [Question(k, v, options.drafts) for v, k in product(VERIFICATIONS, options.ks)]
        scene = load_scene(base, options.users)
        document["speed"] = measure_walltimes(scene, models, questions, options.timed)
    return document


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
            yield Cell("ablations", ablated, question, Variant(objective))


def _row(cell: Cell, base: Workspace, options: Options) -> Row:
    """The row of a cell, over all seeds."""

    def samples(variant: Variant) -> list[Sample]:
        spaces = [DraftSpace.seen_by(base, variant.of(seed)) for seed in range(options.seeds)]
        return [answer_question(base, space, cell.question, options.users) for space in spaces]

    own = samples(cell.variant)
    names = ("objective", "change", "title")
    row = {name: getattr(cell.variant, name) for name in names} | describe(own)
    if cell.against is None:
        return row
    return {**row, "gain": compare_accepted(own, samples(cell.against))}


def _recall(base: Workspace, options: Options) -> list[Row]:
    """Accuracy of the target, searched and sampled, and of strict and relaxed verification."""
    strict, relaxed = (DraftSpace.seen_by(base, Variant(name)) for name in VERIFICATIONS.values())
    lists: list[Lists] = []
    for k in options.recall_ks:
        lists.append(Lists("target", Question(k, "none")))
        question = Question(k, "strict", options.drafts)
        lists.append(Lists(STRICT, question, draft=strict))
        for heat in TEMPERATURES:
            lists.append(Lists("target", Question(k, "none", temperature=heat), sampled=True))
            question = Question(k, "relaxed", options.drafts, temperature=heat)
            lists.append(Lists(RELAXED, question, True, draft=relaxed))
    answers = [measure_lists(base, kind, options.recall_users) for kind in lists]
    return compare_accuracy(lists, answers)
