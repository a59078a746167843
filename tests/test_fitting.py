"""`recsys run EVENTS` and `recsys.fit`: from a shop's files or frames to a bundle."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pandas as pd
import pytest
import torch
from toy_bundle import TINY_RUN

import recsys
from recsys import cli
from recsys.artifacts import read_manifest
from recsys.dataset import Dataset
from recsys.errors import ConfigError
from recsys.evaluation import rankings
from recsys.evaluation import run as evaluation
from recsys.evaluation.protocol import EvaluationConfig
from recsys.evaluation.report import JSON

TINY = TINY_RUN | {"ids": {"method": "rq-kmeans", "levels": 3, "codebook_size": 4}}


@pytest.fixture
def home(monkeypatch, tmp_path):
    """The artifacts go to a folder of this test, which is also the working folder."""
    monkeypatch.setenv("RECSYS_HOME", str(tmp_path / "var"))
    monkeypatch.delenv("RECSYS_DATASETS", raising=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path / "var"


def shop_events() -> pd.DataFrame:
    pairs = [(u, n) for u in range(40) for n in range(8)]
    rows = [(f"u{u}", f"{(u * 3 + n) % 30:03}", 1_700_000_000 + 9000 * n) for u, n in pairs]
    return pd.DataFrame(rows, columns=["user", "item", "timestamp"])


def shop_items() -> pd.DataFrame:
    return pd.DataFrame(
        {"item": [f"{i:03}" for i in range(30)], "title": [f"T{i}" for i in range(30)]}
    )


@pytest.fixture
def events(home) -> pd.DataFrame:
    return shop_events()


@pytest.fixture
def items(home) -> pd.DataFrame:
    return shop_items()


def fit_frames(home: Path) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RECSYS_HOME", str(home))
        patch.delenv("RECSYS_DATASETS", raising=False)
        return recsys.fit(shop_events(), shop_items(), name="frames", minutes=1, **TINY)


@pytest.fixture(scope="module")
def fitted(tmp_path_factory) -> tuple[Path, Path]:
    """The folder of all artifacts of frames, and the bundle."""
    home = tmp_path_factory.mktemp("fitted") / "var"
    return home, fit_frames(home)


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


def test_frames_become_a_bundle(fitted):
    home, bundle = fitted
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


def test_what_is_up_to_date_is_not_made_again(fitted):
    home, bundle = fitted
    before = {path: path.stat().st_mtime_ns for path in home.rglob("manifest.json")}
    made = {path.parent.relative_to(home).as_posix() for path in before}
    stages = ("sasrec", "recipe", "ids", "target", "retrieval")  # on a CPU, without a draft
    assert made == {
        *(f"runs/frames/{stage}" for stage in stages),
        *(f"{kind}/frames" for kind in ("datasets", "bundles", "reports")),
    }
    assert fit_frames(home) == bundle
    assert {path: path.stat().st_mtime_ns for path in home.rglob("manifest.json")} == before


def test_evaluation_on_two_threads_writes_the_same_report(fitted, tmp_path, monkeypatch):
    home, bundle = fitted
    monkeypatch.setattr(rankings, "CHUNK", 16)  # so that each thread ranks some
    rank, ranked_by = rankings.rank_histories, set()

    def noted(recommender, *args, **options):
        ranked_by.add(id(recommender.engine))
        return rank(recommender, *args, **options)

    monkeypatch.setattr(rankings, "rank_histories", noted)
    before = torch.get_num_threads()
    reports = []
    for threads in (1, 2):
        ranked_by.clear()
        config = EvaluationConfig(ks=(1, 10), resamples=20, threads=threads)
        out = tmp_path / str(threads)
        evaluation.evaluate_bundle(bundle, home / "datasets/frames", config, out)
        reports.append(json.loads((out / JSON).read_text(encoding="utf-8")))
        assert reports[-1]["protocol"].pop("threads") == len(ranked_by) == threads
    assert reports[0] == reports[1]
    assert torch.get_num_threads() == before


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
