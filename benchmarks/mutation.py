"""Which faults do the tests find? Mutants of the code, drawn by seed, and the tests run on each.

    python benchmarks/mutation.py --mutants 240 --json var/mutation/run.jsonl
    python benchmarks/mutation.py --mutants 240 --json var/mutation/run.jsonl --resume --thorough
    python benchmarks/mutation.py --only recsys/decoding/expand.py:271

The tests run once with coverage and must pass; that is kept, by test file, until the tests or the
code change. A mutant then meets the tests that run its line, quickest first, up to --budget
seconds of them. It is killed if one fails, or takes much longer than it did (timeout); it survived
if all pass; it is not reached if no test runs its line. A survivor is a missing test or a change
that makes no difference: read each. Hypothesis draws the same examples each time and shrinks none.

Each mutant lives in a forked process, which finds torch imported. Nothing is written into the
checkout: the fault is put into the source as Python loads it.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import os
import resource
import signal
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Generator
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from mutants import Mutant, mutants
from reach import BROKEN, ROOT, Plan, Seeded, Test, digest, forked, python_files, record, run_pytest

FOLDERS = ["recsys/constraint", "recsys/decoding", "recsys/models"]
HEAVY = [  # what tests import and no mutant changes
    "torch._meta_registrations",
    "torch.fx.experimental.symbolic_shapes",
    "scipy.stats",
    "pandas",
    "pyarrow.dataset",
    "faiss",
    "accelerate",
    "transformers.generation",
    *(f"transformers.models.{x}.modeling_{x}" for x in ("llama", "mistral", "phi3", "qwen3")),
    "vector_quantize_pytorch",
    "llguidance",
    "pydantic.main",
    "rich.table",
    "matplotlib.pyplot",
    "schemathesis.pytest.plugin",
]
MEMORY = 6 << 30  # bytes that a mutant may map beyond what it began with: some grow without end
NOT_APPLIED = 90  # exit status of tests that passed and never imported the mutated file
OUTCOMES = ("killed", "timeout", "survived", "not reached", "error")
KEY = ("path", "line", "column", "operator", "code", "original", "mutated")  # of a mutant
Outcome = dict[str, Any]


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--mutants", type=int, default=240, help="how many to draw, one a line (default: 240)")
    add("--seed", type=int, default=0, help="of the draw; more mutants begin with the same ones")
    add("--paths", nargs="+", default=FOLDERS, help="files or folders to mutate")
    add("--tests", nargs="+", default=["tests/recsys"], help="files or folders of tests")
    add("--only", nargs="+", metavar="FILE:LINE", help="all mutants of these lines; none is drawn")
    add("--budget", type=float, default=20.0, help="seconds of tests for one mutant (default: 20)")
    add("--thorough", action="store_true", help="show survivors the tests beyond --budget, too")
    add("--limit", type=float, default=90.0, help="seconds after which a mutant is given up")
    add("--json", type=Path, metavar="OUT", help="a line for each mutant, as soon as it is known")
    add("--resume", action="store_true", help="keep what --json holds, and go on")
    return parser.parse_args()


def preload() -> None:
    """Import what does not change, once, for all forks; make Hypothesis repeat itself."""
    for name in HEAVY:
        importlib.import_module(name)
    settings.register_profile(
        "mutation",
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.explicit, Phase.generate],
        suppress_health_check=[HealthCheck.too_slow],
    )
    settings.load_profile("mutation")
    gc.collect()
    gc.freeze()


class Chosen(Seeded):
    """A pytest plugin: these tests in this order, each within its seconds."""

    def __init__(self, limits: dict[str, float], note: Path) -> None:
        self._limits = limits
        self._note = note

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        """Keep what is asked for."""
        place = {name: i for i, name in enumerate(self._limits)}
        items[:] = sorted(
            (item for item in items if item.nodeid in place), key=lambda item: place[item.nodeid]
        )

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: Any) -> Generator[None, object, object]:
        """Die by SIGALRM when the test has used its seconds; say which test it was.

        A timer of CPU seconds would do, but makes `time.process_time` too coarse for some tests.
        """
        self._note.write_text(item.nodeid)
        signal.setitimer(signal.ITIMER_REAL, self._limits[item.nodeid])
        result = yield
        signal.setitimer(signal.ITIMER_REAL, 0)
        return result


class Judge:
    """Runs tests on mutants."""

    def __init__(self, plan: Plan, limit: float, scratch: Path) -> None:
        self.plan = plan
        self._limit = limit
        self._scratch = scratch
        self._note = scratch / "note"
        self._sound: dict[str, bool] = {"collection": True}

    def sound(self, name: str, path: str, source: str) -> bool:
        """Whether a test that killed a mutant passes on its own where nothing is mutated."""
        if name not in self._sound:
            self._sound[name] = self.outcome(path, source, [name])[0] == "survived"
        return self._sound[name]

    def outcome(self, path: str, source: str, names: list[str]) -> tuple[str, str]:
        """What becomes of a source that takes the place of this file, and which test said so."""
        names = self.plan.order(names)
        # An endless loop should show soon, and a slow moment should not look like one.
        limits = {name: 10 + 3 * self.plan.cost(name) for name in names}
        wall = max(self._limit, 3 * sum(map(self.plan.cost, names)))
        self._note.write_text("collection")

        def work() -> int:
            mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (mapped + MEMORY, mapped + MEMORY))
            used = replace_source(ROOT / path, source)
            files = dict.fromkeys(name.split("::")[0] for name in names)
            status = run_pytest(["-x", *files], Chosen(limits, self._note), self._scratch)
            return status or (0 if used else NOT_APPLIED)

        status, _ = forked(work, wall, self._scratch / "tests.log")
        by = self._note.read_text()
        if status == 0:
            return "survived", ""
        if status in (NOT_APPLIED, BROKEN):
            return "error", f"exit status {status}"
        return ("timeout" if status in (None, -signal.SIGALRM) else "killed"), by

    def check(self, path: str, source: str, names: list[str]) -> None:
        """The file as it is must pass, and a file that cannot be imported must not."""
        if (found := self.outcome(path, source, names))[0] != "survived":
            print((self._scratch / "tests.log").read_text()[-3000:])
            sys.exit(f"Nothing was mutated, and the tests fail: {found}")
        if (found := self.outcome(path, "raise RuntimeError", names))[0] != "killed":
            sys.exit(f"{path} cannot be imported, and the tests do not see it: {found}")

    def verdict(self, mutant: Mutant, source: str, budget: float, thorough: bool) -> Outcome:
        """All that is to be said of a mutant."""
        began = time.monotonic()
        names = self.plan.reaching(mutant, source)
        chosen = self.plan.affordable(names, budget)
        left = [name for name in names if name not in set(chosen)]
        outcome, by = ("not reached", "")
        if chosen:
            outcome, by = self.outcome(mutant.path, mutant.apply(source), chosen)
        if outcome == "survived" and left and thorough:
            outcome, by = self.outcome(mutant.path, mutant.apply(source), left)
            left = []
        if outcome in ("killed", "timeout") and not self.sound(by, mutant.path, source):
            outcome, by = "error", f"{by} fails without a mutant, too"
        fault = {name: getattr(mutant, name) for name in KEY}
        rest = {"outcome": outcome, "by": by, "tests": len(names), "not_run": len(left)}
        return {**fault, **rest, "seconds": round(time.monotonic() - began, 1)}


def replace_source(path: Path, source: str) -> list[str]:
    """From now on this process reads `source` from this file; the list tells whether it did."""
    used: list[str] = []
    read = SourceFileLoader.get_code

    def get_code(self: SourceFileLoader, fullname: str) -> Any:
        if self.path != str(path):
            return read(self, fullname)
        used.append(fullname)
        return compile(source, str(path), "exec", dont_inherit=True)

    SourceFileLoader.get_code = get_code  # type: ignore
    return used


def drawn(args: argparse.Namespace, sources: dict[str, str]) -> list[Mutant]:
    """The mutants to run: those of given lines, or a draw, one a line at most."""
    found = [mutant for path, source in sources.items() for mutant in mutants(path, source)]
    if args.only:
        return [each for each in found if f"{each.path}:{each.line}" in args.only]
    found.sort(key=lambda each: each.rank(args.seed))
    first = {(each.path, each.line): each for each in reversed(found)}
    return [each for each in found if first[each.path, each.line] is each][: args.mutants]


def known(path: Path | None, resume: bool, code: str) -> dict[tuple[Any, ...], Outcome]:
    """What an earlier run wrote; the file begins anew where nothing is to be kept."""
    if path is None:
        return {}
    path.parent.mkdir(parents=True, exist_ok=True)
    if not (resume and path.exists()):
        path.write_text(json.dumps({"code": code}) + "\n")
    # A run that was killed may have left the beginning of a line.
    first, *lines = [line for line in path.read_text().splitlines() if line.endswith("}")]
    if json.loads(first)["code"] != code:
        sys.exit(f"{path} is about other code; begin anew without --resume.")
    path.write_text("".join(f"{line}\n" for line in [first, *lines]))
    return {tuple(found[name] for name in KEY): found for found in map(json.loads, lines)}


def line_of(found: Outcome) -> str:
    """One line about a mutant."""
    where = f"{found['path']}:{found['line']}"
    return (
        f"{found['outcome']:11} {found['seconds']:5.1f} s  {where}  "
        f"{found['original'][:60]}  ->  {found['mutated'][:60]}  {found['by'].split('::')[-1]}"
    )


def report(results: list[Outcome]) -> None:
    """Survivors, then a table by module."""
    for found in sorted(results, key=lambda each: (each["path"], each["line"])):
        if found["outcome"] not in ("killed", "timeout"):
            print(f"\n{line_of(found)}\n    {found['code']}")
            if found["tests"]:
                print(f"    {found['tests']} tests reach it, {found['not_run']} of them not run")
    print(f"\n{'':40}{'mutants':>12}" + "".join(f"{name:>12}" for name in OUTCOMES) + "  found")
    by_path: dict[str, Counter[str]] = defaultdict(Counter)
    for found in results:
        by_path[found["path"]][found["outcome"]] += 1
        by_path["total"][found["outcome"]] += 1
    for path, counts in sorted(by_path.items(), key=lambda each: (each[0] == "total", each[0])):
        share = (counts["killed"] + counts["timeout"]) / counts.total()
        row = "".join(f"{counts[name]:12}" for name in OUTCOMES)
        print(f"{path:40}{counts.total():12}{row}  {share:5.0%}")


def run(args: argparse.Namespace, judge: Judge, sources: dict[str, str]) -> list[Outcome]:
    """Judge the mutants that are asked for, and say so one by one."""
    chosen = drawn(args, sources)
    if not chosen:
        sys.exit("Nothing to mutate there.")
    done = known(args.json, args.resume, digest(sources))
    checked = False
    results = []
    for i, mutant in enumerate(chosen):
        found = done.get(tuple(getattr(mutant, name) for name in KEY))
        again = found and args.thorough and found["outcome"] == "survived" and found["not_run"]
        if found is None or again:
            source = sources[mutant.path]
            names = judge.plan.reaching(mutant, source)
            if names and not checked:
                judge.check(mutant.path, source, names[:20])
                checked = True
            found = judge.verdict(mutant, source, args.budget, args.thorough)
            if args.json:
                with args.json.open("a") as out:
                    out.write(json.dumps(found) + "\n")
        print(f"{i + 1:4}/{len(chosen)}  {line_of(found)}", flush=True)
        results.append(found)
    return results


def main() -> None:
    """Record, judge, report."""
    args = arguments()
    if os.environ.get("PYTHONHASHSEED") != "0":
        # Sets of strings have one order from here on, and subprocesses import this checkout.
        places = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        fixed = {"PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1", "PYTHONPATH": places}
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | fixed)
    sources = {path: (ROOT / path).read_text() for path in python_files(args.paths)}
    preload()
    with tempfile.TemporaryDirectory() as folder:
        reach: dict[str, Test] = {}
        for each in python_files(args.tests):
            if Path(each).name.startswith("test_"):
                reach |= record(each, args.paths, Path(folder))
        report(run(args, Judge(Plan(reach), args.limit, Path(folder)), sources))
    sys.stdout.flush()
    os._exit(0)  # without the leaks that libraries report of themselves


if __name__ == "__main__":
    main()
