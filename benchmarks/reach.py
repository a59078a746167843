"""The lines that each test runs, measured once and kept for `benchmarks/mutation.py`."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import select
import signal
import sys
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import coverage
import pytest
from mutants import Mutant, function_lines

ROOT = Path(__file__).resolve().parent.parent
REACH = ROOT / "var" / "mutation" / "reach"
NO_TESTS = 5  # pytest's exit status where it collected none, or a whole file skips itself
BROKEN = 91  # exit status of a child that never came to an end of the tests


@dataclass
class Test:
    """Lines and time of one test, or of one fixture of a module or session."""

    seconds: float = 0.0
    fixtures: list[str] = field(default_factory=list)
    lines: dict[str, list[int]] = field(default_factory=dict)


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
    """Digest of names and contents."""
    parts = [*more, *(f"{file}\n{(ROOT / file).read_text()}" for file in files)]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


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
        os.killpg(child, signal.SIGKILL)  # also kills processes that the tests started
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status) if ended else None
    return code, time.monotonic() - began


def run_pytest(args: Iterable[str], plugin: object, scratch: Path) -> int:
    """Run pytest in this process."""
    os.chdir(ROOT)
    # Assertions are not rewritten: modules that are imported already could not be.
    quiet = ["-q", "-p", "no:cacheprovider", "--assert=plain", f"--basetemp={scratch / 'tmp'}"]
    return int(pytest.main([*quiet, *args], plugins=[plugin]))


class Seeded:
    """A pytest plugin that seeds global random number generators before each test."""

    def pytest_runtest_setup(self) -> None:
        """Seed them."""
        for module, seed in (
            ("random", "seed"),
            ("numpy.random", "seed"),
            ("torch", "manual_seed"),
        ):
            getattr(sys.modules[module], seed)(0)


def cpu_seconds() -> float:
    """Processor seconds of this process and of the children that it waited for."""
    return sum(os.times()[:4])


class Recorder(Seeded):
    """A pytest plugin that records the lines and the time of each test.

    Lines of a module's fixture count for every test that uses it. Lines that a test file runs on
    import count for all of its tests.
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

    def watch_fixtures(self) -> None:
        """Note the fixtures that each test uses, including those that it requests by name."""
        read = pytest.FixtureRequest._get_active_fixturedef

        def noted(request: pytest.FixtureRequest, argname: str) -> Any:
            fixture = read(request, argname)
            name = self._name(fixture)
            if name and self._open and name not in self.tests[self._open[-1]].fixtures:
                self.tests[self._open[-1]].fixtures.append(name)
            return fixture

        pytest.FixtureRequest._get_active_fixturedef = noted  # type: ignore

    @staticmethod
    def _name(fixture: Any) -> str | None:
        """Name of a shared fixture of the tests; None for any other fixture."""
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
        file = item.nodeid.split("::")[0]
        self.tests[item.nodeid].fixtures = [f"{file}::fixture of import"]
        with self._counted(item.nodeid):
            return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: Any) -> Generator[None, object, object]:
        """Count for the fixture."""
        name = self._name(fixturedef)
        with self._counted(name) if name else contextlib.nullcontext():
            return (yield)

    def finish(self) -> None:
        """Read the lines from coverage."""
        data = self.coverage.get_data()
        for file in data.measured_files():
            path = str(Path(file).relative_to(ROOT))
            for line, names in data.contexts_by_lineno(file).items():
                for name in filter(None, names):
                    self.tests[name].lines.setdefault(path, []).append(line)


def record(test_file: str, folders: list[str], scratch: Path) -> dict[str, Test]:
    """Lines that the tests of a file run: from a kept record, or from a run with coverage."""
    code = digest([*python_files(["recsys", *folders]), test_file], *folders)
    place = REACH / f"{test_file}.json"
    if not (place.exists() and json.loads(place.read_text())["digest"] == code):
        place.parent.mkdir(parents=True, exist_ok=True)

        def work() -> int:
            recorder = Recorder(folders)
            recorder.watch_fixtures()
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
    """Selects the tests that reach a mutant."""

    def __init__(self, tests: dict[str, Test]) -> None:
        self.tests = tests
        self.fixtures = {name: self._fixtures(name) for name in tests if "::fixture " not in name}
        self._lines: dict[str, dict[int, set[str]]] = defaultdict(lambda: defaultdict(set))
        for name, fixtures in self.fixtures.items():
            for part in (name, *fixtures):
                for path, lines in tests[part].lines.items():
                    for line in lines:
                        self._lines[path][line].add(name)

    def _fixtures(self, name: str) -> set[str]:
        """Fixtures that a test uses, directly or through other fixtures."""
        found: set[str] = set()
        ahead = [name]
        while ahead:
            ahead += (new := set(self.tests[ahead.pop()].fixtures) & self.tests.keys() - found)
            found |= new
        return found

    def _seconds(self, names: Iterable[str]) -> float:
        return sum(self.tests[name].seconds for name in names)

    def cost(self, name: str) -> float:
        """Processor seconds of a test on its own, under coverage."""
        return self._seconds({name, *self.fixtures[name]})

    def reaching(self, mutant: Mutant, source: str) -> list[str]:
        """Tests that run a mutant, quickest first.

        A fault in code that runs on import is reached by all tests that call functions there.
        """
        known = self._lines[mutant.path]
        found: set[str] = set()
        for lines in (mutant.lines, mutant.around) if mutant.lines else (function_lines(source),):
            found = found or set().union(*(known[line] for line in lines if line in known))
        return sorted(found, key=lambda name: (self.cost(name), name))

    def affordable(self, names: list[str], budget: float) -> list[str]:
        """As many of the first tests as the budget allows, at least one."""
        chosen: list[str] = []
        paid: set[str] = set()
        for name in names:
            new = {name, *self.fixtures[name]} - paid
            budget -= self._seconds(new)
            if budget < 0 and chosen:
                break
            chosen.append(name)
            paid |= new
        return chosen

    def order(self, names: list[str]) -> list[str]:
        """The tests by file, so that a module's fixtures are made once; quick files first."""
        cost: Counter[str] = Counter()
        for name in names:
            cost[name.split("::")[0]] += self.cost(name)  # type: ignore[assignment]
        return sorted(names, key=lambda n: (cost[n.split("::")[0]], n.split("::")[0], self.cost(n)))
