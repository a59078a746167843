"""Decoding on a GPU, way by way, against Hugging Face and against the goals below.

    python benchmarks/gpu.py --model 7B --out gpu-7B.jsonl

It needs torch, transformers and, for fused kernels, triton; the package need not be installed.
Models have random weights of a LLaMA shape, in bfloat16 on a GPU. The catalog has 12,000 semantic
IDs (4 levels of 256 codes). A case is a kind of prompts and a batch size: `cold` prompts are new,
and of `kept` ones all but the last item is in the prefix cache. Ways:

- `eager`: beam search without graphs on the modules of transformers (on a CPU, the native
  library);
- `huggingface`: `generate` with a constraint, up to 8 requests;
- `graphs`: beam search on captured passes of the own forward, which all ways below but one use;
- `graphs-huggingface-modules`: the same with the modules of transformers;
- `decode-graph`: beam search captured as a whole, one graph for a decode;
- `exhaustive`: speculation without a draft model, on captured passes;
- `draft`: speculation with a perfect draft: a 68M model runs and is timed, but its tree, which
  random weights make useless, is replaced by one that the target found before the clock started;
- `draft-graph`: the same captured as a whole: draft, verification and acceptance are one graph;
- `planned`: what the engine chooses with this draft; its beam searches are whole graphs where
  `decode-graph` is measured, too.

Answers to at least 8 requests, each of which excludes the item that would be its best, are checked
before a way is timed (`gpu_gate.py`). A list has distinct items of the catalog, none excluded, by
descending scores. In float32 it must be that of `eager`. In bfloat16, where rounding depends on the
kernel, scores must be about as near to float32 as those of `eager` or of Hugging Face, and no item
may be missing that float32 puts far above another; the share of items that `eager` lists, too, is
only reported (`in_common`). A row says whether it passed (`gate`), and is timed if it did not, too.
A way that raises has a row that says so, and costs the others nothing. Each row is written to
`--out` at once, as a line of JSON, so whatever ends the run, what was measured is there.
`--quick` runs everything in toy sizes, on a CPU too.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from answers import HF_ROUNDING, ROUNDING, Agreement, Answer
from gpu_bench import EAGER, HUGGING_FACE, MOST, QUICK, WAYS, Bench, Row, Sizes
from gpu_gate import Scorer, allowance, find_fault, find_row, judge
from measuring import environment, summarize
from workload import SHAPES

from recsys.decoding import SearchRequest

# Of beam searches and of drafts that are right; for `Sizes()` alone.
GOALS = {
    ("7B", "cold", 1): {"beams_ms": 19, "drafted_ms": 10.5},
    ("7B", "kept", 1): {"beams_ms": 18.5, "drafted_ms": 7.5},
    ("7B", "cold", 32): {"per_second": 180},
    ("1.1B", "cold", 1): {"beams_ms": 6.5, "drafted_ms": 5},
    ("1.1B", "kept", 1): {"beams_ms": 6, "drafted_ms": 4},
}
BEAMS, DRAFTED = ("graphs", "decode-graph"), ("draft", "draft-graph")
CASES = ("cold:1", "kept:1", "cold:8", "kept:8", "cold:32", "kept:32")
HF_MOST = 8  # requests that Hugging Face is timed with
HF_ROWS = 160  # beams of all requests that it is a reference for
HF_ITEMS = 100_000  # of catalogs whose constraint in plain Python is made in seconds
GATED = 8  # requests, at least, whose answers are compared
LEAST_ROUNDS = 3
TOP_KERNELS = 20


class Results:
    """A file of JSON lines: each is on disk as soon as it is added.

    Attributes:
        deadline: of `time.monotonic`, after which nothing new begins.
        failures: rows of this kind so far.
        refused: rows that the gate refused.
    """

    def __init__(self, out: TextIO, budget: float) -> None:
        """Append to an open file, for `budget` seconds from now."""
        self._out, self._budget = out, budget
        self.deadline = time.monotonic() + budget
        self.failures = self.refused = 0

    def measure(self, work: Callable[[], Row], **about: Any) -> bool:
        """Add the row that `work` returns, or one that says why there is none.

        Returns:
            Whether there is one, and the way did not raise.

        Raises:
            SystemExit: the device answers nothing any more, as after an illegal address.
        """
        if time.monotonic() > self.deadline:
            reason = f"the budget of {self._budget:g} s is spent"
            self.add(**about, kind="skipped", reason=reason)
            return False
        try:
            row = work()
        except Exception as error:
            row = {"kind": "failure", **_failure(error)}
        self.add(**about, **row)
        failed: bool = row["kind"] == "failure"
        if failed and torch.cuda.is_available():
            self._check_device()
        return not failed

    def _check_device(self) -> None:
        try:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
        except RuntimeError as error:
            self.add(kind="end", error=f"the device is lost to this process: {error}"[:2000])
            raise SystemExit(
                "the device is lost to this process; start the command again without the way of "
                "the last failure (--ways)"
            ) from error

    def add(self, **row: Any) -> None:
        """Write a line, and show it."""
        self.failures += row["kind"] == "failure"
        self.refused += not row.get("gate", {}).get("passed", True)
        line = json.dumps(row, default=str)
        print(line, file=self._out, flush=True)
        print(line if len(line) < 400 else line[:400] + " ...", flush=True)


class Case:
    """One kind of prompts and batch size: checks, then times, each way."""

    def __init__(self, bench: Bench, reuse: str, batch: int, deadline: float) -> None:
        """Measure until `deadline`, of `time.monotonic`."""
        self.bench, self.reuse, self.batch, self.deadline = bench, reuse, batch, deadline
        self._scorer = Scorer(bench.work.target, bench.trie.rows, bench.sizes.beams)
        self._expected: dict[bool, list[Answer]] = {}
        self._trusted: dict[str, float] = {}

    def measure(self, way: str) -> Row:
        """The row of a way; its kind is `failure` if it raised in a later round than the first."""
        try:
            row = self.check(way)
        except Exception as error:
            row = {"gate": {"passed": False, **_failure(error)}}
        return {"kind": "row", **row, **self._time(way)}

    def check(self, way: str) -> Row:
        """How far the answers of a way agree with those of `eager`, and what the gate says."""
        theirs = way == HUGGING_FACE
        found, expected = self._answers(way, without=theirs), self._eager(without=theirs)
        rounding = HF_ROUNDING if theirs else ROUNDING
        pairs = [(f.rankings, e.rankings) for f, e in zip(found, expected, strict=True)]
        agreement = Agreement.join([Agreement.of(*pair, *rounding) for pair in pairs])
        excluded = [
            [[]] * self.batch if theirs else self._exclude(number) for number in range(len(pairs))
        ]
        if faults := self._faults(pairs, excluded):
            gate: Row = {"passed": False, "error": faults[0]}
        elif self.bench.exact:
            gate = {"passed": agreement.requests == 1}
        else:
            gate = judge(self._error(found), self._shortfall(found, excluded), self._trust())
        return {"in_common": agreement.items, "score_gap": agreement.gap, "gate": gate}

    def _faults(self, pairs: Sequence[tuple[Any, Any]], excluded: Sequence[Any]) -> list[str]:
        """What is wrong with lists, whatever their scores are."""
        lists = [
            one
            for (mine, theirs), rows in zip(pairs, excluded, strict=True)
            for one in zip(mine, theirs, rows, strict=True)
        ]
        found = [find_fault(self.bench.trie.rows, *one) for one in lists]
        return [fault for fault in found if fault]

    def _exclude(self, number: int) -> list[list[int]]:
        """What checked requests exclude: more than those that are timed, their best item."""
        answer = self._eager(without=True)[number]
        best = [find_row(self.bench.trie.rows, ranking[0][0]) for ranking in answer.rankings]
        excluded = self.bench.request(number, self.batch).exclude or []
        return [sorted({*map(int, rows), row}) for rows, row in zip(excluded, best, strict=True)]

    def _time(self, way: str) -> Row:
        """Times of the rounds, and what was counted."""
        seconds: list[float] = []
        answers: list[Answer] = []
        failure: Row = {}
        fallbacks = self.bench.fallbacks()
        for number in range(self.bench.sizes.rounds):
            if number >= LEAST_ROUNDS and time.monotonic() > self.deadline:
                break
            try:
                taken, answer = self.once(way, number)
            except Exception as error:
                if not seconds:
                    raise
                failure = {"kind": "failure", **_failure(error)}
                break
            seconds.append(taken)
            answers.append(answer)
        ms = summarize([1e3 * s for s in seconds])
        row: Row = {
            "rounds": len(seconds),
            "ms": ms,
            "per_second": round(1e3 * self.batch / ms["p50"], 1),
            "eager_passes": self.bench.fallbacks() - fallbacks,
        }
        stats = [s for answer in answers for s in answer.stats]
        if stats:
            row["passes"] = round(float(np.mean([s.target_passes for s in stats])), 2)
            row["padded_tokens"] = round(float(np.mean([s.padded_tokens for s in stats])), 1)
            row["cached_tokens"] = round(float(np.mean([s.cached_tokens for s in stats])), 1)
        if plans := {answer.plan for answer in answers} - {""}:
            row["plans"] = sorted(plans)
        return row | failure

    def once(
        self, way: str, number: int, request: SearchRequest | None = None
    ) -> tuple[float, Answer]:
        """Seconds of one decode, with what it queued on the device, and the answer.

        Requests have exclusions, but for Hugging Face, whose constraint has none.
        """
        bench = self.bench
        bench.prepare(way, self.reuse, number, self.batch)
        request = request or bench.request(number, self.batch)
        if way == HUGGING_FACE:
            request = replace(request, exclude=None)
        start = time.perf_counter()
        answer = WAYS[way](bench, request)
        bench.wait()
        return time.perf_counter() - start, answer

    def profile(self, way: str) -> Row:
        """Kernels of one decode by time on the device, and the calls that launched them."""
        from torch.profiler import ProfilerActivity, profile

        activities = [ProfilerActivity.CPU]
        if self.bench.device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        bench, request = self.bench, self.bench.request(1, self.batch)
        bench.prepare(way, self.reuse, 1, self.batch)
        with profile(activities=activities) as found:
            WAYS[way](bench, request)
            bench.wait()
        events = found.key_averages()
        spent = {e.key: [e.count, round(self._spent(e), 1)] for e in events}
        longest = sorted(spent, key=lambda key: -spent[key][1])[:TOP_KERNELS]
        calls = {e.key: e.count for e in events if e.key.startswith(("cuda", "cu", "Memcpy"))}
        return {"kernels_count_us": {k: spent[k] for k in longest}, "calls": calls}

    def _spent(self, event: Any) -> float:
        """Microseconds of an event on the device."""
        on_gpu = self.bench.device.type == "cuda"
        return float(event.self_device_time_total if on_gpu else event.self_cpu_time_total)

    def _answers(self, way: str, *, without: bool) -> list[Answer]:
        """To the requests that are compared, without exclusions or with them."""
        answers = []
        for number in range(-(-GATED // self.batch)):
            request = self.bench.request(number, self.batch)
            request = replace(request, exclude=None if without else self._exclude(number))
            answers.append(self.once(way, number, request)[1])
        return answers

    def _eager(self, *, without: bool) -> list[Answer]:
        """The answers of `eager`, found once."""
        if without not in self._expected:
            self._expected[without] = self._answers(EAGER, without=without)
        return self._expected[without]

    def _error(self, answers: Sequence[Answer]) -> float:
        """The largest difference of their scores from those in float32."""
        prompts = [self.bench.prompts(number, self.batch) for number in range(len(answers))]
        pairs = zip(prompts, answers, strict=True)
        return max(self._scorer.error(batch, answer.rankings) for batch, answer in pairs)

    def _shortfall(self, answers: Sequence[Answer], excluded: Sequence[Any]) -> float:
        """How much better a missing item is than a listed one, at most."""
        most = allowance(self._trust())
        return max(
            self._scorer.shortfall(
                self.bench.prompts(number, self.batch), answer.rankings, rows, most
            )
            for number, (answer, rows) in enumerate(zip(answers, excluded, strict=True))
        )

    def _trust(self) -> dict[str, float]:
        """Errors of `eager` and, where it is small enough for that, of Hugging Face."""
        if not self._trusted:
            sizes, trusted = self.bench.sizes, {EAGER: self._eager(without=False)}
            if self.batch * sizes.beams <= HF_ROWS and sizes.items <= HF_ITEMS:
                trusted[HUGGING_FACE] = self._answers(HUGGING_FACE, without=True)
            self._trusted = {way: self._error(answers) for way, answers in trusted.items()}
        return self._trusted


def goal(goals: Mapping[str, float], way: str, row: Row) -> Row:
    """The goal of a way among those of its case, and whether a row meets it; empty without one."""
    kind = "beams_ms" if way in BEAMS else "drafted_ms" if way in DRAFTED else None
    if kind is None or not goals:
        return {}
    if (least := goals.get("per_second")) is not None:
        return {"goal": {"per_second": least}, "met": row["per_second"] >= least}
    return {"goal": {"ms": goals[kind]}, "met": row["ms"]["p50"] <= goals[kind]}


def run(args: argparse.Namespace, results: Results) -> None:
    """Measure everything that was asked for, until the budget is spent."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.float32 if args.float32 or device == "cpu" else torch.bfloat16
    results.add(
        kind="begin", models=args.model, cases=args.cases, ways=args.ways, quick=args.quick,
        device=device, dtype=str(dtype), environment=environment(), triton=_triton(),
    )  # fmt: skip
    for model, beams, history in product(args.model, args.beams, args.history):
        sizes = Sizes(beams, args.items, history, rounds=args.rounds)
        sizes = replace(sizes, nodes=QUICK.nodes) if args.quick else sizes
        about = {"model": model, "beams": beams, "history": history, "items": args.items}
        try:
            bench = Bench(model, sizes, args.cases, dtype)
        except Exception as error:
            results.add(kind="failure", **about, **_failure(error))
            continue
        measure(bench, args, results, about)
        del bench
        if device == "cuda":
            results.add(kind="memory", **about, peak_bytes=torch.cuda.max_memory_allocated())
            torch.cuda.empty_cache()
    results.add(kind="end", seconds_left=round(results.deadline - time.monotonic(), 1))


def measure(bench: Bench, args: argparse.Namespace, results: Results, about: Row) -> None:
    """All cases and ways of one model."""
    for name, capture in bench.captures(args.ways).items():
        results.measure(partial(_row, "capture", capture), **about, way=name)
    published = replace(bench.sizes, rounds=Sizes.rounds) == Sizes()
    for reuse, batch in args.cases:
        case = Case(bench, reuse, batch, results.deadline)
        goals = GOALS.get((about["model"], reuse, batch), {}) if published else {}
        for way in args.ways:
            if way == HUGGING_FACE and batch > HF_MOST:
                continue
            place = {**about, "case": reuse, "batch": batch, "way": way}
            if results.measure(partial(measure_way, case, way, goals), **place) and args.profile:
                results.measure(partial(_row, "profile", partial(case.profile, way)), **place)


def measure_way(case: Case, way: str, goals: Mapping[str, float]) -> Row:
    """The row of a way, with its goal if it has one."""
    row = case.measure(way)
    return row | goal(goals, way, row)


def _row(kind: str, work: Callable[[], Row]) -> Row:
    return {"kind": kind, **work()}


def _failure(error: Exception) -> Row:
    """An error and where it was raised."""
    places = traceback.extract_tb(error.__traceback__)[-4:]
    return {
        "error": f"{type(error).__name__}: {error}"[:2000],
        "at": [f"{Path(p.filename).name}:{p.lineno}" for p in places],
    }


def _triton() -> str | None:
    try:
        import triton
    except ImportError:
        return None
    return str(triton.__version__)


def _case(text: str) -> tuple[str, int]:
    """`cold:8` as ("cold", 8)."""
    reuse, _, batch = text.partition(":")
    if reuse not in ("cold", "kept") or not batch.isdigit() or not int(batch):
        raise argparse.ArgumentTypeError(f"{text!r}: want cold:B or kept:B, such as cold:8")
    if int(batch) > MOST:
        raise argparse.ArgumentTypeError(f"{text!r}: want at most {MOST} requests")
    return reuse, int(batch)


def _whole(text: str) -> int:
    """A number of one or more."""
    if not text.isdigit() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r}: want a whole number, at least 1")
    return int(text)


def _budget(text: str) -> float:
    """A number of seconds."""
    seconds = float(text)
    if not 0 <= seconds < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r}: want a number of seconds")
    return seconds


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The options; --quick changes what is run by default."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    models = (*(s for s in SHAPES if s.endswith("B")), "toy")
    parser.add_argument("--model", nargs="+", choices=models, help="shapes (1.1B 7B)")
    parser.add_argument("--cases", nargs="+", type=_case, help=f"({' '.join(CASES)})")
    parser.add_argument("--ways", nargs="+", choices=WAYS, help="(all)")
    parser.add_argument("--beams", nargs="+", type=_whole, help=f"K ({Sizes.beams})")
    parser.add_argument(
        "--history",
        nargs="+",
        type=_whole,
        help=f"items of a prompt, 4 tokens each ({Sizes.history})",
    )
    parser.add_argument("--items", type=_whole, help=f"of the catalog ({Sizes.items})")
    parser.add_argument("--rounds", type=_whole, help=f"timed decodes of a way ({Sizes.rounds})")
    parser.add_argument("--profile", action="store_true", help="also profile one decode of each")
    parser.add_argument(
        "--budget", type=_budget, default=480, help="seconds, after which nothing new begins (480)"
    )
    parser.add_argument("--float32", action="store_true", help="float32 on a GPU: exact answers")
    parser.add_argument("--quick", action="store_true", help="toy sizes, in seconds, on a CPU too")
    parser.add_argument("--out", type=Path, default=Path("gpu.jsonl"), help="file to append to")
    args = parser.parse_args(arguments)
    args.ways = args.ways or list(WAYS)
    args.model = args.model or (["toy"] if args.quick else ["1.1B", "7B"])
    sizes = QUICK if args.quick else Sizes()
    args.beams, args.history = args.beams or [sizes.beams], args.history or [sizes.history]
    args.items, args.rounds = args.items or sizes.items, args.rounds or sizes.rounds
    quick = ("cold:1", "kept:1", "cold:3", "kept:3")
    args.cases = args.cases or [_case(c) for c in (quick if args.quick else CASES)]
    return args


def main() -> None:
    """Measure and write."""
    args = parse()
    if not args.quick and not torch.cuda.is_available():
        raise SystemExit("no CUDA device; --quick runs toy sizes on a CPU")
    try:
        out = args.out.open("a", encoding="utf-8")
    except OSError as error:
        reason = f"--out {args.out}: {error.strerror}; name a file that can be written"
        raise SystemExit(reason) from error
    with out:
        results = Results(out, args.budget)
        run(args, results)
    if results.failures or results.refused:
        raise SystemExit(
            f"{args.out}: {results.failures} rows have the kind failure, and the gate refused "
            f"{results.refused}"
        )


if __name__ == "__main__":
    main()
