"""The data set of a run with a parent: what is added, what stays, and who is left out."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from recsys.availability import available_items
from recsys.data import growth
from recsys.data.cleaning import CleanConfig
from recsys.data.rules import Rules
from recsys.dataset import DISLIKED_COLUMNS, Dataset, Disliked
from recsys.errors import DataError
from recsys.interactions import Behaviour, Interactions

DAY = 86_400
START = 1_700_000_000
SCHEMA = pa.schema(
    [("item_id", pa.string()), ("title", pa.string()), ("text", pa.string()),
     ("tags", pa.list_(pa.string())), ("price", pa.float64())]
)  # fmt: skip


def items(*rows):
    return pa.Table.from_pylist(
        [{"item_id": i, "title": t, "text": "", "tags": ["x"], "price": 1.0} for i, t in rows],
        SCHEMA,
    )


def parent(*, types=(), disliked=None):
    """Ann, Bob and Cy, on days 0 to 3."""
    rows = [("ann", "a", 0), ("ann", "b", 1), ("bob", "b", 0), ("bob", "c", 2), ("cy", "a", 3)]
    user, item, day = zip(*rows, strict=True)
    ids = np.array(["ann", "bob", "cy"])
    goods = np.array(["a", "b", "c"])
    interactions = Interactions(
        np.array([ids.tolist().index(u) for u in user], np.int32),
        np.array([goods.tolist().index(i) for i in item], np.int32),
        np.array([START + DAY * d for d in day]),
        np.full(5, np.nan, np.float32),
        ids,
        goods,
        True,
        np.zeros(5, np.uint8) if types else None,
    )
    table = items(("a", "A"), ("b", "B"), ("c", "C"))
    return Dataset(
        interactions, np.zeros(5, np.uint8), table, behaviours=tuple(types), disliked=disliked
    )


@pytest.fixture
def grow(tmp_path):
    def make(before, events, described, erased=(), **clean):
        columns = list(zip(*events, strict=True))
        table = pa.table(
            {
                "user": columns[0],
                "item": columns[1],
                "timestamp": [START + DAY * d for d in columns[2]],
                "rating": pa.nulls(len(events), pa.float32()),
                "type": pa.array(columns[3] if len(columns) > 3 else [None] * len(events)),
            }
        )
        growth.write(tmp_path, table, described, growth.Erased.of(before, erased))
        rules = Rules(
            split="global-temporal",
            dates=(START + 5 * DAY, START + 6 * DAY),
            clean=CleanConfig(**clean),
        )
        return growth.grow(before, tmp_path, rules).dataset

    return make


def rows_of(dataset):
    events = dataset.interactions
    return {
        (str(events.user_ids[u]), str(events.item_ids[i]), int(t - START) // DAY, int(s))
        for u, i, t, s in zip(
            events.user, events.item, events.timestamp, dataset.split, strict=True
        )
    }


def test_new_events_follow_and_items_keep_their_numbers(grow):
    events = [("bob", "d", 4), ("dan", "a", 5), ("ann", "d", 6)]
    grown = grow(parent(), events, items(("d", "D"), ("b", "B, now blue")))
    assert grown.item_ids.tolist() == ["a", "b", "c", "d"]
    assert grown.items["title"].to_pylist() == ["A", "B, now blue", "C", "D"]
    old = {("ann", "a", 0, 0), ("ann", "b", 1, 0), ("bob", "b", 0, 0), ("bob", "c", 2, 0),
           ("cy", "a", 3, 0)}  # fmt: skip
    assert rows_of(grown) == old | {("bob", "d", 4, 0), ("dan", "a", 5, 1), ("ann", "d", 6, 2)}


def test_the_events_of_erased_users_are_left_out(grow):
    grown = grow(parent(), [("bob", "a", 6)], items(), erased=["ann"])
    assert "ann" not in grown.interactions.user_ids.tolist()
    assert {user for user, *_ in rows_of(grown)} == {"bob", "cy"}


def test_types_of_events_keep_their_roles_and_numbers(grow):
    view, buy = Behaviour("view", "context", 0.2), Behaviour("buy", "target", 1.0)
    events = [("ann", "c", 6, "buy"), ("bob", "a", 6, "view"), ("cy", "b", 6, "wishlist")]
    grown = grow(parent(types=(view, buy)), events, items())
    assert [b.name for b in grown.behaviours] == ["view", "buy", "wishlist"]
    assert [b.role for b in grown.behaviours] == ["context", "target", "context"]


def test_a_dislike_stands_until_the_item_is_chosen(grow):
    rows = [("ann", "c", START, True), ("bob", "a", START, True), ("eve", "b", START, True),
            ("gone", "b", START, True)]  # fmt: skip
    columns = zip(*rows, strict=True)
    table = pa.table(dict(zip(DISLIKED_COLUMNS.names, columns, strict=True)), DISLIKED_COLUMNS)
    before = parent(disliked=Disliked(table))
    grown = grow(before, [("bob", "a", 6)], items(), erased=["gone"])
    assert grown.disliked is not None
    found = {row["user_id"]: row["stands"] for row in grown.disliked.table.to_pylist()}
    assert found == {"ann": True, "bob": False, "eve": True}


def test_items_take_the_schema_of_the_parent():
    given = pa.table({"item_id": ["x"], "title": ["X"], "price": [3], "colour": ["red"]})
    found = growth.conform(given, SCHEMA)
    assert found.schema == SCHEMA
    row = {"item_id": "x", "title": "X", "text": None, "tags": None, "price": 3.0}
    assert found.to_pylist() == [row]
    with pytest.raises(DataError, match="column 'price' is string"):
        growth.conform(pa.table({"item_id": ["x"], "price": ["dear"]}), SCHEMA)


def test_a_shop_may_begin_to_say_what_is_in_stock(grow):
    stocked = items(("b", "B"), ("d", "D")).append_column("available", pa.array([False, True]))
    later = pa.array([None, START], pa.int64())
    stocked = growth.conform(stocked.append_column("available_from", later), SCHEMA)
    assert stocked.schema.names == [*SCHEMA.names, "available", "available_from"]
    grown = grow(parent(), [("bob", "d", 6)], stocked)
    assert grown.items["available"].to_pylist() == [None, False, None, True]
    assert available_items(grown.items, START - 1).tolist() == [True, False, True, False]
    assert available_items(grown.items, START).tolist() == [True, False, True, True]


@pytest.mark.parametrize("said", [[True, True], [None, True], [None, None]], ids=str)
def test_a_new_column_that_rules_nothing_out_is_left_out(said):
    described = items(("b", "B"), ("d", "D"))
    stocked = described.append_column("available", pa.array(said, pa.bool_()))
    assert growth.conform(stocked, SCHEMA).equals(described)
