"""benchmarks/gpu_visit.py: parts write rows, cost each other nothing, and end in time."""

import importlib.util
import json
import os
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

FOLDER = Path(__file__).parents[2] / "benchmarks"
SLEEP = "import time; time.sleep(600)"


def load(name):
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    path = list(sys.path)
    spec.loader.exec_module(module)
    sys.path[:] = path
    return module


@pytest.fixture(scope="module")
def visit():
    before = set(sys.modules)
    yield load("gpu_visit")
    for name in {"gpu_visit", "gpu_service", "gpu", "gpu_bench", "gpu_gate", "gpu_rows"} - before:
        sys.modules.pop(name, None)


@pytest.fixture
def begin(visit, tmp_path):
    """A function that begins a visit of so many seconds."""

    def begin(seconds=300.0, **environment):
        file = visit.Rows(tmp_path / "rows.jsonl")
        return visit.Visit(file, seconds, {**os.environ, **environment})

    return begin


def rows(tmp_path):
    return [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]


def test_a_part_that_raises_costs_the_others_nothing(visit, begin, tmp_path):
    parts = begin()
    writes = f"print('{{\"kind\": \"row\"}}', file=open({str(tmp_path / 'rows.jsonl')!r}, 'a'))"
    assert not parts.run(visit.Part("raises", 60, ["-c", "raise ValueError('no kernel image')"]))
    assert not parts.run(visit.Part("is not there", 60, ["missing.py"]))
    assert parts.run(visit.Part("writes", 60, ["-c", writes]))
    found = [(r["kind"], r.get("part"), r.get("status")) for r in rows(tmp_path)]
    assert found == [
        ("part", "raises", "failed"),
        ("part", "is not there", "failed"),
        ("row", None, None),
        ("part", "writes", "ended"),
    ]
    assert rows(tmp_path)[0]["tail"].strip().endswith("ValueError: no kernel image")
    assert parts.failures == 2


def test_a_part_ends_at_its_limit_with_what_it_started(visit, begin, tmp_path):
    """The process in between would otherwise outlive it."""
    child = f"import subprocess, sys; p = subprocess.Popen([sys.executable, '-c', {SLEEP!r}])"
    child += f"; open({str(tmp_path / 'pid')!r}, 'w').write(str(p.pid)); p.wait()"
    parts = begin()
    assert not parts.run(visit.Part("slow", 3, ["-c", child]))
    assert parts.run(visit.Part("next", 60, ["-c", "pass"]))
    assert [r["status"] for r in rows(tmp_path)] == ["stopped", "ended"]
    for pid in tmp_path.glob("pid"):  # on a slow machine it may not have come so far
        status = Path("/proc", pid.read_text(), "stat")
        assert not status.exists() or status.read_text().rpartition(")")[2].split()[0] == "Z"


def test_the_whole_ends_at_its_limit_and_names_what_it_left_out(
    visit, begin, tmp_path, monkeypatch
):
    monkeypatch.setattr(visit, "LEAST", 0.01)
    parts = begin(1)
    for name in ("first", "second", "third"):
        parts.run(visit.Part(name, 600, ["-c", SLEEP]))
    first, *others = rows(tmp_path)
    assert first["status"] in ("stopped", "skipped")  # the latter on a very slow machine
    assert first.get("limit", 0) <= 1
    assert [r["status"] for r in others] == ["skipped", "skipped"]
    assert parts.failures == 3


def test_the_options_of_all_parts_are_understood(visit, tmp_path):
    gpu = load("gpu")
    for quick in (True, False):
        parts = visit.list_parts(tmp_path / "rows.jsonl", tmp_path, None, quick=quick)
        commands = [p.command[1:] for p in parts if p.command[0].endswith("gpu.py")]
        exact, *parsed = [gpu.parse(command) for command in commands]
        assert (exact.float32, exact.quick, set(exact.ways)) == (True, True, set(gpu.WAYS))
        assert [(one.float32, one.quick) for one in parsed] == [(False, quick)] * 5
    assert all(Path(FOLDER.parent, test).is_file() for test in visit.GPU_TESTS)


@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP"])
def test_a_visit_that_is_stopped_leaves_nothing(tmp_path, name):
    """Its part sends the signal."""
    part = "import os, signal, sys, time; open(sys.argv[1], 'w').write(str(os.getpid()))"
    part += f"; os.kill(os.getppid(), signal.{name}); time.sleep(600)"
    parts = f"[gpu_visit.Part('stops it', 300, ['-c', {part!r}, {str(tmp_path / 'pid')!r}])]"
    main = f"import signal; signal.signal(signal.{name}, signal.SIG_DFL)"  # not so under nohup
    main += f"; import gpu_visit; gpu_visit.list_parts = lambda *_, **__: {parts}"
    main += "; gpu_visit.main()"
    (tmp_path / "temporary").mkdir()
    ended = subprocess.run(
        [sys.executable, "-c", main, "--out", str(tmp_path / "rows.jsonl")],
        cwd=FOLDER, env={**os.environ, "TMPDIR": str(tmp_path / "temporary")}, check=False,
    )  # fmt: skip
    assert ended.returncode == 1
    assert not any((tmp_path / "temporary").iterdir())
    assert not Path("/proc", (tmp_path / "pid").read_text()).exists()


def needed_by(requirements):
    """The packages that requirements ask for, with all that these ask for here."""
    todo, names = [Requirement(text) for text in requirements], set()
    while todo:
        asked = todo.pop()
        name = canonicalize_name(asked.name)
        if name not in names and (not asked.marker or asked.marker.evaluate({"extra": ""})):
            names.add(name)
            todo += map(Requirement, metadata.requires(name) or [])
    return names


def test_the_wheels_are_those_that_such_a_machine_lacks():
    project = tomllib.loads((FOLDER.parent / "pyproject.toml").read_text(encoding="utf-8"))
    own = project["project"]["dependencies"]
    lines = (FOLDER / "gpu-wheels.txt").read_text(encoding="utf-8").splitlines()
    needed = needed_by([*own, "aiohttp", "hypothesis", "psutil", "pytest"])
    assert set(lines[1:]) == needed - needed_by(["torch", "transformers", "triton"])


def test_the_rule_of_near_ties(visit):
    service = load("gpu_service")
    alone = [[(("a",), 3.0), (("b",), 2.0), (("c",), 2.0)]]
    assert service.compare(alone, alone)["same"] == 1
    moved = [[(("a",), 3.0005), (("c",), 2.0004), (("b",), 2.0)]]
    found = service.compare(alone, moved)
    assert (found["tied"], found["largest_gap"]) == (1, 0.0005)
    assert service.compare(alone, [[(("a",), 3.0), (("b",), 2.1), (("c",), 2.0)]])["different"] == 1
    assert service.compare(alone, [[(("b",), 3.0), (("a",), 2.0), (("c",), 2.0)]])["different"] == 1
    assert service.compare(alone, [alone[0][:2]])["different"] == 1


def test_rows_begin_behind_a_line_that_was_cut_off(visit, tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text('{"kind": "ro', encoding="utf-8")
    for number in range(2):
        visit.Rows(file).add(number=number)
    assert file.read_text(encoding="utf-8").split("\n") == [
        '{"kind": "ro', '{"number": 0}', '{"number": 1}', ""
    ]  # fmt: skip
