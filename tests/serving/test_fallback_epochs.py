"""A fallback that the model fills up, with changes of the catalog between the two."""

import numpy as np
import pytest

from recsys.interactions import Histories
from recsys.live import NewItem
from recsys.recommender import Recommender, RecommendRequest
from recsys.retrieval import ItemItem, Retrieval, decayed_counts

ITEMS = 12
WANTED = {"must": [{"key": "cat", "match": "a"}]}


@pytest.fixture
def recommender(random_bundle, tmp_path):
    """Every second of twelve items matches the filter; four more that retrieval does not know."""
    histories = Histories.of([np.random.default_rng(0).integers(0, ITEMS, 6) for _ in range(20)])
    counts = decayed_counts(histories.items, ITEMS)
    retrieval = Retrieval(ItemItem.count(histories, ITEMS), counts, 0.1, None, None)
    bundle = random_bundle(
        tmp_path / "demo", ITEMS, retrieval=retrieval, cat=["a", "b"] * (ITEMS // 2)
    )
    found = Recommender.load(bundle)
    found.upsert(
        [NewItem(f"n{i}", attributes={"cat": "a"}, semantic_id=(i, i, i)) for i in range(4)]
    )
    return found


def fill_up(recommender, k, change):
    """The first fallback item, and the whole list when `change` of it came in between."""
    request = RecommendRequest(["nobody"], k=k, filter=WANTED)
    found = recommender.fallback(request)
    assert found.is_short(k)
    first = found.recommendations[0].item_id
    change(first)
    (more,) = recommender.recommend_batch([request.after(found)])
    return first, found.followed_by(more)


def ids(result):
    return [one.item_id for one in result.recommendations]


def test_an_item_that_no_longer_matches_is_left_out(recommender):
    first, result = fill_up(
        recommender, 8, lambda item: recommender.upsert([NewItem(item, attributes={"cat": "b"})])
    )
    assert first not in ids(result)
    assert len(ids(result)) == 8
    assert result.eligible_items == 9


def test_the_list_is_full_after_an_item_is_removed(recommender):
    first, result = fill_up(recommender, 9, lambda item: recommender.remove([item]))
    assert first not in ids(result)
    assert len(set(ids(result))) == 9 == result.eligible_items


def test_caps_count_the_items_of_the_fallback(recommender):
    request = RecommendRequest(["nobody"], k=16, max_per={"cat": 7})
    found = recommender.fallback(request)
    assert len(found.recommendations) == ITEMS
    (more,) = recommender.recommend_batch([request.after(found)])
    result = found.followed_by(more)
    assert result.recommendations[:ITEMS] == found.recommendations
    assert [one.source for one in result.recommendations[ITEMS:]] == ["model"]  # the seventh a


def test_titles_and_codes_are_of_the_answers_epoch(recommender):
    moved = {"title": "new", "attributes": {"cat": "a"}, "semantic_id": (9, 9, 9)}
    first, result = fill_up(
        recommender, 8, lambda item: recommender.upsert([NewItem(item, **moved)])
    )
    (one,) = [x for x in result.recommendations if x.item_id == first]
    assert (one.title, one.semantic_id[:2]) == ("new", (9, 9))
