"""Items added to a bundle that is served, and the evaluation of items as if they were new."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from oracles import tiny_model

from recsys.artifacts import Manifest
from recsys.bundle import Bundle
from recsys.catalog import Catalog
from recsys.dataset import Dataset
from recsys.interactions import Interactions
from recsys.live import NewItem
from recsys.prompts import PromptConfig
from recsys.recommender import Recommender, RecommendRequest
from recsys.retrieval import ItemItem, Reranker, Retrieval, decayed_counts
from recsys.retrieval.content import ContentIndex
from recsys.splits import label_ends
from recsys.vocabulary import Vocabulary

ITEMS, LEVELS, USERS = 40, (5, 4, 4), 80
KINDS = ("oak lamp", "wool scarf", "steel knife", "clay pot")
VOCABULARY = Vocabulary.from_levels(LEVELS)
MODEL = tiny_model(vocabulary=VOCABULARY.size, hidden=128, layers=1)
CODES = np.stack(np.unravel_index(np.arange(ITEMS), LEVELS), axis=1).astype(np.int32)
RNG = np.random.default_rng(0)
TABLE = pa.table(
    {
        "item_id": [f"i{i}" for i in range(ITEMS)],
        "title": [f"{KINDS[i % 4]} {' '.join(f'w{w}' for w in RNG.integers(0, 9, 3))}"
                  for i in range(ITEMS)],
        "text": [""] * ITEMS,
    }
)  # fmt: skip
BY_CONTENT = Reranker({"content.value": 1.0}, candidates=ITEMS, nodes=100)


def dataset() -> Dataset:
    """Users who stay with one kind."""
    taken = [RNG.permutation(np.arange(u % 4, ITEMS, 4))[:6] for u in range(USERS)]
    events = Interactions.of(
        [f"u{u}" for u in range(USERS) for _ in range(6)],
        [f"i{i}" for items in taken for i in items],
        item_ids=np.asarray([f"i{i}" for i in range(ITEMS)]),
    )
    return Dataset(events, label_ends(events.user), TABLE)


@pytest.fixture(scope="module")
def data():
    return dataset()


@pytest.fixture
def rec(data):
    histories = data.train_histories
    retrieval = Retrieval(
        ItemItem.count(histories, ITEMS),
        decayed_counts(histories.items, ITEMS),
        content=ContentIndex.of(TABLE),
        reranker=BY_CONTENT,
    )
    manifest = Manifest(kind="bundle", config={}, parents={}, files={}, info={})
    prompt = PromptConfig(max_items=4, block=2)
    bundle = Bundle(Path("nowhere"), manifest, Catalog(TABLE, CODES), VOCABULARY, prompt)
    return Recommender(bundle, MODEL, retrieval=retrieval)


def listed(rec, history, k=8):
    (result,) = rec.recommend_batch([RecommendRequest(history, k)])
    return [(r.item_id, r.score) for r in result.recommendations]


def test_an_added_item_is_found_by_its_words(rec):
    title = TABLE["title"][0].as_py()
    free = [4, 3, 3]
    rec.upsert([NewItem("like i0", title, semantic_id=free), NewItem("odd", "", semantic_id=free)])
    found = listed(rec, ["i0"])
    assert found[0][0] == "like i0"
    assert "odd" not in [item for item, _ in found]
    assert listed(rec, ["like i0"])[0][0] == "i0"  # and what it says counts in a history
    assert "like i0" not in [item for item, _ in listed(rec, ["i0", "like i0"])]


def test_an_added_item_follows_its_changes(rec):
    title, other = TABLE["title"][0].as_py(), TABLE["title"][1].as_py()
    rec.upsert([NewItem("x", title, semantic_id=[4, 3, 3])])
    rec.upsert([NewItem("y", title, semantic_id=[4, 3, 2]), NewItem("x", other)])
    assert listed(rec, ["i0"])[0][0] == "y"
    assert listed(rec, ["i1"])[0][0] == "x"
    rec.remove(["y"])
    assert "y" not in [item for item, _ in listed(rec, ["i0"])]
    rec.upsert([NewItem("z", title, semantic_id=[4, 3, 1])])
    assert listed(rec, ["i0"])[0][0] == "z"
    assert listed(rec, ["i1"])[0][0] == "x"


def test_added_items_have_the_same_bits_alone_and_in_a_batch(rec):
    rec.upsert([NewItem(f"n{i}", TABLE["title"][i].as_py(), semantic_id=CODES[i]) for i in (0, 5)])
    requests = [RecommendRequest([f"i{i}", "n0"], 8) for i in range(9)]
    together = [[(r.item_id, r.score) for r in x.recommendations]
                for x in rec.recommend_batch(requests)]  # fmt: skip
    assert together == [listed(rec, request.history) for request in requests]
