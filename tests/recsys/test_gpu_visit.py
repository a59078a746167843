"""benchmarks/gpu_visit.sh: parts write rows, cost each other nothing, and end in time."""

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
SCRIPT = FOLDER / "gpu_visit.sh"
SLEEP = "import time; time.sleep(600)"


def load(name):
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    path, before = list(sys.path), set(sys.modules)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    sys.path[:] = path
    for own in {"gpu", "gpu_bench", "gpu_gate", "gpu_rows", "gpu_service"} - before:
        sys.modules.pop(own, None)
    return module


def run(tmp_path, parts, **environment):
    """Run parts; the rows, and the number of those that failed."""
    file = tmp_path / "rows.jsonl"
    commands = f'source "{SCRIPT}" "{file}"; {parts}; echo "failures=$failures"'
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    done = subprocess.run(
        ["bash", "-c", commands], capture_output=True, text=True, check=True,
        env={**os.environ, "PATH": path, **environment},
    )  # fmt: skip
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    return rows, int(done.stdout.rpartition("failures=")[2])


def test_a_part_that_raises_costs_the_others_nothing(tmp_path):
    writes = f"print('{{\\\"kind\\\": 1}}', file=open('{tmp_path / 'rows.jsonl'}', 'a'))"
    parts = "part raises 60 -c 'raise ValueError(\"no kernel image\")'; part 'not there' 60 no.py"
    rows, failures = run(tmp_path, f'{parts}; part writes 60 -c "{writes}"')
    assert [(row["kind"], row.get("part"), row.get("status")) for row in rows] == [
        ("part", "raises", "failed"),
        ("part", "not there", "failed"),
        (1, None, None),
        ("part", "writes", "ended"),
    ]
    assert rows[0]["tail"].strip().endswith("ValueError: no kernel image")
    assert failures == 2


def test_a_part_ends_at_its_limit_with_what_it_started(tmp_path):
    """The process in between would otherwise outlive it."""
    (tmp_path / "parent.py").write_text(
        f"import subprocess, sys; p = subprocess.Popen([sys.executable, '-c', {SLEEP!r}])\n"
        f"open({str(tmp_path / 'pid')!r}, 'w').write(str(p.pid)); p.wait()\n"
    )
    rows, _ = run(tmp_path, f"part slow 3 {tmp_path / 'parent.py'}; part next 60 -c pass")
    assert [row["status"] for row in rows] == ["stopped", "ended"]
    for pid in tmp_path.glob("pid"):  # on a slow machine it may not have come so far
        status = Path("/proc", pid.read_text(), "stat")
        assert not status.exists() or status.read_text().rpartition(")")[2].split()[0] == "Z"


def test_the_whole_ends_at_its_limit_and_names_what_it_left_out(tmp_path):
    parts = "; ".join(f"part {name} 600 -c '{SLEEP}'" for name in ("first", "second", "third"))
    (first, *others), failures = run(tmp_path, parts, VISIT_SECONDS="6")
    assert first["status"] in ("stopped", "skipped")  # the latter on a very slow machine
    assert first["limit"] <= 6 or first["status"] == "skipped"
    assert [row["status"] for row in others] == ["skipped", "skipped"]
    assert failures == 3


@pytest.mark.parametrize("quick", [True, False])
def test_the_options_of_all_parts_are_understood(tmp_path, quick):
    """A stub of Python writes down what it is called with."""
    stub = tmp_path / "bin" / "python"
    stub.parent.mkdir()
    stub.write_text(f'#!/bin/sh\necho "$*" >> {tmp_path / "calls"}\n')
    stub.chmod(0o755)
    (tmp_path / "wheels").mkdir()
    (tmp_path / "wheels" / "one.whl").touch()
    environment = {"PATH": f"{stub.parent}:{os.environ['PATH']}"} | (
        {"QUICK": "1"} if quick else {}
    )
    command = [str(SCRIPT), str(tmp_path / "rows.jsonl"), str(tmp_path / "wheels")]
    subprocess.run(command, env={**os.environ, **environment}, check=True)
    calls = [line.split() for line in (tmp_path / "calls").read_text().splitlines()]
    gpu = load("gpu")
    exact, *parsed = [gpu.parse(call[1:]) for call in calls if call[0].endswith("gpu.py")]
    assert (exact.float32, exact.quick, set(exact.ways)) == (True, True, set(gpu.WAYS))
    assert [(one.float32, one.quick) for one in parsed] == [(False, quick)] * 5
    parts = [c for c in calls if not c[0].endswith("gpu_rows.py")]
    assert [c[1] for c in parts if c[0] == "-m"] == ["pip", "pytest", "recsys", "recsys"]
    (tests,) = [c for c in parts if c[1] == "pytest"]
    assert all(Path(FOLDER.parent, t).is_file() for t in tests if t.startswith("tests/"))


@pytest.mark.parametrize("name", ["TERM", "HUP"])
def test_a_visit_that_is_stopped_leaves_nothing(tmp_path, name):
    """Its part sends the signal."""
    (tmp_path / "part.py").write_text(
        f"import os, time; open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid()))\n"
        f"os.system('kill -{name} ' + os.environ['VISIT']); time.sleep(600)\n"
    )
    (tmp_path / "temporary").mkdir()
    commands = f'export VISIT=$$; source "{SCRIPT}" "{tmp_path / "rows.jsonl"}"'
    ended = subprocess.run(
        ["bash", "-c", f"{commands}; part stops 300 {tmp_path / 'part.py'}; echo not stopped"],
        env={**os.environ, "TMPDIR": str(tmp_path / "temporary")}, check=False,
        stdout=subprocess.PIPE,
    )  # fmt: skip
    assert (ended.returncode, ended.stdout) == (1, b"")
    assert not any((tmp_path / "temporary").iterdir())
    status = Path("/proc", (tmp_path / "pid").read_text(), "stat")
    assert not status.exists() or status.read_text().rpartition(")")[2].split()[0] == "Z"


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


def test_the_rule_of_near_ties():
    service = load("gpu_service")
    alone = [[(("a",), 3.0), (("b",), 2.0), (("c",), 2.0)]]
    assert service.compare(alone, alone)["same"] == 1
    moved = [[(("a",), 3.0005), (("c",), 2.0004), (("b",), 2.0)]]
    found = service.compare(alone, moved)
    assert (found["tied"], found["largest_gap"]) == (1, 0.0005)
    assert service.compare(alone, [[(("a",), 3.0), (("b",), 2.1), (("c",), 2.0)]])["different"] == 1
    assert service.compare(alone, [[(("b",), 3.0), (("a",), 2.0), (("c",), 2.0)]])["different"] == 1
    assert service.compare(alone, [alone[0][:2]])["different"] == 1


def test_rows_begin_behind_a_line_that_was_cut_off(tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text('{"kind": "ro', encoding="utf-8")
    rows = load("gpu_rows").Rows(file)
    for number in range(2):
        rows.add(number=number)
    assert file.read_text(encoding="utf-8").split("\n") == [
        '{"kind": "ro', '{"number": 0}', '{"number": 1}', ""
    ]  # fmt: skip
