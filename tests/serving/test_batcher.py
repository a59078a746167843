import asyncio
import random

import pytest
from oracles import PATIENCE_S

from recsys.serving.batcher import (
    Answer,
    Batcher,
    ClosedError,
    DeadlineExceededError,
    QueueFullError,
)

FOREVER_MS = 600_000.0


class Worker:
    """Squares numbers when its gate is open; remembers every batch."""

    def __init__(self, *, blocked=False):
        self.batches: list[list[int]] = []
        self.gate = asyncio.Event()
        if not blocked:
            self.gate.set()

    async def __call__(self, requests):
        self.batches.append(list(requests))
        await self.gate.wait()
        await asyncio.sleep(0)
        if any(number < 0 for number in requests):
            raise ValueError("negative")
        return [number * number for number in requests]


@pytest.fixture
async def batcher():
    """Starts batchers; they are closed at the end."""
    started = []

    def start(worker, **options):
        options = {"max_batch": 4, "max_wait_ms": FOREVER_MS, "queue_limit": 100} | options
        made = Batcher(worker, **options)
        made.start()
        started.append((made, worker))
        return made

    yield start
    for made, worker in started:
        if isinstance(worker, Worker):
            worker.gate.set()
        await made.close()


def ask(made, number, seconds=PATIENCE_S, **options):
    deadline = asyncio.get_running_loop().time() + seconds
    return asyncio.create_task(made.submit(number, deadline=deadline, **options))


async def settle():
    for _ in range(10):
        await asyncio.sleep(0)


async def test_a_lone_request_does_not_wait_for_company(batcher):
    made = batcher(Worker())  # with company it would wait for ever
    async with asyncio.timeout(PATIENCE_S):
        answer = await ask(made, 3)
    assert (answer.result, answer.batch_size) == (9, 1)


async def test_batches_are_limited_and_in_order_of_arrival(batcher):
    worker = Worker(blocked=True)
    made = batcher(worker, max_batch=4)
    tasks = [ask(made, 0)]
    await settle()
    tasks += [ask(made, number) for number in range(1, 10)]
    await settle()
    worker.gate.set()
    await asyncio.gather(*tasks, ask(made, 10), ask(made, 11), ask(made, 12))
    assert worker.batches == [[0], [1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12]]


async def test_a_full_queue_refuses_and_cancelling_frees_a_place(batcher):
    worker = Worker(blocked=True)
    made = batcher(worker, queue_limit=2)
    computing = ask(made, 1)
    await settle()
    waiting = [ask(made, 2), ask(made, 3)]
    await settle()
    assert len(made) == 2
    with pytest.raises(QueueFullError):
        await ask(made, 4)
    waiting[0].cancel()
    await settle()
    assert len(made) == 1
    late = ask(made, 5)
    await settle()
    worker.gate.set()
    assert [(await task).result for task in (computing, waiting[1], late)] == [1, 9, 25]
    assert worker.batches == [[1], [3, 5]]  # 2 was cancelled, 4 refused: neither was computed


async def test_an_expired_request_fails_at_once_and_is_not_computed(batcher):
    worker = Worker(blocked=True)
    made = batcher(worker)
    computing = ask(made, 1)
    await settle()
    with pytest.raises(DeadlineExceededError):
        await ask(made, 2, seconds=0.01)
    patient = ask(made, 3)
    await settle()
    worker.gate.set()
    assert [(await task).result for task in (computing, patient)] == [1, 9]
    assert worker.batches == [[1], [3]]


async def test_a_deadline_is_noticed_after_the_event_loop_was_busy(batcher):
    worker = Worker()
    made = batcher(worker)
    now = asyncio.get_running_loop().time()
    with pytest.raises(DeadlineExceededError):
        await made.submit(1, deadline=now)
    assert worker.batches == []


async def test_a_deadline_during_the_computation_releases_the_client(batcher):
    worker = Worker(blocked=True)
    made = batcher(worker)
    with pytest.raises(DeadlineExceededError):
        await ask(made, 1, seconds=0.01)
    worker.gate.set()
    assert (await ask(made, 2)).result == 4


async def test_a_request_that_fails_does_not_fail_its_batch_mates(batcher):
    worker = Worker(blocked=True)
    made = batcher(worker)
    tasks = [ask(made, 1)]
    await settle()
    tasks += [ask(made, number) for number in (2, -3, 4)]
    await settle()
    worker.gate.set()
    answers = await asyncio.gather(*tasks, return_exceptions=True)
    assert isinstance(answers[2], ValueError)
    assert [a.result for a in answers if isinstance(a, Answer)] == [1, 4, 16]
    assert (await ask(made, 5)).result == 25


async def test_missing_results_are_an_error_for_the_whole_batch(batcher):
    async def forgetful(requests):
        return []

    made = batcher(forgetful)
    with pytest.raises(RuntimeError, match="0 results for a batch of 1"):
        await ask(made, 1)


async def test_a_timeout_of_the_worker_is_not_the_deadline(batcher):
    async def slow(requests):
        raise TimeoutError("of the device")

    made = batcher(slow)
    with pytest.raises(TimeoutError, match="of the device"):
        await ask(made, 1)


async def test_closing_answers_waiting_requests_and_refuses_new_ones(batcher):
    worker = Worker(blocked=True)
    made = batcher(worker)
    tasks = [ask(made, 1)]
    await settle()
    tasks += [ask(made, 2), ask(made, 3)]
    await settle()
    closing = asyncio.create_task(made.close())
    await settle()
    with pytest.raises(ClosedError):
        await ask(made, 4)
    assert not closing.done()
    worker.gate.set()
    await closing
    assert [(await task).result for task in tasks] == [1, 4, 9]


@pytest.mark.parametrize("seed", range(5))
async def test_every_caller_gets_its_own_answer(batcher, seed):
    rng = random.Random(seed)
    worker = Worker()
    made = batcher(worker, max_wait_ms=1, queue_limit=50)

    async def client(number):
        await asyncio.sleep(rng.random() * 0.05)
        patience = rng.choice([0.0, 0.002, 10.0, 10.0])
        task = ask(made, number, seconds=patience)
        if rng.random() < 0.2:
            await asyncio.sleep(0)
            task.cancel()
        try:
            answer = await task
        except asyncio.CancelledError:
            return "cancelled"
        except (DeadlineExceededError, QueueFullError) as error:
            return type(error).__name__
        assert answer.result == number * number
        return "answered"

    outcomes = await asyncio.gather(*(client(number) for number in range(300)))
    assert "answered" in outcomes  # how many depends on the machine
    assert len(made) == 0
    assert all(len(batch) <= 4 for batch in worker.batches)
    computed = [number for batch in worker.batches for number in batch]
    assert len(computed) == len(set(computed))  # nothing is computed twice


async def test_a_batch_is_limited_in_work(batcher):
    worker = Worker(blocked=True)
    made = batcher(worker, max_batch=8)
    tasks = [ask(made, 0)]
    await settle()
    tasks += [ask(made, number, work=3.0) for number in (1, 2, 3)]
    tasks += [ask(made, 4, work=5.0), ask(made, 5, work=100.0), ask(made, 6)]
    await settle()
    worker.gate.set()
    await asyncio.gather(*tasks)
    assert worker.batches == [[0], [1, 2], [3, 4], [5], [6]]
