"""`benchmarks/serve.py`: loops over HTTP, requests, errors."""

import json
from contextlib import asynccontextmanager

import pytest
from load_client import Client
from servers import start_server

from recsys.errors import RecsysError


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


async def test_a_server_that_cannot_start_reports_the_reason(tmp_path):
    with pytest.raises(RecsysError, match=r"did not start: .*nothing is not an artifact"):
        async with start_server(tmp_path / "nothing"):
            pass
