"""Insert and remove items while batches decode, and check every answer against its epoch.

    python benchmarks/hot_catalog.py --seconds 60
    python benchmarks/hot_catalog.py --items 1000000 --seconds 60
    python benchmarks/hot_catalog.py --bundle var/bundles/beauty --seconds 60

Callers insert and remove at a steady rate, each on a thread of its own; half of what is removed was
recommended a moment ago. One thread recommends all the time, to histories of any items, half of
them with a filter. An answer is wrong if it

- has an item that was not there in its epoch, by the callers' own records and by the epoch's;
- is of an epoch older than one that an insertion or removal had returned with before the batch
  began;
- has an item twice, one that is excluded or that the filter hides, or fewer than k;
- is one of those decoded again afterwards over a trie built anew from the items of its epoch, by
  plain beam search, and has other scores.

The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import random
import threading
import time
from collections import deque
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from recsys.artifacts import Manifest
from recsys.benchmark.environment import environment
from recsys.bundle import Bundle
from recsys.catalog import Catalog
from recsys.constraint import ItemTrie
from recsys.decoding import SearchRequest, beam_search
from recsys.errors import ItemError
from recsys.live import Epoch, NewItem
from recsys.prompts import PromptConfig
from recsys.recommender import MIN_BEAMS, Recommender, RecommendRequest, RecommendResult
from recsys.testing import tiny_model
from recsys.vocabulary import Vocabulary

BATCH, K = 8, 10
COLORS = ("red", "green", "blue")


def synthetic(items: int, levels: tuple[int, ...] = (256,) * 4, hidden: int = 128) -> Recommender:
    """A random model over random codes."""
    rng = np.random.default_rng(0)
    vocabulary = Vocabulary.from_levels(levels)
    codes = rng.integers(0, levels, (items, len(levels))).astype(np.int32)
    ids = [f"i{i}" for i in range(items)]
    table = pa.table(
        {
            "item_id": ids,
            "title": ids,
            "text": [""] * items,
            "color": rng.choice(COLORS, items),
        }
    )
    manifest = Manifest(kind="bundle")
    prompt = PromptConfig(max_items=20)
    bundle = Bundle(Path("synthetic"), manifest, Catalog(table, codes), vocabulary, prompt)
    return Recommender(bundle, tiny_model(vocabulary=vocabulary.size, hidden=hidden))


@dataclass
class Life:
    """When an item was there, as its caller knows it.

    Attributes:
        codes: of the item.
        born: number of the first epoch that has it.
        gone: number of an epoch that does not have it; None until its removal has returned.
        leaving: its removal has been called.
    """

    codes: tuple[int, ...]
    born: int = 0
    gone: int | None = None
    leaving: bool = False


@dataclass
class Asked:
    """One batch and what came of it."""

    begun: int
    epoch: Epoch
    requests: list[RecommendRequest]
    results: list[RecommendResult]
    seconds: float


@dataclass
class Run:
    """What callers and the recommending thread share."""

    recommender: Recommender
    lives: dict[str, Life]
    names: list[str]
    recent: deque[str] = field(default_factory=lambda: deque(maxlen=400))
    stop: threading.Event = field(default_factory=threading.Event)
    inserted: list[float] = field(default_factory=list)
    removed: list[float] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)
    seen: int = 0

    def saw(self, number: int) -> None:
        """An epoch that a caller knows of; no batch may begin with an older one."""
        with self.lock:
            self.seen = max(self.seen, number)


def insert(
    run: Run, caller: int, rate: float, size: int, levels: tuple[int, ...], color: bool
) -> None:
    """Insert `size` items a call, `rate` a second; a third of them beside another item."""
    rng = random.Random(caller)
    for count in pace(run, rate / size):
        items = []
        for place in range(size):
            name = f"new-{caller}-{count}-{place}"
            given = {"color": rng.choice(COLORS)} if color else {}
            codes = tuple(rng.randrange(n) for n in levels)
            items.append(NewItem(name, name, "", given, codes))
            if (count + place) % 3 == 0 and place:
                items[-1] = NewItem(name, name, "", given, like=items[-2].item_id)
            elif (count + place) % 3 == 0:
                items[-1] = NewItem(name, name, "", given, like=f"new-{caller}-{count - 1}-0")
        start = time.perf_counter()
        try:
            epoch = run.recommender.upsert(items)
        except ItemError:  # what it should be like has been removed
            items = [
                replace(item, semantic_id=(0,) * len(levels), like=None) if item.like else item
                for item in items
            ]
            epoch = run.recommender.upsert(items)
        run.inserted.append(time.perf_counter() - start)
        for item in items:
            codes = tuple(epoch.catalog.codes[epoch.catalog.find(item.item_id)].tolist())
            run.lives[item.item_id] = Life(codes, epoch.number)
        run.saw(epoch.number)
        with run.lock:
            run.names.extend(item.item_id for item in items)


def remove(run: Run, caller: int, rate: float) -> None:
    """Remove one item a call, `rate` a second; half of them were just recommended."""
    rng = random.Random(-caller - 1)
    for count in pace(run, rate):
        with run.lock:
            name, life = pick(run, rng, count % 2 == 1)
            life.leaving = True
        start = time.perf_counter()
        there = run.recommender.remove([name])
        run.removed.append(time.perf_counter() - start)
        if there != [name]:
            run.errors.append(f"remove: {name} was not there")
        life.gone = run.recommender.epoch.number
        run.saw(life.gone)


def pick(run: Run, rng: random.Random, recent: bool) -> tuple[str, Life]:
    """An item that nobody has removed yet."""
    while True:
        if recent and run.recent:
            name = run.recent.popleft()
        else:
            place = rng.randrange(len(run.names))
            run.names[place], run.names[-1] = run.names[-1], run.names[place]
            name = run.names.pop()
        if not (life := run.lives[name]).leaving:
            return name, life


def pace(run: Run, rate: float) -> Any:
    """Count up, `rate` a second, catching up where a call took long."""
    start, count = time.perf_counter(), 0
    while not run.stop.is_set():
        late = time.perf_counter() - start - count / rate
        if late < 0:
            run.stop.wait(-late)
            continue
        yield count
        count += 1


def ask(run: Run, rng: np.random.Generator, color: bool) -> Asked:
    """Recommend to one batch."""
    catalog = run.recommender.catalog
    requests = []
    for i in range(BATCH):
        items = rng.integers(0, len(catalog), int(rng.integers(1, 12)))
        history = [catalog.item_id(item) for item in items.tolist()]
        wanted = None
        if color and i % 2:
            wanted = {"must": [{"key": "color", "match": COLORS[int(rng.integers(3))]}]}
        requests.append(RecommendRequest(history, K, filter=wanted, blend=False))
    with run.lock:
        begun = run.seen
    start = time.perf_counter()
    results = run.recommender.recommend_batch(requests)
    seconds = time.perf_counter() - start
    epoch = run.recommender.begun  # type: ignore[attr-defined]
    run.recent.extend(r.item_id for result in results for r in result.recommendations[:3])
    return Asked(begun, epoch, requests, results, seconds)


def wrong(run: Run, asked: Asked) -> list[str]:
    """What is wrong with the answers of one batch, by the callers' records and the epoch."""
    found = []
    epoch = asked.epoch
    if epoch.number < asked.begun:
        found.append(f"epoch {epoch.number} when {asked.begun} had been seen")
    for request, result in zip(asked.requests, asked.results, strict=True):
        names = [r.item_id for r in result.recommendations]
        if result.epoch_number != epoch.number:
            found.append(f"answer of epoch {result.epoch_number} in {epoch.number}")
        if len(names) != K or len(set(names)) != K:
            found.append(f"{len(names)} items, {len(set(names))} different ones")
        if set(names) & set(request.history):
            found.append("an item of the history")
        for recommended in result.recommendations:
            life = recorded(run, recommended.item_id)
            if life is None or life.born > epoch.number:
                found.append(f"{recommended.item_id} before its time")
            elif life.gone is not None and life.gone <= epoch.number:
                found.append(f"{recommended.item_id} was gone")
            elif life.codes != recommended.semantic_id:
                found.append(f"{recommended.item_id} with codes of another")
            dense = epoch.catalog.find(recommended.item_id)
            if dense < 0:
                found.append(f"{recommended.item_id} is not in epoch {epoch.number}")
            elif request.filter is not None:
                color = epoch.catalog.row(dense)["color"]
                if color != request.filter["must"][0]["match"]:
                    found.append(f"{recommended.item_id} is {color}")
    return found


def recorded(run: Run, name: str) -> Life | None:
    """An item's record; a batch may be quicker than the caller who has just inserted it."""
    for _ in range(1000):
        if name in run.lives:
            return run.lives[name]
        time.sleep(0.001)
    return None


def decoded_again(run: Run, asked: Asked) -> list[str]:
    """What differs where answers are decoded over a trie built from the epoch's items."""
    epoch, vocabulary = asked.epoch, run.recommender.bundle.vocabulary
    found = []
    for request, result in zip(asked.requests, asked.results, strict=True):
        allowed = epoch.alive.copy()
        known = epoch.catalog.known(request.history)
        allowed[known[known >= 0]] = False
        if request.filter is not None:
            wanted = request.filter["must"][0]["match"]
            colors = np.asarray(epoch.catalog.items["color"].to_pylist(), object)
            allowed &= colors == wanted
        items = np.flatnonzero(allowed)
        trie = ItemTrie.build(vocabulary.encode(epoch.catalog.codes[items]))
        beams = beam_search(
            run.recommender.engine.target,
            SearchRequest(
                epoch.encoder.encode_all([known[known >= 0]]), prompt_slots=epoch.encoder.max_tokens
            ),
            trie,
            MIN_BEAMS,
        )
        rows = beams.rows[0][beams.rows[0] >= 0].numpy()
        sizes = np.diff(trie.row_item_start)[rows]
        expected = np.repeat(beams.scores[0, : len(rows)].numpy(), sizes)[:K]
        scores = [r.score for r in result.recommendations]
        if len(scores) != len(expected) or not np.allclose(scores, expected, atol=1e-4):
            found.append(f"epoch {epoch.number}: {scores} for {expected.tolist()}")
    return found


class Watched(Recommender):
    """Remembers the epoch that the last batch began with."""

    begun: Epoch

    def _begin(self) -> Epoch:
        self.begun = super()._begin()
        return self.begun


def measure(
    recommender: Recommender,
    seconds: float,
    rate: float = 1000.0,
    callers: int = 8,
    size: int = 4,
    kept: int = 30,
) -> dict[str, Any]:
    """Run it; what came of it, as plain values.

    Args:
        recommender: over a catalog without earlier changes.
        seconds: to run.
        rate: inserts a second, and removals a second.
        callers: threads that insert, and as many that remove.
        size: items that an insert has.
        kept: batches that are decoded again afterwards.
    """
    recommender.__class__ = Watched
    catalog = recommender.catalog
    codes = catalog.codes.tolist()
    lives = {name: Life(tuple(c)) for name, c in zip(catalog.item_ids, codes, strict=True)}
    run = Run(recommender, lives, list(catalog.item_ids))
    levels = recommender.bundle.vocabulary.level_sizes
    color = "color" in catalog.items.column_names
    rng = np.random.default_rng(0)
    quiet = [ask(run, rng, color).seconds for _ in range(8)][2:]
    threads = [
        threading.Thread(target=insert, args=(run, i, rate / callers, size, levels, color))
        for i in range(callers)
    ]
    threads += [
        threading.Thread(target=remove, args=(run, i, rate / callers)) for i in range(callers)
    ]
    start = time.perf_counter()
    for thread in threads:
        thread.start()
    bad: list[str] = []
    times: list[float] = []
    again: list[Asked] = []
    items = late = 0
    while (now := time.perf_counter() - start) < seconds:
        asked = ask(run, rng, color)
        times.append(asked.seconds)
        bad += wrong(run, asked)
        items += sum(len(result.recommendations) for result in asked.results)
        late += any(life.leaving for r in asked.results for x in r.recommendations
                    if (life := run.lives[x.item_id]))  # fmt: skip
        if len(again) < kept * now / seconds:
            again.append(asked)
    run.stop.set()
    for thread in threads:
        thread.join()
    elapsed = time.perf_counter() - start
    unlike = [text for asked in again for text in decoded_again(run, asked)]
    for text in [*run.errors, *bad, *unlike][:10]:
        print(text)
    epoch = recommender.epoch
    return {
        "items": len(codes),
        "callers": callers,
        "items_of_an_insert": size,
        "seconds": round(elapsed, 1),
        "inserts_per_second": round(size * len(run.inserted) / elapsed),
        "removals_per_second": round(len(run.removed) / elapsed),
        "epochs": epoch.number,
        "rows_now": len(epoch.catalog),
        "items_now": epoch.num_items,
        "answers": BATCH * len(times),
        "answers_per_second": round(BATCH * len(times) / elapsed, 1),
        "items_checked": items,
        "wrong_answers": len(bad) + len(run.errors),
        "batches_with_an_item_that_left_meanwhile": late,
        "decoded_again": BATCH * len(again),
        "decoded_again_wrong": len(unlike),
        "insert_ms": quantiles(run.inserted),
        "remove_ms": quantiles(run.removed),
        "batch_ms": quantiles(times),
        "batch_ms_without_changes": quantiles(quiet),
    }


def quantiles(seconds: list[float]) -> dict[str, float]:
    """Median, 99 % and most, in milliseconds."""
    if not seconds:
        return {}
    at = np.quantile(np.array(seconds) * 1e3, [0.5, 0.99, 1.0])
    return dict(zip(("p50", "p99", "max"), at.round(2).tolist(), strict=True))


def main() -> None:
    """Read arguments, run, print."""
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--bundle", type=Path, help="a bundle; by default a synthetic catalog")
    arguments.add_argument("--items", type=int, default=12_000)
    arguments.add_argument("--seconds", type=float, default=60.0)
    arguments.add_argument("--rate", type=float, default=1000.0, help="inserts, and removals, a s")
    arguments.add_argument("--callers", type=int, default=8)
    arguments.add_argument("--size", type=int, default=4, help="items of one insert")
    arguments.add_argument("--threads", type=int, default=1, help="of torch")
    args = arguments.parse_args()
    torch.set_num_threads(args.threads)
    recommender = Recommender.load(args.bundle) if args.bundle else synthetic(args.items)
    result = measure(recommender, args.seconds, args.rate, args.callers, args.size)
    result["bundle"] = args.bundle.name if args.bundle else None
    print(json.dumps({**result, "environment": environment()}))


if __name__ == "__main__":
    main()
