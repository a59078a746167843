"""Place items as if they were new, and compare with the codes that they have.

    recsys ids train --config configs/beauty.yaml
    recsys ids train --config configs/yelp.yaml
    python benchmarks/new_items.py beauty yelp

Of each run, a tenth of the items are held out: what predicts collaborative features is fitted
without them. Word weights and projections have seen their words, as they will have seen most words
of a new item. Then the held-out items are encoded by their content alone. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace

import numpy as np

from recsys.artifacts import Workspace, read_manifest
from recsys.benchmark.environment import environment
from recsys.dataset import Dataset
from recsys.retrieval import SasRec
from recsys.semantic_ids.collaborative import predict
from recsys.semantic_ids.features import FeatureConfig, build_features
from recsys.semantic_ids.quantizer import squared_distances
from recsys.semantic_ids.rqkmeans import RQKMeans

NEAR = 10


def place(name: str, share: float) -> dict[str, float]:
    """Shares of the held-out items whose codes, found by content, are their own."""
    workspace = Workspace.of(name)
    dataset = Dataset.load(workspace.dataset)
    settings = read_manifest(workspace.run("ids"), "ids").config
    config = FeatureConfig(**settings["features"])
    quantizer = RQKMeans.load(workspace.run("ids") / "quantizer")
    codes = np.load(workspace.run("ids") / "codes.npy", allow_pickle=False)
    vectors = None
    if config.collaborative == "sasrec":
        vectors = SasRec.load(workspace.run("sasrec")).vectors
    histories, seed = dataset.train_histories, settings["seed"]
    features = build_features(dataset.items, histories, config, seed, vectors)
    if features.encoder is None or "collaborative" not in features.blocks:
        raise SystemExit(f"{name}: wants text or attributes by TF-IDF, and histories")
    items = np.random.default_rng(0).permutation(len(codes))
    held = int(share * len(codes))
    out, rest = np.sort(items[:held]), np.sort(items[held:])
    ends = np.cumsum(list(features.blocks.values()))
    end = ends[list(features.blocks).index("collaborative")]
    known = features.matrix[rest, end - features.blocks["collaborative"] : end]
    _, prediction = predict(known, features.encoder.terms(dataset.items.take(rest)))
    encoder = replace(features.encoder, prediction=prediction)
    found = encoder.encode(dataset.items.take(out))
    placed, own = quantizer.encode(found), codes[out]
    far = squared_distances(found, quantizer.centroids[0])
    nearer = (far < far[np.arange(held), own[:, 0]][:, None]).sum(1)
    frequency = np.bincount(codes[:, 0]) / len(codes)
    result = {"items": float(held), "chance": float((frequency**2).sum())}
    result[f"first_of_{NEAR}"] = float((nearer < NEAR).mean())
    for level in range(1, codes.shape[1] + 1):
        same = (placed[:, :level] == own[:, :level]).all(1)
        result[f"prefix_{level}"] = float(same.mean())
    return {key: round(value, 4) for key, value in result.items()}


def main() -> None:
    """Read arguments, place, print."""
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("names", nargs="+", help="of runs with RQ-KMeans, under $RECSYS_HOME")
    arguments.add_argument("--share", type=float, default=0.1, help="of the items, held out")
    args = arguments.parse_args()
    results = {}
    for name in args.names:
        results[name] = place(name, args.share)
        print(name, results[name])
    print(json.dumps({"share": args.share, "results": results, "environment": environment()}))


if __name__ == "__main__":
    main()
