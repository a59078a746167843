"""What all tests share: the same examples every time, and nothing that outlives the run.

The check at the end looks for processes, listening sockets, files in the temporary folder, and
files beside the sources; the run fails if there are any.
"""

import ctypes
import fcntl
import gc
import multiprocessing
import os
import random
import shutil
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import duckdb
import psutil
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.internal.conjecture import providers

# Sums of several threads differ from run to run; torch reads this when it is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Nothing cuts the power of a test: what a process has written outlives it also in the cache.
os.fsync = lambda descriptor: None

CONNECT = duckdb.connect
PR_SET_CHILD_SUBREAPER = 36
CACHE = "torch"
COPY_S = 1800  # for what a copy of a process has to do
PATIENCE_S = 300  # for processes that are ending already

FIRST = [  # files with tests or fixtures that take long, the longest first
    "test_on_ray.py",
    "test_devices.py",
    "test_instruction_sets.py",
    "test_native_build.py",
    "test_export.py",
    "test_level_kernel.py",
    "test_leaks.py",
    "test_sqlite.py",
    "test_retraining.py",
    "test_distributed.py",
]

PARALLEL = {"test_engine.py", "test_event_table.py", "test_export.py"}  # DuckDB takes all cores

# How slow a test is depends on the machine; a test of a suite runs in each of its subclasses.
unchecked = [HealthCheck.too_slow, HealthCheck.differing_executors]
# What `make test` runs: the same examples on every machine, in every run and in any order.
settings.register_profile(
    "test",
    max_examples=50,
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=unchecked,
)
# What `make fuzz` runs: fresh ones, each failure with what reproduces it.
settings.register_profile(
    "fuzz", database=None, deadline=None, print_blob=True, suppress_health_check=unchecked
)
settings.load_profile("test")
pytest.register_assert_rewrite(
    "captured_suite",
    "constraint_suite",
    "journal_suite",
    "ranker_suite",
    "reader_suite",
    "search_suite",
    "source_suite",
)


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--hypothesis-profile") is None:
        # Hypothesis draws from the constants of the modules that happen to be loaded as well.
        providers._get_local_constants = lambda: providers._local_constants
    config.pluginmanager.register(Worker() if is_worker(config) else Leftovers(config))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """What takes long comes first, so that the end of a run does not wait for it.

    Rounds of `fuzz.py` have an order of their own each, so that short ones see other tests.
    """
    if "FUZZ_END" in os.environ:
        random.Random(config.getoption("--hypothesis-seed")).shuffle(items)
    else:
        places = {name: place for place, name in enumerate(FIRST)}
        items.sort(key=lambda item: places.get(item.path.name, len(FIRST)))


def pytest_runtest_setup(item: pytest.Item) -> None:
    # The processes of the suite share the cores; tables of a few rows need no second thread.
    threads = None if item.path.name in PARALLEL else 1
    duckdb.connect = partial(connect, threads)
    if time.time() > float(os.environ.get("FUZZ_END", "inf")):
        pytest.skip("the time is over")


def connect(threads: int | None, *args: Any, **options: Any) -> duckdb.DuckDBPyConnection:
    """A connection of DuckDB that takes so many threads; None: as many as there are cores."""
    if threads is not None:
        options["config"] = {"threads": threads, **options.get("config", {})}
    return CONNECT(*args, **options)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Spare the garbage collector what the imports make: nearly all of it stays."""
    gc.disable()
    yield
    gc.enable()
    gc.freeze()


def is_worker(config: pytest.Config) -> bool:
    """Whether this is one of the processes that pytest-xdist started."""
    return hasattr(config, "workerinput")


def open_ports() -> list[str]:
    """What this process listens on."""
    return [
        f"this process listens on {found.laddr.ip}:{found.laddr.port}"
        for found in psutil.Process().net_connections(kind="inet")
        if found.status == psutil.CONN_LISTEN
    ]


def run_forked(work: Callable[..., object], *arguments: object) -> int:
    """Do work in a copy of this process; its exit status, negative where a signal ended it.

    What a fresh process imports for seconds is there already. The copy has no other thread, and
    whatever it changes is gone with it.
    """
    process = multiprocessing.get_context("fork").Process(target=alone, args=(work, *arguments))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # that other threads are not copied
        process.start()
    try:
        process.join(COPY_S)
    finally:
        process.kill()
        process.join()
    status = process.exitcode
    assert status is not None
    process.close()
    return status


def alone(work: Callable[..., object], *arguments: object) -> None:
    """What the copy does: as in a fresh process, warnings are no errors."""
    warnings.resetwarnings()
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(1)  # those of the process that was copied are not here
    work(*arguments)


@pytest.fixture(scope="session")
def forked() -> Callable[..., int]:
    """Does work in a copy of this process, as `run_forked` says."""
    return run_forked


@pytest.fixture(scope="session")
def built_once(
    tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config
) -> Callable[[str, Callable[[Path], object]], Path]:
    """Gives a folder that the first process of the run to ask for it fills, and others wait for.

    Each process gets a copy of its own, which its tests may change.
    """
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if is_worker(pytestconfig) else base

    def build(name: str, fill: Callable[[Path], object]) -> Path:
        whole, partial = shared / name, shared / f"{name}.partial"
        with (shared / f"{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not whole.exists():
                shutil.rmtree(partial, ignore_errors=True)
                partial.mkdir()
                fill(partial)
                partial.rename(whole)
        return Path(shutil.copytree(whole, tmp_path_factory.mktemp(name) / name, symlinks=True))

    return build


class Clock:
    """Time that a test sets."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture(scope="session")
def claimed_gpu() -> Callable[[], AbstractContextManager[Any]]:
    """Makes a GPU that is not there, as `suites/claimed_gpu.py` says."""
    from claimed_gpu import claimed_gpu

    return claimed_gpu


@pytest.fixture
def gpu(claimed_gpu: Callable[[], AbstractContextManager[Any]]) -> Iterator[None]:
    """A GPU: that of the machine, or without one a GPU that is only claimed."""
    import torch

    with nullcontext() if torch.cuda.is_available() else claimed_gpu():
        yield


class Worker:
    """Reports what only the worker itself can see."""

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        session.config.workeroutput["leftovers"] = open_ports()  # type: ignore[attr-defined]


class Leftovers:
    """Gives the run a temporary folder of its own, and looks at the end what is still there."""

    def __init__(self, config: pytest.Config) -> None:
        self.found: list[str] = []
        self.root = config.rootpath
        self.files_before = self.files()
        # A process whose parent has ended becomes a child of this one, not of init.
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        # pytest cleans up its own folders, and keeps those of tests that failed.
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())
        self.temporary = Path(tempfile.mkdtemp(prefix="t-"))  # paths of sockets must be short
        self.temporary.chmod(0o711)  # PostgreSQL runs as a user of its own
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(self.temporary / CACHE)  # torch makes one
        os.environ["TMPDIR"] = tempfile.tempdir = str(self.temporary)

    def files(self) -> set[Path]:
        return {path for path in self.root.iterdir() if not path.name.startswith(".")}

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        self.found += getattr(node, "workeroutput", {}).get("leftovers", [])

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> Iterator[None]:
        yield  # by now the workers have ended
        self.found += open_ports()
        children = [p for p in psutil.Process().children(recursive=True) if not is_python_s_own(p)]
        _, alive = psutil.wait_procs(children, timeout=PATIENCE_S)
        for process in alive:
            with process.oneshot():
                if process.status() != psutil.STATUS_ZOMBIE:
                    words = " ".join(process.cmdline())[:200]
                    self.found.append(f"process {process.pid} is alive: {words}")
                    process.kill()
        self.found += [f"{path} is new" for path in sorted(self.files() - self.files_before)]
        self.found += [
            f"{path} is left" for path in sorted(self.temporary.iterdir()) if path.name != CACHE
        ]
        shutil.rmtree(self.temporary, ignore_errors=True)
        if self.found:
            session.exitstatus = session.exitstatus or pytest.ExitCode.TESTS_FAILED
            reporter = session.config.pluginmanager.get_plugin("terminalreporter")
            reporter.section("the tests have left something behind", red=True, bold=True)
            for line in self.found:
                reporter.line(line, red=True)


def is_python_s_own(process: psutil.Process) -> bool:
    """Whether it is a helper of `multiprocessing` that ends with this process."""
    try:
        return "multiprocessing.resource_tracker" in " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return True
