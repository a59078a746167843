"""Changes of events and items over HTTP: cursors, waits, and the client that follows."""

import asyncio
import itertools
import json
import re
import shutil
import sqlite3
from pathlib import Path

import pytest

from recsys.serving import auth
from recsys.serving import changes as changes_module
from recsys.serving.client import Client, ServiceError
from recsys.serving.limits import CALLER, Caller
from recsys.serving.schemas.changes import EventRecord
from recsys.serving.stores.records import user_hash

URL = "/v1/event-changes"
STORES = Path(__file__).parents[2] / "docs" / "stores.md"


async def changes(client, after="", **query):
    response = await client.get(URL, params={"after": after} | query)
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "application/x-ndjson"
    assert response.headers["cache-control"] == "no-store"
    return [json.loads(line) for line in response.text.splitlines()]


async def send(client, *events):
    response = await client.post("/v1/events", json={"events": list(events)})
    assert response.status_code == 200, response.text


async def test_events_and_erasures_are_followed_by_a_cursor(client, service):
    assert await changes(client) == []  # without the data set
    await send(
        client,
        {"event_id": "1", "user": "ada", "item": "item-1", "timestamp": 5},
        {"event_id": "2", "user": "eve", "item": "né", "type": "buy", "value": 2.5,
         "recommendation_id": "r", "timestamp": 7.25},
    )  # fmt: skip
    first, second = await changes(client)
    salt = service.store.salt
    assert first | {"cursor": ""} == {
        "cursor": "", "op": "append", "user_hash": user_hash("ada", salt)[:32], "user": "ada",
        "event_id": "1", "item": "item-1", "type": "view", "timestamp": 5.0,
    }  # fmt: skip
    assert second | {"cursor": ""} == {
        "cursor": "", "op": "append", "user_hash": user_hash("eve", salt)[:32], "user": "eve",
        "event_id": "2", "item": "né", "type": "buy", "timestamp": 7.25, "value": 2.5,
        "recommendation_id": "r",
    }  # fmt: skip
    assert await changes(client, limit=1) == [first]
    assert await changes(client, first["cursor"]) == [second]
    assert await changes(client, second["cursor"]) == []
    await client.delete("/v1/users/ada")
    (erased,) = await changes(client, second["cursor"])
    assert (erased["op"], erased["user_hash"]) == ("erase", first["user_hash"])
    assert erased["timestamp"] == service.store.erased(["ada"])["ada"] / 1000
    assert set(erased) == {"cursor", "op", "user_hash", "timestamp"}
    assert await changes(client) == [second, erased]


async def test_cursors_that_are_not_of_the_store_s_events_are_refused(client, service):
    await send(client, {"user": "ada", "item": "item-1"})
    await client.put("/v1/items/new", json={"like": "item-1"})
    (item,) = (await client.get("/v1/item-changes")).text.splitlines()
    (event,) = await changes(client)
    assert event["cursor"].startswith(json.loads(item)["cursor"][:17])
    own, place = event["cursor"].split("-")
    assert place == "e4"  # after the data set
    wrong = ["x", own, f"{own}-", f"{own}-4", f"{own}-e4.2", f"{own}-e5", f"{own}-e1.2.3"]
    wrong += [f"{'0' * 16}-e1", json.loads(item)["cursor"], f"{own}-e{'9' * 19}"]
    for after in wrong:
        response = await client.get(URL, params={"after": after})
        assert (response.status_code, response.json()["code"]) == (422, "invalid_request"), after
        assert response.json()["errors"][0]["pointer"] == "/after"
    assert "begin again" in (await client.get(URL, params={"after": f"{own}-e5"})).text
    response = await client.get("/v1/item-changes", params={"after": event["cursor"]})
    assert response.status_code == 422


@pytest.mark.parametrize("query", ["limit=0", "limit=1001", "wait=-1", "wait=31", "other=1"])
async def test_the_query_is_bounded(client, query):
    assert (await client.get(f"{URL}?{query}")).status_code == 422


@pytest.mark.parametrize("path", [URL, "/v1/item-changes"])
async def test_an_answer_waits_for_a_line(client, service, monkeypatch, until, path):
    monkeypatch.setattr(changes_module, "LOOK_S", 0.01)
    looks = itertools.count(1)
    seen = 0
    for name in ("changes", "journal_page"):
        read = getattr(service.store, name)

        async def looking(*arguments, read=read):
            nonlocal seen
            seen = next(looks)
            return await read(*arguments)

        monkeypatch.setattr(service.store, name, looking)
    waiting = asyncio.create_task(client.get(path, params={"wait": 30}))
    await until(lambda: seen > 2)
    assert not waiting.done()
    await send(client, {"user": "ada", "item": "item-1"})
    await client.put("/v1/items/new", json={"like": "item-1"})
    (line,) = (await waiting).text.splitlines()
    assert json.loads(line)["op"] in ("append", "upsert")


async def test_a_wait_ends_before_the_deadline(settings, recommender, running):
    short = settings.model_copy(update={"deadline_ms": 500.0})
    async with running(short, recommender=recommender) as (client, _):
        assert await changes(client, wait=30) == []


async def test_looks_are_work_of_the_client(monkeypatch):
    monkeypatch.setattr(changes_module, "LOOK_S", 0.0)
    found, charged = iter([[], [], [], ["line"]]), []

    async def read():
        return next(found)

    token = CALLER.set(Caller(None, charged.append))
    try:
        assert await changes_module.wait_for_any(read, 30.0) == ["line"]
        assert charged == [1.0] * 3
        found = iter([[]])
        assert await changes_module.wait_for_any(read, 0.0) == []
    finally:
        CALLER.reset(token)


async def test_a_client_that_leaves_is_waited_for_no_longer(client, service, monkeypatch, until):
    monkeypatch.setattr(changes_module, "LOOK_S", 0.01)
    waiting = asyncio.create_task(client.get(URL, params={"wait": 30}))
    await until(lambda: service.metrics.in_flight._value.get() == 1)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    await until(lambda: service.metrics.in_flight._value.get() == 0)


async def test_a_key_that_is_revoked_during_a_wait_reads_nothing(
    settings, recommender, running, monkeypatch, until
):
    monkeypatch.setattr(changes_module, "LOOK_S", 0.01)
    monkeypatch.setattr(auth, "CHECK_INTERVAL_S", 0.0)
    file = settings.bundle.parent.parent / "keys.json"
    lost, other = (
        {"Authorization": f"Bearer {auth.create(file, name, 'write')}"}
        for name in ("lost", "other")
    )
    guarded = settings.model_copy(update={"keys": file})
    async with running(guarded, recommender=recommender) as (client, service):
        waiting = asyncio.create_task(client.get(URL, params={"wait": 30}, headers=lost))
        await until(lambda: service.metrics.in_flight._value.get() == 1)
        auth.revoke(file, "lost")
        body = {"events": [{"event_id": "1", "user": "ada", "item": "item-1"}]}
        assert (await client.post("/v1/events", json=body, headers=other)).is_success
        response = await waiting
        assert (response.status_code, response.json()["code"]) == (401, "unauthenticated")
        assert "ada" not in response.text


async def test_a_file_that_was_put_back_to_a_copy_is_read_from_the_start(
    settings, recommender, running, tmp_path
):
    path = tmp_path / "histories.db"
    given = settings.model_copy(update={"store": path})
    async with running(given, recommender=recommender) as (client, _):
        await send(client, {"user": "ada", "item": "item-1"})
    shutil.copy(path, tmp_path / "copy.db")
    async with running(given, recommender=recommender) as (client, _):
        await send(client, {"user": "ada", "item": "item-2"})
        (*_, last) = await changes(client)
    copied = given.model_copy(update={"store": tmp_path / "copy.db"})
    async with running(copied, recommender=recommender) as (client, _):
        response = await client.get(URL, params={"after": last["cursor"]})
        assert response.status_code == 422
        assert "begin again" in response.json()["detail"]


def test_the_client_reads_changes(settings, recommender, serving):
    with serving(settings, recommender=recommender) as url, Client(url) as client:
        assert list(client.event_changes()) == []
        client.send_events([{"event_id": f"{n}", "user": f"u{n}", "item": "x"} for n in range(5)])
        read = list(client.event_changes(page=2))
        assert [record.event_id for record in read] == ["0", "1", "2", "3", "4"]
        assert all(isinstance(record, EventRecord) for record in read)
        later = client.event_changes(read[2].cursor, page=1)
        assert [record.event_id for record in later] == ["3", "4"]
        client.forget("u1")
        (erased,) = client.event_changes(read[-1].cursor)
        assert (erased.op, erased.user_hash) == ("erase", read[1].user_hash)
        with pytest.raises(ServiceError, match="begin again"):
            next(client.event_changes("0123456789abcdef-e1"))


def test_the_program_of_the_docs_keeps_a_copy(settings, recommender, serving, tmp_path):
    (program,) = re.findall(r"```python\n(.*?)```", STORES.read_text(encoding="utf-8"), flags=re.S)
    with serving(settings, recommender=recommender) as url, Client(url) as client:
        here = program.replace("http://127.0.0.1:8000", url)
        here = here.replace("warehouse.db", str(tmp_path / "warehouse.db"))

        def copied():
            exec(compile(here, str(STORES), "exec"), {})
            with sqlite3.connect(tmp_path / "warehouse.db") as copy:
                rows = copy.execute("SELECT user, item, value FROM events ORDER BY rowid")
                return rows.fetchall()

        assert copied() == []
        client.send_events([{"user": "ada", "item": "x"}, {"user": "bob", "item": "y", "value": 2}])
        assert copied() == [("ada", "x", None), ("bob", "y", 2.0)]
        client.forget("ada")
        client.send_events([{"user": "bob", "item": "z"}])
        assert copied() == copied() == [("bob", "y", 2.0), ("bob", "z", None)]
