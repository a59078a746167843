"""Which quantiser makes the better semantic IDs: residual k-means and RQ-VAE, on the same features.

    recsys run --config configs/beauty.yaml --until sasrec      # also for sports and yelp
    python benchmarks/quantizers.py beauty --set ids.levels=4 --set ids.codebook_size=256

Each argument is the name of a run in `$RECSYS_HOME` with its settings in `configs/`, which `--set`
changes; `ids.method` has no effect. The features of the items are computed once. For each seed,
each method makes codes of them, and a target is trained on each set of codes with the settings of
the run, but for fewer epochs. The seed is that of the quantiser and of the target. Targets rank
validation users, seen items masked; differences are paired by users, with 95 % intervals. No test
events are used. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from recsys.artifacts import Workspace
from recsys.benchmark.environment import environment
from recsys.config import Settings
from recsys.dataset import Dataset
from recsys.models.architecture import architecture
from recsys.models.checkpoint import build
from recsys.prompts import PromptEncoder
from recsys.retrieval import SasRec
from recsys.semantic_ids.assign import assign_unique
from recsys.semantic_ids.features import build_features
from recsys.semantic_ids.quantizer import Quantizer
from recsys.semantic_ids.report import compare
from recsys.semantic_ids.rqkmeans import RQKMeans
from recsys.semantic_ids.rqvae import RQVAE
from recsys.training.ids import level_sizes
from recsys.training.initialise import initialise_from_centroids
from recsys.training.loop import fit
from recsys.training.objective import NextToken
from recsys.training.settings import IdsConfig, TargetConfig
from recsys.training.soft_labels import SoftLabels
from recsys.training.state import Checkpoints
from recsys.training.supervised import training_batches, training_dtype
from recsys.training.validation import Validation
from recsys.vocabulary import Vocabulary

METHODS = ("rq-kmeans", "rq-vae")


class Run:
    """A run's data set, features, soft labels and settings.

    Attributes:
        features: (items, F) of the items.
    """

    def __init__(self, name: str, changes: list[str], epochs: int, users: int) -> None:
        """Read the run `name`; a target gets `epochs`, and ranks `users`."""
        settings = Settings.load(Path(f"configs/{name}.yaml"), changes)
        self.ids = settings.section("ids", IdsConfig)
        self.target = replace(
            settings.section("target", TargetConfig),
            epochs=epochs, max_minutes=None, evaluate_every=0, eval_users=users,
        )  # fmt: skip
        workspace = Workspace.of(name)
        self.dataset = Dataset.load(workspace.dataset)
        histories, sasrec = self.dataset.train_histories, None
        if "sasrec" in (self.ids.features.collaborative, self.target.soft_labels_from):
            sasrec = SasRec.load(workspace.run("sasrec"))
        vectors = None if sasrec is None else sasrec.vectors
        self.features = build_features(
            self.dataset.items, histories, self.ids.features, 0, vectors
        ).matrix
        self.soft = None
        if self.target.soft_labels and sasrec is not None:
            self.soft = SoftLabels.of_sasrec(sasrec, histories)

    def quantizer(self, method: str, seed: int) -> Quantizer:
        """A fitted quantiser."""
        sizes = level_sizes(self.ids, len(self.features))
        if method == "rq-vae":
            return RQVAE.fit(self.features, sizes, self.ids.rqvae, seed)
        return RQKMeans.fit(self.features, sizes, self.ids.rqkmeans, seed)

    def gains(self, codes: NDArray[np.int32], quantizer: Quantizer, seed: int) -> NDArray[Any]:
        """(users,) NDCG@10 of a target that is trained on the codes."""
        model, encoder = self.trained(codes, quantizer, seed)
        config = self.target
        return Validation.of(
            model, encoder, self.dataset, config.eval_users, config.eval_beams
        ).gains()

    def trained(
        self, codes: NDArray[np.int32], quantizer: Quantizer, seed: int
    ) -> tuple[Any, PromptEncoder]:
        """A target trained on the codes, as the stage `target` trains it, and its prompts."""
        config = self.target
        torch.manual_seed(seed)
        vocabulary = Vocabulary.from_levels([len(book) for book in quantizer.centroids])
        model = build(architecture(config.preset, config.architecture), vocabulary)
        initialise_from_centroids(model, vocabulary, quantizer.centroids)
        encoder = PromptEncoder.of(vocabulary, codes, config.prompt)
        module = NextToken(
            model, label_smoothing=config.label_smoothing, dropout=config.embedding_dropout,
            dtype=training_dtype(model, config), soft_labels=config.soft_labels,
        )  # fmt: skip
        batches = replace(training_batches(self.dataset, encoder, config, seed), soft=self.soft)
        with tempfile.TemporaryDirectory() as folder:
            checkpoints = Checkpoints(Path(folder) / "checkpoints", {})
            fit(module, batches, config, checkpoints, name="target", seed=seed)
        return model, encoder


def measure(run: Run, method: str, seed: int) -> tuple[dict[str, Any], NDArray[Any]]:
    """One row of the table, and the NDCG@10 of each user."""
    start = time.process_time()
    quantizer = run.quantizer(method, seed)
    seconds = time.process_time() - start
    before = quantizer.encode(run.features)
    codes = assign_unique(before, quantizer.latents(run.features), quantizer.centroids)
    report = compare(before, codes, quantizer, run.features)
    gains = run.gains(codes, quantizer, seed)
    row = {
        "method": method,
        "seed": seed,
        "cpu_seconds": round(seconds, 1),
        "perplexity": report["perplexity"],
        "prefixes": report["prefixes"],
        "collisions": report["before_assignment"]["colliding_items"],
        "unexplained": report["reconstruction_error"],
        "recall@10": round(float((gains > 0).mean()), 5),
        "ndcg@10": round(float(gains.mean()), 5),
    }
    return row, gains


def interval(difference: NDArray[Any]) -> list[float]:
    """Mean of paired differences, and half the width of its 95 % interval."""
    half = 1.96 * difference.std(ddof=1) / len(difference) ** 0.5
    return [round(float(difference.mean()), 5), round(float(half), 5)]


def main() -> None:
    """Print a table for each run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="+", help="names of runs, and of their configurations")
    parser.add_argument("--set", action="append", default=[], help="as section.key=value")
    parser.add_argument("--epochs", type=int, default=4, help="of each target")
    parser.add_argument("--users", type=int, default=10_000, help="validation users")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    args = parser.parse_args()
    torch.set_num_threads(1)
    results = {}
    for name in args.names:
        run = Run(name, args.set, args.epochs, args.users)
        title = f"{name}: {len(run.features)} items, {args.epochs} epochs, {args.users} users"
        columns = ("seed", "method", "CPU s", "perplexity", "collide", "unexplained", "R@10")
        table = Table(*columns, "NDCG@10", "difference in NDCG@10", title=title)
        rows, gaps = [], []
        for seed in args.seeds:
            found = [measure(run, method, seed) for method in METHODS]
            gap = found[1][1] - found[0][1]
            gaps.append(gap)
            for row, cell in zip(
                (row for row, _ in found), ("", "{:+.4f} ± {:.4f}".format(*interval(gap))),
                strict=True,
            ):  # fmt: skip
                rows.append(row)
                table.add_row(
                    str(seed), row["method"], str(row["cpu_seconds"]),
                    " / ".join(f"{p:.0f}" for p in row["perplexity"]), str(row["collisions"]),
                    f"{row['unexplained']:.4f}", f"{row['recall@10']:.4f}",
                    f"{row['ndcg@10']:.4f}", cell,
                )  # fmt: skip
        # Users are the same for all seeds: their mean over seeds is one observation.
        mean = interval(np.mean(gaps, axis=0))
        table.add_section()
        table.add_row(*[""] * 7, "mean", "{:+.4f} ± {:.4f}".format(*mean))
        Console(width=130).print(table)
        results[name] = {"rows": rows, "gaps": [interval(gap) for gap in gaps], "mean_gap": mean}
    print(json.dumps({**vars(args), "results": results, "environment": environment()}))


if __name__ == "__main__":
    main()
