"""Changes of items over HTTP: cursors that do not fit, waits, and keys that are lost meanwhile."""

import asyncio
import itertools
import json

import pytest

from recsys.serving import auth
from recsys.serving import changes as changes_module
from recsys.serving.limits import CALLER, Caller

URL = "/v1/item-changes"


async def changes(client, after="", **query):
    response = await client.get(URL, params={"after": after} | query)
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "application/x-ndjson"
    assert response.headers["cache-control"] == "no-store"
    return [json.loads(line) for line in response.text.splitlines()]


async def add(client, item_id, **more):
    response = await client.put(f"/v1/items/{item_id}", json={"like": "item-1"}, **more)
    assert response.status_code == 200, response.text


async def test_cursors_that_are_not_of_the_store_are_refused(client):
    await add(client, "new")
    (item,) = await changes(client)
    own, position = item["cursor"].split("-")
    wrong = ["x", own, f"{own}-", f"{own}-e{position}", f"{own}-{'9' * 19}", f"{'0' * 16}-1"]
    for after in wrong:
        response = await client.get(URL, params={"after": after})
        assert (response.status_code, response.json()["code"]) == (422, "invalid_request"), after
        assert response.json()["errors"][0]["pointer"] == "/after"


@pytest.mark.parametrize("query", ["limit=0", "limit=201", "wait=-1", "wait=31", "other=1"])
async def test_the_query_is_bounded(client, query):
    assert (await client.get(f"{URL}?{query}")).status_code == 422


async def test_an_answer_waits_for_a_line(client, service, monkeypatch, until):
    monkeypatch.setattr(changes_module, "LOOK_S", 0.01)
    read, looks = service.store.journal_page, itertools.count()
    seen = 0

    async def looking(*arguments):
        nonlocal seen
        seen = next(looks)
        return await read(*arguments)

    monkeypatch.setattr(service.store, "journal_page", looking)
    waiting = asyncio.create_task(changes(client, wait=30))
    await until(lambda: seen > 2)
    assert not waiting.done()
    await add(client, "new")
    (line,) = await waiting
    assert (line["op"], line["item_id"]) == ("upsert", "new")


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
        assert (await client.get(URL)).status_code == 401
        waiting = asyncio.create_task(client.get(URL, params={"wait": 30}, headers=lost))
        await until(lambda: service.metrics.in_flight._value.get() == 1)
        auth.revoke(file, "lost")
        await add(client, "new", headers=other)
        response = await waiting
        assert (response.status_code, response.json()["code"]) == (401, "unauthenticated")
        assert "new" not in response.text
