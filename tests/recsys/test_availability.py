"""Items that are not available are never recommended, and come back when they are."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from toy_bundle import counted_codes, items_table, write_bundle

from recsys.availability import available_items
from recsys.dataset import AVAILABILITY
from recsys.evaluation.rankings import rank_histories
from recsys.interactions import Histories
from recsys.live import Epochs, NewItem
from recsys.recommender import Recommender, RecommendRequest
from recsys.retrieval import ItemItem, Retrieval, decayed_counts

ITEMS, LEVELS = 24, (4, 3, 2)
CODES = counted_codes(ITEMS, LEVELS)
CODES[23] = CODES[22]  # two items of one leaf
IDS = [f"i{n}" for n in range(ITEMS)]
START = 1_700_000_040  # on a full minute
SOLD_OUT = {3, 10, 22}
EARLY, LATE = {5}, {7}  # from START + 120 on; until START + 60
AVAILABLE = [None if n % 4 == 1 else n not in SOLD_OUT for n in range(ITEMS)]
FROM = [START + 120 if n in EARLY else None for n in range(ITEMS)]
UNTIL = [START + 60 if n in LATE else None for n in range(ITEMS)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("availability") / "bundle"
    table = items_table(
        IDS,
        even=[n % 2 == 0 for n in range(ITEMS)],
        available=pa.array(AVAILABLE, pa.bool_()),
        available_from=pa.array(FROM, pa.int64()),
        available_until=pa.array(UNTIL, pa.int64()),
    )
    walks = Histories.of([np.random.default_rng(n).integers(0, ITEMS, 8) for n in range(30)])
    retrieval = Retrieval(ItemItem.count(walks, ITEMS), decayed_counts(walks.items, ITEMS))
    return write_bundle(path, table, CODES, LEVELS, retrieval=retrieval)


@pytest.fixture
def recommender(folder, clock):
    found, clock.now = Recommender.load(folder, mode="beam"), float(START)
    found._epochs = Epochs(found.bundle, clock=clock)
    return found


def listed(recommender, **options) -> set[str]:
    request = RecommendRequest(["i0"], ITEMS, exclude_seen=False, **options)
    (result,) = recommender.recommend_batch([request])
    return {r.item_id for r in result.recommendations}


def names(items) -> set[str]:
    return {f"i{n}" for n in items}


def test_unavailable_items_are_never_recommended(recommender):
    expected = set(IDS) - names(SOLD_OUT | EARLY)
    assert listed(recommender) == expected
    assert listed(recommender, guarantee="global") == expected
    even = {"must": [{"key": "even", "match": True}]}
    assert listed(recommender, filter=even) == {i for i in expected if int(i[1:]) % 2 == 0}
    boosts = [{"filter": {"must": [{"key": "available", "match": False}]}, "weight": 50.0}]
    assert listed(recommender, boosts=boosts) == expected
    fallback = recommender.fallback(RecommendRequest(["i0"], ITEMS))
    assert {r.item_id for r in fallback.recommendations} <= expected
    assert {name for name, _ in recommender.similar("i3", ITEMS)} <= expected
    (result,) = recommender.recommend_batch([RecommendRequest(["i3"], 5)])
    assert result.unknown_items == []  # it is understood in a history
    assert result.eligible_items == len(expected)


def test_items_come_and_go_with_time(recommender, clock):
    always = set(IDS) - names(SOLD_OUT)
    number = recommender.epoch.number
    assert listed(recommender) == always - names(EARLY)
    clock.now = START + 59
    assert recommender.epoch.number == number
    clock.now = START + 60
    assert listed(recommender) == always - names(EARLY | LATE)
    assert recommender.epoch.number == number + 1
    clock.now = START + 119
    assert recommender.epoch.number == number + 1
    clock.now = START + 500
    assert listed(recommender) == always - names(LATE)


def test_an_update_changes_availability_at_once(recommender):
    recommender.upsert(
        [
            NewItem("i3", "back", attributes={"available": True}),
            NewItem("i4", "gone", attributes={"available": False}),
            NewItem("new", "new", attributes={"available": False}, semantic_id=[0, 0, 1]),
            NewItem("now", "now", attributes={"available": True}, semantic_id=[0, 0, 1]),
        ]
    )
    expected = (set(IDS) - names(SOLD_OUT | EARLY)) | {"i3", "now"} - {"i4"}
    expected -= {"i4"}
    assert listed(recommender) == expected
    assert recommender.epoch.item("new").attributes["available"] is False  # still in the catalog
    recommender.remove(["i3", "i8"])
    assert listed(recommender) == expected - {"i3", "i8"}
    recommender._epochs.compact()
    assert listed(recommender) == expected - {"i3", "i8"}


@pytest.mark.parametrize("change", ["update", "compaction"])
def test_unavailable_items_come_back_after_a_change(recommender, clock, change):
    if change == "update":
        recommender.upsert([NewItem("new", "new", semantic_id=[0, 0, 1])])
    else:
        recommender.remove(["i8"])
        recommender._epochs.compact()
    kept = {"new"} if change == "update" else set()
    gone = set() if change == "update" else {"i8"}
    assert recommender.catalog.find("i5") == 5  # not available before START + 120
    assert recommender.similar("i3", 1)
    clock.now = START + 120
    assert listed(recommender) == set(IDS) - names(SOLD_OUT | LATE) - gone | kept


def test_evaluation_ranks_what_is_available_now(recommender):
    recommender.remove(["i9"])
    (((items, _), _),) = rank_histories(recommender, Histories.of([[0]]), ITEMS, (False,))
    expected = set(IDS) - {"i9"} - names(SOLD_OUT | EARLY)
    assert {IDS[i] for i in items[0] if i >= 0} == expected


@pytest.mark.parametrize("later", [0, 60, 120])
def test_available_items_of_a_table_are_those_served(recommender, clock, later):
    clock.now = START + later
    table = recommender.bundle.catalog.items
    assert available_items(table, START + later).tolist() == recommender.epoch.alive.tolist()
    assert available_items(table.drop_columns(list(AVAILABILITY)), START) is None
    assert available_items(table.slice(0, 3), START) is None  # all of them are
