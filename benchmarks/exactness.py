"""Beam search against Hugging Face's constrained `generate`, over architectures, K and L.

    python benchmarks/exactness.py --seeds 4

Every case has its own random catalog, a batch of prompts of unequal lengths and a float32 model.
Some catalogs have one item, or fewer than K. Items and their order must agree, but for scores
within 1e-5 of each other, and scores must agree within 1e-4. The last line is JSON.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys

import numpy as np
from rich.console import Console
from rich.table import Table

from recsys.benchmark.environment import environment
from recsys.constraint import ItemTrie
from recsys.decoding import beam_search
from recsys.testing import (
    ARCHITECTURES,
    huggingface_beam_search,
    random_catalog,
    random_prompts,
    same_ranking,
    tiny_model,
)

BEAMS, LEVELS = (1, 5, 20, 50), (2, 3, 4, 6)
CATALOGS = (1, 12, 150, 600)


def main() -> None:
    """Run all cases, print a table and one JSON line; exit status 1 if any case disagrees."""
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--seeds", type=int, default=4)
    seeds = arguments.parse_args().seeds
    failures, largest = [], 0.0
    counts = dict.fromkeys(ARCHITECTURES, 0)
    requests = 0
    for architecture, seed in itertools.product(ARCHITECTURES, range(seeds)):
        model = tiny_model(architecture, seed=seed)
        for beams, levels in itertools.product(BEAMS, LEVELS):
            case = (architecture, seed, beams, levels)
            rng = np.random.default_rng([seed, beams, levels])
            items = CATALOGS[(seed + beams + levels) % len(CATALOGS)]
            catalog = random_catalog(rng, items, levels)
            prompts = random_prompts(rng, int(rng.integers(1, 5)), 24)
            found = beam_search(model, prompts, ItemTrie.build(catalog), beams)
            expected = huggingface_beam_search(model, prompts, catalog, beams)
            agrees = True
            for i, theirs in enumerate(expected):
                alive = found.scores[i].isfinite()
                scores = found.scores[i][alive].tolist()
                sequences = [tuple(row) for row in found.tokens[i][alive].tolist()]
                ours = list(zip(sequences, scores, strict=True))
                agrees &= same_ranking(ours, theirs, tolerance=1e-4)
                gaps = [abs(a - b) for a, (_, b) in zip(scores, theirs, strict=False)]
                largest = max(largest, *gaps)
            requests += len(prompts)
            counts[architecture] += 1
            if not agrees:
                failures.append(case)
    table = Table("architecture", "cases", "disagree", title="Ours against Hugging Face generate")
    for architecture, count in counts.items():
        table.add_row(architecture, str(count), str(sum(f[0] == architecture for f in failures)))
    Console().print(table)
    result = {
        "benchmark": "exactness",
        "cases": sum(counts.values()),
        "requests": requests,
        "disagreements": failures,
        "largest_score_gap": largest,
        **environment(),
    }
    print(json.dumps(result))
    sys.exit(bool(failures))


if __name__ == "__main__":
    main()
