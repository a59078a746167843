"""Beam search against Hugging Face's constrained `generate`: time and cache slots.

    python benchmarks/beam_search.py --preset small

A random model of a preset's shape, 12,000 items with 4 codes of 256, prompts of 101 tokens, K = 20.
Both sides get the same prompts and must give the same answers before anything is timed. The
constraint of Hugging Face is a dict of prefixes that is built before the clock starts. The last
line is JSON.
"""

from __future__ import annotations

import argparse
import json

import torch
from rich.console import Console
from rich.table import Table

from recsys.benchmark.decode import BEAM, HUGGING_FACE, Options, measure
from recsys.benchmark.environment import environment
from recsys.benchmark.workload import LEVELS, Setup, make_shape_workload


def main() -> None:
    """Measure, print a table and one JSON line."""
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--preset", default="small", help="tiny, small or base")
    arguments.add_argument("--beams", type=int, default=20)
    arguments.add_argument("--history", type=int, default=25, help="items of a prompt")
    arguments.add_argument("--batches", type=int, nargs="+", default=[1, 8])
    arguments.add_argument("--repeats", type=int, default=9)
    arguments.add_argument("--threads", type=int, default=1)
    args = arguments.parse_args()
    torch.set_num_threads(args.threads)
    options = Options(
        beams=(args.beams,), batches=tuple(args.batches), reuse=("cold",), modes=(),
        repeats=args.repeats, hf_repeats=args.repeats,
    )  # fmt: skip
    setup = Setup(args.repeats * 8, "cpu", torch.float32, 0)
    workload = make_shape_workload(args.preset, setup, items=12_000, history=args.history)
    rows = measure(workload, options)["rows"]
    table = Table("B", "", "ms (quartiles)", "Hugging Face / ours", "cache slots")
    for row in rows:
        ms, ratio = row["ms"], row["ws_huggingface"]
        name = {BEAM: "ours", HUGGING_FACE: "Hugging Face"}[row["mode"]]
        times = f"{ms['p50']:.1f} ({ms['p25']:.1f} to {ms['p75']:.1f})"
        table.add_row(
            str(row["batch"]), name, times, f"{ratio['p50']:.1f}", str(round(row["kv_slots"]))
        )
    Console().print(table)
    bound = workload.longest + args.beams * (LEVELS - 1)
    assert all(row["kv_slots"] <= bound for row in rows if row["mode"] == BEAM), bound
    result = {"benchmark": "beam_search", **vars(args), "workload": workload.facts, "rows": rows}
    print(json.dumps({**result, **environment()}))


if __name__ == "__main__":
    main()
