"""The cost of decoding: every mode against plain beam search and Hugging Face's `generate`.

A cell is one K, one batch size, and prompts that are new (`cold`) or known but for the last item
(`warm`). All modes of a cell answer the same users. Their answers are compared with plain beam
search's before anything is timed.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, Literal

import numpy as np
import torch

from recsys.benchmark.timing import Side, Times, compare_times, summarize, time_interleaved
from recsys.benchmark.workload import Workload
from recsys.constraint.trie import NO_STATE
from recsys.decoding import (
    Beams,
    DecodeStats,
    Engine,
    ModelDrafter,
    Proposal,
    Search,
    SearchRequest,
    beam_search,
    speculative_beam_search,
)
from recsys.decoding.expand import Frontier, Step
from recsys.decoding.tree import PromptBatch, TokenTree
from recsys.errors import RecsysError
from recsys.models.cache import key_value_shape
from recsys.models.tree_forward import TreeModel
from recsys.testing import allowed_tokens, huggingface_beam_search, same_ranking

Reuse = Literal["cold", "warm"]
Ranking = list[tuple[tuple[int, ...], float]]
Row = dict[str, Any]
MODES = ("exhaustive", "draft", "perfect", "planned")
BEAM, HUGGING_FACE, PLANNED = "beam", "huggingface", "planned"
HF_BATCHES = (1, 8)  # batch sizes at which Hugging Face is timed
# Largest difference of a score, and of scores whose places may be exchanged.
ROUNDING = (1e-4, 1e-5)
HF_ROUNDING = (1e-3, 1e-4)  # Hugging Face pads on the left and sums in another order


@dataclass(frozen=True)
class Options:
    """What is compared.

    Attributes:
        beams: K.
        batches: requests decoded together.
        nodes: sizes of draft trees.
        reuse: kinds of prompts.
        modes: of `MODES`; plain beam search is always measured.
        repeats: rounds of batches of eight requests or more; smaller batches get more rounds.
        hf_repeats: rounds of Hugging Face, likewise; 0 leaves it out.
        seed: of the order of the modes.
    """

    beams: tuple[int, ...] = (5, 10, 20, 50)
    batches: tuple[int, ...] = (1, 2, 4, 8, 32)
    nodes: tuple[int, ...] = (128, 256)
    reuse: tuple[Reuse, ...] = ("cold", "warm")
    modes: tuple[str, ...] = ("exhaustive", "draft", "planned")
    repeats: int = 15
    hf_repeats: int = 3
    seed: int = 0

    def rounds(self, repeats: int, batch: int) -> int:
        """Rounds of batches of this size, so that small batches cover as many users."""
        return repeats * max(1, 8 // batch)

    @property
    def cells(self) -> int:
        """Number of cells."""
        return len(self.beams) * len(self.batches) * len(self.reuse)


def measure(
    workload: Workload, options: Options, advance: Callable[[], object] = lambda: None
) -> Row:
    """Time every cell.

    Args:
        workload: what is decoded.
        options: what is compared.
        advance: called after each cell.

    Returns:
        `rows`, one for each cell and mode, and `warm_ups`, the seconds that the planner took to
        measure the machine for each K and kind of prompts.

    Raises:
        RecsysError: a mode's answer is not beam search's. In precisions other than float32 and
            float64 the rows say how far they agree instead.
    """
    rows: list[Row] = []
    warm_ups: list[Row] = []
    for reuse in options.reuse:
        for beams in options.beams:
            engine = _engine(workload, options, reuse)
            if PLANNED in options.modes:
                start = time.perf_counter()
                engine.warm_up(workload.prompts[: max(options.batches)], beams, options.batches)
                seconds = round(time.perf_counter() - start, 2)
                warm_ups.append({"reuse": reuse, "beams": beams, "seconds": seconds})
            for batch in options.batches:
                rows += _Cell(workload, options, engine, reuse, beams, batch).measure()
                advance()
    return {"rows": rows, "warm_ups": warm_ups}


def _engine(workload: Workload, options: Options, reuse: Reuse) -> Engine:
    """An engine that keeps the prompts of a whole batch where they are warm."""
    room = 0
    if reuse == "warm":
        tokens = max(options.batches) * (workload.longest + 4)  # one block of slots in addition
        models = [TreeModel.of(m) for m in (workload.target, workload.draft) if m is not None]
        shapes = [(key_value_shape(m.config), m.dtype.itemsize) for m in models]
        room = tokens * max(2 * int(np.prod(shape)) * size for shape, size in shapes)
    return Engine(
        workload.target,
        workload.trie,
        draft=workload.draft,
        prefix_bytes=room,
        prompt_slots=workload.longest,
    )


@dataclass(frozen=True)
class Answer:
    """What a mode returned in one round.

    Attributes:
        rankings: (sequence, score) of each request, best first.
        stats: of each request; empty for Hugging Face.
        plan: that the planner chose; "" for other modes.
    """

    rankings: list[Ranking]
    stats: Sequence[DecodeStats] = ()
    plan: str = ""

    @classmethod
    def of(cls, beams: Beams, plan: str = "") -> Answer:
        """The answer of a search of this project."""
        columns = (beams.tokens.tolist(), beams.scores.tolist(), beams.rows.tolist())
        lists = [
            [(tuple(t), s) for t, s, row in zip(*request, strict=True) if row >= 0]
            for request in zip(*columns, strict=True)
        ]
        return cls(lists, beams.stats, plan)


class PerfectDraft(ModelDrafter):
    """Runs the draft, then proposes the tree that the target itself drafts in `find`.

    The tree lies in the same tensors each time, where a captured decode reads it. Its states are
    kept as numbers within their depth: a captured decode has room between depths (`FixedTrie`).
    """

    def __init__(self, draft: Any, target: TreeModel, nodes: int, batch: int) -> None:
        """Propose trees of `nodes` nodes for at most `batch` requests."""
        super().__init__(draft, nodes)
        self._target, self._batch = ModelDrafter(target, nodes), batch
        self._found: list[Frontier] = []

    @torch.inference_mode()
    def find(self, search: Search, num_beams: int) -> None:
        """Keep the tree to propose next."""
        levels = self._target.propose(search.prompts, search.step, num_beams).levels
        starts = search.step.trie.source.depth_start[1:]
        for kept, level, first in zip(self._kept(levels), levels, starts, strict=False):
            for old, new in zip(kept, _moved(level, -first), strict=True):
                old[: len(new)] = new
                old[len(new) :] = new[-1]  # requests that fill up a shape repeat the last one

    def draft(self, tree: TokenTree, step: Step, widths: Sequence[int]) -> Proposal:
        """See `ModelDrafter`."""
        proposal, batch = super().draft(tree, step, widths), len(tree.lengths)
        kept = self._kept(proposal.levels)
        levels = [Frontier(*(part[:batch] for part in level)) for level in kept]
        starts = step.trie.source.depth_start[1:]
        levels = [_moved(level, first) for level, first in zip(levels, starts, strict=False)]
        return replace(proposal, levels=levels)

    def _kept(self, levels: Sequence[Frontier]) -> list[Frontier]:
        """Tensors for levels of these widths, made in the first call."""
        if not self._found:
            self._found = [
                Frontier(*(part.new_zeros((self._batch, part.shape[1])) for part in level))
                for level in levels
            ]
        return self._found


def _moved(level: Frontier, by: int) -> Frontier:
    """A level with other numbers of states."""
    states = level.states
    return level._replace(states=torch.where(states == NO_STATE, states, states + by))


class _Cell:
    """One K, batch size and kind of prompts."""

    def __init__(
        self,
        workload: Workload,
        options: Options,
        engine: Engine,
        reuse: Reuse,
        beams: int,
        batch: int,
    ) -> None:
        self.workload, self.options, self.engine = workload, options, engine
        self.reuse, self.beams, self.batch = reuse, beams, batch
        self.rounds = options.rounds(options.repeats, batch)
        self.hf_rounds = options.rounds(options.hf_repeats, batch)
        self._perfect: dict[str, PerfectDraft] = {}

    def measure(self) -> list[Row]:
        """Compare the answers, time all modes side by side, and count their work."""
        modes = self._modes()
        agreement = self._compare(modes)
        answers: dict[str, list[Answer]] = {name: [] for name in modes}

        def side(name: str) -> Side:
            rounds = self.hf_rounds if name == HUGGING_FACE else None
            prepare = partial(self._prepare, name)
            return Side(lambda r: answers[name].append(modes[name](r)), prepare, rounds)

        sides = {name: side(name) for name in modes}
        times = time_interleaved(sides, self.rounds, seed=self.options.seed)
        base, theirs = times[BEAM], times.get(HUGGING_FACE, Times())
        first = answers[BEAM][0].stats[0]
        bytes_per_slot = first.kv_bytes // first.kv_slots
        rows = []
        for name, taken in times.items():
            if name == HUGGING_FACE:
                work = self._count_hugging_face(bytes_per_slot)
            else:
                work = _count(answers[name])
            row = {
                "reuse": self.reuse,
                "beams": self.beams,
                "batch": self.batch,
                "mode": name,
                "rounds": len(taken.wall),
                "ms": summarize([1e3 * s for s in taken.wall]),
                "cpu_ms": summarize([1e3 * s for s in taken.cpu]),
                "ws_beam": compare_times(base.wall, taken.wall),
                "ws_beam_cpu": compare_times(base.cpu, taken.cpu),
                "ws_huggingface": compare_times(theirs.wall, taken.wall),
                "ws_huggingface_cpu": compare_times(theirs.cpu, taken.cpu),
                **work,
                "kv_to_greedy": round(work["kv_bytes"] / (self._slots(1) * bytes_per_slot), 2),
                "agreement": agreement[name],
            }
            if name == PLANNED:
                row["plans"] = dict(Counter(a.plan for a in answers[name]).most_common())
            rows.append(row)
        return rows

    def _modes(self) -> dict[str, Callable[[int], Answer]]:
        """Name of a mode -> the function that answers round r."""
        engine, wanted, nodes = self.engine, self.options.modes, self.options.nodes
        modes: dict[str, Callable[[int], Answer]] = {BEAM: self._search}
        if self.batch in HF_BATCHES and self.options.hf_repeats:
            allowed = allowed_tokens(self.workload.item_tokens)
            modes[HUGGING_FACE] = partial(self._generate, allowed=allowed)
        if "exhaustive" in wanted:
            modes["exhaustive"] = partial(self._speculate, drafter=None)
        for n in nodes if engine.draft is not None else ():
            if "draft" in wanted:
                drafter = ModelDrafter(engine.draft, n)
                modes[f"draft-{n}"] = partial(self._speculate, drafter=drafter)
            if "perfect" in wanted:
                name = f"perfect-{n}"
                self._perfect[name] = PerfectDraft(engine.draft, engine.target, n, self.batch)
                modes[name] = partial(self._speculate, drafter=self._perfect[name])
        if PLANNED in wanted:
            modes[PLANNED] = self._plan
        return modes

    def _search(self, number: int) -> Answer:
        engine = self.engine
        found = beam_search(engine.target, self._request(number), engine.trie, self.beams)
        return self._finish(found)

    def _generate(self, number: int, allowed: dict[tuple[int, ...], list[int]]) -> Answer:
        prompts = self._prompts(number)
        return Answer(huggingface_beam_search(self.workload.target, prompts, allowed, self.beams))

    def _speculate(self, number: int, drafter: Any) -> Answer:
        engine, request = self.engine, self._request(number)
        return self._finish(
            speculative_beam_search(engine.target, drafter, request, engine.trie, self.beams)
        )

    def _plan(self, number: int) -> Answer:
        decoded = self.engine.decode(self._prompts(number), self.beams)
        return self._finish(decoded.beams, str(decoded.plan))

    def _finish(self, beams: Beams, plan: str = "") -> Answer:
        """The answer, once the device has computed it."""
        self._wait()
        return Answer.of(beams, plan)

    def _wait(self) -> None:
        if self.engine.target.device.type == "cuda":
            torch.cuda.synchronize(self.engine.target.device)

    def _request(self, number: int) -> SearchRequest:
        return SearchRequest(self._prompts(number), prompt_slots=self.engine.prompt_slots)

    def _prompts(self, number: int) -> list[Any]:
        return [self.workload.prompts[i] for i in self.workload.group(number, self.batch)]

    def _prepare(self, mode: str, number: int) -> None:
        """Find a perfect draft's tree. Warm: have the models keep the prompts of one item ago."""
        if mode in self._perfect:
            search = Search.of(self._request(number), self.engine.target, self.engine.trie)
            self._perfect[mode].find(search, self.beams)
        if self.reuse == "cold":
            return
        self.engine.forget()
        earlier = [self.workload.earlier[i] for i in self.workload.group(number, self.batch)]
        for model in (self.engine.target, self.engine.draft):
            if model is not None:
                with TokenTree(model, PromptBatch.of(earlier, model), 0) as tree:
                    tree.note(tree.forward().amax(-1))
        self._wait()

    def _compare(self, modes: dict[str, Callable[[int], Answer]]) -> dict[str, Row]:
        """How far every mode agrees with plain beam search, over the rounds to be timed."""
        exact = self.engine.target.dtype in (torch.float32, torch.float64)
        found: dict[str, list[Agreement]] = {name: [] for name in modes}
        for number in range(self.rounds):
            self._prepare(BEAM, number)
            expected = modes[BEAM](number).rankings
            for name, mode in modes.items():
                theirs = name == HUGGING_FACE
                if theirs and number >= self.hf_rounds:
                    continue
                self._prepare(name, number)
                rounding = HF_ROUNDING if theirs else ROUNDING
                agreement = Agreement.of(mode(number).rankings, expected, *rounding)
                if exact and agreement.requests < 1:
                    raise RecsysError(
                        f"{name} at K = {self.beams}, B = {self.batch}, {self.reuse}: an answer is "
                        f"not beam search's ({agreement}); nothing was timed"
                    )
                found[name].append(agreement)
        return {name: asdict(Agreement.join(parts)) for name, parts in found.items()}

    def _count_hugging_face(self, bytes_per_slot: int) -> Row:
        """Computed, not measured: every beam has its own cache, padded to the longest prompt."""
        slots = self._slots(self.beams, shared=False)
        return {
            "passes": self.workload.item_tokens.shape[1],
            "accepted_levels": 0,
            "target_tokens": round(slots, 2),
            "draft_passes": 0,
            "drafted_nodes": 0,
            "kv_slots": round(slots, 2),
            "kv_bytes": round(slots * bytes_per_slot),
        }

    def _slots(self, beams: int, *, shared: bool = True) -> float:
        """Mean cache slots of a request: the prompt, and a token of every level but the last."""
        length = np.mean if shared else np.max
        prompts = [float(length([len(p) for p in self._prompts(r)])) for r in range(self.rounds)]
        levels = int(self.workload.item_tokens.shape[1])
        return beams * (float(np.mean(prompts)) + levels - 1)


def _count(answers: Sequence[Answer]) -> Row:
    """Mean work of a request."""
    stats = [s for answer in answers for s in answer.stats]
    names = (
        "target_passes", "accepted_levels", "target_tokens", "draft_passes", "drafted_nodes",
        "kv_slots", "kv_bytes",
    )  # fmt: skip
    means = {name: round(float(np.mean([getattr(s, name) for s in stats])), 3) for name in names}
    return {"passes": means.pop("target_passes"), **means, "kv_bytes": round(means["kv_bytes"])}


@dataclass(frozen=True)
class Agreement:
    """How far answers agree with beam search's.

    Attributes:
        requests: share of lists that are the same, up to places within rounding.
        items: share of items in common.
        gap: largest difference of a common item's score.
    """

    requests: float
    items: float
    gap: float

    @classmethod
    def of(
        cls, found: list[Ranking], expected: list[Ranking], tolerance: float, tie: float
    ) -> Agreement:
        """Compare the lists of a batch (`recsys.testing.same_ranking`)."""
        same = common = total = 0
        gap = 0.0
        for mine, theirs in zip(found, expected, strict=True):
            same += same_ranking(mine, theirs, tolerance=tolerance, tie=tie)
            scores = dict(theirs)
            gaps = [abs(score - scores[key]) for key, score in mine if key in scores]
            gap, total = max([gap, *gaps]), total + len(theirs)
            common += len(dict(mine).keys() & scores.keys())
        return cls(same / len(expected), common / max(1, total), gap)

    @classmethod
    def join(cls, parts: Sequence[Agreement]) -> Agreement:
        """The agreement of batches of one size."""
        return cls(
            round(float(np.mean([p.requests for p in parts])), 4),
            round(float(np.mean([p.items for p in parts])), 4),
            float(f"{max(p.gap for p in parts):.2g}"),
        )
