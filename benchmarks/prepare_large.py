"""What it takes to prepare data that do not fit in memory, and whether the result is right.

    python benchmarks/prepare_large.py --rows 100000000 --folder /tmp/large

Interactions are made up (people and things by skewed popularity, 1 % exact duplicates, texts as
ids), `recsys data prepare` streams them in a process of its own, whose peak memory and time are
measured, and so is one that loads the result. Two comparisons with the path in memory follow: the
first rows of the input are prepared both ways, and the rows of some people in the large result are
set against those that memory makes of their rows in the input. One line of JSON comes last.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as pads
import pyarrow.parquet as pq
from environment import environment

from recsys.artifacts import write_artifact
from recsys.data.prepare import DataConfig, build, write_streamed
from recsys.data.stats import describe
from recsys.dataset import Dataset

CHUNK = 1 << 21
FIRST, LAST = 1_500_000_000, 1_600_000_000  # unix seconds
K_CORE = 5
COLUMNS = ("user", "item", "timestamp", "rating")


def make(path: Path, rows: int, seed: int = 0) -> None:
    """Write interactions of about twenty events a person and a hundred a thing."""
    rng = np.random.default_rng(seed)
    users, items = max(rows // 20, 50), max(rows // 100, 50)
    writer = None
    for start in range(0, rows, CHUNK):
        n = min(CHUNK, rows - start)
        user = (users * rng.random(n, np.float32) ** 3).astype(np.int64)
        item = (items * rng.random(n, np.float32) ** 3).astype(np.int64)
        columns = [
            user * 2_654_435_761 % users,  # so that names say nothing of popularity
            item * 40_503 % items,
            rng.integers(FIRST, LAST, n),
            rng.integers(1, 6, n).astype(np.float32),
        ]
        again = np.flatnonzero(rng.random(n - 1, np.float32) < 0.01)
        for column in columns:
            column[again + 1] = column[again]
        ids = [pc.cast(pa.array(column), pa.string()) for column in columns[:2]]
        table = pa.table([*ids, *columns[2:]], names=COLUMNS)
        writer = writer or pq.ParquetWriter(path, table.schema, use_dictionary=False)
        writer.write_table(table)
    if writer is not None:
        writer.close()


def measured(arguments: list[str], variables: dict[str, str]) -> dict[str, float]:
    """Seconds (wall and processor) and peak memory in GiB of a process of its own."""
    start = time.perf_counter()
    process = os.posix_spawn(sys.executable, [sys.executable, *arguments], variables)
    _, status, used = os.wait4(process, 0)
    if status:
        raise SystemExit(f"{' '.join(arguments)[:200]} failed: status {status}")
    return {
        "wall_s": round(time.perf_counter() - start, 1),
        "cpu_s": round(used.ru_utime + used.ru_stime, 1),
        "peak_gib": round(used.ru_maxrss / 2**20, 2),
    }


def equal(one: Dataset, other: Dataset) -> bool:
    """Whether two data sets say the same."""
    names = (*COLUMNS, "user_ids", "item_ids")
    same = [
        np.array_equal(getattr(one.interactions, n), getattr(other.interactions, n)) for n in names
    ]
    return all(same) and np.array_equal(one.split, other.split) and one.items.equals(other.items)


def sample_agrees(source: Path, rows: int, folder: Path) -> bool:
    """Prepare the first rows both ways."""
    table = next(pq.ParquetFile(source).iter_batches(rows))
    pq.write_table(pa.Table.from_batches([table]), folder / "sample.parquet")
    config = DataConfig(source="table", path=str(folder / "sample.parquet"), k_core=K_CORE)
    expected = build(config)
    info: dict[str, object] = {}
    with write_artifact(folder / "sample", "dataset", info=info) as made:
        info |= write_streamed(config, made)
    same = info["stats"] == describe(expected.dataset) and info["decisions"] == expected.decisions
    return same and equal(Dataset.load(folder / "sample"), expected.dataset)


def people_agree(source: Path, result: Path, count: int, folder: Path) -> int:
    """Compare some people of the large result with what memory makes of their rows.

    A row is in the core if its user and its item are, so that the catalog of the result tells
    which rows of a person must be there.

    Returns:
        rows compared.
    """
    ids = pq.read_table(result / "users.parquet")["user_id"]
    chosen = np.random.default_rng(1).choice(len(ids), min(count, len(ids)), replace=False)
    chosen = np.sort(chosen)
    names = ids.take(pa.array(chosen)).combine_chunks()
    items = pq.read_table(result / "items.parquet", columns=["item_id"])["item_id"]
    scan = pads.dataset(source).to_batches(filter=pads.field("user").isin(names))
    rows = pa.Table.from_batches([b for b in scan if b.num_rows])
    rows = rows.filter(pc.is_in(rows["item"], value_set=items.combine_chunks()))
    pq.write_table(rows, folder / "people.parquet")
    expected = build(DataConfig(source="table", path=str(folder / "people.parquet"))).dataset
    # Numbers go by first appearance, so that the order of the sample is that of the result.
    assert expected.interactions.user_ids.tolist() == names.to_pylist()
    start = 0
    for part in Dataset.parts(result):
        here = np.isin(part.user, chosen)
        stop = start + int(here.sum())
        mine = expected.events
        assert np.array_equal(chosen[mine.user[start:stop]], part.user[here])
        theirs = items.take(pa.array(part.item[here])).to_pylist()
        assert expected.item_ids[mine.item[start:stop]].tolist() == theirs
        for name in ("timestamp", "rating", "split"):
            column = getattr(mine, name)[start:stop]
            assert np.array_equal(column, getattr(part, name)[here]), name
        start = stop
    assert start == len(expected.interactions)
    return start


def main() -> None:
    """Make, prepare, measure, compare."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--memory-gb", type=float, default=8.0)
    parser.add_argument("--sample", type=int, default=300_000, help="rows prepared both ways")
    parser.add_argument("--people", type=int, default=5_000, help="compared in the large result")
    parser.add_argument("--folder", type=Path, default=Path("/tmp/prepare_large"))
    parser.add_argument("--keep", action="store_true", help="leave the files")
    options = parser.parse_args()
    folder: Path = options.folder
    folder.mkdir(parents=True, exist_ok=True)
    source = folder / "events.parquet"
    start = time.perf_counter()
    make(source, options.rows)
    made_s = time.perf_counter() - start
    print(f"made {options.rows:,} rows in {made_s:.0f} s, {source.stat().st_size / 2**30:.2f} GiB")
    variables = {**os.environ, "RECSYS_HOME": str(folder / "home")}
    command = [
        "-c", "from recsys.cli import main; main()", "data", "prepare",
        "--source", "table", "--path", str(source), "--name", "large", "--force",
        "--set", "data.engine=stream", "--set", f"data.k_core={K_CORE}",
        "--set", f"data.memory_gb={options.memory_gb}", "--json",
    ]  # fmt: skip
    prepared = measured(command, variables)
    print("prepare", prepared)
    result = folder / "home/datasets/large"
    loaded = measured(
        ["-c", f"from recsys.dataset import Dataset; Dataset.load({str(result)!r})"], variables
    )
    print("load", loaded)
    info = Dataset.manifest(result).info
    figures = {
        "rows": options.rows,
        "kept": info["stats"]["interactions"],
        "users": info["stats"]["users"],
        "items": info["stats"]["items"],
        "parts": len(list((result / "interactions").iterdir())),
        "decisions": info["decisions"],
        "limit_gib": options.memory_gb,
        "prepare": prepared,
        "load": loaded,
        "sample_rows": options.sample,
        "sample_equal": sample_agrees(source, options.sample, folder),
        "people_rows_equal": people_agree(source, result, options.people, folder),
        "load_average": round(os.getloadavg()[0], 1),
        "total_s": round(time.perf_counter() - start, 1),
        **environment(),
    }
    if not options.keep:
        shutil.rmtree(folder)
    print(json.dumps(figures))
    if not figures["sample_equal"] or prepared["peak_gib"] > options.memory_gb:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
