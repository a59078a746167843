"""The kernels of a level of the trie against the tensor code: their bits, and their time on a GPU.

    python benchmarks/level_kernel.py --out level-kernel.jsonl

It needs torch, transformers and triton; the package need not be installed. The catalog has 12,000
semantic IDs (4 levels of 256 codes). For each number of requests, of beams and each depth, beams,
logits (random, and rounded so that they tie) and 50 excluded rows are drawn. On a GPU the level is
also captured in a CUDA graph both ways, replayed on new logits and timed. Any difference ends the
run with an error. Without a GPU it needs TRITON_INTERPRET=1 and measures no time.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from recsys.constraint import ItemTrie
from recsys.constraint.restrictions import Excluded
from recsys.constraint.transitions import DeviceTrie
from recsys.decoding.expand import Frontier, Step, TokenLogits
from recsys.kernels import find_kernels
from recsys.transfers import Upload

T = TypeVar("T")
REPLAYS = 200


class TensorStep(Step):
    """A step without kernels."""

    def _kernels(self, frontier: Frontier, logits: TokenLogits, depth: int) -> Any | None:
        return None


def check_same(found: Frontier, expected: Frontier, what: str) -> None:
    """End the run unless two frontiers have the same bits."""
    for name, mine, theirs in zip(Frontier._fields, found, expected, strict=True):
        if not torch.equal(mine, theirs):
            sys.exit(f"{what}: {name} differ: {mine.tolist()} and {theirs.tolist()}")


def make_frontier(
    trie: ItemTrie, rng: np.random.Generator, shape: tuple[int, int], depth: int, device: str
) -> Frontier:
    """(B, W) beams at random states of a depth; W is at most the number of its states."""
    first, last = trie.depth_start[depth : depth + 2]
    beams = min(shape[1], last - first)
    states = np.stack([rng.permutation(last - first)[:beams] for _ in range(shape[0])]) + first
    on_device = torch.from_numpy(np.sort(states)).to(device)
    sums = torch.from_numpy(-rng.random(states.shape, np.float32)).to(device)
    return Frontier(on_device, sums, on_device, on_device, sums, sums[:, :1] - 30)


def captured(run: Callable[[], T]) -> tuple[torch.cuda.CUDAGraph, T]:
    """A graph of a function, and what it writes; the first call compiles the kernels."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = run()
    return graph, found


def microseconds(graph: torch.cuda.CUDAGraph) -> float:
    """Mean time of a replay."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    graph.replay()
    start.record()
    for _ in range(REPLAYS):
        graph.replay()
    end.record()
    end.synchronize()
    return round(start.elapsed_time(end) * 1000 / REPLAYS, 2)


def measure(
    steps: tuple[Step, Step], frontier: Frontier, vocabulary: int, depth: int, width: int
) -> dict[str, Any]:
    """Compare one level, and time it where there is a GPU."""
    trie, device = steps[0].trie, frontier.scores.device
    full = torch.randn((*frontier.states.shape, vocabulary), device=device)
    logits = [TokenLogits.of(full, trie), TokenLogits.of(full.mul(2).round(), trie)]
    for given in logits:
        found, expected = (step.expand(frontier, given, depth, width) for step in steps)
        check_same(found, expected, f"depth {depth}, {width} beams")
    exact = full.double().logsumexp(-1)
    row: dict[str, Any] = {"total_gap": float((logits[0].total - exact).abs().max())}
    if device.type == "cuda":
        fixed = TokenLogits(*(part.clone() for part in logits[0]))
        graphs = [captured(partial(s.expand, frontier, fixed, depth, width)) for s in steps]
        for part, new in zip(fixed, logits[1], strict=True):
            part.copy_(new)
        for graph, _ in graphs:
            graph.replay()
        check_same(graphs[0][1], graphs[1][1], f"replayed: depth {depth}, {width} beams")
        for name, (graph, _) in zip(("kernel_us", "tensor_us"), graphs, strict=True):
            row[name] = microseconds(graph)
        ours, _ = captured(lambda: TokenLogits.of(full, trie))
        theirs, _ = captured(lambda: full.logsumexp(-1))
        row |= {"total_us": microseconds(ours), "torch_total_us": microseconds(theirs)}
    return row


@torch.inference_mode()
def main() -> None:
    """Compare all levels, and write a row each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="small sizes")
    parser.add_argument("--out", type=Path, required=True, help="rows are added to this file")
    args = parser.parse_args()
    device, rng = "cuda" if torch.cuda.is_available() else "cpu", np.random.default_rng(0)
    if find_kernels("recsys.decoding.level_kernel", torch.device(device)) is None:
        sys.exit("no kernels: triton cannot compile here; without a GPU, set TRITON_INTERPRET=1")
    torch.manual_seed(0)
    items, vocabulary = (300, 1100) if args.quick else (12_000, 33_024)
    codes = rng.integers(0, 256, (items, 4)) + 256 * np.arange(4)
    trie = DeviceTrie.of(ItemTrie.build(codes), device)
    shapes = [(1, 5), (3, 20)] if args.quick else [(1, 20), (8, 20), (32, 20), (1, 256), (8, 256)]
    with args.out.open("a") as out:
        for batch, width in shapes:
            upload = Upload(device)
            rows = [rng.integers(0, trie.source.num_rows, 50) for _ in range(batch)]
            excluded = Excluded.of(trie.source, upload, rows)
            upload.send()
            steps = Step(trie, excluded), TensorStep(trie, excluded)
            for depth in range(4):
                frontier = make_frontier(trie.source, rng, (batch, width), depth, device)
                row = measure(steps, frontier, vocabulary, depth, width)
                about = {"device": device, "requests": batch, "beams": width, "depth": depth}
                print(json.dumps(about | row), file=out, flush=True)
                print(json.dumps(about | row))


if __name__ == "__main__":
    main()
