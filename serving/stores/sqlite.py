"""SqliteStore: a store in one SQLite file in WAL mode, the embedded default."""

import json
import logging
import os
import sqlite3
import time
import uuid
from collections.abc import Iterable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, ClassVar

from recsys.artifacts import sync_folder
from recsys.errors import DataError
from recsys.locks import locked
from recsys.serving.stores.database import LEFT_BYTES, SCHEMA_VERSION, STORE_ID
from recsys.serving.stores.records import StoreError
from recsys.serving.stores.store import EVENT_COLUMNS, Store

logger = logging.getLogger("recsys.serving.stores")

SCHEMA = (
    """CREATE TABLE events (
        id INTEGER PRIMARY KEY,  -- order of arrival, which breaks ties of time
        event_id TEXT,
        user_id TEXT NOT NULL,
        item_id TEXT NOT NULL,
        type TEXT NOT NULL,
        time_ms INTEGER NOT NULL,
        value REAL,
        recommendation_id TEXT,
        linked INTEGER,          -- 1: the recommendation was remembered
        digest TEXT,
        seed TEXT                -- digest of the data set it was imported from, else NULL
    ) STRICT""",
    "CREATE INDEX events_by_user ON events (user_id, time_ms)",
    "CREATE UNIQUE INDEX events_by_event_id ON events (event_id) WHERE event_id IS NOT NULL",
    "CREATE TABLE seeds (digest TEXT PRIMARY KEY, events INTEGER NOT NULL) STRICT",
    """CREATE TABLE recommendations (
        id INTEGER PRIMARY KEY,
        recommendation_id TEXT NOT NULL UNIQUE,
        user_id TEXT,
        model TEXT NOT NULL,
        items TEXT NOT NULL,
        time_ms INTEGER NOT NULL
    ) STRICT""",
    "CREATE INDEX recommendations_by_user ON recommendations (user_id)",
    """CREATE TABLE erasures (
        salted_hash TEXT PRIMARY KEY,
        erased_ms INTEGER NOT NULL
    ) STRICT""",
    """CREATE TABLE journal (
        id INTEGER PRIMARY KEY,
        model TEXT NOT NULL,
        key TEXT,                -- of the item that a record is about
        record TEXT NOT NULL
    ) STRICT""",
    "CREATE INDEX journal_by_model ON journal (model, id)",
    "CREATE INDEX journal_by_key ON journal (model, key)",
    """CREATE TABLE exposures (
        id INTEGER PRIMARY KEY,
        experiment TEXT NOT NULL,
        user_id TEXT NOT NULL,
        arm TEXT NOT NULL,
        recommendation_id TEXT NOT NULL,
        time_ms INTEGER NOT NULL
    ) STRICT""",
    "CREATE INDEX exposures_by_experiment ON exposures (experiment, user_id, time_ms)",
    "CREATE INDEX exposures_by_user ON exposures (user_id)",
    "CREATE TABLE state (key TEXT PRIMARY KEY, value TEXT NOT NULL) STRICT",
    f"PRAGMA user_version = {SCHEMA_VERSION}",
)
INSERT = (
    f"INSERT INTO events ({', '.join(EVENT_COLUMNS)})"  # noqa: S608 - our own names
    f" VALUES ({', '.join('?' * len(EVENT_COLUMNS))})"
)
BUSY_TIMEOUT_S = 4.0  # of a call that a request waits for; less than the deadline of requests
PATIENT_S = 30.0  # of bulk work
OVERWRITE_WAIT_MS = 100  # for a reader or another writer, before overwriting is put off
AT_ONCE_BYTES = 8 << 20  # largest file for whose rewriting an erasure waits, about 0.1 s
REST = 9.0  # after rewriting a file, the time without rewriting, in durations of it
RETRY_S = 10.0


class SqliteStore(Store):
    """A store in one SQLite file, in which readers and the writer do not block each other.

    A commit is synced to disk before it is acknowledged (`synchronous = FULL`), so acknowledged
    writes survive a killed process and a power cut.

    `secure_delete` overwrites deleted rows, but not the copies that SQLite leaves in unused parts
    of pages when it balances a tree. So the file is rewritten (`VACUUM`) after an erasure. A small
    one is rewritten before the erasure is answered. A larger one is rewritten within a second of
    it, for at most a tenth of the time, and other writes wait meanwhile. A row of `state` stands
    for what is left to do, over a restart.
    """

    schema = SCHEMA
    readers: ClassVar[int] = 2
    # The write lock is taken at once, so rows read in the transaction do not change.
    begin: ClassVar[str] = "BEGIN IMMEDIATE"
    begin_snapshot: ClassVar[str] = "BEGIN"
    failures: ClassVar[tuple[type[Exception], ...]] = (sqlite3.Error, OSError)
    unavailable: ClassVar[tuple[type[Exception], ...]] = (sqlite3.OperationalError, OSError)

    def __init__(self, path: Path, **options: Any) -> None:
        """Open the file with options of `Store`, creating it where there is none."""
        self._path = path
        self._left: str | None = ""  # value of `LEFT_BYTES`; "": not read yet
        self._rewritten = False  # only the log is left
        self._rest_until, self._closing = 0.0, False
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

    def _prepare(self, connection: sqlite3.Connection) -> None:
        if _version(connection) == 0:
            (tables,) = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
            if tables and not _version(connection):
                raise StoreError(f"{self._path} is another program's database; {self.advice}")
        connection.execute("PRAGMA journal_mode = WAL")  # a backup has another one
        connection.execute(self.begin)
        with self._committed(connection):
            # another process may have made the tables meanwhile
            self._make_or_check(connection, _version(connection) or None)

    def back_up(self, file: Path) -> None:
        """Write a copy of the store to a new file, atomically; other processes may use the store.

        The copy gets an id of its own when it is opened, so that no cursor and no cached history
        from before is taken for one of it. Its owner alone can read it.

        Raises:
            DataError: there is a file already.
            LockedError: another process writes it.
        """
        with locked(file), self._explained(), self._connected() as connection:
            if file.exists():
                raise DataError(f"{file} is there already; name another file")
            partial = file.with_name(f".{file.name}.partial")
            partial.unlink(missing_ok=True)  # of a killed process
            partial.touch(mode=0o600)
            connection.execute("VACUUM INTO ?", (str(partial),))
            with closing(sqlite3.connect(partial)) as copy, copy:
                copy.execute("DELETE FROM state WHERE key IN (?, ?)", (STORE_ID, LEFT_BYTES))
            with partial.open("rb") as written:
                os.fsync(written.fileno())
            partial.replace(file)
            sync_folder(file.parent)

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

    def close(self) -> None:
        """As `Store.close`; a large file with bytes of erased users is left to the next start."""
        self._closing = True
        super().close()

    def _leave_bytes(self, cursor: Any) -> None:
        # A value of its own: who has rewritten the file before removes no later row.
        self._left, self._rewritten = uuid.uuid4().hex, False
        cursor.execute(
            "INSERT INTO state VALUES (?, ?)"
            " ON CONFLICT (key) DO UPDATE SET value = excluded.value",
            (LEFT_BYTES, json.dumps(self._left)),
        )

    def _overwrite(self, *, erased: bool = False) -> None:
        if self._left is None or (not erased and time.monotonic() < self._rest_until):
            return
        start = time.monotonic()
        done = False
        try:
            small = self._path.stat().st_size <= AT_ONCE_BYTES
            if self._closing and not small and not erased:
                return
            rewrite = small or not erased
            connection = self._own_connection()
            connection.execute(f"PRAGMA busy_timeout = {OVERWRITE_WAIT_MS}")
            try:
                done = self._overwrite_with(connection, rewrite=rewrite)
            finally:
                connection.execute(f"PRAGMA busy_timeout = {int(BUSY_TIMEOUT_S * 1000)}")
            if not rewrite:
                return
        except self.failures as error:  # the erasure itself is committed
            logger.warning("store %s: after an erasure: %s", self.place, error)
        end = time.monotonic()
        self._rest_until = end + max(0.0 if done else RETRY_S, REST * (end - start))

    def _overwrite_with(self, connection: Any, *, rewrite: bool) -> bool:
        """Rewrite the file if asked, and empty its log; whether no byte is left then."""
        if not self._left:
            query = "SELECT value FROM state WHERE key = ?"
            rows = connection.execute(query, (LEFT_BYTES,)).fetchall()
            self._left = str(json.loads(rows[0][0])) if rows else None
            if self._left is None:
                return True
        if rewrite and not self._rewritten:
            connection.execute("VACUUM")
            self._rewritten = True
        # The write-ahead log has the old pages; an active reader delays its truncation.
        ((busy, _, _),) = connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
        if busy or not self._rewritten:
            return False
        connection.execute(
            "DELETE FROM state WHERE key = ? AND value = ?", (LEFT_BYTES, json.dumps(self._left))
        )
        self._left = None
        return True


def _version(connection: sqlite3.Connection) -> int:
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    return int(version)
