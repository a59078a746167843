"""Calls on helper threads: after a long one its client rests, and others do not."""

import asyncio
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from recsys.serving import reads
from recsys.serving.batcher import DeadlineExceededError
from recsys.serving.limits import CALLER, Caller
from recsys.serving.meter import Meter
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


async def call_as(client, function, *arguments, alone=False, **options):
    CALLER.set(Caller(client, is_alone=lambda: alone))  # of this task only
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


async def test_what_a_call_computed_is_on_the_meter_of_its_client(settings, helpers):
    meter, on = Meter(), Reads(settings, helpers.submit, 2)
    CALLER.set(Caller("a", meter=meter))
    await on(compute, 0.01)
    await asyncio.sleep(0)
    assert meter.take() >= 0.01


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


async def test_the_only_client_does_not_rest(settings, helpers):
    on = Reads(settings, helpers.submit, 2)
    await asyncio.create_task(call_as("a", compute, 2 * reads.LONG_S, alone=True, on=on))
    assert not on._rests


async def test_a_call_that_was_just_cancelled_is_crowded_out(settings, helpers):
    on = Reads(settings.model_copy(update={"queue_limit": 2}), helpers.submit, 1)
    gate = threading.Event()
    first = asyncio.create_task(call_as("a", gate.wait, 60, on=on))
    second = asyncio.create_task(call_as("a", int, on=on))
    await asyncio.sleep(0)
    late = asyncio.create_task(call_as("b", int, on=on, work=0.5))
    second.cancel()  # it leaves the queue after `late` has come
    await asyncio.wait([second])
    gate.set()
    assert (await first, await late) == (True, 0)
    assert (on._free, on._under_way, len(on._waiting)) == (1, 0, 0)
