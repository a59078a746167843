"""Types of events: what counts as seen, what leads to a target event, and requests with types."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest
from oracles import interactions_of
from toy_bundle import counted_codes, items_table, write_bundle

from recsys.dataset import Dataset
from recsys.evaluation.baselines import fit_baselines
from recsys.interactions import Behaviour, Histories, count_as_seen
from recsys.recommender import Recommender, RecommendRequest
from recsys.retrieval import ItemItem, PairRules, Reranker, Retrieval, decayed_counts
from recsys.retrieval.event_types import EventTypes
from recsys.retrieval.related import together
from recsys.splits import label_ends

VIEW, BUY = Behaviour("view", "context", 0.2), Behaviour("purchase", "target", 1.0)
TYPES = (VIEW, BUY)
ITEMS, LEVELS = 12, (3, 2, 2)
CODES = counted_codes(ITEMS, LEVELS)
IDS = [f"i{n}" for n in range(ITEMS)]
WALKS = Histories.of([[0, 1, 2], [3, 1, 4], [0, 5]])
IS_TARGET = np.array([False, False, True, False, True, True, False, True])


def event_types() -> EventTypes:
    to_targets = ItemItem.count(WALKS, ITEMS, PairRules(2, reverse=0.0), IS_TARGET)
    return EventTypes(TYPES, to_targets, np.bincount(WALKS.items[IS_TARGET], minlength=ITEMS) * 1.0)


def make_retrieval(weights: dict[str, float] | None = None) -> Retrieval:
    return Retrieval(
        ItemItem.count(WALKS, ITEMS),
        decayed_counts(WALKS.items, ITEMS),
        types=event_types(),
        reranker=Reranker(weights or {"seen:view": 1.0}, candidates=12),
    )


@pytest.fixture
def recommender(tmp_path):
    path = write_bundle(
        tmp_path / "bundle", items_table(IDS), CODES, LEVELS, retrieval=make_retrieval()
    )
    return Recommender.load(path)


def test_only_targets_and_untyped_events_count_as_seen():
    numbers = event_types().number(["view", "Purchase", "banner", None])
    assert numbers.tolist() == [0, 1, 254, 255]
    assert count_as_seen(numbers, TYPES).tolist() == [False, True, False, True]


def test_usual_names_mean_the_types_of_a_shop_in_its_own_language():
    names = [("Ansicht", "context", 0.2), ("Kauf", "target", 1.0), ("Retoure", "negative", 0.0)]
    types = replace(event_types(), behaviours=tuple(Behaviour(*name) for name in names))
    asked = ["kauf", "purchase", "view", "click", "Detailansicht", "cart", "retoure", "return"]
    assert types.number(asked).tolist() == [1, 1, 0, 0, 0, 254, 253, 253]
    rated = replace(types, behaviours=(VIEW, Behaviour("rating", "target", 0.8)))
    assert rated.number(["purchase", "like", "cart"]).tolist() == [1, 1, 254]


def test_returns_are_no_part_of_a_history(recommender):
    def ask(history: list[str], types: list[str]) -> object:
        request = RecommendRequest(history, ITEMS, history_types=types)
        return recommender.recommend_batch([request])[0].recommendations

    assert ask(["i2", "i3"], ["view", "return"]) == ask(["i2"], ["view"])
    bought = ask(["i2", "i3", "i3"], ["view", "buy", "dislike"])
    assert "i3" not in {one.item_id for one in bought}


def test_what_was_only_viewed_can_be_recommended(recommender):
    history, types = ["i4", "i7", "i2"], ["view", "purchase", "view"]
    request = RecommendRequest(history, ITEMS, history_types=types)
    (result,) = recommender.recommend_batch([request])
    listed = [r.item_id for r in result.recommendations]
    assert listed[:2] == ["i2", "i4"]  # the latest view first
    assert set(listed) == set(IDS) - {"i7"}
    (untyped,) = recommender.recommend_batch([request.changed(history_types=())])
    assert {r.item_id for r in untyped.recommendations} == set(IDS) - set(history)
    (model,) = recommender.recommend_batch([request.changed(blend=False)])
    assert {r.item_id for r in model.recommendations} == set(IDS) - {"i7"}
    fallback = recommender.fallback(request)
    assert "i7" not in {r.item_id for r in fallback.recommendations}


def test_a_type_for_each_item_of_the_history_is_required():
    with pytest.raises(ValueError, match="history_types: 1 types for 2 items"):
        RecommendRequest(["a", "b"], history_types=["view"])


def test_every_baseline_leaves_out_what_counts_as_seen_only():
    rows = [
        ("u", "a", 1),
        ("u", "b", 0),
        ("u", "c", 1),
        ("u", "b", 0),
        ("u", "d", 1),
        ("v", "b", 1),
    ]
    user, item, behaviour = zip(*rows, strict=True)
    events = interactions_of(user, item)
    events = replace(events, behaviour=np.array(behaviour, np.uint8))
    table = pa.table({"item_id": list("abcd"), "title": list("abcd"), "text": [""] * 4})
    dataset = Dataset(events, label_ends(events.user), table, behaviours=TYPES)
    examples = dataset.examples("test")
    assert examples.histories.left_out(exclude_seen=True)[0].tolist() == [0, 2]
    for ranker in fit_baselines(dataset.interactions.histories, 4).values():
        items, _ = ranker.rank(examples.histories, 4, True)
        assert {0, 2}.isdisjoint(items[0].tolist())
        assert 1 in items[0]


def test_companions_are_those_that_were_bought():
    retrieval = make_retrieval()
    # 0 was followed by purchases of 2 and 5; that 1 was viewed after it does not count.
    found = together(retrieval, np.array([0]))
    assert set(found.items.tolist()) == {2, 5}
    assert found.because.tolist() == [0, 0]
    # No purchase followed 2 or 4, so all pairs count.
    assert set(together(retrieval, np.array([2, 4])).items.tolist()) == {0, 1, 3}
    assert len(together(retrieval, np.array([11])).items) == 0


def test_a_type_is_as_strong_as_its_name_or_its_weight():
    named = [("stage2", "context", 0.2), ("stage9", "target", 1.0), ("odd", "negative", 0.0)]
    behaviours = (*TYPES, *(Behaviour(*one) for one in named))
    types = replace(event_types(), behaviours=behaviours)
    found = [types.strength(name) for name in ("view", "Stage2", "stage9", "odd", "Kauf", "what")]
    assert found == [1, 1, 4, 0, 4, None]


def test_what_counts_as_seen_follows_the_types_of_the_data_set(recommender):
    events = [
        ("i0", "view"),
        ("i1", "purchase"),
        ("i2", "Order"),  # this data set calls it a purchase
        ("i3", "dislike"),
        ("i4", "nonsense"),
        ("i5", None),
        ("i1", "view"),
    ]
    assert recommender.types.seen(events) == ["i1", "i2", "i5"]
    assert recommender.types.seen([]) == []
