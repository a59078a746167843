"""The GPU benchmark in toy sizes on a CPU: all ways of decoding give the same answers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
WAYS = [
    "generate",
    "beams, eager",
    "beams",
    "beams, history",
    "one pass",
    "one pass, history",
    "draft",
    "planned",
]


@pytest.fixture(scope="module")
def result():
    done = subprocess.run(
        [sys.executable, "benchmarks/gpu.py", "--quick"],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_every_way_is_timed_at_every_size(result):
    cases = [(5, 1), (5, 2), (3, 1)]
    found = [(row["beams"], row["batch"], row["way"]) for row in result["rows"]]
    assert found == [(*case, way) for case in cases for way in WAYS]
    assert not result["skipped"]
    assert all(0 < row["ms"]["p25"] <= row["ms"]["p75"] for row in result["rows"])


def test_all_answers_agree_and_a_perfect_draft_takes_one_pass(result):
    for row in result["rows"]:
        if row["way"] != "draft":
            assert row["in_common"] == 1
            assert row["score_gap"] < 1e-3
        if "one pass" in row["way"]:
            assert row["passes"] == 1
        if row["way"].startswith("beams"):
            assert row["passes"] == 4
        if "history" in row["way"]:
            assert row["cached_tokens"] == result["prompt"] - result["new_tokens_with_history"]


def test_compared_passes_run_as_graphs(result):
    fixed = [row for row in result["rows"] if row["way"] not in ("generate", "planned")]
    eager = {row["way"]: row["passes_without_graph"] for row in fixed}
    assert not any(eager.values())
    assert all(found["graphs"] for found in result["graphs_of_target_and_draft"]["toy"])
