"""How far relaxed verification is from the target's own sampling; two measurements.

    python benchmarks/sampling.py var/bundles/atspeed-beauty var/datasets/atspeed-beauty

1. Small catalogs, all sequences enumerated: total variation between the inclusion probabilities
   of a sample (each over K, so that they add up to 1; seen in many draws) and those of K sequences
   drawn from the target without replacement. Plain sampling has that law: its figure is what so
   many draws cannot tell from 0. A target that drafts for itself is always accepted: its figure is
   the cost of drawing every level afresh.
2. A trained pair on real users: share of the list in common with the target's own sample of the
   same seed, for strict verification (all, unless float32 ties) and relaxed, with as many drafted
   nodes in the first pass (a patch pass of strict adds up to 128, a further round of relaxed drafts
   N a level again); beside it what two samples of different seeds have in common. Intervals are
   95 % over users.

The last line is JSON.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import math
from typing import Any

import numpy as np
import torch
from environment import environment
from rich.console import Console
from rich.table import Table

from recsys.constraint import ItemTrie
from recsys.dataset import Dataset
from recsys.decoding import ModelDrafter, beam_search, speculative_beam_search
from recsys.models.checkpoint import load_model
from recsys.recommender import Recommender
from recsys.testing import random_catalog, random_prompts, tiny_model

SIZES = ((1, 1), (2, 1), (4, 1), (2, 2), (4, 2), (8, 2), (4, 4), (8, 4), (16, 4))
BATCH, USERS_BATCH = 2000, 25


def main() -> None:
    """Measure, print two tables and one JSON line."""
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("bundle")
    arguments.add_argument("dataset")
    arguments.add_argument("--draws", type=int, default=20_000)
    arguments.add_argument("--catalogs", type=int, default=3)
    arguments.add_argument("--users", type=int, default=200)
    arguments.add_argument("--beams", type=int, nargs="+", default=[5, 10, 20])
    args = arguments.parse_args()
    result = {
        "benchmark": "sampling",
        "draws": args.draws,
        "catalogs": args.catalogs,
        "users": args.users,
        "total_variation": total_variation(args.draws, args.catalogs),
        "overlap": overlap(args.bundle, args.dataset, args.users, args.beams),
        **environment(),
    }
    print(json.dumps(result))


def total_variation(draws: int, catalogs: int) -> list[dict[str, Any]]:
    """Distance of inclusion probabilities, mean over catalogs."""
    target = tiny_model("llama-gqa")
    close = copy.deepcopy(target)
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        head = close.lm_head.weight
        head += 0.3 * head.std() * torch.randn_like(head)
    drafts = {"target itself": target, "close": close, "unrelated": tiny_model("llama", seed=9)}
    cases = []
    for seed in range(catalogs):
        rng = np.random.default_rng(seed)
        trie = ItemTrie.build(random_catalog(rng, 14, 3, 12))
        cases.append((trie, random_prompts(rng, 1, 9)[0]))
    laws = {name: [law(m, *case) for case in cases] for name, m in drafts.items()}
    own = laws["target itself"]
    labels = [
        f"{name} ({np.mean([distance(p, q) for p, q in zip(own, law_, strict=True)]):.2f})"
        for name, law_ in laws.items()
    ]
    table = Table(
        "N, K", "plain sampling", *labels, title="Total variation, by draft (its own, of one draw)"
    )
    rows = []
    for drafted, beams in SIZES:
        expected = [inclusion(p, beams) for p in own]
        row: dict[str, Any] = {"drafts": drafted, "beams": beams}
        for name, draft in [("plain", None), *drafts.items()]:
            found = []
            for (trie, prompt), inclusion_ in zip(cases, expected, strict=True):
                counts = np.zeros(trie.num_rows)
                for first in range(0, draws, BATCH):
                    seeds = range(first, first + BATCH)
                    answer = (
                        beam_search(target, [prompt] * BATCH, trie, beams, seeds=seeds)
                        if draft is None
                        else speculative_beam_search(
                            target,
                            draft,
                            [prompt] * BATCH,
                            trie,
                            beams,
                            "relaxed",
                            seeds=seeds,
                            draft_beams=drafted,
                        )
                    )
                    counts += np.bincount(answer.rows.flatten().numpy(), minlength=len(counts))
                found.append(distance(counts / counts.sum(), inclusion_ / beams))
            row[name] = round(float(np.mean(found)), 4)
        table.add_row(f"{drafted}, {beams}", *[f"{v:.3f}" for v in list(row.values())[2:]])
        rows.append(row)
    Console().print(table)
    return rows


def law(model: Any, trie: ItemTrie, prompt: np.ndarray) -> np.ndarray:
    """Probability of every row."""
    found = beam_search(model, [prompt], trie, trie.num_rows, seeds=[0])
    probabilities = np.zeros(trie.num_rows)
    probabilities[found.rows[0].numpy()] = found.scores[0].double().exp().numpy()
    return probabilities


def inclusion(law_: np.ndarray, beams: int) -> np.ndarray:
    """Probability that each row is in a sample of K without replacement, by enumeration."""
    found = np.zeros(len(law_))
    for sample in itertools.permutations(range(len(law_)), beams):
        left, probability = 1.0, 1.0
        for row in sample:
            probability *= law_[row] / left
            left -= law_[row]
        found[list(sample)] += probability
    return found


def distance(p: np.ndarray, q: np.ndarray) -> float:
    """Total variation."""
    return float(np.abs(p - q).sum() / 2)


def overlap(bundle: str, dataset: str, users: int, beams: list[int]) -> list[dict[str, Any]]:
    """Share of the target's own sample that other ways to sample have too."""
    recommender = Recommender.load(bundle)
    draft = load_model(recommender.bundle.draft, dtype=torch.float32).eval()
    target, trie = recommender.model, recommender.trie
    examples = Dataset.load(dataset).examples("test")
    chosen = np.sort(np.random.default_rng(0).permutation(len(examples))[:users])
    prompts = recommender.encoder.encode_all(examples.histories.take(chosen))
    ways = {
        "the target's own, another seed": None,
        "strict, 3 K nodes": ("strict", draft, 1),
        "strict, 6 K nodes": ("strict", draft, 2),
        "strict, 12 K nodes": ("strict", draft, 4),
        "relaxed, target drafts, N = K": ("relaxed", target, 1),
        "relaxed, N = K": ("relaxed", draft, 1),
        "relaxed, N = 2 K": ("relaxed", draft, 2),
        "relaxed, N = 4 K": ("relaxed", draft, 4),
    }
    title = "Overlap with the target's own sample (target passes)"
    table = Table("sampling", *[f"K={k}" for k in beams], title=title)
    rows = []
    for name, way in ways.items():
        cells = []
        for k in beams:
            shares, passes = [], []
            for start in range(0, users, USERS_BATCH):
                group = prompts[start : start + USERS_BATCH]
                seeds = range(start, start + len(group))
                own = beam_search(target, group, trie, k, seeds=seeds)
                if way is None:
                    other = beam_search(target, group, trie, k, seeds=[s + users for s in seeds])
                else:
                    verification, drafter, drafts = way
                    nodes = (trie.num_levels - 1) * drafts * k
                    other = speculative_beam_search(
                        target,
                        ModelDrafter(drafter, nodes),
                        group,
                        trie,
                        k,
                        verification,
                        seeds=seeds,
                        draft_beams=drafts * k,
                    )
                same = (own.rows[:, :, None] == other.rows[:, None, :]).any(-1)
                shares += same.double().mean(1).tolist()
                passes += [s.target_passes for s in other.stats]
            error = 1.96 * np.std(shares) / math.sqrt(users)
            cells.append(f"{np.mean(shares):.3f} ± {error:.3f} ({np.mean(passes):.2f})")
            rows.append(
                {
                    "sampling": name,
                    "beams": k,
                    "overlap": round(float(np.mean(shares)), 4),
                    "interval": round(float(error), 4),
                    "passes": round(float(np.mean(passes)), 3),
                }
            )
        table.add_row(name, *cells)
    Console().print(table)
    return rows


if __name__ == "__main__":
    main()
