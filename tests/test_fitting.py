"""`recsys run EVENTS` and `recsys.fit`: from a shop's files or frames to a bundle."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pandas as pd
import pytest
from toy_bundle import TINY_RUN

import recsys
from recsys import cli
from recsys.artifacts import read_manifest
from recsys.dataset import Dataset
from recsys.errors import ConfigError

TINY = TINY_RUN | {"ids": {"levels": 3, "codebook_size": 4}}


@pytest.fixture
def home(monkeypatch, tmp_path):
    """The artifacts go to a folder of this test, which is also the working folder."""
    monkeypatch.setenv("RECSYS_HOME", str(tmp_path / "var"))
    monkeypatch.delenv("RECSYS_DATASETS", raising=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path / "var"


@pytest.fixture
def events(home) -> pd.DataFrame:
    pairs = [(u, n) for u in range(40) for n in range(8)]
    rows = [(f"u{u}", f"{(u * 3 + n) % 30:03}", 1_700_000_000 + 9000 * n) for u, n in pairs]
    return pd.DataFrame(rows, columns=["user", "item", "timestamp"])


@pytest.fixture
def items(home) -> pd.DataFrame:
    return pd.DataFrame(
        {"item": [f"{i:03}" for i in range(30)], "title": [f"T{i}" for i in range(30)]}
    )


@pytest.fixture
def run(monkeypatch, capsys, home):
    """Run `recsys run ...` up to the data: status and standard error."""

    def run(*arguments: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["recsys", "run", *arguments, "--until", "data"])
        with pytest.raises(SystemExit) as caught:
            cli.main()
        return int(caught.value.code or 0), capsys.readouterr().err.replace("\n", " ")

    return run


def load(home: Path, name: str) -> Dataset:
    return Dataset.load(home / "datasets" / name)


def test_a_run_reads_the_files_it_is_given(run, home, events, items):
    events.to_csv("orders.csv", index=False)
    items.to_csv("products.csv", index=False)
    assert run("orders.csv", "--items", "products.csv")[0] == 0
    data = load(home, "orders")
    assert "T3" in data.items["title"].to_pylist()
    config = read_manifest(home / "datasets/orders").config
    assert config["path"] == str(home.parent / "orders.csv")
    assert config["source"] == "table"


def test_a_run_reads_a_folder(run, home, events, items):
    Path("shop").mkdir()
    events.to_csv("shop/orders.csv", index=False)
    items.to_csv("shop/products.csv", index=False)
    status, err = run("shop")
    assert (status, "events: orders.csv, items: products.csv" in err) == (0, True)
    assert "T3" in load(home, "shop").items["title"].to_pylist()


def test_a_column_is_named_by_a_flag(run, home, events):
    events.rename(columns={"item": "001"}).to_csv("orders.csv", index=False)
    assert run("orders.csv", "--column", "item=001", "--name", "n")[0] == 0
    assert len(load(home, "n").item_ids) == 30


def test_the_same_command_again_finds_the_data_current(run, home, events):
    events.to_csv("orders.csv", index=False)
    run("orders.csv")
    before = (home / "datasets/orders/manifest.json").stat().st_mtime_ns
    assert run("orders.csv")[0] == 0
    assert run("--name", "orders")[0] == 0, "without a source the prepared data are used"
    assert (home / "datasets/orders/manifest.json").stat().st_mtime_ns == before


def test_another_file_of_the_same_name_replaces_nothing(run, home, events):
    for folder in ("a", "b"):
        Path(folder).mkdir()
    events.to_csv("a/orders.csv", index=False)
    events.iloc[:80].to_csv("b/orders.csv", index=False)
    assert run("a/orders.csv")[0] == 0
    before = (home / "datasets/orders/manifest.json").read_bytes()
    status, err = run("b/orders.csv")
    assert status == 2
    assert "take another --name, or replace it with --force" in err
    assert (home / "datasets/orders/manifest.json").read_bytes() == before
    assert run("b/orders.csv", "--force")[0] == 0
    assert len(load(home, "orders").interactions.user_ids) == 10


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("gone.csv",), "EVENTS: 'gone.csv' is no file or folder"),
        (("orders.csv", "--items", "gone.csv"), "--items: 'gone.csv' is no file or folder"),
        (("--items", "orders.csv"), "EVENTS: missing beside --items, --column"),
        (("--column", "item=sku"), "EVENTS: missing beside --items, --column"),
        (("orders.csv", "--column", "sku"), "--column 'sku': expected ROLE=NAME"),
        (("orders.csv", "--column", "itm=sku"), "unknown key in 'data.columns': 'itm'; did you"),
        (("orders.csv", "--minutes", "0"), "minutes: expected a number above 0"),
        (("orders.csv", "--set", "target.epoch=3"), "unknown key in 'target': 'epoch'"),
    ],
    ids=" ".join,
)
def test_a_mistake_is_refused_before_anything_is_read(run, home, events, arguments, message):
    events.to_csv("orders.csv", index=False)
    status, err = run(*arguments)
    assert (status, message in err) == (2, True), err
    assert not home.exists()


def test_frames_become_a_bundle(home, events, items):
    bundle = recsys.fit(events, items, name="frames", minutes=1, **TINY)
    recommender = recsys.Recommender.load(bundle)
    (found,) = recommender.recommend([["003", "004", "005"]], k=5)
    assert len(found) == 5
    assert all(r.title.startswith("T") for r in found)
    assert {"item_id", "score", "title"} <= set(pd.DataFrame([vars(r) for r in found]))
    users = pd.read_parquet(home / "reports/frames/users.parquet")
    assert (users["rank"] <= 10).groupby(users["ranker"], observed=True).mean().between(0, 1).all()
    report = json.loads((home / "reports/frames/report.json").read_text())
    assert "SASRec" in json.dumps(report), "the recipe trains a teacher"
    sasrec = read_manifest(home / "runs/frames/sasrec", "sasrec").config
    assert (sasrec["minutes"], sasrec["max_minutes"]) == (1, None)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"target": {"epoch": 3}}, "unknown key in 'target': 'epoch'"),
        ({"tarket": {"epochs": 3}}, "'tarket' is not one of the sections"),
        ({"columns": {"item": "sku", "usr": "u"}}, "unknown key in 'data.columns': 'usr'"),
    ],
)
def test_fit_refuses_wrong_settings(home, events, options, message):
    with pytest.raises(ConfigError, match=message):
        recsys.fit(events, name="frames", **options)
    assert not (home / "datasets").exists()


def test_a_shop_of_two_items_is_served(home):
    rows = [(f"u{u}", f"i{(u + n) % 2}", 9000 * n) for u in range(30) for n in range(2)]
    events = pd.DataFrame(rows, columns=["user", "item", "timestamp"])
    events["timestamp"] += 1_700_000_000
    sizes = {key: value for key, value in TINY.items() if key != "ids"}
    recommender = recsys.Recommender.load(recsys.fit(events, name="few", **sizes))
    found = recommender.recommend([["i0"]], k=10)[0]
    assert [item.item_id for item in found] == ["i1"]
    assert not (home / "reports" / "few").exists()  # users of two events test nothing


def test_a_shop_of_one_item_is_refused_in_words(run, home):
    rows = [(f"u{u}", "only", 1_700_000_000 + 9000 * n) for u in range(20) for n in range(4)]
    pd.DataFrame(rows, columns=["user", "item", "timestamp"]).to_csv("one.csv", index=False)
    status, shown = run("one.csv")
    assert status == 2
    assert "only 1 item is left" in shown
    assert "a recommender needs at least 2" in shown
    assert "--items" in shown


def test_several_columns_without_a_name_are_refused_in_words(run):
    Path("bare.csv").write_text("user,item,,\nu,a,x,2020-01-01\nv,b,y,2020-01-02\n")
    status, shown = run("bare.csv")
    assert (status, "no column holds the time of the events" in shown) == (2, True), shown
