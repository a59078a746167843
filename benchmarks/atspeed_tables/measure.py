"""Accepted levels, target passes, recommendations and times of test users, for each draft.

Figures of a draft are kept by user (`Sample`) until rows are made of them, so that two drafts can
be compared over the same users.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from typing import Any

import numpy as np
import torch
from answers import ROUNDING, Agreement, Answer
from measuring import Row, Side, compare_times, milliseconds, time_interleaved
from numpy.typing import NDArray

from atspeed_tables.lineup import DraftSpace
from recsys.artifacts import Workspace
from recsys.constraint import ItemTrie
from recsys.dataset import Dataset
from recsys.decoding import Beams, ModelDrafter, SearchRequest, beam_search, speculative_beam_search
from recsys.evaluation.metrics import Hits, bootstrap, ndcg_at_k, paired_bootstrap, recall_at_k
from recsys.interactions import Histories
from recsys.listing import items_of_rows
from recsys.models.tree_forward import TreeModel
from recsys.progress import say
from recsys.training.target import TrainedTarget, load_trained

BATCH = 25
PLAIN = "plain search"
Z = 1.96  # of a 95 % interval


@dataclass(frozen=True)
class Scene:
    """A target in float32, and test users: their prompts, sorted by length, and test items."""

    target: TreeModel
    trie: ItemTrie
    prompts: list[NDArray[np.int64]]
    targets: Histories

    def batches(self) -> Iterator[tuple[list[NDArray[np.int64]], list[int]]]:
        """Batches of prompts, and a seed for each prompt."""
        for start in range(0, len(self.prompts), BATCH):
            group = self.prompts[start : start + BATCH]
            yield group, list(range(start, start + len(group)))


def device() -> torch.device:
    """The accelerator if there is one, or else the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def load_draft(workspace: Workspace) -> TreeModel:
    """The draft of a workspace, in float32."""
    return TreeModel.of(load_trained(workspace.run("draft"), device()))


@lru_cache(maxsize=2)
def load_scene(workspace: Workspace, users: int) -> Scene:
    """The target and at most `users` users of the test split, always the same ones."""
    trained = TrainedTarget.load(workspace)
    encoder = trained.encoder
    examples = Dataset.load(workspace.dataset).examples("test", "all").sample(users)
    return Scene(
        TreeModel.of(trained.load_model(device())),
        ItemTrie.build(encoder.item_tokens),
        encoder.encode_all(examples.histories),
        examples.targets,
    )


@dataclass(frozen=True)
class Question:
    """One way of using a draft.

    Attributes:
        beams: K.
        verification: `strict`, `relaxed`, or `released`, relaxed as AtSpeed's code accepts and
            counts.
        drafts: N, nodes of each level.
        temperature: of relaxed verification.
    """

    beams: int
    verification: str = "strict"
    drafts: int = 40
    temperature: float = 1.0

    @property
    def is_sampled(self) -> bool:
        """Whether answers are drawn, instead of the best."""
        return self.verification != "strict"

    @property
    def row(self) -> dict[str, Any]:
        """The question as plain values."""
        return {"k": self.beams, "verification": self.verification, "drafts": self.drafts}


def ask(scene: Scene, draft: TreeModel | None, question: Question, group: Any, seeds: Any) -> Beams:
    """The answers of one batch, by a draft or by the target alone."""
    k, request = question.beams, SearchRequest(group)
    if question.is_sampled:
        request = SearchRequest(group, seeds=seeds, temperature=question.temperature)
    if draft is None:
        return beam_search(scene.target, request, scene.trie, k)
    if question.is_sampled:
        drafts = ModelDrafter(draft, draft_beams=max(k, question.drafts))
        return speculative_beam_search(
            scene.target, drafts, request, scene.trie, k, "relaxed",
            released=question.verification == "released",
        )  # fmt: skip
    drafter = ModelDrafter(draft, widths=[question.drafts] * (scene.trie.num_levels - 1))
    return speculative_beam_search(scene.target, drafter, request, scene.trie, k)


@dataclass(frozen=True)
class Sample:
    """Figures of one draft for one question.

    They are (users,) levels that the first pass accepted, at most L - 1, and passes of the target.
    """

    question: Question
    accepted: NDArray[np.float64]
    passes: NDArray[np.float64]


@cache
def answer_question(base: Workspace, space: DraftSpace, question: Question, users: int) -> Sample:
    """The sample of one draft for one question; the same question is measured once.

    The target is in the run's workspace `base`, and the draft in `space`.
    """
    scene, draft = load_scene(base, users), load_draft(space)
    answers = [ask(scene, draft, question, *batch) for batch in scene.batches()]
    stats = [s for answer in answers for s in answer.stats]
    accepted = np.array([float(s.accepted_levels) for s in stats])
    passes = np.array([float(s.target_passes) for s in stats])
    about = f"{space.draft}: {question.verification}, K = {question.beams}"
    say(f"{about}: {accepted.mean():.2f} levels")
    return Sample(question, accepted, passes)


def cell(values: NDArray[np.float64], digits: int = 3) -> dict[str, float]:
    """The mean over users, and half its 95 % interval."""
    error = Z * float(np.std(values)) / max(1.0, len(values) ** 0.5)
    return {"mean": round(float(np.mean(values)), digits), "error": round(error, digits)}


def describe(samples: Sequence[Sample]) -> dict[str, Any]:
    """A row of several seeds' samples. Intervals are over users, after the mean over seeds."""
    accepted = np.mean([s.accepted for s in samples], axis=0)
    passes = np.mean([s.passes for s in samples], axis=0)
    return {
        **samples[0].question.row,
        "users": len(accepted),
        "accepted": cell(accepted),
        "passes": cell(passes),
        "by_seed": [round(float(s.accepted.mean()), 3) for s in samples],
    }


@dataclass(frozen=True)
class Lists:
    """One way of making recommendations, whose accuracy is measured.

    Those with a draft are compared with the ones before, which are the target's alone.
    """

    name: str
    question: Question
    draft: DraftSpace | None = None


def measure_lists(base: Workspace, lists: Lists, users: int) -> dict[str, Any]:
    """Recall and NDCG of each user; for strict, how many lists are not beam search's."""
    scene, k = load_scene(base, users), lists.question.beams
    draft = None if lists.draft is None else load_draft(lists.draft)
    items, differing = [], 0
    is_compared = draft is not None and not lists.question.is_sampled
    for batch in scene.batches():
        beams = ask(scene, draft, lists.question, *batch)
        if is_compared:
            differing += _differing(beams, ask(scene, None, lists.question, *batch))
        items.append(_items(beams, scene.trie, k))
    hits = Hits.of(np.concatenate(items), scene.targets)
    figures = {"recall": recall_at_k(hits, k), "ndcg": ndcg_at_k(hits, k)}
    return {**figures, "differing": differing if is_compared else None}


def _differing(beams: Beams, expected: Beams) -> int:
    """Number of requests whose lists differ by more than the order of equal scores."""
    mine, theirs = Answer.of(beams).rankings, Answer.of(expected).rankings
    return round((1 - Agreement.of(mine, theirs, *ROUNDING).requests) * len(theirs))


def _items(beams: Beams, trie: ItemTrie, k: int) -> NDArray[np.int32]:
    """(B, k) items of the rows, best first, -1 behind the end; samples come in another order."""
    scores, order = beams.scores.sort(dim=1, descending=True, stable=True)
    rows = beams.rows.gather(1, order).cpu().numpy()
    return items_of_rows(trie, rows, scores.cpu().numpy(), k, excluded=Histories.of([]))[0]


def compare_accuracy(
    lists: Sequence[Lists], answers: Sequence[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Rows of recall and NDCG, with the paired difference from the row each is compared with."""
    rows = []
    for i, (kind, answer) in enumerate(zip(lists, answers, strict=True)):
        row: dict[str, Any] = {
            "name": kind.name,
            "k": kind.question.beams,
            "temperature": kind.question.temperature if kind.question.is_sampled else 0.0,
            "sampled": kind.question.is_sampled,
            "differing": answer["differing"],
        }
        for metric in ("recall", "ndcg"):
            row[metric] = vars(bootstrap(answer[metric]))
            if kind.draft is not None:
                other = answers[i - 1][metric]
                row[f"{metric}_gain"] = vars(paired_bootstrap(answer[metric], other))
        rows.append(row)
    return rows


def compare_accepted(a: Sequence[Sample], b: Sequence[Sample]) -> dict[str, float]:
    """Paired difference of accepted levels, a less b, over the same users."""
    first, second = (np.mean([s.accepted for s in samples], axis=0) for samples in (a, b))
    return cell(first - second)


def measure_walltimes(
    scene: Scene, drafts: Mapping[str, TreeModel], questions: Sequence[Question], rounds: int
) -> list[Row]:
    """Rows of each draft and question: milliseconds of a request, and the ratio to plain search.

    Strict questions are compared with beam search, relaxed ones with plain sampling. A round is the
    request of one user.
    """
    order = np.random.default_rng(1).permutation(len(scene.prompts))

    def run(question: Question, draft: TreeModel | None, number: int) -> None:
        user = int(order[number % len(order)])
        ask(scene, draft, question, [scene.prompts[user]], [user])
        if scene.target.device.type == "cuda":
            torch.cuda.synchronize()

    rows = []
    for question in questions:
        say(f"times, {question.verification}, K = {question.beams} ...")
        ways = {PLAIN: None, **drafts}
        sides = {name: Side(partial(run, question, draft)) for name, draft in ways.items()}
        for side in sides.values():
            side.run(0)  # the first run allocates buffers
        times = time_interleaved(sides, rounds)
        plain = times.pop(PLAIN)
        rows += [
            {
                "objective": name,
                **question.row,
                "ms": milliseconds(taken),
                "plain_ms": milliseconds(plain),
                "speedup": compare_times(plain, taken),
            }
            for name, taken in times.items()
        ]
    return rows
