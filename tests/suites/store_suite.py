"""What every store does; a database gets these tests by a subclass that names its place."""

import asyncio
import itertools
import json
import random
import threading

import pytest
from oracles import PATIENCE_S

from recsys.errors import ArtifactError
from recsys.serving.stores import erasures as erasures_module
from recsys.serving.stores import history as history_module
from recsys.serving.stores import open_store
from recsys.serving.stores import served as served_module
from recsys.serving.stores.database import SCHEMA
from recsys.serving.stores.records import (
    NOT_HISTORY,
    SEED_TYPE,
    Appended,
    EventConflictError,
    Exposure,
    Served,
    Sign,
    StoreError,
    TypedHistory,
    now_ms,
    sign_of,
)
from recsys.serving.stores.schema import SCHEMA_VERSION

# A view, an order and one without a name, then what is negative in some language, or counts not.
KINDS = ("view", "order", "interaction", "skip", "Retoure", "dislike", "thumbs_down", "cancelled",
         "gefällt mir nicht", "Remove from cart", "impression")  # fmt: skip
EVENTS = [("ada", "x", 30), ("ada", "y", 10), ("bob", "z", 5), ("ada", "w", 30)]


async def exposed(store, experiment, window_ms=50, after="", limit=10):
    return await store.served.exposed(experiment, "click", window_ms, after, limit)


async def show(store, *answers, experiment="e", window_ms=50):
    """Remember answers (id, user, arm, time) of an experiment, and wait until they are written."""
    for name, user, arm, time_ms in answers:
        exposure = Exposure(experiment, arm, window_ms)
        store.served.remember(Served(name, user, "m", ("x",), time_ms, exposure))
    await store.state.change("written", dict.clear)


async def plan(store, monkeypatch, call):
    """How the database finds the rows of a call."""
    asked, read = [], store.database.read
    with monkeypatch.context() as watched:
        watched.setattr(store.database, "read", lambda *query: asked.append(query) or read(*query))
        await call
    ((query, *parameters),) = asked
    with store.database.bulk() as connection:
        explain = "EXPLAIN ANALYZE" if store.database.is_remote else "EXPLAIN QUERY PLAN"
        if store.database.is_remote:  # which analyzes its tables itself; SQLite does not
            connection.exec_driver_sql("ANALYZE")
            connection.exec_driver_sql("SET enable_seqscan = off")
        query = query.params(*parameters) if parameters else query
        text = query.compile(connection, compile_kwargs={"literal_binds": True})
        return str(connection.exec_driver_sql(f"{explain} {text}").all())


def plain_history(store, limit, not_history):
    """What `read` returns for ada, event by event."""
    left_out = [name for name in not_history if sign_of(name, not_history) is Sign.LEFT_OUT]
    events = [e for e in store.history.export() if e.user == "ada" and e.type not in left_out]
    events.sort(key=lambda e: (e.time_ms, e.place), reverse=True)
    newest = [(e.item, e.type, sign_of(e.type, not_history)) for e in events]
    characters = itertools.accumulate(len(item) for item, _, _ in newest)
    within = sum(total <= history_module.CHARACTERS for total in characters)
    newest = newest[: min(within, history_module.NEWEST)]
    parts, hidden = [], []
    for place, (item, name, sign) in enumerate(newest):
        later = {other for same, _, other in newest[:place] if same == item}
        if sign is Sign.PART and not later & {Sign.RETURN, Sign.DISLIKE}:
            parts.append((item, None if name == SEED_TYPE else name))
        elif sign is Sign.DISLIKE or (sign is Sign.RETURN and item not in dict(parts)):
            hidden.append(item)
    items, types = zip(*reversed(parts[:limit]), strict=True)
    earlier = tuple(dict.fromkeys(parts[limit:]))
    return TypedHistory([*items], [*types], tuple(dict.fromkeys(hidden)), earlier)


class StoreSuite:
    """Tests of one kind of store. A subclass has the fixture `location`: a path or URL.

    The other fixtures are those of `tests/serving/stores/conftest.py`.
    """

    async def test_a_history_is_by_time_and_then_by_arrival(self, store, event):
        await store.history.append(
            [event("1", item="x", time_ms=30), event("2", item="y", time_ms=10)]
        )
        await store.history.append(
            [event("3", item="w", time_ms=30), event("4", user="bob", item="z")]
        )
        assert (await store.history.read("ada", 10)).items == ["y", "x", "w"]
        assert (await store.history.read("ada", 2)).items == ["x", "w"]
        assert (await store.history.read("bob", 10)).items == ["z"]
        assert await store.history.read("eve", 10) is None

    async def test_the_next_read_of_every_process_has_an_event(self, location, opened, event):
        stores = opened(location), opened(location)
        assert await stores[1].history.read("ada", 10) is None
        await stores[0].history.append([event("1", item="x")])
        for store in stores:
            assert (await store.history.read("ada", 10)).items == ["x"]

    async def test_a_repeated_event_counts_once(self, store, event):
        first = [event("1"), event("2", item="y")]
        assert await store.history.append(first) == Appended(accepted=2)
        assert await store.history.append([*first, event("3")]) == Appended(
            accepted=1, duplicates=2
        )
        assert await store.history.append([event("4"), event("4")]) == Appended(
            accepted=1, duplicates=1
        )
        assert store.history.count() == 4

    async def test_a_known_id_with_other_content_refuses_the_whole_batch(self, store, event):
        await store.history.append([event("1", item="x")])
        with pytest.raises(EventConflictError, match="event '1' has other content") as caught:
            await store.history.append([event("2"), event("1", item="other")])
        assert caught.value.event_ids == ("1",)
        with pytest.raises(EventConflictError, match=r"event 'a' .* \(and 1 more\)"):
            await store.history.append(
                [event("a"), event("a", item="y"), event("b", user="u"), event("b", user="v")]
            )
        assert (await store.history.read("ada", 10)).items == ["x"]
        assert await store.history.append([event("2")]) == Appended(accepted=1)

    async def test_concurrent_writers_share_commits_but_not_refusals(
        self, store, event, monkeypatch
    ):
        groups: list[int] = []
        write = store._write
        monkeypatch.setattr(store, "_write", lambda g, r: (groups.append(len(g)), write(g, r))[1])
        await store.history.append([event("taken", item="x")])
        calls = [store.history.append([event(f"{i}", user=f"u{i}")]) for i in range(200)]
        calls.insert(100, store.history.append([event("new"), event("taken", item="y")]))
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
        refused = [outcome for outcome in outcomes if outcome != Appended(accepted=1)]
        assert [type(outcome) for outcome in refused] == [EventConflictError]
        assert store.history.count() == 201
        assert len(groups) < 50

    async def test_one_id_from_many_writers_at_once_is_accepted_once(self, location, opened, event):
        stores = [opened(location) for _ in range(2)]
        for round_ in range(10):
            batch = [event(f"{round_}-{i}") for i in range(20)]
            done = await asyncio.gather(*(stores[i % 2].history.append(batch) for i in range(4)))
            assert sum(outcome.accepted for outcome in done) == 20
            assert sum(outcome.duplicates for outcome in done) == 60
        assert stores[0].history.count() == 200

    async def test_events_that_do_not_count_are_not_read_for_a_history(
        self, location, opened, event, monkeypatch
    ):
        store = opened(location)
        shown = [event(f"{n}", type="impression", time_ms=9 + n) for n in range(4_000)]
        await store.history.append(shown)
        assert await store.history.read("ada", 10) is None
        await store.history.append([event(f"v{n}", type="view", time_ms=n) for n in range(5)])
        found = await plan(store, monkeypatch, store.history.read("ada", 5_000))
        index = "events_counted" if store.database.is_remote else "COVERING INDEX events_of_hist"
        assert index in found, found
        assert "Removed by Filter" not in found, found
        assert len((await store.history.read("ada", 5_000)).items) == 5

    async def test_an_erasure_is_made_in_parts_and_nothing_of_it_is_read(
        self, location, opened, event, monkeypatch, remembered
    ):
        monkeypatch.setattr(erasures_module, "DELETED_AT_ONCE", 10)
        store = opened(location)
        await store.history.append([event(f"{n}", time_ms=n) for n in range(95)])
        store.served.remember(Served("r", "ada", "m", ("x",), 1))
        left, write = [], store._calls.write

        async def write_and_look(*arguments):  # others write between two parts
            await write(*arguments)
            left.append(store.history.count())
            if len(left) == 3:
                raise asyncio.CancelledError
            return True

        monkeypatch.setattr(store._calls, "write", write_and_look)
        with pytest.raises(asyncio.CancelledError):
            await store.history.erase("ada")
        assert left == [85, 75, 65]
        again = opened(location)
        late, fresh = event("late", time_ms=99), event("fresh", item="new", time_ms=now_ms() + 1000)
        assert await again.history.append([late, fresh]) == Appended(accepted=1, ignored=1)
        assert (await again.history.read("ada", 9)).items == ["new"]
        assert [one.event_id for one in await again.history.events("ada", 9)] == ["fresh"]
        await again.prepare()
        assert (again.history.count(), remembered(again, "r")) == (1, False)

    @pytest.mark.parametrize("characters", [1 << 17, 350])
    @pytest.mark.parametrize(
        "not_history", [NOT_HISTORY, NOT_HISTORY[1:], (), ("skip", "view", "return")]
    )
    async def test_a_history_is_that_of_a_plain_reference(
        self, location, opened, event, monkeypatch, not_history, characters
    ):
        monkeypatch.setattr(history_module, "NEWEST", 150)
        monkeypatch.setattr(history_module, "CHARACTERS", characters)
        store, rng = opened(location, not_history=not_history), random.Random(7)
        for part in range(4):
            batch = [
                event(f"{part} {n}", item=f"i{rng.randrange(40)}", type=rng.choice(KINDS[: 2 + n]),
                      time_ms=rng.randrange(99))
                for n in range(60)
            ]  # fmt: skip
            await store.history.append(batch)
            for limit in (1, 20, 500):
                found = await store.history.read("ada", limit)
                assert found == plain_history(store, limit, not_history)

    async def test_pages_of_events_join_without_gap_or_repetition(self, store, event):
        await store.history.append([event(f"{i}", item=f"i{i}", time_ms=i // 3) for i in range(10)])
        found, before = [], None
        while page := await store.history.events("ada", 4, before):
            found += [entry.item for entry in page]
            before = (page[-1].time_ms, page[-1].place)
        assert found == [f"i{i}" for i in reversed(range(10))]
        assert await store.history.events("eve", 4) == []

    async def test_an_event_is_read_as_it_was_written(self, store, event):
        sent = event("1", "é\u2028💄", "'; --", 2**41, value=0.1, recommendation_id="nobody's")
        assert (await store.history.append([sent])).unlinked == 1
        (found,) = await store.history.events("é\u2028💄", 1)
        assert found.linked is False
        for name in ("event_id", "user", "item", "type", "time_ms", "value", "digest", "seed"):
            assert getattr(found, name) == getattr(sent, name)

    async def test_rows_become_events_off_the_event_loop(self, store, event, monkeypatch):
        threads, make = [], history_module._stored

        def make_noted(*columns):
            threads.append(threading.current_thread())
            return make(*columns)

        monkeypatch.setattr(history_module, "_stored", make_noted)
        await store.history.append([event("1"), event("2")])
        assert len(await store.history.events("ada", 10)) == len(threads) == 2
        assert threading.main_thread() not in threads

    async def test_ids_are_data_and_never_sql(self, store, event):
        nasty = "'; DROP TABLE events; -- ? %s"
        await store.history.append(
            [event(nasty, nasty, nasty), event("%", "%", "a"), event("n", "\n", "\t")]
        )
        assert (await store.history.read(nasty, 5)).items == [nasty]
        assert (await store.history.read("%", 5)).items == ["a"]
        assert (await store.history.read("\n", 5)).items == ["\t"]
        assert await store.history.read("' OR 1=1 --", 5) is None
        assert await store.history.read("\0", 5) is None
        assert await store.history.events("\0", 5) == []
        await store.history.erase("\0")
        assert store.history.count() == 3

    async def test_an_event_the_database_refuses_does_not_affect_others(self, store, event):
        bad = event("bad", time_ms=2**70)
        outcomes = await asyncio.gather(
            *(store.history.append([event(f"{i}")]) for i in range(5)),
            store.history.append([event("mate"), bad]),
            *(store.history.append([event(f"{i}")]) for i in range(5, 10)),
            return_exceptions=True,
        )
        assert [i for i, outcome in enumerate(outcomes) if outcome != Appended(accepted=1)] == [5]
        assert store.history.count() == 10

    async def test_later_events_count_after_an_erasure_with_a_clock_that_was_ahead(
        self, store, event, monkeypatch
    ):
        now, year = now_ms(), 366 * 86_400_000
        await store.history.append([event("1", time_ms=now - year)])
        with monkeypatch.context() as ahead:
            ahead.setattr(erasures_module, "now_ms", lambda: now + year)
            await store.history.erase("ada")
        times = {"late delivery": now - year, "now": now, "later": now + 1_000}
        done = [await store.history.append([event(n, time_ms=t)]) for n, t in times.items()]
        assert [one.ignored for one in done] == [1, 0, 0]
        assert now - 120_000 < store.history.erased(["ada"])["ada"] < now
        # a clock that is behind does not undo an erasure
        await store.history.erase("bob")
        monkeypatch.setattr(erasures_module, "now_ms", lambda: 1_000)
        assert (await store.history.append([event("b", user="bob", time_ms=1_000)])).ignored == 1
        assert store.history.erased(["bob"])["bob"] >= now

    async def test_an_erased_user_stays_erased(self, store, event, write_dataset, remembered):
        dataset = write_dataset(EVENTS)
        store.history.seed(dataset)
        late = event("1", item="old")
        await store.history.append([late, event("2", user="bob", item="kept")])
        store.served.remember(Served("r", "ada", "m", ("x",), 1))
        await store.history.erase("ada")
        await store.history.erase("ada")
        await store.history.erase("nobody")
        assert await store.history.read("ada", 10) is None
        assert await store.history.events("ada", 10) == []
        assert not remembered(store, "r")
        assert {row.user for row in store.history.export()} == {"bob"}
        assert await store.history.append([late]) == Appended(ignored=1)
        store.history.seed(write_dataset([*EVENTS, ("ada", "newer", 40)], name="newer"))
        assert await store.history.read("ada", 10) is None
        assert (await store.history.read("bob", 10)).items == ["kept", "z"]
        fresh = event("3", item="new", time_ms=now_ms() + 1000)
        assert await store.history.append([fresh]) == Appended(accepted=1)  # welcome back
        assert (await store.history.read("ada", 10)).items == ["new"]

    async def test_what_is_written_in_one_transaction_is_in_order(self, store, event):
        late = 10**15  # after the erasure
        await asyncio.gather(  # one group
            store.history.append([event("1")]),
            store.history._erase("ada"),  # `erase` starts it in a task of its own
            store.history.append([event("2", time_ms=late)]),
        )
        assert [entry.event_id for entry in await store.history.events("ada", 9)] == ["2"]

    async def test_answers_are_written_without_events_and_limited(
        self, store, monkeypatch, remembered
    ):
        monkeypatch.setattr("recsys.serving.stores.served.SERVED_KEPT", 10)
        for i in range(25):
            store.served.remember(Served(f"r{i}", None, "m", (), i))

        async with asyncio.timeout(PATIENCE_S):
            while not remembered(store, "r24"):
                await asyncio.sleep(0.02)
        kept = [i for i in range(25) if remembered(store, f"r{i}")]
        assert kept == list(range(15, 25))

    async def test_the_journal_is_by_model_and_in_order(self, location, opened):
        store = opened(location)
        await store.journal.append("a", [{"op": "upsert", "item": "é"}, {"op": "remove"}])
        await asyncio.gather(*(store.journal.append("b", [{"n": n}]) for n in range(5)))
        await store.journal.append("a", [{"op": "upsert"}])
        again = opened(location)
        ops = [record["op"] for _, record in await again.journal.read("a")]
        assert ops == ["upsert", "remove", "upsert"]
        assert [record["n"] for _, record in await again.journal.read("b")] == [0, 1, 2, 3, 4]
        assert await again.journal.read("c", 7) == []

    async def test_the_journal_keeps_the_last_record_of_an_item(self, store):
        for price in range(3):
            await store.journal.append("a", [{"item_id": "x\0", "price": price}, {"n": price}])
        await store.journal.append("b", [{"item_id": "x\0", "price": 9}])
        await store.journal.append(
            "a", [{"item_id": "y", "price": 1}, {"item_id": "z"}, {"item_id": "y", "price": 2}]
        )
        assert [record for _, record in await store.journal.read("a")] == [
            {"n": 0}, {"n": 1}, {"item_id": "x\0", "price": 2}, {"n": 2},
            {"item_id": "z"}, {"item_id": "y", "price": 2},
        ]  # fmt: skip
        ((_, record),) = await store.journal.read("b")
        assert record == {"item_id": "x\0", "price": 9}
        await store.journal.append("a", [])

    async def test_the_journal_is_read_in_pages_of_so_many_bytes(self, store, monkeypatch):
        records = [{"n": n, "text": "x" * (500 if n % 3 else 5_000)} for n in range(10)]
        await store.journal.append("a", records)
        monkeypatch.setattr("recsys.serving.stores.journal.PAGE_BYTES", 2_000)
        read, place = [], 0
        while page := await store.journal.read("a", place):
            assert len(page) == 1 or sum(len(json.dumps(one)) for _, one in page) <= 2_000
            read, place = read + [record for _, record in page], page[-1][0]
        assert read == records

    async def test_a_value_is_changed_by_one_process_at_a_time(self, location, opened):
        stores = opened(location), opened(location)

        def more(value):
            value["n"] = value.get("n", 0) + 1

        def refuse(value):
            value["n"] = 0
            raise ValueError("no")

        changes = [store.state.change("k", more) for store in stores for _ in range(20)]
        revisions = {revision for revision, _ in await asyncio.gather(*changes)}
        assert len(revisions) == 40
        with pytest.raises(ValueError, match="no"):
            await stores[0].state.change("k", refuse)
        for store in stores:
            assert await store.state.get("k") == {"n": 40}
            assert await store.state.revision("k") in revisions

    async def test_following_the_journal_misses_no_change_of_a_process(self, location, opened):
        mine, other = opened(location), opened(location)
        first = await mine.journal.append("a", [{"item_id": "x", "n": 0}])
        assert first.before == 0
        await other.journal.append("b", [{"item_id": "x"}])  # of another catalog
        # the only record is replaced: its place must be a new one all the same
        second = await other.journal.append("a", [{"item_id": "x", "n": 1}])
        assert (second.before, second.last > first.last) == (first.last, True)
        found = await mine.journal.read("a", first.last)
        assert found == [(second.last, {"item_id": "x", "n": 1})]
        assert await mine.journal.read("a", second.last) == []

        seen: dict[str, int] = {}
        done = False

        async def follow(store):
            place, looks = second.last, 0
            while not done or looks == 0:
                looks = looks + 1 if done else 0
                for later, record in await store.journal.read("a", place):
                    assert later > place
                    place = later
                    seen[record["item_id"]] = record["n"]
            return place

        async def write(store, name):
            for n in range(10):
                await store.journal.append("a", [{"item_id": name, "n": n}])

        following = asyncio.create_task(follow(mine))
        await asyncio.gather(*(write(s, f"{i}") for i, s in enumerate([mine, other, mine, other])))
        done = True
        await following
        assert seen == dict.fromkeys("0123", 9)

    async def test_answers_are_read_in_parts_from_the_newest(self, store, monkeypatch):
        assert await store.served.last() == (0, None)
        for n in range(4):
            store.served.remember(Served(f"r{n}", None if n else "ada", "m", ("x", '"é'), 100 + n))
        await store.state.change("written", dict.clear)
        last, forgotten = await store.served.last()
        assert forgotten is None
        newest = await store.served.page(last, 2, 101)
        assert [(one.recommendation_id, one.user, one.time_ms) for one in newest] == [
            ("r3", None, 103), ("r2", None, 102)
        ]  # fmt: skip
        assert json.loads(newest[0].items) == ["x", '"é']
        monkeypatch.setattr(served_module, "ITEM_BYTES", 24)
        store.served.remember(Served("large", "ada", "m", ("é" * 4, "x" * 8, "y"), 105))
        await store.state.change("written", dict.clear)
        (large,) = await store.served.page(last + 1, 1, 101)
        assert json.loads(large.items) == ["é" * 4, "x" * 8]
        rest = await store.served.page(newest[-1].place - 1, 2, 101)
        assert [one.recommendation_id for one in rest] == ["r1"]
        monkeypatch.setattr(served_module, "SERVED_KEPT", 3)
        store.served.remember(Served("r4", "ada", "m", ("x",), 104))
        await store.state.change("written", dict.clear)
        assert (await store.served.last())[1] == 103

    async def test_answers_of_an_experiment_count_by_user(self, store, monkeypatch):
        await show(store, ("r1", "bob", "b", 130), ("r2", "ada", "a", 100), ("r3", "ada", "a", 110))
        await show(store, ("r4", "ada", "b", 100), experiment="other")
        store.served.remember(Served("r5", "eve", "m", ("x",), 100))
        await show(store, ("r6", None, "a", 100))
        assert await exposed(store, "e") == [("ada", "a", 100, 2, 0), ("bob", "b", 130, 1, 0)]
        assert await exposed(store, "e", limit=1) == [("ada", "a", 100, 2, 0)]
        assert await exposed(store, "e", after="ada") == [("bob", "b", 130, 1, 0)]
        assert await exposed(store, "none") == []
        if not store.database.is_remote:  # PostgreSQL reads a small table as a whole
            assert "events_by_answer" in await plan(store, monkeypatch, exposed(store, "e"))

    async def test_the_first_answers_to_a_user_count(self, store, monkeypatch):
        monkeypatch.setattr(served_module, "EXPOSURES_OF_USER", 3)
        await show(
            store, *((f"r{n}", "ada", "a", 100 + n) for n in range(5)), ("b", "bob", "b", 102)
        )
        await show(store, ("r9", "ada", "a", 120))
        assert await exposed(store, "e") == [("ada", "a", 100, 3, 0), ("bob", "b", 102, 1, 0)]

    async def test_exposures_are_erased_with_their_user(self, store):
        await show(store, ("r1", "ada", "a", 100), ("r2", "bob", "b", 100))
        await store.history.erase("ada")
        await show(store, ("r3", "ada", "a", 120))  # it was under way
        assert await exposed(store, "e") == [("bob", "b", 100, 1, 0)]

    async def test_exposures_are_counted_and_dropped_by_experiment(self, store, monkeypatch):
        monkeypatch.setattr(served_module, "DROPPED_AT_ONCE", 1)
        await show(store, ("r1", "ada", "a", 100), ("r2", "bob", "a", 200))
        await show(store, ("r3", "ada", "a", 100), experiment="other")
        assert await store.served.count_exposures() == {"e": 2, "other": 1}
        await store.served.drop_exposures([])
        await store.served.drop_exposures(["e", "none"])
        assert await store.served.count_exposures() == {"other": 1}

    async def test_seeding_twice_is_seeding_once(self, location, opened, write_dataset):
        dataset = write_dataset(EVENTS)
        store = opened(location)
        assert store.history.seed(dataset) == 4
        assert store.history.seed(dataset) == 0
        again = opened(location)  # after a restart
        assert again.history.seed(dataset) == 0
        assert (await again.history.read("ada", 10)).items == ["y", "x", "w"]
        assert [found.time_ms for found in await again.history.events("ada", 9)] == [
            30_000,
            30_000,
            10_000,
        ]

    async def test_a_newer_data_set_replaces_only_the_older_one(self, store, event, write_dataset):
        store.history.seed(write_dataset(EVENTS))
        await store.history.append([event("1", item="live", time_ms=50_000)])
        assert store.history.seed(write_dataset([("ada", "new", 40)], name="newer")) == 1
        assert (await store.history.read("ada", 10)).items == ["new", "live"]
        assert await store.history.read("bob", 10) is None

    async def test_a_failed_import_writes_nothing(self, store, write_dataset, monkeypatch):
        store.history.seed(write_dataset(EVENTS))
        newer = write_dataset([("ada", "new", 40)], name="newer")
        original = history_module.replace_seed

        def failing(*arguments):
            original(*arguments)
            raise OSError("the disk is full")

        monkeypatch.setattr(history_module, "replace_seed", failing)
        with pytest.raises(StoreError, match=r"^store .*: the disk is full; check"):
            store.history.seed(newer)
        assert (await store.history.read("ada", 10)).items == ["y", "x", "w"]
        monkeypatch.undo()
        assert store.history.seed(newer) == 1

    def test_an_altered_data_set_is_refused_by_its_files_name(self, store, write_dataset):
        dataset = write_dataset(EVENTS)
        with (dataset / "users.parquet").open("ab") as file:
            file.write(b"x")
        with pytest.raises(ArtifactError, match=r"'users\.parquet' does not match its checksum"):
            store.history.seed(dataset)
        with pytest.raises(ArtifactError, match="is not an artifact"):
            store.history.seed(dataset.parent / "nowhere")

    async def test_many_readers_during_a_seed_see_all_of_it_or_nothing(self, store, write_dataset):
        dataset = write_dataset([(f"u{u}", f"u{u}-{t}", t) for u in range(50) for t in range(20)])
        seeding = asyncio.create_task(asyncio.to_thread(store.history.seed, dataset))
        early = await asyncio.gather(*(store.history.read(f"u{u}", 20) for u in range(50)))
        await seeding
        late = await asyncio.gather(*(store.history.read(f"u{u % 50}", 20) for u in range(500)))
        full = [[f"u{u}-{t}" for t in range(20)] for u in range(50)]
        assert all(found is None or found.items == full[u] for u, found in enumerate(early))
        assert [found.items for found in late] == full * 10

    async def test_closing_a_store_writes_the_queue_and_refuses_more(
        self, location, opened, event, remembered
    ):
        store = opened(location)
        store.served.remember(Served("last", None, "m", (), 1))
        pending = [asyncio.ensure_future(store.history.append([event(f"{i}")])) for i in range(50)]
        await asyncio.sleep(0)  # they are queued
        await asyncio.to_thread(store.close)
        assert await asyncio.gather(*pending) == [Appended(accepted=1)] * 50
        with pytest.raises(StoreError, match="closed"):
            await store.history.append([event("late")])
        store.close()
        again = opened(location)
        assert again.history.count() == 50
        assert remembered(again, "last")

    async def test_a_cancelled_write_in_the_queue_is_dropped(self, store, event, monkeypatch):
        entered, leave = asyncio.Event(), asyncio.Event()
        loop = asyncio.get_running_loop()
        write = store._write

        def slow(group, remembered):
            loop.call_soon_threadsafe(entered.set)
            asyncio.run_coroutine_threadsafe(leave.wait(), loop).result(PATIENCE_S)
            return write(group, remembered)

        monkeypatch.setattr(store, "_write", slow)
        first = asyncio.create_task(store.history.append([event("1", item="first")]))
        await entered.wait()
        second = asyncio.create_task(store.history.append([event("2", item="second")]))
        await asyncio.sleep(0)
        second.cancel()
        leave.set()
        await first
        await asyncio.gather(second, return_exceptions=True)
        await store.history.append([event("3", item="third")])
        assert (await store.history.read("ada", 10)).items == ["first", "third"]

    @pytest.mark.parametrize("version", [None, SCHEMA_VERSION - 1, SCHEMA_VERSION + 1])
    async def test_a_store_of_another_version_is_refused_and_left_as_it_is(
        self, location, opened, event, version
    ):
        store = opened(location)
        await store.history.append([event("1")])

        def set_version(version):
            with store.database.bulk() as connection:
                store.database.put_state(connection, SCHEMA, version)

        set_version(version)
        with pytest.raises(StoreError, match=f"schema {version or 'of an older version'}, not"):
            open_store(location)
        set_version(SCHEMA_VERSION)
        assert (await opened(location).history.read("ada", 10)).items == ["x"]

    async def test_the_newest_events_are_found_by_their_places(self, store, event):
        assert await store.history.newest_places(10) == (1, 0, 0)
        assert await store.history.acts(1, 10, 0) == []
        times = [50, 10, 40, 30, 20]
        await store.history.append(
            [
                event(f"{n}", user=f"u{n}", item=f"i{n}", time_ms=time)
                for n, time in enumerate(times)
            ]
        )
        first, last, earliest_ms = await store.history.newest_places(100)
        assert earliest_ms == 0
        expected = [(f"u{n}", f"i{n}", "view", time, None) for n, time in enumerate(times)]
        assert sorted(await store.history.acts(first, last, 0)) == expected

        async def items(since_ms):
            return sorted(act.item for act in await store.history.acts(first, last, since_ms))

        assert await items(30) == ["i0", "i2", "i3"]
        first, last, earliest_ms = await store.history.newest_places(3)
        assert (last - first + 1, earliest_ms) == (3, 40)
        assert await items(0) == ["i2", "i3", "i4"]
        await store.history.erase("u3")
        assert await items(0) == ["i2", "i4"]
