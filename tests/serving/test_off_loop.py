"""Calls on helper threads: a limited number of them, each with a deadline."""

import asyncio
import threading
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from recsys.serving.batcher import DeadlineExceededError, QueueFullError
from recsys.serving.limits import CALLER, Caller
from recsys.serving.off_loop import AT_ONCE, OffLoop


@pytest.fixture
def helper():
    with ThreadPoolExecutor(1) as threads:
        yield threads


async def test_more_calls_than_the_limit_are_refused(settings, helper):
    off_loop = OffLoop(settings.model_copy(update={"queue_limit": 2}), helper.submit)
    gate = threading.Event()
    calls = [asyncio.create_task(off_loop(gate.wait, 60)) for _ in range(2)]
    await asyncio.sleep(0)
    with pytest.raises(QueueFullError):
        await off_loop(int)
    gate.set()
    assert await asyncio.gather(*calls) == [True, True]
    assert await off_loop(int, "5") == 5


async def test_a_call_that_waits_too_long_is_not_made(settings, helper):
    off_loop, gate, made = OffLoop(settings, helper.submit), threading.Event(), []
    running = asyncio.create_task(off_loop(gate.wait, 60))
    await asyncio.sleep(0)
    with pytest.raises(DeadlineExceededError):
        await off_loop(made.append, 1, deadline=asyncio.get_running_loop().time() + 0.01)
    gate.set()
    await running
    await off_loop(int)  # behind it on the same thread
    assert made == []


async def test_few_results_wait_for_the_event_loop(settings):
    submitted = [Future() for _ in range(AT_ONCE + 1)]
    waiting = iter(submitted)
    off_loop = OffLoop(settings, lambda function: next(waiting))
    calls = [asyncio.create_task(off_loop(int)) for _ in submitted]
    await asyncio.sleep(0)
    assert next(waiting) is submitted[-1]  # the last call is not submitted
    assert not any(call.done() for call in calls)


async def test_the_deadline_is_that_of_the_request(settings, helper):
    off_loop, gate = OffLoop(settings, helper.submit), threading.Event()
    CALLER.set(Caller(deadline=asyncio.get_running_loop().time() + 0.01))
    with pytest.raises(DeadlineExceededError):
        await off_loop(gate.wait, 60)
    gate.set()
