"""One night of a tiny shop: run, serve, new events and items, retrain, gate, promote, roll back.

The service runs in a thread. Files are read here with Parquet and JSON alone.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import sys
import time
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pandas as pd
import pyarrow as pa
import pytest
import torch

from recsys import cli
from recsys.artifacts import Workspace
from recsys.config import Settings
from recsys.errors import DataError
from recsys.fitting import table_sections
from recsys.pipeline import Context
from recsys.pipeline import run as run_stages
from recsys.retraining import Sources, news, retrain, versions
from recsys.retraining.news import gone
from recsys.serving.client import Client, ServiceError
from recsys.serving.schemas.events import UserHistory
from recsys.serving.schemas.items import ItemChange, UpsertResponse
from recsys.serving.settings import ServingSettings

GROUPS, EACH, USERS = 6, 12, 90
COLOURS = ["red", "blue", "green", "grey", "white", "black"]
KINDS = ["kettle", "ladder", "jacket", "novel", "guitar", "tent"]
DAY, START = 86_400, 1_700_000_000
PIECES = 2  # of each purchase
STEPS = ("events", "data", "sasrec", "recipe", "ids", "target", "draft", "retrieval", "bundle",
         "gate", "swap")  # fmt: skip
SETTINGS = {
    "sasrec": {"epochs": 2, "hidden": 16, "eval_users": 20},
    "ids": {"levels": 3, "codebook_size": [8, 8, 16]},  # leaves are free for new items
    "target": {
        "architecture": {"hidden_size": 32, "intermediate_size": 64, "layers": 1, "heads": 1},
        "epochs": 8, "eval_users": 30, "precision": "float32", "learning_rate": 1e-2,
    },
    "draft": {
        "objective": "sft", "epochs": 1, "evaluate_every": 0, "accept_users": 0,
        "precision": "float32",
    },
    "retrieval": {"users": 60},
}  # fmt: skip
QUICK = {"gate": {"least_users": 10, "resamples": 100, "margin": 5.0, "coverage": 0.0}}
OF_FILES = Settings({"name": "shop", **QUICK})
STRICT = {"gate": QUICK["gate"] | {"coverage": 100.0}}
NEW = ["item-0-new", "item-3-new"]


def product(group: int, number: int | str) -> dict[str, str]:
    colour = COLOURS[number % len(COLOURS)] if isinstance(number, int) else "golden"
    kind = KINDS[group]
    text = f"{colour} {kind} for the {kind} shelf"
    return {"item": f"item-{group}-{number}", "title": f"{colour} {kind}", "text": text}


def walks(first: int, length: int, day: int, *, new: bool = False) -> pd.DataFrame:
    """Users who go through the items of one group in order, each from a place of their own.

    In the night every second user of the groups with new items has one of them after two others.
    """
    rows = []
    for user in range(USERS):
        group = user % GROUPS
        for step in range(length):
            item = f"item-{group}-{user // GROUPS % 3 + first + step}"
            if new and step == 2 and user % 4 < 2 and f"item-{group}-new" in NEW:
                item = f"item-{group}-new"
            at = START + day * DAY + 60 * (user * 37 % USERS) * (1 + 9 * new) + 900 * step
            rows.append((f"u{user}", item, at, PIECES))
    return pd.DataFrame(rows, columns=["user", "item", "timestamp", "quantity"])


@pytest.fixture(scope="module")
def first(tmp_path_factory):
    """The home of a first run, which no test changes."""
    home = tmp_path_factory.mktemp("shop") / "var"
    folder = home.parent
    walks(0, 5, 0).to_csv(folder / "events.csv", index=False)
    rows = [product(group, number) for group in range(GROUPS) for number in range(EACH)]
    pd.DataFrame(rows).to_csv(folder / "items.csv", index=False)
    from recsys.data.sources import Tables

    tables = Tables(folder / "events.csv", folder / "items.csv")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RECSYS_HOME", str(home))
        settings = Settings({"name": "shop", **SETTINGS}).merged(table_sections(tables))
        run_stages(Context.of(settings), ["data", "sasrec", "ids", "target", "draft", "retrieval",
                                          "bundle"])  # fmt: skip
    return home


@pytest.fixture
def home(first, tmp_path, monkeypatch):
    shutil.copytree(first, tmp_path / "var")
    monkeypatch.setenv("RECSYS_HOME", str(tmp_path / "var"))
    return tmp_path / "var"


def tonight() -> list[dict[str, object]]:
    """The events of the night, as the service takes them."""
    rows = walks(5, 4, 10, new=True)
    return [
        {"event_id": f"e{n}", "user": row.user, "item": row.item, "timestamp": row.timestamp}
        for n, row in enumerate(rows.itertuples())
    ]


@pytest.fixture
def service(serving, home):
    """Starts the service of the shop; yields a client of it."""

    @contextmanager
    def start():
        settings = ServingSettings.load(name="shop", port=0)
        with serving(settings) as url, Client(url) as client:
            yield client

    return start


def store_of(home: Path) -> Sources:
    return Sources(home / "serving" / "shop" / "histories.db", ("impression", "dislike"))


def night(home, **options):
    settings = Settings({"name": "shop", **options.pop("settings", QUICK)})
    return retrain(settings, store_of(home), **options)


def codes_of(bundle: Path) -> dict[str, tuple[int, ...]]:
    """The semantic IDs in a bundle's Parquet file."""
    table = pd.read_parquet(bundle / "catalog" / "items.parquet")
    column = next(name for name in table.columns if name.startswith("sem"))
    return {row["item_id"]: tuple(row[column]) for _, row in table.iterrows()}


def add_the_news(client: Client) -> None:
    for item_id in NEW:
        of = product(int(item_id[5]), "new")
        item = {"item_id": item_id, "title": of["title"], "text": of["text"]}
        client.ask(UpsertResponse, "POST", "/v1/items", json={"items": [item]})
    assert client.send_events(tonight()).accepted == len(tonight())


@pytest.fixture(scope="module")
def judged(first, serving, tmp_path_factory):
    """A home whose night was trained and refused by a strict gate, and its outcome."""
    home = tmp_path_factory.mktemp("judged") / "var"
    shutil.copytree(first, home)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RECSYS_HOME", str(home))
        patch.setattr("recsys.serving.stores.journal.PAGE", 1)  # items are read in pages
        settings = ServingSettings.load(name="shop", port=0)
        with serving(settings) as url, Client(url) as client:
            add_the_news(client)
            return home, night(home, clients=[client], promote=True, settings=STRICT)


@pytest.fixture
def refused(judged, home):
    """That home, as the test's own."""
    shutil.rmtree(home)
    shutil.copytree(judged[0], home)


def test_a_night_from_new_events_to_rollback(home, service):
    before = codes_of(home / "bundles" / "shop")
    with service() as client:
        add_the_news(client)
        outcome = night(home, clients=[client], promote=True)
        assert (outcome.version, outcome.parent) == ("shop.2", "shop")
        assert outcome.offered, outcome.reasons
        assert outcome.promoted
        assert client.alias("champion").bundle == "shop.2"
        after = codes_of(home / "bundles" / "shop.2")
        assert {item: after[item] for item in before} == before, "no old code has moved"
        assert set(after) - set(before) == set(NEW)
        assert len(set(after.values())) == len(after), "no new item shares a code"
        histories = [[f"item-{group}-5", f"item-{group}-6"] for group in (0, 3)]
        lists = [client.recommend(history=history, k=10).items for history in histories]
        assert {item.item_id for items in lists for item in items} & set(NEW), "are recommended"
        # What was rolled back is not promoted again without new events.
        assert client.rollback("champion").bundle == "shop"
        again = night(home, clients=[client], promote=True)
        assert again.reasons[0].startswith("Nothing is new")
        assert client.alias("champion").bundle == "shop"


def test_a_version_names_its_parents_and_its_verdict(judged):
    home, outcome = judged
    assert outcome.offered is False
    parent, version = (
        json.loads((home / "bundles" / name / "manifest.json").read_text())
        for name in ("shop", "shop.2")
    )
    assert version["info"]["parent"] == "shop"
    assert version["info"]["placed"] == len(NEW)
    target = json.loads((home / "runs" / "shop.2" / "target" / "manifest.json").read_text())
    assert version["parents"]["bundle"] == target["parents"]["bundle"]
    verdict = json.loads((outcome.report / "gate.json").read_text())
    assert verdict["champion"]["bundle"] == "shop"
    assert {row["target"] for row in verdict["comparisons"]} >= {"all", "warm"}
    assert verdict["coverage"]["challenger"] > 0
    drift = json.loads((home / "runs" / "shop.2" / "ids" / "report.json").read_text())["drift"]
    assert set(drift) >= {"moved", "error_new", "error_old", "advice"}
    (line,) = (home / "runs" / "shop" / "retraining.jsonl").read_text().splitlines()
    assert json.loads(line)["step"] == "judged"
    assert "what is served has seen" in (outcome.report / "report.html").read_text()
    assert parent["kind"] == "bundle"


def test_items_that_do_not_fit_the_data_are_left_out_as_the_service_does(capsys):
    items = pa.table({"item_id": ["A"], "title": ["a"], "text": [""], "brand": ["Acme"]})
    added = [{"op": "upsert", "item_id": name, "title": "t", "text": "", "attributes": {"brand": b}}
             for name, b in (("B", "Bolt"), ("C", 7))]  # fmt: skip

    async def read(_, place):
        return [(n, record) for n, record in enumerate(added, 1) if n > place]

    store = SimpleNamespace(journal=SimpleNamespace(read=read))
    found = news._live_items(
        store, SimpleNamespace(catalog=SimpleNamespace(items=items)), items.schema
    )
    assert found["item_id"].to_pylist() == ["B"]
    assert "item 'C': attributes.brand: want text, got 7" in capsys.readouterr().err


def test_artifacts_have_the_files_and_fields_of_the_surfaces(judged):
    home, outcome = judged
    page = Path(__file__).parents[2] / "docs" / "surfaces.md"
    section = page.read_text(encoding="utf-8").split("## Artifacts")[1].split("\n## ")[0]
    rows = re.findall(r"^\| ([a-z, ]+) \| (.*) \|$", section, flags=re.M)
    told = {kind: text for kinds, text in rows for kind in kinds.split(", ")}
    kinds = set()
    for file in home.rglob("manifest.json"):
        manifest = json.loads(file.read_text())
        assert all(f"`{name}`" in section for name in manifest)
        kinds.add(kind := manifest["kind"])
        for name in manifest["files"] if kind != "dataset" else ():
            assert re.search(rf"`{re.split('[./]', name)[0]}[`./]", told[kind]), (kind, name)
    assert kinds >= told.keys() - {"kind", "teacher", "recommendations"}
    for name in json.loads((outcome.report / "gate.json").read_text()):
        assert f"`{name}`" in told["evaluation"], name
    events = pd.read_parquet(next(home.rglob("events.parquet")))
    assert all(re.search(rf"\b{name}\b", told["events"]) for name in events.columns)


def test_old_versions_are_removed_but_for_their_reports(tmp_path):
    base = Workspace(tmp_path, "shop")
    named = [base, *(replace(base, name=f"shop.{n}") for n in range(2, 9))]
    parts = {v.name: [v.report, v.dataset, v.run("target"), v.bundle] for v in named}
    for place in (place for places in parts.values() for place in places):
        place.mkdir(parents=True)
    aliases = SimpleNamespace(aliases=[SimpleNamespace(bundle="shop.4", previous="shop.3")])
    client = SimpleNamespace(models=lambda: aliases)
    versions.remove_old(base, named[-1], base, [client])
    for name, places in parts.items():
        left = name not in ("shop.2", "shop.5")
        assert [place.is_dir() for place in places] == [True, left, left, left]


def die_after(step: str, home: Path, url: str) -> None:
    """Retrain in this process, which ends by SIGKILL after a step."""

    def die(finished):
        if finished == step:
            os.kill(os.getpid(), signal.SIGKILL)

    with Client(url) as client:
        night(home, clients=[client], promote=True, done=die)


@pytest.fixture
def one_thread():
    """One thread of torch: a forked process has no other ones, and bits depend on their number."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("one_thread")
def test_a_retraining_killed_after_each_step_goes_on(home, service, forked, tmp_path):
    with service() as client:
        add_the_news(client)
        url = str(client._http.base_url)
        stamps = {}
        for step in STEPS:
            assert forked(die_after, step, home, url) == -signal.SIGKILL, step
            for file in home.rglob("manifest.json"):
                assert stamps.setdefault(file, file.stat().st_mtime_ns) == file.stat().st_mtime_ns
            swapped = step == "swap"
            assert client.alias("champion").bundle == ("shop.2" if swapped else "shop")
        assert night(home, clients=[client], promote=True).reasons[0].startswith("Nothing is new")
        log = (home / "runs" / "shop" / "retraining.jsonl").read_text().splitlines()
        assert [json.loads(line)["step"] for line in log] == ["judged", "promoted"]
        once = json.loads((home / "bundles" / "shop.2" / "manifest.json").read_text())["files"]
    # The same night without a stop makes the same files.
    for place in ("runs", "datasets", "bundles", "reports"):
        shutil.rmtree(home / place / "shop.2")
    (home / "runs" / "shop" / "retraining.jsonl").unlink()
    assert night(home).version == "shop.2"
    again = json.loads((home / "bundles" / "shop.2" / "manifest.json").read_text())["files"]
    assert once == again


@pytest.mark.usefixtures("refused")
def test_what_the_gate_refuses_is_not_promoted(home, service, monkeypatch, capsys):
    with service() as client:
        keys, make = [], Client.__init__
        monkeypatch.setenv("RECSYS_API_KEY", "rk_admin")

        def spy(self, url, *, key):
            keys.append(key)
            make(self, url, key=key)

        monkeypatch.setattr(Client, "__init__", spy)
        offered = ("least_users", "margin", "coverage")
        options = [f"--set=gate.{key}={QUICK['gate'][key]}" for key in offered]
        monkeypatch.setattr(sys, "argv", [
            "recsys", "retrain", "--name", "shop", "--url", str(client._http.base_url),
            "--promote", "--json", *options, "--set=gate.coverage=100",
        ])  # fmt: skip
        with pytest.raises(SystemExit) as ended:
            cli.main()
        assert ended.value.code == 3
        assert keys == ["rk_admin"]
        found = json.loads(capsys.readouterr().out)
        assert (found["offered"], found["promoted"]) == (False, False)
        assert "cover" in found["reasons"][0]
        assert client.alias("champion").bundle == "shop"


@pytest.mark.usefixtures("refused")
def test_a_refused_version_is_judged_again_by_another_gate(home, service):
    with service() as client:
        last = tonight()[-1]
        late = [last | {"event_id": "late", "timestamp": last["timestamp"] + DAY}]
        assert client.send_events(late).accepted == 1, "a service gets events all the time"
        places = [home / place / "shop.2" for place in ("runs", "bundles", "datasets")]
        trained = [file for place in places for file in place.rglob("manifest.json")]
        stamps = [file.stat().st_mtime_ns for file in trained]
        outcome = night(home, clients=[client], promote=True)
        assert (outcome.version, outcome.promoted) == ("shop.2", True)
        assert [file.stat().st_mtime_ns for file in trained] == stamps, "none is trained"
        assert client.alias("champion").bundle == "shop.2"


class StoppedError(Exception):
    """A retraining is stopped on purpose."""


def stop_after(step):
    def stop(finished):
        if finished == step:
            raise StoppedError

    return stop


def taken(home, events, until="events", **sources) -> pd.DataFrame:
    """The events that a retraining takes of a file; it is stopped then."""
    with pytest.raises(StoppedError):
        retrain(OF_FILES, Sources(events=events, **sources), done=stop_after(until))
    return pd.read_parquet(home / "runs" / "shop.2" / "events" / "events.parquet")


def file_of(tmp_path, rows, name="night.csv"):
    """A file that the service has not got."""
    pd.DataFrame(rows).to_csv(tmp_path / name, index=False)
    return tmp_path / name


def test_only_newer_events_of_a_full_export_are_taken(home, tmp_path):
    events = pd.concat([walks(0, 5, 0), walks(5, 4, 10, new=True)])
    strange = pd.DataFrame({"user": ["u1"], "item": ["?"], "timestamp": [START + 10 * DAY]})
    rows = [product(group, number) for group in range(GROUPS) for number in range(EACH)]
    rows += [product(int(item[5]), "new") for item in NEW]
    items = file_of(tmp_path, rows, "items.csv")
    found = taken(home, file_of(tmp_path, pd.concat([events, strange])), items=items)
    newer = walks(5, 4, 10, new=True)
    assert sorted(found["timestamp"]) == sorted(newer["timestamp"]), "none is old or strange"
    assert set(found["item"]) == set(newer["item"])
    folder = home / "runs" / "shop.2" / "events"
    described = pd.read_parquet(folder / "items.parquet").set_index("item_id")
    assert described.loc[NEW, "title"].tolist() == ["golden kettle", "golden novel"]
    dates = json.loads((folder / "manifest.json").read_text())["info"]["dates"]
    later = sum(newer["timestamp"] >= dates[1]) / len(newer)
    assert later == pytest.approx(0.3, abs=0.02), "gate.window"


def test_events_of_the_future_wait_until_their_time_has_come(home, tmp_path, capsys):
    """Taken today, they would make all events before them old tomorrow."""
    events = walks(5, 4, 10, new=False)
    soon = events.tail(3).assign(timestamp=int(time.time()) + 20 * 3600)
    found = taken(home, file_of(tmp_path, pd.concat([walks(0, 5, 0), events, soon])))
    assert found["timestamp"].max() == events["timestamp"].max()
    told = " ".join(capsys.readouterr().err.split())
    assert "3 events are left out because they are in the future" in told
    assert f"{len(walks(0, 5, 0))} events are left out: the champion's data end on" in told


def test_the_summary_tells_the_rows_of_the_file_from_the_old_events(home, tmp_path, capsys):
    old, new = walks(0, 5, 0), walks(5, 4, 10)
    nobody = new.head(2).assign(user="")
    taken(home, file_of(tmp_path, pd.concat([new, nobody])), until="data")
    told = " ".join(capsys.readouterr().err.split())
    assert f"night.csv: {len(new) + 2} rows were read; 2 left out: rows have no user" in told
    document = json.loads((home / "datasets" / "shop.2" / "manifest.json").read_text())
    first, second, *_ = document["info"]["cleaning"]["accounts"]
    assert (first["what"], first["events"]) == ("events are of the data before", len(old))
    assert (second["what"], second["events"]) == ("new events were taken", len(new))


def test_a_file_of_new_items_alone_may_come_with_the_events_of_the_night(home, tmp_path):
    items = file_of(tmp_path, [product(int(item[5]), "new") for item in NEW], "items.csv")
    taken(home, file_of(tmp_path, walks(5, 4, 10)), items=items)
    described = pd.read_parquet(home / "runs" / "shop.2" / "events" / "items.parquet")
    assert sorted(described["item_id"]) == sorted(NEW)
    assert not described["title"].isna().any()


def test_what_is_left_of_a_version_without_events_is_removed(home, tmp_path):
    """A retraining was killed while it wrote the events of users."""
    begun = home / "runs" / "shop.2" / ".events~x"
    begun.mkdir(parents=True)
    (begun / "events.parquet").write_bytes(b"")
    taken(home, file_of(tmp_path, walks(5, 4, 10)))
    assert [path.name for path in (home / "runs" / "shop.2").iterdir()] == ["events"]


def test_columns_are_those_of_the_first_run_though_each_customer_orders_once(home, tmp_path):
    once = walks(5, 1, 10).assign(user=[f"new{n}" for n in range(USERS)])
    events = taken(home, file_of(tmp_path, once))
    assert sorted(events["user"]) == sorted(once["user"])
    assert set(events["quantity"]) == {PIECES}


def test_a_file_that_lacks_columns_of_the_first_run_is_refused(home, tmp_path):
    """All of them are named, with the columns that seem to have their names now."""
    names = {"user": "Customer ID", "quantity": "other"}
    file = file_of(tmp_path, walks(5, 4, 10).rename(columns=names))
    with pytest.raises(DataError) as error:
        retrain(OF_FILES, Sources(events=file))
    for part in (
        "'user' (user)", "'quantity' (quantity)", "other: 2",
        "--column quantity=NAME --column 'user=Customer ID', or go on without: "
        "--column quantity=none. ",
    ):  # fmt: skip
        assert part in str(error.value)
    taken(home, file, columns=names)


def test_a_night_without_a_row_has_nothing_new(home, tmp_path, capsys):
    """A day without orders is no fault; a first line without the names of the columns is one."""
    file, head = tmp_path / "night.csv", "user,item,timestamp,quantity"
    for text in ("", head, f"{head}\nu1,item-0-5,1700864000,0\n"):
        file.write_text(text)
        outcome = retrain(OF_FILES, Sources(events=file))
        assert outcome.reasons == ("Nothing is new since shop.",)
        assert "So it has no new event." in " ".join(capsys.readouterr().err.split())
    for text, refusal in (("Error\n", "no rows"), (f"{head}\nu1,item-0-5,1.1.2030,1", "no usable")):
        file.write_text(text)
        with pytest.raises(DataError, match=refusal):
            retrain(OF_FILES, Sources(events=file))
    days = tmp_path / "days"
    days.mkdir()
    for name, text in (("1.csv", "\n"), ("2.csv", f"{head}\n"), ("3.csv", "\ufeff\n")):
        (days / name).write_text(text)
    outcome = retrain(OF_FILES, Sources(events=days))
    assert outcome.reasons == ("Nothing is new since shop.",)
    walks(5, 4, 10).to_csv(days / "4.csv", index=False)
    file.write_text("\n")  # as items, which is no day without orders
    with pytest.raises(DataError, match=r"night\.csv: the file is empty"):
        retrain(OF_FILES, Sources(events=days, items=file))
    assert len(taken(home, days)) == len(walks(5, 4, 10))


def test_a_night_with_ids_of_another_form_is_refused(home, tmp_path):
    """Each item would be new, and the catalog would have it twice."""
    file = file_of(tmp_path, walks(5, 4, 10).assign(item=lambda rows: "SKU-" + rows["item"]))
    refusal = r"36 of 36 items are not in.*has 'SKU-item-0-5', .*, and the data have 'item-"
    with pytest.raises(DataError, match=refusal):
        retrain(OF_FILES, Sources(events=file))
    assert not list(home.glob("*/shop.2"))
    clean = {"most_removed": 1, "skip": "placeholder_users"}
    decided = Settings({"name": "shop", **QUICK, "data": {"clean": clean}})
    assert retrain(decided, Sources(events=file)).reasons == ("Nothing is new since shop.",)


BOUGHT, REFUNDED = "item-0-11", "item-1-11"


def special(day: float) -> pd.DataFrame:
    """A new customer buys, u0 returns all that was bought, and u6 returns one of two pieces."""
    at = int(START + day * DAY)
    rows = [("new", "item-0-5", at, 2), ("new", BOUGHT, at + 60, 2),
            ("u0", BOUGHT, at, 2), ("u0", BOUGHT, at + 9000, -2),
            ("u6", BOUGHT, at, 2), ("u6", BOUGHT, at + 9000, -1)]  # fmt: skip
    return pd.DataFrame(rows, columns=["user", "item", "timestamp", "quantity"])


def rows_of(home: Path, version: str, file: str) -> set[tuple[str, str]]:
    """User and item of the rows of a data set's table."""
    folder = home / "datasets" / version
    table = pd.read_parquet(folder / f"{file}.parquet")
    if "user_id" in table:
        return {*zip(table["user_id"], table["item_id"], strict=True)}
    users = pd.read_parquet(folder / "users.parquet")["user_id"].to_numpy()
    items = pd.read_parquet(folder / "items.parquet")["item_id"].to_numpy()
    return {*zip(users[table["user"]], items[table["item"]], strict=True)}


def history(client, user):
    return client.ask(UserHistory, "GET", f"/v1/users/{user}/history")


def check_answers(client: Client) -> dict[str, int]:
    """What was just bought is not recommended; returns the number of events of each user."""
    for user in ("new", "u0", "u6", "u12"):
        answer = client.recommend(user=user, k=20)
        assert answer.items
        assert BOUGHT not in {item.item_id for item in answer.items}, user
    return {user: len(history(client, user).events) for user in ("new", "u0", "u6", "u12")}


def test_the_service_knows_the_events_of_a_file_that_was_promoted(home, service, tmp_path):
    """Order and refund by HTTP; order, return and partial return in the file; promote; restart."""
    file = file_of(tmp_path, pd.concat([walks(5, 4, 10), special(10.1)]))
    at = START + 10 * DAY
    sent = [
        {"event_id": "o", "user": "u12", "item": BOUGHT, "type": "order", "timestamp": at},
        {"event_id": "p", "user": "u12", "item": REFUNDED, "type": "order", "timestamp": at + 1},
        {"event_id": "r", "user": "u12", "item": REFUNDED, "type": "refund",
         "timestamp": at + 9000},
    ]  # fmt: skip
    sources = replace(store_of(home), events=file, not_history=ServingSettings().not_history)
    with service() as client:
        client.send_events(sent)
        with pytest.raises(ServiceError, match="unknown_user"):
            history(client, "new")
        outcome = retrain(OF_FILES, sources, clients=[client], promote=True)
        assert outcome.promoted, outcome.reasons
        assert client.alias("champion").bundle == "shop.2"
        counts = check_answers(client)
        assert counts["new"] == 2
        types = [event.type for event in history(client, "u6").events if event.item == BOUGHT]
        assert types == ["partial return", "purchase"], "a piece is left, so it stays bought"
        types = [event.type for event in history(client, "u0").events if event.item == BOUGHT]
        assert types == ["return"], "bought again, it is recommended again"
        assert retrain(OF_FILES, sources, clients=[client], promote=True).version == "shop.2"
    with service() as client:
        assert client.alias("champion").bundle == "shop.2"
        assert check_answers(client) == counts, "no event is stored twice or lost"
    events, disliked = (rows_of(home, "shop.2", name) for name in ("interactions", "disliked"))
    assert {("new", BOUGHT), ("u6", BOUGHT), ("u12", BOUGHT)} <= events
    assert not {("u0", BOUGHT), ("u12", REFUNDED)} & events
    assert disliked == {("u0", BOUGHT), ("u12", REFUNDED)}
    left = pd.read_parquet(home / "datasets" / "shop.2" / "pieces.parquet")
    pieces = dict(
        zip(zip(left["user_id"], left["item_id"], strict=True), left["pieces"], strict=True)
    )
    assert ("u6", BOUGHT) not in pieces, "one piece is left, as of any event"
    assert pieces["new", BOUGHT] == 2


def test_events_of_a_refused_night_are_known_and_are_taken_once(home, service, tmp_path):
    """Too few users: nothing is trained. The next file has all events again, and one more."""
    file = file_of(tmp_path, special(10))
    sources = replace(store_of(home), events=file)
    with service() as client:
        outcome = retrain(OF_FILES, sources, clients=[client], promote=True)
        assert "nothing is trained yet" in outcome.reasons[0]
        assert len(history(client, "new").events) == 2
        with pytest.raises(StoppedError):
            night(home, done=stop_after("events"), force=True)
        again = pd.read_parquet(home / "runs" / "shop.2" / "events" / "events.parquet")
        assert again["stored"].all()
        assert again.groupby("user")["quantity"].sum().to_dict() == {"new": 4, "u0": -2, "u6": 1}
        file_of(tmp_path, pd.concat([special(10), walks(5, 1, 11)]))
        with pytest.raises(StoppedError):
            retrain(OF_FILES, sources, force=True, done=stop_after("events"))
    events = pd.read_parquet(home / "runs" / "shop.3" / "events" / "events.parquet")
    assert len(events) == len(special(10)) + USERS
    assert events["stored"].sum() == len(special(10)) - 1, "the purchase that was undone is not"


def users_of(home, version):
    """All users of a version's data, and those of its new events."""
    users = pd.read_parquet(home / "datasets" / version / "users.parquet")["user_id"]
    events = pd.read_parquet(home / "runs" / version / "events" / "events.parquet")["user"]
    return {*users}, {*events}


def test_a_version_that_was_not_finished_is_not_used_after_an_erasure(home, service):
    with service() as client:
        add_the_news(client)
        client.forget("u3")
        for _ in range(2):
            with pytest.raises(StoppedError):
                night(home, done=stop_after("data"))
        for found in users_of(home, "shop.2"):
            assert "u3" not in found
        assert not (home / "datasets" / "shop.3").exists(), "u3 was erased before"
        client.forget("u4")
        with pytest.raises(StoppedError):
            night(home, done=stop_after("data"))
    assert "u4" in users_of(home, "shop.2")[0]
    for found in users_of(home, "shop.3"):
        assert found
        assert "u4" not in found


def test_an_erasure_during_a_retraining_is_told_of_the_promoted_version(home, service):
    with service() as client:
        add_the_news(client)

        def erase(step):
            if step == "gate":
                client.forget("u4")

        outcome = night(home, clients=[client], promote=True, done=erase)
    assert outcome.promoted
    told = "1 of its users were erased while it was made; the next version is without them"
    assert outcome.reasons[-1] == told


def test_events_after_an_erasure_are_those_of_a_user_who_came_back():
    table = pa.table({"user": ["a", "a", "b", "a"], "timestamp": [9, 10, 3, 11]})
    assert gone(table, {"a": 10_500, "c": 0}).to_pylist() == [True, True, False, False]
    assert gone(table, {}).to_pylist() == [False] * 4


def test_users_whom_the_gate_cannot_compare_are_not_counted_before_training(home, service):
    """The next item of some users, in the windows of test and validation, is sold out since."""
    with service() as client:
        add_the_news(client)
        gone = "item-1-5"
        client.ask(
            ItemChange, "PATCH", f"/v1/items/{gone}", json={"attributes": {"available": False}}
        )
        with pytest.raises(StoppedError):
            night(home, done=stop_after("data"))
        events = pd.read_parquet(home / "datasets" / "shop.2" / "interactions.parquet")
        items = pd.read_parquet(home / "datasets" / "shop.2" / "items.parquet")["item_id"]
        following = events[events["split"] > 0].groupby("user")["item"].first()
        compared = int((items[following] != gone).sum())
        assert compared < len(following), "some want the item that is gone"
        gate = QUICK["gate"] | {"least_users": compared + 1}
        outcome = night(home, settings={"gate": gate}, done=stop_after("sasrec"))
        assert outcome.version is None
        assert f"{compared} users can be compared" in outcome.reasons[0]
        assert not list(home.glob("*/shop.2"))
        gate["least_users"] = compared
        with pytest.raises(StoppedError):
            night(home, settings={"gate": gate}, done=stop_after("sasrec"))
    items = pd.read_parquet(home / "datasets" / "shop.2" / "items.parquet").set_index("item_id")
    assert items.index[items["available"] == False].tolist() == [gone]  # noqa: E712
