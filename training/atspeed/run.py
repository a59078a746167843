"""One experiment: target, drafts, questions, clocks; a document of plain rows at the end.

Test users are asked here and nowhere before: training and its choices see the other splits only.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from itertools import product
from typing import Any

import torch

from recsys.artifacts import read_manifest
from recsys.pipeline import Context
from recsys.pipeline import run as run_stages
from recsys.progress import track
from recsys.training.atspeed import paper
from recsys.training.atspeed.lineup import (
    ABLATIONS,
    ALPHAS,
    OURS,
    PUBLISHED,
    RELAXED,
    STRICT,
    Budget,
    DraftSpace,
    Init,
    Variant,
    ablations,
    lineup,
    plain,
    strengths,
)
from recsys.training.atspeed.measure import (
    Asking,
    Lists,
    Question,
    Recommending,
    Sample,
    accuracy,
    costs,
    describe,
    device,
    difference,
    load_draft,
    scene_of,
)
from recsys.training.atspeed.produce import Run, call, produce, workers
from recsys.training.atspeed.speed import walltimes
from recsys.training.target import load_trained

Row = dict[str, Any]

SCHEMA = 1
PARTS = ("table", "ablations", "effects", "nodes", "recall")
VERIFICATIONS = {"strict": STRICT, "relaxed": RELAXED}
SAMPLED = (0.5, 1.0)  # temperatures of table 2


@dataclass(frozen=True)
class Options:
    """What is run.

    Attributes:
        parts: of `PARTS`.
        inits: where drafts start; studies look at the first.
        seeds: of the drafts.
        budget: of one draft's training.
        workers: processes that train and ask side by side.
        users: test users whose requests are counted.
        node_users: the same of trees that know the trie, which take longest.
        timed: of them, whose requests are timed.
        hf_timed: of them, whose requests Hugging Face is given.
        recall_users: test users whose recommendations are measured.
        ks: K of the table and the ablations.
        drafts: N.
        studied: K of the effects.
        widths: N whose effect is shown.
        node_ks: K of the passes by nodes.
        nodes: of trees that know the trie.
        recall_ks: K of accuracy.
    """

    parts: tuple[str, ...] = PARTS
    inits: tuple[Init, ...] = ("scratch", "target")
    seeds: tuple[int, ...] = (0,)
    budget: Budget = field(default_factory=Budget)
    workers: int = 2
    users: int = 200
    node_users: int = 100
    timed: int = 20
    hf_timed: int = 4
    recall_users: int = 1000
    ks: tuple[int, ...] = paper.KS
    drafts: int = paper.DRAFTS
    studied: tuple[int, ...] = (5, 10, 20)
    widths: tuple[int, ...] = (10, 20, 40, 60, 80)
    node_ks: tuple[int, ...] = (5, 10, 20, 50)
    nodes: tuple[int, ...] = (128, 256, 400)
    recall_ks: tuple[int, ...] = (5, 10)


class _Answers:
    """Samples by variant and question; the questions are gathered first, then asked at once."""

    def __init__(self, context: Context) -> None:
        self._workspace = context.workspace
        self._wanted: dict[tuple[str, int], tuple[Variant | None, dict[Question, None]]] = {}
        self._found: dict[tuple[str, Question], Sample] = {}

    def want(
        self, variants: Sequence[Variant | None], questions: Sequence[Question], users: int
    ) -> None:
        """Questions to put to each variant for so many users; None is no draft at all."""
        for variant in variants:
            entry = self._wanted.setdefault((_key(variant), users), (variant, {}))
            entry[1].update(dict.fromkeys(questions))

    def ask(self, run: Run) -> None:
        """Put them, the longest tasks first."""
        tasks = [
            Asking(
                variant,
                self._workspace,
                None if variant is None else DraftSpace.seen_by(self._workspace, variant),
                tuple(questions),
                users,
            )
            for (_, users), (variant, questions) in self._wanted.items()
        ]
        tasks.sort(key=lambda task: -len(task.questions) * task.users)
        for task, samples in zip(tasks, run(call, tasks), strict=True):
            for sample in samples:
                self._found[_key(task.variant), sample.question] = sample

    def of(self, variants: Sequence[Variant | None], question: Question) -> list[Sample]:
        """Samples of drafts that differ in their seeds alone."""
        return [self._found[_key(variant), question] for variant in variants]


def _key(variant: Variant | None) -> str:
    return "" if variant is None else variant.key


def experiment(context: Context, options: Options) -> dict[str, Any]:
    """Run all of it.

    Args:
        context: of a run with data, IDs and target, made first where they are not there.
        options: what to run.

    Returns:
        A document: `drafts`, and a list of rows for each part that was run.
    """
    seconds: dict[str, float] = {}
    with _clock(seconds, "data, ids, target"):
        run_stages(context, ("data", "ids", "target"))
    torch.set_num_threads(1)
    parts, base = options.parts, context.workspace
    study = _Study(context, options)
    document: dict[str, Any] = {
        "benchmark": "atspeed", "schema": SCHEMA, "run": base.name, "options": asdict(options),
    }  # fmt: skip
    with workers(options.workers) as run:
        with _clock(seconds, "drafts"):
            variants = lineup(parts, options.inits, options.seeds)
            made = produce(variants, context, options.budget, run)
        with _clock(seconds, "acceptance"):
            study.gather()
            study.answers.ask(run)
        if "recall" in parts:
            with _clock(seconds, "recall"):
                document["recall"] = _recall(context, options, run)
    document["teachers"] = [row for row in made if "teacher" in row]
    document["drafts"] = [row for row in made if "draft" in row]
    document["target"] = _target(context)
    first = {v.key: DraftSpace.seen_by(base, v) for v in plain(options.inits, options.seeds[:1])}
    document["costs"] = costs(base, first)
    document |= study.rows()
    if "table" in parts:
        with _clock(seconds, "walltime"):
            document["speed"] = _speed(context, options, first)
    return {**document, "seconds": {k: round(v, 1) for k, v in seconds.items()}}


@contextmanager
def _clock(seconds: dict[str, float], name: str) -> Iterator[None]:
    start = time.perf_counter()
    yield
    seconds[name] = time.perf_counter() - start


def _target(context: Context) -> Row:
    info = read_manifest(context.workspace.run("target"), "target").info
    return {k: info[k] for k in ("parameters", "epochs", "seconds", "validation")}


class _Study:
    """Who is asked what in which part, and the rows that come of it."""

    def __init__(self, context: Context, options: Options) -> None:
        self.options, self.answers = options, _Answers(context)
        self.init = options.inits[0]

    def _seeds(self, variant: Variant) -> list[Variant]:
        return [
            Variant(variant.objective, variant.init, seed, variant.change, variant.options)
            for seed in self.options.seeds
        ]

    def _table(self) -> list[Question]:
        o = self.options
        return [Question(k, v, o.drafts) for v in VERIFICATIONS for k in o.ks]

    def _effects(self) -> dict[tuple[str, str], list[Question]]:
        """Questions of the effects of N and gamma by (effect, objective)."""
        o = self.options
        levels = range(1, 4)
        return {
            ("N", STRICT): [Question(k, "strict", n) for k in o.studied for n in o.widths],
            ("N", RELAXED): [
                Question(k, "relaxed", n) for k in o.studied for n in o.widths if n >= k
            ],
            ("gamma", STRICT): [
                Question(k, "strict", o.drafts, depth) for k in o.studied for depth in levels
            ],
        }

    def _of_nodes(self) -> list[Question]:
        o = self.options
        return [Question(k, drafts=None, nodes=n) for k in o.node_ks for n in o.nodes]

    def gather(self) -> None:
        """Ask for all that `rows` will show."""
        o, want = self.options, self.answers.want
        everyone = plain(o.inits, o.seeds)
        here = plain([self.init], o.seeds)
        if "table" in o.parts:
            want(everyone, self._table(), o.users)
        if "ablations" in o.parts:
            for verification, objective in VERIFICATIONS.items():
                questions = [Question(k, verification, o.drafts) for k in o.ks]
                several = [*here, *ablations(self.init, o.seeds)]
                want([v for v in several if v.objective == objective], questions, o.users)
        if "effects" in o.parts:
            for (_, objective), questions in self._effects().items():
                want([v for v in here if v.objective == objective], questions, o.users)
            questions = [Question(k, "strict", o.drafts) for k in o.studied]
            alike = [v for v in here if v.objective in (STRICT, "sft")]
            want([*alike, *strengths(self.init, o.seeds)], questions, o.users)
        if "nodes" in o.parts:
            want(everyone, self._of_nodes(), o.node_users)
            want([None], [Question(k, drafts=None, nodes=0) for k in o.node_ks], o.node_users)

    def rows(self) -> dict[str, list[Row]]:
        """Rows by part."""
        parts = {
            "table": lambda: {"table": self._table_rows(), "rivals": self._rival_rows()},
            "ablations": lambda: {"ablations": self._ablation_rows()},
            "effects": lambda: {"effects": self._effect_rows()},
            "nodes": lambda: {"nodes": self._node_rows()},
        }
        found: dict[str, list[Row]] = {}
        for part in self.options.parts:
            if part in parts:
                found |= parts[part]()
        return found

    def _row(self, variant: Variant, question: Question, **more: Any) -> Row:
        samples = self.answers.of(self._seeds(variant), question)
        named = {"objective": variant.objective, "init": variant.init, "change": variant.change}
        return {**named, "title": variant.title, **more, **describe(samples)}

    def _table_rows(self) -> list[Row]:
        everyone = plain(self.options.inits, [0])
        return [self._row(v, q) for v, q in product(everyone, self._table())]

    def _rival_rows(self) -> list[Row]:
        """AtSpeed's own objective of each verification against the best of the published others."""
        rows = []
        for init, question in product(self.options.inits, self._table()):
            champion = VERIFICATIONS[question.verification]
            samples = {
                name: self.answers.of(self._seeds(Variant(name, init)), question)
                for name in (*PUBLISHED, *OURS)
            }
            means = {name: describe(found)["accepted"]["mean"] for name, found in samples.items()}
            others = [name for name in PUBLISHED if name != champion]
            rival, best = max(others, key=means.__getitem__), max(OURS, key=means.__getitem__)
            rows.append(
                {
                    "init": init, **question.row, "objective": champion,
                    "rival": rival, "lead": difference(samples[champion], samples[rival]),
                    "ours": best, "ours_lead": difference(samples[best], samples[champion]),
                }
            )  # fmt: skip
        return rows

    def _ablation_rows(self) -> list[Row]:
        rows = []
        for verification, objective in VERIFICATIONS.items():
            whole = Variant(objective, self.init)
            for k in self.options.ks:
                question = Question(k, verification, self.options.drafts)
                full = self.answers.of(self._seeds(whole), question)
                rows.append(self._row(whole, question))
                for change, given in ABLATIONS[objective].items():
                    less = Variant(objective, self.init, 0, change, given)
                    gain = difference(self.answers.of(self._seeds(less), question), full)
                    rows.append(self._row(less, question, gain=gain))
        return rows

    def _effect_rows(self) -> list[Row]:
        rows = [
            self._row(Variant(objective, self.init), question, effect=effect)
            for (effect, objective), questions in self._effects().items()
            for question in questions
        ]
        for k in self.options.studied:
            question = Question(k, "strict", self.options.drafts)
            by_alpha = {0.0: Variant("sft", self.init), 0.5: Variant(STRICT, self.init)}
            by_alpha |= dict(zip(ALPHAS, strengths(self.init, [0]), strict=True))
            rows += [
                self._row(variant, question, effect="alpha", alpha=alpha)
                for alpha, variant in sorted(by_alpha.items())
            ]
        return rows

    def _node_rows(self) -> list[Row]:
        rows = [
            self._row(v, q) for v, q in product(plain(self.options.inits, [0]), self._of_nodes())
        ]
        for k in self.options.node_ks:
            found = self.answers.of([None], Question(k, drafts=None, nodes=0))
            rows.append(
                {"objective": None, "init": None, "change": "", "title": "no draft",
                 **describe(found)}
            )  # fmt: skip
        return rows


def _speed(context: Context, options: Options, drafts: dict[str, DraftSpace]) -> list[Row]:
    scene = scene_of(context.workspace, options.users)
    causal = load_trained(context.workspace.run("target"), device())
    questions = [Question(k, v, options.drafts) for v in VERIFICATIONS for k in options.ks]
    with track("walltime", len(questions)) as bar:
        rows = walltimes(
            scene, causal, {name: load_draft(space) for name, space in drafts.items()}, questions,
            rounds=options.timed, hf_rounds=min(options.hf_timed, options.timed),
            advance=bar.advance,
        )  # fmt: skip
    named = {v.key: v for v in plain(options.inits, options.seeds[:1])}
    return [
        {"objective": v.objective, "init": v.init, "title": v.title, **row}
        for row in rows
        for v in [named[row["draft"]]]
    ]


def _recall(context: Context, options: Options, run: Run) -> list[Row]:
    """Accuracy of the target, searched and sampled, and of what accelerates it."""
    base, init, seed = context.workspace, options.inits[0], options.seeds[0]
    spaces = {
        name: DraftSpace.seen_by(base, Variant(name, init, seed)) for name in VERIFICATIONS.values()
    }
    lists: list[Lists] = []
    for k in options.recall_ks:
        lists.append(Lists("target", Question(k, "none")))
        lists.append(
            Lists(
                STRICT, Question(k, "strict", options.drafts), against=len(lists) - 1,
                draft=spaces[STRICT],
            )
        )  # fmt: skip
        for heat in SAMPLED:
            lists.append(Lists("target", Question(k, "none", temperature=heat), sampled=True))
            question = Question(k, "relaxed", options.drafts, temperature=heat)
            lists.append(
                Lists(RELAXED, question, True, against=len(lists) - 1, draft=spaces[RELAXED])
            )
    tasks = [Recommending(kind, base, options.recall_users) for kind in lists]
    return accuracy(lists, run(call, tasks))
