"""What `benchmarks/gpu.py` measures: models, a catalog, users, and ways of decoding for them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import torch
from answers import Answer, PerfectDraft
from huggingface import allowed_tokens, huggingface_beam_search
from workload import Setup, make_shape_workload

from recsys.decoding import (
    Engine,
    Search,
    SearchRequest,
    beam_search,
    grid,
    speculative_beam_search,
)
from recsys.decoding.captured_drafts import DraftGraphs
from recsys.decoding.captured_inputs import DecodeShape
from recsys.decoding.planner import Plan
from recsys.decoding.tree import PromptBatch, TokenTree
from recsys.models.cache import key_value_shape
from recsys.models.graphs import BATCHES, list_sizes
from recsys.models.tree_forward import TreeModel
from recsys.modes import Mode

Row = dict[str, Any]
GRAPHS, DECODE, HUGGING_FACE = "graphs", "decode-graph", "huggingface"
DRAFT, DRAFT_GRAPH = "draft", "draft-graph"
MOST = 32  # requests


class Sizes(NamedTuple):
    """What is run."""

    beams: int = 20  # K
    items: int = 12_000  # of the catalog
    history: int = 50  # items of a prompt, 4 tokens each behind one of a beginning
    nodes: int = 120  # of a draft tree
    rounds: int = 30  # timed decodes of a way


QUICK = Sizes(beams=5, items=300, history=6, nodes=40, rounds=3)


class Bench:
    """One model, the engines that decode with it, and users."""

    def __init__(
        self, model: str, sizes: Sizes, cases: Sequence[tuple[str, int]], dtype: torch.dtype
    ) -> None:
        """Make the models and the catalog for some cases; nothing is captured yet."""
        self.sizes, self.cases, self.most = sizes, cases, max(batch for _, batch in cases)
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        setup = Setup(256, self.device.type, dtype)
        self.work = make_shape_workload(model, setup, items=sizes.items, history=sizes.history)
        self.exact = dtype == torch.float32
        self.eager = TreeModel(self.work.target, own_forward=False)
        model, draft = TreeModel(self.work.target), TreeModel(self.work.draft)
        layers, heads, size = key_value_shape(model.config)
        slot = 2 * layers * heads * size * model.dtype.itemsize
        self.engine = Engine(
            model,
            self.work.trie,
            draft=draft,
            draft_nodes=sizes.nodes,
            prefix_bytes=(self.most + 8) * (self.work.longest + 4) * slot,
            prompt_slots=self.work.longest,
            graphs=True,
        )
        self.perfect = PerfectDraft(draft, self.eager, sizes.nodes, MOST)
        self.drafts: DraftGraphs | None = None

    @cached_property
    def allowed(self) -> dict[tuple[int, ...], list[int]]:
        """The constraint of Hugging Face."""
        return allowed_tokens(self.work.item_tokens)

    def captures(self, ways: Sequence[str]) -> dict[str, Callable[[], Row]]:
        """What some ways need captured, by name, and what captures it."""
        needed: dict[str, Callable[[], Row]] = {}
        if set(ways) - {HUGGING_FACE}:
            needed["passes"] = partial(self._capture, partial(self._passes, ways))
        if DECODE in ways:
            needed[DECODE] = partial(self._capture, self._decodes)
        if DRAFT_GRAPH in ways:
            needed[DRAFT_GRAPH] = partial(self._capture, self._drafts)
        return needed

    def _capture(self, capture: Callable[[], Sequence[Any]]) -> Row:
        """Capture for the batch sizes of the cases alone; what that took."""
        batches = sorted({next(b for b in BATCHES if b >= batch) for _, batch in self.cases})
        start, free = time.perf_counter(), self._free_bytes()
        with patch.object(grid, "BATCHES", tuple(batches)):
            statistics = [graphs.statistics() for graphs in capture()]
        return {
            "seconds": round(time.perf_counter() - start, 1),
            "graphs": [counts.graphs for counts in statistics],
            "device_bytes": free - self._free_bytes(),
        }

    def _passes(self, ways: Sequence[str]) -> Sequence[Any]:
        """Passes of beam search, and of drafts if they are measured."""
        plans = [Plan()]
        if {DRAFT, DRAFT_GRAPH} & set(ways):
            plans.append(Plan(Mode.DRAFT, self.sizes.nodes))
        self.engine.captures.capture_passes(self.most, self.work.longest, self.sizes.beams, plans)
        return self.engine.captures.passes

    def _decodes(self) -> Sequence[Any]:
        """Whole beam searches."""
        self.engine.captures.capture_decodes(self.most, self.work.longest, self.sizes.beams)
        return [self.engine.captures.decodes[Plan()]]

    def _drafts(self) -> Sequence[Any]:
        """The speculative decodes of the cases."""
        self.drafts = DraftGraphs(
            *self.engine.captures.passes, self.perfect, self.engine.trie,
            prompt=self.work.longest, num_beams=self.sizes.beams,
        )  # fmt: skip
        longest = list_sizes(self.work.longest)[-1]
        sizes = {"cold": (longest, False), "kept": (list_sizes(1)[0], True)}
        self.drafts.warm_up(DecodeShape(batch, *sizes[reuse]) for reuse, batch in self.cases)
        return [self.drafts]

    def fallbacks(self) -> int:
        """Passes, and whole decodes, so far for which there was no graph."""
        graphs = [*self.engine.captures.passes, *self.engine.captures.decodes.values(), self.drafts]
        return sum(sum(g.statistics().fallbacks.values()) for g in graphs if g is not None)

    def _free_bytes(self) -> int:
        """Free memory of the GPU; 0 without one."""
        return torch.cuda.mem_get_info(self.device)[0] if self.device.type == "cuda" else 0

    def prompts(self, number: int, batch: int, *, earlier: bool = False) -> list[Any]:
        """The prompts of round `number`, or the same users' one item ago."""
        source = self.work.earlier if earlier else self.work.prompts
        return [source[i] for i in self.work.group(number, batch)]

    def request(self, number: int, batch: int) -> SearchRequest:
        """The same as a request; a user gets no item of three that are excluded."""
        prompts = self.prompts(number, batch)
        exclude = [[(7 * i) % 100, (7 * i + 1) % 100, 100] for i in range(batch)]
        return SearchRequest(prompts, exclude=exclude, prompt_slots=self.work.longest)

    def prepare(self, way: str, reuse: str, number: int, batch: int) -> None:
        """Bring caches and drafts into the state that a round begins with."""
        if way in (DRAFT, DRAFT_GRAPH):
            search = Search.of(self.request(number, batch), self.eager, self.engine.trie)
            self.perfect.find(search, self.sizes.beams)
        self.engine.forget()
        if reuse == "kept":
            known = self.prompts(number, batch, earlier=True)
            for model in filter(None, (self.engine.target, self.engine.draft)):
                prompts = PromptBatch.of(known, model)
                with torch.inference_mode(), TokenTree(model, prompts, 0) as tree:
                    tree.note(tree.forward().amax(-1))
        self.wait()

    def wait(self) -> None:
        """Wait for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


Way = Callable[[Bench, SearchRequest], Answer]


def decode_eagerly(bench: Bench, request: SearchRequest) -> Answer:
    """Beam search without graphs on the modules of transformers, the reference of all ways."""
    return Answer.of(beam_search(bench.eager, request, bench.engine.trie, bench.sizes.beams))


def decode_by_passes(bench: Bench, request: SearchRequest) -> Answer:
    """Beam search on captured passes."""
    target, trie = bench.engine.target, bench.engine.trie
    return Answer.of(beam_search(target, request, trie, bench.sizes.beams))


def decode_as_one_graph(bench: Bench, request: SearchRequest) -> Answer:
    """Beam search in one graph."""
    return Answer.of(bench.engine.decode(request, bench.sizes.beams, mode=Mode.BEAM).beams)


def decode_drafted(bench: Bench, request: SearchRequest) -> Answer:
    """Speculation with a perfect draft."""
    target, trie, beams = bench.engine.target, bench.engine.trie, bench.sizes.beams
    return Answer.of(speculative_beam_search(target, bench.perfect, request, trie, beams))


def decode_draft_as_one_graph(bench: Bench, request: SearchRequest) -> Answer:
    """Speculation with a perfect draft, in one graph."""
    engine, drafts = bench.engine, bench.drafts
    assert drafts is not None
    beams = drafts.run(Search.of(request, engine.target, engine.trie), bench.sizes.beams)
    if beams is None:
        raise RuntimeError(f"no captured decode fits: {drafts.statistics().fallbacks}")
    return Answer.of(beams)


def generate(bench: Bench, request: SearchRequest) -> Answer:
    """Hugging Face; its constraint has no exclusions, so lists may differ in excluded items."""
    prompts = [np.asarray(p) for p in request.prompts]
    beams = bench.sizes.beams
    return Answer(huggingface_beam_search(bench.work.target, prompts, bench.allowed, beams))


WAYS: dict[str, Way] = {
    GRAPHS: decode_by_passes,
    DECODE: decode_as_one_graph,
    DRAFT: decode_drafted,
    DRAFT_GRAPH: decode_draft_as_one_graph,
    HUGGING_FACE: generate,
}
