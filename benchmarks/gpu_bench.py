"""What `benchmarks/gpu.py` measures: models, a catalog, users, and ways of decoding for them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from answers import Answer, PerfectDraft
from workload import Setup, Workload, make_random_workload, make_shape_workload

from recsys.decoding import (
    Engine,
    Search,
    SearchRequest,
    beam_search,
    grid,
    speculative_beam_search,
)
from recsys.decoding.captured import DecodeGraphs
from recsys.decoding.captured_drafts import DraftGraphs
from recsys.decoding.captured_inputs import DecodeShape
from recsys.decoding.planner import Plan
from recsys.decoding.tree import PromptBatch, TokenTree
from recsys.models.architecture import Architecture
from recsys.models.cache import key_value_shape
from recsys.models.graphs import BATCHES, list_sizes
from recsys.models.tree_forward import TreeModel
from recsys.modes import Mode
from recsys.testing import allowed_tokens, huggingface_beam_search
from recsys.vocabulary import Vocabulary

Row = dict[str, Any]
EAGER, STOCK, HUGGING_FACE = "eager", "graphs-huggingface-modules", "huggingface"
MOST = 32  # requests
TOY = Architecture(64, 128, 2, 4, kv_heads=2)


@dataclass(frozen=True)
class Sizes:
    """What is run.

    Attributes:
        beams: K.
        items: of the catalog.
        history: items of a prompt, 4 tokens each behind one of a beginning.
        nodes: of a draft tree.
        rounds: timed decodes of a way.
    """

    beams: int = 20
    items: int = 12_000
    history: int = 50
    nodes: int = 120
    rounds: int = 30


QUICK = Sizes(beams=5, items=300, history=6, nodes=40, rounds=3)


class Bench:
    """One model, the engines that decode with it, and users."""

    def __init__(
        self, model: str, sizes: Sizes, cases: Sequence[tuple[str, int]], dtype: torch.dtype
    ) -> None:
        """Make the models and the catalog for some cases; nothing is captured yet."""
        self.sizes, self.cases = sizes, cases
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        setup = Setup(256, self.device.type, dtype, 0)
        self.work = _toy(setup, sizes) if model == "toy" else _shape(model, setup, sizes)
        self.trie = self.work.trie
        self.exact = dtype == torch.float32
        self.eager = self._engine(graphs=False, own=False)
        self.fast = self._engine(graphs=True, own=True)
        self.stock: Engine | None = None  # made if its way is measured
        self.perfect: PerfectDraft | None = None
        if self.fast.draft is not None:
            self.perfect = PerfectDraft(self.fast.draft, self.eager.target, sizes.nodes, MOST)
        self.drafts: DraftGraphs | None = None

    @cached_property
    def allowed(self) -> dict[tuple[int, ...], list[int]]:
        """The constraint of Hugging Face."""
        return allowed_tokens(self.work.item_tokens)

    def _engine(self, *, graphs: bool, own: bool) -> Engine:
        """An engine that keeps the prompts of a batch, with or without the own forward."""
        most = max(batch for _, batch in self.cases)
        model = TreeModel(self.work.target, own_forward=own)
        layers, heads, size = key_value_shape(model.config)
        slot = 2 * layers * heads * size * model.dtype.itemsize
        draft = self.work.draft
        if draft is not None:
            draft = TreeModel(draft, own_forward=own)
        return Engine(
            model,
            self.trie,
            draft=draft,
            draft_nodes=self.sizes.nodes,
            prefix_bytes=(most + 8) * (self.work.longest + 4) * slot,
            prompt_slots=self.work.longest,
            graphs=graphs,
        )

    @contextmanager
    def _sizes_of_cases(self) -> Iterator[int]:
        """Capture for the numbers of requests of the cases alone; the largest of them."""
        batches = {next(b for b in BATCHES if b >= batch) for _, batch in self.cases}
        with patch.object(grid, "BATCHES", tuple(sorted(batches))):
            yield max(batch for _, batch in self.cases)

    def capture(self, ways: Sequence[str]) -> Row:
        """Capture the passes of some ways, and measure plans for `planned`; what that took."""
        with self._sizes_of_cases() as most:
            return self._capture(most, ways)

    def _capture(self, most: int, ways: Sequence[str]) -> Row:
        start, plans = time.perf_counter(), [Plan()]
        if "exhaustive" in ways:
            plans.append(Plan(Mode.EXHAUSTIVE))
        if {"draft", "draft-graph"} & set(ways):
            plans.append(Plan(Mode.DRAFT, self.sizes.nodes))
        self.fast.capture(most, self.work.longest, self.sizes.beams, plans)
        if STOCK in ways:
            self.stock = self._engine(graphs=True, own=False)
            self.stock.capture(most, self.work.longest, self.sizes.beams, [Plan()])
        seconds = [round(time.perf_counter() - start, 1)]
        if "planned" in ways:
            batches = sorted({batch for _, batch in self.cases})
            self.fast.warm_up(self.work.prompts[:MOST], self.sizes.beams, batches)
            seconds.append(round(time.perf_counter() - start - seconds[0], 1))
        told = [graphs.statistics() for graphs in self.fast.graphs]
        return {
            "seconds": seconds,
            "graphs": [t.graphs for t in told],
            "bytes": [t.bytes for t in told],
        }

    def capture_decodes(self) -> Row:
        """Capture whole beam searches; what that took, and the memory that is gone on a GPU."""

        def capture() -> DecodeGraphs:
            with self._sizes_of_cases() as most:
                self.fast.capture_decodes(most, self.work.longest, self.sizes.beams)
            return self.fast.decodes[Plan()]

        return self._captured(capture)

    def capture_drafts(self) -> Row:
        """Capture the speculative decodes of the cases, likewise."""
        longest = list_sizes(self.work.longest)[-1]

        def capture() -> DecodeGraphs:
            assert self.perfect is not None
            self.drafts = DraftGraphs(
                *self.fast.graphs, self.perfect, self.fast.trie,
                prompt=self.work.longest, num_beams=self.sizes.beams,
            )  # fmt: skip
            sizes = {"cold": (longest, False), "kept": (list_sizes(1)[0], True)}
            self.drafts.warm_up(DecodeShape(batch, *sizes[reuse]) for reuse, batch in self.cases)
            return self.drafts

        return self._captured(capture)

    def captures(self, ways: Sequence[str]) -> dict[str, Callable[[], Row]]:
        """What some ways need captured, by name, and what captures it."""
        wanted: dict[str, Callable[[], Row]] = {}
        if set(ways) - {EAGER, HUGGING_FACE}:
            wanted["capture"] = partial(self.capture, ways)
        if "decode-graph" in ways:
            wanted["capture of decode-graph"] = self.capture_decodes
        if "draft-graph" in ways:
            wanted["capture of draft-graph"] = self.capture_drafts
        return wanted

    def engine(self, way: str) -> Engine:
        """The one that decodes."""
        if way == STOCK and self.stock is not None:
            return self.stock
        return self.eager if way in (EAGER, HUGGING_FACE) else self.fast

    def fallbacks(self) -> int:
        """Passes, and whole decodes, so far for which there was no graph."""
        engines = [e for e in (self.fast, self.stock) if e is not None]
        graphs = [g for e in engines for g in e.graphs]
        graphs += [*self.fast.decodes.values(), self.drafts]
        told = [g.statistics().fallbacks for g in graphs if g is not None]
        return sum(sum(fallbacks.values()) for fallbacks in told)

    def _captured(self, capture: Callable[[], DecodeGraphs]) -> Row:
        """What a capture took."""
        start, free = time.perf_counter(), self._free_bytes()
        told = capture().statistics()
        row: Row = {
            "seconds": round(time.perf_counter() - start, 1),
            "decodes": told.graphs,
            "bytes": told.bytes,
        }
        return row if free is None else {**row, "device_bytes": free - (self._free_bytes() or 0)}

    def _free_bytes(self) -> int | None:
        """Free memory of the GPU; None without one."""
        return torch.cuda.mem_get_info(self.device)[0] if self.device.type == "cuda" else None

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
        engine = self.engine(way)
        if way in ("draft", "draft-graph") and self.perfect is not None:
            search = Search.of(self.request(number, batch), self.eager.target, self.trie)
            self.perfect.find(search, self.sizes.beams)
        engine.forget()
        if reuse == "kept":
            known = self.prompts(number, batch, earlier=True)
            for model in (engine.target, engine.draft):
                if model is not None:
                    prompts = PromptBatch.of(known, model)
                    with torch.inference_mode(), TokenTree(model, prompts, 0) as tree:
                        tree.note(tree.forward().amax(-1))
        self.wait()

    def wait(self) -> None:
        """Wait for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def _shape(model: str, setup: Setup, sizes: Sizes) -> Workload:
    return make_shape_workload(model, setup, items=sizes.items, history=sizes.history)


def _toy(setup: Setup, sizes: Sizes) -> Workload:
    vocabulary = Vocabulary.from_levels([16] * 4, first=100)
    shapes = (TOY, replace(TOY, layers=1))
    return make_random_workload(shapes, vocabulary, setup, items=sizes.items, history=sizes.history)


Way = Callable[[Bench, SearchRequest], Answer]


def decode_eagerly(bench: Bench, request: SearchRequest) -> Answer:
    """Beam search without graphs."""
    engine = bench.eager
    return Answer.of(beam_search(engine.target, request, engine.trie, bench.sizes.beams))


def decode_on_graphs(bench: Bench, request: SearchRequest) -> Answer:
    """Beam search on captured passes."""
    engine = bench.fast
    return Answer.of(beam_search(engine.target, request, engine.trie, bench.sizes.beams))


def decode_on_stock_graphs(bench: Bench, request: SearchRequest) -> Answer:
    """Beam search on captured passes of the modules of transformers."""
    engine = bench.stock
    assert engine is not None
    return Answer.of(beam_search(engine.target, request, engine.trie, bench.sizes.beams))


def decode_as_one_graph(bench: Bench, request: SearchRequest) -> Answer:
    """Beam search in one graph."""
    return Answer.of(bench.fast.decode(request, bench.sizes.beams, mode=Mode.BEAM).beams)


def decode_exhaustively(bench: Bench, request: SearchRequest) -> Answer:
    """Speculation without a draft model."""
    target, trie, beams = bench.fast.target, bench.fast.trie, bench.sizes.beams
    return Answer.of(speculative_beam_search(target, None, request, trie, beams))


def decode_drafted(bench: Bench, request: SearchRequest) -> Answer:
    """Speculation with a perfect draft."""
    target, trie, beams = bench.fast.target, bench.fast.trie, bench.sizes.beams
    return Answer.of(speculative_beam_search(target, bench.perfect, request, trie, beams))


def decode_draft_as_one_graph(bench: Bench, request: SearchRequest) -> Answer:
    """Speculation with a perfect draft, in one graph."""
    engine, drafts = bench.fast, bench.drafts
    assert drafts is not None
    found = drafts.run(Search.of(request, engine.target, engine.trie), bench.sizes.beams)
    if found is None:
        raise RuntimeError(f"no captured decode fits: {drafts.statistics().fallbacks}")
    return Answer.of(found)


def decode_as_planned(bench: Bench, request: SearchRequest) -> Answer:
    """What the engine chooses."""
    decoded = bench.fast.decode(request, bench.sizes.beams)
    return Answer.of(decoded.beams, str(decoded.plan))


def generate(bench: Bench, request: SearchRequest) -> Answer:
    """Hugging Face; its constraint has no exclusions, so lists may differ in excluded items."""
    prompts = [np.asarray(p) for p in request.prompts]
    beams = bench.sizes.beams
    return Answer(huggingface_beam_search(bench.work.target, prompts, bench.allowed, beams))


WAYS: dict[str, Way] = {
    EAGER: decode_eagerly,
    "graphs": decode_on_graphs,
    STOCK: decode_on_stock_graphs,
    "decode-graph": decode_as_one_graph,
    "exhaustive": decode_exhaustively,
    "draft": decode_drafted,
    "draft-graph": decode_draft_as_one_graph,
    "planned": decode_as_planned,
    HUGGING_FACE: generate,
}
