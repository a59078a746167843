"""What is retraining worth? Time windows of a shop, served by three kinds of bundles.

    python benchmarks/retrain.py ratings.csv --items movies.csv --windows 10 --out var/retrain

The older half of the events makes the first bundle. The newer half comes in windows, one a night:

    never         the first bundle; items that are newer are added to it, as to a running service
    incremental   the version of `recsys retrain`, promoted if its gate offers it; a refused one is
                  measured, too, and the next night continues the champion
    scratch       `recsys run` on the events that `recsys retrain` has, with its dates of the split

Each night, all three rank the users of the newest part of the window (`gate.window`), of which none
has learned. Printed are Recall@10 and NDCG@10 of the next item, and the precision of the ten items,
of which all later events of the user count; by night, and over all nights, where the ratio of
incremental and scratch has a 95 % interval over persons; and the processor time of the training.
The folder gets a drawing (`retrain.svg`); the last line is JSON. The files can be those of
MovieLens-latest, or of any shop with times (`recsys run` says which columns are recognised).
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shlex
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from recsys.artifacts import Workspace
from recsys.benchmark.report import Line, Panel, Plot, Report, Table, begin, publish
from recsys.config import SHIPPED, Settings
from recsys.data.prepare import DataConfig
from recsys.data.readers import READERS
from recsys.dataset import Dataset
from recsys.evaluation.gate import Served, with_new_items
from recsys.evaluation.metrics import interval, resampled_means
from recsys.evaluation.protocol import EvaluationConfig, evaluate
from recsys.evaluation.report import per_user
from recsys.pipeline import SECTIONS, STAGES, Context
from recsys.pipeline import run as run_stages
from recsys.recommender import Recommender
from recsys.retraining import Sources, retrain

NAME = "shop"
KINDS = ("never", "incremental", "scratch")
METRICS = ("recall", "ndcg", "precision")
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
    """The users of a night, and for each list the rank of the next item and the hits of all later.

    Rank 0 stands for an item beyond the tenth; `cold` are items without training events.
    """
    dataset = Dataset.load(version.dataset)
    bundles = {"never": base.bundle, "incremental": version.bundle, "scratch": scratch.bundle}
    rankers = {
        name: Served(with_new_items(Recommender.load(path), dataset))
        for name, path in bundles.items()
    }
    protocol = EvaluationConfig(ks=(10,), seen="masked", users=users)
    table = per_user(evaluate(rankers, dataset, protocol), dataset)
    rows = {name: table.filter(pc.equal(table["ranker"].cast("string"), name)) for name in rankers}
    return {
        "items": len(dataset.item_ids),
        "users": rows["never"]["user_id"].to_pylist(),
        "cold": pc.equal(rows["never"]["target_popularity"], 0).to_pylist(),
        "ranks": {name: pc.fill_null(row["rank"], 0).to_pylist() for name, row in rows.items()},
        "hits": {name: row["hits_at_10"].to_pylist() for name, row in rows.items()},
    }


def gains(night: dict[str, Any], metric: str) -> np.ndarray:
    """(users, 3) values of a metric, of `KINDS`."""
    if metric == "precision":
        return np.array([night["hits"][name] for name in KINDS]).T / 10
    ranks = np.array([night["ranks"][name] for name in KINDS]).T
    return (ranks > 0) / (np.log2(np.maximum(ranks, 1) + 1) if metric == "ndcg" else 1)


def pool(nights: list[dict[str, Any]], metric: str) -> dict[str, Any]:
    """Means over the users of all nights, and two ratios with intervals over persons.

    A person who came in several nights is drawn with all of them.
    """
    persons, of = np.unique(np.concatenate([n["users"] for n in nights]), return_inverse=True)
    values = np.concatenate([gains(n, metric) for n in nights])
    sums = np.zeros((len(persons), len(KINDS)))
    np.add.at(sums, of, values)
    draws = np.maximum(resampled_means(sums, resamples=5000), 1e-12)
    means = dict(zip(KINDS, values.mean(0), strict=True))
    found: dict[str, Any] = {name: float(mean) for name, mean in means.items()}
    for a, b in (("incremental", "scratch"), ("incremental", "never")):
        ratio = draws[:, KINDS.index(a)] / draws[:, KINDS.index(b)]
        found[f"{a} / {b}"] = list(vars(interval(means[a] / max(means[b], 1e-12), ratio)).values())
    return found


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
        taken = [marks[name] for name in ("data", *MADE)]
        stages = {
            "incremental": [(b - a) / 60 for a, b in itertools.pairwise(taken)],
            "scratch": [timed(lambda c=context, n=name: run_stages(c, [n])) for name in MADE],
        }
        row = {
            "night": night,
            "champion": service.alias("champion").bundle,
            "cpu incremental": (marks["bundle"] - marks["events"]) / 60,
            "cpu scratch": sum(stages["scratch"]),
            "stages": {name: dict(zip(MADE, times, strict=True)) for name, times in stages.items()},
            **measure(version, scratch, base, given.users),
        }
        shutil.rmtree(scratch.home / "runs" / scratch.name)
        with log.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        nights.append(row)
        shown = {metric: gains(row, metric).mean(0).round(4).tolist() for metric in METRICS}
        times = [round(row[f"cpu {name}"], 2) for name in KINDS[1:]]
        print(f"night {night}, {len(row['users'])} users: {shown}, {times} minutes", flush=True)
    document = begin("retrain", quick=False)
    document["command"] = shlex.join(["python", "benchmarks/retrain.py", *sys.argv[1:]])
    document["nights"] = nights
    document |= {metric: pool(nights, metric) for metric in METRICS}
    publish(document, report(document), given.out, as_json=False)


def report(document: dict[str, Any]) -> Report:
    """Table, sentences and drawing of all nights."""
    nights = document["nights"]
    rows, lines = [], {metric: np.array([gains(n, metric).mean(0) for n in nights])
                       for metric in METRICS}  # fmt: skip
    for place, night in enumerate(nights):
        numbers = [f"{value:.3f}" for metric in METRICS for value in lines[metric][place]]
        times = [f"{night[f'cpu {name}']:.2f}" for name in KINDS[1:]]
        counts = [str(len(night["users"])), f"{np.mean(night['cold']):.0%}"]
        rows.append([str(night["night"]), *counts, *numbers, *times, night["champion"]])
    spent = {name: sum(night[f"cpu {name}"] for night in nights) for name in KINDS[1:]}
    users, persons = (len(f([u for n in nights for u in n["users"]])) for f in (list, set))
    champions = [NAME, *(night["champion"] for night in nights)]
    promoted = sum(a != b for a, b in itertools.pairwise(champions))
    sentences = [
        f"The gate let {promoted} of {len(nights)} versions be promoted.",
        f"All nights, {users} next items of {persons} persons:",
        *(
            f"{metric}@10: "
            + ", ".join(f"{name} {document[metric][name]:.4f}" for name in KINDS)
            + "".join(
                f"; {name} {found[0]:.1%} ({found[1]:.1%} to {found[2]:.1%})"
                for name, found in document[metric].items() if "/" in name
            )
            for metric in METRICS
        ),
        f"incremental needs {spent['incremental'] / spent['scratch']:.1%} of the processor time of "
        f"scratch ({spent['incremental']:.1f} and {spent['scratch']:.1f} minutes)",
        *(
            f"minutes of {name} by stage: "
            + ", ".join(f"{stage} {sum(n['stages'][name][stage] for n in nights):.2f}"
                        for stage in MADE)
            for name in KINDS[1:]
        ),
    ]  # fmt: skip
    heads = [f"{short} {name[:7]}" for short in ("R", "N", "P") for name in KINDS]
    columns = ["night", "users", "cold", *heads, "min. i", "min. s", "champion"]
    x = [float(night["night"]) for night in nights]
    panels = [
        Panel(f"{metric}@10", "night", [Line(name, x, lines[metric][:, i].tolist())
                                        for i, name in enumerate(KINDS)])
        for metric in METRICS
    ]  # fmt: skip
    panels.append(Panel("minutes of processor time", "night", [
        Line(name, x, [night[f"cpu {name}"] for night in nights]) for name in KINDS[1:]
    ]))  # fmt: skip
    caption = "Quality and processor time of three ways of retraining, by night."
    note = "R, N, P: recall, NDCG, precision at 10; min.: processor time; cold: share of next items"
    return Report("What is retraining worth?", sentences, [Table("", columns, rows, note)],
                  [Plot("retrain", caption, panels)])  # fmt: skip


if __name__ == "__main__":
    main()
