"""Lists, histories and figures cost what they take, and no client keeps the others from them."""

import asyncio
import threading
import tracemalloc
from contextlib import contextmanager
from functools import partial

import pytest
from oracles import PATIENCE_S
from starlette.responses import Response

from recsys.serving import middleware, shared_changes
from recsys.serving.api import operations
from recsys.serving.bodies import LARGE
from recsys.serving.daily_figures import Tally
from recsys.serving.event_columns import EventColumns
from recsys.serving.metrics import Metrics
from recsys.serving.middleware import PART, Entrance, Guard
from recsys.serving.stores.records import Act, Given

EXPERIMENT = {"arms": [{"alias": "champion", "weight": 1.0}, {"alias": "none", "weight": 1.0}]}
GET = {"type": "http", "method": "GET", "path": "/", "raw_path": b"/", "query_string": b""}


def entrance_to(text, settings):
    """The entrance of an application that answers with this text."""

    async def app(scope, receive, send):
        await Response(text if scope["path"] == "/" else b"")(scope, receive, send)

    metrics = Metrics()
    return Entrance(app, Guard(settings, metrics), settings, metrics)


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


async def test_large_answers_of_batches_are_bounded_together(client, service):
    small = {"history": ["item-1"], "k": 1}
    large = {"history": [f"{'x' * 200}{number}" for number in range(200)], "k": 1}
    alone = len((await client.post("/v1/recommendations", json=large)).content)
    room = service.state.answer_bytes
    room.most = int(2.5 * (alone - LARGE))

    async def statuses(*requests):
        answer = await client.post("/v1/recommendations/batch", json={"requests": requests})
        assert answer.status_code == 200
        return [result["status"] for result in answer.json()["results"]]

    assert alone > LARGE
    assert await statuses(*[large, small] * 4) == [200, 200, 200, 200, 429, 200, 429, 200]
    assert room.taken == 0
    assert await statuses(large, large) == [200, 200]


async def test_large_answers_that_are_not_read_are_bounded_together(settings, monkeypatch):
    monkeypatch.setattr(middleware, "ANSWERS", 2 * PART)  # less than the answer that is alone
    text, read = bytes(range(256)) * (PART // 64), asyncio.Event()  # four parts
    entrance = entrance_to(text, settings)

    async def ask(path="/"):
        sent = []

        async def send(message):
            sent.append(message)
            if len(sent) > 2:  # the head and a part are on their way
                await read.wait()

        await entrance(GET | {"path": path, "headers": []}, None, send)
        return sent[0]["status"], b"".join(message["body"] for message in sent[1:])

    slow = asyncio.create_task(ask())
    for _ in range(3):
        await asyncio.sleep(0)
    assert (await ask())[0] == 429
    assert await ask("/small") == (200, b"")
    read.set()
    assert await slow == await ask() == (200, text)


async def test_large_answers_are_sent_in_turns(settings):
    entrance, parts = entrance_to(bytes(4 * PART), settings), []

    async def ask(name):
        async def send(message):  # to a client that reads at once
            parts.extend(name for _ in message.get("body", b"")[:1])

        await entrance(GET | {"headers": []}, None, send)

    await asyncio.gather(ask("a"), ask("b"))
    assert "".join(parts) == "abababab"


async def test_a_large_answer_is_in_memory_twice_at_most(client, service, monkeypatch):
    names, text = [f"new-{number}" for number in range(60)], "\U0001f600" * 900
    for name in names:
        item = {"semantic_id": [0, 0, 0], "attributes": {"categories": [text] * 4}}
        assert (await client.put_item(name, item)).status_code < 300
    submit, peaks = service.off_loop._submit, []

    def traced(function, *arguments):
        tracemalloc.start()
        result = function(*arguments)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        return result

    monkeypatch.setattr(service.off_loop, "_submit", partial(submit, traced))
    body = {"history": [], "k": 60, "filter": {"must": [{"key": "item_id", "any": names}]}}
    for request in (
        client.get("/v1/lists/latest?k=60&include=metadata"),
        client.post("/v1/recommendations", json={**body, "include": ["metadata"]}),
    ):
        answer = await request
        assert len(answer.json()["items"]) == 60
        assert peaks[-1] < 2.5 * len(answer.content)  # the JSON of each item, and the whole


async def test_changes_that_wait_are_bounded(client, service, monkeypatch, until):
    monkeypatch.setattr(shared_changes, "MAX_CHANGES", 2)
    state = service.state
    for part, method, path, body in (
        (state.rules, "PUT", "/v1/rules/sale", {"pin": ["item-1"]}),
        (state.experiments, "PUT", "/v1/experiments/sale", EXPERIMENT),
        (state.aliases, "POST", "/v1/aliases/sale/rollback", None),
        (state.catalog_changes, "DELETE", "/v1/items/none", None),
    ):
        async with part._changing:
            requests = [client.request(method, path, json=body) for _ in range(2)]
            asked = [*map(asyncio.create_task, requests)]
            await until(lambda part=part: part._changing._clients == 2)
            answer = await client.request(method, path, json=body)
            assert (answer.status_code, answer.json()["code"]) == (429, "queue_full")
        assert {answer.status_code for answer in await asyncio.gather(*asked)} <= {200, 404, 422}
    state.rules._changing._clients = 2
    await state.rules.stand("champion", [])  # else an alias has its bundle, and the call is refused


async def test_an_answer_that_is_not_read_by_its_deadline_is_cut_off(settings):
    hasty = settings.model_copy(update={"deadline_ms": 0.0})
    entrance, sent = entrance_to(bytes(2 * PART), hasty), []

    async def send(message):
        sent.append(message)
        if len(sent) > 1:  # the head is on its way, a part is not read
            await asyncio.Event().wait()

    async with asyncio.timeout(PATIENCE_S):  # the server then closes the connection
        await entrance(GET | {"headers": []}, None, send)
    assert len(sent) == 2
    assert entrance._answers.taken == 0


async def test_long_ids_of_events_take_no_memory(service):
    face, pages, size = "\U0001f600" * 250, 10, 500
    epoch = service.state.models.get().recommender.epoch

    def names(page):
        return [f"{face}{page} {n}" for n in range(size)]

    tracemalloc.start()
    try:
        events = EventColumns(pages * size, ())
        for page in range(pages):
            acts = [Act(name, name, "click", n, name) for n, name in enumerate(names(page))]
            events.add(acts, epoch.catalog.known)
        tally = Tally(epoch, events)
        for page in range(pages):
            answers = [Given(n, name, name, "[]", n) for n, name in enumerate(names(page))]
            tally.add_answers(answers)
        del acts, answers
        assert tracemalloc.get_traced_memory()[0] < 200 * pages * size
    finally:
        tracemalloc.stop()
    figures = tally.figures((0, 1), True, True)
    assert (figures.people, figures.rates[0].followed) == (pages * size, pages * size)


async def test_batches_leave_room_in_the_queue(settings, recommender, running, until):
    tight = settings.model_copy(update={"queue_limit": 8, "max_batch": 1})
    async with running(tight, recommender=recommender) as (client, service):
        recommender.gate.clear()
        path, batch = "/v1/recommendations", {"requests": [{"history": ["item-1"]}] * 10}
        batches = [asyncio.create_task(client.post(f"{path}/batch", json=batch)) for _ in range(4)]
        await until(lambda: recommender.busy and service.state.batched.locked())
        single = [client.post(path, json={"history": ["item-2"]}) for _ in range(6)]
        singles = [asyncio.create_task(one) for one in single]
        await until(lambda: service.state.models.queue_depth() == 7)
        recommender.gate.set()
        assert {answer.status_code for answer in await asyncio.gather(*singles)} == {200}
        for answer in await asyncio.gather(*batches):
            assert {result["status"] for result in answer.json()["results"]} == {200}


async def test_metrics_are_made_once_a_second(client, monkeypatch):
    path, function = "/metrics", Metrics.exposition
    now, made = [100.0], []
    monkeypatch.setattr(operations, "monotonic", lambda: now[0])

    def counted(*given):
        made.append(1)
        return function(*given)

    monkeypatch.setattr(Metrics, "exposition", counted)
    answers = await asyncio.gather(*(client.get(path) for _ in range(20)))
    assert {answer.status_code for answer in answers} == {200}
    assert len(made) == len({answer.text for answer in answers}) == 1
    now[0] += 0.99
    await client.get(path)
    assert len(made) == 1
    now[0] += 0.01
    await client.get(path)
    assert len(made) == 2


@pytest.mark.parametrize(
    ("path", "units"),
    [
        ("/v1/users/ada/history", 1),
        ("/v1/users/ada/history?limit=1000", 10),
        ("/v1/items?limit=200", 2),
        ("/v1/rank", 2),
    ],
)
async def test_a_list_costs_what_it_may_hold(settings, recommender, running, path, units):
    limited = settings.model_copy(update={"rate_limit": 1e-6, "rate_burst": 20})
    async with running(limited, recommender=recommender) as (client, _):
        body = {"history": [], "items": [f"item-{number}" for number in range(100)]}
        ranks = path == "/v1/rank"
        for _ in range(20 // units):
            answer = await (client.post(path, json=body) if ranks else client.get(path))
            assert answer.status_code == 200
        assert (await client.get(path)).status_code == 429
