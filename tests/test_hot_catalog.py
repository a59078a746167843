"""Items are inserted and removed by threads while batches decode: no answer has a wrong item."""

import itertools
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from oracles import tiny_model

from recsys.artifacts import Manifest
from recsys.bundle import Bundle
from recsys.catalog import Catalog
from recsys.live import NewItem
from recsys.prompts import PromptConfig
from recsys.recommender import Recommender, RecommendRequest
from recsys.vocabulary import Vocabulary

ITEMS, LEVELS, COLORS, K = 400, (16, 8, 16), ("red", "green", "blue"), 10


class Changes:
    """Inserts and removes items of a recommender in threads, and records every item.

    Attributes:
        born: number of the first epoch that has an item.
        gone: number of an epoch without it, recorded after its removal has returned.
        seen: number of the newest epoch that a caller knows.
    """

    def __init__(self, recommender: Recommender) -> None:
        self.recommender = recommender
        self.born = dict.fromkeys(recommender.catalog.item_ids, 0)
        self.gone: dict[str, int] = {}
        self.seen, self.stop = 0, threading.Event()
        self._removable, self._lock = list(self.born), threading.Lock()

    def run(self, change, caller: int) -> None:
        rng = random.Random(f"{change.__name__} {caller}")
        for count in itertools.count():
            if self.stop.wait(0.01):
                return
            number = change(rng, f"{caller}-{count}")
            with self._lock:
                self.seen = max(self.seen, number)

    def insert(self, rng: random.Random, name: str) -> int:
        """Two items, the second one with codes like the first one's."""
        color, codes = {"color": rng.choice(COLORS)}, tuple(rng.randrange(n) for n in LEVELS)
        names = [f"new-{name}-0", f"new-{name}-1"]
        items = [
            NewItem(names[0], "", "", color, codes),
            NewItem(names[1], "", "", color, like=names[0]),
        ]
        epoch = self.recommender.upsert(items)
        with self._lock:
            self.born |= dict.fromkeys(names, epoch.number)
            self._removable += names
        return epoch.number

    def remove(self, rng: random.Random, _: str) -> int:
        with self._lock:
            name = self._removable.pop(rng.randrange(len(self._removable)))
        assert self.recommender.remove([name]) == [name]
        self.gone[name] = self.recommender.epoch.number
        return self.gone[name]

    def check(self, request: RecommendRequest, result, before: int) -> None:
        """Check an answer, given the newest epoch known before it began."""
        number = result.epoch_number
        assert number >= before
        names = [item.item_id for item in result.recommendations]
        assert len(set(names)) == K
        assert not set(names) & set(request.history)
        with self._lock:
            for name in names:
                # A batch may be quicker than the caller who has just inserted the item.
                born, gone = self.born.get(name, number), self.gone.get(name, number + 1)
                assert born <= number < gone, name


@pytest.fixture
def recommender() -> Recommender:
    rng = np.random.default_rng(0)
    vocabulary = Vocabulary.from_levels(LEVELS)
    codes = rng.integers(0, LEVELS, (ITEMS, len(LEVELS))).astype(np.int32)
    ids = [f"i{i}" for i in range(ITEMS)]
    color = rng.choice(COLORS, ITEMS)
    table = pa.table({"item_id": ids, "title": ids, "text": [""] * ITEMS, "color": color})
    catalog, prompt = Catalog(table, codes), PromptConfig(max_items=20)
    bundle = Bundle(Path("shop"), Manifest(kind="bundle"), catalog, vocabulary, prompt)
    return Recommender(bundle, tiny_model(vocabulary=vocabulary.size, hidden=32))


def test_answers_have_items_of_their_epoch_only(recommender):
    rng, changes = np.random.default_rng(1), Changes(recommender)
    with ThreadPoolExecutor() as pool:
        kinds = itertools.product((changes.insert, changes.remove), range(2))
        callers = [pool.submit(changes.run, *kind) for kind in kinds]
        try:
            while len(changes.gone) < 40 and not any(caller.done() for caller in callers):
                decode(recommender, changes, rng)
        finally:
            changes.stop.set()
    for caller in callers:
        caller.result()
    assert len(changes.born) > ITEMS


def decode(recommender: Recommender, changes: Changes, rng: np.random.Generator) -> None:
    """Decode a batch, half of it filtered by color, and check the answers."""
    requests = []
    for i in range(8):
        catalog = recommender.catalog
        history = [catalog.item_id(item) for item in rng.integers(0, len(catalog), 5).tolist()]
        wanted = {"must": [{"key": "color", "match": COLORS[i % 3]}]} if i % 2 else None
        requests.append(RecommendRequest(history, K, filter=wanted, blend=False))
    before = changes.seen
    for request, result in zip(requests, recommender.recommend_batch(requests), strict=True):
        changes.check(request, result, before)
        catalog = result.epoch.catalog
        for item in result.recommendations if request.filter else ():
            found = catalog.row(catalog.find(item.item_id))["color"]
            assert found == request.filter["must"][0]["match"]
