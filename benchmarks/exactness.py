"""Beam search against Hugging Face's constrained `generate`, over architectures, K and L.

    python benchmarks/exactness.py --seeds 4

Every case has its own random catalog, a batch of prompts of unequal lengths and a float32 model.
Some catalogs have one item, or fewer than K. Items and their order must agree, but for scores
within 1e-5 of each other, and scores must agree within 1e-4. The last line is JSON.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from reporting import Report, Table, begin, publish, read_options

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


@dataclass(frozen=True)
class Options:
    """How much is compared.

    Attributes:
        seeds: models and catalogs of each architecture, K and L.
    """

    seeds: int = 4


def main(argv: Sequence[str] | None = None) -> None:
    """Run all cases, print a table and one JSON line; exit status 1 if any case disagrees."""
    options, run = read_options(Options, __doc__, {"seeds": 1}, argv)
    document = begin("exactness", options, run)
    failures, largest = [], 0.0
    counts = dict.fromkeys(ARCHITECTURES, 0)
    requests = 0
    for architecture, seed in itertools.product(ARCHITECTURES, range(options.seeds)):
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
    rows = [
        [architecture, str(count), str(sum(f[0] == architecture for f in failures))]
        for architecture, count in counts.items()
    ]
    document |= {
        "cases": sum(counts.values()),
        "requests": requests,
        "disagreements": failures,
        "largest_score_gap": largest,
    }
    columns = ("architecture", "cases", "disagree")
    publish(document, Report([Table("Ours against Hugging Face", columns, rows)]), run.out)
    sys.exit(bool(failures))


if __name__ == "__main__":
    main()
