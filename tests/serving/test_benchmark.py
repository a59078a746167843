"""`benchmarks/serve.py`: loops over HTTP, requests, equality under load, errors."""

import json
import re
from contextlib import asynccontextmanager
from itertools import islice

import numpy as np
import pyarrow as pa
import pytest
from load_client import Client, Run
from serve import Options, Workload, compare, draw_arrivals, report, start_and_measure

from recsys.constraint.filters import ItemFilter
from recsys.errors import ConfigError, RecsysError
from recsys.testing import start_server


@pytest.fixture
def talking(answering):
    @asynccontextmanager
    async def talk(answer):
        async with answering(answer) as server, Client(server, "/v1/x", key="rk_x") as client:
            yield client

    return talk


async def test_a_request_is_sent_with_its_body_and_the_key(talking):
    heard = []

    def answer(head, body):
        heard.append((head, body))
        return {"n": 1}

    async with talking(answer) as client:
        reply = await client.send(b'{"a": [1]}')
    assert (reply.status, json.loads(reply.body)) == (200, {"n": 1})
    ((head, body),) = heard
    assert head.startswith("POST /v1/x HTTP/1.1\r\n")
    assert "Authorization: Bearer rk_x\r\n" in head
    assert json.loads(body) == {"a": [1]}


async def test_a_broken_connection_counts_as_an_error(talking):
    async with talking(lambda head, body: None) as client:
        assert (await client.send(b"1")).status == 0
        run = await client.closed(iter([b"1"] * 3), 1)
    assert (run.statuses, run.errors, run.latency_ms) == ({0: 3}, 3, [])


async def test_a_closed_loop_sends_every_request_once(talking):
    async with talking(lambda head, body: json.loads(body)) as client:
        requests = [b"%d" % i for i in range(40)]
        run = await client.closed(iter(requests), 4, keep=True)
    assert sorted(json.loads(reply.body) for reply in run.replies) == list(range(40))
    assert all(json.loads(reply.request) == json.loads(reply.body) for reply in run.replies)
    assert (run.errors, len(run.latency_ms)) == (0, 40)
    assert 0 < run.percentile(50) <= run.percentile(99)


async def test_bad_answers_are_counted_by_status_and_not_timed(talking):
    codes = iter([200, 429, 500, 200])
    async with talking(lambda head, body: (next(codes), {})) as client:
        run = await client.closed(iter([b"1"] * 4), 1)
    assert run.statuses == {200: 2, 429: 1, 500: 1}
    assert (run.errors, len(run.latency_ms), run.replies) == (2, 2, [])


async def test_an_open_loop_counts_latency_from_the_due_time(talking):
    async with talking(lambda head, body: {}) as client:
        run = await client.open([b"1"] * 9, [0.0, 0.01, -1.0])
    assert len(run.latency_ms) == 3
    assert max(run.latency_ms) >= 1000, "the request that was due a second ago"


def test_an_open_loop_is_a_poisson_process_of_its_rate():
    due = np.array(draw_arrivals(400, 50.0, seed=3))
    assert (np.diff(due) > 0).all()
    assert due[-1] < 50
    assert len(due) == pytest.approx(400 * 50, rel=0.03)
    assert np.diff(due).std() == pytest.approx(1 / 400, rel=0.05)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory, random_bundle):
    return random_bundle(
        tmp_path_factory.mktemp("bundles") / "tiny",
        50,
        price=[i / 2 for i in range(50)],
        brand=["a" if i % 2 else "b" for i in range(50)],
        tags=[["x", "y"][: i % 3] for i in range(50)],
        nothing=pa.array([None] * 50, pa.string()),
    )


def bodies(requests, count):
    return [json.loads(request) for request in islice(requests, count)]


def test_a_seed_gives_the_same_requests_all_different(bundle):
    first, again = (bodies(Workload(bundle, 1).mixed(), 50) for _ in range(2))
    assert first == again
    assert first != bodies(Workload(bundle, 2).mixed(), 50)
    assert len({json.dumps(body) for body in first}) == 50


def test_mixed_requests_use_every_field_and_are_valid(bundle):
    found = bodies(Workload(bundle).mixed(), 300)
    keys = {clause["key"] for body in found for clause in body.get("filter", {}).get("must", [])}
    assert keys == {"price", "brand", "tags"}
    for body in found:
        ItemFilter.parse(body.get("filter", {}))
    assert {body["k"] for body in found} == {1, 5, 10, 20, 50}
    assert any(not body["history"] for body in found)
    assert any("no-such-item" in body["history"] for body in found)
    assert any("exclude_items" in body for body in found)
    assert {body["exclude_seen"] for body in found} == {True, False}


class Fake:
    """Answers recommendations; from `lie_from` requests on, with other scores."""

    def __init__(self):
        self.count, self.lie_from = 0, 10**9

    def __call__(self, head, body):
        self.count += 1
        score = len(json.loads(body)["history"]) + (self.count > self.lie_from)
        items = [{"item_id": "i0", "score": score}]
        return {"items": items, "eligible_items": 3}


async def equality(talking, fake, bundle):
    async with talking(fake) as client:
        return await compare(client, Workload(bundle), Options(concurrency=(8,), checks=40))


async def test_equal_answers_are_counted_as_equal(talking, bundle):
    found = await equality(talking, Fake(), bundle)
    assert (found["compared"], found["different"], found["errors"]) == (40, 0, 0)


async def test_a_slow_server_is_asked_fewer_questions(talking, bundle):
    async with talking(Fake()) as client:
        options = Options(concurrency=(8,), seconds=1e-9, checks=40)
        found = await compare(client, Workload(bundle), options)
    assert found["compared"] == found["requests"] < 40


async def test_an_answer_that_changes_under_load_is_shown(talking, bundle):
    fake = Fake()
    fake.lie_from = 79  # the last one
    found = await equality(talking, fake, bundle)
    assert found["different"] == 1
    assert found["first_different"]["field"] == "items"


def row(key, value):
    return {
        key: value, "answers": 100, "rate": value, "p50_ms": 10.0, "p95_ms": 20.0, "p99_ms": None,
        "errors": 0, "generator_cpu": 0.1, "server_cpu": 0.9, "server_cpu_ms": 9.0,
        "server_mb": 500,
    }  # fmt: skip


def test_a_report_has_both_loops_and_the_comparison():
    equal = {"compared": 38, "requests": 40, "clients": 8, "different": 1, "errors": 1}
    document = {
        "closed": [row("clients", 1), row("clients", 8)],
        "open": [row("sent_rate", 10)],
        "equality": {**equal, "refused_alone": {"422": 2}},
    }
    found = report(document)
    assert [len(table.rows) for table in found.tables] == [2, 1]
    assert found.sentences == [
        "38 of 40 mixed requests compared, 8 clients against one: 1 different, 1 errors.",
        "Refused without load, by status: {'422': 2}.",
    ]


def test_a_run_without_answers_has_no_percentile():
    assert (Run().percentile(50), Run().rate) == (None, 0.0)


async def test_a_server_that_cannot_start_reports_the_reason(tmp_path):
    with pytest.raises(RecsysError, match=r"did not start: .*nothing is not an artifact"):
        async with start_server(tmp_path / "nothing"):
            pass


async def test_an_address_that_is_none_is_named(bundle):
    with pytest.raises(ConfigError, match=re.escape("--url https://x: expected http://HOST:PORT")):
        await start_and_measure(Options(bundle=bundle, url="https://x"))
