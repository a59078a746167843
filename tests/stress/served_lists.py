"""Lists of the service over REST, compared with the evaluation's, user by user.

    python tests/stress/served_lists.py --name beauty --users 1000

The service is started with the bundle of a run, and asked for the users whom the run's report has
evaluated, with their histories in the request. Rounds of answers are compared:

- as they are: the list with that of `Recommender.rank_variants`, which the evaluation calls, and
  the place of the user's next item with the one in the report's `users.parquet`;
- with a filter by the most frequent attribute of about a fifth of the items: no other item may be
  listed, and the list must be the one of the recommender in this process;
- with live items: before this round, a hundredth of the items is removed over HTTP, and ten are
  inserted, `like` those that are listed most often. No removed item may be listed, and the list
  must be the one of the recommender after the same changes. The same with a filter that only the
  inserted items pass.

Lists are compared item by item. Scores may differ in their last digits, so items whose scores are
within 1e-4 of each other may change places; such lists are counted. The last line is one JSON
object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import httpx
import numpy as np
import pyarrow.compute as pc
import pyarrow.parquet as pq
import torch
from harness import environment
from servers import start_server

from recsys.artifacts import Workspace
from recsys.dataset import Dataset
from recsys.live_catalog import NewItem
from recsys.recommender import Recommender
from recsys.requests import RecommendRequest

NEAR = 1e-4  # scores of equal items, computed in another batch
Listed = list[tuple[str, float]]


def main() -> int:
    """Serve, compare, and print one line of JSON last; 1 if an answer is wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--name", required=True, help="of a run with a report")
    parser.add_argument("--users", type=int, default=1000, help="evaluated users to ask for")
    parser.add_argument("--seed", type=int, default=0, help="of the sample and the changes")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    workspace, start = Workspace.of(arguments.name), time.perf_counter()
    counts = asyncio.run(serve_and_compare(workspace, arguments.users, arguments.seed))
    facts = {"name": arguments.name, "users": arguments.users, **counts, **environment()}
    print(json.dumps(facts | {"seconds": round(time.perf_counter() - start, 1)}))
    return int(counts["wrong"] > 0)


async def serve_and_compare(workspace: Workspace, users: int, seed: int) -> Counter[str]:
    """Start a service of the run's bundle, and compare its answers."""
    async with start_server(workspace.bundle) as server:
        with httpx.Client(base_url=f"http://{server.host}:{server.port}", timeout=60) as client:
            return await asyncio.to_thread(compare, client, workspace, users, seed)


def compare(client: httpx.Client, workspace: Workspace, users: int, seed: int) -> Counter[str]:
    """Compare all rounds; returns counts."""
    rng, counts = np.random.default_rng(seed), Counter[str](wrong=0, near=0)
    dataset = Dataset.load(workspace.dataset)
    document = json.loads((workspace.report / "report.json").read_text(encoding="utf-8"))
    k = max(document["protocol"]["ks"])
    rows = pq.read_table(workspace.report / "users.parquet")
    served = pc.field("ranker") == document["rankers"][0]
    rows = rows.filter(served & (pc.field("seen") == "masked"))
    examples = dataset.examples(document["split"])
    evaluated = dict(zip(rows["user_id"].to_pylist(), rows["rank"].to_pylist(), strict=True))
    ids = dataset.interactions.user_ids[examples.users]
    of_report = np.flatnonzero([user in evaluated for user in ids])
    sample = rng.choice(of_report, min(users, len(of_report)), replace=False)
    names = [str(item) for item in dataset.item_ids]
    histories = [[names[i] for i in items] for items in examples.histories.take(sample)]
    targets = [names[item] for item in examples.targets.items[sample]]

    recommender = Recommender.load(workspace.bundle)
    ((items, scores), _), *_ = recommender.rank_variants(
        examples.histories.take(sample), k, exclude_seen=(True,)
    )
    listed = Counter[str]()
    for row, history in enumerate(histories):
        given = ask(client, {"history": history, "k": k})
        listed.update(item for item, _ in given)
        wanted = [
            (names[i], float(s)) for i, s in zip(items[row], scores[row], strict=True) if i >= 0
        ]
        judge(given, wanted, "as evaluated", counts)
        place = next((n for n, (item, _) in enumerate(given, 1) if item == targets[row]), None)
        if place != evaluated[ids[sample[row]]]:
            counts["other rank than in the report"] += 1
            counts["wrong"] += 1

    value, having = attribute_of_a_fifth(dataset)
    wanted_by = {"must": [{"key": "attributes", "match": value}]}
    round_of(
        client, recommender, histories, {"k": k, "filter": wanted_by}, having, "filter", counts
    )

    gone = set(rng.choice(names, len(names) // 100, replace=False).tolist())
    left = [name for name in names if name not in gone]
    often = [name for name, _ in listed.most_common() if name not in gone][:10]
    new: list[dict[str, Any]] = [
        {"item_id": f"new-{number}", "like": other, "attributes": {"attributes": ["new"]}}
        for number, other in enumerate(often)
    ]
    client.post("/v1/items", json={"items": new}).raise_for_status()
    for name in sorted(gone):
        client.delete(f"/v1/items/{name}").raise_for_status()
    recommender.upsert([NewItem(**item) for item in new])
    recommender.remove(sorted(gone))
    allowed = {*left, *(item["item_id"] for item in new)}
    round_of(client, recommender, histories, {"k": k}, allowed, "live items", counts)
    inserted = {"must": [{"key": "attributes", "match": "new"}]}
    fields = {"k": k, "filter": inserted}
    round_of(client, recommender, histories, fields, allowed - set(names), "inserted", counts)
    return counts


def round_of(
    client: httpx.Client,
    recommender: Recommender,
    histories: Sequence[list[str]],
    fields: dict[str, Any],
    allowed: set[str],
    name: str,
    counts: Counter[str],
) -> None:
    """Compare one answer for each history with the recommender's, which is asked alone."""
    for history in histories:
        given = ask(client, {"history": history, **fields})
        (result,) = recommender.recommend_batch([RecommendRequest(history, **fields)])
        wanted = [(item.item_id, item.score) for item in result.recommendations]
        judge(given, wanted, name, counts)
        if any(item not in allowed or item in history for item, _ in given):
            counts[f"{name}: forbidden item"] += 1
            counts["wrong"] += 1
        counts[f"{name}: new items listed"] += sum(item.startswith("new-") for item, _ in given)


def ask(client: httpx.Client, body: dict[str, Any]) -> Listed:
    """Items and scores of an answer."""
    response = client.post("/v1/recommendations", json={"fallback": False, **body})
    response.raise_for_status()
    return [(item["item_id"], item["score"]) for item in response.json()["items"]]


def judge(given: Listed, wanted: Listed, name: str, counts: Counter[str]) -> None:
    """Count an answer as equal, near, or wrong."""
    counts[name] += 1
    if [item for item, _ in given] == [item for item, _ in wanted]:
        return
    theirs, ours = ([score for _, score in some] for some in (given, wanted))
    if len(given) == len(wanted) and np.allclose(theirs, ours, atol=NEAR, rtol=0):
        counts["near"] += 1
        return
    counts["wrong"] += 1
    if counts["wrong"] <= 3:
        print(f"{name}: {given} instead of {wanted}", flush=True)


def attribute_of_a_fifth(dataset: Dataset) -> tuple[str, set[str]]:
    """The most frequent attribute of at most a fifth of the items, and the items that have it."""
    rows = dataset.items.select(["item_id", "attributes"]).to_pylist()
    having: dict[str, set[str]] = {}
    for row in rows:
        for value in row["attributes"] or ():
            having.setdefault(value, set()).add(row["item_id"])
    fit = {value: items for value, items in having.items() if len(items) <= len(rows) / 5}
    value = max(fit, key=lambda value: len(fit[value]))
    return value, fit[value]


if __name__ == "__main__":
    sys.exit(main())
