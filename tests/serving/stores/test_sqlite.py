import contextlib
import random
import sqlite3
import time
from pathlib import Path
from types import SimpleNamespace

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
    assert user_hash(secret, store.database.salt).encode() in on_disk(path)
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


def left_to_do(path):
    return bool(query(path, "SELECT * FROM state WHERE key = 'left_bytes'"))


async def test_a_large_store_is_rewritten_at_the_next_start_of_its_only_user(
    path, opened, event, monkeypatch, caplog
):
    monkeypatch.setattr(sqlite_module, "AT_ONCE_BYTES", 0)
    users = ids(50)
    store = open_store(path)
    await fill(store, event, users)
    for user in users[:25]:
        await store.history.erase(user)
    await opened(path).prepare()  # beside the first one, whose writes would wait
    assert left_to_do(path)
    assert "bytes of erased users stay for now: database is locked" in caplog.text
    store.close()
    await opened(path).prepare()
    assert not left_to_do(path)
    content = on_disk(path)
    assert not [user for user in users[:25] if user.encode() in content]


async def test_a_reader_delays_the_truncation_of_the_log(path, opened, event):
    store = opened(path)
    secret = "SECRET-" * 20
    await store.history.append([event("1", user=secret), event("2", user="bob")])
    exported = store.history.export()
    next(exported)  # reads a snapshot that has the user
    await store.history.erase(secret)
    assert left_to_do(path)
    exported.close()
    await store.prepare()
    assert not left_to_do(path)
    assert secret.encode() not in on_disk(path)


async def test_a_failure_after_an_erasure_does_not_undo_it(
    path, opened, event, monkeypatch, caplog
):
    store = opened(path)
    await store.history.append([event("1")])

    def full():
        raise OSError("database or disk is full")

    monkeypatch.setattr(store.database, "_bulk_engine", SimpleNamespace(connect=full))
    await store.history.erase("ada")
    assert await store.history.events("ada", 9) == []
    assert "bytes of erased users stay for now: database or disk is full" in caplog.text
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
