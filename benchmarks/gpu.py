"""Decoding on a GPU, way by way, against Hugging Face and against the goals below.

    python benchmarks/gpu.py --model 7B --out gpu-7B.jsonl

It needs torch, transformers and, for fused kernels, triton; the package need not be installed.
Models have random weights of a LLaMA shape, in bfloat16 on a GPU. The catalog has 12,000 semantic
IDs (4 levels of 256 codes). A case is a kind of prompts and a batch size: `cold` prompts are new,
and of `kept` ones all but the last item is in the prefix cache. Ways:

- `eager`: beam search without graphs on the modules of transformers (on a CPU, the native
  library), the reference of all answers;
- `huggingface`: `generate` with a constraint, up to 8 requests;
- `graphs`: beam search on captured passes of the own forward, which all ways below but one use;
- `graphs-huggingface-modules`: the same with the modules of transformers;
- `decode-graph`: beam search captured as a whole, one graph for a decode;
- `float8`, `int8`: `graphs` with such weights, and one more pass of the model's own weights, which
  scores the items again (`recsys.models.low_precision`);
- `exhaustive`: speculation without a draft model, on captured passes;
- `draft`: speculation with a perfect draft: a 68M model runs and is timed, but its tree, which
  random weights make useless, is replaced by one that the target found before the clock started;
- `draft-graph`: the same captured as a whole: draft, verification and acceptance are one graph;
- `planned`: what the engine chooses with this draft; its beam searches are whole graphs where
  `decode-graph` is measured, too.

The answers of a way are compared with those of `eager` before it is timed: in float32 they must be
the same; in bfloat16, where rounding depends on the kernel, most items must be in common and scores
close. Of `float8` and `int8` only the scores of the items in common are gated, and `in_common` is
the overlap that they reach. A way that raises or fails this gate has a row that says so, and costs
the others nothing. Each row is written to `--out` at once, as a line of JSON, so whatever ends the
run, what was measured is there. `--quick` runs everything in toy sizes, on a CPU too.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from recsys.benchmark.decode import HF_ROUNDING, ROUNDING, Agreement, Answer, PerfectDraft
from recsys.benchmark.environment import environment
from recsys.benchmark.timing import summarize
from recsys.benchmark.workload import (
    SHAPES,
    Setup,
    Workload,
    make_random_workload,
    make_shape_workload,
)
from recsys.decoding import Engine, Search, SearchRequest, beam_search, speculative_beam_search
from recsys.decoding.captured import DecodeGraphs
from recsys.decoding.captured_drafts import DraftGraphs
from recsys.decoding.captured_inputs import DecodeShape
from recsys.decoding.planner import Plan
from recsys.decoding.tree import PromptBatch, TokenTree
from recsys.models.architecture import Architecture
from recsys.models.cache import key_value_shape
from recsys.models.graphs import list_sizes
from recsys.models.low_precision import Weights
from recsys.models.tree_forward import TreeModel
from recsys.modes import Mode
from recsys.testing import allowed_tokens, huggingface_beam_search
from recsys.vocabulary import Vocabulary

Row = dict[str, Any]
GOALS = {
    ("7B", "cold", 1): {"ms": 9.5},
    ("7B", "kept", 1): {"ms": 6.9},
    ("7B", "cold", 32): {"per_second": 550},
    ("1.1B", "cold", 1): {"ms": 3.5},
    ("1.1B", "kept", 1): {"ms": 2.5},
}
CASES = ("cold:1", "kept:1", "cold:8", "kept:8", "cold:32", "kept:32")
STOCK = "graphs-huggingface-modules"
LOW: tuple[Weights, ...] = ("float8", "int8")
MOST = 32  # requests
HF_MOST = 8  # requests; K beams of each are K rows of its batch
LEAST_IN_COMMON, MOST_GAP = 0.8, 0.5  # of answers in bfloat16
LEAST_ROUNDS = 3
TOP_KERNELS = 20
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

    def __init__(self, model: str, sizes: Sizes, device: str, dtype: torch.dtype) -> None:
        """Make the models and the catalog; nothing is captured yet."""
        self.sizes, self.device = sizes, torch.device(device)
        setup = Setup(256, device, dtype, 0)
        self.work = _toy(setup, sizes) if model == "toy" else _shape(model, setup, sizes)
        self.exact = dtype == torch.float32
        self.eager = self._engine(graphs=False, own=False)
        self.fast = self._engine(graphs=True, own=True)
        self.stock: Engine | None = None  # made if its way is measured
        self.low: dict[str, Engine] = {}  # likewise
        self.allowed = allowed_tokens(self.work.item_tokens)
        self.perfect: PerfectDraft | None = None
        if self.fast.draft is not None:
            self.perfect = PerfectDraft(self.fast.draft, self.eager.target, sizes.nodes, MOST)
        self.drafts: DraftGraphs | None = None

    def _engine(self, *, graphs: bool, own: bool, weights: Weights | None = None) -> Engine:
        """An engine that keeps the prompts of 32 users, with or without the own forward."""
        model = TreeModel(self.work.target, own_forward=own, weights=weights)
        if model.exact is not None:  # not by the native library, for --quick on a CPU
            model.exact = TreeModel(self.work.target, own_forward=own)
        layers, heads, size = key_value_shape(model.config)
        slot = 2 * layers * heads * size * model.dtype.itemsize
        draft = None if weights is not None else self.work.draft
        if draft is not None:
            draft = TreeModel(draft, own_forward=own)
        return Engine(
            model,
            self.work.trie,
            draft=draft,
            draft_nodes=self.sizes.nodes,
            prefix_bytes=40 * (self.work.longest + 4) * slot,
            prompt_slots=self.work.longest,
            graphs=graphs,
        )

    def capture(self, batches: Sequence[int], ways: Sequence[str]) -> Row:
        """Capture the passes of some ways, and measure plans for `planned`; what that took."""
        start, plans = time.perf_counter(), [Plan()]
        if "exhaustive" in ways:
            plans.append(Plan(Mode.EXHAUSTIVE))
        if {"draft", "draft-graph"} & set(ways):
            plans.append(Plan(Mode.DRAFT, self.sizes.nodes))
        self.fast.capture(max(batches), self.work.longest, self.sizes.beams, plans)
        if STOCK in ways:
            self.stock = self._engine(graphs=True, own=False)
            self.stock.capture(max(batches), self.work.longest, self.sizes.beams, [Plan()])
        seconds = [round(time.perf_counter() - start, 1)]
        if "planned" in ways:
            self.fast.warm_up(self.work.prompts[:32], self.sizes.beams, sorted(set(batches)))
            seconds.append(round(time.perf_counter() - start - seconds[0], 1))
        told = [graphs.statistics() for graphs in self.fast.graphs]
        return {
            "seconds": seconds,
            "graphs": [t.graphs for t in told],
            "bytes": [t.bytes for t in told],
        }

    def capture_low(self, way: Weights, batches: Sequence[int]) -> Row:
        """Copy the weights and capture the passes of one kind; what that took."""
        start, free = time.perf_counter(), self._free_bytes()
        engine = self._engine(graphs=True, own=True, weights=way)
        engine.capture(max(batches), self.work.longest, self.sizes.beams, [Plan()])
        self.low[way] = engine
        row: Row = {"weights": way, "seconds": round(time.perf_counter() - start, 1)}
        return row if free is None else {**row, "device_bytes": free - (self._free_bytes() or 0)}

    def capture_decodes(self, cases: Sequence[tuple[str, int]]) -> Row:
        """Capture whole beam searches; what that took, and the memory that is gone on a GPU."""
        batches = [batch for _, batch in cases]

        def capture() -> DecodeGraphs:
            self.fast.capture_decodes(max(batches), self.work.longest, self.sizes.beams)
            return self.fast.decodes[Plan()]

        return self._captured(capture)

    def capture_drafts(self, cases: Sequence[tuple[str, int]]) -> Row:
        """Capture the speculative decodes of some cases, likewise."""
        longest = list_sizes(self.work.longest)[-1]

        def capture() -> DecodeGraphs:
            assert self.perfect is not None
            self.drafts = DraftGraphs(
                *self.fast.graphs, self.perfect, self.fast.trie,
                prompt=self.work.longest, num_beams=self.sizes.beams,
            )  # fmt: skip
            sizes = {"cold": (longest, False), "kept": (list_sizes(1)[0], True)}
            self.drafts.warm_up(DecodeShape(batch, *sizes[reuse]) for reuse, batch in cases)
            return self.drafts

        return self._captured(capture)

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

    def prepare(self, way: str, engine: Engine, reuse: str, number: int, batch: int) -> None:
        """Bring caches and drafts into the state that a round begins with."""
        if way in ("draft", "draft-graph") and self.perfect is not None:
            search = Search.of(self.request(number, batch), self.eager.target, self.eager.trie)
            self.perfect.find(search, self.sizes.beams)
        engine.forget()
        if reuse == "kept":
            known = self.prompts(number, batch, earlier=True)
            for model in (engine.target, engine.draft, engine.target.exact):
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


def decode_low(weights: str, bench: Bench, request: SearchRequest) -> Answer:
    """Beam search on captured passes with weights of low precision, scored again."""
    return Answer.of(bench.low[weights].decode(request, bench.sizes.beams, mode=Mode.BEAM).beams)


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
    "eager": decode_eagerly,
    "graphs": decode_on_graphs,
    STOCK: decode_on_stock_graphs,
    "decode-graph": decode_as_one_graph,
    **{weights: partial(decode_low, weights) for weights in LOW},
    "exhaustive": decode_exhaustively,
    "draft": decode_drafted,
    "draft-graph": decode_draft_as_one_graph,
    "planned": decode_as_planned,
    "huggingface": generate,
}


class Results:
    """A file of JSON lines: each is on disk as soon as it is added.

    Attributes:
        deadline: of `time.monotonic`, after which nothing new begins.
        failures: rows of this kind so far.
    """

    def __init__(self, out: TextIO, budget: float) -> None:
        """Append to an open file, for `budget` seconds from now."""
        self._out, self._budget = out, budget
        self.deadline = time.monotonic() + budget
        self.failures = 0

    def measure(self, work: Callable[[], Row], **about: Any) -> bool:
        """Add the row that `work` returns, or one that says why there is none.

        Returns:
            Whether there is one.

        Raises:
            SystemExit: the device answers nothing any more, as after an illegal address.
        """
        if time.monotonic() > self.deadline:
            reason = f"the budget of {self._budget:g} s is spent"
            self.add(**about, kind="skipped", reason=reason)
            return False
        try:
            self.add(**about, **work())
        except Exception as error:
            self.add(**about, kind="failure", **_failure(error))
            if torch.cuda.is_available():
                self._check_device()
            return False
        return True

    def _check_device(self) -> None:
        try:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
        except RuntimeError as error:
            self.add(kind="end", error=f"the device is lost to this process: {error}"[:2000])
            raise SystemExit(
                "the device is lost to this process; start the command again without the way of "
                "the last failure (--ways)"
            ) from error

    def add(self, **row: Any) -> None:
        """Write a line, and show it."""
        self.failures += row["kind"] == "failure"
        line = json.dumps(row, default=str)
        print(line, file=self._out, flush=True)
        print(line if len(line) < 400 else line[:400] + " ...", flush=True)


class Case:
    """One kind of prompts and batch size: gates, then times, each way."""

    def __init__(self, bench: Bench, reuse: str, batch: int, deadline: float) -> None:
        """Measure until `deadline`, of `time.monotonic`."""
        self.bench, self.reuse, self.batch, self.deadline = bench, reuse, batch, deadline
        self._expected: dict[bool, Answer] = {}

    def measure(self, way: str) -> Row:
        """The row of a way.

        Raises:
            RuntimeError: its answer is not that of `eager`.
        """
        agreement = self._gate(way)
        seconds: list[float] = []
        answers: list[Answer] = []
        fallbacks = self._fallbacks()
        for number in range(self.bench.sizes.rounds):
            if number >= LEAST_ROUNDS and time.monotonic() > self.deadline:
                break
            taken, answer = self.once(way, number)
            seconds.append(taken)
            answers.append(answer)
        ms = summarize([1e3 * s for s in seconds])
        row: Row = {
            "rounds": len(seconds),
            "ms": ms,
            "per_second": round(1e3 * self.batch / ms["p50"], 1),
            "in_common": round(agreement.items, 4),
            "score_gap": float(f"{agreement.gap:.3g}"),
            "eager_passes": self._fallbacks() - fallbacks,
        }
        stats = [s for answer in answers for s in answer.stats]
        if stats:
            row["passes"] = round(float(np.mean([s.target_passes for s in stats])), 2)
            row["padded_tokens"] = round(float(np.mean([s.padded_tokens for s in stats])), 1)
            row["cached_tokens"] = round(float(np.mean([s.cached_tokens for s in stats])), 1)
        if plans := {answer.plan for answer in answers} - {""}:
            row["plans"] = sorted(plans)
        return row

    def once(self, way: str, number: int) -> tuple[float, Answer]:
        """Seconds of one decode, with what it queued on the device, and the answer."""
        bench = self.bench
        bench.prepare(way, self._engine(way), self.reuse, number, self.batch)
        request = self._request(way, number)
        start = time.perf_counter()
        answer = WAYS[way](bench, request)
        bench.wait()
        return time.perf_counter() - start, answer

    def profile(self, way: str) -> Row:
        """Kernels of one decode by time on the device, and the calls that launched them."""
        from torch.profiler import ProfilerActivity, profile

        bench, activities = self.bench, [ProfilerActivity.CPU]
        if bench.device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        bench.prepare(way, self._engine(way), self.reuse, 1, self.batch)
        request = self._request(way, 1)
        with profile(activities=activities) as found:
            WAYS[way](bench, request)
            bench.wait()
        events = found.key_averages()
        spent = {e.key: [e.count, round(_device_us(e), 1)] for e in events}
        longest = sorted(spent, key=lambda key: -spent[key][1])[:TOP_KERNELS]
        calls = {e.key: e.count for e in events if e.key.startswith(("cuda", "cu", "Memcpy"))}
        return {"kernels_count_us": {k: spent[k] for k in longest}, "calls": calls}

    def _gate(self, way: str) -> Agreement:
        """How far the answer of a way agrees with that of `eager`; RuntimeError if too little."""
        theirs = way == "huggingface"
        found = self.once(way, 0)[1]
        agreement = Agreement.of(
            found.rankings, self._reference(theirs).rankings, *(HF_ROUNDING if theirs else ROUNDING)
        )
        if way in LOW:
            good = agreement.gap <= (ROUNDING[0] if self.bench.exact else MOST_GAP)
        elif self.bench.exact:
            good = agreement.requests == 1
        else:
            good = agreement.items >= LEAST_IN_COMMON and agreement.gap <= MOST_GAP
        if not good:
            raise RuntimeError(f"the answer is not that of eager beam search: {agreement}")
        return agreement

    def _reference(self, plain: bool) -> Answer:
        """The answer of eager beam search to the first round's request."""
        if plain not in self._expected:
            self.bench.prepare("eager", self.bench.eager, self.reuse, 0, self.batch)
            request = self._request("huggingface" if plain else "eager", 0)
            self._expected[plain] = decode_eagerly(self.bench, request)
        return self._expected[plain]

    def _request(self, way: str, number: int) -> SearchRequest:
        """Requests with exclusions, but for Hugging Face, whose constraint has none."""
        request = self.bench.request(number, self.batch)
        return replace(request, exclude=None) if way == "huggingface" else request

    def _engine(self, way: str) -> Engine:
        if way in LOW:
            return self.bench.low[way]
        if way == STOCK and self.bench.stock is not None:
            return self.bench.stock
        return self.bench.eager if way in ("eager", "huggingface") else self.bench.fast

    def _fallbacks(self) -> int:
        """Passes, and whole decodes, so far for which there was no graph."""
        engines = [e for e in (self.bench.fast, self.bench.stock) if e is not None]
        engines += self.bench.low.values()
        graphs = [g for e in engines for g in (*e.graphs, e.exact_graphs)]
        graphs += [*self.bench.fast.decodes.values(), self.bench.drafts]
        told = [g.statistics().fallbacks for g in graphs if g is not None]
        return sum(sum(fallbacks.values()) for fallbacks in told)


def _device_us(event: Any) -> float:
    """Microseconds of an event's kernels; on a CPU, of the event itself."""
    return float(event.self_device_time_total or event.self_cpu_time_total)


def goal(model: str, reuse: str, batch: int, row: Row) -> Row:
    """The goal of a case and whether a row meets it; empty without one."""
    wanted = GOALS.get((model, reuse, batch))
    if wanted is None:
        return {}
    fast = row["ms"]["p50"] <= wanted.get("ms", float("inf"))
    return {"goal": wanted, "met": fast and row["per_second"] >= wanted.get("per_second", 0)}


def run(args: argparse.Namespace, results: Results) -> None:
    """Measure everything that was asked for, until the budget is spent."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    quick = args.quick
    dtype = torch.float32 if args.float32 or device == "cpu" else torch.bfloat16
    results.add(
        kind="begin", models=args.model, cases=args.cases, ways=args.ways, quick=quick,
        device=device, dtype=str(dtype), environment=environment(), triton=_triton(),
    )  # fmt: skip
    for model in args.model:
        about = {"model": model}
        try:
            bench = Bench(model, QUICK if quick else Sizes(), device, dtype)
        except Exception as error:
            results.add(kind="failure", **about, **_failure(error))
            continue
        for name, capture in captures(bench, args).items():
            results.measure(partial(_row, "capture", capture), **about, way=name)
        for reuse, batch in args.cases:
            case = Case(bench, reuse, batch, results.deadline)
            for way in args.ways:
                if way == "huggingface" and batch > HF_MOST:
                    continue
                place = {**about, "case": reuse, "batch": batch, "way": way}
                measured = partial(_row, "row", partial(measure_way, case, way, model))
                if results.measure(measured, **place) and args.profile:
                    results.measure(partial(_row, "profile", partial(case.profile, way)), **place)
        del bench, case
        if device == "cuda":
            results.add(kind="memory", **about, peak_bytes=torch.cuda.max_memory_allocated())
            torch.cuda.empty_cache()
    results.add(kind="end", seconds_left=round(results.deadline - time.monotonic(), 1))


def captures(bench: Bench, args: argparse.Namespace) -> dict[str, Callable[[], Row]]:
    """What is captured before the cases, by name, and what captures it."""
    batches = [batch for _, batch in args.cases]
    wanted: dict[str, Callable[[], Row]] = {}
    if set(args.ways) - {"eager", "huggingface", *LOW}:
        wanted["capture"] = partial(bench.capture, batches, args.ways)
    if "decode-graph" in args.ways:
        wanted["capture of decode-graph"] = partial(bench.capture_decodes, args.cases)
    if "draft-graph" in args.ways:
        wanted["capture of draft-graph"] = partial(bench.capture_drafts, args.cases)
    for low in (way for way in LOW if way in args.ways):
        wanted[f"capture of {low}"] = partial(bench.capture_low, low, batches)
    return wanted


def measure_way(case: Case, way: str, model: str) -> Row:
    """The row of a way, with the goal of its case."""
    row = case.measure(way)
    return {**goal(model, case.reuse, case.batch, row), **row}


def _row(kind: str, work: Callable[[], Row]) -> Row:
    return {"kind": kind, **work()}


def _failure(error: Exception) -> Row:
    """An error and where it was raised."""
    places = traceback.extract_tb(error.__traceback__)[-4:]
    return {
        "error": f"{type(error).__name__}: {error}"[:2000],
        "at": [f"{Path(p.filename).name}:{p.lineno}" for p in places],
    }


def _triton() -> str | None:
    try:
        import triton
    except ImportError:
        return None
    return str(triton.__version__)


def _case(text: str) -> tuple[str, int]:
    """`cold:8` as ("cold", 8)."""
    reuse, _, batch = text.partition(":")
    if reuse not in ("cold", "kept") or not batch.isdigit() or not int(batch):
        raise argparse.ArgumentTypeError(f"{text!r}: want cold:B or kept:B, such as cold:8")
    if int(batch) > MOST:
        raise argparse.ArgumentTypeError(f"{text!r}: want at most {MOST} requests")
    return reuse, int(batch)


def _budget(text: str) -> float:
    """A number of seconds."""
    seconds = float(text)
    if not 0 <= seconds < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r}: want a number of seconds")
    return seconds


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The options; --quick changes what is run by default."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    models = (*(s for s in SHAPES if s.endswith("B")), "toy")
    parser.add_argument("--model", nargs="+", choices=models, help="shapes (1.1B 7B)")
    parser.add_argument("--cases", nargs="+", type=_case, help=f"({' '.join(CASES)})")
    parser.add_argument("--ways", nargs="+", choices=WAYS, help="(all; no float8 with --float32)")
    parser.add_argument("--profile", action="store_true", help="also profile one decode of each")
    parser.add_argument(
        "--budget", type=_budget, default=480, help="seconds, after which nothing new begins (480)"
    )
    parser.add_argument("--float32", action="store_true", help="float32 on a GPU: exact answers")
    parser.add_argument("--quick", action="store_true", help="toy sizes, in seconds, on a CPU too")
    parser.add_argument("--out", type=Path, default=Path("gpu.jsonl"), help="file to append to")
    args = parser.parse_args(arguments)
    left_out = {"float8"} if args.float32 else set()  # a GPU has no float8 for such models
    args.ways = args.ways or [way for way in WAYS if way not in left_out]
    args.model = args.model or (["toy"] if args.quick else ["1.1B", "7B"])
    quick = ("cold:1", "kept:1", "cold:3", "kept:3")
    args.cases = args.cases or [_case(c) for c in (quick if args.quick else CASES)]
    return args


def main() -> None:
    """Measure and write."""
    args = parse()
    if not args.quick and not torch.cuda.is_available():
        raise SystemExit("no CUDA device; --quick runs toy sizes on a CPU")
    try:
        out = args.out.open("a", encoding="utf-8")
    except OSError as error:
        reason = f"--out {args.out}: {error.strerror}; name a file that can be written"
        raise SystemExit(reason) from error
    with out:
        results = Results(out, args.budget)
        run(args, results)
    if results.failures:
        raise SystemExit(f"{results.failures} rows of {args.out} have the kind failure")


if __name__ == "__main__":
    main()
