"""Decoding on a GPU: Hugging Face, beam search and one-pass decoding, eager and with CUDA graphs.

    python benchmarks/gpu.py

Targets of LLaMA shapes (1.1B, 7B) with random weights in bfloat16, and a draft of 68M. A catalog
of 12,000 semantic IDs (4 levels of 256), prompts of 200 tokens, K = 20, trees of 120 nodes, 1 to 32
requests a batch; K = 10 once more for one request.

- `generate`: Hugging Face with `num_beams` and a dict of prefixes as its constraint.
- `beams`: beam search, eager and with CUDA graphs.
- `one pass`: strict speculative search. The models have random weights, so the draft cannot agree
  with the target. Its model runs and is timed, but its tree is replaced by one that the target
  found before the clock started. The time is that of a perfect draft of this size.
- `history`: all but the last 4 tokens of a prompt are in the prefix cache.
- `draft`: the draft model alone.
- `planned`: what the engine chooses with this draft, whose drafts are never accepted.

The answers of each way are compared with eager beam search before anything is timed: the share of
items in common, and the largest difference of a common item's scores (in bfloat16 rounding depends
on the kernel). Rounds interleave all ways. Two rounds find the shapes to capture. `--quick` runs
everything on a CPU in toy sizes. The last line is JSON.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from recsys.benchmark import workload
from recsys.benchmark.decode import ROUNDING, Agreement, Answer, Ranking
from recsys.benchmark.environment import environment
from recsys.benchmark.report import Report, Table, show
from recsys.benchmark.timing import compare_times, summarize
from recsys.constraint import ItemTrie
from recsys.constraint.transitions import DeviceTrie
from recsys.decoding import (
    Beams,
    Engine,
    ModelDrafter,
    Proposal,
    Search,
    beam_search,
    speculative_beam_search,
)
from recsys.models.architecture import Architecture
from recsys.models.cache import key_value_shape
from recsys.models.graphs import PassGraphs
from recsys.models.prefix_store import PrefixStore
from recsys.models.tree_forward import TreeModel
from recsys.testing import allowed_tokens, huggingface_beam_search
from recsys.vocabulary import Vocabulary

LEVELS, NEW = 4, 4
PATCHES = 3 * (20 + 128)  # slots that strict search reserves behind a tree
MOST_NODES = 400  # of the trees that the planner tries
SHAPES = {
    **workload.SHAPES,
    "toy": Architecture(64, 128, 2, 4, kv_heads=2),
    "toy-draft": Architecture(32, 64, 1, 2),
}


@dataclass(frozen=True)
class Sizes:
    """What is run."""

    targets: tuple[str, ...] = ("1.1B", "7B")
    draft: str = "68M"
    words: int = 32_000  # tokens that are not codes
    items: int = 12_000
    codes: int = 256
    prompt: int = 200
    nodes: int = 120
    # batches by K
    cases: tuple[tuple[int, int], ...] = ((20, 1), (20, 8), (20, 32), (10, 1))
    rounds: int = 15
    stored_tokens: int = 16_384


QUICK = Sizes(("toy",), "toy-draft", 100, 300, 16, 24, 40, ((5, 1), (5, 2), (3, 1)), rounds=2)


class PerfectDraft:
    """Runs the draft model, then proposes the tree that the target's own search found."""

    def __init__(self, draft: TreeModel, nodes: int) -> None:
        self._draft, self.truth = ModelDrafter(draft, nodes), None

    def propose(self, *args: Any, **options: Any) -> Proposal:
        """See `recsys.decoding.Drafter`."""
        self._draft.propose(*args, **options)
        return self.truth


class Bench:
    """One target, the ways to decode with it, and prompts."""

    def __init__(self, shape: str, sizes: Sizes, draft: TreeModel, device: torch.device) -> None:
        self.sizes, self.device = sizes, device
        self.rng = np.random.default_rng(0)
        vocabulary = vocabulary_of(sizes)
        codes = np.unique(self.rng.integers(0, sizes.codes, (sizes.items, LEVELS)), axis=0)
        catalog = vocabulary.encode(codes)
        self.trie = ItemTrie.build(catalog)
        self.on_device = DeviceTrie.of(self.trie, device)
        self.allowed = allowed_tokens(catalog)
        self.model = build(shape, sizes, device)
        self.eager, self.fast, self.draft = TreeModel(self.model), TreeModel(self.model), draft
        batch = max(batch for _, batch in sizes.cases)
        slots = sizes.prompt + MOST_NODES + PATCHES + 32
        models = (self.fast, draft)
        self.graphs = [PassGraphs.attach(m, batch=batch, slots=slots) for m in models]
        self.stores = [PrefixStore(m.config, m.dtype, m.device, bytes_of(sizes, m)) for m in models]
        self.drafter = PerfectDraft(draft, sizes.nodes)

    def remember(self, histories: bool) -> None:
        """Turn the prefix cache of the models on or off."""
        for model, store in zip((self.fast, self.draft), self.stores, strict=True):
            model.prefixes = store if histories else None

    def prompts(self, batch: int, histories: Any) -> list[Any]:
        """Prompts: the histories, which are known, and new tokens after them."""
        new = self.rng.integers(1, self.sizes.words, (batch, NEW))
        return list(np.concatenate([histories, new], axis=1))

    def truth(self, prompts: list[Any], beams: int) -> Proposal:
        """The tree of a perfect draft: the target drafts for itself."""
        search = Search.of(prompts, self.eager, self.on_device)
        drafter = ModelDrafter(self.eager, self.sizes.nodes)
        return drafter.propose(search.prompts, search.step, beams)

    def drafted(self, prompts: list[Any], beams: int) -> Proposal:
        """A tree of the draft model."""
        search = Search.of(prompts, self.draft, self.on_device)
        return self.drafter.propose(search.prompts, search.step, beams)

    def ways(self, beams: int, engine: Engine) -> dict[str, Callable[[list[Any]], Any]]:
        """Name -> the function that is timed."""

        def plain(model: TreeModel) -> Callable[[list[Any]], Any]:
            return lambda prompts: beam_search(model, prompts, self.on_device, beams)

        def one_pass(prompts: list[Any]) -> Any:
            return speculative_beam_search(self.fast, self.drafter, prompts, self.on_device, beams)

        return {
            "generate": lambda p: huggingface_beam_search(self.model, p, self.allowed, beams),
            "beams, eager": plain(self.eager),
            "beams": plain(self.fast),
            "beams, history": plain(self.fast),
            "one pass": one_pass,
            "one pass, history": one_pass,
            "draft": lambda prompts: self.drafted(prompts, beams),
            "planned": lambda prompts: engine.decode(prompts, beams).beams,
        }

    def once(
        self, way: str, run: Callable[[list[Any]], Any], prompts: list[Any], truth: Proposal | None
    ) -> tuple[float, Any]:
        """Seconds of one decode, including what it queued on the device, and the answer."""
        self.remember("history" in way)
        self.drafter.truth = truth
        self.wait()
        start = time.perf_counter()
        answer = run(prompts)
        self.wait()
        return time.perf_counter() - start, answer

    def wait(self) -> None:
        """Wait for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def fallbacks(self) -> int:
        """Number of passes so far that ran without a graph."""
        return sum(sum(g.statistics().fallbacks.values()) for g in self.graphs)

    def case(self, beams: int, batch: int) -> list[dict[str, Any]]:
        """Capture, compare and time all ways at one K and B."""
        histories = self.rng.integers(1, self.sizes.words, (batch, self.sizes.prompt - NEW))
        for store in self.stores:
            store.clear()
        engine = Engine(self.fast, self.trie, draft=self.draft)
        ways = self.ways(beams, engine)
        prompts = self.prompts(batch, histories)
        truth = self.truth(prompts, beams)
        for round_ in range(3):
            for name, run in ways.items():
                if name == "planned":
                    self.remember(False)
                    engine.warm_up(prompts, beams, (batch,))
                elif name != "generate":
                    self.once(name, run, prompts, truth)
            if round_ == 1:  # a shape that came once in two rounds is rare
                for graphs in self.graphs:
                    graphs.warm_up([s for s, count in graphs.missed.items() if count > 1])
        answers = {}
        for name, run in list(ways.items()):
            try:
                answers[name] = self.once(name, run, prompts, truth)[1]
            except torch.OutOfMemoryError:
                torch.cuda.empty_cache()
                del ways[name]
        times: dict[str, list[float]] = {name: [] for name in ways}
        fallbacks: Counter[str] = Counter()
        for round_ in range(self.sizes.rounds):
            for name, run in ways.items():
                if name == "generate" and round_ >= 3:
                    continue
                prompts = self.prompts(batch, histories)
                truth = self.truth(prompts, beams) if "one pass" in name else None
                before = self.fallbacks()
                times[name].append(self.once(name, run, prompts, truth)[0])
                fallbacks[name] += self.fallbacks() - before
        expected = rankings(answers["beams, eager"])
        rows = []
        for name, spent in times.items():
            row: dict[str, Any] = {
                "beams": beams,
                "batch": batch,
                "way": name,
                "ms": summarize([1e3 * seconds for seconds in spent]),
                "against_beams": compare_times(times["beams"], spent),
                "passes_without_graph": fallbacks[name],
            }
            if name != "draft":
                agreed = Agreement.of(rankings(answers[name]), expected, *ROUNDING)
                row |= {"in_common": round(agreed.items, 4), "score_gap": round(agreed.gap, 5)}
            if isinstance(answers[name], Beams):
                stats = answers[name].stats
                row["passes"] = round(float(np.mean([s.target_passes for s in stats])), 2)
                row["cached_tokens"] = stats[0].cached_tokens
            rows.append(row)
        return rows


def vocabulary_of(sizes: Sizes) -> Vocabulary:
    """Words, then the tokens of the codes."""
    return Vocabulary.from_levels([sizes.codes] * LEVELS, first=sizes.words)


def build(shape: str, sizes: Sizes, device: torch.device) -> Any:
    """A model with random weights."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    setup = workload.Setup(0, str(device), dtype, 0)
    return workload.make_random_model(SHAPES[shape], vocabulary_of(sizes), setup)


def bytes_of(sizes: Sizes, model: TreeModel) -> int:
    """Bytes of the prefix cache of a model."""
    layers, heads, size = key_value_shape(model.config)
    return sizes.stored_tokens * layers * 2 * heads * size * model.dtype.itemsize


def rankings(answer: Beams | list[Ranking]) -> list[Ranking]:
    """(sequence, score) of each request."""
    return answer if isinstance(answer, list) else Answer.of(answer).rankings


def table(rows: list[dict[str, Any]]) -> Table:
    """The rows for a terminal."""
    names = ("target", "K", "B", "way", "ms", "requests/s", "x beams", "passes", "in common", "gap")
    lines = []
    for row in rows:
        ms = row["ms"]
        lines.append(
            [
                row["target"],
                str(row["beams"]),
                str(row["batch"]),
                row["way"],
                f"{ms['p50']:.2f} ({ms['p25']:.2f} to {ms['p75']:.2f})",
                f"{1e3 * row['batch'] / ms['p50']:.0f}",
                f"{row['against_beams']['p50']:.2f}",
                *(str(row.get(name, "")) for name in ("passes", "in_common", "score_gap")),
                str(row["passes_without_graph"]),
            ]
        )
    return Table("Decoding on a GPU", (*names, "no graph"), lines, words=4)


def main() -> None:
    """Measure, print a table and one JSON line."""
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--targets", nargs="+", help="1.1B, 7B; all by default")
    arguments.add_argument("--rounds", type=int)
    arguments.add_argument("--quick", action="store_true", help="toy sizes on a CPU, in seconds")
    arguments.add_argument(
        "--budget", type=float, default=420, help="seconds; no new batch size after"
    )
    args = arguments.parse_args()
    started = time.monotonic()
    if not args.quick and not torch.cuda.is_available():
        raise SystemExit("no CUDA device; --quick runs toy sizes on a CPU")
    device = torch.device("cpu" if args.quick else "cuda")
    sizes = QUICK if args.quick else Sizes()
    sizes = replace(
        sizes,
        targets=tuple(args.targets or sizes.targets),
        rounds=args.rounds or sizes.rounds,
    )
    torch.manual_seed(0)
    rows, skipped, graphs = [], [], {}
    for target in sizes.targets:
        bench = None
        gc.collect()  # a model and its graphs refer to each other
        if device.type == "cuda":
            torch.cuda.empty_cache()
        for beams, batch in sizes.cases:
            if time.monotonic() - started > args.budget:
                skipped.append([target, beams, batch])
                continue
            if bench is None:
                draft = TreeModel(build(sizes.draft, sizes, device))
                bench = Bench(target, sizes, draft, device)
            rows += [{"target": target, **row} for row in bench.case(beams, batch)]
        if bench is not None:
            statistics = [g.statistics() for g in bench.graphs]
            graphs[target] = [
                {"graphs": t.graphs, "bytes": t.bytes, "refused": t.refused} for t in statistics
            ]
    show(Report("GPU", tables=[table(rows)]))
    result = {
        "benchmark": "gpu",
        "quick": args.quick,
        "prompt": sizes.prompt,
        "new_tokens_with_history": NEW,
        "nodes": sizes.nodes,
        "draft": sizes.draft,
        "rounds": sizes.rounds,
        "rows": rows,
        "graphs_of_target_and_draft": graphs,
        "skipped": skipped,
        "seconds": round(time.monotonic() - started, 1),
        **environment(),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
