"""benchmarks/gpu.py: it starts on a bare machine, judges answers, and loses no result."""

import importlib
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from recsys.models.tree_forward import TreeModel

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu.py"
# What a bare machine lacks; what transformers itself brings is left alone.
MISSING = (
    "accelerate", "duckdb", "faiss", "fastapi", "llguidance", "pandas", "peft",
    "prometheus_client", "pyarrow", "scipy", "sklearn", "starlette", "threadpoolctl", "uvicorn",
)  # fmt: skip
BARE = f"""
import runpy, sys
for name in {MISSING}:
    sys.modules[name] = None
options = "--quick --ways graphs decode-graph --cases cold:1 --out".split()
sys.argv = ["gpu.py", *options, sys.argv[1]]
runpy.run_path({str(SCRIPT)!r}, run_name="__main__")
"""


@pytest.fixture
def gpu(monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))  # the program adds folders
    return importlib.import_module("gpu")


def rows(gpu, tmp_path, *options):
    """The lines that a quick run writes."""
    tmp_path.mkdir(exist_ok=True)
    file = tmp_path / "rows.jsonl"
    args = gpu.parse(["--quick", "--out", str(file), *options])
    gpu.run(args, gpu.Results(file))
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_it_starts_on_a_bare_machine_and_writes_rows(tmp_path):
    file = tmp_path / "bare.jsonl"
    done = subprocess.run(
        [sys.executable, "-c", BARE, str(file)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env={"OMP_NUM_THREADS": "1", "PATH": "/usr/bin:/bin", "HOME": str(tmp_path)},
    )
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in file.read_text().splitlines()]
    assert [r["kind"] for r in found] == ["begin", *["capture"] * 2, *["row"] * 2, "model", "end"]
    assert found[0]["environment"]["torch"] == torch.__version__


def test_a_fault_that_eager_shares_is_refused_in_any_number_of_beams(gpu, monkeypatch):
    bench = gpu.Bench("tiny", gpu.QUICK._replace(beams=60), [("cold", 3)], torch.bfloat16)
    right = TreeModel.run

    def wrong(self, *arguments):
        logits = right(self, *arguments).clone()
        if logits.shape[1] > 1:
            logits[0, [0, 1]] = logits[0, [1, 0]]
        return logits

    assert gpu.Case(bench, "cold", 3).check("graphs")["gate"]["passed"]
    monkeypatch.setattr(TreeModel, "run", wrong)
    gate = gpu.Case(bench, "cold", 3).check("graphs")["gate"]
    assert gate["error"] <= 2 * gate["eager"]
    assert not gate["passed"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_wrong_selections_with_right_scores_are_refused(gpu, monkeypatch, dtype):
    bench = gpu.Bench("tiny", gpu.QUICK, [("cold", 3)], dtype)
    case, right = gpu.Case(bench, "cold", 3), gpu.WAYS["graphs"]

    def refused(way):
        monkeypatch.setitem(gpu.WAYS, "draft", way)
        found = case.check("draft")
        assert not found["gate"]["passed"]
        return found["in_common"], found["gate"]["error"]

    def first_item_only(bench, request):
        answer = right(bench, request)
        return replace(answer, rankings=[r[:1] * len(r) for r in answer.rankings])

    def without_exclusions(bench, request):
        return right(bench, replace(request, exclude=None))

    assert case.check("graphs")["gate"]["passed"]
    assert refused(first_item_only) == (0.2, "an item is listed twice")
    in_common, error = refused(without_exclusions)
    assert (in_common < 1, error) == (True, "an excluded item is listed")


def test_all_ways_answer_alike(gpu, tmp_path):
    found = [r for r in rows(gpu, tmp_path, "--cases", "kept:2") if r["kind"] == "row"]
    assert {r["way"] for r in found} == set(gpu.WAYS)
    assert all(r["in_common"] == 1 and r["gate"]["passed"] for r in found)
    assert {r["eager_passes"] for r in found} == {0}
    passes = {r["way"]: r.get("passes") for r in found}
    assert passes["draft-graph"] == passes["draft"] < 2
    assert {r["cached_tokens"] for r in found if "cached_tokens" in r} == {20}
