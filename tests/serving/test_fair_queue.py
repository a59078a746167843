import asyncio
import time

from hypothesis import given
from hypothesis import strategies as st

from recsys.serving.fair_queue import (
    FIRST_S,
    IN_A_ROUND,
    REMEMBERED,
    REST,
    SAVED_S,
    FairQueue,
    Turns,
)
from recsys.serving.meter import Meter


def drain(queue):
    found = []
    while (entry := queue.pop()) is not None:
        found.append(entry)
    return found


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from([0.5, 1.0, 7.0, 30.0])), max_size=60)
)
def test_backlogged_clients_get_equal_shares(arrivals):
    queue, waiting = FairQueue(), {}
    for number, (client, work) in enumerate(arrivals):
        queue.push((client, number, work), client, work)
        waiting[client] = waiting.get(client, 0) + 1
    assert len(queue) == len(arrivals)
    received = dict.fromkeys(waiting, 0.0)
    while len(waiting) > 1:
        client, _, work = queue.pop()
        received[client] += work
        waiting[client] -= 1
        if not waiting[client]:
            break  # it is not backlogged any more
        assert max(received.values()) - min(received.values()) <= 30
    rest = drain(queue)
    for client in "abc":
        numbers = [number for name, number, _ in rest if name == client]
        assert numbers == sorted(numbers)
    assert len(queue) == 0


def test_a_late_client_is_not_behind_the_backlog_of_another():
    queue = FairQueue()
    for number in range(100):
        queue.push(f"a{number}", "a", 10.0)
    assert [queue.pop() for _ in range(3)] == ["a0", "a1", "a2"]
    queue.push("b", "b", 1.0)
    assert queue.pop() == "b"


def test_time_that_a_client_was_away_is_not_credited():
    queue = FairQueue()
    queue.push("b", "b", 1.0)
    queue.push("a", "a", 50.0)
    assert drain(queue) == ["b", "a"]
    for number in range(3):
        queue.push(f"b{number}", "b", 1.0)
        queue.push(f"a{number}", "a", 1.0)
    assert [queue.pop() for _ in range(3)] == ["b0", "b1", "b2"]  # a received 50 before


def test_a_crowded_queue_is_left_by_the_newest_of_the_longest_line():
    queue = FairQueue()
    for number in range(3):
        queue.push(f"a{number}", "a", 2.0)
    assert queue.crowd_out("a", 2.0) is None
    assert queue.crowd_out("b", 6.0) is None
    assert queue.crowd_out("b", 1.0) == "a2"
    assert drain(queue) == ["a0", "a1"]


def test_a_removed_entry_is_not_taken():
    queue = FairQueue()
    queue.push("a", "a", 1.0)
    queue.push("b", "b", 1.0)
    queue.remove("a", "a")
    queue.remove("a", "a")
    queue.remove("c", "c")
    assert drain(queue) == ["b"]


def test_clients_without_entries_are_forgotten():
    queue = FairQueue()
    for number in range(3 * REMEMBERED):
        queue.push(number, str(number), 1.0)
        assert queue.pop() == number
    assert len(queue._received) <= REMEMBERED + 2


async def begin(turns, client, seconds=0.0):
    """A request that computes for some seconds, by its meter."""
    meter = Meter()
    async with turns.turn(client, meter):
        meter.add(seconds)


def at_once(turns, client, seconds=0.0):
    """Whether a request runs without a round of the event loop."""
    request = begin(turns, client, seconds)
    try:
        request.send(None)
    except StopIteration:
        return True
    request.close()
    return False


async def test_a_client_with_very_many_requests_leaves_each_round_early():
    turns, begun = Turns(), []

    async def request(client):
        await begin(turns, client)
        begun.append(client)

    greedy = [asyncio.create_task(request("greedy")) for _ in range(40)]
    await asyncio.sleep(0)
    assert len(begun) == IN_A_ROUND
    late = asyncio.create_task(request("late"))
    greedy[-1].cancel()
    await asyncio.gather(late, *greedy, return_exceptions=True)
    assert begun.index("late") <= 2 * IN_A_ROUND
    assert len(begun) == 40  # all but the cancelled one
    await asyncio.sleep(0)
    await asyncio.wait_for(request("next"), 60)


async def test_few_requests_begin_at_once():
    turns = Turns()
    for _ in range(3):
        for _ in range(IN_A_ROUND):
            assert at_once(turns, "a")
        await asyncio.sleep(0)
        await asyncio.sleep(0)


async def test_a_client_that_computed_rests_while_others_send():
    turns, loop = Turns(), asyncio.get_running_loop()
    for client in ("other", "greedy"):
        turns.sent(client)
    start = loop.time()
    assert at_once(turns, "greedy", 0.05)
    waiting = [asyncio.create_task(begin(turns, "greedy")) for _ in range(3)]
    await asyncio.wait_for(begin(turns, "other"), 60)  # the other one does not
    assert not any(wait.done() for wait in waiting)
    waiting[0].cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    assert loop.time() - start > 0.9 * (0.05 * REST - SAVED_S)


async def test_a_client_rests_for_what_its_requests_compute_on_average_when_one_begins():
    """Forty requests at once would otherwise all begin before any has computed."""
    turns, gate = Turns(), asyncio.Event()
    for client in ("other", "greedy"):
        turns.sent(client)
    await begin(turns, "greedy", 1e6)
    turns._shares["greedy"].rests_until = 0.0  # the rest is over
    begun = 0

    async def request():
        nonlocal begun
        async with turns.turn("greedy", Meter()):
            begun += 1
            await gate.wait()

    requests = [asyncio.create_task(request()) for _ in range(40)]
    for _ in range(20):
        await asyncio.sleep(0)
    assert begun == 1
    for one in requests:
        one.cancel()
    await asyncio.gather(*requests, return_exceptions=True)


async def test_few_requests_of_a_new_client_begin_before_the_first_has_ended():
    turns, gate, begun = Turns(), asyncio.Event(), 0
    for client in ("other", "new"):
        turns.sent(client)

    async def request():
        nonlocal begun
        async with turns.turn("new", Meter()):
            begun += 1
            await gate.wait()

    requests = [asyncio.create_task(request()) for _ in range(40)]
    start = time.monotonic()
    for _ in range(20):
        await asyncio.sleep(0)
    assert 1 <= begun <= 2 + (time.monotonic() - start + SAVED_S) / (REST * FIRST_S)
    gate.set()  # they have computed nothing, so nothing is left to rest for
    await asyncio.wait_for(asyncio.gather(*requests), 60)


async def test_the_only_client_begins_at_once_whatever_it_computed():
    turns = Turns()
    turns.sent("greedy")
    assert at_once(turns, "greedy", 1e6)
    assert at_once(turns, "greedy")


async def test_a_client_that_computes_little_does_not_rest():
    turns = Turns()
    for client in ("other", "small"):
        turns.sent(client)
    for _ in range(4):
        assert at_once(turns, "small", SAVED_S / REST / 10)
        await asyncio.sleep(0)
        await asyncio.sleep(0)


async def test_only_accepted_requests_count_as_those_of_other_clients():
    turns = Turns()
    turns.sent("a")
    await begin(turns, "b", 1e6)  # it was refused
    assert turns.is_alone("a")
    assert not turns.is_alone("b")


async def test_the_least_recent_of_many_clients_are_forgotten():
    turns = Turns()
    for number in range(2 * REMEMBERED):
        await begin(turns, str(number))
    assert len(turns._shares) == REMEMBERED
    assert str(2 * REMEMBERED - 1) in turns._shares
