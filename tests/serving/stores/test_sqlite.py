import contextlib
import math
import random
import sqlite3
import time
from pathlib import Path

import pytest

from recsys.serving.stores import open_store
from recsys.serving.stores import sqlite as sqlite_module
from recsys.serving.stores.records import Served, StoreError, user_hash

ROOT = Path(__file__).parents[3]


@pytest.fixture
def path(tmp_path):
    return tmp_path / "histories.db"


def query(path, sql):
    connection = sqlite3.connect(path)
    try:
        return connection.execute(sql).fetchall()
    finally:
        connection.close()


def script(path, sql):
    connection = sqlite3.connect(path)
    connection.executescript(sql)
    connection.close()


def test_a_file_that_is_no_store_is_refused_with_its_name(path, opened):
    path.write_bytes(b"a cookie recipe, surely long enough to be read as a header" * 10)
    with pytest.raises(StoreError, match=r"histories\.db: file is not a database; .*serve\.store="):
        opened(path)
    other = path.with_name("other.db")
    script(other, "CREATE TABLE recipes (title)")
    with pytest.raises(StoreError, match=r"other\.db is another program's database"):
        opened(other)
    assert query(other, "SELECT name FROM sqlite_master") == [("recipes",)]


def test_a_place_that_cannot_be_written_is_refused_with_its_name(path):
    path.write_text("")
    with pytest.raises(StoreError, match=r"histories\.db.*; check that the folder is writable"):
        open_store(path / "inside.db")


def test_the_file_is_in_wal_mode_and_every_lookup_uses_an_index(path, opened):
    opened(path)
    assert query(path, "PRAGMA journal_mode") == [("wal",)]
    plans = {
        "SELECT item_id FROM events WHERE user_id = 'a' AND type NOT IN ('b')"
        " ORDER BY time_ms DESC, id DESC LIMIT 5": "events_by_user (user_id=?)",
        "SELECT digest FROM events WHERE event_id IN (SELECT value FROM json_each('[]'))":
            "events_by_event_id (event_id=?)",
        "SELECT DISTINCT user_id FROM events WHERE user_id >= 'a' ORDER BY user_id LIMIT 5":
            "COVERING INDEX events_by_user (user_id>?)",
    }  # fmt: skip
    for sql, index in plans.items():
        steps = [str(row[3]) for row in query(path, f"EXPLAIN QUERY PLAN {sql}")]
        assert index in steps[0], steps
        assert not any("TEMP B-TREE" in step for step in steps), steps


def test_others_on_the_machine_may_not_read_a_new_store(path, opened):
    store = opened(path)
    store.history.count()
    assert {file.stat().st_mode & 0o777 for file in path.parent.glob("histories.db*")} == {0o600}


async def test_commits_are_synced_and_erased_bytes_are_overwritten(path, opened, event):
    store = opened(path)
    connection = store.database._connect()
    assert connection.execute("PRAGMA synchronous").fetchone() == (2,)  # FULL
    assert connection.execute("PRAGMA secure_delete").fetchone() == (1,)  # until it is rewritten
    secret = "SECRET-" * 20
    await store.history.append([event(f"{i}", user=secret, item=f"item-{i}") for i in range(50)])
    await store.history.append([event("bob", user="bob")])
    store.served.remember(Served("r", secret, "m", ("x",), 1))
    await store.history.read(secret, 10)
    await store.history.erase(secret)
    assert secret.encode() not in on_disk(path)
    assert user_hash(secret, store.salt).encode() in on_disk(path)
    assert (await store.history.read("bob", 1)).items == ["x"]


async def test_a_full_disk_refuses_whole_writes_until_there_is_space(
    path, opened, event, monkeypatch
):
    store = opened(path)
    await store.history.append([event("before", item="kept")])
    pages = {"max": 60}
    insert = store.database.insert_events

    def limited(connection, rows):
        connection.exec_driver_sql(f"PRAGMA max_page_count = {pages['max']}")
        insert(connection, rows)

    monkeypatch.setattr(store.database, "insert_events", limited)
    accepted = 0
    refusal = None
    while refusal is None:
        names = range(accepted, accepted + 50)
        batch = [event(f"{name}", user=f"u{name}", item="x" * 200) for name in names]
        try:
            accepted += (await store.history.append(batch)).accepted
        except StoreError as error:
            refusal = str(error)
    assert "histories.db: database or disk is full; check that the folder" in refusal
    assert store.history.count() == accepted + 1  # nothing half-written
    assert (await store.history.read("ada", 10)).items == ["kept"]  # reading goes on
    with pytest.raises(StoreError, match="full"):
        await store.history.append([event(f"huge-{i}", item="x" * 200) for i in range(2000)])
    pages["max"] = 10_000
    assert (await store.history.append([event("after", item="too", time_ms=2000)])).accepted == 1
    assert (await store.history.read("ada", 10)).items == ["kept", "too"]


def on_disk(path):
    return b"".join(file.read_bytes() for file in path.parent.glob(f"{path.name}*"))


async def fill(store, event, users, seed=0):
    """Events of users whose ids move between pages while the index grows."""
    draw = random.Random(seed)
    for n in range(60):
        batch = [event(f"{n}-{i}", user=draw.choice(users), time_ms=n) for i in range(100)]
        await store.history.append(batch)


def ids(count, seed=0):
    draw = random.Random(seed)
    return [f"{draw.getrandbits(64):016x}" for _ in range(count)]


@pytest.mark.parametrize("seed", [1, 3, 5])
async def test_no_id_of_an_erased_user_is_left_in_the_file(path, opened, event, seed):
    users = ids(50, seed)
    store = opened(path)
    await fill(store, event, users, seed)
    for user in users[::2]:
        await store.history.erase(user)
    content = on_disk(path)
    assert [user for user in users[::2] if user.encode() in content] == []
    assert (await store.history.read(users[1], 1)).items == ["x"]


@pytest.mark.parametrize(("program", "kinds", "kills"), [("store", 2, 4), ("artifacts", 4, 4)])
def test_nothing_is_lost_if_writers_are_killed(python, program, kinds, kills):
    script = ROOT / "tests" / "stress" / f"kill_{program}.py"
    done = python(script, "--kills", kills, PYTHONPATH=str(ROOT))
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [line.split() for line in done.stdout.splitlines()[1:]]
    assert [row[-2:] for row in rows] == [["0", "0"]] * kinds  # lost and left


@pytest.fixture
def large(monkeypatch):
    """Every store counts as a large one, which is rewritten after the answer."""
    monkeypatch.setattr(sqlite_module, "AT_ONCE_BYTES", 0)
    monkeypatch.setattr(sqlite_module, "REST", 0.0)


def left_to_do(path):
    return bool(query(path, "SELECT * FROM state WHERE key = 'left_bytes'"))


@pytest.mark.usefixtures("large")
async def test_a_large_store_is_rewritten_after_the_answer(path, opened, event, monkeypatch):
    users = ids(50)
    store = opened(path)
    await fill(store, event, users)
    rewritten: list[bool] = []
    rewrite = store.database._rewrite

    def watch(connection):
        rewritten.append(left_to_do(path))
        return rewrite(connection)

    monkeypatch.setattr(store.database, "_rewrite", watch)
    monkeypatch.setattr(store.database, "_rest_until", math.inf)
    await store.history.erase(users[0])
    assert rewritten == []
    monkeypatch.setattr(store.database, "_rest_until", 0.0)
    await store.state.change("k", dict.clear)  # the writer begins with what is due
    assert rewritten == [True]
    assert not left_to_do(path)
    assert users[0].encode() not in on_disk(path)


@pytest.mark.usefixtures("large")
async def test_what_a_stop_left_is_done_after_the_next_start(path, opened, event):
    users = ids(50)
    store = open_store(path)
    await fill(store, event, users)
    store.database._rest_until = math.inf  # no time for it, as with a very large store
    for user in users[:25]:
        await store.history.erase(user)
    store.close()
    assert left_to_do(path)
    again = opened(path)
    await again.state.change("k", dict.clear)
    assert not left_to_do(path)
    content = on_disk(path)
    assert not [user for user in users[:25] if user.encode() in content]


async def test_a_reader_delays_the_truncation_of_the_log(path, opened, event, monkeypatch):
    monkeypatch.setattr(sqlite_module, "RETRY_S", 0.0)
    monkeypatch.setattr(sqlite_module, "REST", 0.0)
    store = opened(path)
    secret = "SECRET-" * 20
    await store.history.append([event("1", user=secret), event("2", user="bob")])
    exported = store.history.export()
    next(exported)  # reads a snapshot that has the user
    await store.history.erase(secret)
    assert left_to_do(path)
    exported.close()
    await store.state.change("k", dict.clear)
    assert not left_to_do(path)
    assert secret.encode() not in on_disk(path)


async def test_a_failure_after_an_erasure_does_not_undo_it(
    path, opened, event, monkeypatch, caplog
):
    store = opened(path)
    await store.history.append([event("1")])

    def full(connection):
        raise OSError("database or disk is full")

    monkeypatch.setattr(store.database, "_rewrite", full)
    await store.history.erase("ada")
    assert await store.history.events("ada", 9) == []
    assert "after an erasure: database or disk is full" in caplog.text
    assert left_to_do(path)


async def test_remembered_answers_survive_an_outage_but_not_their_own_fault(
    path, opened, remembered, monkeypatch, caplog
):
    store = opened(path)
    insert = store.served.insert
    away = [True]

    def fragile(connection, answers):
        if away:
            away.pop()
            raise OSError("unable to open database file")
        if any(answer.recommendation_id == "bad" for answer in answers):
            raise ValueError("refused")
        insert(connection, answers)

    monkeypatch.setattr(store.served, "insert", fragile)
    names = [f"r{i}" for i in range(9)]
    store.served._waiting.extend(Served(name, "bob", "m", ("x",), 1) for name in names)
    for n in (1, 2):
        with contextlib.suppress(StoreError):  # the first meets the outage
            await store.state.change("k", lambda value, n=n: value.update(n=n))
    assert await store.state.get("k") == {"n": 2}
    assert [remembered(store, name) for name in names] == [True] * 9
    store.served._waiting.extend(Served(name, "bob", "m", ("x",), 1) for name in ("next", "bad"))
    await store.state.change("k", lambda value: value.update(n=3))
    assert "2 answers were dropped" in caplog.text
    assert await store.state.get("k") == {"n": 3}
    assert not remembered(store, "bad")


async def test_an_answer_to_an_impossible_user_is_not_remembered(location, opened, remembered):
    store = opened(location)
    for name, user in (("a", "ada"), ("b", "b\0b")):
        store.served.remember(Served(name, user, "m", ("x",), 1))
    await store.state.change("k", dict.clear)
    assert [remembered(store, name) for name in "ab"] == [True, False]


async def test_answers_in_progress_at_an_erasure_are_not_remembered(path, opened, remembered):
    store = opened(path)
    await store.history.erase("ada")
    now = time.time_ns() // 1_000_000
    for name, user, late in (("a", "ada", 10), ("b", "bob", 10), ("c", "ada", 90_000)):
        store.served.remember(Served(name, user, "m", ("x",), now + late))
    await store.state.change("k", dict.clear)
    assert [remembered(store, name) for name in "abc"] == [False, True, True]
