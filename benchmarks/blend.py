"""What a blend costs: speculative decoding with and without retrieval's candidates in its tree.

    python benchmarks/blend.py BUNDLE DATASET

Searches and retrieval are timed as the service runs them (batches of validation users' requests,
one thread, blended and plain in turn, the least of several rounds); `decode_ratio` is the target's
part of it, `answer_ratio` the whole answer, retrieval and ranking included. One JSON line at the
end.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import replace

import numpy as np
import torch

from recsys.dataset import Dataset
from recsys.recommender import Recommender, RecommendRequest


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("bundle")
    parser.add_argument("dataset")
    parser.add_argument("--users", type=int, default=96)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--modes", nargs="+", default=["exhaustive", "draft", "beam"])
    options = parser.parse_args()
    torch.set_num_threads(1)
    examples = Dataset.load(options.dataset).examples("valid")
    chosen = np.random.default_rng(0).permutation(len(examples))[: options.users]
    rows = []
    for mode in options.modes:
        recommender = Recommender.load(options.bundle, mode=mode)
        ids = recommender.catalog.item_ids
        asked = [
            RecommendRequest([ids[i] for i in history], 10)
            for history in examples.histories.take(chosen)
        ]
        rows.append(measure(recommender, asked, options.batch, options.rounds))
        row = rows[-1]
        print(
            f"{mode:>10}: decode {row['plain_decode_ms']:.2f} -> {row['blended_decode_ms']:.2f} ms "
            f"(x {row['decode_ratio']:.3f}), answer x {row['answer_ratio']:.3f}"
        )
    print(json.dumps({"users": len(chosen), "batch": options.batch, "modes": rows}))


def measure(
    recommender: Recommender, asked: list[RecommendRequest], batch: int, rounds: int
) -> dict[str, float | str]:
    """Milliseconds a request and their ratios, of one recommender."""
    decoding = [0.0]
    decode = recommender.engine.decode

    def timed(*arguments, **options):  # noqa: ANN002, ANN003, ANN202 - stands for decode
        start = time.perf_counter()
        answer = decode(*arguments, **options)
        decoding[0] += time.perf_counter() - start
        return answer

    recommender.engine.decode = timed  # type: ignore[method-assign]
    best = {}
    for turn in range(rounds + 1):
        for blend in (False, True):
            decoding[0], start = 0.0, time.perf_counter()
            for first in range(0, len(asked), batch):
                group = [replace(one, blend=blend) for one in asked[first : first + batch]]
                recommender.recommend_batch(group)
            seconds = np.array([decoding[0], time.perf_counter() - start])
            if turn:  # the first one warms up
                best[blend] = np.minimum(best.get(blend, np.inf), seconds)
    plain, blended = (1e3 * best[blend] / len(asked) for blend in (False, True))
    return {
        "mode": recommender.mode,
        "plain_decode_ms": round(float(plain[0]), 3),
        "blended_decode_ms": round(float(blended[0]), 3),
        "decode_ratio": round(float(blended[0] / plain[0]), 3),
        "answer_ratio": round(float(blended[1] / plain[1]), 3),
    }


if __name__ == "__main__":
    main()
