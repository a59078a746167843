"""The data set of a run with a parent: what is added, what stays, and who is left out."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from recsys.availability import available_items
from recsys.data import growth
from recsys.data.cleaning import CleanConfig, Rules
from recsys.dataset import DISLIKED_COLUMNS, Dataset, Disliked
from recsys.errors import DataError
from recsys.interactions import Behaviour, Interactions
from recsys.retraining.news import refuse_unknown

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


def parent(*, types=(), disliked=None, pieces=None):
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
        interactions, np.zeros(5, np.uint8), table, behaviours=tuple(types), disliked=disliked,
        pieces=pieces,
    )  # fmt: skip


@pytest.fixture
def grow(tmp_path):
    def make(
        before, events, described, erased=(), *, roles=None, cleaned=True, mapping=None, **clean
    ):
        columns = list(zip(*events, strict=True))
        table = pa.table(
            {
                "user": columns[0],
                "item": columns[1],
                "timestamp": [START + DAY * d for d in columns[2]],
                "rating": pa.array(
                    columns[5] if len(columns) > 5 else [None] * len(events), pa.float32()
                ),
                "type": pa.array(columns[3] if len(columns) > 3 else [None] * len(events)),
                "quantity": pa.array(
                    columns[4] if len(columns) > 4 else [None] * len(events), pa.float32()
                ),
                "stored": [False] * len(events),
            }
        )
        growth.write(tmp_path, table, described, growth.Erased.of(before, erased))
        rules = Rules(
            split="global-temporal",
            dates=(START + 5 * DAY, START + 6 * DAY),
            clean=CleanConfig(**clean),
            roles=roles or {},
        )
        return growth.grow(before, tmp_path, rules, cleaned=cleaned, mapping=mapping).dataset

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


@pytest.mark.parametrize("kind", ["return", "refunded", "thumbs_down", "Retoure"])
def test_returns_and_dislikes_are_no_purchases_where_the_parent_has_no_types(grow, kind):
    events = [("ann", "a", 6, kind), ("bob", "a", 6, "purchase"), ("cy", "c", 7, "buy")]
    grown = grow(parent(), events, items())
    assert grown.behaviours == ()
    assert rows_of(grown) == {("ann", "b", 1, 0), ("bob", "b", 0, 0), ("bob", "c", 2, 0),
                              ("cy", "a", 3, 0), ("bob", "a", 6, 2), ("cy", "c", 7, 2)}  # fmt: skip
    assert grown.disliked.table.select(["user_id", "item_id"]).to_pylist() == [
        {"user_id": "ann", "item_id": "a"}
    ]


@pytest.mark.parametrize(("returning", "known"), [(40, 0), (40, 6), (16, 0), (4, 0)])
def test_users_are_refused_where_nearly_none_is_known_and_others_returned(returning, known):
    """By hand: where 16 of 40 returned, none of 40 is .6 ** 40; where 4 did, it is 1 in 68."""
    days = [(n, 0) for n in range(40)] + [(n + 40 * (n >= returning), 9) for n in range(40)]
    user, day = np.array(sorted(days)).T
    ids, nothing = np.array([f"{n:02}" for n in range(80)]), np.zeros(80, np.int32)
    times, goods = START + DAY * day, np.array(["a"])
    old = Interactions(user, nothing, times, nothing * 1.0, ids, goods, True)
    night = {"user": [f"gid://{n:02}"[6 * (n < known) :] for n in range(40)], "item": ["a"] * 40}
    refused = pytest.raises(DataError, match=r"40 of 40 users are not in .*has 'gid://00', ")
    with refused if returning > 4 and not known else nullcontext():
        refuse_unknown(pa.table(night), old, pa.chunked_array([goods]), Path("night.csv"), 0)


def test_returns_are_left_out_of_data_that_were_not_cleaned(grow, capsys):
    grown = grow(
        parent(), [("ann", "a", 6, "return"), ("bob", "a", 6, "x")], items(), cleaned=False
    )
    assert len(rows_of(grown)) == 6
    assert "1 new events are returns or dislikes" in capsys.readouterr().err


def test_the_pieces_of_the_parent_and_of_the_night_are_counted_together(grow):
    """Ann has seven pieces of a and one of b: of a, three come back, and of b the only one."""
    schema = pa.schema(
        [("user_id", pa.string()), ("item_id", pa.string()), ("pieces", pa.float32())]
    )
    left = pa.Table.from_pylist([{"user_id": "ann", "item_id": "a", "pieces": 7.0}], schema)
    events = [("ann", "a", 6, "return", -3.0), ("ann", "b", 6, "return", -1.0),
              ("bob", "a", 6, "purchase", 2.0), ("bob", "c", 6, "return", 0.0)]  # fmt: skip
    grown = grow(parent(pieces=left), events, items())
    assert rows_of(grown) == {("ann", "a", 0, 0), ("bob", "b", 0, 0), ("bob", "c", 2, 0),
                              ("cy", "a", 3, 0), ("bob", "a", 6, 2)}  # fmt: skip
    assert {tuple(row.values()) for row in grown.pieces.to_pylist()} == {
        ("ann", "a", 4.0), ("bob", "a", 2.0)
    }  # fmt: skip
    again = grow(grown, [("ann", "a", 7, "return", -4.0)], items())
    assert ("ann", "a", 0, 0) not in rows_of(again)


def test_the_scale_of_ratings_is_that_of_the_first_run(grow):
    """Without the low end, 5 to 10 would be a scale whose lower 7 are dislikes."""
    events = [("ann", "c", 6, None, None, 5.0), ("bob", "a", 6, None, None, 10.0),
              ("cy", "b", 6, None, None, 7.0), ("cy", "c", 6, None, None, 3.0)]  # fmt: skip
    grown = grow(parent(), events, items(), mapping={"negative_rating": 4.0})
    new = {row[:2] for row in rows_of(grown) if row[2] == 6}
    assert new == {("ann", "c"), ("bob", "a"), ("cy", "b")}


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
