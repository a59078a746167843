"""Answers over HTTP against plain transformers: no excluded or missing item, no false certificate.

    python tests/stress/rest_exactness.py --requests 2000 --seed 0

A service is started on each of several bundles with four levels of codes and random weights. Items
are inserted by `like` and by codes, replaced, changed and removed, and a rule is put, over HTTP;
requests with filters, boosts, rules, exclusions and histories are sent in every exact mode in
between. The oracle keeps its own list of items and evaluates each filter itself. Its scores are
log-probabilities of the bundle's checkpoint: one plain forward pass of transformers for each
history over all items. The expected list is beam search over those sums, in plain Python. An answer
is wrong if

- it has an excluded item, an item twice, fewer items than possible, or more of a value than a cap
  allows; its first items are not those that are pinned, or the others not in the order of scores;
- it is not the list of the oracle's beam search (the model's best items, if it is certified
  `global-exact`), but for scores within 1e-4 of each other; of a list that is certified
  `approximate` this is not asked;
- a score differs from the oracle's by more than 1e-4, or `eligible_items` is another number.

An item is read after each change, too. The last line is one JSON object.
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
import torch
import transformers
import uvicorn

sys.path.append(str(Path(__file__).parents[1] / "suites"))
sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

import toy_bundle

from recsys.bundle import TARGET
from recsys.interactions import Histories
from recsys.models.checkpoint import build
from recsys.retrieval import ItemItem, Reranker, Retrieval
from recsys.serving.app import create_app
from recsys.serving.settings import ServingSettings
from recsys.vocabulary import Vocabulary

LEVELS, SIZES, WINDOW = (6, 6, 6, 30), (12, 24, 40, 90), 8
COLORS, TOLERANCE, RULE = ("red", "green", "blue"), 1e-4, "one"
Item = dict[str, Any]

RERANKER = Reranker({"item_item": 1.0, "model": 1.0})


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
    table = toy_bundle.items_table(
        [item["item_id"] for item in items],
        color=[item["color"] for item in items],
        price=[item["price"] for item in items],
    )
    vocabulary = Vocabulary.from_levels(LEVELS)
    torch.manual_seed(seed)
    target = build({"hidden_size": 32, "intermediate_size": 64}, vocabulary)
    draft = build({"hidden_size": 16, "intermediate_size": 32}, vocabulary)
    for weight in target.parameters():
        weight.data.mul_(3)  # so peaked that scores rarely tie
    walks = Histories.of(rng.integers(0, count, (100, 6)).tolist())
    counts = np.bincount(walks.items, minlength=count).astype(float)
    toy_bundle.write_bundle(
        path, table, codes.astype(np.int32), LEVELS, target=target, draft=draft,
        retrieval=Retrieval(ItemItem.count(walks, count), counts, reranker=RERANKER),
        prompts=json.dumps({"max_items": WINDOW, "block": 1}),
    )  # fmt: skip
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

    def may(self, body: dict[str, Any], rule: dict[str, Any]) -> dict[tuple[int, ...], list[str]]:
        """Items that may be in the answer to a request, by codes."""
        hidden = set(body.get("exclude_items", ()))
        if body["exclude_seen"]:
            hidden |= set(body["history"])
        found: dict[tuple[int, ...], list[str]] = {}
        for name, item in self.items.items():
            passes = fits(body.get("filter"), item) and fits(rule.get("filter"), item)
            if name not in hidden and passes:
                found.setdefault(item["codes"], []).append(name)
        return found

    def beams(
        self,
        steps: dict[tuple[int, ...], list[float]],
        rows: list[tuple[int, ...]],
        width: int,
        gains: dict[str, float],
    ) -> tuple[set[tuple[int, ...]], bool]:
        """Rows that beam search keeps, and whether a near tie decided which.

        A prefix may gain as much as any item below it.
        """
        most: dict[tuple[int, ...], float] = {}
        for name, item in self.items.items():
            for depth in range(1, len(LEVELS) + 1):
                prefix = item["codes"][:depth]
                most[prefix] = max(gains[name], most.get(prefix, gains[name]))
        kept, near = [()], False
        for depth in range(1, len(LEVELS) + 1):
            scores = {
                row[:depth]: sum(steps[row][:depth]) + most[row[:depth]]
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


def draw_boosts(rng: np.random.Generator) -> list[dict[str, Any]]:
    """Up to two boosts."""
    wanted = [draw_filter(rng) for _ in range(rng.integers(3))]
    weights = (-2.0, -0.5, 0.5, 3.0)
    return [{"filter": f, "weight": float(rng.choice(weights))} for f in wanted if f is not None]


def draw_rule(rng: np.random.Generator, oracle: Oracle) -> dict[str, Any]:
    """A rule of at least one part."""
    rule: dict[str, Any] = {"pin": [str(n) for n in rng.choice(sorted(oracle.items), 2)]}
    if (wanted := draw_filter(rng)) is not None:
        rule["filter"] = wanted
    if rng.integers(2):
        rule["boosts"] = draw_boosts(rng)
    if rng.integers(2):
        rule["max_per"] = {"color": int(rng.integers(1, 8))}
    return rule


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
    if rng.integers(3) == 0:
        body["boosts"] = draw_boosts(rng)
    if rng.integers(3) == 0:
        body["rules"] = [RULE]
    way = rng.integers(4)
    if way == 1:
        body["mode"] = "strict"
    elif way == 2:
        body["guarantee"] = "global"
    elif way == 3:
        body["mode"] = "beam"
    return body


def admitted(names: list[str], caps: dict[str, int], oracle: Oracle) -> list[str]:
    """Names that caps let in, one after the other."""
    found: list[str] = []
    for name in names:
        counts = Counter(oracle.items[other]["color"] for other in found)
        if counts[oracle.items[name]["color"]] < caps.get("color", len(names)):
            found.append(name)
    return found


def faults(
    body: dict[str, Any], rule: dict[str, Any], answer: dict[str, Any], oracle: Oracle
) -> list[str]:
    """Faults of an answer; `rule` is the one that was applied, or empty."""
    allowed, steps = oracle.may(body, rule), oracle.steps(body["history"])
    boosts = [*body.get("boosts", ()), *rule.get("boosts", ())]
    gains = {
        name: sum(boost["weight"] for boost in boosts if fits(boost["filter"], item))
        for name, item in oracle.items.items()
    }
    caps = rule.get("max_per", {})
    score = {
        name: sum(steps[codes]) + gains[name] for codes, names in allowed.items() for name in names
    }
    pins = dict.fromkeys(name for name in rule.get("pin", ()) if name in score)
    first = admitted([*pins], caps, oracle)[: body["k"]]
    names = [item["item_id"] for item in answer["items"]]
    if bad := [name for name in names if name not in score]:
        return [f"items {bad} must not be there"]
    if len(set(names)) < len(names):
        return [f"an item is there twice: {names}"]
    if names[: len(first)] != first:
        return [f"first are {names[: len(first)]}, not {first}"]
    if admitted(names, caps, oracle) != names:
        return [f"more than a cap allows: {names}"]
    if answer["eligible_items"] != len(score):
        return [f"{answer['eligible_items']} items are eligible, not {len(score)}"]
    more = admitted([*names, *(name for name in score if name not in names)], caps, oracle)
    if len(names) != min(body["k"], len(more)):
        return [f"{len(names)} items of {min(body['k'], len(more))}: {names}"]
    rest = [(item["item_id"], item["score"]) for item in answer["items"][len(first) :]]
    if wrong := [(n, s, score[n]) for n, s in rest if abs(s - score[n]) > TOLERANCE]:
        return [f"scores {wrong}"]
    scores = [s for _, s in rest]
    if scores != sorted(scores, reverse=True):
        return [f"not in the order of scores: {scores}"]
    if answer["certificate"] == "approximate":
        return []
    open_rows = sorted(codes for codes, some in allowed.items() if not {*some} <= {*first})
    kept, near = oracle.beams(steps, open_rows, max(20, body["k"]), gains)
    whole = answer["certificate"] == "global-exact"
    among = [n for codes, some in allowed.items() if whole or codes in kept for n in some]
    ranked = sorted(set(among) - set(first), key=lambda name: -score[name])
    best = [score[n] for n in admitted([*first, *ranked], caps, oracle)[len(first) : body["k"]]]
    if not (near and not whole) and not np.allclose(scores, best, atol=TOLERANCE):
        return [f"{answer['certificate']}: scores {scores}, not {best}"]
    return []


def change(client: httpx.Client, rng: np.random.Generator, oracle: Oracle, number: int) -> str:
    """Add items by `like` and by codes, replace, change and remove one each; one that is there."""
    new, old = [], sorted(oracle.items)
    originals = [name for name in old if name.startswith("item")]  # in the end all are removed

    def attributes() -> Item:
        return {"color": str(rng.choice(COLORS)), "price": float(rng.integers(0, 100) / 4)}

    for place in range(3):
        item: Item = {"item_id": f"new-{number}-{place}", "title": "New"}
        item["attributes"] = attributes()
        if place and originals:
            item["like"] = str(rng.choice(originals))
        else:
            item["semantic_id"] = [int(rng.integers(size)) for size in LEVELS]
        new.append(item)
    replaced, changed, gone = (str(name) for name in rng.choice(old, 3, replace=False))
    new.append({"item_id": replaced, "title": "Replaced", "attributes": attributes()})
    answer = client.post("/v1/items", json={"items": new})
    answer.raise_for_status()
    for item, made in zip(new, answer.json()["items"], strict=True):
        oracle.items[item["item_id"]] = {
            "item_id": item["item_id"],
            "codes": tuple(made["semantic_id"]),
            **item["attributes"],
        }
    price = float(rng.integers(0, 100) / 4)
    patch = {"attributes": {"price": price}}
    client.patch(f"/v1/items/{changed}", json=patch).raise_for_status()
    oracle.items[changed]["price"] = price
    client.delete(f"/v1/items/{gone}").raise_for_status()
    del oracle.items[gone]
    return changed


def check(url: str, oracle: Oracle, requests: int, seed: int) -> Counter[str]:
    """Send requests and compare the answers; returns counts."""
    rng, counts = np.random.default_rng(seed), Counter[str](requests=requests, wrong=0)
    rule: dict[str, Any] = {}
    with httpx.Client(base_url=url, timeout=60) as client:

        def wrong(body: Any, fault: str) -> None:
            counts["wrong"] += 1
            print(f"{json.dumps(body)}: {fault}", flush=True)

        for number in range(requests):
            if number % 20 == 0:
                name = change(client, rng, oracle, number)
                rule = draw_rule(rng, oracle)
                client.put(f"/v1/rules/{RULE}", json=rule).raise_for_status()
                shown, item = client.get(f"/v1/items/{name}").json(), oracle.items[name]
                read = {key: shown["metadata"][key] for key in ("color", "price")}
                if {**read, "codes": tuple(shown["semantic_id"]), "item_id": name} != item:
                    wrong(shown, f"is not {item}")
            body = draw(rng, oracle)
            response = client.post("/v1/recommendations", json=body)
            response.raise_for_status()
            answer = response.json()
            counts[body.get("mode", "auto")] += 1
            counts[answer["certificate"]] += 1
            for fault in faults(body, rule if "rules" in body else {}, answer, oracle):
                wrong({"body": body, "rule": rule}, fault)
    return counts


def main() -> int:
    """Serve, check, and print one line of JSON last."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=2000, help="how many requests in all")
    parser.add_argument("--bundles", type=int, default=8, help="catalogs to serve in turn")
    parser.add_argument("--seed", type=int, default=0, help="of the first bundle")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    start, total = time.perf_counter(), Counter[str]()
    for bundle in range(arguments.bundles):
        requests = arguments.requests // arguments.bundles
        total.update(on_one_bundle(arguments.seed + bundle, requests))
    print(json.dumps({**total, "seconds": round(time.perf_counter() - start, 1)}))
    return int(total["wrong"] > 0)


def on_one_bundle(seed: int, requests: int) -> Counter[str]:
    """Serve a bundle, and compare its answers."""
    with TemporaryDirectory() as name:
        bundle = Path(name) / "bundles" / "shop"
        oracle = Oracle(bundle, write_bundle(bundle, seed))
        settings = ServingSettings(bundle=str(bundle), store=f"{name}/events.sqlite", port=0)
        server = uvicorn.Server(uvicorn.Config(create_app(settings), port=0, log_level="warning"))
        thread = threading.Thread(target=server.run)
        thread.start()
        try:
            return check(address(server), oracle, requests, seed)
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
