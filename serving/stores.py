"""History stores: what each user did, by outside ids.

`HistoryStore` is the seam; SQLite is the embedded default. A store knows users, items and times; it
does not know which items the model has.
"""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Protocol

from recsys.artifacts import verify
from recsys.dataset import Dataset
from recsys.errors import RecsysError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

SCHEMA_VERSION = 1
SCHEMA = (
    """CREATE TABLE events (
        id INTEGER PRIMARY KEY,      -- order of arrival, which breaks ties of time
        user_id TEXT NOT NULL,
        item_id TEXT NOT NULL,
        timestamp INTEGER NOT NULL,  -- unix seconds, or the place in the sequence without times
        seed TEXT                    -- digest of the data set it was imported from, else NULL
    ) STRICT""",
    "CREATE INDEX events_by_user ON events (user_id, timestamp)",
    "CREATE TABLE seeds (digest TEXT PRIMARY KEY, events INTEGER NOT NULL) STRICT",
    f"PRAGMA user_version = {SCHEMA_VERSION}",
)
BUSY_TIMEOUT_S = 30.0
READERS = 2
CHUNK = 50_000


class StoreError(RecsysError):
    """The store cannot be read or written."""


class HistoryStore(Protocol):
    """Where histories come from."""

    async def history(self, user_id: str, limit: int) -> list[str] | None:
        """The user's latest items, oldest first, or None if the user is unknown.

        Raises:
            StoreError: the store cannot be read.
        """

    def close(self) -> None:
        """Release what is held; no call may follow."""


class SqliteHistoryStore:
    """Histories in one SQLite file in WAL mode: readers and a writer do not wait for each other."""

    def __init__(self, path: Path) -> None:
        """Open the store, creating it where there is none.

        Raises:
            StoreError: not a store, one of a newer version, or an unwritable place.
        """
        self._path = path
        self._local = threading.local()
        self._connections: list[sqlite3.Connection] = []
        with self._explained():
            path.parent.mkdir(parents=True, exist_ok=True)
            with closing(self._connect()) as connection:
                self._create(connection)
        self._readers = ThreadPoolExecutor(READERS, thread_name_prefix="histories")

    async def history(self, user_id: str, limit: int) -> list[str] | None:
        """The user's latest items, oldest first, or None if the user is unknown.

        Raises:
            StoreError: the file cannot be read.
        """
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._readers, self._history, user_id, limit)

    def seed(self, dataset: Path) -> int:
        """Import the histories of a canonical data set, once for each of its versions.

        An earlier version of the seed is replaced in the same transaction; events that came from
        elsewhere stay.

        Returns:
            Events imported; 0 if this version is there already.

        Raises:
            ArtifactError: no data set there, or an altered one.
            StoreError: the file cannot be written.
        """
        digest = Dataset.manifest(dataset).digest
        with self._explained(), closing(self._connect()) as connection:
            if self._is_seeded(connection, digest):
                return 0
            verify(dataset, "dataset")
            data = Dataset.load(dataset)
            with _transaction(connection):
                if self._is_seeded(connection, digest):  # by another process, meanwhile
                    return 0
                self._import(connection, data, digest)
        return len(data.interactions)

    def close(self) -> None:
        """End the readers and close their connections."""
        self._readers.shutdown()
        for connection in self._connections:
            connection.close()

    def _history(self, user_id: str, limit: int) -> list[str] | None:
        with self._explained():
            if not hasattr(self._local, "connection"):
                self._local.connection = self._connect()
                self._connections.append(self._local.connection)
            rows = self._local.connection.execute(
                "SELECT item_id FROM events WHERE user_id = ? ORDER BY timestamp DESC, id DESC"
                " LIMIT ?",
                (user_id, limit),
            ).fetchall()
        return [item_id for (item_id,) in reversed(rows)] or None

    def _connect(self) -> sqlite3.Connection:
        # Connections are closed by `close`, on another thread than the one that uses them.
        return sqlite3.connect(
            self._path, timeout=BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False
        )

    def _create(self, connection: sqlite3.Connection) -> None:
        if _version(connection) == 0:
            connection.execute("PRAGMA journal_mode = WAL")
            with _transaction(connection):
                if _version(connection) == 0:  # no other process was quicker
                    for statement in SCHEMA:
                        connection.execute(statement)
        if (version := _version(connection)) > SCHEMA_VERSION:
            raise StoreError(
                f"{self._path}: schema {version} is newer than this program's {SCHEMA_VERSION}; "
                "upgrade recsys"
            )

    @staticmethod
    def _is_seeded(connection: sqlite3.Connection, digest: str) -> bool:
        found = connection.execute("SELECT 1 FROM seeds WHERE digest = ?", (digest,)).fetchone()
        return found is not None

    @staticmethod
    def _import(connection: sqlite3.Connection, data: Dataset, digest: str) -> None:
        connection.execute("DELETE FROM events WHERE seed IS NOT NULL")
        connection.execute("DELETE FROM seeds")
        events = data.interactions
        for start in range(0, len(events), CHUNK):
            rows = slice(start, start + CHUNK)
            connection.executemany(
                "INSERT INTO events (user_id, item_id, timestamp, seed) VALUES (?, ?, ?, ?)",
                zip(
                    events.user_ids[events.user[rows]].tolist(),
                    events.item_ids[events.item[rows]].tolist(),
                    events.timestamp[rows].tolist(),
                    [digest] * len(events.user[rows]),
                    strict=True,
                ),
            )
        connection.execute("INSERT INTO seeds VALUES (?, ?)", (digest, len(events)))

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except (sqlite3.Error, OSError) as error:
            raise StoreError(
                f"history store {self._path}: {error}; check that the folder is writable and has "
                "space, or name another file with --set serve.store=PATH"
            ) from error


def _version(connection: sqlite3.Connection) -> int:
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    return int(version)


@contextmanager
def _transaction(connection: sqlite3.Connection) -> Iterator[None]:
    """All or nothing; the write lock is taken at once, so what is read inside stays true."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
        connection.execute("COMMIT")
    except BaseException:
        connection.execute("ROLLBACK")
        raise
