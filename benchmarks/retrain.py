"""What is retraining worth? Time windows of a shop, served by three kinds of bundles.

    python benchmarks/retrain.py ratings.csv --items movies.csv --windows 10 --out var/retrain

The older half of the events makes the first bundle. The newer half comes in windows, one a night:

    never         the first bundle; items that are newer are added to it, as to a running service
    incremental   `recsys retrain`, promoted whenever its gate offers it
    scratch       `recsys run` on the events that `recsys retrain` has, with its dates of the split

Each night, all three rank the users of the newest part of the window (`gate.window`), of which none
has learned. Printed are Recall@10 and NDCG@10, the difference of incremental and scratch with its
95 % interval over users, and the processor time of the training. The files can be those of
MovieLens-latest, or of any shop with times (`recsys run` says which columns are recognised).
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from recsys.artifacts import Workspace
from recsys.config import SHIPPED, Settings
from recsys.data.prepare import DataConfig
from recsys.data.readers import READERS
from recsys.dataset import Dataset
from recsys.evaluation.gate import Served, with_new_items
from recsys.evaluation.protocol import EvaluationConfig, evaluate, find
from recsys.pipeline import SECTIONS, STAGES, Context
from recsys.pipeline import run as run_stages
from recsys.recommender import Recommender
from recsys.retraining import Sources, retrain

NAME = "shop"
COLUMNS = {"user": "user", "item": "item", "timestamp": "timestamp"}
MADE = STAGES[STAGES.index("sasrec") : STAGES.index("bundle") + 1]


class Service:
    """What `retrain` needs of a service: an alias that can be changed."""

    def __init__(self, base: Workspace) -> None:
        self._base, self._bundle = base, base.name

    def alias(self, name: str) -> Any:
        """What the alias stands for."""
        digest = replace(self._base, name=self._bundle).manifest("bundle").digest
        return SimpleNamespace(name=name, bundle=self._bundle, version=digest, previous=None)

    def aliases(self) -> list[Any]:
        """All aliases; the first bundle is needed until the end."""
        return [self.alias("champion"), SimpleNamespace(bundle=self._base.name, previous=None)]

    def set_alias(self, name: str, bundle: str) -> None:
        """Let the alias stand for a bundle."""
        self._bundle = bundle


def read(events: Path, items: Path | None) -> tuple[pa.Table, pa.Table]:
    """Events in order of time, and items, as `recsys run` reads them."""
    section = {"source": "table", "path": str(events.absolute())}
    if items is not None:
        section["items"] = str(items.absolute())
    raw = READERS["table"].read(Settings({"data": section}).section("data", DataConfig).reader())
    return raw.events.select(list(COLUMNS)).sort_by("timestamp"), raw.items


def write_until(folder: Path, events: pa.Table, items: pa.Table, end: int) -> Sources:
    """Write the first events, and the items that have one of them, as a shop would export them."""
    folder.mkdir(parents=True, exist_ok=True)
    events = events.slice(0, end)
    seen = set(events["item"].to_pylist())
    there = pa.array([item_id in seen for item_id in items["item_id"].to_pylist()])
    files = folder / "events.parquet", folder / "items.parquet"
    pq.write_table(events, files[0])
    pq.write_table(items.filter(there), files[1])
    return Sources(events=files[0], items=files[1], columns={**COLUMNS, "id": "item_id"})


def timed(work: Callable[[], Any]) -> float:
    """Minutes of processor time."""
    start = time.process_time()
    work()
    return (time.process_time() - start) / 60


def measure(version: Workspace, scratch: Workspace, base: Workspace, users: int) -> dict[str, Any]:
    """Recall@10 and NDCG@10 of the three, and incremental minus scratch."""
    dataset = Dataset.load(version.dataset)
    bundles = {"incremental": version.bundle, "scratch": scratch.bundle, "never": base.bundle}
    rankers = {
        name: Served(with_new_items(Recommender.load(path), dataset))
        for name, path in bundles.items()
    }
    protocol = EvaluationConfig(ks=(10,), seen="masked", users=users)
    result = evaluate(rankers, dataset, protocol)
    about = {"k": 10, "targets": "next", "seen": "masked"}
    row: dict[str, Any] = {"users": len(result.users), "items": len(dataset.item_ids)}
    for metric in ("recall", "ndcg"):
        for name in rankers:
            found = find(result.metrics, ranker=name, metric=metric, **about)
            row[f"{metric} {name}"] = found["mean"]
        gap = find(result.comparisons, against="scratch", metric=metric, **about)
        row[f"{metric} gap"] = [gap[key] for key in ("mean", "low", "high")]
    return row


def main() -> None:
    """Run all nights; a night that is in `nights.jsonl` is not repeated."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("events", type=Path)
    parser.add_argument("--items", type=Path)
    parser.add_argument("--windows", type=int, default=10)
    parser.add_argument("--out", type=Path, default=Path("var/retrain"))
    parser.add_argument("--config", type=Path, default=SHIPPED / "shop.yaml")
    parser.add_argument("--set", dest="overrides", action="append", default=[])
    parser.add_argument("--gate", action="append", default=[], help="settings of the gate")
    parser.add_argument("--users", type=int, default=5000, help="that are ranked each night")
    given = parser.parse_args()
    os.environ["RECSYS_HOME"] = str((given.out / "home").absolute())
    base = Workspace.of(NAME)
    events, items = read(given.events, given.items)
    ends = np.linspace(events.num_rows // 2, events.num_rows, given.windows + 1).astype(int)
    sources = write_until(given.out / "night-0", events, items, ends[0])
    settings = Settings.load(given.config, given.overrides, known=SECTIONS, name=NAME)
    values = {**settings.values, "minutes": None}
    values.pop("recipe", None)  # the same recipe for all
    values["data"] = {
        **(values.get("data") or {}), "source": "table", "path": str(sources.events.absolute()),
        "items": str(sources.items.absolute()), "columns": dict(sources.columns),
    }  # fmt: skip
    cpu = timed(lambda: run_stages(Context.of(Settings(values)), ["data", *MADE]))
    print(f"first run: {cpu:.1f} minutes of processor time", flush=True)
    service, log = Service(base), given.out / "nights.jsonl"
    nights = [json.loads(x) for x in log.read_text().splitlines()] if log.is_file() else []
    if nights:
        service.set_alias("champion", nights[-1]["champion"])
    for night in range(len(nights) + 1, given.windows + 1):
        sources = write_until(given.out / f"night-{night}", events, items, ends[night])
        marks: dict[str, float] = {}
        changes = Settings.load(None, given.gate, known=SECTIONS, name=NAME)
        outcome = retrain(
            changes,
            sources,
            clients=[service],  # type: ignore[list-item]
            promote=True,
            force=True,  # a night that was stopped begins again, so that its time is whole
            done=lambda step, marks=marks: marks.update({step: time.process_time()}),
        )
        assert outcome.version is not None, outcome.reasons
        version = replace(base, name=outcome.version)
        scratch = replace(base, name=f"scratch-{night}")
        shutil.rmtree(scratch.home / "runs" / scratch.name, ignore_errors=True)
        shutil.copytree(version.dataset, scratch.dataset, dirs_exist_ok=True)
        alone = {key: value for key, value in values.items() if key != "data"}
        context = Context(Settings({**alone, "name": scratch.name}), scratch)
        row = {
            "night": night,
            "champion": service.alias("champion").bundle,
            "cpu incremental": (marks["bundle"] - marks["events"]) / 60,
            "cpu scratch": timed(lambda context=context: run_stages(context, MADE)),
            **measure(version, scratch, base, given.users),
        }
        shutil.rmtree(scratch.home / "runs" / scratch.name)
        with log.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        nights.append(row)
        show(row)
    share = np.mean([n["ndcg incremental"] for n in nights])
    share /= max(np.mean([n["ndcg scratch"] for n in nights]), 1e-12)
    ratio = sum(n["cpu incremental"] for n in nights) / sum(n["cpu scratch"] for n in nights)
    print(f"incremental: {share:.1%} of the NDCG@10 of scratch in {ratio:.1%} of its time")


def show(row: dict[str, Any]) -> None:
    """Print a night."""
    cells = [
        f"{metric}@10 "
        + ", ".join(f"{name} {row[f'{metric} {name}']:.4f}" for name in ("never", "incremental",
                                                                         "scratch"))
        + " ({:+.4f}, {:+.4f} to {:+.4f})".format(*row[f"{metric} gap"])
        for metric in ("recall", "ndcg")
    ]  # fmt: skip
    times = f"{row['cpu incremental']:.2f} and {row['cpu scratch']:.2f} minutes"
    print(f"night {row['night']}, {row['users']} users: {'; '.join(cells)}; {times}", flush=True)


if __name__ == "__main__":
    main()
