"""Calls on helper threads: after a long one its client rests, and others do not."""

import asyncio
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from recsys.serving import reads
from recsys.serving.batcher import DeadlineExceededError
from recsys.serving.limits import CALLER, Caller
from recsys.serving.reads import Reads


@pytest.fixture
def helpers():
    with ThreadPoolExecutor(2) as threads:
        yield threads


def compute(seconds):
    """Occupy a processor for some of its seconds."""
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


async def call_as(client, function, *arguments, **options):
    CALLER.set(Caller(client))  # of this task only
    return await options.pop("on")(function, *arguments, **options)


async def test_after_a_long_call_only_its_client_rests(settings, helpers, monkeypatch):
    monkeypatch.setattr(reads, "REST", 1e4)
    on = Reads(settings, helpers.submit, 2)
    loop = asyncio.get_running_loop()
    await asyncio.create_task(call_as("a", compute, 2 * reads.LONG_S, on=on))
    second = asyncio.create_task(call_as("a", compute, 0, on=on, deadline=loop.time() + 0.05))
    with pytest.raises(DeadlineExceededError):
        await second
    assert await asyncio.create_task(call_as("b", lambda: 5, on=on)) == 5
    assert set(on._rests) == {"a"}
    on._rests["a"].cancel()


async def test_a_rest_ends_and_what_waited_runs(settings, helpers):
    on = Reads(settings, helpers.submit, 2)
    began = []

    def work():
        began.append(time.monotonic())
        compute(2 * reads.LONG_S)

    await asyncio.gather(*(asyncio.create_task(call_as("a", work, on=on)) for _ in range(4)))
    # Two begin at once on two threads; each of the others begins after the rests before it.
    assert began[2] - began[0] >= reads.REST * 2 * reads.LONG_S
    assert not on._waiting
    short = [asyncio.create_task(call_as("b", threading.get_ident, on=on)) for _ in range(20)]
    assert len(await asyncio.gather(*short)) == 20
    assert "b" not in on._rests
