"""Our beam search against Hugging Face's constrained `generate`: time and KV memory, in one run.

    python benchmarks/beam_search.py --preset small

A random model of a preset's shape, a catalog of 12,000 semantic IDs (4 levels of 256), prompts
of 100 tokens, K = 20. Both sides get the same prompts and must give the same answers before
anything is timed; timings alternate between the sides, so that a busy machine is busy for both.
Hugging Face's constraint is a dict of prefixes, its quickest form in plain Python, built before the
clock starts. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import time
from statistics import median

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from recsys.benchmark.environment import environment
from recsys.constraint import ItemTrie
from recsys.decoding import beam_search
from recsys.models.checkpoint import build
from recsys.testing import (
    allowed_tokens,
    huggingface_beam_search,
    huggingface_slots,
    same_ranking,
)
from recsys.vocabulary import Vocabulary

ITEMS, LEVELS, CODES = 12_000, 4, 256


def main() -> None:
    """Measure, print a table and one JSON line."""
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--preset", default="small", help="tiny, small or base")
    arguments.add_argument("--beams", type=int, default=20)
    arguments.add_argument("--prompt", type=int, default=100)
    arguments.add_argument("--batches", type=int, nargs="+", default=[1, 8])
    arguments.add_argument("--repeats", type=int, default=9)
    arguments.add_argument("--threads", type=int, default=1)
    args = arguments.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    rng = np.random.default_rng(0)
    vocabulary = Vocabulary.from_levels([CODES] * LEVELS)
    model = build(args.preset, vocabulary).eval()
    with torch.no_grad():  # peaked distributions, so that answers do not hang on rounding
        model.get_output_embeddings().weight.mul_(20)
    codes = np.unique(rng.integers(0, CODES, (ITEMS, LEVELS)), axis=0)
    catalog = vocabulary.encode(codes)
    trie, allowed = ItemTrie.build(catalog), allowed_tokens(catalog)
    table = Table("B", "ours, ms", "Hugging Face, ms", "ratio", "KV slots", "Hugging Face's")
    rows = []
    for batch in args.batches:
        prompts = [rng.integers(2, vocabulary.size - 8, args.prompt) for _ in range(batch)]
        found = beam_search(model, prompts, trie, args.beams)
        theirs = huggingface_beam_search(model, prompts, allowed, args.beams)
        for i in range(batch):
            ours = [
                (tuple(t), s)
                for t, s in zip(found.tokens[i].tolist(), found.scores[i].tolist(), strict=True)
            ]
            assert same_ranking(ours, theirs[i], tolerance=1e-3, tie=1e-4), f"request {i} differs"
        fast, slow = [], []
        for _ in range(args.repeats):
            start = time.perf_counter()
            beam_search(model, prompts, trie, args.beams)
            middle = time.perf_counter()
            huggingface_beam_search(model, prompts, allowed, args.beams)
            fast.append((middle - start) * 1e3)
            slow.append((time.perf_counter() - middle) * 1e3)
        ratios = sorted(s / f for s, f in zip(slow, fast, strict=True))
        slots = found.stats[0].kv_slots
        bound = args.prompt + args.beams * (LEVELS - 1)
        assert slots <= bound, f"{slots} slots, more than T + K (L - 1) = {bound}"
        reference = huggingface_slots(args.prompt, LEVELS, args.beams)
        row = {
            "batch": batch,
            "ours_ms": [round(x, 2) for x in (min(fast), median(fast), max(fast))],
            "huggingface_ms": [round(x, 1) for x in (min(slow), median(slow), max(slow))],
            "ratio": [round(x, 1) for x in (ratios[0], median(ratios), ratios[-1])],
            "kv_slots": slots,
            "huggingface_kv_slots": reference,
        }
        rows.append(row)
        table.add_row(
            str(batch),
            "{1:.1f} ({0:.1f} to {2:.1f})".format(*row["ours_ms"]),
            "{1:.0f} ({0:.0f} to {2:.0f})".format(*row["huggingface_ms"]),
            "{1:.1f} ({0:.1f} to {2:.1f})".format(*row["ratio"]),
            str(slots),
            str(reference),
        )
    Console().print(table)
    result = {
        "benchmark": "beam_search",
        "preset": args.preset,
        "parameters": sum(p.numel() for p in model.parameters()),
        "beams": args.beams,
        "prompt": args.prompt,
        "repeats": args.repeats,
        "triples": "min, median, max",
        "rows": rows,
        **environment(),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
