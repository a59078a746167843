"""Items added to a bundle that is served are listed by what their words say."""

from pathlib import Path

import pytest
from oracles import tiny_model
from toy_bundle import counted_codes, items_table

from recsys.artifacts import Manifest
from recsys.bundle import Bundle
from recsys.catalog import Catalog
from recsys.interactions import Histories
from recsys.live import NewItem
from recsys.prompts import PromptConfig
from recsys.recommender import Recommender, RecommendRequest
from recsys.retrieval import ItemItem, Reranker, Retrieval, decayed_counts
from recsys.retrieval.content import ContentIndex
from recsys.vocabulary import Vocabulary

ITEMS, LEVELS = 40, (5, 4, 4)
KINDS = ("oak lamp", "wool scarf", "steel knife", "clay pot")
TITLES = [f"{KINDS[i % 4]} w{i % 3} w{i % 5 + 3} w{i % 7 + 8}" for i in range(ITEMS)]
TABLE = items_table([f"i{i}" for i in range(ITEMS)], TITLES)


@pytest.fixture
def rec():
    walks, vocabulary = Histories.of([[0, 1]]), Vocabulary.from_levels(LEVELS)
    catalog = Catalog(TABLE, counted_codes(ITEMS, LEVELS))
    bundle = Bundle(Path("nowhere"), Manifest("bundle"), catalog, vocabulary, PromptConfig(4, 2))
    retrieval = Retrieval(
        ItemItem.count(walks, ITEMS),
        decayed_counts(walks.items, ITEMS),
        content=ContentIndex.of(TABLE),
        reranker=Reranker({"content": 1.0}, candidates=ITEMS, nodes=100),
    )
    return Recommender(bundle, tiny_model(vocabulary=vocabulary.size), retrieval=retrieval)


def listed(rec, history):
    (result,) = rec.recommend_batch([RecommendRequest(history, 8)])
    return [r.item_id for r in result.recommendations]


def test_an_added_item_is_found_by_its_words_and_follows_its_changes(rec):
    rec.upsert(
        [NewItem("x", TITLES[0], semantic_id=[4, 3, 3]), NewItem("odd", semantic_id=[4, 3, 3])]
    )
    assert listed(rec, ["i0"])[0] == "x"
    assert "odd" not in listed(rec, ["i0"])
    assert listed(rec, ["x"])[0] == "i0"  # and what it says counts in a history
    assert "x" not in listed(rec, ["i0", "x"])
    rec.upsert([NewItem("y", TITLES[0], semantic_id=[4, 3, 2]), NewItem("x", TITLES[1])])
    assert listed(rec, ["i0"])[0] == "y"
    assert listed(rec, ["i1"])[0] == "x"
    rec.remove(["y"])
    assert "y" not in listed(rec, ["i0"])
