"""Two replicas on Ray, one killed and the model swapped under load; `drive.py` does it."""

import json
import os
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from oracles import PATIENCE_S

from recsys.recommender import Recommender
from recsys.serving.batch.job import Job
from recsys.serving.batch.run import score
from recsys.serving.settings import ServingSettings

pytestmark = [
    pytest.mark.skipif(find_spec("ray") is None, reason="needs the extra 'ray'"),
    pytest.mark.slow,
]
DRIVE = Path(__file__).with_name("drive.py")
DRIVE_S = 6 * PATIENCE_S  # several minutes on a busy machine
# Ray kills a proxy that has not started in 5 seconds, which is short on a busy machine
# Its workers give way to all other work by default, and get next to nothing beside it.
PATIENT = {"RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "300", "RAY_worker_niceness": "0"}
K = 5
RNG = np.random.default_rng(3)
HISTORIES = [[f"B{i:04d}" for i in RNG.integers(0, 300, RNG.integers(1, 12))] for _ in range(24)]


def answers(bundle):
    found = Recommender.load(bundle).recommend(HISTORIES, K)
    return [[[one.item_id, float(np.float32(one.score))] for one in answer] for answer in found]


def drive(bundles, scratch):
    """What is right, and what the drive saw."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as a replica has
    right = {name: answers(bundles / name) for name in ("one", "two")}
    values = {"k": K, "histories": HISTORIES, "answers": right}
    (scratch / "right.json").write_text(json.dumps(values))
    names = [f"user-{n}" for n in range(len(HISTORIES))]
    users = scratch / "users.parquet"
    pq.write_table(pa.table({"user_id": names, "history": HISTORIES}), users)
    score(
        Job(
            ServingSettings(bundle=bundles / "one", histories=None, device="cpu", threads=1),
            users,
            {"k": K},
            part_rows=5,
        ),
        scratch / "local",
    )
    torch.set_num_threads(threads)
    with tempfile.TemporaryDirectory(prefix="ray-") as sessions:
        done = subprocess.run(
            [sys.executable, DRIVE, bundles, scratch],
            capture_output=True,
            text=True,
            timeout=DRIVE_S,
            env={**os.environ, "RAY_TMPDIR": sessions, "PATIENCE_S": str(PATIENCE_S), **PATIENT},
        )
    assert done.returncode == 0, done.stderr[-4000:]
    seen = json.loads(done.stdout.splitlines()[-1])
    return {**seen, "right": right}


def test_replicas_answer_as_one_process_through_kills_swaps_and_changes(bundles, tmp_path):
    """One test, since each process of the suite that runs a part of it would start Ray anew."""
    saw = drive(bundles, tmp_path)
    # Two replicas give the local answers bit for bit.
    assert len(saw["processes"]) == 2
    assert saw["answers"] == saw["right"]["one"]
    assert saw["right"]["one"] != saw["right"]["two"]
    # A user's requests go to one replica, and users to both.
    first, again = saw["homes"]
    assert first == again
    assert len(set(first)) == 2
    # A change of the catalog reaches every replica.
    refused, put, *got = saw["items"]
    assert refused == 422, "this bundle has nothing to find codes with"
    assert put in (200, 201)
    assert got == [200] * 6
    # A killed replica loses no answer and is replaced.
    assert saw["kill"]["wrong"] == []
    assert saw["kill"]["answers"] > 20
    before, after = set(saw["processes"]), set(saw["processes_after_the_kill"])
    assert len(after) == 2
    assert len(before & after) == 1
    # A swap under load costs no answer and no process.
    assert saw["swap"]["wrong"] == []
    assert saw["swap"]["models"] == ["one", "two"]
    assert saw["processes_after_the_swap"] == saw["processes_after_the_kill"]
    # Batches on Ray are the local ones byte for byte.
    assert saw["batch"] == [True] * 5
