import asyncio
import logging
import math

import pytest

from recsys.errors import ConfigError
from recsys.testing import PATIENCE_S


class Observer:
    def __init__(self):
        self.hits, self.calls = [], []

    def history_cache(self, *, hit):
        self.hits.append(hit)

    def store_call(self, operation, seconds):
        assert seconds >= 0
        self.calls.append(operation)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "histories.db"


@pytest.fixture
def short(monkeypatch):
    """Redis is left alone for a moment only, and given time on a busy machine."""
    import recsys.serving.stores.cache as module

    monkeypatch.setattr(module, "AWAY_S", 0.05)
    monkeypatch.setattr(module, "TIMEOUT_S", 2.0)


pytestmark = pytest.mark.usefixtures("short")


async def test_a_history_is_read_once_and_then_comes_from_redis(path, redis, opened, event):
    observer = Observer()
    store = opened(path, history_cache=redis.url, observer=observer)
    await store.history.append([event("1", item="x"), event("2", item="y")])
    for _ in range(3):
        assert (await store.history.read("ada", 10)).items == ["x", "y"]
        assert await store.history.read("nobody", 10) is None
    assert (await store.history.read("ada", 1)).items == ["y"]
    assert observer.hits == [False, False, True, True, True, True, False]
    assert observer.calls == ["append"] + ["history"] * 7


async def test_processes_with_one_cache_see_an_event_at_once(path, redis, opened, event):
    here, there = (opened(path, history_cache=redis.url) for _ in range(2))
    for i in range(10):
        writer, reader = (here, there) if i % 2 else (there, here)
        await writer.history.append([event(f"{i}", item=f"i{i}", time_ms=i)])
        expected = [f"i{j}" for j in range(i + 1)]
        assert (await reader.history.read("ada", 100)).items == expected
        assert (await writer.history.read("ada", 100)).items == expected
    await here.history.erase("ada")
    assert await there.history.read("ada", 100) is None


async def test_a_read_during_a_write_caches_nothing_old(path, redis, opened, event):
    store = opened(path, history_cache=redis.url)
    await store.history.append([event("1", item="old")])
    loop = asyncio.get_running_loop()

    def read(user, limit):
        """The cache has nothing. A slow reader reads the store, and then there is a write."""
        history = store.history._read(user, limit)
        write = store.history.append([event("2", item="new", time_ms=2000)])
        asyncio.run_coroutine_threadsafe(write, loop).result(PATIENCE_S)
        return history

    old = await asyncio.to_thread(store._cache.history, "ada", 10, read)
    assert old.items == ["old"]
    assert (await store.history.read("ada", 10)).items == ["old", "new"]


async def test_a_seed_disowns_every_cached_history(path, redis, opened, write_dataset):
    store, other = (opened(path, history_cache=redis.url) for _ in range(2))
    assert await other.history.read("ada", 10) is None
    store.history.seed(write_dataset([("ada", "x", 1)]))
    assert (await other.history.read("ada", 10)).items == ["x"]


async def test_a_dead_redis_is_logged_once_and_histories_stay_right(
    path, redis, opened, event, caplog
):
    caplog.set_level(logging.INFO, "recsys.serving.stores")
    logging.getLogger("serving").propagate = True
    store = opened(path, history_cache=redis.url)
    await store.history.append([event("1", item="a")])
    assert (await store.history.read("ada", 10)).items == ["a"]
    redis.stop()
    for i in range(3):
        await store.history.append([event(f"more-{i}", item=f"b{i}", time_ms=2000 + i)])
        assert (await store.history.read("ada", 10)).items[-1] == f"b{i}"
        store._cache._away_until = 0.0
    told = [record for record in caplog.records if "histories are read from" in record.message]
    assert len(told) == 1
    redis.start()
    store._cache._away_until = 0.0
    for _ in range(2):
        assert (await store.history.read("ada", 10)).items == ["a", "b0", "b1", "b2"]
    assert [r for r in caplog.records if "Redis is back" in r.message]


async def test_histories_are_invalidated_when_redis_returns(path, redis, opened, event):
    """It keeps its memory here: only the way to it is cut."""
    store, other = (opened(path, history_cache=redis.url) for _ in range(2))
    await store.history.append([event("1", item="a")])
    assert (await other.history.read("ada", 10)).items == ["a"]  # is cached
    store._cache._away_until = math.inf
    await store.history.append([event("2", item="b", time_ms=2000)])
    assert (await store.history.read("ada", 10)).items == ["a", "b"]
    store._cache._away_until = 0.0
    assert (await store.history.read("ada", 10)).items == ["a", "b"]
    assert (await other.history.read("ada", 10)).items == ["a", "b"]


async def test_a_redis_that_returns_with_an_older_copy_brings_no_old_history_back(
    path, redis, opened, event
):
    """No call fails: the client's library replaces the connections that were cut."""
    import redis as client

    store, other = (opened(path, history_cache=redis.url) for _ in range(2))
    await store.history.append([event("1", item="a")])
    for process in (store, other):
        assert (await process.history.read("ada", 10)).items == ["a"]
    with client.Redis.from_url(redis.url) as admin:
        admin.save()
    await store.history.append([event("2", item="b", time_ms=2000)])
    await asyncio.to_thread(redis.stop)
    await asyncio.to_thread(redis.start)
    for process in (other, store):
        assert (await process.history.read("ada", 10)).items == ["a", "b"]
        process._cache._away_until = 0.0
        assert (await process.history.read("ada", 10)).items == ["a", "b"]
    (redis.home / "dump.rdb").unlink()


async def test_an_evicted_token_brings_no_old_history_back(path, redis, opened, event):
    import redis as client

    store = opened(path, history_cache=redis.url)
    await store.history.append([event("1", item="a")])
    await store.history.read("ada", 10)
    with client.Redis.from_url(redis.url) as admin:
        kept = {key: admin.get(key) for key in admin.keys("*:10")}
        await store.history.append([event("2", item="b", time_ms=2000)])
        await store.history.read("ada", 10)
        for key in admin.keys("*"):
            admin.delete(key)
        for key, value in kept.items():  # the old one survives, its tokens do not
            admin.set(key, value)
    assert (await store.history.read("ada", 10)).items == ["a", "b"]


async def test_stores_that_share_a_redis_do_not_share_users(path, redis, opened, event):
    one = opened(path, history_cache=redis.url)
    two = opened(path.with_name("two.db"), history_cache=redis.url)
    await one.history.append([event("1", item="a")])
    assert (await one.history.read("ada", 10)).items == ["a"]
    assert await two.history.read("ada", 10) is None


def test_a_url_of_another_kind_is_refused(path, opened):
    pytest.importorskip("redis")
    with pytest.raises(ConfigError, match=r"serve\.history_cache: Redis URL must specify"):
        opened(path, history_cache="memcached://localhost")
