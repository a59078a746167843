"""The service without its store: at the start, and later."""

import asyncio
import threading

import pytest
from oracles import PATIENCE_S

from recsys.serving.stores import history, open_store, sqlite


@pytest.mark.parametrize("without", [False, True])
async def test_readiness_depends_on_the_store_if_it_is_to(
    settings, recommender, running, monkeypatch, without
):
    chosen = settings.model_copy(update={"ready_without_store": without})
    async with running(chosen, recommender=recommender) as (client, service):
        assert (await client.get("/health/ready")).status_code == 200
        monkeypatch.setattr(service.store.database, "is_away", True)
        response = await client.get("/health/ready")
        assert response.status_code == (200 if without else 503)
        if not without:
            assert "store cannot be reached" in response.json()["detail"]
        body = {"history": ["item-1"]}
        assert (await client.post("/v1/recommendations", json=body)).status_code == 200


async def test_an_import_by_another_process_locks_the_store_and_loses_nothing(
    settings, recommender, running, monkeypatch, write_dataset, until
):
    # A write may come while another one waits, and then waits as long itself.
    default = type(settings).model_fields["deadline_ms"].default / 1000
    assert default / 2 > 2 * sqlite.BUSY_TIMEOUT_S
    monkeypatch.setattr(sqlite, "BUSY_TIMEOUT_S", 0.05)
    dataset = write_dataset([("ada", "item-4", 1), ("ada", "item-5", 2)], "newer")
    locked, free, replace_seed = threading.Event(), threading.Event(), history.replace_seed

    def slow(*arguments):
        return locked.set() or (free.wait(PATIENCE_S) and replace_seed(*arguments))

    monkeypatch.setattr(history, "replace_seed", slow)
    async with running(settings, recommender=recommender) as (client, service):

        async def post(item):
            body = {"events": [{"user": "ada", "item": item}]}
            return (await client.post("/v1/events", json=body)).json().get("code")

        assert await post("item-3") is None
        other = asyncio.gather(asyncio.to_thread(open_store, settings.store, histories=dataset))
        await until(locked.is_set)
        assert await post("item-6") == "store_unavailable"
        free.set()
        (await other)[0].close()
        assert await post("item-7") is None
        events = (await client.get("/v1/users/ada/history")).json()["events"]
        assert [event["item"] for event in events] == ["item-7", "item-3", "item-5", "item-4"]
        assert not service.store.database.is_away
