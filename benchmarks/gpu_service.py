"""The service on a GPU: answers a second, and whether answers under load are those to one client.

    python benchmarks/gpu_service.py var/bundles/demo --out service.jsonl

Starts `recsys serve` with a store of its own, on the GPU if there is one, with captured decodes.
Requests with random histories are sent by one client, then in another order by `--clients` at once
(`load_client.py`, which needs aiohttp). Answers may differ by rounding, because batches of other
sizes run by other kernels: a list is `tied` if it is the same but for items whose scores are within
`TIE`, and `different` otherwise.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gpu_rows import Rows
from huggingface import same_ranking
from load_client import OK, Client, Run
from serve import RECOMMEND, Workload
from servers import start_server

Answer = list[tuple[tuple[int, ...], float]]
TIE = 1e-3  # of scores in float32, whose lists are ranked by up to two more models
WARM = 20  # requests before anything is measured


def compare(alone: Sequence[Answer], together: Sequence[Answer]) -> dict[str, Any]:
    """How many answers are the same to the bit, tied or different; the largest gap of a score."""
    counts, gap = {"same": 0, "tied": 0, "different": 0}, 0.0
    for mine, theirs in zip(together, alone, strict=True):
        scores = dict(theirs)
        gap = max([gap, *(abs(score - scores[item]) for item, score in mine if item in scores)])
        tied = same_ranking(mine, theirs, tolerance=TIE, tie=TIE)
        counts["same" if mine == theirs else "tied" if tied else "different"] += 1
    return {**counts, "largest_gap": float(f"{gap:.3g}")}


def answers(run: Run) -> dict[int, Answer]:
    """The list of each request that was not refused, by its identity."""
    return {
        id(reply.request): [
            ((item["item_id"],), item["score"]) for item in json.loads(reply.body)["items"]
        ]
        for reply in run.replies
        if reply.status in OK
    }


async def measure(bundle: Path, count: int, clients: int, rows: Rows) -> None:
    """Start the service, and add a row for its start, each load and their comparison.

    Raises:
        SystemExit: a request was refused; all rows are there.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    settings = [f"device={device}", "rate_limit=null"]
    if device == "cuda":
        settings.append("capture=decodes")
    requests, start = list(islice(Workload(bundle).plain(), count)), time.perf_counter()
    mixed = [requests[i] for i in np.random.default_rng(1).permutation(count)]
    lists, refused = [], []
    async with start_server(bundle, settings) as server, Client(server, RECOMMEND) as client:
        rows.add(kind="ready", device=device, seconds=round(time.perf_counter() - start, 1))
        await client.closed(iter(requests[:WARM]), 1)
        for sent, at_once in ((requests, 1), (mixed, clients)):
            run = await client.closed(iter(sent), at_once, keep=True)
            lists.append(answers(run))
            failed = [reply for reply in run.replies if reply.status not in OK]
            refused += failed
            rows.add(
                kind="load", clients=at_once, requests=count, refused=len(failed),
                per_second=round(run.rate, 1), p50_ms=run.percentile(50), p99_ms=run.percentile(99),
            )  # fmt: skip
    both = [key for key in map(id, requests) if all(key in found for found in lists)]
    rows.add(kind="equality", **compare(*([found[key] for key in both] for found in lists)))
    if refused:
        first = f"{refused[0].status}: {refused[0].body[:300]!r}"
        raise SystemExit(f"{len(refused)} requests were refused, the first with {first}")


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--out", type=Path, required=True, help="rows are added to this file")
    args = parser.parse_args()
    asyncio.run(measure(args.bundle, args.requests, args.clients, Rows(args.out)))


if __name__ == "__main__":
    main()
