"""How long `recsys evaluate` takes: every user of a split, both ways to treat seen items.

    python benchmarks/evaluation.py BUNDLE DATASET

Puts a target of another preset, with random weights, into a copy of the bundle, and evaluates it as
the command does, retrieval, blend, baselines and report included. First a sample of the lists is
compared with those that requests get one by one. As other work on the machine stretches the clock,
processor seconds of all processes are counted too. The validation split, always. One JSON line at
the end.
"""

from __future__ import annotations

import argparse
import json
import resource
import shutil
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

from recsys.artifacts import read_manifest, write_artifact
from recsys.benchmark.environment import environment
from recsys.bundle import Bundle
from recsys.dataset import Dataset
from recsys.evaluation.protocol import EvaluationConfig
from recsys.evaluation.run import evaluate_bundle
from recsys.models.checkpoint import build, save_model
from recsys.recommender import Recommender, RecommendRequest


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("bundle", type=Path)
    parser.add_argument("dataset", type=Path)
    parser.add_argument("--preset", default="small")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--users", type=int, help="a sample; by default all")
    parser.add_argument("--batch-size", type=int, default=EvaluationConfig.batch_size)
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--compared", type=int, default=128, help="users whose lists are compared")
    options = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        bundle = Path(folder) / "bundle"
        parameters = remade(options.bundle, bundle, options.preset)
        compare(bundle, options.dataset, options.compared)
        print(f"{options.compared} users' lists are those of requests one by one")
        for dtype in options.dtypes:
            config = EvaluationConfig(
                split="valid",
                ks=(1, 5, 10, 20),
                beams=20,
                users=options.users,
                processes=options.processes,
                batch_size=options.batch_size,
                dtype=dtype,
            )
            rows.append({"dtype": dtype, **measure(bundle, options.dataset, config, Path(folder))})
            row = rows[-1]
            print(
                f"{dtype}: {row['users']} users in {row['seconds']:.0f} s by the clock "
                f"({row['search']:.0f} s of it until all lists of the model are there), "
                f"{row['cpu']:.0f} s of processors"
            )
    about = {"preset": options.preset, "parameters": parameters, "processes": options.processes}
    about["batch_size"] = options.batch_size
    print(json.dumps({**about, "beams": 20, "rows": rows, **environment()}))


def remade(source: Path, out: Path, preset: str) -> int:
    """A copy of a bundle with a random target of this preset; returns its parameters."""
    torch.manual_seed(0)
    bundle, manifest = Bundle.load(source), read_manifest(source, "bundle")
    model = build(preset, bundle.vocabulary)
    made = {"config": manifest.config, "parents": manifest.parents, "info": dict(manifest.info)}
    with write_artifact(out, "bundle", **made) as folder:
        left = shutil.ignore_patterns("manifest.json", "target", "draft")
        shutil.copytree(source, folder, dirs_exist_ok=True, ignore=left)
        save_model(model, folder / "target")
    return model.num_parameters()


def compare(bundle: Path, dataset: Path, users: int) -> None:
    """Raise unless evaluation ranks users as requests get them."""
    recommender = Recommender.load(bundle)
    examples = Dataset.load(dataset).examples("valid")
    chosen = np.random.default_rng(0).permutation(len(examples))[:users]
    histories = examples.histories.take(chosen)
    found = recommender.rank_variants(histories, 10)
    ids = recommender.catalog.item_ids
    for exclude_seen, both in zip((True, False), found, strict=True):
        for (items, _), blend in zip(both, (None, False), strict=True):
            for history, line in zip(histories, items, strict=True):
                asked = RecommendRequest([ids[i] for i in history], 10, exclude_seen, blend=blend)
                answer = recommender.recommend_batch([asked])[0].recommendations
                if [ids[i] for i in line if i >= 0] != [one.item_id for one in answer]:
                    raise SystemExit(f"lists differ after {[ids[i] for i in history]}")


def measure(
    bundle: Path, dataset: Path, config: EvaluationConfig, folder: Path
) -> dict[str, float | int]:
    """Seconds of one evaluation."""
    before, start = processor_seconds(), time.perf_counter()
    path = evaluate_bundle(bundle, dataset, config, folder / "report", force=True)
    seconds = time.perf_counter() - start
    time.sleep(3)  # processes that have ranked may still be ending
    document = json.loads((path / "report.json").read_text(encoding="utf-8"))
    return {
        "users": document["data"]["users_evaluated"],
        "seconds": round(seconds, 1),
        "search": read_manifest(path, "evaluation").info["decoding_seconds"],
        "cpu": round(processor_seconds() - before, 1),
    }


def processor_seconds() -> float:
    """Of this process, and of those that it has started and that have ended."""
    kinds = resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN
    used = [resource.getrusage(kind) for kind in kinds]
    return sum(one.ru_utime + one.ru_stime for one in used)


if __name__ == "__main__":
    main()
