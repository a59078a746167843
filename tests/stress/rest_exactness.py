"""Answers over HTTP against plain transformers: no excluded or missing item, no false certificate.

    python tests/stress/rest_exactness.py --answers 2000 --seed 0

A service is started on each of several bundles with four levels of codes and random weights. Items
are inserted by `like` and by codes, and removed, over HTTP; requests with filters, exclusions and
histories are sent in every exact mode in between. The oracle keeps its own list of items and
evaluates each filter itself. Its scores are log-probabilities of the bundle's checkpoint: one plain
forward pass of transformers for each history over all items. The expected list is beam search over
those sums, in plain Python. An answer is wrong if

- it has an excluded item, an item twice, or fewer items than possible;
- it is not the list of the oracle's beam search (the model's best items, if it is certified
  `global-exact`), but for scores within 1e-4 of each other;
- a score differs from the oracle's by more than 1e-4.

The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx
import numpy as np
import pyarrow as pa
import torch
import transformers
import uvicorn

from recsys.artifacts import write_artifact
from recsys.bundle import CATALOG, DRAFT, PROMPTS, RETRIEVAL, TARGET
from recsys.catalog import Catalog
from recsys.interactions import Histories
from recsys.models.checkpoint import build, save_model
from recsys.retrieval import ItemItem, Reranker, Retrieval
from recsys.serving.app import create_app
from recsys.serving.settings import ServingSettings
from recsys.vocabulary import Vocabulary

LEVELS, SIZES, WINDOW = (6, 6, 6, 30), (12, 24, 40, 90), 8
COLORS, TOLERANCE = ("red", "green", "blue"), 1e-4
Item = dict[str, Any]

RERANKER = Reranker({"item_item.value": 1.0, "model.value": 1.0})


def write_bundle(path: Path, seed: int) -> list[Item]:
    """A bundle of random weights, and its items as the oracle keeps them."""
    rng = np.random.default_rng(seed)
    count = int(SIZES[seed % len(SIZES)])
    # few prefixes with several items each, some of which share all their codes
    codes = np.stack([rng.integers(0, size, count) for size in LEVELS], axis=1)
    codes[6:, :3] = codes[rng.integers(0, 6, count - 6), :3]
    codes[-3:] = codes[6:9]
    items = [
        {
            "item_id": f"item-{i}",
            "codes": tuple(codes[i].tolist()),
            "color": COLORS[i % 3],
            "price": i / 4,
        }
        for i in range(count)
    ]
    table = pa.table(
        {
            "item_id": [item["item_id"] for item in items],
            "title": [f"Thing {i}" for i in range(count)],
            "text": [""] * count,
            "color": [item["color"] for item in items],
            "price": [item["price"] for item in items],
        }
    )
    vocabulary = Vocabulary.from_levels(LEVELS)
    torch.manual_seed(seed)
    target = build({"hidden_size": 32, "intermediate_size": 64}, vocabulary)
    draft = build({"hidden_size": 16, "intermediate_size": 32}, vocabulary)
    for weight in target.parameters():
        weight.data.mul_(3)  # so peaked that scores rarely tie
    walks = Histories.of(rng.integers(0, count, (100, 6)).tolist())
    counts = np.bincount(walks.items, minlength=count).astype(float)
    retrieval = Retrieval(
        ItemItem.directional(walks, count),
        counts,
        reranker=RERANKER,
    )
    with write_artifact(path, "bundle") as folder:
        (folder / CATALOG).mkdir()
        (folder / RETRIEVAL).mkdir()
        Catalog(table, codes.astype(np.int32)).save(folder / CATALOG)
        vocabulary.save(folder)
        (folder / PROMPTS).write_text(json.dumps({"max_items": WINDOW, "block": 1}))
        save_model(target, folder / TARGET)
        save_model(draft, folder / DRAFT)
        retrieval.save(folder / RETRIEVAL)
    return items


class Oracle:
    """Items by name, and their scores by the checkpoint."""

    def __init__(self, bundle: Path, items: list[Item]) -> None:
        self.items = {item["item_id"]: item for item in items}
        self.model = transformers.AutoModelForCausalLM.from_pretrained(bundle / TARGET)
        self.model = self.model.double().eval()
        words = json.loads((bundle / "vocabulary.json").read_text(encoding="utf-8"))
        self.first, self.prefix = words["level_offsets"], words["prefix"]
        self._known: dict[tuple[str, ...], dict[tuple[int, ...], list[float]]] = {}

    def tokens(self, codes: tuple[int, ...]) -> list[int]:
        """Token ids of codes."""
        return [first + code for first, code in zip(self.first, codes, strict=True)]

    def steps(self, history: list[str]) -> dict[tuple[int, ...], list[float]]:
        """Log-probability of each code of every item after a history."""
        known = [name for name in history if name in self.items][-WINDOW:]
        prompt = [*self.prefix]
        for name in known:
            prompt += self.tokens(self.items[name]["codes"])
        every = sorted({item["codes"] for item in self.items.values()})
        tokens = torch.tensor([prompt + self.tokens(codes) for codes in every])
        with torch.inference_mode():
            logits = self.model(tokens).logits[:, len(prompt) - 1 : -1].log_softmax(-1)
        chosen = logits.gather(2, tokens[:, len(prompt) :, None])[..., 0].tolist()
        return dict(zip(every, chosen, strict=True))

    def may(self, body: dict[str, Any]) -> dict[tuple[int, ...], list[str]]:
        """Items that may be in the answer to a request, by codes."""
        hidden = set(body.get("exclude_items", ()))
        if body["exclude_seen"]:
            hidden |= set(body["history"])
        found: dict[tuple[int, ...], list[str]] = {}
        for name, item in self.items.items():
            if name not in hidden and fits(body.get("filter"), item):
                found.setdefault(item["codes"], []).append(name)
        return found

    def beams(
        self, steps: dict[tuple[int, ...], list[float]], rows: list[tuple[int, ...]], width: int
    ) -> tuple[set[tuple[int, ...]], bool]:
        """Rows that beam search keeps, and whether a near tie decided which."""
        kept, near = [()], False
        for depth in range(1, len(LEVELS) + 1):
            scores = {
                row[:depth]: sum(steps[row][:depth])
                for row in rows
                if row[: depth - 1] in set(kept)
            }
            ranked = sorted(scores, key=lambda prefix: -scores[prefix])
            if len(ranked) > width:
                near |= scores[ranked[width - 1]] - scores[ranked[width]] < TOLERANCE
            kept = ranked[:width]
        return set(kept), near


def fits(wanted: dict[str, Any] | None, item: Item) -> bool:
    """Whether an item passes a filter of `draw_filter`."""
    if wanted is None:
        return True

    def holds(clause: dict[str, Any]) -> bool:
        value = item[clause["key"]]
        if "match" in clause:
            return bool(value == clause["match"])
        if "any" in clause:
            return value in clause["any"]
        limits = clause["range"]
        return bool(limits.get("gte", -1e9) <= value < limits.get("lt", 1e9))

    return (
        all(map(holds, wanted.get("must", ())))
        and not any(map(holds, wanted.get("must_not", ())))
        and (not wanted.get("should") or any(map(holds, wanted["should"])))
    )


def draw_filter(rng: np.random.Generator) -> dict[str, Any] | None:
    """A filter, or none."""
    low = float(rng.integers(0, 24))
    clauses = [
        {"key": "color", "match": str(rng.choice(COLORS))},
        {"key": "color", "any": [str(c) for c in rng.choice(COLORS, 2, replace=False)]},
        {"key": "price", "range": {"gte": low, "lt": low + float(rng.choice([0.5, 2, 12]))}},
    ]
    rng.shuffle(clauses)  # type: ignore[arg-type]
    kind = rng.integers(5)
    if kind == 0:
        return None
    parts = ("must", "must_not", "should")
    wanted: dict[str, Any] = {str(parts[kind % 3]): clauses[:1]}
    if kind == 4:
        wanted = {"must": clauses[:1], "must_not": clauses[1:2]}
    return wanted


def draw(rng: np.random.Generator, oracle: Oracle) -> dict[str, Any]:
    """The body of one request."""
    names = sorted(oracle.items)
    share = float(rng.choice([0, 0.3, 0.6, 0.9, 1]))
    body: dict[str, Any] = {
        "history": [str(n) for n in rng.choice(names, rng.integers(1, 7))],
        "k": int(rng.choice([1, 5, 20, 60, 150])),
        "exclude_seen": bool(rng.integers(2)),
        "exclude_items": [n for n in names if rng.random() < share],
        "blend": False,
    }
    if (wanted := draw_filter(rng)) is not None:
        body["filter"] = wanted
    way = rng.integers(4)
    if way == 1:
        body["mode"] = "strict"
    elif way == 2:
        body["guarantee"] = "global"
    elif way == 3:
        body["mode"] = "beam"
    return body


def faults(body: dict[str, Any], answer: dict[str, Any], oracle: Oracle) -> list[str]:
    """Faults of an answer."""
    allowed, steps = oracle.may(body), oracle.steps(body["history"])
    score = {name: sum(steps[codes]) for codes, names in allowed.items() for name in names}
    listed = [(item["item_id"], item["score"]) for item in answer["items"]]
    names = [name for name, _ in listed]
    if bad := [name for name in names if name not in score]:
        return [f"items {bad} must not be there"]
    if len(set(names)) < len(names):
        return [f"an item is there twice: {names}"]
    if len(names) != min(body["k"], len(score)):
        return [f"{len(names)} items of {min(body['k'], len(score))}: {names}"]
    if wrong := [(n, s, score[n]) for n, s in listed if abs(s - score[n]) > TOLERANCE]:
        return [f"scores {wrong}"]
    kept, near = oracle.beams(steps, sorted(allowed), max(20, body["k"]))
    whole = answer["certificate"] == "global-exact"
    among = [n for codes, some in allowed.items() if whole or codes in kept for n in some]
    best = sorted((score[name] for name in among), reverse=True)[: body["k"]]
    if not (near and not whole) and not np.allclose([s for _, s in listed], best, atol=TOLERANCE):
        return [f"{answer['certificate']}: scores {[s for _, s in listed]}, not {best}"]
    return []


def change(client: httpx.Client, rng: np.random.Generator, oracle: Oracle, number: int) -> None:
    """Upsert a few items by `like` or by codes, and remove one."""
    new = []
    for place in range(3):
        item: Item = {
            "item_id": f"new-{number}-{place}",
            "title": "New",
            "attributes": {
                "color": str(rng.choice(COLORS)),
                "price": float(rng.integers(0, 100) / 4),
            },
        }
        if place:
            item["like"] = str(rng.choice([n for n in oracle.items if n.startswith("item")]))
        else:
            item["semantic_id"] = [int(rng.integers(size)) for size in LEVELS]
        new.append(item)
    answer = client.post("/v1/items", json={"items": new})
    answer.raise_for_status()
    for item, made in zip(new, answer.json()["items"], strict=True):
        oracle.items[item["item_id"]] = {
            "item_id": item["item_id"],
            "codes": tuple(made["semantic_id"]),
            **item["attributes"],
        }
    gone = str(rng.choice(sorted(oracle.items)))
    client.delete(f"/v1/items/{gone}").raise_for_status()
    del oracle.items[gone]


def check(url: str, oracle: Oracle, answers: int, seed: int) -> Counter[str]:
    """Send requests and compare the answers; returns counts."""
    rng, counts = np.random.default_rng(seed), Counter[str](answers=answers, wrong=0)
    with httpx.Client(base_url=url, timeout=60) as client:
        for number in range(answers):
            if number % 20 == 0:
                change(client, rng, oracle, number)
            body = draw(rng, oracle)
            response = client.post("/v1/recommendations", json=body)
            response.raise_for_status()
            answer = response.json()
            counts[body.get("mode", "auto")] += 1
            counts[answer["certificate"]] += 1
            for fault in faults(body, answer, oracle):
                counts["wrong"] += 1
                print(f"answer {number}, {json.dumps(body)}: {fault}", flush=True)
    return counts


def main() -> int:
    """Serve, check, and print one line of JSON last."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--answers", type=int, default=2000, help="how many answers in all")
    parser.add_argument("--bundles", type=int, default=8, help="catalogs to serve in turn")
    parser.add_argument("--seed", type=int, default=0, help="of the first bundle")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    start, total = time.perf_counter(), Counter[str]()
    for bundle in range(arguments.bundles):
        total.update(on_one_bundle(arguments.seed + bundle, arguments.answers // arguments.bundles))
    print(json.dumps({**total, "seconds": round(time.perf_counter() - start, 1)}))
    return int(total["wrong"] > 0)


def on_one_bundle(seed: int, answers: int) -> Counter[str]:
    """Serve a bundle, and compare its answers."""
    with TemporaryDirectory() as name:
        bundle = Path(name) / "bundles" / "shop"
        oracle = Oracle(bundle, write_bundle(bundle, seed))
        settings = ServingSettings(bundle=str(bundle), store=f"{name}/events.sqlite", port=0)
        server = uvicorn.Server(uvicorn.Config(create_app(settings), port=0, log_level="warning"))
        thread = threading.Thread(target=server.run)
        thread.start()
        try:
            return check(address(server), oracle, answers, seed)
        finally:
            server.should_exit = True
            thread.join()


def address(server: uvicorn.Server) -> str:
    """The server's address, once it is ready."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        if server.started:
            port = server.servers[0].sockets[0].getsockname()[1]
            url = f"http://127.0.0.1:{port}"
            if httpx.get(f"{url}/health/ready").status_code == httpx.codes.OK:
                return url
        time.sleep(0.05)
    raise TimeoutError("the service was not ready within two minutes")


if __name__ == "__main__":
    sys.exit(main())
