from __future__ import annotations

import asyncio
import sqlite3
from typing import TYPE_CHECKING

import pytest

from recsys.errors import ArtifactError
from serving.stores import SqliteHistoryStore, StoreError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

pytestmark = pytest.mark.anyio
EVENTS = [("ada", "x", 30), ("ada", "y", 10), ("bob", "z", 5), ("ada", "w", 30)]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[SqliteHistoryStore]:
    made = SqliteHistoryStore(tmp_path / "var" / "histories.db")
    yield made
    made.close()


def rows(path: Path, query: str) -> list[tuple[object, ...]]:
    connection = sqlite3.connect(path)
    try:
        return connection.execute(query).fetchall()
    finally:
        connection.close()


async def test_a_history_is_oldest_first_and_equal_times_keep_their_order(
    store: SqliteHistoryStore, write_dataset: Callable[..., Path]
) -> None:
    assert store.seed(write_dataset(EVENTS)) == 4
    assert await store.history("ada", 10) == ["y", "x", "w"]
    assert await store.history("ada", 2) == ["x", "w"]
    assert await store.history("bob", 10) == ["z"]
    assert await store.history("eve", 10) is None


async def test_seeding_twice_is_seeding_once(
    store: SqliteHistoryStore, write_dataset: Callable[..., Path], tmp_path: Path
) -> None:
    dataset = write_dataset(EVENTS)
    assert store.seed(dataset) == 4
    assert store.seed(dataset) == 0
    again = SqliteHistoryStore(tmp_path / "var" / "histories.db")  # after a restart
    assert again.seed(dataset) == 0
    again.close()
    assert await store.history("ada", 10) == ["y", "x", "w"]


async def test_a_newer_data_set_replaces_the_older_and_nothing_else(
    store: SqliteHistoryStore, write_dataset: Callable[..., Path], tmp_path: Path
) -> None:
    store.seed(write_dataset(EVENTS))
    connection = sqlite3.connect(tmp_path / "var" / "histories.db")
    connection.execute(
        "INSERT INTO events (user_id, item_id, timestamp) VALUES ('ada', 'live', 50)"
    )
    connection.commit()
    connection.close()
    assert store.seed(write_dataset([("ada", "new", 40)])) == 1
    assert await store.history("ada", 10) == ["new", "live"]
    assert await store.history("bob", 10) is None


async def test_a_failed_import_leaves_nothing_behind(
    store: SqliteHistoryStore,
    write_dataset: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store.seed(write_dataset(EVENTS))
    newer = write_dataset([("ada", "new", 40)])
    original = SqliteHistoryStore._import

    def failing(connection: sqlite3.Connection, *arguments: object) -> None:
        original(connection, *arguments)  # type: ignore[arg-type]
        raise sqlite3.OperationalError("database or disk is full")

    monkeypatch.setattr(SqliteHistoryStore, "_import", staticmethod(failing))
    with pytest.raises(StoreError, match=r"histories\.db: database or disk is full; check"):
        store.seed(newer)
    assert await store.history("ada", 10) == ["y", "x", "w"]
    monkeypatch.undo()
    assert store.seed(newer) == 1


def test_an_altered_data_set_is_refused_by_its_files_name(
    store: SqliteHistoryStore, write_dataset: Callable[..., Path]
) -> None:
    dataset = write_dataset(EVENTS)
    with (dataset / "users.parquet").open("ab") as file:
        file.write(b"x")
    with pytest.raises(ArtifactError, match=r"'users\.parquet' does not match its checksum"):
        store.seed(dataset)
    with pytest.raises(ArtifactError, match="is not an artifact"):
        store.seed(dataset.parent / "nowhere")


async def test_many_readers_at_once_each_read_their_own_user(
    store: SqliteHistoryStore, write_dataset: Callable[..., Path]
) -> None:
    events = [(f"u{u}", f"u{u}-{t}", t) for u in range(50) for t in range(20)]
    dataset = write_dataset(events)
    seeding = asyncio.create_task(asyncio.to_thread(store.seed, dataset))
    early = await asyncio.gather(*(store.history(f"u{u}", 20) for u in range(50)))
    await seeding
    late = await asyncio.gather(*(store.history(f"u{u % 50}", 20) for u in range(500)))
    full = [[f"u{u}-{t}" for t in range(20)] for u in range(50)]
    assert all(found in (None, full[u]) for u, found in enumerate(early))  # all or nothing
    assert late == full * 10


async def test_outside_ids_are_data_and_never_sql(
    store: SqliteHistoryStore, write_dataset: Callable[..., Path], tmp_path: Path
) -> None:
    nasty = "'; DROP TABLE events; --"
    store.seed(write_dataset([(nasty, '"); --', 1), ("%", "a", 1), ("é\u2028💄", "\n", 1)]))
    assert await store.history(nasty, 5) == ['"); --']
    assert await store.history("%", 5) == ["a"]
    assert await store.history("é\u2028💄", 5) == ["\n"]
    assert await store.history("' OR 1=1 --", 5) is None
    assert rows(tmp_path / "var" / "histories.db", "SELECT count(*) FROM events") == [(3,)]


def test_the_file_is_in_wal_mode_and_reading_a_history_uses_the_index(
    store: SqliteHistoryStore, tmp_path: Path
) -> None:
    path = tmp_path / "var" / "histories.db"
    assert rows(path, "PRAGMA journal_mode") == [("wal",)]
    plan = rows(
        path,
        "EXPLAIN QUERY PLAN SELECT item_id FROM events WHERE user_id = 'a'"
        " ORDER BY timestamp DESC, id DESC LIMIT 5",
    )
    assert [row[3] for row in plan] == ["SEARCH events USING INDEX events_by_user (user_id=?)"]


def test_a_file_that_is_no_store_is_refused_with_its_name(tmp_path: Path) -> None:
    path = tmp_path / "histories.db"
    path.write_bytes(b"a cookie recipe, surely long enough to be read as a header" * 10)
    with pytest.raises(StoreError, match=r"histories\.db: file is not a database; .*serve\.store="):
        SqliteHistoryStore(path)


def test_a_store_of_a_newer_version_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "histories.db"
    SqliteHistoryStore(path).close()
    connection = sqlite3.connect(path)
    connection.execute("PRAGMA user_version = 99")
    connection.close()
    with pytest.raises(StoreError, match="schema 99 is newer than this program's 1"):
        SqliteHistoryStore(path)
