import asyncio
import contextlib
import threading
import time
from contextlib import closing

import pytest
from oracles import PATIENCE_S

from recsys.serving.stores import open_store
from recsys.serving.stores import postgres as postgres_module
from recsys.serving.stores.records import Appended, StoreError


async def test_calls_fail_without_the_server_and_work_afterwards(postgres, opened, event):
    store = opened(postgres.url)
    await store.history.append([event("1", item="before")])
    await store.state.change("k", dict.clear)
    await asyncio.gather(
        *(store.history.read("ada", 9) for _ in range(20))
    )  # every reader connects
    for mode in ("immediate", "fast"):
        await asyncio.to_thread(postgres.stop, mode)
        for _ in range(3):
            with pytest.raises(
                StoreError, match=r"^store postgresql://127\.0\.0\.1:\d+/postgres: "
            ):
                await store.history.read("ada", 9)
            with pytest.raises(StoreError, match="check that the server runs"):
                await store.history.append([event(f"lost-{mode}")])
        with pytest.raises(StoreError, match="postgres"):
            opened(postgres.url)
        await asyncio.to_thread(postgres.start)
        async with asyncio.timeout(PATIENCE_S):
            while True:
                try:
                    await store.history.append([event(f"after-{mode}", item=mode)])
                    break
                except StoreError:
                    await asyncio.sleep(0.01)
        found = await asyncio.gather(*(store.history.read("ada", 9) for _ in range(20)))
        assert [history.items[0] for history in found if history] == ["before"] * 20
    assert (await store.history.read("ada", 9)).items == ["before", "immediate", "fast"]
    assert await store.history.append([event("1", item="before")]) == Appended(duplicates=1)


async def test_calls_of_a_server_that_hangs_fail_at_once(postgres, opened, event, monkeypatch):
    monkeypatch.setattr(postgres_module, "AWAY_S", 600.0)
    store = opened(postgres.url)
    await store.history.append([event("1")])
    await asyncio.gather(*(store.history.read("ada", 9) for _ in range(20)))
    assert not store.database.is_away
    tried = []
    limited = store.database.limited
    monkeypatch.setattr(store.database, "limited", lambda c: (tried.append(1), limited(c))[1])
    await asyncio.to_thread(postgres.freeze)
    try:
        async with asyncio.timeout(PATIENCE_S):
            with pytest.raises(StoreError):
                await store.history.read("ada", 9)
            before = len(tried)
            for _ in range(50):
                with pytest.raises(StoreError, match="did not answer a moment ago"):
                    await store.history.read("ada", 9)
                with pytest.raises(StoreError, match="did not answer a moment ago"):
                    await store.history.append([event("lost")])
        assert len(tried) == before  # not one of them reached the database
        assert store.database.is_away
    finally:
        await asyncio.to_thread(postgres.thaw)
    store.database._again_at = time.monotonic()  # the pause is over
    assert (await store.history.read("ada", 9)).items == ["x"]
    assert not store.database.is_away


async def test_a_store_closes_while_its_server_hangs(postgres, opened, event):
    store = opened(postgres.url)
    await store.history.append([event("1")])
    await store.history.read("ada", 9)
    await asyncio.to_thread(postgres.freeze)
    try:
        calls = [
            store.history.append([event("2")]),
            *(store.history.read("ada", 9) for _ in range(9)),
        ]
        waiting = asyncio.gather(*calls, return_exceptions=True)
        await asyncio.sleep(0)
        async with asyncio.timeout(PATIENCE_S):
            await asyncio.to_thread(store.close)
            assert {type(outcome) for outcome in await waiting} == {StoreError}
    finally:
        await asyncio.to_thread(postgres.thaw)


async def test_a_connection_that_the_server_ends_is_replaced(postgres, opened, event):
    store = opened(postgres.url)
    await store.history.append([event("1")])
    await store.history.read("ada", 9)
    admin = store.database._connect()
    admin.execute(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
        " WHERE application_name = 'recsys' AND pid <> pg_backend_pid()"
    )
    admin.close()
    assert await store.history.append([event("2", item="y")]) == Appended(accepted=1)
    assert (await store.history.read("ada", 9)).items == ["x", "y"]


async def test_a_database_that_was_read_only_for_a_while_is_written_again(postgres, opened, event):
    store = opened(postgres.url)
    await store.history.append([event("1")])
    with closing(store.database._connect()) as admin:
        admin.execute("ALTER DATABASE postgres SET default_transaction_read_only = on")
        admin.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
            " WHERE application_name = 'recsys' AND pid <> pg_backend_pid()"
        )
        for _ in range(2):
            with pytest.raises(StoreError, match="read-only transaction"):
                await store.history.append([event("2", item="y")])
        admin.execute("ALTER DATABASE postgres RESET default_transaction_read_only")
    with contextlib.suppress(StoreError):  # a session from before
        await store.history.append([event("2", item="y")])
    await store.history.append([event("2", item="y")])
    assert (await store.history.read("ada", 9)).items == ["x", "y"]


@pytest.mark.parametrize(
    ("default", "wanted"), [("off", "on"), ("local", "local"), ("remote_apply", "remote_apply")]
)
async def test_events_are_synced_whatever_the_default_of_the_database(
    postgres, opened, default, wanted
):
    store = opened(postgres.url)
    with closing(store.database._connect()) as admin:
        admin.execute(f"ALTER DATABASE postgres SET synchronous_commit = {default}")
        with closing(store.database._connect()) as connection:
            assert connection.execute("SHOW synchronous_commit").fetchone() == (wanted,)
        admin.execute("ALTER DATABASE postgres RESET synchronous_commit")


async def test_processes_that_deadlock_on_events_both_succeed(postgres, opened, event):
    here, there = opened(postgres.url), opened(postgres.url)
    for round_ in range(3):
        batch = [event(f"{round_}-{i}") for i in range(2000)]
        done = await asyncio.gather(here.history.append(batch), there.history.append(batch[::-1]))
        assert sum(outcome.accepted for outcome in done) == 2000
        assert sum(outcome.duplicates for outcome in done) == 2000


async def test_an_erasure_waits_for_events_of_the_user_that_are_being_written(
    postgres, opened, event, monkeypatch
):
    """Otherwise they would stay, since it is committed without having seen them."""
    import psycopg

    writer, eraser = opened(postgres.url), opened(postgres.url)
    written, goes_on, insert = threading.Event(), threading.Event(), writer.database.insert_events

    def slow(connection, rows):
        insert(connection, rows)
        written.set()
        goes_on.wait(PATIENCE_S)

    monkeypatch.setattr(writer.database, "insert_events", slow)
    appending = asyncio.create_task(writer.history.append([event("1")]))
    await asyncio.to_thread(written.wait, PATIENCE_S)
    erasing = asyncio.create_task(eraser.history.erase("ada"))
    waiting = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted"
    with psycopg.connect(postgres.url) as watcher:
        while not erasing.done() and not watcher.execute(waiting).fetchone()[0]:
            watcher.rollback()
            await asyncio.sleep(0)
    goes_on.set()
    await asyncio.gather(appending, erasing)
    assert await eraser.history.read("ada", 10) is None


async def test_many_processes_may_start_at_once_on_an_empty_database(postgres, opened):
    stores = await asyncio.gather(*(asyncio.to_thread(opened, postgres.url) for _ in range(5)))
    assert len({store.database.salt for store in stores}) == 1


def test_the_error_of_an_unreachable_server_hides_its_password():
    pytest.importorskip("psycopg")
    with pytest.raises(StoreError, match=r"^store postgresql://127\.0\.0\.1:\d+/shop: ") as caught:
        open_store("postgresql://me:hush@127.0.0.1:1/shop")
    assert "hush" not in str(caught.value)
