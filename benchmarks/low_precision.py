"""Weights of low precision on a CPU: overlap of the lists, and time, against float32.

    OMP_NUM_THREADS=1 python benchmarks/low_precision.py --out low_precision.txt

Models have random weights, prompts random tokens, and the catalog four levels of 256 codes, as in
`benchmarks/cpu_engines.py`. Ways:

- `native`: beam search in float32 by the native library, which a CPU uses;
- `products`: the same with products of matrices in bfloat16, where the processor has instructions
  for them (`recsys.native.decoder.multiply_in_bfloat16`); its scores are its own;
- `float32`: beam search on the own forward in torch, of which the following are variants;
- `bfloat16`, `int8`, `float8`: the own forward with such weights; the list is scored again by the
  float32 model, in one more pass (`TreeModel(..., weights=...)`).

Answers are compared before anything is timed. `float32` must have the items of `native`, up to
rounding, and the scores of a list that was scored again must be those of the float32 model. The
overlap is the share of float32's items that are in the list, the mean over prompts; a way may well
have a small one with random weights, whose probabilities are nearly equal. Times are processor
times of one thread, ratios are medians and quartiles over rounds in which every way runs once. The
last line is JSON.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from recsys.benchmark.environment import environment
from recsys.benchmark.timing import Side, compare_times, summarize, time_interleaved
from recsys.constraint import ItemTrie
from recsys.decoding import Beams, Engine, SearchRequest
from recsys.models.checkpoint import build
from recsys.models.tree_forward import TreeModel
from recsys.native.decoder import multiply_in_bfloat16
from recsys.native.library import describe
from recsys.vocabulary import Vocabulary

LEVELS, CODES, ITEMS, PROMPT = 4, 256, 12_000, 100
NATIVE, PRODUCTS, FLOAT32 = "native", "products", "float32"
WAYS = ("bfloat16", "int8", "float8")
TOLERANCE = 1e-3  # of a score of four tokens; models have different orders of sums
SAME = 0.99  # share of the items that `float32` and `native` have in common, ties aside

Row = dict[str, Any]


def overlap(found: Beams, expected: Beams) -> float:
    """Mean share of the expected items that were found."""
    shares = [
        len(set(a) & set(b)) / len(b)
        for a, b in zip(found.rows.tolist(), expected.rows.tolist(), strict=True)
    ]
    return float(np.mean(shares))


def score_gap(found: Beams, exact: Engine, prompts: list[Any]) -> float:
    """Largest difference of a score from that of the float32 model."""
    scores = exact.score(prompts, found.rows.tolist())
    return float((scores - found.scores).abs().max())


def measure(
    engines: dict[str, Engine], prompts: list[list[Any]], beams: int, rounds: int
) -> Iterator[Row]:
    """A row for each way, of one batch size; SystemExit if an answer is wrong."""
    requests = [SearchRequest(batch) for batch in prompts]
    answers = {
        name: [engine.decode(request, beams).beams for request in requests]
        for name, engine in engines.items()
    }
    overlaps, gaps = {}, {}
    for name, found in answers.items():
        pairs = zip(found, answers[NATIVE], strict=True)
        overlaps[name] = float(np.mean([overlap(mine, theirs) for mine, theirs in pairs]))
        gaps[name] = max(
            score_gap(mine, engines[NATIVE], batch)
            for mine, batch in zip(found, prompts, strict=True)
        )
        if name != PRODUCTS and not gaps[name] <= TOLERANCE:
            raise SystemExit(f"{name}: scores differ by {gaps[name]}")
    if overlaps[FLOAT32] < SAME:
        raise SystemExit(f"{FLOAT32}: {overlaps[FLOAT32]:.1%} of the items in common")

    def run(engine: Engine, number: int) -> None:
        engine.decode(requests[number % len(requests)], beams)

    sides = {name: Side(partial(run, engine)) for name, engine in engines.items()}
    times = time_interleaved(sides, rounds)
    for name, taken in times.items():
        yield {
            "way": name,
            "overlap": round(overlaps[name], 4),
            "score_gap": float(f"{gaps[name]:.2g}"),
            "cpu_ms": summarize([1e3 * s for s in taken.cpu]),
            "of_float32": compare_times(taken.cpu, times[FLOAT32].cpu),
            "of_native": compare_times(taken.cpu, times[NATIVE].cpu),
        }


def show(row: Row) -> str:
    """One line of text."""
    ms, own, native = row["cpu_ms"], row["of_float32"], row["of_native"]
    return (
        f"{row['size']:6} B={row['batch']:<3}{row['way']:9}"
        f"overlap {row['overlap']:6.1%}  {ms['p50']:9.2f} ms ({ms['p25']:.2f}-{ms['p75']:.2f})  "
        f"x{own['p50']:.2f} of float32 ({own['p25']:.2f}-{own['p75']:.2f})  "
        f"x{native['p50']:.2f} of native"
    )


def main() -> None:
    """Compare, time, print a line for each way and one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", nargs="+", default=["tiny", "small", "base"])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--beams", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=5, help="timed searches of each way")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--out", type=Path, default=Path(os.devnull), help="file for all lines")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    rng = np.random.default_rng(0)
    vocabulary = Vocabulary.from_levels([CODES] * LEVELS)
    trie = ItemTrie.build(vocabulary.encode(rng.integers(0, CODES, (ITEMS, LEVELS))))
    rows = []
    with args.out.open("w", encoding="utf-8") as out:

        def say(line: str) -> None:
            print(line, flush=True)
            print(line, file=out, flush=True)

        for size in args.sizes:
            model = build(size, vocabulary).eval()
            with torch.no_grad():  # distributions that are peaked, so that scores rarely tie
                for parameter in model.parameters():
                    parameter.mul_(3 if parameter.dim() > 1 else 1)
            rough = copy.deepcopy(model)
            models = {PRODUCTS: TreeModel(rough)} if multiply_in_bfloat16(rough) else {}
            models |= {NATIVE: TreeModel(model), FLOAT32: TreeModel(model, own_forward=True)}
            models |= {way: TreeModel(model, weights=way) for way in args.ways}
            engines = {way: Engine(ready, trie, graphs=False) for way, ready in models.items()}
            for batch in args.batches:
                prompts = [
                    list(rng.integers(2, vocabulary.size - 6, (batch, PROMPT))) for _ in range(2)
                ]
                for row in measure(engines, prompts, args.beams, args.rounds):
                    rows.append({"size": size, "batch": batch, **row})
                    say(show(rows[-1]))
        about = {"benchmark": "low_precision", "beams": args.beams, "prompt": PROMPT}
        say(json.dumps(about | {"rows": rows, "path": describe()} | environment()))


if __name__ == "__main__":
    main()
