"""benchmarks/gpu_visit.py: parts write rows, cost each other nothing, and end in time."""

import importlib
import json
import os
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import gpu_visit as visit
from oracles import has_ended
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

FOLDER = Path(__file__).parents[2] / "benchmarks"
SLEEP = "import time; time.sleep(600)"


def rows(tmp_path):
    return [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]


def test_a_part_that_raises_costs_the_others_nothing(tmp_path):
    out = tmp_path / "rows.jsonl"
    writes = f"print('{{\"kind\": \"row\"}}', file=open({str(out)!r}, 'a'))"
    parts = [
        visit.Part("raises", 60, ["-c", "raise ValueError('no kernel image')"]),
        visit.Part("is not there", 60, ["missing.py"]),
        visit.Part("writes", 60, ["-c", writes]),
    ]
    assert visit.visit(parts, out, 300, os.environ) == 2
    found = [(r["kind"], r.get("part"), r.get("status")) for r in rows(tmp_path)]
    assert found == [
        ("part", "raises", "failed"),
        ("part", "is not there", "failed"),
        ("row", None, None),
        ("part", "writes", "ended"),
    ]
    assert rows(tmp_path)[0]["tail"].strip().endswith("ValueError: no kernel image")


def test_a_part_ends_at_its_limit_with_what_it_started(tmp_path):
    """The process in between would otherwise outlive it."""
    child = f"import subprocess, sys; p = subprocess.Popen([sys.executable, '-c', {SLEEP!r}])"
    child += f"; open({str(tmp_path / 'pid')!r}, 'w').write(str(p.pid)); p.wait()"
    assert visit.run(visit.Part("slow", 3, ["-c", child]), 3, os.environ)["status"] == "stopped"
    started = tmp_path / "pid"  # on a slow machine it may not have come so far
    assert not started.exists() or not (pid := started.read_text()) or has_ended(int(pid))


def test_the_options_of_all_parts_are_understood(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))  # the program adds folders
    gpu = importlib.import_module("gpu")
    for quick in (True, False):
        parts = visit.list_parts(tmp_path / "rows.jsonl", tmp_path, None, quick=quick)
        commands = [p.command[1:] for p in parts if p.command[0].endswith("gpu.py")]
        exact, *parsed = [gpu.parse(command) for command in commands]
        assert (exact.float32, exact.quick, set(exact.ways)) == (True, True, set(gpu.WAYS))
        assert [(one.float32, one.quick) for one in parsed] == [(False, quick)] * 5
    assert all(Path(FOLDER.parent, test).is_file() for test in visit.GPU_TESTS)


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
