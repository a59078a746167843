"""PostgresStore: a store in PostgreSQL, which any number of processes can share."""

import threading
import time
from typing import Any, ClassVar
from urllib.parse import urlsplit

from recsys.errors import ConfigError
from recsys.serving.stores.store import EVENT_COLUMNS, SEEDING, RaceError, Store

try:
    import psycopg
except ImportError as error:
    raise ConfigError(
        "a store in PostgreSQL needs psycopg; install the extra: pip install 'recbeam[postgres]'"
    ) from error

from collections.abc import Iterable, Sequence

# Numbered like SQLite's, so that a number identifies a schema; PostgreSQL starts at 2.
MIGRATIONS = {
    2: (
        # Ids are compared byte by byte, as in SQLite, whatever the locale of the database.
        """CREATE TABLE events (
            id BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
            event_id TEXT COLLATE "C",
            user_id TEXT COLLATE "C" NOT NULL,
            item_id TEXT COLLATE "C" NOT NULL,
            type TEXT NOT NULL,
            time_ms BIGINT NOT NULL,
            value DOUBLE PRECISION,
            recommendation_id TEXT COLLATE "C",
            linked SMALLINT,
            digest TEXT,
            seed TEXT
        )""",
        "CREATE INDEX events_by_user ON events (user_id, time_ms, id)",
        # Not a partial index: PostgreSQL does not use one for ids in a parameter.
        "CREATE UNIQUE INDEX events_by_event_id ON events (event_id)",
        "CREATE TABLE seeds (digest TEXT PRIMARY KEY, events BIGINT NOT NULL)",
        """CREATE TABLE recommendations (
            id BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
            recommendation_id TEXT COLLATE "C" NOT NULL UNIQUE,
            user_id TEXT COLLATE "C",
            model TEXT NOT NULL,
            items TEXT NOT NULL,
            time_ms BIGINT NOT NULL
        )""",
        "CREATE INDEX recommendations_by_user ON recommendations (user_id)",
        "CREATE TABLE erasures (user_hash TEXT PRIMARY KEY, erased_ms BIGINT NOT NULL)",
        """CREATE TABLE journal (
            id BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
            model TEXT NOT NULL,
            record TEXT NOT NULL
        )""",
        "CREATE INDEX journal_by_model ON journal (model, id)",
        "CREATE TABLE state (key TEXT PRIMARY KEY, value TEXT NOT NULL)",
    ),
    3: (
        "ALTER TABLE journal ADD COLUMN key TEXT",  # of the item that a record is about
        "CREATE INDEX journal_by_key ON journal (model, key)",
    ),
    # The hashes are salted by `Store`. The new name stops processes that would not salt them.
    4: ("ALTER TABLE erasures RENAME COLUMN user_hash TO salted_hash",),
}
ARRAYS = (
    "text[]", "text[]", "text[]", "text[]", "bigint[]", "float8[]", "text[]", "smallint[]",
    "text[]", "text[]",
)  # fmt: skip
INSERT = (  # one array per column: ten times as fast as one statement per row
    f"INSERT INTO events ({', '.join(EVENT_COLUMNS)})"  # noqa: S608 - our own names
    f" SELECT * FROM unnest({', '.join(f'%s::{kind}' for kind in ARRAYS)})"
    " ON CONFLICT DO NOTHING"
)
LOCK = 0x7265637379  # first key of pg_advisory_xact_lock
CONNECT_TIMEOUT_S = 3
AWAY_S = 1.0


class PostgresStore(Store):
    """A store in a PostgreSQL database.

    Each thread has its own connection. Calls fail at once while the server is unreachable, and work
    again when it is back.
    """

    migrations = MIGRATIONS
    write_version: ClassVar[str] = "INSERT INTO recsys_schema VALUES ({})"
    readers: ClassVar[int] = 4
    begin: ClassVar[str] = "BEGIN"
    begin_snapshot: ClassVar[str] = "BEGIN ISOLATION LEVEL REPEATABLE READ"
    failures: ClassVar[tuple[type[Exception], ...]] = (psycopg.Error, OSError)
    unavailable: ClassVar[tuple[type[Exception], ...]] = (
        psycopg.OperationalError,
        psycopg.InterfaceError,
        OSError,
    )

    def __init__(self, url: str, **options: Any) -> None:
        """Connect with options of `Store`, and create the tables where there are none."""
        self._url = url
        self._away_until = 0.0
        self._away_lock = threading.Lock()
        parts = urlsplit(url)
        super().__init__(f"postgresql://{parts.hostname or ''}{parts.path}", **options)

    @property
    def advice(self) -> str:
        """What a person can do about a failure."""
        return "check that the server runs and that the URL in serve.store is right"

    def _connect(self) -> psycopg.Connection[Any]:
        # While the server is unreachable, only one call per second tries to connect.
        with self._away_lock:
            if time.monotonic() < self._away_until:
                raise psycopg.OperationalError("the server was unreachable a moment ago")
        try:
            connection: psycopg.Connection[Any] = psycopg.connect(
                self._url,
                autocommit=True,
                connect_timeout=CONNECT_TIMEOUT_S,
                application_name="recsys",
                keepalives_idle=10,
                tcp_user_timeout=10_000,
            )
            # A plan made for a few events would stay in use for millions of them.
            connection.execute("SET plan_cache_mode = force_custom_plan")
            return connection
        except psycopg.OperationalError:
            with self._away_lock:
                self._away_until = time.monotonic() + AWAY_S
            raise

    def _migrate(self, connection: Any) -> None:
        connection.execute(self.begin)
        with self._committed(connection):
            self._lock(connection.cursor(), SEEDING)
            connection.execute("CREATE TABLE IF NOT EXISTS recsys_schema (version INT NOT NULL)")
            (version,) = connection.execute(
                "SELECT coalesce(max(version), 1) FROM recsys_schema"
            ).fetchone()
            self._upgrade(connection, version)

    def _lock(self, cursor: Any, what: int) -> None:
        try:
            cursor.execute("SELECT pg_advisory_xact_lock(%s)", (LOCK + what,))
        except psycopg.errors.DeadlockDetected as error:
            raise RaceError from error

    def _among(self, column: str, values: Iterable[str]) -> tuple[str, Any]:
        return f"{column} = ANY(?)", list(values)

    def _sql(self, query: str) -> str:
        return query.replace("?", "%s")

    def _insert(self, cursor: Any, rows: Sequence[Sequence[Any]]) -> int:
        try:
            cursor.execute(INSERT, [list(column) for column in zip(*rows, strict=True)])
        except psycopg.errors.DeadlockDetected as error:
            raise RaceError from error
        return int(cursor.rowcount)

    def _bulk(self, cursor: Any, rows: Iterable[Sequence[Any]]) -> None:
        with cursor.copy(f"COPY events ({', '.join(EVENT_COLUMNS)}) FROM STDIN") as copy:
            for row in rows:
                copy.write_row(row)

    def _is_lost(self, connection: Any) -> bool:
        return bool(connection.closed)

    def _roll_back(self, connection: Any) -> None:
        if not connection.closed:
            connection.execute("ROLLBACK")
