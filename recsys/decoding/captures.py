"""Captures: what is captured of an engine's models, passes and whole decodes by plan."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from recsys.arguments import whole_number
from recsys.constraint import ItemTrie
from recsys.constraint.fixed import FixedTrie
from recsys.constraint.transitions import DeviceTrie
from recsys.decoding.captured import DecodeGraphs
from recsys.decoding.captured_drafts import DraftGraphs
from recsys.decoding.draft import ModelDrafter, split_nodes
from recsys.decoding.grid import Grid
from recsys.decoding.planner import Plan
from recsys.decoding.speculative import PATCH_NODES
from recsys.models.cache import CachePool, whole_blocks
from recsys.models.graphs import PassGraphs
from recsys.models.tree_forward import TreeModel
from recsys.modes import Mode


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
        fallbacks: decodes of captured plans that did not, by reason (`NoGraphError`).
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


class Captures:
    """Captured passes and decodes of one target, and of its draft, over one catalog.

    Attributes:
        passes: captured passes of the target and of the draft model, once there are any.
        decodes: captured decodes by plan; empty until `capture_decodes`.
    """

    def __init__(
        self,
        target: TreeModel,
        draft: TreeModel | None,
        trie: ItemTrie,
        prompt_slots: int = 0,
    ) -> None:
        """Begin with nothing captured; a prompt gets `prompt_slots` cache slots at least."""
        self.passes: list[PassGraphs] = []
        self.decodes: dict[Plan, DecodeGraphs] = {}
        self._target, self._draft, self._trie = target, draft, trie
        self._models = [target, *([] if draft is None else [draft])]
        self._prompt_slots = prompt_slots
        self._catalog: FixedTrie | None = None  # that of the captured decodes
        self._seconds, self._device_bytes = 0.0, 0

    def use(self, trie: ItemTrie) -> None:
        """Be of another catalog; where it has no room, decodes fall back and are counted."""
        self._trie = trie
        if self._catalog is not None:
            self._catalog.use(trie)

    def capture_passes(
        self,
        batch: int,
        prompt: int,
        num_beams: int,
        plans: Sequence[Plan],
        *,
        spare: int = 0,
    ) -> None:
        """Capture every pass that decodes of this size or smaller can take.

        Args:
            batch: most requests.
            prompt: most prompt tokens of a request.
            num_beams: most beams.
            plans: that may be followed.
            spare: further slots of each request, which decodes with candidates need that will be
                captured next (`capture_decodes`).
        """
        trees = [plan.nodes for plan in plans if plan.mode == Mode.DRAFT]
        grid = self._grid(batch, max(self._prompt_slots, prompt), num_beams, self._trie)
        shapes = [grid.of_target(plans)]
        if self._draft is not None and trees:
            shapes.append(set())
            on_device = DeviceTrie.of(self._trie, self._draft.device)
            for widths in _draft_widths(on_device, trees, num_beams):
                shapes[-1] |= grid.of_beams(widths)
        with self._timed():
            for number, own in enumerate(shapes):
                slots = max(shape.view for shape in own) + whole_blocks(spare)
                self._passes(number, batch, slots).warm_up(own)

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
        passes, for which `capture_passes` has graphs. What fits no graph takes the way of before
        (`decodes[plan].statistics`), and so does a decode that is traced. Another catalog is
        copied into the tensors that graphs read; while it has no room there (`FixedTrie`), no graph
        fits. A later capture of passes that needs a larger storage drops the graphs.

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
        prompt = max(self._prompt_slots, prompt)
        with self._timed():
            tokens = min(model.vocabulary_size for model in self._models)
            catalog = FixedTrie(self._trie, self._target.device, tokens=tokens)
            grid = self._grid(batch, prompt, num_beams, catalog.trie.source)
            for plan in plans:
                drafted = plan.mode == Mode.DRAFT and self._draft is not None
                if plan.mode != Mode.BEAM and not (drafted and grid.widths):
                    raise ValueError(
                        f"plans: {plan} cannot be captured as a whole; want beam, or draft with a "
                        "draft model and a catalog of more than one level"
                    )
            extra = max((nodes for _, nodes in candidates), default=0)
            passes = [self._passes(0, batch, grid.most_slots(plans, extra))]
            trees = [plan.nodes for plan in plans if plan.nodes]
            if trees:
                widths = _draft_widths(catalog.trie, trees, num_beams)
                slots = whole_blocks(prompt) + whole_blocks(max(map(sum, widths)))
                passes.append(self._passes(1, batch, slots))
            self.decodes, self._catalog = {}, catalog  # frees the memory of those before
            limits = {"prompt": prompt, "num_beams": num_beams}
            decodes = {plan: self._decodes(plan, passes, catalog, **limits) for plan in plans}
            for plan, graphs in decodes.items():
                models = self._models if plan.mode == Mode.DRAFT else [self._target]
                kept = all(model.prefixes is not None for model in models)
                graphs.warm_up(grid.of_decodes(plan, kept=kept, candidates=candidates))
            self.decodes = decodes

    def statistics(self) -> EngineStatistics:
        """What has been captured, and counts since then."""
        passes = [graphs.statistics() for graphs in self.passes]
        decodes = [graphs.statistics() for graphs in self.decodes.values()]
        return EngineStatistics(
            passes=sum(counts.graphs for counts in passes),
            decodes=sum(counts.graphs for counts in decodes),
            seconds=self._seconds,
            device_bytes=self._device_bytes if self._target.device.type == "cuda" else None,
            replays=sum(counts.replays for counts in decodes),
            patched=sum(counts.patched for counts in decodes),
            fallbacks=dict(sum((Counter(counts.fallbacks) for counts in decodes), Counter())),
            eager_passes=dict(sum((Counter(counts.fallbacks) for counts in passes), Counter())),
        )

    def release(self) -> None:
        """Free all that was captured.

        Captured passes and their model refer to each other, so they would wait for the garbage
        collector.
        """
        self.passes, self.decodes, self._catalog = [], {}, None
        for model in self._models:
            model.find_graph = None
            model.pool = CachePool(model.config, model.dtype, model.device)

    def _decodes(
        self, plan: Plan, passes: Sequence[PassGraphs], catalog: FixedTrie, **limits: int
    ) -> DecodeGraphs:
        """Graphs for the decodes of a plan; nothing is captured yet."""
        if plan.mode == Mode.BEAM:
            return DecodeGraphs(passes[0], catalog, **limits)
        drafter = ModelDrafter(self._draft, plan.nodes)
        return DraftGraphs(passes[0], passes[1], drafter, catalog, **limits)

    def _grid(self, batch: int, prompt: int, num_beams: int, trie: ItemTrie) -> Grid:
        """The shapes of decodes of these sizes."""
        for name, value in {"batch": batch, "prompt": prompt, "num_beams": num_beams}.items():
            whole_number(name, value)
        return Grid(
            batch=batch,
            prompt=prompt,
            widths=tuple(trie.width(depth, num_beams) for depth in range(1, trie.num_levels)),
            patch=trie.width(trie.num_levels, num_beams) + min(PATCH_NODES, trie.num_states),
            first_level=trie.branching[0],
        )

    def _passes(self, number: int, batch: int, slots: int) -> PassGraphs:
        """The captured passes of a model, with room for these sizes."""
        model = self._models[number]
        if len(self.passes) == number:
            self.passes.append(PassGraphs.attach(model, batch=batch, slots=slots))
        elif not self.passes[number].has_room(batch, slots):
            before = self.passes[number].shapes
            self.passes[number] = PassGraphs.attach(model, batch=batch, slots=slots)
            self.passes[number].warm_up(before)
            self.decodes = {}  # they are captured over the storage of before
        return self.passes[number]

    @contextmanager
    def _timed(self) -> Iterator[None]:
        """Add up what captures take: seconds, and memory of the device."""
        start, free = time.perf_counter(), _free_bytes(self._target.device)
        try:
            yield
        finally:
            self._seconds += time.perf_counter() - start
            self._device_bytes += free - _free_bytes(self._target.device)


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
