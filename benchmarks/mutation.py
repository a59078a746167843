"""Mutation testing: small faults in the code, drawn by seed, and the tests that find them.

    python benchmarks/mutation.py --mutants 240 --json var/mutation/run.jsonl
    python benchmarks/mutation.py --only recsys/decoding/expand.py:271

The tests run once with coverage and must pass; the result is kept for each test file until the
tests or the code change. A mutant then runs the tests that reach its line, the quickest first, up
to --budget seconds of them. It is killed if a test fails or takes much longer than before
(timeout). It survived if all pass, and is not reached if no test runs its line. A survivor is a
missing test or a change without effect. Hypothesis draws the same examples each time.

Each mutant runs in a forked process that has torch imported already. The checkout is not changed:
the fault is put into the source while Python loads it.
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
from reach import BROKEN, ROOT, Plan, Seeded, Test, forked, python_files, record, run_pytest

FOLDERS = ["recsys/constraint", "recsys/decoding", "recsys/models"]
HEAVY = [  # modules that tests import and no mutant changes
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
MEMORY = 6 << 30  # bytes that a mutant may map in addition; some allocate without end
NOT_APPLIED = 90  # exit status of tests that passed without importing the mutated file
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
    add("--limit", type=float, default=90.0, help="seconds after which a mutant is given up")
    add("--json", type=Path, metavar="OUT", help="file that gets a line for each mutant")
    return parser.parse_args()


def preload() -> None:
    """Import modules once for all forks, and make Hypothesis deterministic."""
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
    """A pytest plugin that runs given tests in order, each with a time limit."""

    def __init__(self, limits: dict[str, float], note: Path) -> None:
        self._limits = limits
        self._note = note

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        """Keep the given tests, in their order."""
        place = {name: i for i, name in enumerate(self._limits)}
        items[:] = sorted(
            (item for item in items if item.nodeid in place), key=lambda item: place[item.nodeid]
        )

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: Any) -> Generator[None, object, object]:
        """Note the test, and end the process by SIGALRM when its time is over.

        A timer of processor seconds would make `time.process_time` too coarse for some tests.
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
        """Whether a test passes on its own without a mutant."""
        if name not in self._sound:
            self._sound[name] = self.outcome(path, source, [name])[0] == "survived"
        return self._sound[name]

    def outcome(self, path: str, source: str, names: list[str]) -> tuple[str, str]:
        """Outcome of the tests with this source in place of the file, and the last test."""
        names = self.plan.order(names)
        # Long enough for a slow moment, short enough to find an endless loop soon.
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
        """Check that the unchanged file passes and a file that cannot be imported does not."""
        if (found := self.outcome(path, source, names))[0] != "survived":
            print((self._scratch / "tests.log").read_text()[-3000:])
            sys.exit(f"Nothing was mutated, and the tests fail: {found}")
        if (found := self.outcome(path, "raise RuntimeError", names))[0] != "killed":
            sys.exit(f"{path} cannot be imported, and the tests do not see it: {found}")

    def judge(self, mutant: Mutant, source: str, budget: float) -> Outcome:
        """Run the tests on a mutant and describe the outcome."""
        began = time.monotonic()
        names = self.plan.reaching(mutant, source)
        chosen = self.plan.affordable(names, budget)
        left = [name for name in names if name not in set(chosen)]
        outcome, by = ("not reached", "")
        if chosen:
            outcome, by = self.outcome(mutant.path, mutant.apply(source), chosen)
        if outcome in ("killed", "timeout") and not self.sound(by, mutant.path, source):
            outcome, by = "error", f"{by} fails without a mutant, too"
        fault = {name: getattr(mutant, name) for name in KEY}
        rest = {"outcome": outcome, "by": by, "tests": len(names), "not_run": len(left)}
        return {**fault, **rest, "seconds": round(time.monotonic() - began, 1)}


def replace_source(path: Path, source: str) -> list[str]:
    """Make Python load `source` for this file; the list has the modules that were loaded."""
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
    """The mutants of the given lines, or a draw with at most one mutant a line."""
    found = [mutant for path, source in sources.items() for mutant in mutants(path, source)]
    if args.only:
        return [each for each in found if f"{each.path}:{each.line}" in args.only]
    found.sort(key=lambda each: each.rank(args.seed))
    first = {(each.path, each.line): each for each in reversed(found)}
    return [each for each in found if first[each.path, each.line] is each][: args.mutants]


def line_of(found: Outcome) -> str:
    """One line that describes a mutant."""
    where = f"{found['path']}:{found['line']}"
    return (
        f"{found['outcome']:11} {found['seconds']:5.1f} s  {where}  "
        f"{found['original'][:60]}  ->  {found['mutated'][:60]}  {found['by'].split('::')[-1]}"
    )


def report(results: list[Outcome]) -> None:
    """Print the survivors and a table by module."""
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
    """Judge the mutants and print them one by one."""
    chosen = drawn(args, sources)
    if not chosen:
        sys.exit("There is nothing to mutate.")
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text("")
    checked = False
    results = []
    for i, mutant in enumerate(chosen):
        source = sources[mutant.path]
        names = judge.plan.reaching(mutant, source)
        if names and not checked:
            judge.check(mutant.path, source, names[:20])
            checked = True
        found = judge.judge(mutant, source, args.budget)
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
        # Sets of strings have a fixed order then, and subprocesses import this checkout.
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
    os._exit(0)  # libraries would report leaks


if __name__ == "__main__":
    main()
