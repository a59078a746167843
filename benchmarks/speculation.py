"""Target passes of strict speculative search by drafter, K and nodes, on real users.

    python benchmarks/speculation.py var/bundles/atspeed-beauty var/datasets/atspeed-beauty

Prompts are those of test users. Every answer is compared with plain beam search's before it counts.
Beam search takes one pass for each level. Intervals are 95 % over users. The FLOPs of a node are
those of layers and head, without attention. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from recsys.benchmark.decode import Agreement, Answer
from recsys.benchmark.environment import environment
from recsys.dataset import Dataset
from recsys.decoding import Drafter, ModelDrafter, beam_search, speculative_beam_search
from recsys.models.checkpoint import load_model
from recsys.recommender import Recommender

BATCH = 25


def main() -> None:
    """Measure, print a table and one JSON line."""
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("bundle")
    arguments.add_argument("dataset")
    arguments.add_argument("--users", type=int, default=300)
    arguments.add_argument("--beams", type=int, nargs="+", default=[5, 10, 20, 50])
    arguments.add_argument("--nodes", type=int, nargs="+", default=[128, 256, 400, 800])
    arguments.add_argument("--patch-nodes", type=int, default=256)
    arguments.add_argument("--threads", type=int, default=1)
    args = arguments.parse_args()
    torch.set_num_threads(args.threads)
    recommender = Recommender.load(args.bundle)
    draft = load_model(recommender.bundle.draft, dtype=torch.float32).eval()
    examples = Dataset.load(args.dataset).examples("test")
    chosen = np.random.default_rng(0).permutation(len(examples))[: args.users]
    prompts = recommender.encoder.encode_all(examples.histories.take(np.sort(chosen)))
    drafters = {"none (two-pass exhaustion)": None}
    drafters |= {f"draft, {n} nodes": ModelDrafter(draft, n) for n in args.nodes}
    rows = [
        {"drafter": name, **count(recommender, drafter, prompts, beams, args.patch_nodes)}
        for name, drafter in drafters.items()
        for beams in args.beams
    ]
    cost, least = flops_per_node(recommender.model), flops_per_node(draft)
    show(rows, args.beams)
    Console().print(f"FLOPs a node: target {cost:,}, draft {least:,} ({least / cost:.1%})")
    result = {
        "benchmark": "speculation",
        "patch_nodes": args.patch_nodes,
        "target_flops_per_node": cost,
        "draft_flops_per_node": least,
        "users": len(prompts),
        "target_parameters": sum(p.numel() for p in recommender.model.parameters()),
        "draft_parameters": sum(p.numel() for p in draft.parameters()),
        "rows": rows,
        **environment(),
    }
    print(json.dumps(result))


def count(
    recommender: Recommender, drafter: Drafter | None, prompts: list, beams: int, patch_nodes: int
) -> dict[str, float]:
    """Passes and accepted levels of a request, means over users."""
    target, trie = recommender.model, recommender.trie
    stats = []
    for start in range(0, len(prompts), BATCH):
        group = prompts[start : start + BATCH]
        found = speculative_beam_search(
            target, drafter, group, trie, beams, patch_nodes=patch_nodes
        )
        expected = Answer.of(beam_search(target, group, trie, beams)).rankings
        agreement = Agreement.of(Answer.of(found).rankings, expected, 1e-4, 1e-5)
        assert agreement.requests == 1, f"{drafter}, K = {beams}: {agreement}"
        stats += found.stats
    passes = [s.target_passes for s in stats]
    return {
        "beams": beams,
        "passes": round(float(np.mean(passes)), 3),
        "interval": round(1.96 * float(np.std(passes)) / len(passes) ** 0.5, 3),
        "accepted_levels": round(float(np.mean([s.accepted_levels for s in stats])), 3),
    }


def show(rows: list[dict], beams: list[int]) -> None:
    """Print a line for each drafter."""
    table = Table("drafter", *[f"K={k}" for k in beams], title="Target passes a request")
    for start in range(0, len(rows), len(beams)):
        line = rows[start : start + len(beams)]
        cells = [f"{row['passes']:.2f} ± {row['interval']:.2f}" for row in line]
        table.add_row(line[0]["drafter"], *cells)
    Console().print(table)


def flops_per_node(model) -> int:  # noqa: ANN001
    """Two operations for each weight of layers and head."""
    layers = sum(p.numel() for p in model.get_decoder().layers.parameters())
    return 2 * (layers + model.get_output_embeddings().weight.numel())


if __name__ == "__main__":
    main()
