r"""How the reranker of a blended list is best fitted to few validation users.

    python benchmarks/few_users.py boxes giftcards magazines beauty sports yelp retailrocket \
        --prior-of magazines beauty sports yelp

Each argument is the name of a run in `$RECSYS_HOME`. Some of its validation users are drawn, as
many as a small shop has. With them the best single source is chosen and the reranker is fitted, and
NDCG@10 is computed for all other validation users, seen items masked. The reranker is fitted with a
penalty on the weights themselves, or on their distance to a prior: the mean of the weights that fit
the other runs of `--prior-of`. At the end, the mean over all of them is printed: the prior of
`recsys.training.reranking`. No test events are used.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from unittest import mock

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from recsys.artifacts import Workspace
from recsys.benchmark.environment import environment
from recsys.bundle import RETRIEVAL
from recsys.dataset import Dataset
from recsys.retrieval import SasRec
from recsys.retrieval.reranker import Reranker, feature_matrix
from recsys.retrieval.retrieval import Retrieval
from recsys.training import reranking
from recsys.training.reranking import Candidates, fit, rank_targets
from recsys.training.retrieval import decode_candidates
from recsys.training.settings import RetrievalConfig
from recsys.training.target import TrainedTarget
from recsys.training.validation import TOP

CONFIG = RetrievalConfig()
SHAPE = Reranker({}, CONFIG.candidates, CONFIG.nodes)
WAYS = {  # the penalty, and whether it refers to a prior
    "penalty 1": (1.0, False),
    "penalty 16": (16.0, False),
    "prior, 4": (4.0, True),
    "prior, 16": (16.0, True),
    "prior, 64": (64.0, True),
    "prior alone": (1e9, True),
}
BEFORE = "penalty 16"


def fit_with(found: Candidates, penalty: float, prior: Mapping[str, float]) -> Reranker:
    """`fit` with another penalty and another prior than the library's."""
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(reranking, "PENALTY", penalty))
        stack.enter_context(mock.patch.dict(reranking.PRIOR, prior, clear=True))
        return fit(found, SHAPE)


def fit_standardised(found: Candidates) -> dict[str, float]:
    """Weights of features with variance 1, fitted to all users without a prior."""
    weights = fit_with(found, WAYS[BEFORE][0], {}).weights
    names, features = feature_matrix(found.values, found.there, list(found.values))
    scale = features[found.there].astype(np.float64).std(axis=0)
    return {name: weights[name] * size for name, size in zip(names, scale, strict=True)}


def mean_of(many: list[dict[str, float]]) -> dict[str, float]:
    """The mean of the weights, over the runs that have the feature."""
    names = dict.fromkeys(name for weights in many for name in weights)
    return {
        name: float(np.mean([weights[name] for weights in many if name in weights]))
        for name in names
    }


def gain(found: Candidates, reranker: Reranker) -> float:
    """Mean NDCG@10 of users."""
    ranks = rank_targets(found, reranker)
    return float(np.where(ranks < TOP, 1 / np.log2(ranks + 2.0), 0.0).mean())


def best_source(found: Candidates) -> Reranker:
    """The source with the highest NDCG@10, alone."""
    alone = [Reranker.of_source(source, SHAPE.candidates, SHAPE.nodes) for source in found.values]
    return max(alone, key=lambda reranker: gain(found, reranker))


def load(name: str, users: int) -> Candidates:
    """Candidates of validation users of a run."""
    workspace = Workspace.of(name)
    retrieval = replace(Retrieval.load(workspace.bundle / RETRIEVAL), reranker=None)
    if (sasrec := workspace.run("sasrec")).is_dir():
        retrieval = replace(retrieval, sasrec=SasRec.load(sasrec))
    examples = Dataset.load(workspace.dataset).examples("valid").sample(users)
    return decode_candidates(retrieval, examples, CONFIG, TrainedTarget.load(workspace))[0]


def compare(
    found: Candidates, prior: Mapping[str, float], size: int, draws: int
) -> dict[str, NDArray[np.float64]]:
    """Way -> (draws,) NDCG@10 of the users who were not drawn."""
    rng, values = np.random.default_rng(size), []
    for _ in range(draws):
        order = rng.permutation(len(found.targets))
        drawn, rest = (found.take(np.sort(part)) for part in np.split(order, [size]))
        row = {"best source": gain(rest, best_source(drawn))}
        for way, (penalty, has_prior) in WAYS.items():
            row[way] = gain(rest, fit_with(drawn, penalty, prior if has_prior else {}))
        values.append(row)
    return {way: np.array([row[way] for row in values]) for way in values[0]}


def main() -> None:
    """Print a table for each run, and the prior."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="+", help="names of runs")
    parser.add_argument("--prior-of", nargs="+", required=True, help="those that make the prior")
    parser.add_argument("--users", type=int, default=1500, help="validation users of a run")
    parser.add_argument("--sizes", type=int, nargs="+", default=[8, 30, 60, 100, 300])
    parser.add_argument("--draws", type=int, default=15)
    args = parser.parse_args()
    console, rows = Console(width=150), []
    loaded = {name: load(name, args.users) for name in dict.fromkeys(args.names + args.prior_of)}
    known = {name: fit_standardised(loaded[name]) for name in args.prior_of}
    for name in args.names:
        found = loaded[name]
        table = Table("drawn users", "best source", *WAYS, title=f"{name}: NDCG@10 of other users")
        prior = mean_of([weights for other, weights in known.items() if other != name])
        for size in args.sizes:
            if size > len(found.targets) // 2:
                continue
            values = compare(found, prior, size, args.draws)
            rows.append(
                {"name": name, "drawn": size} | {way: x.tolist() for way, x in values.items()}
            )
            cells = [describe(values[way], values[BEFORE]) for way in values]
            table.add_row(str(size), *cells)
        console.print(table)
    prior = {name: round(weight, 2) for name, weight in mean_of(list(known.values())).items()}
    print("prior of all:", json.dumps(prior, indent=4))
    print(json.dumps({"rows": rows, "prior": prior, "environment": environment()}))


def describe(values: NDArray[np.float64], before: NDArray[np.float64]) -> str:
    """Mean over the draws, and the mean difference to `BEFORE` with its standard error."""
    gap = values - before
    if not gap.any():
        return f"{values.mean():.4f}"
    return f"{values.mean():.4f} ({gap.mean():+.4f} ± {gap.std() / len(gap) ** 0.5:.4f})"


if __name__ == "__main__":
    main()
