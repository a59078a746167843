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
import contextlib
import gc
import hashlib
import importlib
import json
import os
import resource
import select
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import TYPE_CHECKING, Any

import coverage
import pytest
from hypothesis import HealthCheck, Phase, settings
from mutants import Mutant, function_lines, mutants

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Iterator

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ["recsys/constraint", "recsys/decoding", "recsys/models"]
REACH = ROOT / "var" / "mutation" / "reach"
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
NO_TESTS = 5  # pytest's exit status where it collected none, or a whole file skips itself
BROKEN = 91  # exit status of a child that never came to an end of the tests
OUTCOMES = ("killed", "timeout", "survived", "not reached", "error")
KEY = ("path", "line", "column", "operator", "code", "original", "mutated")  # of a mutant
Outcome = dict[str, Any]


@dataclass
class Test:
    """What one test, or one fixture of a module or session, ran and how long it took."""

    seconds: float = 0.0
    fixtures: list[str] = field(default_factory=list)
    lines: dict[str, list[int]] = field(default_factory=dict)


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


def forked(work: Callable[[], int], limit: float, log: Path) -> tuple[int | None, float]:
    """Run `work` in a child: its exit status, minus a signal's number, None past the limit."""
    began = time.monotonic()
    child = os.fork()
    if child == 0:
        status = BROKEN
        try:
            os.setsid()
            with log.open("w") as out:
                os.dup2(out.fileno(), 1)
                os.dup2(out.fileno(), 2)
            status = work()
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
    handle = os.pidfd_open(child)
    ended, _, _ = select.select([handle], [], [], limit)
    os.close(handle)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)  # processes that the tests started, too
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status) if ended else None
    return code, time.monotonic() - began


def cpu_seconds() -> float:
    """Of this process and the children that it waited for: neighbours do not slow it down."""
    return sum(os.times()[:4])


def run_pytest(args: Iterable[str], plugin: object, scratch: Path) -> int:
    """Run pytest in this process."""
    os.chdir(ROOT)
    # Asserts need no explanation here, and what is imported already cannot be rewritten for it.
    quiet = ["-q", "-p", "no:cacheprovider", "--assert=plain", f"--basetemp={scratch / 'tmp'}"]
    return int(pytest.main([*quiet, *args], plugins=[plugin]))


class Seeded:
    """A pytest plugin: random numbers that nobody seeded are the same each time."""

    def pytest_runtest_setup(self) -> None:
        """Seed what is global."""
        for module, seed in (
            ("random", "seed"),
            ("numpy.random", "seed"),
            ("torch", "manual_seed"),
        ):
            getattr(sys.modules[module], seed)(0)


class Recorder(Seeded):
    """A pytest plugin: which lines each test runs, and how long it takes.

    What a fixture of a module runs counts for every test that uses it, not for the first alone;
    what a test file runs on import counts for all of its tests.
    """

    def __init__(self, folders: list[str]) -> None:
        files = [
            str(ROOT / folder / "*") if (ROOT / folder).is_dir() else str(ROOT / folder)
            for folder in folders
        ]
        self.coverage = coverage.Coverage(data_file=None, config_file=False, include=files)
        self.tests: defaultdict[str, Test] = defaultdict(Test)
        self._open: list[str] = []

    @contextlib.contextmanager
    def _counted(self, name: str) -> Iterator[None]:
        self._open.append(name)
        self.coverage.switch_context(name)
        began = cpu_seconds()
        try:
            yield
        finally:
            seconds = cpu_seconds() - began
            self.tests[self._open.pop()].seconds += seconds
            if self._open:
                self.tests[self._open[-1]].seconds -= seconds
            self.coverage.switch_context(self._open[-1] if self._open else "")

    @staticmethod
    def _name(fixture: Any) -> str | None:
        """A fixture's name among tests; None where each test has its own or it is not ours."""
        if fixture.scope == "function" or not fixture.baseid:
            return None
        return f"{fixture.baseid}::fixture {fixture.argname}"

    @pytest.hookimpl(wrapper=True)
    def pytest_make_collect_report(self, collector: Any) -> Generator[None, object, object]:
        """Count for the file."""
        if not isinstance(collector, pytest.Module):
            return (yield)
        name = f"{collector.nodeid}::fixture of import"
        with self._counted(name):
            result = yield
        self.tests[name].seconds = 0.0  # every run of these tests pays it
        return result

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: Any) -> Generator[None, object, object]:
        """Count for the test."""
        known = item._fixtureinfo.name2fixturedefs.values()
        names = [name for fixtures in known if (name := self._name(fixtures[-1]))]
        with self._counted(item.nodeid):
            result = yield
        file = item.nodeid.split("::")[0]
        self.tests[item.nodeid].fixtures = sorted({*names, f"{file}::fixture of import"})
        return result

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: Any) -> Generator[None, object, object]:
        """Count for the fixture."""
        name = self._name(fixturedef)
        with self._counted(name) if name else contextlib.nullcontext():
            return (yield)

    def finish(self) -> None:
        """Read the lines that coverage saw."""
        data = self.coverage.get_data()
        for file in data.measured_files():
            path = str(Path(file).relative_to(ROOT))
            for line, names in data.contexts_by_lineno(file).items():
                for name in filter(None, names):
                    self.tests[name].lines.setdefault(path, []).append(line)


def python_files(places: Iterable[str]) -> list[str]:
    """Python files of files and folders, as paths within the checkout."""
    found: set[Path] = set()
    for place in places:
        path = ROOT / place
        if not path.exists():
            sys.exit(f"{place} does not exist in {ROOT}")
        found |= set(path.rglob("*.py")) if path.is_dir() else {path}
    return sorted(str(path.relative_to(ROOT)) for path in found)


def digest(files: Iterable[str], *more: str) -> str:
    """Of names and contents."""
    parts = [*more, *(f"{file}\n{(ROOT / file).read_text()}" for file in files)]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def record(test_file: str, folders: list[str], scratch: Path) -> dict[str, Test]:
    """What the tests of this file reach: they run once with coverage, unless that was kept."""
    code = digest([*python_files(["recsys", *folders]), test_file], *folders)
    place = REACH / f"{test_file}.json"
    if not (place.exists() and json.loads(place.read_text())["digest"] == code):
        place.parent.mkdir(parents=True, exist_ok=True)

        def work() -> int:
            recorder = Recorder(folders)
            recorder.coverage.start()
            status = run_pytest([test_file], recorder, scratch)
            recorder.coverage.stop()
            recorder.finish()
            tests = {name: vars(test) for name, test in recorder.tests.items()}
            if status in (0, NO_TESTS):
                place.write_text(json.dumps({"digest": code, "tests": tests}))
            return status

        log = scratch / "record.log"
        status, seconds = forked(work, 3600, log)
        if status not in (0, NO_TESTS):
            print(log.read_text()[-5000:])
            sys.exit(f"{test_file} must pass before mutants are counted; or give other --tests.")
        print(f"recorded in {seconds:5.1f} s  {test_file}", flush=True)
    kept = json.loads(place.read_text())["tests"]
    return {name: Test(**test) for name, test in kept.items()}


class Plan:
    """Which tests reach a mutant."""

    def __init__(self, tests: dict[str, Test]) -> None:
        self.tests = tests
        self._lines: dict[str, dict[int, set[str]]] = defaultdict(lambda: defaultdict(set))
        for name, test in self.tests.items():
            if "::fixture " not in name:
                for part in (test, *self._fixtures(name)):
                    for path, lines in part.lines.items():
                        for line in lines:
                            self._lines[path][line].add(name)

    def _fixtures(self, name: str) -> list[Test]:
        return [self.tests[each] for each in self.tests[name].fixtures if each in self.tests]

    def cost(self, name: str) -> float:
        """CPU seconds of a test on its own, as they were under coverage."""
        return self.tests[name].seconds + sum(each.seconds for each in self._fixtures(name))

    def reaching(self, mutant: Mutant, source: str) -> list[str]:
        """Tests that run a mutant, quickest first.

        A fault in what runs on import is reached by whoever runs a function of that module.
        """
        known = self._lines[mutant.path]
        found: set[str] = set()
        for lines in (mutant.lines, mutant.around) if mutant.lines else (function_lines(source),):
            found = found or set().union(*(known[line] for line in lines if line in known))
        return sorted(found, key=lambda name: (self.cost(name), name))

    def affordable(self, names: list[str], budget: float) -> list[str]:
        """The first of these that the budget pays for; one at least."""
        chosen: list[str] = []
        paid: set[str] = set()
        for name in names:
            new = set(self.tests[name].fixtures) - paid
            price = sum(self.tests[each].seconds for each in new if each in self.tests)
            budget -= self.tests[name].seconds + price
            if budget < 0 and chosen:
                break
            chosen.append(name)
            paid |= new
        return chosen

    def order(self, names: list[str]) -> list[str]:
        """File by file, so that a module's fixtures are made once; quick files and tests first."""
        cost: Counter[str] = Counter()
        for name in names:
            cost[name.split("::")[0]] += self.cost(name)  # type: ignore[assignment]
        return sorted(names, key=lambda n: (cost[n.split("::")[0]], n.split("::")[0], self.cost(n)))


class Chosen(Seeded):
    """A pytest plugin: these tests in this order, each within its CPU seconds."""

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
        """Die by SIGPROF when the test has used its seconds; say which test it was."""
        self._note.write_text(item.nodeid)
        signal.setitimer(signal.ITIMER_PROF, self._limits[item.nodeid])
        result = yield
        signal.setitimer(signal.ITIMER_PROF, 0)
        return result


class Judge:
    """Runs tests on mutants."""

    def __init__(self, plan: Plan, limit: float, scratch: Path) -> None:
        self.plan = plan
        self._limit = limit
        self._scratch = scratch
        self._note = scratch / "note"

    def outcome(self, path: str, source: str, names: list[str]) -> tuple[str, str]:
        """What becomes of a source that takes the place of this file, and which test said so."""
        names = self.plan.order(names)
        # An endless loop should show soon, and a slow moment should not look like one.
        limits = {name: 3 + 3 * self.plan.cost(name) for name in names}
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
        return ("timeout" if status in (None, -signal.SIGPROF) else "killed"), by

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
