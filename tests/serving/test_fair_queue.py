import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recsys.serving.fair_queue import IN_A_ROUND, REMEMBERED, FairQueue, Turns


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


async def test_a_client_with_very_many_requests_leaves_each_round_early():
    turns, begun = Turns(), []

    async def request(client):
        await turns.wait(client)
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
            with pytest.raises(StopIteration):
                turns.wait("a").send(None)  # without a round of the event loop
        await asyncio.sleep(0)
        await asyncio.sleep(0)
