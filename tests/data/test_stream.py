"""Preparing in parts is preparing in memory: the same rows, ids, splits, counts and statistics."""

from __future__ import annotations

import builtins
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recsys.artifacts import verify, write_artifact
from recsys.config import Settings
from recsys.data import prepare as prepare_module
from recsys.data import stream
from recsys.data.cleaning import CleanConfig
from recsys.data.prepare import DataConfig, build, stage, write_streamed
from recsys.data.raw import Columns
from recsys.data.stats import describe
from recsys.dataset import Dataset, Events
from recsys.errors import ConfigError, DataError, RecsysError
from recsys.pipeline import Context

pytest.importorskip("duckdb", reason="streaming needs pip install 'recbeam[large]'")

FILE_ORDER = Columns(timestamp="file-order")
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
        "duplicates": st.sampled_from(["keep", "drop-exact", "keep-first", "drop-near"]),
        "min_rating": st.sampled_from([2, 5]),
        "k_core": st.integers(1, 3),
        "min_length": st.integers(1, 3),
        "split": st.sampled_from(["leave-one-out", "global-temporal"]),
        "clean": st.builds(
            CleanConfig, bots=st.sampled_from([0, 500]), negative_feedback=st.booleans()
        ),
    },
)


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts and blocks of a few rows, as large data have many."""
    monkeypatch.setattr(stream, "PART_ROWS", 5)
    monkeypatch.setattr(stream, "BLOCK_ROWS", 3)
    monkeypatch.setattr("recsys.data.shuffle.BATCH", 4)
    monkeypatch.setattr("recsys.data.opening.BATCH", 7)


def streamed(config: DataConfig, folder: Path) -> tuple[Dataset, dict[str, Any]]:
    info: dict[str, Any] = {}
    with write_artifact(folder, "dataset", info=info) as made:
        info |= write_streamed(config, made)[0]
    assert not list(folder.glob("*/source*"))
    return Dataset.load(folder), info


def agree(config: DataConfig, folder: Path) -> Dataset | None:
    """Prepare both ways and compare everything; None where both refuse.

    In parts the items are read after the histories, so the first of several errors may differ.
    """
    try:
        expected = build(config)
    except RecsysError:
        with pytest.raises(RecsysError):
            streamed(config, folder)
        return None
    made, info = streamed(config, folder)
    assert len(made.interactions) == len(expected.dataset.interactions)
    for name in ("user", "item", "timestamp", "rating", "user_ids", "item_ids"):
        np.testing.assert_array_equal(
            getattr(made.interactions, name), getattr(expected.dataset.interactions, name), name
        )
    assert made.interactions.has_time == expected.dataset.interactions.has_time
    assert made.behaviours == expected.dataset.behaviours
    if made.behaviours:
        types = (made.interactions.behaviour, expected.dataset.interactions.behaviour)
        np.testing.assert_array_equal(*types)
    assert made.split.tolist() == expected.dataset.split.tolist()
    assert made.items.equals(expected.dataset.items)
    tables = [None if d is None else d.table for d in (made.disliked, expected.dataset.disliked)]
    assert tables[0] == tables[1]
    assert info["split"] == expected.split
    assert info["decisions"] == expected.decisions
    assert info["stats"] == describe(expected.dataset)
    return made


@pytest.mark.usefixtures("small_parts")
@given(
    rows=st.lists(row, min_size=1, max_size=60),
    section=rules,
    timed=st.booleans(),
    typed=st.booleans(),
)
@settings(max_examples=40, deadline=None)
def test_parts_are_what_memory_gives(
    tmp_path_factory: pytest.TempPathFactory,
    rows: list[Any],
    section: Any,
    timed: bool,
    typed: bool,
) -> None:
    folder = tmp_path_factory.mktemp("s")
    names = ("user", "item", "timestamp", "rating", "event")
    table = pa.table(dict(zip(names, zip(*rows, strict=True), strict=True)))
    columns = Columns() if timed else Columns(timestamp="file-order")
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
    agree(config, folder / "t")


@pytest.mark.usefixtures("small_parts")
def test_a_csv_and_a_folder_of_parquet_files_stream_too(raw: Path, home: Path) -> None:
    rng = np.random.default_rng(0)
    lines = [
        f"u{rng.integers(9)},i{rng.integers(7)},{1_500_000_000_000 + int(rng.integers(10**10))}"
        for _ in range(200)
    ]
    (raw / "e.csv").write_text("user,item,timestamp\n" + "\n".join(lines) + "\n,i1,1500000000\n")
    made = agree(DataConfig(source="table", path="e.csv", k_core=2), home / "a")
    assert made is not None
    assert len(list((home / "a/interactions").iterdir())) > 5
    (raw / "many").mkdir()
    for part in range(3):
        cells = [line.split(",") for line in lines[part::3]]
        table = pa.table({"user": [c[0] for c in cells], "item": [c[1] for c in cells]})
        pq.write_table(table, raw / f"many/{part}.parquet")
    agree(DataConfig(source="table", path="many", columns=FILE_ORDER), home / "b")


@pytest.mark.usefixtures("small_parts")
def test_parts_can_be_read_one_at_a_time(raw: Path, home: Path) -> None:
    users = "".join(letter * 3 for letter in "abcdefgh")
    pq.write_table(pa.table({"user": list(users), "item": list("xyz" * 8)}), raw / "e.parquet")
    made, info = streamed(
        DataConfig(source="table", path="e.parquet", columns=FILE_ORDER), home / "t"
    )
    verify(home / "t", "dataset")
    parts = list(Dataset.parts(home / "t"))
    assert [len(part.user) for part in parts] == [6, 6, 3, 6, 3]
    assert made.events.behaviour is None
    whole = Events(
        *(np.concatenate(columns) for columns in zip(*(p[:5] for p in parts), strict=True))
    )
    for name, expected in made.events._asdict().items():
        np.testing.assert_array_equal(getattr(whole, name), expected)
    assert info["stats"]["splits"]["test"]["users"] == 8


def test_the_engine_follows_the_size_and_not_the_settings(
    raw: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (raw / "e.csv").write_text("user,item\nu,a\nu,b\n")

    def run(name: str, **section: Any) -> Path:
        order = {"timestamp": "file-order"}
        section = {"source": "table", "path": "e.csv", "columns": order, **section}
        return stage(Context.of(Settings({"name": name, "data": section})))

    assert (run("small") / "interactions.parquet").is_file()
    before = (home / "datasets/small").stat().st_ino
    assert run("small", engine="stream").stat().st_ino == before
    monkeypatch.setattr(prepare_module, "STREAM_BYTES", 1)
    assert (run("large") / "interactions/part-00000.parquet").is_file()
    assert (run("asked", engine="memory") / "interactions.parquet").is_file()
    small, large = (Dataset.load(home / "datasets" / name) for name in ("small", "large"))
    assert small.interactions.item.tolist() == large.interactions.item.tolist()


def test_a_failure_leaves_nothing_behind(raw: Path, home: Path) -> None:
    (raw / "e.csv").write_text("user,item,timestamp\nu,a,1500000000\nu,b,noon\n")
    clean = {"unreadable_times": False}
    section = {"source": "table", "path": "e.csv", "engine": "stream", "clean": clean}
    context = Context.of(Settings({"name": "t", "data": section}))
    with pytest.raises(DataError, match="data row 2: 'noon' cannot be used"):
        stage(context)
    assert not list((home / "datasets").iterdir())


def test_without_the_extra_the_way_out_is_named(
    raw: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (raw / "e.csv").write_text("user,item\nu,a\n")
    real = builtins.__import__

    def without(name: str, *rest: Any) -> Any:
        if name == "duckdb":
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ConfigError, match=r"pip install 'recbeam\[large\]'"):
        streamed(DataConfig(source="table", path="e.csv", columns=FILE_ORDER), home / "t")


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"source": "s3rec", "engine": "stream"}, "is read in memory only"),
        ({"source": "table", "memory_gb": 0.5}, r"data\.memory_gb: expected 1\.0 or more"),
    ],
)
def test_an_engine_that_cannot_be_had_is_refused(section: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        DataConfig(path="e", **section)


def test_the_manifest_of_a_large_data_set_reads_like_any_other(raw: Path, home: Path) -> None:
    (raw / "e.csv").write_text("user,item\nu,a\nu,b\nu,c\n")
    order = {"timestamp": "file-order"}
    section = {"source": "table", "path": "e.csv", "engine": "stream", "columns": order}
    path = stage(Context.of(Settings({"name": "t", "data": section})))
    manifest = verify(path, "dataset")
    assert sorted(manifest.files) == [
        "interactions/part-00000.parquet", "items.parquet", "report.html", "users.parquet",
    ]  # fmt: skip
    assert json.loads(json.dumps(manifest.info))["stats"]["interactions"] == 3
