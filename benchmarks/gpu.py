"""Decoding on a GPU, way by way, against Hugging Face.

    python benchmarks/gpu.py --model 7B --out gpu-7B.jsonl

It needs torch, transformers and, for fused kernels, triton; the package need not be installed.
Models have random weights of a LLaMA shape, in bfloat16 on a GPU. The catalog has 12,000 semantic
IDs (4 levels of 256 codes). A case is a kind of prompts and a batch size: `cold` prompts are new,
and of `kept` ones all but the last item is in the prefix cache. Ways:

- `huggingface`: `generate` with a constraint, up to 8 requests;
- `graphs`: beam search on captured passes of the own forward, which all ways below use;
- `decode-graph`: beam search captured as a whole, one graph for a decode;
- `draft`: speculation with a perfect draft: a 68M model runs and is timed, but its tree, which
  random weights make useless, is replaced by one that the target found before the clock started;
- `draft-graph`: the same captured as a whole: draft, verification and acceptance are one graph.

Answers to at least 8 requests, each of which excludes the item that would be its best, are judged
before a way is timed (`gpu_gate.py`), beside those of eager beam search without graphs on the
modules of transformers. A row says whether it passed (`gate`) and which share of items both list
(`in_common`); it is timed if it did not pass, too. A way that raises has a row that says so in
place of this, and costs the others nothing. Each row is written to `--out` at once, as a line of
JSON. `--quick` runs everything in toy sizes, on a CPU too.
"""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property, partial
from importlib.metadata import version
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from answers import HF_ROUNDING, ROUNDING, Agreement, Answer
from gpu_bench import HUGGING_FACE, MOST, QUICK, WAYS, Bench, Row, Sizes, decode_eagerly
from gpu_gate import Ranking, Scorer, find_fault, find_row, judge
from gpu_visit import add_row
from measuring import environment, milliseconds
from workload import SHAPES

from recsys.decoding import SearchRequest

EAGER = "eager"  # beam search without graphs, the reference
CASES = ("cold:1", "kept:1", "cold:8", "kept:8", "cold:32", "kept:32")
QUICK_CASES = ("cold:1", "kept:1", "cold:3", "kept:3")
HF_MOST = 8  # requests that Hugging Face is timed with
JUDGED = 8  # requests, at least, whose answers are judged


class Results:
    """Rows of measurements.

    Attributes:
        failures: rows of this kind so far.
        refused: rows that the gate refused.
    """

    failures = refused = 0

    def __init__(self, out: Path) -> None:
        """Add rows to a file."""
        self.add = partial(add_row, out)

    def measure(self, kind: str, work: Callable[[], Row], **about: Any) -> None:
        """Add the row that `work` returns, or one that says why there is none."""
        try:
            row = {"kind": kind, **work()}
        except Exception as error:
            frames = traceback.extract_tb(error.__traceback__)[-4:]
            row = {
                "kind": "failure",
                "error": f"{type(error).__name__}: {error}"[:2000],
                "at": [f"{Path(frame.filename).name}:{frame.lineno}" for frame in frames],
            }
        self.failures += row["kind"] == "failure"
        self.refused += not row.get("gate", {}).get("passed", True)
        self.add(**about, **row)


class Case:
    """One kind of prompts and batch size: judges, then times, each way."""

    def __init__(self, bench: Bench, reuse: str, batch: int) -> None:
        """Draw the requests that are judged."""
        self.bench, self.reuse, self.batch = bench, reuse, batch
        self._numbers = range(-(-JUDGED // batch))  # rounds whose requests are judged
        self._prompts = [p for number in self._numbers for p in bench.prompts(number, batch)]
        self._nothing: list[list[int]] = [[] for _ in self._prompts]
        self._rows = bench.engine.trie.rows
        self._scorer = Scorer(bench.work.target)

    def measure(self, way: str) -> Row:
        """The row of a way: how it was judged, and its times."""
        return self.check(way) | self._time(way)

    def check(self, way: str) -> Row:
        """How far the answers of a way agree with those of `eager`, and what the gate says."""
        excluded, expected, rounding = self._excluded, self._eager, ROUNDING
        if way == HUGGING_FACE:  # its constraint has no exclusions
            excluded, expected, rounding = self._nothing, self._eager_without, HF_ROUNDING
        lists = self._lists(way, excluded)
        agreement = Agreement.join([Agreement.of(lists, expected, *rounding)])
        judged = zip(lists, expected, excluded, strict=True)
        faults = [find_fault(self._rows, *arguments) for arguments in judged]
        if fault := next(filter(None, faults), None):
            gate: Row = {"passed": False, "error": fault}
        elif self.bench.exact:
            gate = {"passed": agreement.requests == 1}
        else:
            gate = judge(self._scorer.error(self._prompts, lists), self._trusted)
        return {"in_common": agreement.items, "score_gap": agreement.gap, "gate": gate}

    def _lists(self, way: str, excluded: Sequence[Sequence[int]]) -> list[Ranking]:
        """The lists of the requests that are judged, each with its exclusions."""
        lists: list[Ranking] = []
        for number in self._numbers:
            rows = excluded[number * self.batch : (number + 1) * self.batch]
            request = replace(self.bench.request(number, self.batch), exclude=rows)
            lists += self.once(way, number, request)[1].rankings
        return lists

    @cached_property
    def _eager_without(self) -> list[Ranking]:
        """The lists of `eager` without exclusions."""
        return self._lists(EAGER, self._nothing)

    @cached_property
    def _excluded(self) -> list[list[int]]:
        """What judged requests exclude: more than those that are timed, their best item."""
        requests = [self.bench.request(number, self.batch) for number in self._numbers]
        timed = [rows for request in requests for rows in request.exclude or []]
        best = [find_row(self._rows, ranking[0][0]) for ranking in self._eager_without]
        return [sorted({*map(int, rows), row}) for rows, row in zip(timed, best, strict=True)]

    @cached_property
    def _eager(self) -> list[Ranking]:
        """The lists of `eager` with these exclusions."""
        return self._lists(EAGER, self._excluded)

    @cached_property
    def _trusted(self) -> dict[str, float]:
        """Errors of `eager`, and of Hugging Face's modules on the same items."""
        about = self._prompts, self._eager
        return {EAGER: self._scorer.error(*about), HUGGING_FACE: self._scorer.rounding(*about)}

    def _time(self, way: str) -> Row:
        """Times of the rounds, and what was counted."""
        fallbacks = self.bench.fallbacks()
        rounds = [self.once(way, number) for number in range(self.bench.sizes.rounds)]
        ms = milliseconds([seconds for seconds, _ in rounds])
        row: Row = {
            "rounds": len(rounds),
            "ms": ms,
            "per_second": round(1e3 * self.batch / ms["p50"], 1),
            "eager_passes": self.bench.fallbacks() - fallbacks,
        }
        if stats := [s for _, answer in rounds for s in answer.stats]:
            row["passes"] = round(float(np.mean([s.target_passes for s in stats])), 2)
            row["cached_tokens"] = round(float(np.mean([s.cached_tokens for s in stats])), 1)
        return row

    def once(
        self, way: str, number: int, request: SearchRequest | None = None
    ) -> tuple[float, Answer]:
        """Seconds of one decode, with what it queued on the device, and the answer.

        Requests have exclusions, but for Hugging Face, whose constraint has none.
        """
        bench = self.bench
        bench.prepare(way, self.reuse, number, self.batch)
        request = request or bench.request(number, self.batch)
        decode = decode_eagerly if way == EAGER else WAYS[way]
        start = time.perf_counter()
        answer = decode(bench, request)
        bench.wait()
        return time.perf_counter() - start, answer


def run(args: argparse.Namespace, results: Results) -> None:
    """Measure everything that was asked for."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.float32 if args.float32 or device == "cpu" else torch.bfloat16
    results.add(
        kind="begin", models=args.model, cases=args.cases, ways=args.ways, quick=args.quick,
        device=device, dtype=str(dtype), environment=environment(),
        triton=version("triton") if find_spec("triton") else None,
    )  # fmt: skip
    for model, beams, history in product(args.model, args.beams, args.history):
        nodes = (QUICK if args.quick else Sizes()).nodes
        sizes = Sizes(beams, args.items, history, nodes, args.rounds)
        about = {"model": model, "beams": beams, "history": history, "items": args.items}
        measure = partial(_measure, args, sizes, dtype, results, about)
        results.measure("model", measure, **about)
        if device == "cuda":
            torch.cuda.empty_cache()
    results.add(kind="end")


def _measure(
    args: argparse.Namespace, sizes: Sizes, dtype: torch.dtype, results: Results, about: Row
) -> Row:
    """All cases and ways of one model; its own row is the memory that they took on a GPU."""
    bench = Bench(about["model"], sizes, args.cases, dtype)
    for name, capture in bench.captures(args.ways).items():
        results.measure("capture", capture, **about, way=name)
    for reuse, batch in args.cases:
        case = Case(bench, reuse, batch)
        for way in args.ways:
            if way == HUGGING_FACE and batch > HF_MOST:
                continue
            which = {**about, "case": reuse, "batch": batch, "way": way}
            results.measure("row", partial(case.measure, way), **which)
    on_gpu = bench.device.type == "cuda"
    return {"peak_bytes": torch.cuda.max_memory_allocated() if on_gpu else 0}


def _case(text: str) -> tuple[str, int]:
    """`cold:8` as ("cold", 8)."""
    reuse, _, batch = text.partition(":")
    if reuse not in ("cold", "kept") or not batch.isdigit() or not 1 <= int(batch) <= MOST:
        raise argparse.ArgumentTypeError(f"{text!r}: want cold:B or kept:B with B of 1 to {MOST}")
    return reuse, int(batch)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The options; --quick changes what is run by default."""
    quick = "--quick" in arguments
    sizes, cases = (QUICK, QUICK_CASES) if quick else (Sizes(), CASES)
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], allow_abbrev=False,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )  # fmt: skip
    add, models = parser.add_argument, ["tiny"] if quick else ["1.1B", "7B"]
    add("--model", nargs="+", choices=SHAPES, default=models, help="shapes")
    add("--cases", nargs="+", type=_case, default=[*map(_case, cases)], help="prompts:requests")
    add("--ways", nargs="+", choices=WAYS, default=[*WAYS], help="of decoding")
    add("--beams", nargs="+", type=int, default=[sizes.beams], help="K")
    add("--history", nargs="+", type=int, default=[sizes.history], help="items of a prompt")
    add("--items", type=int, default=sizes.items, help="of the catalog")
    add("--rounds", type=int, default=sizes.rounds, help="timed decodes of a way")
    add("--float32", action="store_true", help="float32 on a GPU: exact answers")
    add("--quick", action="store_true", help="toy sizes, in seconds, on a CPU too")
    add("--out", type=Path, default=Path("gpu.jsonl"), help="file to append to")
    return parser.parse_args(arguments)


def main() -> None:
    """Measure and write."""
    args = parse(sys.argv[1:])
    if not args.quick and not torch.cuda.is_available():
        raise SystemExit("no CUDA device; --quick runs toy sizes on a CPU")
    results = Results(args.out)
    run(args, results)
    if results.failures or results.refused:
        raise SystemExit(
            f"{args.out}: {results.failures} rows have the kind failure, and the gate refused "
            f"{results.refused}"
        )


if __name__ == "__main__":
    main()
