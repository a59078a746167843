"""Engine: decodes batches for one target and one catalog, in the mode that is expected fastest.

In every mode but `relaxed` the answer is beam search's. The engine keeps the keys and values of
prompts for returning users, measures the time of a pass on this machine, and chooses for each batch
between beam search and drafted trees (`recsys.decoding.planner`).
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from recsys import arguments
from recsys.arguments import whole_number
from recsys.constraint import ItemTrie
from recsys.constraint.fixed import FixedTrie
from recsys.constraint.transitions import DeviceTrie
from recsys.decoding.beam import beam_search
from recsys.decoding.captured import DecodeGraphs
from recsys.decoding.captured_drafts import DraftGraphs
from recsys.decoding.completion import complete
from recsys.decoding.draft import Drafter, ExhaustiveDrafter, StateDrafter, drafter_of, split_nodes
from recsys.decoding.grid import Grid
from recsys.decoding.output import Beams
from recsys.decoding.planner import Load, PassTimes, Plan, Planner, list_plans
from recsys.decoding.request import Search, SearchRequest
from recsys.decoding.speculative import PATCH_NODES, speculative_beam_search
from recsys.decoding.tree import ROOT, PromptBatch, TokenTree, find_long_prompts
from recsys.errors import NonFiniteError
from recsys.models.cache import CachePool, whole_blocks
from recsys.models.graphs import PassGraphs
from recsys.models.state_draft import StateDraft
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


@dataclass(frozen=True)
class EngineStatistics:
    """What an engine has captured, and counts since then.

    Attributes:
        passes: captured passes of all models.
        decodes: captured decodes of all plans.
        seconds: time that captures took.
        device_bytes: memory of the device that was gone after them, with all that was allocated
            meanwhile; None where there is no such figure, as on a CPU.
        replays: decodes that ran as one graph.
        patched: those of them that patch passes followed.
        fallbacks: decodes of captured plans that did not, by reason (`DecodeGraphStatistics`).
        eager_passes: passes without a graph, by reason (`GraphStatistics`); those of models
            without captured passes are not counted.
    """

    passes: int
    decodes: int
    seconds: float
    device_bytes: int | None
    replays: int
    patched: int
    fallbacks: dict[str, int]
    eager_passes: dict[str, int]


class Engine:
    """Decodes batches for one target over one catalog.

    Not thread-safe: one batch at a time.

    Attributes:
        target: the model whose beams are wanted.
        draft: the draft model, a `StateDraft`, or None.
        trie: the catalog.
        planner: None until `warm_up`; plain beam search is the plan until then.
        graphs: captured passes of the target and of the draft model, once there are any.
        decodes: captured decodes by plan; empty until `capture_decodes`.
    """

    def __init__(
        self,
        target: Any,
        trie: ItemTrie,
        *,
        draft: Any | None = None,
        draft_nodes: int = 256,
        prefix_bytes: int = 0,
        version: str = "",
        prompt_slots: int = 0,
        graphs: bool | None = None,
    ) -> None:
        """Prepare the models; nothing is run.

        Args:
            target: Hugging Face decoder-only causal LM.
            trie: the catalog.
            draft: smaller model over the same vocabulary, or a `StateDraft` of the target.
            draft_nodes: nodes of a tree in mode `draft`.
            prefix_bytes: memory for keys and values of prompts, for the target and again for the
                draft; 0 keeps none.
            version: of the models; prompts that were stored under another version are not used.
            prompt_slots: cache slots to reserve for each prompt, as in `SearchRequest`.
            graphs: capture passes as graphs in `warm_up` (`recsys.models.graphs`); None does so on
                CUDA alone.
        """
        self.trie = trie
        self.planner: Planner | None = None
        self.target = _with_prefixes(target, prefix_bytes, version)
        self.draft: TreeModel | StateDraft | None = draft
        if draft is not None and not isinstance(draft, StateDraft):
            self.draft = _with_prefixes(draft, prefix_bytes, version)
        self.draft_nodes, self.prompt_slots = draft_nodes, prompt_slots
        self.graphs: list[PassGraphs] = []
        self.decodes: dict[Plan, DecodeGraphs] = {}
        self._catalog: FixedTrie | None = None  # that of the captured decodes
        self._capture_seconds, self._device_bytes = 0.0, 0
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
        if self._catalog is not None:
            self._catalog.use(trie)  # without room for it, decodes fall back and are counted
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
        search, order = self._prepared(request), None
        if self.target.most_padding is not None and len(search):
            order = self._long_first(search.prompts)
        if order is not None:
            search = self._prepared(SearchRequest.of(request).take(order))
        if until_global and search.step.noise is not None:
            raise ValueError("until_global: a sample is drawn from all sequences already")
        new = self._new_tokens(search.prompts)
        load = Load(len(search), int(new.max(initial=0)), num_beams)
        plan = self._plan(mode, load)
        if traced and plan.mode == Mode.BEAM:
            plan = Plan(Mode.EXHAUSTIVE)
        start = time.perf_counter()
        try:
            beams = self._follow(plan, search, num_beams, traced=traced)
            seconds = time.perf_counter() - start
            # tracing takes time too, and the planner never chooses relaxed decoding
            counts = not traced and plan.mode != Mode.RELAXED
            if self.planner is not None and len(search) and counts:
                self.planner.learn(plan, load, seconds, [s.target_passes for s in beams.stats])
            if until_global:
                beams = self._completed(beams, search, num_beams)
                seconds = time.perf_counter() - start
        except NonFiniteError as error:
            if order is None:
                raise
            raise NonFiniteError(sorted(order[i] for i in error.requests)) from None
        if order is not None:
            beams = beams.take(np.argsort(order).tolist())
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
        batches = [arguments.whole_number("batches", batch) for batch in batches]
        self.decode(prompts[:1], num_beams, mode="beam")  # allocations, libraries
        if self._use_graphs:
            longest = max(self.prompt_slots, *(len(np.asarray(p)) for p in prompts))
            self.capture(max(batches), longest, num_beams)
        self.planner = self._measure_plans(prompts, num_beams, batches)

    @property
    def plans(self) -> list[Plan]:
        """The plans that the planner chooses from, and mode `draft`."""
        sizes = () if self.draft is None else dict.fromkeys((*_NODES, self.draft_nodes))
        return list_plans(self.trie.num_levels, self.trie.branching[0], list(sizes))

    @property
    def draft_model(self) -> TreeModel | None:
        """The draft, if it is a language model."""
        return self.draft if isinstance(self.draft, TreeModel) else None

    def capture(
        self,
        batch: int,
        prompt: int,
        num_beams: int = 20,
        plans: Sequence[Plan] | None = None,
        *,
        spare: int = 0,
    ) -> None:
        """Capture every pass that decodes of this size or smaller can take.

        Args:
            batch: most requests.
            prompt: most prompt tokens of a request.
            num_beams: most beams.
            plans: that may be followed; None for all `plans` of the engine.
            spare: further slots of each request, which decodes with candidates need that will be
                captured next (`capture_decodes`).
        """
        plans = self.plans if plans is None else plans
        trees = [plan.nodes for plan in plans if plan.mode == Mode.DRAFT]
        grid = self._grid(batch, max(self.prompt_slots, prompt), num_beams)
        shapes = [grid.of_target(plans)]
        if self.draft_model is not None and trees:
            shapes.append(set())
            on_device = DeviceTrie.of(self.trie, self.draft_model.device)
            for widths in _draft_widths(on_device, trees, num_beams):
                shapes[-1] |= grid.of_beams(widths)
        with self._timed():
            for number, (model, own) in enumerate(zip(self._models, shapes, strict=False)):
                slots = max(shape.view for shape in own) + whole_blocks(spare)
                self._passes(number, model, batch, slots).warm_up(own)

    def capture_decodes(
        self,
        batch: int,
        prompt: int,
        num_beams: int = 20,
        candidates: Sequence[tuple[int, int]] = ((0, 0),),
        plans: Sequence[Plan] = (Plan(),),
    ) -> None:
        """Capture whole decodes of this K, with one graph for each.

        A plan then decodes in one launch, and a draft that is not accepted is followed by patch
        passes, for which `capture` has graphs. What fits no graph takes the way of before
        (`self.decodes[plan].statistics`), and so does a decode that is traced. Another catalog is
        copied into the tensors that graphs read; while it has no room there (`FixedTrie`), no graph
        fits. A later `capture` or `warm_up` that needs a larger storage drops the graphs.

        Args:
            batch: most requests.
            prompt: most prompt tokens of a request.
            num_beams: the number of beams.
            candidates: numbers of candidates and of their nodes per request to capture decodes
                for; (0, 0) is for those without any.
            plans: of the modes `beam` and, with a draft model, `draft`.

        Raises:
            ValueError: more decodes than `recsys.decoding.captured_inputs.MOST_DECODES`, or a plan
                that cannot be captured: of another mode, without a draft model, or with a draft for
                a catalog of one level.
        """
        prompt = max(self.prompt_slots, prompt)
        with self._timed():
            tokens = min(model.vocabulary_size for model in self._models)
            catalog = FixedTrie(self.trie, self.target.device, tokens=tokens)
            grid = self._grid(batch, prompt, num_beams, catalog.trie.source)
            for plan in plans:
                drafted = plan.mode == Mode.DRAFT and self.draft is not None
                if plan.mode != Mode.BEAM and not (drafted and grid.widths):
                    raise ValueError(
                        f"plans: {plan} cannot be captured as a whole; want beam, or draft with a "
                        "draft model and a catalog of more than one level"
                    )
            extra = max((nodes for _, nodes in candidates), default=0)
            passes = [self._passes(0, self.target, batch, grid.most_slots(plans, extra))]
            trees = [plan.nodes for plan in plans if plan.nodes]
            if trees and self.draft_model is not None:
                widths = _draft_widths(catalog.trie, trees, num_beams)
                slots = whole_blocks(prompt) + whole_blocks(max(map(sum, widths)))
                passes.append(self._passes(1, self.draft_model, batch, slots))
            self.decodes, self._catalog = {}, catalog  # frees the memory of those before
            limits = {"prompt": prompt, "num_beams": num_beams}
            shapes = {plan: self._decodes(plan, passes, catalog, **limits) for plan in plans}
            for plan, decodes in shapes.items():
                models = self._models if plan.mode == Mode.DRAFT else [self.target]
                kept = all(model.prefixes is not None for model in models)
                decodes.warm_up(grid.of_decodes(plan, kept=kept, candidates=candidates))
            self.decodes = shapes

    def _decodes(
        self, plan: Plan, passes: Sequence[PassGraphs], catalog: FixedTrie, **limits: int
    ) -> DecodeGraphs:
        """Graphs for the decodes of a plan; nothing is captured yet."""
        if plan.mode == Mode.BEAM:
            return DecodeGraphs(passes[0], catalog, **limits)
        draft = passes[1] if len(passes) > 1 else None
        return DraftGraphs(passes[0], draft, drafter_of(self.draft, plan.nodes), catalog, **limits)

    def statistics(self) -> EngineStatistics:
        """What has been captured, and counts since then."""
        passes = [graphs.statistics() for graphs in self.graphs]
        decodes = [decodes.statistics() for decodes in self.decodes.values()]
        return EngineStatistics(
            passes=sum(counts.graphs for counts in passes),
            decodes=sum(counts.graphs for counts in decodes),
            seconds=self._capture_seconds,
            device_bytes=self._device_bytes if self.target.device.type == "cuda" else None,
            replays=sum(counts.replays for counts in decodes),
            patched=sum(counts.patched for counts in decodes),
            fallbacks=dict(sum((Counter(counts.fallbacks) for counts in decodes), Counter())),
            eager_passes=dict(sum((Counter(counts.fallbacks) for counts in passes), Counter())),
        )

    @contextmanager
    def _timed(self) -> Iterator[None]:
        """Add up what captures take: seconds, and memory of the device."""
        start, free = time.perf_counter(), _free_bytes(self.target.device)
        try:
            yield
        finally:
            self._capture_seconds += time.perf_counter() - start
            self._device_bytes += free - _free_bytes(self.target.device)

    def _grid(self, batch: int, prompt: int, num_beams: int, trie: ItemTrie | None = None) -> Grid:
        """The shapes of decodes of these sizes; `trie` is the engine's unless another is given."""
        for name, value in {"batch": batch, "prompt": prompt, "num_beams": num_beams}.items():
            whole_number(name, value)
        trie = self.trie if trie is None else trie
        return Grid(
            batch=batch,
            prompt=prompt,
            widths=tuple(trie.width(depth, num_beams) for depth in range(1, trie.num_levels)),
            patch=trie.width(trie.num_levels, num_beams) + min(PATCH_NODES, trie.num_states),
            first_level=trie.branching[0],
            behind_prompts=isinstance(self.draft, StateDraft),
        )

    def _passes(self, number: int, model: TreeModel, batch: int, slots: int) -> PassGraphs:
        """The captured passes of a model, with room for these sizes."""
        if len(self.graphs) == number:
            self.graphs.append(PassGraphs.attach(model, batch=batch, slots=slots))
        elif not self.graphs[number].has_room(batch, slots):
            before = self.graphs[number].shapes
            self.graphs[number] = PassGraphs.attach(model, batch=batch, slots=slots)
            self.graphs[number].warm_up(before)
            self.decodes = {}  # they are captured over the storage of before
        return self.graphs[number]

    def _measure_plans(
        self, prompts: Sequence[ArrayLike], num_beams: int, batches: Sequence[int]
    ) -> Planner:
        """A planner with measurements of this machine and of every plan."""
        planner = Planner(
            _measure(self.target, batches),
            None if self.draft_model is None else _measure(self.draft_model, batches),
            levels=self.trie.num_levels,
            first_level=self.trie.branching[0],
            nodes=() if self.draft is None else _NODES,
        )
        for batch in batches:
            search = self._prepared([prompts[i % len(prompts)] for i in range(batch)])
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

    @property
    def _models(self) -> list[TreeModel]:
        return [self.target] if self.draft_model is None else [self.target, self.draft_model]

    def close(self) -> None:
        """Free stored prompts and all that was captured; do not use the engine afterwards.

        Captured passes and their model refer to each other, so they would wait for the garbage
        collector.
        """
        self.forget()
        self.graphs, self.decodes, self._catalog = [], {}, None
        for model in self._models:
            model.find_graph = None
            model.pool = CachePool(model.config, model.dtype, model.device)

    def forget(self) -> None:
        """Drop all stored prompts."""
        for model in self._models:
            if model.prefixes is not None:
                model.prefixes.clear()

    def _prepared(self, request: SearchRequest | Sequence[ArrayLike]) -> Search:
        """The request prepared for the target and the catalog, with the engine's prompt slots."""
        request = SearchRequest.of(request).reserving(self.prompt_slots)
        return Search.of(request, self.target, self.trie)

    def _follow(self, plan: Plan, search: Search, num_beams: int, *, traced: bool = False) -> Beams:
        """Decode as the plan says, to the end: no work is left queued on the device."""
        target, trie = self.target, self.trie
        decodes = None if traced else self.decodes.get(plan)
        if decodes is not None and (whole := decodes.run(search, num_beams)) is not None:
            beams = whole
        elif plan.mode == Mode.BEAM:
            beams = beam_search(target, search, trie, num_beams)
        else:
            drafter: Drafter | StateDrafter = ExhaustiveDrafter()
            if plan.mode in (Mode.DRAFT, Mode.RELAXED) and self.draft is not None:
                drafter = drafter_of(self.draft, plan.nodes or self.draft_nodes)
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
        draft = self.draft_model if mode is Mode.RELAXED else self.draft
        if mode in (Mode.DRAFT, Mode.RELAXED) and draft is None:
            raise ValueError(f"mode {mode.value!r} needs a draft model; the engine has none")
        if mode is Mode.STRICT:
            mode = Mode.EXHAUSTIVE if self.draft is None else Mode.DRAFT
        return Plan(mode, self.draft_nodes if mode is Mode.DRAFT else 0)

    def _new_tokens(self, prompts: PromptBatch) -> NDArray[np.int64]:
        """(B,) prompt tokens that each request has to run."""
        store, lengths = self.target.prefixes, prompts.host_lengths
        if store is None or (self.planner is None and self.target.most_padding is None):
            return lengths  # nobody uses the exact numbers
        return lengths - store.known(self.target.version, prompts.host_tokens, lengths)

    def _long_first(self, prompts: PromptBatch) -> list[int] | None:
        """The order in which few requests with many new tokens come first (`find_long_prompts`).

        None if the order makes no difference.
        """
        new = self._new_tokens(prompts)
        order = np.argsort(-new, kind="stable")
        most = self.target.most_padding
        if most is None or find_long_prompts(new[order]).saved <= most:
            return None
        return None if (np.diff(order) > 0).all() else order.tolist()


@torch.inference_mode()
def _measure(model: TreeModel, batches: Sequence[int]) -> PassTimes:
    """Measure the time of forward passes of a model on this machine."""
    points = {}
    for batch in sorted(set(batches)):
        sizes = [s for s in _MEASURED_TOKENS if batch * s <= _MOST_TOKENS] or [4]
        points[batch] = tuple((size, _time_pass(model, batch, size)) for size in sizes)
    return PassTimes(points)


def _with_prefixes(model: Any, prefix_bytes: int, version: str) -> TreeModel:
    """`model` as a `TreeModel`, with a prefix store of its own."""
    ready = TreeModel.of(model)
    if prefix_bytes:
        ready.keep_prefixes(prefix_bytes, version)
    return ready


def _free_bytes(device: torch.device) -> int:
    """Free memory of a GPU; 0 elsewhere."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 0


def _draft_widths(
    trie: DeviceTrie, sizes: Iterable[int], num_beams: int
) -> Iterator[tuple[int, ...]]:
    """Most beams of each level that a draft model runs, for trees of each size, by K or fewer."""
    for nodes in sizes:
        widths = [split_nodes(nodes, trie, k)[:-1] for k in range(1, num_beams + 1)]
        yield tuple(map(max, zip(*widths, strict=True)))


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
