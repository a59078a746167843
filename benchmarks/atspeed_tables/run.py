"""One experiment: target, drafts, accepted levels, times, accuracy; a document of plain rows.

Only this evaluates test users. Training and its choices see the other splits only.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import product
from typing import Any

import torch

from atspeed_tables import paper
from atspeed_tables.lineup import (
    ALPHAS,
    OBJECTIVES,
    PRINTED,
    RELAXED,
    STRICT,
    Budget,
    DraftSpace,
    Init,
    Limits,
    Variant,
    list_ablations,
    list_plain,
    list_variants,
    list_weights,
)
from atspeed_tables.measure import (
    Lists,
    Question,
    Sample,
    answer_question,
    compare_accepted,
    compare_accuracy,
    describe,
    device,
    load_draft,
    load_scene,
    measure_lists,
)
from atspeed_tables.produce import Run, produce, workers
from atspeed_tables.speed import measure_walltimes, time_tree_attention
from recsys.artifacts import Workspace, read_manifest
from recsys.errors import ConfigError
from recsys.pipeline import Context
from recsys.pipeline import run as run_stages
from recsys.progress import track
from recsys.training.target import TrainedTarget

Row = dict[str, Any]
Samples = dict[tuple[str, Question], Sample]

PARTS = ("table", "ablations", "effects", "recall")
VERIFICATIONS = {"strict": STRICT, "relaxed": RELAXED}
COUNTED = (*VERIFICATIONS, "released")  # in the table of accepted levels
TEMPERATURES = (0.5, 1.0)  # of the samples in table 2


@dataclass(frozen=True)
class Options:
    """What is run.

    Attributes:
        parts: of `PARTS`.
        objectives: of `OBJECTIVES`; drafts of others are left out.
        inits: starting points of drafts; studies use the first.
        seeds: of the drafts.
        budgets: what drafts that are compared have in common, for the table and the ablations; the
            rest uses the first.
        minutes: training time of one draft, at most, in equal time.
        steps: of one draft in equal steps.
        workers: processes that train and measure side by side.
        stop_after: minutes after which no further draft and no further figure is begun.
        users: test users whose accepted levels are counted.
        timed: test users whose requests are timed.
        recall_users: test users whose recommendations are measured.
        ks: K of the table and the ablations.
        drafts: N.
        studied: K of the effects.
        widths: N whose effect is shown.
        recall_ks: K of the recommendations.
    """

    parts: tuple[str, ...] = PARTS
    objectives: tuple[str, ...] = OBJECTIVES
    inits: tuple[Init, ...] = ("scratch", "target")
    seeds: tuple[int, ...] = (0,)
    budgets: tuple[Budget, ...] = ("time", "steps")
    minutes: float = 1.0
    steps: int = 1000
    workers: int = 2
    stop_after: float = math.inf
    users: int = 200
    timed: int = 20
    recall_users: int = 1000
    ks: tuple[int, ...] = paper.KS
    drafts: int = paper.DRAFTS
    studied: tuple[int, ...] = (5, 10, 20)
    widths: tuple[int, ...] = (10, 20, 40, 60, 80)
    recall_ks: tuple[int, ...] = (5, 10)

    def __post_init__(self) -> None:
        if not self.minutes > 0:
            raise ConfigError(f"minutes: expected more than 0, got {self.minutes}")
        needed = {PRINTED: {"sft"}} if PRINTED in self.objectives else {}
        if "recall" in self.parts:
            needed["recall"] = {STRICT, RELAXED}
        for name, others in needed.items():
            if missing := sorted(others.difference(self.objectives)):
                raise ConfigError(
                    f"objectives: {name} needs the draft of {missing[0]}; add it, or leave {name} "
                    f"out of the {'parts' if name == 'recall' else 'objectives'}"
                )


@dataclass(frozen=True)
class Cell:
    """One figure of accepted levels.

    Attributes:
        part: of the experiment.
        variant: the draft, with the first seed.
        question: how it is used.
        against: the draft that its figure is compared with, or None.
        about: further columns of its row.
    """

    part: str
    variant: Variant
    question: Question
    against: Variant | None = None
    about: Row = field(default_factory=dict)

    def asked_of(self, seed: int) -> set[tuple[str, Question]]:
        """The samples that its row needs of one seed's drafts: names of drafts, and questions."""
        variants = [v for v in (self.variant, self.against) if v is not None]
        return {(variant.of(seed).key, self.question) for variant in variants}


def experiment(context: Context, options: Options) -> Row:
    """Run all of it.

    Args:
        context: of a run. Data, IDs and target are made first where they are missing.
        options: what is run.

    Drafts and figures stay in the run's folder as they end, seed by seed, and are not made again.
    After `stop_after` minutes the document has the rows of the seeds that are complete, or those
    that the first seed has so far; the parts that time the drafts are left out.

    Returns:
        `drafts`, `teachers`, `target`, `seeds` (those of the rows) and a list of rows for each part
        that was run.
    """
    seconds: dict[str, float] = {}
    deadline = time.time() + 60 * options.stop_after
    with _clock(seconds, "data, ids, target"):
        run_stages(context, ("data", "ids", "target"))
    torch.set_num_threads(1)
    base, parts = context.workspace, options.parts
    cells = [
        cell
        for cell in list_cells(options)
        if cell.part in parts and cell.variant.objective in options.objectives
    ]
    limits = Limits(options.minutes, options.steps)
    made: list[Row] = []
    samples: Samples = {}
    document: Row = {"run": base.name, "options": asdict(options)}
    if math.isinf(options.stop_after):
        document["options"]["stop_after"] = None  # JSON has no infinity
    with workers(options.workers, deadline) as run:
        for seed in options.seeds:
            with _clock(seconds, "drafts"):
                variants = list_variants(parts, options.inits, [seed], options.budgets)
                variants = [v for v in variants if v.objective in options.objectives]
                made += produce(variants, context, limits, run)
            with _clock(seconds, "acceptance"):
                samples |= _ask(cells, seed, base, options, run)
        in_time = time.time() < deadline
        if "recall" in parts and in_time:
            with _clock(seconds, "recall"):
                document |= _recall(base, options, run)
    complete = [
        s for s in options.seeds if all(cell.asked_of(s) <= samples.keys() for cell in cells)
    ]
    document["seeds"] = seeds = complete or list(options.seeds[:1])
    known = [cell for cell in cells if cell.asked_of(seeds[0]) <= samples.keys()]
    info = read_manifest(base.run("target"), "target").info
    everyone = list_plain(options.inits, options.seeds[:1], options.budgets[:1])
    first = [v for v in everyone if v.objective in options.objectives]
    document |= {
        "teachers": [row for row in made if "teacher" in row],
        "drafts": [row for row in made if "draft" in row],
        "target": {k: info[k] for k in ("parameters", "epochs", "seconds", "validation")},
    }
    for part in dict.fromkeys(cell.part for cell in known):
        document[part] = [_row(cell, samples, seeds) for cell in known if cell.part == part]
    if "table" in document:
        table = [cell for cell in known if cell.part == "table"]
        document["orders"] = list_orders(table, samples, seeds)
    if "table" in parts and in_time:
        questions = [Question(k, v, options.drafts) for v, k in product(VERIFICATIONS, options.ks)]
        with _clock(seconds, "walltime"):
            document["speed"] = _time(base, options, first, questions)
    plain = [v for v in first if (v.objective, v.init) == (STRICT, options.inits[0])]
    if "effects" in parts and in_time and plain:
        of_sizes = [
            cell.question
            for cell in known
            if cell.about.get("effect") in ("N", "gamma") and cell.question.verification == "strict"
        ]
        with _clock(seconds, "walltime of effects"):
            document["effect_speed"] = _time(base, options, plain, of_sizes)
    if "ablations" in parts and in_time:
        with _clock(seconds, "tree attention"):
            document["tree_attention"] = time_tree_attention(
                TrainedTarget.load(base).load_model(device()),
                load_draft(DraftSpace.seen_by(base, first[0])),
                load_scene(base, options.users),
                options.widths,
                rounds=options.timed,
            )
    return {**document, "seconds": {k: round(v, 1) for k, v in seconds.items()}}


@contextmanager
def _clock(seconds: dict[str, float], name: str) -> Iterator[None]:
    start = time.perf_counter()
    yield
    seconds[name] = seconds.get(name, 0.0) + time.perf_counter() - start


def list_cells(options: Options) -> Iterator[Cell]:
    """Cells of all parts. Ablations and effects use the first starting point."""
    init, n, budget = options.inits[0], options.drafts, options.budgets[0]
    for variant in list_plain(options.inits, [0], options.budgets):
        for verification, k in product(COUNTED, options.ks):
            yield Cell("table", variant, Question(k, verification, n))
    for own, (verification, objective) in product(options.budgets, VERIFICATIONS.items()):
        whole = Variant(objective, init, budget=own)
        ablated = [v for v in list_ablations(init, [0], [own]) if v.objective == objective]
        for k in options.ks:
            question = Question(k, verification, n)
            yield Cell("ablations", whole, question)
            for variant in ablated:
                yield Cell("ablations", variant, question, whole)
    for k in options.studied:
        for verification, objective in VERIFICATIONS.items():
            for width in options.widths:
                if verification == "strict" or width >= k:
                    question = Question(k, verification, width)
                    plain = Variant(objective, init, budget=budget)
                    yield Cell("effects", plain, question, None, {"effect": "N"})
        for depth in (1, 2, 3):
            question = Question(k, "strict", n, depth)
            plain = Variant(STRICT, init, budget=budget)
            yield Cell("effects", plain, question, None, {"effect": "gamma"})
        for verification, objective in VERIFICATIONS.items():
            plain = Variant(objective, init, budget=budget)
            by_alpha = {0.0: Variant("sft", init, budget=budget), 0.5: plain}
            weights = [v for v in list_weights(init, [0], budget) if v.objective == objective]
            by_alpha |= dict(zip(ALPHAS, weights, strict=True))
            for alpha, variant in sorted(by_alpha.items()):
                about = {"effect": "alpha", "alpha": alpha}
                yield Cell("effects", variant, Question(k, verification, n), None, about)


def _ask(cells: Sequence[Cell], seed: int, base: Workspace, options: Options, run: Run) -> Samples:
    """Samples that the cells need of one seed's drafts, as far as they were begun in time."""
    wanted = list(dict.fromkeys((cell.variant.of(seed).key, cell.question) for cell in cells))
    spaces = {
        variant.key: DraftSpace.seen_by(base, variant)
        for variant in (cell.variant.of(seed) for cell in cells)
    }
    tasks = [
        partial(answer_question, base, spaces[key], question, options.users)
        for key, question in wanted
    ]
    return {which: s for which, s in zip(wanted, run(tasks), strict=True) if s is not None}


def _samples_of(
    variant: Variant, question: Question, samples: Samples, seeds: Sequence[int]
) -> list[Sample]:
    return [samples[variant.of(seed).key, question] for seed in seeds]


def list_orders(cells: Sequence[Cell], samples: Samples, seeds: Sequence[int]) -> list[Row]:
    """For each way of asking: the drafts by accepted levels, each compared with the next one."""
    groups: dict[tuple[Init, Budget, Question], dict[str, list[Sample]]] = {}
    for cell in cells:
        about = cell.variant.init, cell.variant.budget, cell.question
        own = _samples_of(cell.variant, cell.question, samples, seeds)
        groups.setdefault(about, {})[cell.variant.title] = own
    rows = []
    for (init, budget, question), drafts in groups.items():
        mean = {title: describe(own)["accepted"] for title, own in drafts.items()}
        ranked = sorted(drafts, key=lambda title: -mean[title]["mean"])
        for title, lower in zip(ranked, [*ranked[1:], None], strict=True):
            lead = None if lower is None else compare_accepted(drafts[title], drafts[lower])
            row = {"title": title, "accepted": mean[title], "lead": lead}
            rows.append({"init": init, "budget": budget, **question.row, **row})
    return rows


def _row(cell: Cell, samples: Samples, seeds: Sequence[int]) -> Row:
    def of(variant: Variant) -> list[Sample]:
        return _samples_of(variant, cell.question, samples, seeds)

    variant, own = cell.variant, of(cell.variant)
    row = {
        "objective": variant.objective,
        "init": variant.init,
        "budget": variant.budget,
        "change": variant.change,
        "title": variant.title,
        **cell.about,
        **describe(own),
    }
    return row if cell.against is None else {**row, "gain": compare_accepted(own, of(cell.against))}


def _time(
    base: Workspace, options: Options, drafts: Sequence[Variant], questions: Sequence[Question]
) -> list[Row]:
    with track("walltime", len(questions)) as bar:
        rows = measure_walltimes(
            load_scene(base, options.users),
            {v.key: load_draft(DraftSpace.seen_by(base, v)) for v in drafts},
            questions,
            rounds=options.timed,
            advance=bar.advance,
        )
    variants = {v.key: v for v in drafts}
    return [
        {"objective": v.objective, "init": v.init, "budget": v.budget, "title": v.title, **row}
        for row in rows
        for v in [variants[row["draft"]]]
    ]


def _recall(base: Workspace, options: Options, run: Run) -> Row:
    """Accuracy of the target, searched and sampled, and of strict and relaxed verification.

    Empty if the time ended in between.
    """
    spaces = {
        name: DraftSpace.seen_by(
            base, Variant(name, options.inits[0], options.seeds[0], budget=options.budgets[0])
        )
        for name in VERIFICATIONS.values()
    }
    lists: list[Lists] = []
    for k in options.recall_ks:
        lists.append(Lists("target", Question(k, "none")))
        question = Question(k, "strict", options.drafts)
        lists.append(Lists(STRICT, question, against=len(lists) - 1, draft=spaces[STRICT]))
        for heat in TEMPERATURES:
            lists.append(Lists("target", Question(k, "none", temperature=heat), sampled=True))
            question = Question(k, "relaxed", options.drafts, temperature=heat)
            against = len(lists) - 1
            lists.append(Lists(RELAXED, question, True, against=against, draft=spaces[RELAXED]))
    tasks = [partial(measure_lists, base, kind, options.recall_users) for kind in lists]
    answers = run(tasks)
    return {} if None in answers else {"recall": compare_accuracy(lists, answers)}
