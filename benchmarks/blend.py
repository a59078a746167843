"""Processor time of a blended recommendation: native library, NumPy, no network, model alone.

    OMP_NUM_THREADS=1 python benchmarks/blend.py var/bundles/demo

Four ways answer the same requests by turns, in rounds of batches: with the blend in the native
library, with the blend in NumPy (the model stays native), with the native blend without the
reranker's network, and by the model alone. The first two are compared before anything is timed:
items and sources must be equal, scores nearly so. The last of the proposals may differ, which moves
all scores of a list by its small probability, and candidates whose values differ in their last bits
alone may change their ranks by one source. Printed are medians over the rounds of the processor
time of a request.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import cache
from unittest import mock

import numpy as np

from recsys.benchmark.environment import environment
from recsys.recommender import Recommender, RecommendRequest, RecommendResult
from recsys.retrieval import Retrieval, sasrec

K, MOST_HISTORY, CLOSE = 10, 20, 0.02
BATCHES = (1, 32)
Batch = list[RecommendRequest]


def answer_without_library(recommender: Recommender, batch: Batch) -> list[RecommendResult]:
    """Answer with the blend in NumPy."""
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(Retrieval, "native", None))
        stack.enter_context(mock.patch.object(sasrec, "find_library", return_value="left out"))
        return recommender.recommend_batch(batch)


def answer_without_network(recommender: Recommender, batch: Batch) -> list[RecommendResult]:
    """Answer with the linear score alone."""
    whole = recommender.retrieval
    recommender.retrieval = linear(whole)
    try:
        return recommender.recommend_batch(batch)
    finally:
        recommender.retrieval = whole


@cache
def linear(retrieval: Retrieval) -> Retrieval:
    """The same without the reranker's network."""
    return replace(retrieval, reranker=replace(retrieval.reranker, network=None))


def draw(recommender: Recommender, rng: np.random.Generator, size: int, blend: bool) -> Batch:
    """Requests for histories of random items."""
    ids = recommender.catalog.item_ids
    lengths = rng.integers(1, MOST_HISTORY + 1, size)
    return [
        RecommendRequest([str(ids[i]) for i in rng.integers(0, len(ids), n)], K, blend=blend)
        for n in lengths
    ]


def check_equal(first: list[RecommendResult], second: list[RecommendResult]) -> None:
    """Raise if answers differ."""
    for one, other in zip(first, second, strict=True):
        pairs = list(zip(one.recommendations, other.recommendations, strict=True))
        if any((a.item_id, a.source) != (b.item_id, b.source) for a, b in pairs):
            raise SystemExit(f"other lists: {one} and {other}")
        if any(abs(a.score - b.score) > CLOSE for a, b in pairs):
            raise SystemExit(f"other scores: {one} and {other}")


def main() -> None:
    """Print a line for each size of batch, and JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("bundle")
    parser.add_argument("--rounds", type=int, default=40)
    args = parser.parse_args()
    recommender = Recommender.load(args.bundle)
    recommender.warm_up()
    rows = []
    for size in BATCHES:
        ways: dict[str, Callable[[Batch], list[RecommendResult]]] = {
            "native": recommender.recommend_batch,
            "numpy": lambda batch: answer_without_library(recommender, batch),
            "linear": lambda batch: answer_without_network(recommender, batch),
            "model": recommender.recommend_batch,
        }
        took: dict[str, list[float]] = {way: [] for way in ways}
        for number in range(args.rounds):
            for way, answer in ways.items():
                rng = np.random.default_rng(number)
                batch = draw(recommender, rng, size, way != "model")
                if way == "native":
                    check_equal(answer(batch), ways["numpy"](batch))
                answer(batch)  # the same caches for all ways
                start = time.process_time()
                answer(batch)
                took[way].append((time.process_time() - start) / size * 1e3)
        ms = {way: round(float(np.median(times)), 3) for way, times in took.items()}
        rows.append({"batch": size, **ms})
        print(
            f"B = {size:2}: native {ms['native']:.2f} ms a request, NumPy {ms['numpy']:.2f}, "
            f"without the network {ms['linear']:.2f}, model {ms['model']:.2f}; around the model "
            f"{ms['native'] - ms['model']:.2f} against {ms['numpy'] - ms['model']:.2f}"
        )
    print(json.dumps({"bundle": args.bundle, "rows": rows, "environment": environment()}))


if __name__ == "__main__":
    main()
