"""Backups of stores: copies that become stores again when they are put in the place of one."""

import asyncio
import re
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
import sqlalchemy as sa
from typer.testing import CliRunner

from recsys.errors import ConfigError, DataError
from recsys.serving.schemas.events import EventIn
from recsys.serving.store_commands import app
from recsys.serving.stores.records import Appended, Exposure, Served

ROOT = Path(__file__).parents[3]
TABLES = ("events", "recommendations", "erasures", "journal", "exposures", "state")


def rows(path):
    """All rows of a file."""
    with closing(sqlite3.connect(path)) as connection:
        return {table: connection.execute(f"SELECT * FROM {table}").fetchall() for table in TABLES}


@pytest.fixture
async def full(tmp_path, opened, event, write_dataset):
    """A store with rows in every table."""
    store = opened(tmp_path / "shop.db")
    store.history.seed(write_dataset([("ada", "x", 30), ("ada", "y", 10), ("bob", "z", 5)]))
    shown = Exposure("e", "a", 1000)
    store.served.remember(Served("r", "ada", "m@1", ("w", "x"), 1_500_000_000_000, shown))
    await store.history.append(
        [event("1", item="é\u2028"), event("2", value=4.5, recommendation_id="r")]
    )
    await store.history.append([event("3", user="eve")])
    await store.history.erase("eve")
    await store.journal.append("catalogue", [{"op": "remove", "item_id": "i"}])
    await store.state.change("aliases", lambda state: state.update(champion="a"))
    return store


async def test_a_backup_has_every_row(full, tmp_path, opened, event):
    full.database.back_up(tmp_path / "out" / "backup.db")
    assert [file.name for file in (tmp_path / "out").iterdir()] == ["backup.db"]
    assert (tmp_path / "out" / "backup.db").stat().st_mode & 0o777 == 0o600
    assert rows(tmp_path / "out" / "backup.db") == rows(tmp_path / "shop.db")
    copy = opened(shutil.copy(tmp_path / "out" / "backup.db", tmp_path / "restored.db"))
    assert copy.database.salt == full.database.salt
    assert copy.database.read(sa.text("PRAGMA journal_mode")) == [("wal",)]
    assert await copy.history.append([event("3", user="eve")]) == Appended(ignored=1)


async def test_the_documented_query_gives_the_events_that_the_api_took(full, tmp_path, event):
    page = (ROOT / "docs" / "stores.md").read_text(encoding="utf-8")
    (query,) = re.findall(r'sqlite3 store\.db "(SELECT [^"]+)"', page)
    with closing(sqlite3.connect(tmp_path / "shop.db")) as connection:
        lines = [line for (line,) in connection.execute(query)]
    sent = {e.event_id: e for e in map(EventIn.model_validate_json, lines)}
    assert len(lines) == len(sent) == 2  # neither the erased user's, nor the data set's
    first, second = event("1", item="é\u2028"), event("2", value=4.5)
    for one in (first, second):
        posted = sent[one.event_id].to_event(2**52)
        assert (posted.user, posted.item, posted.type) == (one.user, one.item, one.type)
        assert (posted.time_ms, posted.value) == (one.time_ms, one.value)


async def test_no_file_is_replaced_and_no_rest_is_left(full, tmp_path):
    (tmp_path / "out").mkdir()
    file = tmp_path / "out" / "backup.db"
    file.with_name(".backup.db.writing").write_text("of a killed process")
    full.database.back_up(file)
    before = file.read_bytes()
    for place in (file, tmp_path / "shop.db", tmp_path / "out"):
        with pytest.raises(DataError, match="is there already; name another file"):
            full.database.back_up(place)
    assert file.read_bytes() == before
    assert [one.name for one in (tmp_path / "out").iterdir()] == ["backup.db"]


async def test_a_backup_under_load_is_one_state(full, tmp_path, opened, event):
    done, stop = [], asyncio.Event()

    async def write(writer):
        while not stop.is_set():
            user = f"{writer}-{len(done)}"
            await full.history.append([event(f"{user}-{n}", user=user) for n in range(3)])
            done.append(user)

    writers = [asyncio.create_task(write(number)) for number in range(4)]
    while len(done) < 20:
        await asyncio.sleep(0)
    before = set(done)
    await asyncio.to_thread(full.database.back_up, tmp_path / "backup.db")
    stop.set()
    await asyncio.gather(*writers)
    copy = opened(tmp_path / "backup.db")
    stored = [event.user for event in copy.history.export() if event.user.partition("-")[1]]
    assert before <= set(stored)
    assert {stored.count(user) for user in stored} == {3}


def test_a_store_in_postgresql_is_backed_up_by_its_own_tool(postgres, opened, tmp_path):
    opened(postgres.url)
    file = tmp_path / "backup.db"
    done = CliRunner().invoke(app, ["backup", str(file), "--store", postgres.url])
    assert isinstance(done.exception, ConfigError)
    assert "back it up by `pg_dump --format=custom --file=FILE URL`" in str(done.exception)
    assert not file.exists()


async def test_a_dump_of_postgresql_is_a_store_again(postgres, opened, event):
    store = opened(postgres.url)
    await store.history.append([event("1"), event("2", user="eve")])
    await store.history.erase("eve")
    store.close()
    at = ("-h", "127.0.0.1", "-p", str(postgres.port), "-U", "postgres")
    file = f"{postgres.home}/data/backup.dump"
    postgres.run("pg_dump", *at, "--format=custom", f"--file={file}", "postgres")
    postgres.empty()
    postgres.run("pg_restore", *at, "--dbname=postgres", "--clean", "--if-exists", file)
    again = opened(postgres.url)
    assert [e.event_id for e in again.history.export()] == ["1"]
    assert again.history.erased(["eve"])
    assert await again.history.append([event("2", user="eve"), event("3")]) == Appended(
        accepted=1, ignored=1
    )


@pytest.mark.parametrize("url", ["", "sqlite:///"])
def test_a_store_that_is_not_there_is_not_made_and_saved(tmp_path, url):
    place = tmp_path / "wrong" / "a.db"
    done = CliRunner().invoke(app, ["backup", str(tmp_path / "s.db"), "--store", f"{url}{place}"])
    assert isinstance(done.exception, ConfigError)
    assert str(done.exception) == f"there is no store {place}; name one by --store"
    assert list(tmp_path.iterdir()) == []
