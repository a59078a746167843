"""Beam search against Hugging Face's constrained `generate`, over architectures, K and L.

    python tests/stress/huggingface_exactness.py --seeds 4

Every case has its own random catalog, a batch of prompts of unequal lengths and a float32 model.
Some catalogs have one item, or fewer than K. Items and their order must agree, but for scores
within 1e-5 of each other, and scores must agree within 1e-4.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys

import numpy as np
from harness import environment
from huggingface import huggingface_beam_search, same_ranking
from oracles import ARCHITECTURES, random_catalog, random_prompts, tiny_model

from recsys.constraint import ItemTrie
from recsys.decoding import beam_search

BEAMS, LEVELS = (1, 5, 20, 50), (2, 3, 4, 6)
CATALOGS = (1, 12, 150, 600)


def main() -> None:
    """Run all cases and print what was found as JSON; exit status 1 if any case disagrees."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=4, help="of each architecture, K and L")
    seeds = parser.parse_args().seeds
    failures, largest, cases, requests = [], 0.0, 0, 0
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
            cases += 1
            if not agrees:
                failures.append(case)
    found = {"cases": cases, "requests": requests, "disagreements": failures}
    print(json.dumps({**found, "largest_score_gap": largest, **environment()}))
    sys.exit(bool(failures))


if __name__ == "__main__":
    main()
