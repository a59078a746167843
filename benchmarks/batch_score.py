"""Batch scoring: are all answers the recommender's, also after a kill, and what does a worker add?

    OMP_NUM_THREADS=1 python benchmarks/batch_score.py var/bundles/beauty var/datasets/beauty

All users of the data set are scored by one worker process; then by two, whose run is killed
(SIGKILL) with a third of the parts written, and run again. Then a `Recommender` in this process
answers everybody in batches of its own. Equal means: the same items, sources and float32 bits of
scores, a row for every user, none lost, none twice. Throughput is users a second between the first
part and the last, so without the loading; for two workers, of the run after the kill.

The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
from environment import environment

from recsys.dataset import Dataset
from recsys.recommender import Recommender, RecommendRequest

K = 10
PART_ROWS = 256
BATCH = 50


def command(arguments: argparse.Namespace, users: Path, out: Path, workers: int) -> list[str]:
    """`recsys batch score`, as a shell would start it."""
    main = "from recsys.cli import main; main()"
    options = ["--bundle", arguments.bundle, "--histories", arguments.dataset, "--users", users]
    options += ["--out", out, "--k", K, "--part-rows", PART_ROWS, "--workers", workers, "--json"]
    return [sys.executable, "-c", main, "batch", "score", *map(str, options)]


def killed_with(parts: int, line: list[str], out: Path) -> int:
    """Kill a run once so many parts are there; how many there are when its workers are gone."""
    child = subprocess.Popen(line, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while len(list(out.glob("part-*.parquet"))) < parts:
        if child.poll() is not None:
            raise SystemExit("it ended before it could be killed")
        time.sleep(0.05)
    workers = psutil.Process(child.pid).children(recursive=True)
    os.kill(child.pid, signal.SIGKILL)
    child.wait()
    _, alive = psutil.wait_procs(workers, timeout=120)
    if alive:
        raise SystemExit(f"{len(alive)} workers outlived their run")
    return len(list(out.glob("part-*.parquet")))


def table_of(out: Path) -> pa.Table:
    """All parts, in order."""
    return pa.concat_tables(pq.read_table(part) for part in sorted(out.glob("part-*.parquet")))


def by_recommender(bundle: Path, histories: list[list[str]]) -> pa.Table:
    """What a `Recommender` answers, in batches of `BATCH`, as they come."""
    recommender = Recommender.load(bundle)
    found = []
    for start in range(0, len(histories), BATCH):
        requests = [RecommendRequest(h, K) for h in histories[start : start + BATCH]]
        found += [r.recommendations for r in recommender.recommend_batch(requests)]
    return pa.table(
        {
            "item_id": pa.array([[o.item_id for o in one] for one in found]),
            "score": pa.array(
                [np.float32([o.score for o in one]) for one in found], pa.list_(pa.float32())
            ),
            "source": pa.array([[o.source for o in one] for one in found]),
        }
    )


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("bundle", type=Path)
    parser.add_argument("dataset", type=Path)
    parser.add_argument("--users", type=int, help="only the first so many")
    arguments = parser.parse_args()
    events = Dataset.load(arguments.dataset).interactions
    names = events.user_ids[: arguments.users].tolist()
    histories = [events.item_ids[events.histories[user]].tolist() for user in range(len(names))]
    with tempfile.TemporaryDirectory() as folder:
        users, one, two = (Path(folder) / name for name in ("users.parquet", "one", "two"))
        pq.write_table(pa.table({"user_id": names}), users)
        line = command(arguments, users, one, 1)
        alone = json.loads(subprocess.run(line, check=True, stdout=subprocess.PIPE).stdout)
        line = command(arguments, users, two, 2)
        kept = killed_with(alone["parts"] // 3, line, two)
        pair = json.loads(subprocess.run(line, check=True, stdout=subprocess.PIPE).stdout)
        first, second = table_of(one), table_of(two)
    expected = by_recommender(arguments.bundle, histories)
    print(f"{len(names):,} users in {alone['parts']} parts; killed with {kept} of them written")
    same = first.select(expected.column_names).equals(expected)
    print(f"one worker   {alone['users_per_second']:8.1f} users/s   equal to Recommender: {same}")
    print(f"two workers  {pair['users_per_second']:8.1f} users/s   equal: {second.equals(first)}")
    result = {
        "benchmark": "batch_score",
        "users": len(names),
        "parts": alone["parts"],
        "parts_before_the_kill": kept,
        "scored_after_the_kill": pair["scored"],
        "equal_to_recommender": same,
        "equal_after_the_kill": second.equals(first),
        "rows_in_order": second["user_id"].to_pylist() == names,
        "users_per_second": [alone["users_per_second"], pair["users_per_second"]],
        "two_against_one": pair["users_per_second"] / alone["users_per_second"],
        **environment(),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
