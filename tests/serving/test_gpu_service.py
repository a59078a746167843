"""benchmarks/gpu_service.py measures a service that it starts, on a CPU too."""

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu_service.py"


def test_answers_under_load_are_compared_with_those_to_one_client(random_bundle, tmp_path):
    bundle, out = random_bundle(tmp_path / "bundle", 60), tmp_path / "rows.jsonl"
    options = ["--requests", "20", "--clients", "4", "--out", str(out)]
    subprocess.run([sys.executable, str(SCRIPT), str(bundle), *options], check=True)
    ready, one, four, equality = [json.loads(line) for line in out.read_text().splitlines()]
    assert (ready["kind"], ready["device"]) == ("ready", "cpu")
    assert [(row["clients"], row["requests"]) for row in (one, four)] == [(1, 20), (4, 20)]
    assert equality["same"] + equality["tied"] == 20
