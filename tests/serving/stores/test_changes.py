"""Changes of events: whoever reads on after the last one misses none, and learns of erasures."""

import asyncio
import itertools
import shutil
import threading
from contextlib import ExitStack

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from recsys.serving.stores.records import AheadError, user_hash
from recsys.testing import PATIENCE_S

NUMBERS = itertools.count()
INSERT = (
    "INSERT INTO events (event_id, user_id, item_id, type, time_ms)"
    " VALUES (%s, %s, 'x', 'view', 1000)"
)


class Copy:
    """What a consumer keeps: events by their ids, without those of erased users."""

    def __init__(self, place=()):
        self.place, self.events, self.seen = place, {}, []

    async def read(self, store, limit=100):
        """Read a page; returns whether there was anything."""
        changes = await store.changes(self.place, limit)
        assert len(changes) <= limit
        for change in changes:
            assert change.place > self.place
            self.place = change.place
            if change.event is not None:
                self.seen.append(change.event.event_id)
                self.events[change.event.event_id] = (change.event.user, change.user_hash)
            else:
                self.events = {
                    name: who for name, who in self.events.items() if who[1] != change.user_hash
                }
        return bool(changes)

    async def read_all(self, store, limit=100):
        while await self.read(store, limit):
            pass
        return self

    @property
    def users(self):
        return {name: user for name, (user, _) in self.events.items()}


def names(changes):
    """Ids of events, and None for an erasure."""
    return [change.event and change.event.event_id for change in changes]


@pytest.fixture
def raw(postgres):
    """Connections to the server, each with transactions of its own."""
    import psycopg

    with ExitStack() as stack:
        yield lambda: stack.enter_context(psycopg.connect(postgres.url))


async def test_changes_are_in_the_order_of_arrival(store, event):
    assert await store.changes((), 10) == []
    await store.append([event("1", user="bob", time_ms=30), event("2", item="y", value=0.5)])
    await store.append([event("3", type="buy", recommendation_id="r")])
    first, second, third = await store.changes((), 10)
    assert names([first, second, third]) == ["1", "2", "3"]
    assert (first.event.user, first.event.time_ms) == ("bob", 30)
    assert (second.event.item, second.event.value) == ("y", 0.5)
    assert (third.event.type, third.event.recommendation_id) == ("buy", "r")
    assert second.user_hash == third.user_hash == user_hash("ada", store.salt)
    assert await store.changes((), 2) == [first, second]
    assert await store.changes(second.place, 10) == [third]
    assert await store.changes(third.place, 10) == []


async def test_an_erasure_is_a_change(store, event):
    await store.append([event("1"), event("2", user="bob"), event("3")])
    (*_, last) = await store.changes((), 10)
    await store.erase("ada")
    (erased,) = await store.changes(last.place, 10)
    assert (erased.event, erased.user_hash) == (None, user_hash("ada", store.salt))
    assert erased.erased_ms == store.erased(["ada"])["ada"]
    assert names(await store.changes((), 10)) == ["2", None]
    await store.erase("ada")  # again: at the place of the last erasure
    (again,) = await store.changes(last.place, 10)
    assert again.place > erased.place
    assert await store.changes(again.place, 10) == []


async def test_an_event_after_an_erasure_has_a_place_after_it(store, event):
    """Ids of erased events must not be given again."""
    for number in range(5):
        await store.append([event(f"{number}")])
        (*_, change) = await store.changes((), 10)
        await store.erase("ada")
        await store.append([event(f"bob-{number}", user="bob")])
        assert names(await store.changes(change.place, 10)) == [None, f"bob-{number}"]


async def test_what_is_written_in_one_transaction_is_in_order(store, event, monkeypatch):
    copy = Copy()
    await store.append([event("0")])
    await copy.read_all(store)
    late = 10**15  # after the erasure
    await asyncio.gather(  # one group
        store.append([event("1")]), store.erase("ada"), store.append([event("2", time_ms=late)])
    )
    await copy.read_all(store, limit=1)
    assert copy.users == {"2": "ada"}


async def test_events_of_data_sets_are_left_out(store, event, write_dataset):
    await store.append([event("1"), event("imported", seed="d"), event("2")])
    store.seed(write_dataset([("ada", "x", 30), ("bob", "y", 10)]))
    await store.append([event("3")])
    assert names(await store.changes((), 10)) == ["1", "2", "3"]
    store.seed(write_dataset([("ada", "x", 30)], name="newer"))  # it replaces the other
    copy = await Copy().read_all(store)
    await store.append([event("4")])
    assert names(await store.changes(copy.place, 10)) == ["4"]


async def test_places_hold_after_a_restart(location, opened, event):
    store = opened(location)
    await store.append([event("1"), event("2")])
    (first, _) = await store.changes((), 10)
    await store.erase("ada")
    store.close()
    again = opened(location)
    assert again.store_id == store.store_id
    assert names(await again.changes(first.place, 10)) == [None]
    await again.append([event("3", user="bob")])
    assert names(await again.changes(first.place, 10)) == [None, "3"]


async def test_events_of_processes_that_write_at_once_are_all_read(location, opened, event):
    stores = [opened(location) for _ in range(2)]
    reader = opened(location)
    batches = [[event(f"{b}-{n}", user=f"u{b}") for n in range(3)] for b in range(60)]
    writing = asyncio.gather(*(stores[b % 2].append(one) for b, one in enumerate(batches)))
    copy = Copy()
    while not writing.done():
        await copy.read(reader, limit=7)
    await writing
    await copy.read_all(reader, limit=7)
    assert len(copy.seen) == len(set(copy.seen)) == 180
    order = {name: place for place, name in enumerate(copy.seen)}
    for batch in batches:
        assert [order[one.event_id] for one in batch] == sorted(order[e.event_id] for e in batch)


async def test_transactions_that_end_in_another_order_hide_no_event(postgres, opened, event, raw):
    store, slow = opened(postgres.url), raw()

    def by_ids(after):  # what `changes` would be with a cursor of ids alone
        query = "SELECT id, event_id FROM events WHERE id > ? ORDER BY id"
        return store._query(query, (after,))

    slow.execute(INSERT, ("slow", "ada"))
    await store.append([event("fast")])
    ((last, name),) = by_ids(0)
    assert name == "fast"
    assert await store.changes((), 10) == []  # it waits for the slow transaction
    slow.commit()
    assert by_ids(last) == []  # the slow event is missed
    assert names(await store.changes((), 10)) == ["slow", "fast"]


async def test_a_transaction_that_is_rolled_back_holds_up_nothing(postgres, opened, event, raw):
    store, slow = opened(postgres.url), raw()
    slow.execute(INSERT, ("slow", "ada"))
    await store.append([event("fast")])
    await store.erase("bob")
    assert await store.changes((), 10) == []
    slow.rollback()
    assert names(await store.changes((), 10)) == ["fast", None]


USERS = st.sampled_from(["ada", "bob"])
SLOW = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
STEPS = st.one_of(
    st.tuples(st.just("append"), USERS, st.integers(1, 3)),
    st.tuples(st.just("erase"), USERS),
    st.tuples(st.just("read"), st.integers(1, 4)),
    st.tuples(st.just("insert"), st.integers(0, 2)),
    st.tuples(st.just("commit"), st.integers(0, 2)),
    st.tuples(st.just("rollback"), st.integers(0, 2)),
)


@settings(max_examples=40, suppress_health_check=SLOW)
@given(steps=st.lists(STEPS, max_size=25))
def test_a_copy_is_what_the_store_has(schedule, event, steps):
    asyncio.run(schedule(event, steps))


@pytest.fixture(params=["sqlite", "postgres"])
def schedule(request, tmp_path, opened):
    """Runs steps on one store, and compares a copy that follows it with plain bookkeeping.

    On PostgreSQL there are writers whose transactions stay open between steps.
    """
    if request.param == "sqlite":
        store, connections = opened(tmp_path / "histories.db"), None
    else:
        raw = request.getfixturevalue("raw")
        store = opened(request.getfixturevalue("postgres").url)
        connections = [raw() for _ in range(3)]
    end = ()

    async def run(event, steps):
        nonlocal end
        example = next(NUMBERS)
        copy, live, pending = Copy(end), {}, [{}, {}, {}]
        end_writer = {"commit": live.update, "rollback": lambda rows: None}

        def finish(writer, how):
            end_writer[how](pending[writer])
            pending[writer] = {}
            if connections is not None:
                getattr(connections[writer], how)()

        for kind, *given_ in steps:
            if kind == "append":
                user = f"{given_[0]}-{example}"
                rows = {f"{next(NUMBERS)}": user for _ in range(given_[1])}
                late = 10**15  # after any erasure
                await store.append([event(n, user=user, time_ms=late) for n in rows])
                live.update(rows)
            elif kind == "erase":
                user = f"{given_[0]}-{example}"
                await store.erase(user)
                for name in [name for name, whose in live.items() if whose == user]:
                    del live[name]
            elif kind == "read":
                await copy.read(store, limit=given_[0])
            elif kind == "insert":
                (writer,) = given_
                name, user = f"{next(NUMBERS)}", f"w{writer}-{example}"
                if connections is None:  # SQLite has one writer at a time
                    await store.append([event(name, user=user)])
                    live[name] = user
                else:
                    connections[writer].execute(INSERT, (name, user))
                    pending[writer][name] = user
            else:
                finish(given_[0], kind)
        for writer in range(3):
            finish(writer, "commit")
        await copy.read_all(store, limit=3)
        assert copy.users == live
        assert len(copy.seen) == len(set(copy.seen))
        assert (await Copy(end).read_all(store)).users == live  # who begins later
        end = copy.place

    return run


async def test_a_store_that_was_put_back_to_a_copy_refuses_later_places(tmp_path, opened, event):
    path = tmp_path / "histories.db"
    store = opened(path)
    await store.append([event("1")])
    store.close()
    shutil.copy(path, tmp_path / "copy.db")
    store = opened(path)
    await store.append([event("2")])
    (_, last) = await store.changes((), 10)
    with pytest.raises(AheadError):
        await opened(tmp_path / "copy.db").changes(last.place, 10)


async def test_a_database_copied_from_another_server_is_read_from_the_start(
    postgres, opened, event
):
    """Dump and restore keep the numbers of transactions, which the other server counts anew."""
    store = opened(postgres.url)
    await store.append([event("1")])
    await store.append([event("2", user="bob")])
    await store.erase("eve")
    (first, *_) = await store.changes((), 10)
    with store._connected() as connection:
        for table in ("events", "erasures"):
            connection.execute(f"UPDATE {table} SET transaction = transaction + 1000000000")
    with pytest.raises(AheadError):
        await store.changes((first.place[0] + 1_000_000_000, first.place[1]), 10)
    again = opened(postgres.url)
    assert again.store_id != store.store_id  # so cursors are refused
    changes = await again.changes((), 10)
    assert names(changes) == ["1", "2", None]
    await again.append([event("3")])
    assert names(await again.changes(changes[-1].place, 10)) == ["3"]
    assert opened(postgres.url).store_id == again.store_id


@pytest.mark.parametrize("location", ["postgres"], indirect=True)
async def test_an_erasure_waits_for_events_of_the_user_that_are_being_written(
    location, opened, event, monkeypatch, raw
):
    """Otherwise it would come after them without having seen them: they would stay, in no copy."""
    writer, eraser = opened(location), opened(location)
    written, goes_on, insert = threading.Event(), threading.Event(), writer._insert

    def slow(cursor, rows):
        count = insert(cursor, rows)
        written.set()
        goes_on.wait(PATIENCE_S)
        return count

    monkeypatch.setattr(writer, "_insert", slow)
    appending = asyncio.create_task(writer.append([event("1")]))
    await asyncio.to_thread(written.wait, 30)
    erasing, watcher = asyncio.create_task(eraser.erase("ada")), raw()
    waiting = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted"
    while not erasing.done() and not watcher.execute(waiting).fetchone()[0]:
        watcher.rollback()
        await asyncio.sleep(0)
    goes_on.set()
    await asyncio.gather(appending, erasing)
    assert await eraser.history("ada", 10) is None
    assert (await Copy().read_all(eraser)).users == {}
