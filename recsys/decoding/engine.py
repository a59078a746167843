"""Engine: decodes batches for one target and one catalog, in the mode that is expected fastest.

In every mode but `relaxed` the answer is beam search's. The engine keeps the keys and values of
prompts for returning users, measures the time of a pass on this machine, and chooses for each batch
between beam search and drafted trees (`recsys.decoding.planner`).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike

from recsys.arguments import whole_number
from recsys.constraint import ItemTrie
from recsys.decoding.beam import beam_search
from recsys.decoding.captures import Captures
from recsys.decoding.completion import complete
from recsys.decoding.draft import Drafter, ExhaustiveDrafter, ModelDrafter
from recsys.decoding.output import Beams
from recsys.decoding.planner import Load, PassTimes, Plan, Planner, list_plans
from recsys.decoding.request import Search, SearchRequest
from recsys.decoding.speculative import speculative_beam_search
from recsys.decoding.tree import ROOT, PromptBatch, TokenTree
from recsys.models.tree_forward import TreeModel
from recsys.modes import Mode, check_mode

_MEASURED_TOKENS = (4, 64, 256)
_MOST_TOKENS = 2048
_REPEATS = 3
_COMPLETION_NODES, _NATIVE_COMPLETION_NODES = 2048, 4096  # a request; native nodes cost less
# Sizes of draft trees to plan with. With up to 8 new prompt tokens, as of a kept history, passes
# have 64, 128, 256 and 384 tokens: whole tiles of a GPU's matrix products, and captured sizes.
_NODES = (56, 120, 248, 376)


@dataclass(frozen=True)
class Decoded:
    """An answer, the plan that was followed, and the seconds it took."""

    beams: Beams
    plan: Plan
    seconds: float


class Engine:
    """Decodes batches for one target over one catalog.

    Not thread-safe: one batch at a time.

    Attributes:
        target: the model whose beams are wanted.
        draft: the draft model, or None.
        trie: the catalog.
        planner: None until `warm_up`; plain beam search is the plan until then.
        captures: what is captured of the models.
    """

    def __init__(
        self,
        target: Any,
        trie: ItemTrie,
        *,
        draft: Any | None = None,
        draft_nodes: int = 256,
        prefix_bytes: int = 0,
        prompt_slots: int = 0,
        graphs: bool | None = None,
    ) -> None:
        """Prepare the models; nothing is run.

        Args:
            target: Hugging Face decoder-only causal LM.
            trie: the catalog.
            draft: smaller model over the same vocabulary.
            draft_nodes: nodes of a tree in mode `draft`.
            prefix_bytes: memory for keys and values of prompts, for the target and again for the
                draft; 0 keeps none.
            prompt_slots: cache slots to reserve for each prompt, as in `SearchRequest`.
            graphs: capture passes as graphs in `warm_up` (`recsys.models.graphs`); None does so on
                CUDA alone.
        """
        self.trie = trie
        self.planner: Planner | None = None
        self.target = _with_prefixes(target, prefix_bytes)
        self.draft = None if draft is None else _with_prefixes(draft, prefix_bytes)
        self.draft_nodes, self.prompt_slots = draft_nodes, prompt_slots
        self.captures = Captures(self.target, self.draft, trie, prompt_slots)
        self._use_graphs = self.target.device.type == "cuda" if graphs is None else graphs

    def use(self, trie: ItemTrie) -> None:
        """Decode over another catalog from now on; ValueError if its number of levels differs."""
        if trie is self.trie:
            return
        if trie.num_levels != self.trie.num_levels:
            raise ValueError(
                f"the catalog has {trie.num_levels} levels, the one before {self.trie.num_levels}"
            )
        self.trie = trie
        self.captures.use(trie)
        if self.planner is not None:
            self.planner.first_level = trie.branching[0]

    def decode(
        self,
        request: SearchRequest | Sequence[ArrayLike],
        num_beams: int = 20,
        *,
        mode: str = Mode.PLANNED,
        until_global: bool = False,
        traced: bool = False,
    ) -> Decoded:
        """The top `num_beams` of each prompt, as `beam_search` gives them.

        Args:
            request: token ids of each prompt, or a `SearchRequest`.
            num_beams: K.
            mode: a `Mode`; without a planner `planned` means `beam`. `draft` and `relaxed` need a
                draft model, and `relaxed` seeds as well.
            until_global: go on until lists are the model's best of all, or the budget ends.
            traced: also return how each answer was found; beam search is then replaced by the
                exhaustive mode, whose tree is drawn.

        Raises:
            ValueError: as `beam_search`; an unknown mode, or one that needs a draft model that the
                engine lacks; a sample with `until_global` (it is drawn from all sequences anyway).
            NonFiniteError: as `beam_search`.
        """
        request = SearchRequest.of(request).reserving(self.prompt_slots)
        search = Search.of(request, self.target, self.trie)
        if until_global and search.step.noise is not None:
            raise ValueError("until_global: a sample is drawn from all sequences already")
        load = Load(len(search), self._most_new_tokens(search.prompts), num_beams)
        plan = self._plan(mode, load)
        if traced and plan.mode == Mode.BEAM:
            plan = Plan(Mode.EXHAUSTIVE)
        start = time.perf_counter()
        beams = self._follow(plan, search, num_beams, traced=traced)
        seconds = time.perf_counter() - start
        # tracing takes time too, and the planner never chooses relaxed decoding
        counts = not traced and plan.mode != Mode.RELAXED
        if self.planner is not None and len(search) and counts:
            self.planner.learn(plan, load, seconds, [s.target_passes for s in beams.stats])
        if until_global:
            beams = self._completed(beams, search, num_beams)
            seconds = time.perf_counter() - start
        return Decoded(beams, plan, seconds)

    def _completed(self, beams: Beams, search: Search, num_beams: int) -> Beams:
        """The model's best of all, or what is found of them within the budget."""
        widest = min(num_beams, self.trie.num_rows)
        most = _COMPLETION_NODES if self.target.native is None else _NATIVE_COMPLETION_NODES
        nodes = max(most, widest * self.trie.num_levels + 256)
        return complete(self.target, beams, search, self.trie, max_nodes=nodes)

    def warm_up(
        self, prompts: Sequence[ArrayLike], num_beams: int = 20, batches: Sequence[int] = (1, 8)
    ) -> None:
        """Measure the machine and try every plan; mode `planned` uses the planner from now on.

        Typical prompts are repeated for each batch size. ValueError without prompts or sizes.
        """
        if not len(prompts):
            raise ValueError("prompts: want at least one to measure with")
        if not len(batches):
            raise ValueError("batches: want at least one size to measure")
        batches = [whole_number("batches", batch) for batch in batches]
        self.decode(prompts[:1], num_beams, mode="beam")  # allocations, libraries
        if self._use_graphs:
            longest = max(self.prompt_slots, *(len(np.asarray(p)) for p in prompts))
            self.captures.capture_passes(max(batches), longest, num_beams, self.plans)
        self.planner = self._measure_plans(prompts, num_beams, batches)

    @property
    def plans(self) -> list[Plan]:
        """The plans that the planner chooses from, and mode `draft`."""
        sizes = () if self.draft is None else dict.fromkeys((*_NODES, self.draft_nodes))
        return list_plans(self.trie.num_levels, self.trie.branching[0], list(sizes))

    def _measure_plans(
        self, prompts: Sequence[ArrayLike], num_beams: int, batches: Sequence[int]
    ) -> Planner:
        """A planner with measurements of this machine and of every plan."""
        planner = Planner(
            _measure(self.target, batches),
            None if self.draft is None else _measure(self.draft, batches),
            levels=self.trie.num_levels,
            first_level=self.trie.branching[0],
            nodes=_NODES,
        )
        for batch in batches:
            request = SearchRequest([prompts[i % len(prompts)] for i in range(batch)])
            request = request.reserving(self.prompt_slots)
            search = Search.of(request, self.target, self.trie)
            load = Load(batch, int(search.prompts.host_lengths.max()), num_beams)
            for repeat in range(_REPEATS):
                near = planner.near(load) if repeat else planner.possible(load)
                for plan in near:
                    self.forget()
                    start = time.perf_counter()
                    beams = self._follow(plan, search, num_beams)
                    seconds = time.perf_counter() - start
                    planner.learn(plan, load, seconds, [s.target_passes for s in beams.stats])
        return planner

    def close(self) -> None:
        """Free stored prompts and all that was captured; do not use the engine afterwards."""
        self.forget()
        self.captures.release()

    def forget(self) -> None:
        """Drop all stored prompts."""
        for model in (self.target, self.draft):
            if model is not None and model.prefixes is not None:
                model.prefixes.clear()

    def _follow(self, plan: Plan, search: Search, num_beams: int, *, traced: bool = False) -> Beams:
        """Decode as the plan says, to the end: no work is left queued on the device."""
        target, trie = self.target, self.trie
        decodes = None if traced else self.captures.decodes.get(plan)
        if decodes is not None and (whole := decodes.run(search, num_beams)) is not None:
            beams = whole
        elif plan.mode == Mode.BEAM:
            beams = beam_search(target, search, trie, num_beams)
        else:
            drafter: Drafter = ExhaustiveDrafter()
            if plan.mode in (Mode.DRAFT, Mode.RELAXED) and self.draft is not None:
                drafter = ModelDrafter(self.draft, plan.nodes or self.draft_nodes)
            verification = Mode.RELAXED if plan.mode == Mode.RELAXED else Mode.STRICT
            beams = speculative_beam_search(
                target, drafter, search, trie, num_beams, verification, traced=traced
            )
        if target.device.type == "cuda":
            torch.cuda.synchronize(target.device)
        return beams

    def _plan(self, mode: str, load: Load) -> Plan:
        mode = check_mode("mode", mode)
        if mode in (Mode.AUTO, Mode.PLANNED):
            return Plan() if self.planner is None or not load.batch else self.planner.choose(load)
        if mode in (Mode.DRAFT, Mode.RELAXED) and self.draft is None:
            raise ValueError(f"mode {mode.value!r} needs a draft model; the engine has none")
        if mode is Mode.STRICT:
            mode = Mode.EXHAUSTIVE if self.draft is None else Mode.DRAFT
        return Plan(mode, self.draft_nodes if mode is Mode.DRAFT else 0)

    def _most_new_tokens(self, prompts: PromptBatch) -> int:
        """Most prompt tokens that a request has to run."""
        store, new = self.target.prefixes, prompts.host_lengths
        if store is not None and self.planner is not None:  # else nobody uses the exact number
            new = new - store.known(prompts.host_tokens, new)
        return int(new.max(initial=0))


@torch.inference_mode()
def _measure(model: TreeModel, batches: Sequence[int]) -> PassTimes:
    """Measure the time of forward passes of a model on this machine."""
    points = {}
    for batch in sorted(set(batches)):
        sizes = [s for s in _MEASURED_TOKENS if batch * s <= _MOST_TOKENS] or [4]
        points[batch] = tuple((size, _time_pass(model, batch, size)) for size in sizes)
    return PassTimes(points)


def _with_prefixes(model: Any, prefix_bytes: int) -> TreeModel:
    """`model` as a `TreeModel`, with a prefix store of its own."""
    ready = TreeModel.of(model)
    if prefix_bytes:
        ready.keep_prefixes(prefix_bytes)
    return ready


def _time_pass(model: TreeModel, batch: int, size: int) -> float:
    """Seconds of one pass over `size` nodes a request: the minimum of a few."""
    prompts = PromptBatch.of([np.zeros(1, np.int64)] * batch, model)
    tokens = torch.zeros((batch, size), dtype=torch.int64, device=model.device)
    seconds = []
    for _ in range(_REPEATS + 1):  # the first one warms up
        with TokenTree(model, prompts, size) as tree:
            tree.add(tokens, torch.full_like(tokens, ROOT), 1)
            start = time.perf_counter()
            tree.forward()
            if model.device.type == "cuda":
                torch.cuda.synchronize(model.device)
            seconds.append(time.perf_counter() - start)
    return min(seconds[1:])
