"""Quality of data sets after a change: served lists and their parts on test, from whole runs.

    python benchmarks/quality.py configs/beauty.yaml configs/yelp.yaml --out rows.jsonl
    python benchmarks/quality.py events.csv --set minutes=8 --out rows.jsonl

Each configuration, or file of events, is run by `recsys run`. The table has Recall@10 / NDCG@10 of
the served list and of each part; the sign after a part says whether the served list is
significantly above (+) or below (-) it in either metric, by 95 % intervals of paired differences
over users. A row is appended to `--out` as each run ends.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from recsys.artifacts import Workspace
from recsys.benchmark.environment import environment
from recsys.config import Settings

METRICS = ("recall", "ndcg")
Row = dict[str, Any]


def run(source: Path, settings: list[str]) -> Row:
    """Run one data set, and return its row."""
    if source.suffix == ".yaml":
        name, what = Settings.load(source).name, ["--config", str(source)]
    else:
        name, what = source.stem, [str(source), "--name", source.stem]
    command = [sys.executable, "-m", "recsys", "run", *what]
    command += [text for setting in settings for text in ("--set", setting)]
    start = time.perf_counter()
    subprocess.run(command, check=True)
    report = json.loads((Workspace.of(name).report / "report.json").read_text(encoding="utf-8"))
    minutes = round((time.perf_counter() - start) / 60, 2)
    return {"name": name, "minutes": minutes, **summary(report), **environment()}


def summary(report: Mapping[str, Any]) -> Row:
    """What the table needs of a report: the headline figures, and the paired differences."""
    at = {key: report["headline"][key] for key in ("seen", "targets", "k")}
    rows = [row for row in report["metrics"] if all(row[key] == value for key, value in at.items())]
    served = report["rankers"][0]
    values: dict[str, Row] = {}
    for row in rows:
        values.setdefault(row["ranker"], {})[row["metric"]] = row["mean"]
    differences: dict[str, Row] = {}
    for row in report["comparisons"]:
        if row["ranker"] == served and all(row[key] == value for key, value in at.items()):
            gap = (row["mean"], row["low"], row["high"])
            differences.setdefault(row["against"], {})[row["metric"]] = gap
    users = report["data"]["users_evaluated"]
    return {"served": served, "users": users, "values": values, "differences": differences}


def sign(differences: Mapping[str, Any]) -> str:
    """`+` or `-` where the served list is significantly above or below in a metric."""
    gaps = [differences[metric] for metric in METRICS if metric in differences]
    return "".join("+" if low > 0 else "-" if high < 0 else "=" for _, low, high in gaps)


def show(rows: list[Row]) -> None:
    """Print the table."""
    table = Table("data set", "users", "minutes", "ranker", "Recall / NDCG", "served list")
    for row in rows:
        for ranker, values in row["values"].items():
            pair = " / ".join(f"{values[metric]:.4f}" for metric in METRICS)
            is_served = ranker == row["served"]
            own = (
                [row["name"], str(row["users"]), f"{row['minutes']:.1f}"] if is_served else [""] * 3
            )
            table.add_row(*own, ranker, pair, sign(row["differences"].get(ranker, {})))
    Console(width=110).print(table)


def main() -> None:
    """Run the data sets and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("sources", type=Path, nargs="*", help="configurations or files of events")
    parser.add_argument("--out", type=Path, required=True, help="rows, as JSON lines")
    parser.add_argument("--set", action="append", default=[], help="passed to `recsys run`")
    arguments = parser.parse_args()
    for source in arguments.sources:
        row = run(source, arguments.set)
        with arguments.out.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
    show([json.loads(line) for line in arguments.out.read_text(encoding="utf-8").splitlines()])


if __name__ == "__main__":
    main()
