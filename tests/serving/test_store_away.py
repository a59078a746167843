"""The service without its store: at the start, and later."""

import sqlite3

import pytest

from recsys.serving import service as service_module
from recsys.serving.stores import sqlite
from recsys.serving.stores.records import StoreError


async def test_a_start_without_the_store_fails_with_its_reason(
    settings, recommender, running, monkeypatch
):
    def away(*arguments, **options):
        raise StoreError("store postgresql://db/shop: connection refused")

    monkeypatch.setattr(service_module, "open_store", away)
    async with running(settings, recommender=recommender) as (client, service):
        assert "connection refused" in str(service.failure)
        assert (await client.get("/health/ready")).status_code == 503


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


async def test_a_locked_store_is_noticed_and_answered_in_time(
    settings, recommender, running, monkeypatch
):
    # A write may come while another one waits, and then waits as long itself.
    default = type(settings).model_fields["deadline_ms"].default / 1000
    assert default / 2 > 2 * sqlite.BUSY_TIMEOUT_S
    monkeypatch.setattr(sqlite, "BUSY_TIMEOUT_S", 0.05)
    async with running(settings, recommender=recommender) as (client, service):
        lock = sqlite3.connect(settings.store, isolation_level=None)
        lock.execute("BEGIN IMMEDIATE")
        event = {"events": [{"user": "ada", "item": "item-3"}]}
        response = await client.post("/v1/events", json=event)
        assert (response.status_code, response.json()["code"]) == (503, "store_unavailable")
        lock.execute("ROLLBACK")
        lock.close()
        assert (await client.post("/v1/events", json=event)).status_code == 200
        assert not service.store.database.is_away
