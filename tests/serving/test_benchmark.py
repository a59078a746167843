"""`benchmarks/serve.py`: loops over HTTP, requests, errors."""

from contextlib import asynccontextmanager

import pytest
from load_client import Client


@pytest.fixture
def talking(answering):
    @asynccontextmanager
    async def talk(answer):
        async with answering(answer) as server, Client(server, "/v1/x", key="rk_x") as client:
            yield client

    return talk


async def test_a_broken_connection_counts_as_an_error(talking):
    async with talking(lambda head, body: None) as client:
        assert (await client.send(b"1")).status == 0
        run = await client.closed(iter([b"1"] * 3), 1)
    assert (run.statuses, run.errors, run.latency_ms) == ({0: 3}, 3, [])


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
