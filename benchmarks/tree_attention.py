"""Plain beam search with and without tree attention, in stock transformers.

    OMP_NUM_THREADS=1 python benchmarks/tree_attention.py

The paper's beam search runs all beams as one row over one copy of the prompt, with a mask that
shows each beam the prompt and its own tokens (tree attention). Without it each beam is a row with a
copy of the prompt's keys and values, which is reordered after each level. Both sides here are the
same stock forward of transformers with the same constraint, a random catalog of four levels, and
both run the prompt once. Lists are compared before anything is timed: items, order, and scores
within 1e-4.

The targets are LLaMAs of random weights in the sizes of `--preset`. Ratios are of processor time,
within rounds; a round is one prompt. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table
from transformers import DynamicCache

from recsys.benchmark.environment import environment
from recsys.benchmark.timing import Side, compare_times, summarize, time_interleaved
from recsys.models.checkpoint import build
from recsys.testing import allowed_tokens
from recsys.vocabulary import Vocabulary

LEVELS, CODES, ITEMS = 4, 256, 12_000
BEAMS, PROMPTS = (5, 10, 20, 50), (29, 101)
Found = tuple[list[tuple[int, ...]], list[float]]


class Search:
    """Beam search of one model in one catalog."""

    def __init__(self, model: Any, catalog: NDArray[np.int64], size: int) -> None:
        self.model, self.size = model, size
        self.follow = {k: torch.tensor(v) for k, v in allowed_tokens(catalog).items()}

    @torch.inference_mode()
    def run(self, prompt: torch.Tensor, beams: int, tree: bool) -> Found:
        """The best items and their scores."""
        cache, length = DynamicCache(), len(prompt)
        logits = self.model(prompt[None], past_key_values=cache).logits[0, -1:]
        rows: list[tuple[int, ...]] = [()]
        scores = torch.zeros(1)
        seen = torch.zeros(1, 0, dtype=torch.bool)  # nodes of the tree that each beam has passed
        for level in range(LEVELS):
            allowed = torch.full((len(rows), self.size), -torch.inf)
            for place, row in enumerate(rows):
                allowed[place, self.follow[row]] = 0
            total = (scores[:, None] + logits.log_softmax(-1) + allowed).flatten()
            scores, best = total.topk(min(beams, int(total.isfinite().sum())))
            parents, tokens = best // self.size, best % self.size
            rows = [
                (*rows[parent], token)
                for parent, token in zip(parents.tolist(), tokens.tolist(), strict=True)
            ]
            if level == LEVELS - 1:
                break
            count = len(rows)
            if tree:
                seen = torch.cat([seen[parents], torch.eye(count, dtype=torch.bool)], dim=1)
                visible = torch.cat([torch.ones(count, length, dtype=torch.bool), seen], dim=1)
                mask = torch.zeros(visible.shape).masked_fill(~visible, torch.finfo().min)
                logits = self.model(
                    tokens[None],
                    attention_mask=mask[None, None],
                    position_ids=torch.full((1, count), length + level),
                    past_key_values=cache,
                ).logits[0]
            else:
                cache.reorder_cache(parents)  # of one row at first, then of one for each beam
                logits = self.model(tokens[:, None], past_key_values=cache).logits[:, 0]
        return rows, scores.tolist()


def measure(search: Search, beams: int, length: int, rounds: int) -> dict[str, Any]:
    """The times of both sides for one K and one length."""
    rng = np.random.default_rng([beams, length])
    prompts = torch.from_numpy(rng.integers(2, search.size, (rounds, length)))
    for prompt in prompts[:3]:
        (rows, scores), (others, theirs) = (search.run(prompt, beams, t) for t in (True, False))
        if rows != others or not np.allclose(scores, theirs, atol=1e-4):
            raise SystemExit(f"K = {beams}: the lists differ")
    times = time_interleaved(
        {
            "tree": Side(lambda number: search.run(prompts[number], beams, tree=True)),
            "rows": Side(lambda number: search.run(prompts[number], beams, tree=False)),
        },
        rounds,
    )
    slots = [length + beams * (LEVELS - 1), beams * (length + LEVELS - 1)]
    return {
        "k": beams,
        "prompt": length,
        "tree_ms": summarize([1000 * s for s in times["tree"].cpu]),
        "rows_ms": summarize([1000 * s for s in times["rows"].cpu]),
        "ratio": compare_times(times["rows"].cpu, times["tree"].cpu),
        "tree_slots": slots[0],
        "rows_slots": slots[1],
    }


def main() -> None:
    """Measure all cells, print a table and one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--preset", default="small", help="sizes of the target")
    parser.add_argument("--rounds", type=int, default=15, help="prompts of each cell")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    vocabulary = Vocabulary.from_levels([CODES] * LEVELS)
    model = build(arguments.preset, vocabulary).eval()
    for weight in model.parameters():
        weight.data.mul_(2)  # so peaked that scores rarely tie
    codes = np.random.default_rng(0).integers(0, CODES, (ITEMS, LEVELS))
    search = Search(model, vocabulary.encode(codes), vocabulary.size)
    rows = [measure(search, k, n, arguments.rounds) for n in PROMPTS for k in BEAMS]
    table = Table("K", "prompt tokens", "tree attention, ms", "a row for each beam, ms", "ratio",
                  "cached tokens", "cached tokens, rows")  # fmt: skip
    for row in rows:
        ratio = row["ratio"]
        table.add_row(
            str(row["k"]), str(row["prompt"]), f"{row['tree_ms']['p50']:.1f}",
            f"{row['rows_ms']['p50']:.1f}",
            f"{ratio['p50']:.2f} ({ratio['p25']:.2f} to {ratio['p75']:.2f})",
            str(row["tree_slots"]), str(row["rows_slots"]),
        )  # fmt: skip
    Console(width=130).print(table)
    about = {"benchmark": "tree_attention", "preset": arguments.preset, "rows": rows}
    print(json.dumps({**about, "environment": environment()}))


if __name__ == "__main__":
    sys.exit(main())
