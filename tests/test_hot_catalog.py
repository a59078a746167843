"""Items are inserted and removed by threads while batches decode: no answer has a wrong item."""

import random
import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import count, product
from pathlib import Path

import numpy as np
import pyarrow as pa
from oracles import tiny_model

from recsys.artifacts import Manifest
from recsys.bundle import Bundle
from recsys.catalog import Catalog
from recsys.live import NewItem
from recsys.prompts import PromptConfig
from recsys.recommender import Recommender, RecommendRequest
from recsys.vocabulary import Vocabulary

ITEMS, LEVELS, COLORS, K = 400, (16, 8, 16), ("red", "green", "blue"), 10


def make_recommender() -> Recommender:
    rng = np.random.default_rng(0)
    vocabulary = Vocabulary.from_levels(LEVELS)
    codes = rng.integers(0, LEVELS, (ITEMS, len(LEVELS))).astype(np.int32)
    ids = [f"i{i}" for i in range(ITEMS)]
    color = rng.choice(COLORS, ITEMS)
    table = pa.table({"item_id": ids, "title": ids, "text": [""] * ITEMS, "color": color})
    catalog, prompt = Catalog(table, codes), PromptConfig(max_items=20)
    bundle = Bundle(Path("shop"), Manifest(kind="bundle"), catalog, vocabulary, prompt)
    return Recommender(bundle, tiny_model(vocabulary=vocabulary.size, hidden=32))


def test_answers_have_items_of_their_epoch_only() -> None:
    """Two threads insert, and two remove. `born` and `gone` have the epochs of all items."""
    recommender, rng = make_recommender(), np.random.default_rng(1)
    born = dict.fromkeys(recommender.catalog.item_ids, 0)
    removable, gone, seen = list(born), {}, [0]
    stop, lock = threading.Event(), threading.Lock()

    def insert(draw: random.Random, name: str) -> int:
        """Two items, the second one with codes like the first one's."""
        color, codes = {"color": draw.choice(COLORS)}, tuple(draw.randrange(n) for n in LEVELS)
        one = NewItem(f"{name}-0", "", "", color, codes)
        other = NewItem(f"{name}-1", "", "", color, like=one.item_id)
        number = recommender.upsert([one, other]).number
        with lock:
            born.update({one.item_id: number, other.item_id: number})
            removable.extend([one.item_id, other.item_id])
        return number

    def remove(draw: random.Random, _: str) -> int:
        with lock:
            name = removable.pop(draw.randrange(len(removable)))
        assert recommender.remove([name]) == [name]
        gone[name] = recommender.epoch.number
        return gone[name]

    def go_on(change, caller: int) -> None:
        draw = random.Random(f"{change.__name__} {caller}")
        for n in count():
            if stop.wait(0.01):
                return
            number = change(draw, f"new-{caller}-{n}")
            with lock:
                seen[0] = max(seen[0], number)

    with ThreadPoolExecutor() as pool:
        kinds = product((insert, remove), range(2))
        callers = [pool.submit(go_on, *kind) for kind in kinds]
        try:
            while len(gone) < 40 and not any(caller.done() for caller in callers):
                asked = draw_requests(recommender, rng)
                before = seen[0]
                for request, result in zip(asked, recommender.recommend_batch(asked), strict=True):
                    number, catalog = result.epoch_number, result.epoch.catalog
                    names = [item.item_id for item in result.recommendations]
                    assert number >= before
                    assert len(set(names) - set(request.history)) == K
                    with lock:  # a batch may be quicker than the caller who has just inserted one
                        for name in names:
                            assert born.get(name, number) <= number < gone.get(name, number + 1)
                    for name in names if request.filter else ():
                        color = catalog.row(catalog.find(name))["color"]
                        assert color == request.filter["must"][0]["match"]
        finally:
            stop.set()
    for caller in callers:
        caller.result()
    assert len(born) > ITEMS


def draw_requests(recommender: Recommender, rng: np.random.Generator) -> list[RecommendRequest]:
    """A batch, half of it filtered by color."""
    requests, catalog = [], recommender.catalog
    for i in range(8):
        history = [catalog.item_id(item) for item in rng.integers(0, len(catalog), 5).tolist()]
        wanted = {"must": [{"key": "color", "match": COLORS[i % 3]}]} if i % 2 else None
        requests.append(RecommendRequest(history, K, filter=wanted, blend=False))
    return requests
