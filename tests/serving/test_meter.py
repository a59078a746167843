import asyncio

import pytest

from recsys.serving import meter
from recsys.serving.meter import Meter


@pytest.fixture
def clock(monkeypatch):
    """Processor time of the thread, in the test's hand."""

    class Clock:
        now = 0.0

        def thread_time(self):
            return self.now

    clock = Clock()
    monkeypatch.setattr(meter, "time", clock)
    return clock


async def test_the_steps_of_an_answer_count_and_its_waits_do_not(clock):
    async def answer():
        clock.now += 1.0
        await asyncio.sleep(0)
        clock.now += 0.5

    async def other():
        clock.now += 100.0

    found = Meter()
    await asyncio.gather(found.run(answer()), other())
    assert found.take() == 1.5
    found.add(0.25)
    assert found.take() == 0.25
    assert found.take() == 0.0


async def test_an_answer_on_a_meter_fails_and_is_cancelled_as_without():
    seen = []

    async def fails():
        await asyncio.sleep(0)
        raise KeyError("no")

    async def waits():
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            seen.append("cancelled")
            raise

    async def catches():
        try:
            async with asyncio.timeout(0):
                await asyncio.sleep(3600)
        except TimeoutError:
            seen.append("late")

    with pytest.raises(KeyError):
        await Meter().run(fails())
    task = asyncio.create_task(Meter().run(waits()))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await Meter().run(catches())
    assert seen == ["cancelled", "late"]
