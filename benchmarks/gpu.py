"""All that a GPU is for, in one command: Hugging Face, beams and one-pass decoding, with graphs.

    python benchmarks/gpu.py

Targets of LLaMA shapes (1.1B, 7B) with random weights in bfloat16, and a draft of 68M. A catalog
of 12,000 semantic IDs (4 levels of 256), prompts of 200 tokens, K = 20, trees of 120 nodes, 1 to 32
requests a batch; K = 10 once more for one request.

- `generate`: Hugging Face with `num_beams` and a dict of prefixes, built ahead, as its constraint.
- `beams`: ours, eager and on CUDA graphs.
- `one pass`: strict speculative search. Random weights cannot agree, so here the draft model runs
  and is timed, but its tree is exchanged for one that the target's own search found before the
  clock started: what a perfect draft of this size would take. Passes are counted, not assumed.
- `history`: all but the last 4 tokens of a prompt are known from earlier; new ones each time.
- `draft`: the draft model alone.
- `planned`: what the engine chooses with this draft as it is, that is, a useless one.

Every way's answers are compared with the eager beams' before anything is timed: the share of items
in common, and the largest difference of a common item's scores (bfloat16 rounds differently in
kernels of other sizes). Rounds interleave all ways. Shapes to capture are learnt from two rounds of
all ways. `--quick` runs everything on a CPU in toy sizes. The last line is JSON.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import numpy as np
import torch
import transformers
from rich.console import Console
from rich.table import Table

from recsys.benchmark.environment import environment
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
from recsys.models.cache import key_value_shape
from recsys.models.graphs import PassGraphs
from recsys.models.prefix_store import PrefixStore
from recsys.models.tree_forward import TreeModel

LEVELS, NEW = 4, 4
PATCHES = 3 * (20 + 128)  # slots that strict search reserves behind a tree
MOST_NODES = 400  # of the trees that the planner tries
# hidden, intermediate, layers, heads, key and value heads
SHAPES = {
    "68M": (768, 3072, 2, 12, 12),
    "1.1B": (2048, 5632, 22, 32, 4),
    "7B": (4096, 11008, 32, 32, 32),
    "toy": (64, 128, 2, 4, 2),
    "toy-draft": (32, 64, 1, 2, 2),
}
# milliseconds at K = 20 and B = 1, and requests a second at B = 32
GOALS = {
    ("7B", 1, "one pass"): "<= 12 ms",
    ("7B", 1, "one pass, history"): "<= 8 ms",
    ("1.1B", 1, "one pass"): "<= 4.5 ms",
    ("1.1B", 1, "one pass, history"): "<= 3.6 ms",
    ("7B", 32, "beams, history"): ">= 450 /s",
}


@dataclass(frozen=True)
class Sizes:
    """What is run."""

    targets: tuple[str, ...] = ("1.1B", "7B")
    draft: str = "68M"
    words: int = 32_000  # tokens that are no semantic IDs
    items: int = 12_000
    codes: int = 256
    prompt: int = 200
    nodes: int = 120
    # batches by K
    cases: tuple[tuple[int, int], ...] = ((20, 1), (20, 8), (20, 32), (10, 1))
    rounds: int = 15
    stored_tokens: int = 16_384


QUICK = Sizes(("toy",), "toy-draft", 100, 300, 16, 24, 40, ((5, 1), (5, 2), (3, 1)), rounds=2)


def build(shape: str, sizes: Sizes, device: torch.device) -> transformers.LlamaForCausalLM:
    """A model with random weights, made where it stays."""
    hidden, intermediate, layers, heads, kv_heads = SHAPES[shape]
    config = transformers.LlamaConfig(
        vocab_size=sizes.words + LEVELS * sizes.codes,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=2048,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=None,
    )
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    with device:
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    with torch.no_grad():  # distributions as peaked as a trained model's
        model.get_output_embeddings().weight.mul_(256 / hidden**0.5)
    model.generation_config = transformers.GenerationConfig(pad_token_id=0)
    return model.eval()


class PerfectDraft:
    """Runs the draft model, then proposes the tree that the target's own search found."""

    def __init__(self, draft: TreeModel, nodes: int) -> None:
        self._draft, self.truth = ModelDrafter(draft, nodes), None

    def propose(self, *args: Any, **options: Any) -> Proposal:
        """See `recsys.decoding.Drafter`."""
        self._draft.propose(*args, **options)
        return self.truth


class Bench:
    """One target: its ways to decode, and prompts for them."""

    def __init__(self, shape: str, sizes: Sizes, draft: TreeModel, device: torch.device) -> None:
        self.sizes, self.device = sizes, device
        self.rng = np.random.default_rng(0)
        codes = np.unique(self.rng.integers(0, sizes.codes, (sizes.items, LEVELS)), axis=0)
        catalog = codes + sizes.words + sizes.codes * np.arange(LEVELS)
        self.trie = ItemTrie.build(catalog)
        self.on_device = DeviceTrie.of(self.trie, device)
        self.allowed: dict[tuple[int, ...], list[int]] = {}
        for row in catalog.tolist():
            for depth, token in enumerate(row):
                self.allowed.setdefault(tuple(row[:depth]), []).append(token)
        self.allowed = {prefix: sorted(set(tokens)) for prefix, tokens in self.allowed.items()}
        self.model = build(shape, sizes, device)
        self.eager, self.fast, self.draft = TreeModel(self.model), TreeModel(self.model), draft
        batch = max(batch for _, batch in sizes.cases)
        slots = sizes.prompt + MOST_NODES + PATCHES + 32
        models = (self.fast, draft)
        self.graphs = [PassGraphs.attach(m, batch=batch, slots=slots) for m in models]
        self.stores = [PrefixStore(m.config, m.dtype, m.device, bytes_of(sizes, m)) for m in models]
        self.drafter = PerfectDraft(draft, sizes.nodes)

    def remember(self, histories: bool) -> None:
        """Let the models keep prompts, or not."""
        for model, store in zip((self.fast, self.draft), self.stores, strict=True):
            model.prefixes = store if histories else None

    def prompts(self, batch: int, histories: Any) -> list[Any]:
        """Known histories with new tokens behind."""
        new = self.rng.integers(1, self.sizes.words, (batch, NEW))
        return list(np.concatenate([histories, new], axis=1))

    def truth(self, prompts: list[Any], beams: int) -> Proposal:
        """What a perfect draft proposes."""
        search = Search.of(prompts, self.eager, self.on_device)
        drafter = ModelDrafter(self.eager, self.sizes.nodes)
        return drafter.propose(search.prompts, search.step, beams)

    def drafted(self, prompts: list[Any], beams: int) -> Proposal:
        """What the draft model takes its time for."""
        search = Search.of(prompts, self.draft, self.on_device)
        return self.drafter.propose(search.prompts, search.step, beams)

    def generate(self, prompts: list[Any], beams: int) -> list[dict[tuple[int, ...], float]]:
        """Hugging Face."""
        tokens = torch.from_numpy(np.stack(prompts)).to(self.device)
        length = tokens.shape[1]
        with torch.inference_mode():
            found = self.model.generate(
                tokens,
                attention_mask=torch.ones_like(tokens),
                num_beams=beams,
                num_return_sequences=beams,
                max_new_tokens=LEVELS,
                length_penalty=0.0,
                do_sample=False,
                prefix_allowed_tokens_fn=lambda _, s: self.allowed[tuple(s[length:].tolist())],
                return_dict_in_generate=True,
                output_scores=True,
            )
        rows = zip(
            found.sequences[:, length:].tolist(), found.sequences_scores.tolist(), strict=True
        )
        answers = [(tuple(row), score) for row, score in rows]
        return [dict(answers[i : i + beams]) for i in range(0, len(answers), beams)]

    def ways(self, beams: int, engine: Engine) -> dict[str, Callable[[list[Any]], Any]]:
        """What is compared, by name."""

        def plain(model: TreeModel) -> Callable[[list[Any]], Any]:
            return lambda prompts: beam_search(model, prompts, self.on_device, beams)

        def one_pass(prompts: list[Any]) -> Any:
            return speculative_beam_search(self.fast, self.drafter, prompts, self.on_device, beams)

        return {
            "generate": lambda prompts: self.generate(prompts, beams),
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
        """Milliseconds of one decode, to the end of all that it queued; and the answer."""
        self.remember("history" in way)
        self.drafter.truth = truth
        self.wait()
        start = time.perf_counter()
        answer = run(prompts)
        self.wait()
        return (time.perf_counter() - start) * 1e3, answer

    def wait(self) -> None:
        """For the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def fallbacks(self) -> int:
        """Passes so far that were not replayed."""
        return sum(sum(g.statistics().fallbacks.values()) for g in self.graphs)

    def case(self, beams: int, batch: int) -> list[dict[str, Any]]:
        """Everything at one K and B: compare, capture, time."""
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
            if round_ == 1:  # what came once in two rounds will not come often
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
        expected = sequences(answers["beams, eager"])
        rows = []
        for name, spent in times.items():
            answer = answers[name]
            stats = getattr(answer, "stats", None)
            share, gap = None, None
            if name != "draft":
                share, gap = agreement(sequences(answer), expected, beams)
            rows.append(
                {
                    "beams": beams,
                    "batch": batch,
                    "way": name,
                    "ms": [round(x, 3) for x in (min(spent), median(spent), max(spent))],
                    "requests_per_second": round(batch * 1e3 / median(spent), 1),
                    "against_beams": round(
                        median(b / x for b, x in zip(times["beams"], spent, strict=False)), 2
                    ),
                    "passes": None
                    if stats is None
                    else round(float(np.mean([s.target_passes for s in stats])), 2),
                    "cached_tokens": None if stats is None else stats[0].cached_tokens,
                    "in_common": share,
                    "score_gap": gap,
                    "passes_without_graph": fallbacks[name],
                }
            )
        return rows


def bytes_of(sizes: Sizes, model: TreeModel) -> int:
    """Memory for the prompts to keep."""
    layers, heads, size = key_value_shape(model.config)
    return sizes.stored_tokens * layers * 2 * heads * size * model.dtype.itemsize


def sequences(answer: Beams | list[dict[tuple[int, ...], float]]) -> list[Any]:
    """Scores by sequence, one dict a request."""
    if isinstance(answer, list):
        return answer
    pairs = zip(answer.tokens.tolist(), answer.scores.tolist(), strict=True)
    return [dict(zip(map(tuple, tokens), scores, strict=True)) for tokens, scores in pairs]


def agreement(found: list[Any], expected: list[Any], beams: int) -> tuple[float, float]:
    """Share of items in common, and the largest difference of their scores."""
    common = [f.keys() & e.keys() for f, e in zip(found, expected, strict=True)]
    gaps = [
        abs(f[s] - e[s])
        for f, e, shared in zip(found, expected, common, strict=True)
        for s in shared
    ]
    return round(sum(map(len, common)) / (beams * len(common)), 4), round(max(gaps, default=0), 5)


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
    table = Table("target", "K", "B", "way", "ms", "requests/s", "x beams", "passes", "in common")
    for column in ("score gap", "no graph", "goal"):
        table.add_column(column)
    rows, skipped, graphs = [], [], {}
    for target in sizes.targets:
        bench = None
        gc.collect()  # a model and its graphs know each other
        if device.type == "cuda":
            torch.cuda.empty_cache()
        for beams, batch in sizes.cases:
            if time.monotonic() - started > args.budget:
                skipped.append([target, beams, batch])
                continue
            if bench is None:
                draft = TreeModel(build(sizes.draft, sizes, device))
                bench = Bench(target, sizes, draft, device)
            for row in bench.case(beams, batch):
                rows.append({"target": target, **row})
                goal = GOALS.get((target, batch, row["way"]), "") if beams == 20 else ""
                if (beams, row["way"]) == (10, "one pass"):
                    goal = "> 1.5 x"
                table.add_row(
                    target,
                    str(beams),
                    str(batch),
                    row["way"],
                    "{1:.2f} ({0:.2f} to {2:.2f})".format(*row["ms"]),
                    f"{row['requests_per_second']:.0f}",
                    f"{row['against_beams']:.2f}",
                    str(row["passes"] or ""),
                    "" if row["in_common"] is None else "{in_common:.3f}".format(**row),
                    "" if row["in_common"] is None else "{score_gap:.4f}".format(**row),
                    str(row["passes_without_graph"]),
                    goal,
                )
        if bench is not None:
            told = [g.statistics() for g in bench.graphs]
            graphs[target] = [
                {"graphs": t.graphs, "bytes": t.bytes, "refused": t.refused} for t in told
            ]
    Console(width=150).print(table)
    result = {
        "benchmark": "gpu",
        "quick": args.quick,
        "prompt": sizes.prompt,
        "new_tokens_with_history": NEW,
        "nodes": sizes.nodes,
        "draft": sizes.draft,
        "rounds": sizes.rounds,
        "triples": "min, median, max",
        "rows": rows,
        "graphs_of_target_and_draft": graphs,
        "skipped": skipped,
        "seconds": round(time.monotonic() - started, 1),
        **environment(),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
