"""Every request has a deadline that starts at its first byte, and a place in a bounded queue."""

import asyncio
import threading

import pytest
from oracles import PATIENCE_S

from recsys.serving import catalog_changes
from recsys.serving.api.recommendations import AT_ONCE
from recsys.serving.api.routes import ROUTES
from recsys.serving.off_loop import OffLoop

URL = "/v1/recommendations"
UNHURRIED = {
    ("DELETE", "/v1/aliases/{name}"),
    ("PUT", "/v1/aliases/{name}"),
    ("POST", "/v1/aliases/{name}/rollback"),
}


@pytest.fixture
async def hurried(settings, recommender, running):
    short = settings.model_copy(update={"deadline_ms": 300.0})
    async with running(short, recommender=recommender) as found:
        yield found


def test_few_routes_have_no_deadline():
    found = {
        (method, route.path_format)
        for route in ROUTES
        for method in route.methods
        if getattr(route.endpoint, "unhurried", False)
    }
    assert found == UNHURRIED


async def test_a_body_that_does_not_end_is_not_awaited_for_ever(hurried):
    async def endless():
        yield b" "
        await asyncio.Event().wait()

    headers = {"content-type": "application/json"}
    answer = await hurried[0].post(URL, content=endless(), headers=headers)
    assert (answer.status_code, answer.json()["code"]) == (504, "deadline_exceeded")


@pytest.mark.parametrize(
    "asked",
    [
        "GET /v1/lists/trending", "GET /v1/lists/latest", "GET /v1/lists/together?item=item-1",
        "GET /v1/users/u/history", "DELETE /v1/users/u", "GET /v1/today", "GET /v1/rules",
        "GET /v1/items", "GET /v1/items/item-1/similar",
    ],
)  # fmt: skip
async def test_what_hangs_is_not_awaited_for_ever(hurried, monkeypatch, asked):
    client, service = hurried

    async def for_ever(*_, **__):
        await asyncio.Event().wait()

    monkeypatch.setattr(OffLoop, "__call__", for_ever)
    for name in ("events", "erase", "newest_places"):
        monkeypatch.setattr(service.store.history, name, for_ever)
    answer = await client.request(*asked.split())
    assert (answer.status_code, answer.json()["code"]) == (504, "deadline_exceeded")


async def test_a_change_goes_on_after_its_deadline(hurried, recommender, until):
    client, service = hurried
    free, upsert = threading.Event(), recommender.upsert
    recommender.upsert = lambda items: free.wait(PATIENCE_S) and upsert(items)
    response = await client.put_item("new", {"like": "item-1"})
    assert (response.status_code, response.json()["code"]) == (504, "deadline_exceeded")
    free.set()
    await until(lambda: not service.state.catalog_changes._changes)
    assert (await client.get("/v1/items/new")).status_code == 200
    assert await service.store.journal.read(catalog_changes.JOURNAL)  # it is durable too


async def test_an_erasure_goes_on_after_its_deadline(hurried, monkeypatch, until):
    client, service = hurried
    history, free = service.store.history, asyncio.Event()
    erase = history._erase

    async def erase_late(user):
        await free.wait()
        await erase(user)

    monkeypatch.setattr(history, "_erase", erase_late)
    await client.post("/v1/events", json={"events": [{"user": "u", "item": "item-1"}]})
    assert (await client.delete("/v1/users/u")).status_code == 504
    free.set()
    await until(lambda: not history._erasing)
    assert (await client.get("/v1/users/u/history")).status_code == 404


async def test_a_batch_enters_the_queue_one_by_one(client, service, recommender, until):
    recommender.gate.clear()
    requests = [{"history": [f"item-{i}"], "k": 2} for i in range(60)]
    asked = asyncio.create_task(client.post(f"{URL}/batch", json={"requests": requests}))
    await until(lambda: recommender.busy)
    for _ in range(100):
        await asyncio.sleep(0)
    assert service.state.models.queue_depth() <= AT_ONCE
    recommender.gate.set()
    results = (await asked).json()["results"]
    assert max(recommender.batches) <= AT_ONCE
    for i, result in enumerate(results):
        assert result["status"] == 200, result
        found = [item["item_id"] for item in result["answer"]["items"]]
        assert found == recommender.expected([f"item-{i}"], 2)
