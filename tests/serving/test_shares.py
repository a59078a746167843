"""Lists, histories and figures cost what they take, and no client keeps the others from them."""

import asyncio
import threading
from contextlib import contextmanager
from functools import partial

import pytest

from recsys.serving import reads
from recsys.serving.api import operations, users
from recsys.serving.limits import CALLER, Caller
from recsys.serving.metrics import Metrics
from recsys.serving.reads import Reads
from recsys.serving.stores.sqlite import SqliteStore
from recsys.testing import PATIENCE_S


@pytest.fixture
def store(settings, tmp_path):
    opened = SqliteStore(tmp_path / "histories.db")
    opened.share_reads(partial(Reads, settings))
    yield opened
    opened.close()


async def test_a_client_with_many_pages_does_not_delay_another(store, monkeypatch):
    gate, begun = threading.Event(), []
    query, submit = SqliteStore._query, store._run._submit

    def slow(self, sql, parameters):
        gate.wait(PATIENCE_S)
        return query(self, sql, parameters)

    def noted(timed, *call):  # on the event loop: threads begin in an order of their own
        begun.append(timed.__self__.caller.name)
        return submit(timed, *call)

    monkeypatch.setattr(SqliteStore, "_query", slow)
    monkeypatch.setattr(store._run, "_submit", noted)

    def ask(client, read):
        async def asked():
            CALLER.set(Caller(client, asyncio.get_running_loop().time() + 60))
            return await read

        return asyncio.create_task(asked())

    greedy = [ask("greedy", store.events(f"greedy {n}", 1000)) for n in range(20)]
    greedy += [ask("greedy", store.users(1000, "greedy")) for _ in range(20)]
    await asyncio.sleep(0)
    while len(begun) < store.readers:
        await asyncio.sleep(0.001)
    victim = ask("victim", store.typed_history("victim", 10))
    await asyncio.sleep(0)
    gate.set()
    await asyncio.gather(victim, *greedy)
    assert begun.index("victim") <= store.readers


async def test_requests_of_much_work_do_not_delay_others(client, recommender, monkeypatch):
    gate, begun = threading.Event(), threading.Event()

    @contextmanager
    def aside():
        begun.set()
        assert gate.wait(PATIENCE_S)
        yield recommender

    monkeypatch.setattr(recommender, "aside", aside)
    usual = {"history": [f"item-{i}" for i in range(60)], "k": 10}
    large = [{**usual, "k": 200}, {**usual, "include": ["trace"]}, {**usual, "mode": "strict"}]
    waiting = [asyncio.create_task(client.post("/v1/recommendations", json=one)) for one in large]
    while not begun.is_set():
        await asyncio.sleep(0.001)
    answer = await client.post("/v1/recommendations", json=usual)
    assert answer.status_code == 200
    assert not any(task.done() for task in waiting)
    gate.set()
    assert {answer.status_code for answer in await asyncio.gather(*waiting)} == {200}


async def test_long_histories_do_not_make_their_client_wait(client, monkeypatch):
    monkeypatch.setattr(reads, "LONG_S", -1.0)
    monkeypatch.setattr(reads, "REST", 1e6)
    body = {"user": "ada", "k": 1}
    for _ in range(2):
        assert (await client.post("/v1/recommendations", json=body)).status_code == 200


async def test_reads_for_no_request_wait_for_no_share(store, monkeypatch):
    """A change goes on after the deadline of its request, and reads the journal."""
    CALLER.set(Caller("late", asyncio.get_running_loop().time() - 1))
    assert (await store.journal("catalog")).records == []
    assert await store.state_get("aliases") is None


@pytest.mark.parametrize("path", ["/metrics", "/v1/stats"])
async def test_figures_are_made_once_a_second(client, monkeypatch, path):
    now, made = [100.0], []
    monkeypatch.setattr(operations, "monotonic", lambda: now[0])
    for name, owner in (("exposition", Metrics), ("_stats", operations)):
        function = getattr(owner, name)
        counted = lambda *given, call=function: (made.append(call), call(*given))[1]  # noqa: E731
        monkeypatch.setattr(owner, name, counted)
    answers = await asyncio.gather(*(client.get(path) for _ in range(20)))
    assert {answer.status_code for answer in answers} == {200}
    assert len(made) == len({answer.text for answer in answers}) == 1
    now[0] += 0.99
    await client.get(path)
    assert len(made) == 1
    now[0] += 0.01
    await client.get(path)
    assert len(made) == 2


async def test_a_page_of_events_is_written_beside_the_event_loop(client, monkeypatch):
    threads = []

    def page(*given):
        threads.append(threading.current_thread().name)
        return original(*given)

    original = users.page
    monkeypatch.setattr(users, "page", page)
    response = await client.get("/v1/users/ada/history")
    assert [event["item"] for event in response.json()["events"]] == ["item-2", "item-1"]
    assert threads[0].startswith("helper")


@pytest.mark.parametrize(
    ("path", "units"),
    [
        ("/v1/users/ada/history", 1),
        ("/v1/users/ada/history?limit=1000", 10),
        ("/v1/users?limit=1000", 10),
        ("/v1/rules?limit=200", 2),
        ("/v1/rule-changes?limit=1000", 10),
        ("/v1/items?limit=200", 2),
        ("/v1/stats", 1),
    ],
)
async def test_a_list_costs_what_it_may_hold(settings, recommender, running, path, units):
    limited = settings.model_copy(update={"rate_limit": 1e-6, "rate_burst": 20})
    async with running(limited, recommender=recommender) as (client, _):
        for _ in range(20 // units):
            assert (await client.get(path)).status_code == 200
        assert (await client.get(path)).status_code == 429
