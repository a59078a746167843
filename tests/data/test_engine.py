"""Data in many parts are the data in one: the same rows, ids, splits, counts and statistics."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import interactions_of

from recsys.artifacts import verify
from recsys.config import Settings
from recsys.data import event_table
from recsys.data.cleaning import CleanConfig
from recsys.data.engine import statistics
from recsys.data.prepare import DataConfig, build, stage
from recsys.data.raw import items_table
from recsys.dataset import Dataset, event_files
from recsys.errors import ConfigError, DataError, RecsysError
from recsys.pipeline import Context
from recsys.splits import TEST, TRAIN, VALID

FILE_ORDER = {"timestamp": "file-order"}
row = st.tuples(
    st.sampled_from("uvwxyz"),
    st.sampled_from(["a", "b", "10", "2", "é", "f"]),
    st.integers(0, 6).map(lambda at: 1_500_000_000 + 50_000 * (at // 2) + 600 * (at % 2)),
    st.sampled_from([1.0, 2.0, 4.0, 5.0, None]),
    st.sampled_from(["view", "add_to_cart", "purchase", "return"]),
)
rules = st.fixed_dictionaries(
    {},
    optional={
        "duplicates": st.sampled_from(["keep", "drop-exact", "keep-first"]),
        "min_rating": st.sampled_from([2, 5]),
        "k_core": st.integers(1, 3),
        "split": st.sampled_from(["leave-one-out", "global-temporal"]),
        "clean": st.builds(
            CleanConfig,
            bots=st.sampled_from([0, 500]),
            skip=st.sampled_from([(), ("negative_feedback",)]),
        ),
    },
)


def digest(config: DataConfig) -> tuple[Any, ...] | str:
    """Everything that was made, or the error."""
    try:
        made = build(config)
    except RecsysError as error:
        return str(error)
    data = made.dataset
    beside = [
        None if d is None else d.to_pylist()
        for d in (data.disliked and data.disliked.table, data.pieces)
    ]
    events = {n: None if c is None else c.tolist() for n, c in data.events._asdict().items()}
    ids = data.interactions.user_ids.tolist(), data.items.to_pylist()
    return repr(events), ids, data.behaviours, beside, made.split, made.decisions, made.stats


@given(
    rows=st.lists(row, min_size=1, max_size=60),
    section=rules,
    timed=st.booleans(),
    typed=st.booleans(),
)
@settings(max_examples=25, deadline=None)
def test_many_parts_are_one(
    tmp_path_factory: pytest.TempPathFactory,
    rows: list[Any],
    section: Any,
    timed: bool,
    typed: bool,
) -> None:
    folder = tmp_path_factory.mktemp("s")
    names = ("user", "item", "timestamp", "rating", "event")
    table = pa.table(dict(zip(names, zip(*rows, strict=True), strict=True)))
    columns = {} if timed else FILE_ORDER
    if not typed:
        table = table.drop_columns("event")
    if not timed:
        table = table.drop_columns("timestamp")
    pq.write_table(table, folder / "e.parquet")
    pq.write_table(
        pa.table({"item": ["b", "never", "a"], "price": [1, 2, 3]}), folder / "i.parquet"
    )
    config = DataConfig(
        source="table",
        path=str(folder / "e.parquet"),
        items=str(folder / "i.parquet"),
        columns=columns,
        **section,
    )
    whole = digest(config)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(event_table, "PART_ROWS", 5)
        patch.setattr(event_table, "BATCH", 3)
        patch.setattr("recsys.data.opening.BATCH", 7)
        assert digest(config) == whole


def test_parts_can_be_read_one_at_a_time(
    raw: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_table, "PART_ROWS", 5)
    users = "".join(letter * 3 for letter in "abcdefgh")
    pq.write_table(pa.table({"user": list(users), "item": list("xyz" * 8)}), raw / "e.parquet")
    order = {"timestamp": "file-order"}
    section = {"source": "table", "path": "e.parquet", "columns": order}
    path = stage(Context.of(Settings({"name": "t", "data": section})))
    manifest = verify(path, "dataset")
    assert sorted(manifest.files) == [
        *(f"interactions/part-0000{n}.parquet" for n in range(5)),
        "items.parquet", "report.html", "users.parquet",
    ]  # fmt: skip
    assert json.loads(json.dumps(manifest.info))["stats"]["splits"]["test"]["users"] == 8
    made = Dataset.load(path)
    parts = [pq.read_table(file)["user"].to_numpy() for file in event_files(path)]
    assert [len(part) for part in parts] == [6, 6, 3, 6, 3]
    assert made.events.behaviour is None
    np.testing.assert_array_equal(made.events.user, np.concatenate(parts))


def test_a_limit_of_memory_makes_no_other_data_set(raw: Path, home: Path) -> None:
    (raw / "e.csv").write_text("user,item\nu,a\nu,b\n")

    def run(**section: Any) -> Path:
        order = {"timestamp": "file-order"}
        section = {"source": "table", "path": "e.csv", "columns": order, **section}
        return stage(Context.of(Settings({"name": "t", "data": section})))

    before = run().stat().st_ino
    assert (run(memory_gb=2) / "interactions.parquet").is_file()
    assert run(memory_gb=2).stat().st_ino == before


def test_a_failure_leaves_nothing_behind(raw: Path, home: Path) -> None:
    (raw / "e.csv").write_text("user,item,timestamp\nu,a,1500000000\nu,b,noon\n")
    section = {"source": "table", "path": "e.csv", "clean": {"skip": "unreadable_times"}}
    context = Context.of(Settings({"name": "t", "data": section}))
    with pytest.raises(DataError, match="data row 2: 'noon' cannot be used"):
        stage(context)
    assert not list((home / "datasets").iterdir())


def test_a_limit_that_is_too_small_is_refused() -> None:
    with pytest.raises(ValueError, match="greater than or equal to 1"):
        DataConfig(source="table", path="e", memory_gb=0.5)


def test_a_minimum_rating_needs_ratings(raw: Path) -> None:
    (raw / "e.csv").write_text("user,item\nu,a\nu,b\n")
    with pytest.raises(ConfigError, match="has no ratings"):
        build(DataConfig(source="table", path="e.csv", columns=FILE_ORDER, min_rating=4))


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
