"""What types of events are worth for predicting purchases, with types and without.

    recsys run retail.csv --name retail --column timestamp=file-order \
        --set "data.behaviours={purchase: target, view: context}"
    python benchmarks/event_types.py --name retail

The run is that of any data set with types. All ways rank the candidates of the same models for the
same users and targets (the next event of a target type), and each reranker is fitted on validation
users. `blind` ignores types: all items of a history count as seen, or none does. Validation figures
are cross-fitted. Differences are paired, with 95 % bootstrap intervals. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from recsys.artifacts import Workspace
from recsys.benchmark.environment import environment
from recsys.dataset import Dataset, Examples
from recsys.evaluation.metrics import paired_bootstrap
from recsys.retrieval import Reranker, Retrieval, SasRec
from recsys.training import sasrec
from recsys.training.reranking import cross_fit, fit, rank_targets
from recsys.training.retrieval import decode_candidates
from recsys.training.settings import RetrievalConfig
from recsys.training.target import TrainedTarget

TOP = 10
WAYS = ("with types", "blind, all seen left out", "blind, nothing left out")


def main() -> None:
    """Measure, print a table and one JSON line."""
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--name", required=True, help="of the run")
    arguments.add_argument("--users", type=int, default=4000, help="of each split, at most")
    args = arguments.parse_args()
    workspace = Workspace.of(args.name)
    dataset, target = Dataset.load(workspace.dataset), TrainedTarget.load(workspace)
    known = Retrieval.load(workspace.run("retrieval"))
    known = replace(known, sasrec=SasRec.load(workspace.run(sasrec.KIND)))
    config = RetrievalConfig()
    shape = Reranker({}, config.candidates, config.nodes)
    ranks: dict[str, dict[str, NDArray[np.int64]]] = {"valid": {}, "test": {}}
    for way in WAYS:
        retrieval = known if way == WAYS[0] else replace(known, types=None)
        found = {
            split: decode_candidates(
                retrieval, see(dataset.examples(split).sample(args.users), way), config, target
            )[0]
            for split in ("valid", "test")
        }
        crossed, reranker = cross_fit(found["valid"], shape), fit(found["valid"], shape)
        if crossed is None or reranker is None:
            raise SystemExit("too few validation users to fit a reranker")
        ranks["valid"][way] = crossed
        ranks["test"][way] = rank_targets(found["test"], reranker)
    report(args.name, dataset, ranks)


def see(examples: Examples, way: str) -> Examples:
    """The examples as a way sees them."""
    if way == WAYS[0]:
        return examples
    histories = examples.histories
    seen = np.full(len(histories.items), way == WAYS[1])
    return replace(examples, histories=replace(histories, behaviours=None, seen=seen))


def report(name: str, dataset: Dataset, ranks: dict[str, dict[str, NDArray[np.int64]]]) -> None:
    """Print R@10 and NDCG@10 of each way, and the gain of types over it."""
    table = Table("split", "way", "R@10", "NDCG@10", "gain of types in NDCG@10", title=name)
    rows = []
    for split, ways in ranks.items():
        hits = {way: (found < TOP).astype(float) for way, found in ways.items()}
        gains = {way: hits[way] / np.log2(found + 2.0) for way, found in ways.items()}
        for way in ways:
            gap = paired_bootstrap(gains[WAYS[0]], gains[way])
            row = {
                "split": split,
                "way": way,
                "users": len(gains[way]),
                "recall@10": round(float(hits[way].mean()), 4),
                "ndcg@10": round(float(gains[way].mean()), 4),
                "gain": vars(gap),
            }
            rows.append(row)
            shown = f"{gap.mean:+.4f} ({gap.low:+.4f} to {gap.high:+.4f})"
            table.add_row(
                split, way, f"{row['recall@10']:.4f}", f"{row['ndcg@10']:.4f}",
                "" if way == WAYS[0] else shown,
            )  # fmt: skip
    Console(stderr=True).print(table)
    types = [behaviour._asdict() for behaviour in dataset.behaviours]
    print(json.dumps({"name": name, "types": types, "rows": rows, "environment": environment()}))


if __name__ == "__main__":
    main()
