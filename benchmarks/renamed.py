"""A data set and a renamed copy of it, run by one command each without any setting.

    export RECSYS_HOME=...
    python benchmarks/renamed.py s3rec-lastfm/LastFM.txt --attributes \
        s3rec-lastfm/LastFM_item2attributes.json

The copy has S3-Rec's format (a line for each user: its id, then its items in order), other numbers
for all users, items and attributes, and its lines in another order. A pipeline that is tuned to no
data set gives both the same figures, up to the noise of another seed. The table has R@10 and
NDCG@10 on test of the served list and of each part, with 95 % intervals over users.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from recsys.artifacts import Workspace

RAW = Path(os.environ.get("RECSYS_DATASETS", "var/raw"))


def main() -> int:
    """Run both, print the table and one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("path", help="events, relative to $RECSYS_DATASETS")
    parser.add_argument("--attributes", help="JSON, item -> attributes, relative to the same")
    parser.add_argument("--seed", type=int, default=1, help="of the new numbers")
    arguments = parser.parse_args()
    events = RAW / arguments.path
    attributes = RAW / arguments.attributes if arguments.attributes else None
    name, facts = events.stem.lower(), {}
    with TemporaryDirectory() as folder:
        copy = rename(events, attributes, Path(folder), arguments.seed)
        for run, files in ((name, (events, attributes)), (f"{name}-renamed", copy)):
            facts[run] = one_run(run, *files)
    table = Table(title=f"{name}, test, seen items masked")
    for heading in ("ranker", "R@10", "NDCG@10", "renamed: R@10", "NDCG@10"):
        table.add_column(heading)
    for ranker in facts[name]["figures"]:
        cells = [
            f"{own['mean']:.4f} ({own['low']:.4f}–{own['high']:.4f})"
            for run in facts.values()
            for metric in ("recall", "ndcg")
            for own in [run["figures"].get(ranker, {}).get(metric)]
            if own is not None
        ]
        table.add_row(ranker, *cells)
    Console(width=140).print(table)
    print(json.dumps(facts))
    return 0


def one_run(name: str, events: Path, attributes: Path | None) -> dict[str, Any]:
    """Seconds, and figures of each ranker, of `recsys run` with the files alone.

    Raises:
        CalledProcessError: the command failed.
    """
    command = ["recsys", "run", "--name", name, "--set", "data.source=s3rec"]
    command += ["--set", f"data.path={events.resolve()}"]
    if attributes is not None:
        command += ["--set", f"data.attributes={attributes.resolve()}"]
    start = time.perf_counter()
    subprocess.run(command, check=True, stdout=sys.stderr)
    report = json.loads((Workspace.of(name).report / "report.json").read_text(encoding="utf-8"))
    figures: dict[str, dict[str, Any]] = {}
    for row in report["metrics"]:
        if (row["seen"], row["targets"], row["k"]) == ("masked", "next", 10):
            values = {key: row[key] for key in ("mean", "low", "high")}
            figures.setdefault(row["ranker"], {})[row["metric"]] = values
    return {"seconds": round(time.perf_counter() - start), "figures": figures}


def rename(
    events: Path, attributes: Path | None, folder: Path, seed: int
) -> tuple[Path, Path | None]:
    """Write the copy to a folder; returns its files."""
    rng = np.random.default_rng(seed)
    users, histories = [], []
    for line in events.read_text(encoding="utf-8").splitlines():
        user, *items = line.split()
        users.append(user)
        histories.append(items)
    described = {} if attributes is None else json.loads(attributes.read_text(encoding="utf-8"))
    new_user = numbers(users, rng)
    new_item = numbers({i for items in histories for i in items} | described.keys(), rng)
    new_value = numbers({str(v) for values in described.values() for v in values}, rng)
    lines = [
        " ".join([new_user[user], *(new_item[item] for item in items)])
        for user, items in zip(users, histories, strict=True)
    ]
    copy = folder / "events.txt"
    copy.write_text("\n".join(lines[row] for row in rng.permutation(len(lines))) + "\n")
    if attributes is None:
        return copy, None
    pairs = [(new_item[i], [int(new_value[str(v)]) for v in vs]) for i, vs in described.items()]
    values = folder / "attributes.json"
    values.write_text(json.dumps(dict(pairs[row] for row in rng.permutation(len(pairs)))))
    return copy, values


def numbers(names: Iterable[str], rng: np.random.Generator) -> dict[str, str]:
    """A new number, from 1, for each name."""
    known = sorted(set(names))
    drawn = (1 + rng.permutation(len(known))).tolist()
    return dict(zip(known, map(str, drawn), strict=True))


if __name__ == "__main__":
    sys.exit(main())
