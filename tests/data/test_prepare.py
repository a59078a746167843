"""The stage: what it writes, when it leaves at once, and that nothing half-written stays."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from recsys.artifacts import verify
from recsys.config import Settings
from recsys.data.commands import app
from recsys.data.prepare import stage
from recsys.dataset import Dataset
from recsys.errors import ConfigError, DataError
from recsys.pipeline import Context
from recsys.splits import TEST, TRAIN, VALID

Prepare = Callable[..., Dataset]

CSV = """user,item,timestamp,rating
u,a,1500000100,5
u,b,1500000200,4
u,b,1500000200,4
u,c,1500000300,1
v,b,1500000110,5
v,a,1500000150,5
w,d,1500000400,4
"""
SMALL = {"users": 40, "items": 240}


@pytest.fixture
def events(raw: Path) -> Path:
    (raw / "e.csv").write_text(CSV)
    return raw / "e.csv"


def labels(data: Dataset) -> list[tuple[str, str, int]]:
    made = data.interactions
    return [
        (str(made.user_ids[u]), str(made.item_ids[i]), int(s))
        for u, i, s in zip(made.user, made.item, data.split, strict=True)
    ]


def test_a_table_becomes_a_data_set_split_leave_one_out(prepare: Prepare, events: Path) -> None:
    assert labels(prepare(source="table", path="e.csv")) == [
        ("u", "a", TRAIN), ("u", "b", VALID), ("u", "c", TEST),
        ("v", "b", TRAIN), ("v", "a", TRAIN), ("w", "d", TRAIN),
    ]  # fmt: skip


def test_the_manifest_tells_what_was_decided(prepare: Prepare, events: Path, home: Path) -> None:
    prepare(source="table", path="e.csv", min_rating=2)
    manifest = verify(home / "datasets/t", "dataset")
    assert manifest.info["decisions"] == {
        "items_without_metadata": 4,
        "duplicate_rows_dropped": 1,
        "rows_below_min_rating_dropped": 1,
    }
    assert manifest.info["stats"]["interactions"] == 5
    assert manifest.info["stats"]["items"] == 4  # items stay on sale when their events go
    assert manifest.config["path"] == "e.csv"
    assert list(manifest.parents) == ["interactions"]


OTHER = CSV.replace("a", "x")


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"source": "table", "path": "f.csv"}, r"data\.path: .* was prepared from 'e\.csv', not"),
        ({"source": "synthetic", "synthetic": SMALL}, r"data\.source: .* prepared from 'table'"),
        (
            {"source": "table", "path": "e.csv", "columns": {"rating": "none"}},
            r"was prepared without it, not with {'rating': 'none'}; take",
        ),
    ],
)
def test_a_data_set_of_another_source_is_never_replaced(
    prepare: Prepare, events: Path, home: Path, section: dict[str, Any], message: str
) -> None:
    prepare(source="table", path="e.csv")
    (events.parent / "f.csv").write_text(OTHER)
    before = (home / "datasets/t/manifest.json").read_bytes()
    with pytest.raises(ConfigError, match=message):
        prepare(**section)
    assert (home / "datasets/t/manifest.json").read_bytes() == before


@pytest.mark.parametrize(
    "dates",
    [(1_500_000_200, 1_500_000_300), ("2017-07-14T02:43:20", "2017-07-14T02:45:00+00:00")],
)
def test_a_split_by_date_takes_seconds_or_iso_texts(
    prepare: Prepare, events: Path, dates: tuple[Any, Any]
) -> None:
    data = prepare(source="table", path="e.csv", split="global-temporal", dates=list(dates))
    times = data.interactions.timestamp - 1_500_000_000
    assert data.split.tolist() == [TRAIN if t < 200 else VALID if t < 300 else TEST for t in times]


def test_a_split_by_ratio(prepare: Prepare, events: Path) -> None:
    data = prepare(source="table", path="e.csv", split="global-temporal", ratio=[0.5, 0.2])
    assert np.bincount(data.split).tolist() == [3, 1, 2]


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"source": "tablet", "path": "e.csv"}, r"data\.source: 'tablet' is not one of synthetic,"),
        ({"source": "e.csv"}, r"table; --source table --path e\.csv reads a file$"),
        ({"source": "table"}, r"data\.path: source 'table' needs a path"),
        ({"path": "e.csv"}, r"data\.path: source 'synthetic' reads no file"),
        ({"source": "table", "path": "f.csv"}, r"data\.path: 'f\.csv' is neither under"),
        (
            {"source": "s3rec", "path": "s3rec-beauty/Beauty.txt"},
            r"`recsys data download s3rec-beauty` fetches it",
        ),
        ({"source": "table", "path": "e.csv", "items": "i"}, r"data\.items: 'i' is neither"),
        ({"source": "table", "path": "e.csv", "split": "own"}, "no split of its own"),
        ({"source": "table", "path": "e.csv", "dates": [1]}, r"data\.dates: expected two moments"),
        (
            {"source": "table", "path": "e.csv", "split": "global-temporal", "dates": [1, "noon"]},
            r"data\.dates: 'noon' is neither",
        ),
        (
            {"source": "table", "path": "e.csv", "split": "global-temporal", "ratio": [0.9, 0.1]},
            r"data\.split: split ratio",
        ),
        ({"source": "table", "path": "e.csv", "kcore": 5}, "did you mean 'k_core'"),
        ({"synthetic": {"items": 3}}, r"data\.synthetic\.items: .* equal to 240, found 3"),
        ({"k_core": -1}, r"data\.k_core"),
        ({"source": "s3rec", "path": "X.txt", "split": "global-temporal"}, "has only order"),
        (
            {"source": "movielens", "path": "."},
            r"u\.item: no such file \(movielens reads its items",
        ),
    ],
)
def test_a_setting_that_cannot_be_met_is_named(
    prepare: Prepare, events: Path, home: Path, section: dict[str, Any], message: str
) -> None:
    (events.parent / "X.txt").write_text("1 1 2 3\n")
    (events.parent / "u.data").write_text("1\t2\t3\t4\n")
    with pytest.raises((ConfigError, DataError), match=message):
        prepare(**section)
    assert not [file for file in home.rglob("*") if file.is_file()]


def test_the_seed_changes_the_synthetic_shop_alone(home: Path, events: Path) -> None:
    def run(seed: int, **section: Any) -> int:
        name = section.get("source", "shop")
        settings = Settings({"name": name, "seed": seed, "data": section})
        return stage(Context.of(settings)).stat().st_ino

    first = run(0, synthetic=SMALL)
    assert run(0, synthetic=SMALL) == first
    assert run(1, synthetic=SMALL) != first
    table = run(0, source="table", path="e.csv")
    assert run(1, source="table", path="e.csv") == table


def test_the_stage_works_again_only_when_something_changed(
    prepare: Prepare, events: Path, home: Path
) -> None:
    folder = home / "datasets/t"

    def run(**options: Any) -> int:
        prepare(source="table", path="e.csv", **options)
        return folder.stat().st_ino

    first = run()
    assert run() == first
    assert run(force=True) != first
    second = folder.stat().st_ino
    events.write_text(CSV + "w,a,1500000500,5\n")
    third = run()
    assert third != second
    assert run(k_core=1) != third
    assert [path.name for path in folder.parent.iterdir()] == ["t"]


def test_a_file_that_appears_beside_the_data_is_noticed(prepare: Prepare, raw: Path) -> None:
    (raw / "X.txt").write_text("1 1 2 3\n")
    assert prepare(source="s3rec", path="X.txt").attributes == []
    (raw / "X_item2attributes.json").write_text('{"1": [4]}')
    assert prepare(source="s3rec", path="X.txt").attributes == ["attributes"]


def test_bad_input_keeps_the_old_data_set_and_adds_nothing(
    prepare: Prepare, events: Path, home: Path
) -> None:
    events.write_text("user,item,timestamp\nu\n")
    with pytest.raises(DataError, match=r"e\.csv: no rows in it"):
        prepare(source="table", path="e.csv")
    assert not list(home.rglob("*"))
    events.write_text(CSV)
    before = labels(prepare(source="table", path="e.csv"))
    events.write_text(CSV + "x,")
    with pytest.raises(DataError, match=r"1 of 8 rows are damaged.*line 9: x,"):
        prepare(source="table", path="e.csv")
    assert labels(Dataset.load(home / "datasets/t")) == before
    assert [path.name for path in (home / "datasets").iterdir()] == ["t"]


def test_a_file_of_a_folder_may_have_no_rows(
    prepare: Prepare, raw: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (raw / "days").mkdir()
    header = CSV.partition("\n")[0] + "\n"
    for number, text in enumerate(("", header, CSV, header, "\n", "\ufeff\n")):
        (raw / f"days/{number}.csv").write_text(text)
    (raw / "days/6.csv.gz").write_bytes(gzip.compress(b""))
    alone = prepare(source="table", path="days/2.csv")
    assert labels(prepare(source="table", path="days", force=True)) == labels(alone)
    told = " ".join(capsys.readouterr().err.split())
    assert "names of columns: 0.csv, 1.csv, 3.csv, 4.csv, 5.csv, 6.csv.gz." in told
    is_open = CSV.replace("item", '"item', 1)
    for one, two, refusal in ((is_open, CSV, "a quote .* not closed"), (header, header, "no rows")):
        (raw / "days/1.csv").write_text(one)
        (raw / "days/2.csv").write_text(two)
        with pytest.raises(DataError, match=rf"1\.csv: .*{refusal}"):
            prepare(source="table", path="days", force=True)


def test_a_failure_while_writing_leaves_nothing_behind(
    prepare: Prepare, events: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def half(folder: Path, *_: object) -> None:
        (folder / "items.parquet").write_bytes(b"half")
        raise OSError("disk full")

    monkeypatch.setattr("recsys.dataset.write_catalog", half)
    with pytest.raises(OSError, match="disk full"):
        prepare(source="table", path="e.csv")
    assert not list((home / "datasets").iterdir())


# --- commands


def invoke(*arguments: str) -> str:
    result = CliRunner().invoke(app, list(arguments), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_prepare_prints_one_json_document(events: Path, home: Path) -> None:
    out = json.loads(
        invoke("prepare", "--source", "table", "--path", "e.csv", "--name", "x", "--json")
    )
    assert out["path"] == str(home / "datasets/x")
    assert out["stats"]["users"] == 3
    assert out["decisions"]["duplicate_rows_dropped"] == 1
    again = json.loads(invoke("stats", "--name", "x", "--json"))
    assert again == out
    assert json.loads(invoke("stats", out["path"], "--json")) == out


def test_prepare_takes_a_config_file_and_options_win(events: Path, home: Path) -> None:
    config = home.parent / "c.yaml"
    config.write_text("name: y\ndata:\n  source: s3rec\n  path: e.csv\n  k_core: 2\n")
    out = json.loads(invoke("prepare", "--config", str(config), "--source", "table", "--json"))
    assert out["path"].endswith("datasets/y")
    assert out["stats"]["users"] == 2
