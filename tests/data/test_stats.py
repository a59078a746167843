from __future__ import annotations

import json

import duckdb
import numpy as np
import pyarrow as pa
import pytest
from oracles import interactions_of

from recsys.data.raw import items_table
from recsys.data.stats import statistics
from recsys.splits import TEST, TRAIN, VALID


def test_numbers_by_hand() -> None:
    interactions = interactions_of(
        ["u"] * 4 + ["v"] * 2,
        ["a", "b", "a", "c", "b", "d"],
        item_ids=np.array(["a", "b", "c", "d", "e"]),
    )
    items = items_table(
        list("abcde"), {"a": "Apple"}, {"b": "red"}, {"tags": pa.array([["x"]] * 5)}
    )
    split = np.array([TRAIN, TRAIN, VALID, TEST, TRAIN, TEST], np.uint8)
    events = pa.table({"user": interactions.user, "item": interactions.item, "split": split})
    with duckdb.connect(":memory:") as connection:
        connection.register("events", events)
        stats = statistics(
            lambda query: connection.sql(query).to_arrow_table(),
            "events",
            users=2,
            items=items,
            codes=np.zeros((5, 4), np.int32),
            has_time=False,
        )
    assert json.loads(json.dumps(stats)) == stats
    assert stats["users"] == 2
    assert (stats["items"], stats["items_with_events"]) == (5, 4)
    assert stats["interactions"] == 6
    assert stats["density"] == pytest.approx(0.6)
    assert stats["length"] == {
        "mean": 3, "min": 2, "p25": 2.5, "median": 3, "p75": 3.5, "p95": 3.9, "max": 4,
    }  # fmt: skip
    assert stats["repeats"] == 1
    assert not stats["has_time"]
    assert stats["text_coverage"] == pytest.approx(2 / 5)
    assert stats["attributes"] == {"tags": "list<item: string>"}
    assert stats["imported_codes"] == [5, 4]
    assert stats["splits"] == {
        "train": {"interactions": 3, "users": 2, "items": 2, "cold": 0.0},
        "valid": {"interactions": 1, "users": 1, "items": 1, "cold": 0.0},
        "test": {"interactions": 2, "users": 2, "items": 2, "cold": 1.0},
    }
