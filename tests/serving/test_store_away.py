"""The service without its store: at the start, and later."""

import asyncio

import pytest

from recsys.serving import service as service_module
from recsys.serving.service import Phase
from recsys.serving.stores.records import StoreAwayError, StoreError
from recsys.testing import PATIENCE_S


class Attempts:
    """Opens a store after some failures."""

    def __init__(self, failures):
        self.failures, self.made, self.again = failures, 0, asyncio.Event()
        self.open = service_module.open_store

    def __call__(self, *arguments, **options):
        self.made += 1
        if self.made <= self.failures:
            raise StoreAwayError("store postgresql://db/shop: connection refused")
        return self.open(*arguments, **options)


async def test_the_start_waits_for_a_store_that_is_away(
    settings, recommender, running, monkeypatch, until, caplog
):
    attempts = Attempts(3)
    monkeypatch.setattr(service_module, "open_store", attempts)
    monkeypatch.setattr(service_module, "RETRIES_S", (0.001, 0.05))
    async with running(settings, recommender=recommender, wait=False) as (client, service):
        await until(lambda: attempts.made >= 1)
        response = await client.get("/health/ready")
        assert (response.status_code, response.json()["code"]) == (503, "not_ready")
        assert response.json()["detail"].startswith("The store cannot be reached")
        assert (await client.get("/health/live")).status_code == 200
        await until(lambda: service.phase is Phase.READY)
        assert (await client.get("/health/ready")).status_code == 200
    assert attempts.made == 4
    assert "connection refused" in caplog.text


async def test_a_stop_ends_the_wait_for_the_store(
    settings, recommender, running, monkeypatch, until
):
    attempts = Attempts(10**9)
    monkeypatch.setattr(service_module, "open_store", attempts)
    monkeypatch.setattr(service_module, "RETRIES_S", (600.0,))
    async with asyncio.timeout(PATIENCE_S):
        async with running(settings, recommender=recommender, wait=False) as (_, service):
            await until(lambda: attempts.made == 1)
        assert service.phase is Phase.STOPPING
        assert service.failure is None


@pytest.mark.parametrize("without", [False, True])
async def test_readiness_depends_on_the_store_if_it_is_to(
    settings, recommender, running, monkeypatch, without
):
    chosen = settings.model_copy(update={"ready_without_store": without})
    async with running(chosen, recommender=recommender) as (client, service):
        assert (await client.get("/health/ready")).status_code == 200
        monkeypatch.setattr(type(service.store), "reachable", property(lambda _: False))
        response = await client.get("/health/ready")
        assert response.status_code == (200 if without else 503)
        if not without:
            assert "store cannot be reached" in response.json()["detail"]
        body = {"history": ["item-1"]}
        assert (await client.post("/v1/recommendations", json=body)).status_code == 200


async def test_a_locked_store_is_noticed_and_answered_in_time(
    settings, recommender, running, monkeypatch
):
    import sqlite3

    from recsys.serving.stores import sqlite

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
        assert service.store.reachable


async def test_a_call_that_reaches_the_store_makes_it_reachable(settings, recommender, running):
    async with running(settings, recommender=recommender) as (_, service):
        store = service.store
        assert isinstance(store.database.explain(OSError("gone")), StoreError)
        assert not store.reachable
        await store.history.read("ada", 5)
        assert store.reachable
