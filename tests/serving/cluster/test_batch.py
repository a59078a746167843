"""Batch scoring: the service's answers for everybody, whatever happens on the way."""

import json
import os
import signal
import sys
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from oracles import interactions_of
from typer.testing import CliRunner

from recsys.artifacts import read_manifest, verify, write_artifact
from recsys.cli import app, main
from recsys.dataset import DISLIKED_COLUMNS, Dataset, Disliked, Events, write_events
from recsys.errors import ArtifactError, ConfigError, DataError, LockedError
from recsys.interactions import Behaviour, Histories
from recsys.recommender import Recommender, RecommendRequest
from recsys.retrieval import ItemItem, Reranker, Retrieval, decayed_counts
from recsys.serving.batch import scoring
from recsys.serving.batch.job import Job
from recsys.serving.batch.output import Output
from recsys.serving.batch.run import score
from recsys.serving.batch.scoring import Scorer
from recsys.serving.batch.users import Users
from recsys.serving.settings import ServingSettings
from recsys.serving.stores import open_store

RNG = np.random.default_rng(5)
HISTORIES = [
    [f"B{i:04d}" for i in RNG.integers(0, 300, length)] for length in RNG.integers(1, 30, 40)
]
HISTORIES[7:10] = [None, [], ["gone"]]
IDS = [f"user-{n}" for n in range(len(HISTORIES))]

RERANKER = Reranker({"item_item": 1.0, "model": 1.0})


def of_bundle(bundle):
    return ServingSettings(bundle=bundle, histories=None, device="cpu", threads=1)


def write_users(path, ids=IDS, histories=HISTORIES, rows=7):
    columns = {"user_id": ids} | ({} if histories is None else {"history": histories})
    pq.write_table(pa.table(columns), path, row_group_size=rows)
    return path


@pytest.fixture(scope="module")
def users(tmp_path_factory):
    return write_users(tmp_path_factory.mktemp("users") / "users.parquet")


@pytest.fixture
def job(bundles, users):
    return Job(of_bundle(bundles / "one"), users, {"k": 5}, part_rows=8)


def table_of(out):
    return pa.concat_tables(pq.read_table(part) for part in sorted(out.glob("part-*.parquet")))


def test_the_table_equals_single_answers_of_the_recommender(job, bundles, tmp_path):
    summary = score(job, tmp_path / "out")
    table = table_of(tmp_path / "out")
    assert table["user_id"].to_pylist() == IDS
    assert (summary.users, summary.parts, summary.scored) == (40, 5, 40)
    alone = Recommender.load(bundles / "one")
    for row, history in zip(table.to_pylist(), HISTORIES, strict=True):
        (result,) = alone.recommend_batch([RecommendRequest(history or [], 5)])
        found = result.recommendations
        assert row["item_id"] == [one.item_id for one in found]
        assert np.float32(row["score"]).tobytes() == np.float32([o.score for o in found]).tobytes()
        assert row["source"] == [one.source for one in found]
    notes = {"user-7": "unknown_user", "user-8": "empty_history", "user-9": "unknown_history"}
    assert table["note"].to_pylist() == [notes.get(user) for user in IDS]
    assert verify(tmp_path / "out", "recommendations").digest == summary.digest


def items_of(users, start, stop):
    """Ids and items of the histories; None for a user without one."""
    ids, histories = users.read(start, stop)
    return ids, [None if history is None else history.items for history in histories]


@pytest.fixture(scope="module")
def retrieving(tmp_path_factory, random_bundle):
    """A bundle whose retrieval answers those whom the model does not know."""
    rng = np.random.default_rng(8)
    trained = Histories.of([rng.integers(0, 300, 6) for _ in range(60)])
    retrieval = Retrieval(
        ItemItem.count(trained, 300),
        decayed_counts(trained.items, 300),
        reranker=RERANKER,
    )
    folder = tmp_path_factory.mktemp("retrieving") / "bundle"
    random_bundle(folder, 300, retrieval=retrieval, price=np.arange(300) / 2)
    return folder


CHEAP = {"must": [{"key": "price", "range": {"lt": 4}}]}
STRANGERS = [None, [], ["gone"], ["gone", "B0001"], ["B0002", "B0003"]]


async def test_new_users_get_the_fallback_of_the_endpoint(retrieving, tmp_path, running):
    users = write_users(
        tmp_path / "u.parquet", [f"stranger-{n}" for n in range(len(STRANGERS))], STRANGERS
    )
    service = ServingSettings(bundle=retrieving, histories=None, store=tmp_path / "h.db", threads=1)
    sources = []
    async with running(service) as (client, _):
        # fewer items than wanted; the model's own list; no fallback
        for more in ({"filter": CHEAP}, {"blend": False}, {"fallback": False}):
            request = {"k": 12} | more
            table = Scorer(Job(of_bundle(retrieving), users, request)).part(0)
            for row, history in zip(table.to_pylist(), STRANGERS, strict=True):
                who = {"user": row["user_id"]} if history is None else {"history": history}
                response = await client.post("/v1/recommendations", json=request | who)
                answer = response.json()
                if response.status_code == 404:
                    assert (row["note"], row["item_id"]) == (answer["code"], [])
                    continue
                items = answer["items"]
                assert row["note"] == (answer["note"] or {}).get("code")
                assert row["item_id"] == [item["item_id"] for item in items]
                assert row["score"] == [float(np.float32(item["score"])) for item in items]
                assert row["source"] == [item["source"] for item in items]
                sources.append(set(row["source"]))
        # the rules of the service are for its own answers
        nothing = {"filter": {"must": [{"key": "price", "range": {"lt": 0}}]}}
        await client.put("/v1/rules/nothing", json=nothing)
        ruled = await client.put("/v1/aliases/champion", json={"rules": ["nothing"]})
        assert ruled.status_code == 200
        answer = await client.post("/v1/recommendations", json={"history": ["B0002"], "k": 12})
        assert answer.json()["items"] == []
        table = Scorer(Job(of_bundle(retrieving), users, {"k": 12})).part(0)
        assert all(table["item_id"].to_pylist())
    assert sources[:3] == [{"popular"}] * 3
    assert sources[5:8] == [{"model"}] * 3
    assert len(sources) == 3 * len(STRANGERS) - 1  # one was a 404


def test_a_second_run_only_makes_missing_parts(job, tmp_path, monkeypatch):
    out = tmp_path / "out"
    first = score(job, out)
    assert score(job, out).scored == 0
    whole = (out / "part-000002.parquet").read_bytes()
    (out / "part-000002.parquet").unlink()
    (out / "part-000003.parquet").unlink()
    (out / ".part-000004.parquet.writing").write_bytes(b"half")
    again = score(job, out)
    assert (again.scored, again.digest) == (16, first.digest)
    assert (out / "part-000002.parquet").read_bytes() == whole
    assert not list(out.glob(".*"))


def test_another_plan_is_refused_unless_forced(job, bundles, users, tmp_path):
    out = tmp_path / "out"
    score(job, out)
    other = Job(of_bundle(bundles / "two"), users, {"k": 6}, part_rows=16)
    with pytest.raises(ArtifactError, match="made with another bundle, request, part_rows"):
        score(other, out)
    assert score(other, out, force=True).parts == 3
    assert len(list(out.glob("part-*"))) == 3
    assert read_manifest(out).parents["bundle"] == read_manifest(bundles / "two").digest


def test_a_folder_of_something_else_is_left_alone(job, tmp_path):
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(ArtifactError, match="is not empty and holds no batch"):
        score(job, tmp_path, force=True)
    assert (tmp_path / "mine.txt").read_text() == "mine"


def test_two_runs_do_not_share_a_folder(job, tmp_path):
    with (
        Output(tmp_path / "out", job).opened(),
        pytest.raises(LockedError, match=r"in use by .*; choose another folder"),
    ):
        score(job, tmp_path / "out")


def killed_behind_five_parts(arguments):
    """For a process of its own, which ends with it."""
    write, written = Output.write, []

    def dying(self, part, table):
        if len(written) == 5:
            os.kill(os.getpid(), signal.SIGKILL)
        write(self, part, table)
        written.append(part)

    Output.write = dying
    sys.argv[1:] = arguments
    main()


def test_another_run_finishes_a_killed_one_with_the_same_bytes(bundles, tmp_path, forked):
    ids = [f"user-{n}" for n in range(200)]
    users, out = write_users(tmp_path / "u.parquet", ids, 5 * HISTORIES), tmp_path / "out"
    options = ["batch", "score", "--users", str(users), "--json", "--bundle", str(bundles / "one")]
    options += ["--part-rows", "10", "--out"]
    assert forked(killed_behind_five_parts, [*options, str(out)]) == -signal.SIGKILL
    assert len(list(out.glob("part-*.parquet"))) == 5
    refused = CliRunner().invoke(app, [*options, str(out), "--workers", "2"])
    assert "add --engine ray" in str(refused.exception)
    with pytest.raises(ConfigError, match=r"--request\.k: .* found 999"):
        _ = Job(of_bundle(bundles / "one"), users, {"k": 999}).body
    done = CliRunner().invoke(app, [*options, str(out)], catch_exceptions=False)
    assert json.loads(done.stdout)["scored"] == 200 - 10 * 5
    assert table_of(out)["user_id"].to_pylist() == ids
    verify(out, "recommendations")
    whole = tmp_path / "whole"
    CliRunner().invoke(app, [*options, str(whole)], catch_exceptions=False)
    for part in sorted(whole.glob("part-*.parquet")):
        assert part.read_bytes() == (out / part.name).read_bytes()


@pytest.fixture
def dataset(tmp_path):
    owners = [f"u{n % 5}" for n in range(23)]
    items = [f"i{n % 7}" for n in range(23)]
    events = interactions_of(owners, items, list(range(23)))
    names = pa.array(events.item_ids.tolist())
    table = pa.table({"item_id": names, "title": names, "text": names})
    with write_artifact(tmp_path / "data", "dataset") as folder:
        Dataset(events, np.zeros(23, np.uint8), table).save(folder)
    return tmp_path / "data"


def test_users_of_a_data_set_have_all_their_events(dataset):
    events = Dataset.load(dataset).interactions
    everybody = Users(None, dataset)
    expected = [events.item_ids[events.histories[user]].tolist() for user in range(5)]
    assert items_of(everybody, 0, 5) == (events.user_ids.tolist(), expected)
    assert items_of(everybody, 2, 4)[1] == expected[2:4]
    assert not everybody._database.sql("FROM duckdb_tables()").fetchall()  # nothing in memory
    chosen = write_users(dataset.with_name("u.parquet"), ["u3", "stranger", "u0"], None)
    assert items_of(Users(chosen, dataset), 0, 3)[1] == [expected[3], None, expected[0]]


@pytest.mark.anyio
@pytest.mark.parametrize("parts", [1, 2])
async def test_typed_histories_are_those_of_the_store(tmp_path, parts):
    names = ["view", "purchase", "skip"]  # the last one is no part of a history
    events = interactions_of(list("aabbbc"), list("xyxyzx"), list(range(6)))
    events = replace(events, behaviour=np.array([0, 2, 1, 2, 0, 2], np.uint8))
    ids = events.item_ids
    table = pa.table({"item_id": ids, "title": ids, "text": ids})
    types = tuple(Behaviour(name, "target", 1.0) for name in names)
    disliked = pa.table(
        [["a", "d", "b"], ["y", "x", "y"], [3, 4, 1], [True, True, False]], schema=DISLIKED_COLUMNS
    )
    data = Dataset(
        events, np.zeros(6, np.uint8), table, behaviours=types, disliked=Disliked(disliked)
    )
    with write_artifact(tmp_path / "data", "dataset") as folder:
        data.save(folder)
        if parts > 1:
            (folder / "interactions.parquet").unlink()
            for part, rows in enumerate((slice(0, 2), slice(2, None))):
                columns = (None if each is None else each[rows] for each in data.events)
                some = Events(*columns)
                write_events(folder, some, has_time=True, behaviours=types, part=part)
    chosen = write_users(tmp_path / "c.parquet", [*"abcd"], None)
    ids, histories = Users(chosen, tmp_path / "data").read(0, 4)
    wanted = [
        (["x"], ["view"], ("y",), ()), (["x", "z"], ["purchase", "view"], (), ()), None,
        ([], [], ("x",), ()),
    ]  # fmt: skip
    assert histories == wanted
    store = open_store(tmp_path / "store.db")
    store.history.seed(tmp_path / "data")
    assert [await store.history.read(user, 10) for user in ids] == histories
    store.close()


def test_items_before_the_latest_are_left_out(bundles, tmp_path, monkeypatch):
    monkeypatch.setattr(scoring, "MAX_HISTORY", 2)
    history = ["B0005", "B0009", "B0005", "B0003", "B0004"]
    users = write_users(tmp_path / "u.parquet", ["ada"], [history])
    found = Scorer(Job(of_bundle(bundles / "one"), users, {"k": 200})).part(0)
    (listed,) = found["item_id"].to_pylist()
    short = write_users(tmp_path / "s.parquet", ["ada"], [history[-2:]])
    usual = (
        Scorer(Job(of_bundle(bundles / "one"), short, {"k": 200})).part(0)["item_id"].to_pylist()[0]
    )
    assert {"B0005", "B0009"} & set(usual)
    assert listed[:50] == [item for item in usual if item not in history][:50]
    assert not set(history) & set(listed)


def test_rows_are_read_in_any_order_from_the_files_of_a_folder(tmp_path):
    for name in ("[1]", "1"):  # the first name is a pattern that matches the second
        (tmp_path / name).mkdir()
        for part in (1, 0):
            ids = [f"{name}-{part}-{n}" for n in range(3)]
            write_users(tmp_path / name / f"{part}.parquet", ids, [["x"], None, []])
    users = Users(tmp_path / "[1]", None)
    expected = [f"[1]-{part}-{n}" for part in range(2) for n in range(3)]
    assert len(users) == 6
    for start, stop in ((4, 6), (1, 4), (1, 2), (3, 3), (0, 6)):
        histories = [["x"], None, [], ["x"], None, []][start:stop]
        assert items_of(users, start, stop) == (expected[start:stop], histories)


def test_ids_are_texts_in_all_files_if_they_are_in_one(tmp_path):
    write_users(tmp_path / "0.parquet", [7], [[1]])
    write_users(tmp_path / "1.parquet", ["007", "x"], [["01"], []])
    assert items_of(Users(tmp_path, None), 0, 3) == (["7", "007", "x"], [["1"], ["01"], []])


def test_malformed_users_are_reported(tmp_path):
    file = tmp_path / "u.parquet"
    file.write_text("no parquet")
    with pytest.raises(DataError, match="not a parquet file of users"):
        Users(file, None)
    for ids, histories, text in (
        (["a"], [["x", None]], "history in row 0 has an item that is null"),
        (["a", None], [["x"], ["x"]], "user_id in row 1 is null"),
        (["a"], ["x"], "'history' is VARCHAR, not a list of item ids"),
        (["a"], None, "there is no column 'history'"),
    ):
        write_users(file, ids, histories)
        with pytest.raises(DataError, match=text):
            Users(file, None).read(0, len(ids))
    pq.write_table(pa.table({"user": ["a"]}), file)
    with pytest.raises(DataError, match="no column 'user_id'; found user"):
        Users(file, None)
    with pytest.raises(DataError, match="no users to score"):
        Users(None, None)
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="no file in it"):
        Users(tmp_path / "empty", None)
