"""PostgresStore: a store in PostgreSQL, which any number of processes can share."""

import contextlib
import os
import socket
from typing import Any, ClassVar

from recsys.errors import ConfigError
from recsys.serving.stores.breaker import Breaker, Watch
from recsys.serving.stores.database import SCHEMA_VERSION
from recsys.serving.stores.locations import place_of
from recsys.serving.stores.store import EVENT_COLUMNS, SEEDING, RaceError, Store

try:
    import psycopg
except ImportError as error:
    raise ConfigError(
        "a store in PostgreSQL needs psycopg; install the extra: pip install 'recbeam[postgres]'"
    ) from error

from collections.abc import Iterable, Iterator, Sequence

# Ids are compared byte by byte, as in SQLite, whatever the locale of the database.
SCHEMA = (
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
    """CREATE TABLE erasures (
        salted_hash TEXT PRIMARY KEY,
        erased_ms BIGINT NOT NULL
    )""",
    """CREATE TABLE journal (
        id BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
        model TEXT NOT NULL,
        key TEXT,  -- of the item that a record is about
        record TEXT NOT NULL
    )""",
    "CREATE INDEX journal_by_model ON journal (model, id)",
    "CREATE INDEX journal_by_key ON journal (model, key)",
    """CREATE TABLE exposures (
        id BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
        experiment TEXT NOT NULL,
        user_id TEXT COLLATE "C" NOT NULL,
        arm TEXT NOT NULL,
        recommendation_id TEXT COLLATE "C" NOT NULL,
        time_ms BIGINT NOT NULL
    )""",
    "CREATE INDEX exposures_by_experiment ON exposures (experiment, user_id, time_ms)",
    "CREATE INDEX exposures_by_user ON exposures (user_id)",
    "CREATE TABLE state (key TEXT PRIMARY KEY, value TEXT NOT NULL)",
    f"INSERT INTO recsys_schema VALUES ({SCHEMA_VERSION})",  # noqa: S608 - our own number
)
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
# An event is acknowledged after it is on the disk, whatever the database's default is.
SYNCED = """SELECT set_config('synchronous_commit', 'on', false)
    WHERE current_setting('synchronous_commit') = 'off'"""
CALL_S = 3.0  # of a call that a request waits for; less than the deadline of requests


class PostgresStore(Store):
    """A store in a PostgreSQL database.

    Each thread has its own connection. A call fails after `CALL_S`, since a server that hangs would
    hold its thread for ever. While the server does not answer, calls fail at once, except for one
    every `AWAY_S` seconds; they work again when it is back.
    """

    is_remote: ClassVar[bool] = True

    schema = SCHEMA
    readers: ClassVar[int] = 4
    begin: ClassVar[str] = "BEGIN"
    begin_snapshot: ClassVar[str] = "BEGIN ISOLATION LEVEL REPEATABLE READ"
    failures: ClassVar[tuple[type[Exception], ...]] = (psycopg.Error, OSError)
    unavailable: ClassVar[tuple[type[Exception], ...]] = (
        psycopg.OperationalError,
        psycopg.InterfaceError,
        OSError,
    )
    outdated: ClassVar[tuple[type[Exception], ...]] = (psycopg.errors.ReadOnlySqlTransaction,)

    def __init__(self, url: str, **options: Any) -> None:
        """Connect with options of `Store`, and create the tables where there are none."""
        self._url = url
        self._breaker = Breaker(AWAY_S)
        self._watch = Watch(CALL_S, self._give_up)
        try:
            super().__init__(place_of(url, "serve.store"), **options)
        except BaseException:
            self._watch.close()
            raise

    def close(self) -> None:
        """As of any store."""
        super().close()
        self._watch.close()

    @property
    def advice(self) -> str:
        """What a person can do about a failure."""
        return "check that the server runs and that the URL in serve.store is right"

    def _connect(self, *, patient: bool = False) -> psycopg.Connection[Any]:
        try:
            connection: psycopg.Connection[Any] = psycopg.connect(
                self._url,
                autocommit=True,
                connect_timeout=CONNECT_TIMEOUT_S,
                application_name="recsys",
                keepalives_idle=10,
                tcp_user_timeout=10_000,
            )
            if not patient:
                self._watch.begin(connection)
            # A plan made for a few events would stay in use for millions of them.
            connection.execute("SET plan_cache_mode = force_custom_plan")
            connection.execute(SYNCED)
            return connection
        except psycopg.OperationalError:
            self._breaker.failed()
            raise
        finally:
            if not patient:
                self._watch.finish()

    @contextlib.contextmanager
    def _guarded(self) -> Iterator[None]:
        if not self._breaker.enter():
            raise psycopg.OperationalError("the server did not answer a moment ago")
        try:
            yield
        finally:
            self._breaker.leave()

    @contextlib.contextmanager
    def _limited(self, connection: Any) -> Iterator[None]:
        self._watch.begin(connection)
        try:
            yield
        finally:
            self._watch.finish()

    def _give_up(self, connection: Any) -> None:
        """End a call that hangs: its thread then finds that the connection is lost."""
        self._breaker.failed()
        with (
            contextlib.suppress(psycopg.Error, OSError),
            socket.socket(fileno=os.dup(connection.fileno())) as copy,
        ):
            copy.shutdown(socket.SHUT_RDWR)

    def _works(self) -> None:
        self._breaker.worked()
        super()._works()

    def _prepare(self, connection: Any) -> None:
        connection.execute(self.begin)
        with self._committed(connection):
            self._lock(connection.cursor(), SEEDING)
            connection.execute("CREATE TABLE IF NOT EXISTS recsys_schema (version INT NOT NULL)")
            (version,) = connection.execute("SELECT max(version) FROM recsys_schema").fetchone()
            self._make_or_check(connection, version)

    def _lock(self, cursor: Any, what: int, *, shared: bool = False) -> None:
        function = f"pg_advisory_xact_lock{'_shared' if shared else ''}"
        try:
            cursor.execute(f"SELECT {function}(%s)", (LOCK + what,))
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
