"""SqliteStore: a store in one SQLite file in WAL mode, the embedded default."""

import json
import sqlite3
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, ClassVar

from recsys.serving.stores.records import SEED_TYPE, StoreError
from recsys.serving.stores.store import EVENT_COLUMNS, Store

# Numbered, forward only, all in one transaction. Released migrations are never edited.
MIGRATIONS = {
    1: (
        """CREATE TABLE events (
            id INTEGER PRIMARY KEY,      -- order of arrival, which breaks ties of time
            user_id TEXT NOT NULL,
            item_id TEXT NOT NULL,
            timestamp INTEGER NOT NULL,  -- unix seconds, or the place in a sequence without times
            seed TEXT                    -- digest of the data set it was imported from, else NULL
        ) STRICT""",
        "CREATE INDEX events_by_user ON events (user_id, timestamp)",
        "CREATE TABLE seeds (digest TEXT PRIMARY KEY, events INTEGER NOT NULL) STRICT",
    ),
    2: (
        "ALTER TABLE events RENAME COLUMN timestamp TO time_ms",
        "UPDATE events SET time_ms = time_ms * 1000",
        "ALTER TABLE events ADD COLUMN event_id TEXT",
        f"ALTER TABLE events ADD COLUMN type TEXT NOT NULL DEFAULT '{SEED_TYPE}'",
        "ALTER TABLE events ADD COLUMN value REAL",
        "ALTER TABLE events ADD COLUMN recommendation_id TEXT",
        "ALTER TABLE events ADD COLUMN linked INTEGER",  # 1: the recommendation was remembered
        "ALTER TABLE events ADD COLUMN digest TEXT",
        "CREATE UNIQUE INDEX events_by_event_id ON events (event_id) WHERE event_id IS NOT NULL",
        """CREATE TABLE recommendations (
            id INTEGER PRIMARY KEY,
            recommendation_id TEXT NOT NULL UNIQUE,
            user_id TEXT,
            model TEXT NOT NULL,
            items TEXT NOT NULL,
            time_ms INTEGER NOT NULL
        ) STRICT""",
        "CREATE INDEX recommendations_by_user ON recommendations (user_id)",
        "CREATE TABLE erasures (user_hash TEXT PRIMARY KEY, erased_ms INTEGER NOT NULL) STRICT",
        "CREATE TABLE journal (id INTEGER PRIMARY KEY, model TEXT NOT NULL, record TEXT NOT NULL)"
        " STRICT",
        "CREATE INDEX journal_by_model ON journal (model, id)",
        "CREATE TABLE state (key TEXT PRIMARY KEY, value TEXT NOT NULL) STRICT",
    ),
    3: (
        "ALTER TABLE journal ADD COLUMN key TEXT",  # of the item that a record is about
        "CREATE INDEX journal_by_key ON journal (model, key)",
    ),
}
INSERT = (
    f"INSERT INTO events ({', '.join(EVENT_COLUMNS)})"  # noqa: S608 - our own names
    f" VALUES ({', '.join('?' * len(EVENT_COLUMNS))})"
)
BUSY_TIMEOUT_S = 4.0  # of a call that a request waits for; less than the deadline of requests
PATIENT_S = 30.0  # of bulk work
CHECKPOINT_WAIT_MS = 100


class SqliteStore(Store):
    """A store in one SQLite file, in which readers and the writer do not block each other.

    A commit is synced to disk before it is acknowledged (`synchronous = FULL`), so acknowledged
    writes survive a killed process and a power cut.
    """

    migrations = MIGRATIONS
    write_version: ClassVar[str] = "PRAGMA user_version = {}"
    readers: ClassVar[int] = 2
    # The write lock is taken at once, so rows read in the transaction do not change.
    begin: ClassVar[str] = "BEGIN IMMEDIATE"
    begin_snapshot: ClassVar[str] = "BEGIN"
    failures: ClassVar[tuple[type[Exception], ...]] = (sqlite3.Error, OSError)
    unavailable: ClassVar[tuple[type[Exception], ...]] = (sqlite3.OperationalError, OSError)

    def __init__(self, path: Path, **options: Any) -> None:
        """Open the file with options of `Store`, creating it where there is none."""
        self._path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch(mode=0o600)  # histories are private
        except OSError as error:
            raise StoreError(f"store {path}: {error}; {self.advice}") from error
        super().__init__(str(path), **options)

    @property
    def advice(self) -> str:
        """What a person can do about a failure."""
        return (
            "check that the folder is writable and has space, or name another place with "
            "--set serve.store=PATH"
        )

    def _connect(self, *, patient: bool = False) -> sqlite3.Connection:
        # Connections are closed by `close`, on another thread than the one that uses them.
        connection = sqlite3.connect(
            self._path,
            timeout=PATIENT_S if patient else BUSY_TIMEOUT_S,
            isolation_level=None,
            check_same_thread=False,
        )
        try:
            connection.execute("PRAGMA synchronous = FULL")
            connection.execute("PRAGMA secure_delete = ON")  # an erased user's pages are zeroed
        except BaseException:
            connection.close()
            raise
        return connection

    def _migrate(self, connection: sqlite3.Connection) -> None:
        if _version(connection) == 0:
            (tables,) = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
            if tables and not _version(connection):
                raise StoreError(f"{self._path} is another program's database; {self.advice}")
            connection.execute("PRAGMA journal_mode = WAL")
        connection.execute(self.begin)
        with self._committed(connection):
            # another process may have migrated it meanwhile
            self._upgrade(connection, _version(connection))

    def _among(self, column: str, values: Iterable[str]) -> tuple[str, Any]:
        condition = f"{column} IN (SELECT value FROM json_each(?))"  # noqa: S608
        return condition, json.dumps(list(values))

    def _insert(self, cursor: Any, rows: Sequence[Sequence[Any]]) -> int:
        cursor.executemany(f"{INSERT} ON CONFLICT DO NOTHING", rows)
        return int(cursor.rowcount)

    def _bulk(self, cursor: Any, rows: Iterable[Sequence[Any]]) -> None:
        cursor.executemany(INSERT, rows)

    def _roll_back(self, connection: Any) -> None:
        if connection.in_transaction:  # SQLite rolls back itself if the disk is full
            connection.execute("ROLLBACK")

    def _after_erasure(self, connection: Any) -> None:
        # The write-ahead log still has the old pages; an active reader delays its truncation.
        connection.execute(f"PRAGMA busy_timeout = {CHECKPOINT_WAIT_MS}")
        try:
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        finally:
            connection.execute(f"PRAGMA busy_timeout = {int(BUSY_TIMEOUT_S * 1000)}")


def _version(connection: sqlite3.Connection) -> int:
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    return int(version)
