"""What decoding costs: every mode against own beam search and Hugging Face's, answers first.

A cell is one K, one batch size, and prompts met for the first time (`cold`) or known but for the
last item (`warm`). Within a cell every mode answers the same users; before a clock is read, its
answers are compared with plain beam search's.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, Literal

import numpy as np
import torch

from recsys.benchmark.timing import Side, Times, interleaved, ratio, spread
from recsys.benchmark.workload import Workload
from recsys.constraint import ItemTrie
from recsys.decoding import (
    Beams,
    DecodeStats,
    Engine,
    ModelDrafter,
    Proposal,
    beam_search,
    speculative_beam_search,
)
from recsys.decoding.beam import grow, prepare
from recsys.decoding.expand import Frontier, Step
from recsys.decoding.tree import Prompts, TokenTree
from recsys.errors import RecsysError
from recsys.models.cache import key_value_shape
from recsys.models.tree_forward import TreeModel
from recsys.testing import allowed_tokens, huggingface_beam_search, same_ranking

Reuse = Literal["cold", "warm"]
Ranking = list[tuple[tuple[int, ...], float]]
MODES = ("exhaustive", "draft", "planned", "bound")
BEAM, HUGGING_FACE, PLANNED = "beam", "huggingface", "planned"
# Largest difference of a score, and of scores among which places may be exchanged.
ROUNDING = (1e-4, 1e-5)
HF_ROUNDING = (1e-3, 1e-4)  # it pads left and sums in another order


@dataclass(frozen=True)
class Options:
    """What is compared.

    Attributes:
        beams: K.
        batches: requests decoded together.
        nodes: sizes of draft trees, for modes `draft` and `bound`.
        reuse: prompts met for the first time, or known but for the last item.
        modes: of `MODES`; plain beam search is always one more. `bound` verifies the very beams
            that the target will want, so it shows what the best draft at no cost could gain; with
            a draft model also what one of its cost could.
        repeats: rounds of eight requests or more; batches of fewer get more rounds.
        hf_batches: batch sizes at which Hugging Face is timed, too.
        hf_repeats: rounds of Hugging Face, likewise.
        seed: of the order of modes.
    """

    beams: tuple[int, ...] = (5, 10, 20, 50)
    batches: tuple[int, ...] = (1, 2, 4, 8, 32)
    nodes: tuple[int, ...] = (128, 256)
    reuse: tuple[Reuse, ...] = ("cold", "warm")
    modes: tuple[str, ...] = ("exhaustive", "draft", "planned")
    repeats: int = 15
    hf_batches: tuple[int, ...] = (1, 8)
    hf_repeats: int = 3
    seed: int = 0

    def rounds(self, repeats: int, batch: int) -> int:
        """Rounds of batches of this size, so that small ones meet as many users."""
        return repeats * max(1, 8 // batch)

    @property
    def cells(self) -> int:
        """How many there are."""
        return len(self.beams) * len(self.batches) * len(self.reuse)


@dataclass
class Result:
    """What was measured.

    Attributes:
        rows: one a cell and mode.
        warm_ups: seconds that the planner took to measure the machine, for each reuse and K.
    """

    rows: list[dict[str, Any]] = field(default_factory=list)
    warm_ups: list[dict[str, Any]] = field(default_factory=list)


def measure(
    workload: Workload, options: Options, advance: Callable[[], object] = lambda: None
) -> Result:
    """Time every cell; `advance` is called after each.

    Raises:
        RecsysError: a mode's answer is not beam search's (float32 and float64; in other precisions
            the rows say how far they agree).
    """
    result = Result()
    for reuse in options.reuse:
        for beams in options.beams:
            engine = _engine(workload, options, reuse)
            if PLANNED in options.modes:
                start = time.perf_counter()
                engine.warm_up(workload.prompts[: max(options.batches)], beams, options.batches)
                seconds = round(time.perf_counter() - start, 2)
                result.warm_ups.append({"reuse": reuse, "beams": beams, "seconds": seconds})
            for batch in options.batches:
                result.rows += _Cell(workload, options, engine, reuse, beams, batch).rows()
                advance()
    return result


def _engine(workload: Workload, options: Options, reuse: Reuse) -> Engine:
    room = 0
    if reuse == "warm":
        tokens = max(options.batches) * (workload.longest + 4)  # a block more than the longest
        models = [m for m in (workload.target, workload.draft) if m is not None]
        room = tokens * max(_bytes_per_token(TreeModel.of(m)) for m in models)
    return Engine(
        workload.target,
        workload.trie,
        draft=workload.draft,
        prefix_bytes=room,
        prompt_slots=workload.longest,
    )


def _bytes_per_token(model: TreeModel) -> int:
    layers, heads, size = key_value_shape(model.config)
    return 2 * layers * heads * size * model.dtype.itemsize


class OwnTree:
    """Drafts what the target's own beam search found: what the best draft could do.

    Attributes:
        levels: beams of levels 1 .. L - 1.
        draft: runs first, for the time it takes; its tree's sizes are kept, not its nodes. None
            drafts at no cost, and no more nodes than needed.
    """

    def __init__(self, levels: list[Frontier], draft: ModelDrafter | None = None) -> None:
        """Draft `levels`; `of` finds them."""
        self.levels, self.draft = levels, draft

    @classmethod
    @torch.inference_mode()
    def of(
        cls, target: Any, prompts: Sequence[Any], trie: ItemTrie, beams: int, prompt_slots: int = 0
    ) -> OwnTree:
        """Search plainly."""
        model = TreeModel.of(target)
        ready = Prompts.of(prompts, model, trie.num_levels - 1)
        step = prepare(model, len(ready), trie, beams, None, "vocabulary")
        widths = [trie.width(depth, beams) for depth in range(1, step.levels + 1)]
        with TokenTree(model, ready, sum(widths[:-1]), prompt_slots=prompt_slots) as tree:
            return cls(list(grow(tree, step, widths))[:-1])

    def propose(
        self, prompts: Prompts, step: Step, num_beams: int, *, prompt_slots: int
    ) -> Proposal:
        """See `recsys.decoding.Drafter`."""
        if self.draft is None:
            return Proposal(self.levels)
        drafted = self.draft.propose(prompts, step, num_beams, prompt_slots=prompt_slots)
        widths = [level.states.shape[1] for level in drafted.levels]
        own = [level.padded(n) for level, n in zip(self.levels, widths, strict=True)]
        return Proposal(own, drafted.passes)


class _Cell:
    """One K, batch size and reuse."""

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
        self.plans: Counter[str] = Counter()
        self.trees: dict[int, OwnTree] = {}

    def rows(self) -> list[dict[str, Any]]:
        """Compare, then time, then count."""
        ways = self._ways()
        agreement = self._compare(ways)
        self.plans.clear()
        answers: dict[str, list[Any]] = {name: [] for name in ways}

        def side(name: str, rounds: int | None) -> Side:
            return Side(lambda r: answers[name].append(ways[name](r)), self._prepare, rounds)

        few = {HUGGING_FACE: self.hf_rounds}
        sides = {name: side(name, few.get(name)) for name in ways}
        times = interleaved(sides, self.rounds, seed=self.options.seed)
        costs = {n: self._own_cost(a) for n, a in answers.items() if n != HUGGING_FACE}
        if HUGGING_FACE in ways:
            costs[HUGGING_FACE] = self._hugging_face_cost(costs[BEAM]["bytes_per_slot"])
        slots, per_slot = self._greedy_slots(), costs[BEAM]["bytes_per_slot"]
        rows = []
        base, theirs = times[BEAM], times.get(HUGGING_FACE, Times())
        for name, taken in times.items():
            row = {
                "reuse": self.reuse,
                "beams": self.beams,
                "batch": self.batch,
                "mode": name,
                "rounds": len(taken.wall),
                "ms": spread([1e3 * s for s in taken.wall]),
                "cpu_ms": spread([1e3 * s for s in taken.cpu]),
                "ws_beam": ratio(base.wall, taken.wall),
                "ws_beam_cpu": ratio(base.cpu, taken.cpu),
                "ws_huggingface": ratio(theirs.wall, taken.wall),
                "ws_huggingface_cpu": ratio(theirs.cpu, taken.cpu),
                **{k: v for k, v in costs[name].items() if k != "bytes_per_slot"},
                "kv_to_greedy": round(costs[name]["kv_bytes"] / (slots * per_slot), 2),
                "agreement": agreement[name],
            }
            if name == PLANNED:
                row["plans"] = dict(self.plans.most_common())
            rows.append(row)
        return rows

    def _ways(self) -> dict[str, Callable[[int], Any]]:
        """Mode -> what answers round r."""
        engine, modes, nodes = self.engine, self.options.modes, self.options.nodes
        ways: dict[str, Callable[[int], Any]] = {BEAM: self._search}
        if self.batch in self.options.hf_batches and self.options.hf_repeats:
            allowed = allowed_tokens(self.workload.item_tokens)
            ways[HUGGING_FACE] = partial(self._generate, allowed=allowed)
        if "exhaustive" in modes:
            ways["exhaustive"] = partial(self._speculate, drafter=None)
        if "draft" in modes and engine.draft is not None:
            ways |= {f"draft-{n}": partial(self._draft, nodes=n) for n in nodes}
        if PLANNED in modes:
            ways[PLANNED] = self._plan
        if "bound" in modes:
            ways["bound"] = self._bound
            if engine.draft is not None:
                ways |= {f"bound-{n}": partial(self._bound, nodes=n) for n in nodes}
        return ways

    def _search(self, number: int) -> Beams:
        engine = self.engine
        return self._finished(
            beam_search(
                engine.target,
                self._prompts(number),
                engine.trie,
                self.beams,
                prompt_slots=engine.prompt_slots,
            )
        )

    def _generate(self, number: int, allowed: dict[tuple[int, ...], list[int]]) -> list[Ranking]:
        return huggingface_beam_search(
            self.workload.target, self._prompts(number), allowed, self.beams
        )

    def _draft(self, number: int, nodes: int) -> Beams:
        return self._speculate(number, ModelDrafter(self.engine.draft, nodes))

    def _speculate(self, number: int, drafter: Any) -> Beams:
        return self._finished(
            speculative_beam_search(
                self.engine.target,
                drafter,
                self._prompts(number),
                self.engine.trie,
                self.beams,
                prompt_slots=self.engine.prompt_slots,
            )
        )

    def _plan(self, number: int) -> Beams:
        decoded = self.engine.decode(self._prompts(number), self.beams)
        self.plans[str(decoded.plan)] += 1
        return decoded.beams

    def _bound(self, number: int, nodes: int = 0) -> Beams:
        """The tree is found while answers are compared, so before the clock runs."""
        engine = self.engine
        if number not in self.trees:
            # by a model of its own: the engine's keeps prompts
            self.trees[number] = OwnTree.of(
                self.workload.target,
                self._prompts(number),
                engine.trie,
                self.beams,
                engine.prompt_slots,
            )
        draft = ModelDrafter(engine.draft, nodes) if nodes else None
        return self._speculate(number, OwnTree(self.trees[number].levels, draft))

    def _finished(self, beams: Beams) -> Beams:
        if self.engine.target.device.type == "cuda":
            torch.cuda.synchronize(self.engine.target.device)
        return beams

    def _prompts(self, number: int) -> list[Any]:
        return [self.workload.prompts[i] for i in self.workload.group(number, self.batch)]

    def _prepare(self, number: int) -> None:
        """Know the prompts as they were one item ago, and nothing else."""
        if self.reuse == "cold":
            return
        self.engine.forget()
        earlier = [self.workload.earlier[i] for i in self.workload.group(number, self.batch)]
        for model in (self.engine.target, self.engine.draft):
            if model is not None:
                with TokenTree(model, Prompts.of(earlier, model), 0) as tree:
                    tree.note(tree.forward().amax(-1))
        if self.engine.target.device.type == "cuda":
            torch.cuda.synchronize(self.engine.target.device)

    def _compare(self, ways: dict[str, Callable[[int], Any]]) -> dict[str, dict[str, float]]:
        """How far every mode agrees with plain beam search, over the rounds it will be timed in."""
        exact = self.engine.target.dtype in (torch.float32, torch.float64)
        found: dict[str, list[Agreement]] = {name: [] for name in ways}
        for number in range(self.rounds):
            self._prepare(number)
            expected = rankings(ways[BEAM](number))
            for name, way in ways.items():
                theirs = name == HUGGING_FACE
                if theirs and number >= self.hf_rounds:
                    continue
                self._prepare(number)
                answer = way(number)
                answer = answer if theirs else rankings(answer)
                agreement = Agreement.of(answer, expected, *(HF_ROUNDING if theirs else ROUNDING))
                if exact and agreement.requests < 1:
                    raise RecsysError(
                        f"{name} at K = {self.beams}, B = {self.batch}, {self.reuse}: an answer is "
                        f"not beam search's ({agreement}); nothing was timed"
                    )
                found[name].append(agreement)
        return {name: asdict(Agreement.joined(parts)) for name, parts in found.items()}

    def _own_cost(self, answers: Sequence[Beams]) -> dict[str, Any]:
        stats = [s for beams in answers for s in beams.stats]
        return {
            "passes": _mean(stats, "target_passes"),
            "accepted_levels": _mean(stats, "accepted_levels"),
            "target_tokens": _mean(stats, "target_tokens"),
            "draft_passes": _mean(stats, "draft_passes"),
            "drafted_nodes": _mean(stats, "drafted_nodes"),
            "kv_bytes": round(_mean(stats, "kv_bytes")),
            "bytes_per_slot": stats[0].kv_bytes // stats[0].kv_slots,
        }

    def _hugging_face_cost(self, bytes_per_slot: int) -> dict[str, Any]:
        """Counted, not measured: every beam is run and kept alone, padded to the longest prompt."""
        levels = self.workload.item_tokens.shape[1]
        longest = [max(map(len, self._prompts(r))) for r in range(self.rounds)]
        slots = self.beams * (float(np.mean(longest)) + levels - 1)
        return {
            "passes": levels,
            "accepted_levels": 0,
            "target_tokens": round(slots, 2),
            "draft_passes": 0,
            "drafted_nodes": 0,
            "kv_bytes": round(slots * bytes_per_slot),
            "bytes_per_slot": bytes_per_slot,
        }

    def _greedy_slots(self) -> float:
        """Mean slots of decoding one beam: the prompt, and a token of every level but the last."""
        levels = int(self.workload.item_tokens.shape[1])
        lengths = [len(p) for r in range(self.rounds) for p in self._prompts(r)]
        return sum(lengths) / len(lengths) + levels - 1


def _mean(stats: Sequence[DecodeStats], name: str) -> float:
    return round(float(np.mean([getattr(s, name) for s in stats])), 3)


def rankings(beams: Beams) -> list[Ranking]:
    """(sequence, score) of each request, best first."""
    return [
        [(tuple(t), s) for t, s, row in zip(*lists, strict=True) if row >= 0]
        for lists in zip(
            beams.tokens.tolist(), beams.scores.tolist(), beams.rows.tolist(), strict=True
        )
    ]


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
            gap, common, total = max([gap, *gaps]), common + len(gaps), total + len(theirs)
        return cls(same / len(expected), common / max(1, total), gap)

    @classmethod
    def joined(cls, parts: Sequence[Agreement]) -> Agreement:
        """Of batches of one size."""
        return cls(
            round(float(np.mean([p.requests for p in parts])), 4),
            round(float(np.mean([p.items for p in parts])), 4),
            float(f"{max(p.gap for p in parts):.2g}"),
        )
