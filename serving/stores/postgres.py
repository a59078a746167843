"""PostgreSQL: a store that any number of processes can share."""

import contextlib
import os
import socket
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, ClassVar

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql
from sqlalchemy.engine import ExceptionContext
from sqlalchemy.exc import DBAPIError

from recsys.errors import ConfigError
from recsys.serving.stores.breaker import Breaker, Watch
from recsys.serving.stores.database import Database, RaceError
from recsys.serving.stores.locations import place_of
from recsys.serving.stores.schema import EVENT_COLUMNS, EVENTS

try:
    import psycopg
except ImportError as error:
    raise ConfigError(
        "a store in PostgreSQL needs psycopg; install the extra: pip install 'recbeam[postgres]'"
    ) from error

KINDS = {"time_ms": sa.BigInteger, "value": sa.Double, "linked": sa.Integer}
ROWS = sa.func.unnest(
    *(sa.bindparam(name, type_=sa.ARRAY(KINDS.get(name, sa.Text))) for name in EVENT_COLUMNS)
).table_valued(*EVENT_COLUMNS)
INSERT_EVENTS = (  # one array for each column: ten times as fast as one statement for each row
    postgresql.insert(EVENTS).from_select([*EVENT_COLUMNS], sa.select(*ROWS.render_derived().c))
)
RACES = (psycopg.errors.UniqueViolation, psycopg.errors.DeadlockDetected)
LOCK = 0x7265637379  # first key of pg_advisory_xact_lock
CONNECT_TIMEOUT_S = 3
AWAY_S = 1.0
# An event is acknowledged after it is on the disk, whatever the database's default is.
SYNCED = """SELECT set_config('synchronous_commit', 'on', false)
    WHERE current_setting('synchronous_commit') = 'off'"""
CALL_S = 3.0  # of a call that a request waits for; less than the deadline of requests


class PostgresDatabase(Database):
    """A PostgreSQL database.

    A call fails after `CALL_S`, since a server that hangs would hold its thread for ever. While
    the server does not answer, calls fail at once, except for one every `AWAY_S` seconds; they
    work again when it is back.
    """

    readers: ClassVar[int] = 4
    begin: ClassVar[str] = "BEGIN"
    begin_snapshot: ClassVar[str] = "BEGIN ISOLATION LEVEL REPEATABLE READ"
    is_remote: ClassVar[bool] = True
    advice: ClassVar[str] = "check that the server runs and that the URL in serve.store is right"
    insert: ClassVar[Any] = staticmethod(postgresql.insert)

    def __init__(self, url: str) -> None:
        """Connect, and make the tables where there are none."""
        self._url = url
        self._breaker = Breaker(AWAY_S)
        self._watch = Watch(CALL_S, self._give_up)
        try:
            super().__init__(place_of(url, "serve.store"), "postgresql+psycopg://")
        except BaseException:
            self._watch.close()
            raise
        sa.event.listen(self._engine, "handle_error", _replace_if_read_only)

    def close(self) -> None:
        """As of any database."""
        super().close()
        self._watch.close()

    def _connect(self, *, patient: bool = False) -> psycopg.Connection[Any]:
        try:
            connection = psycopg.connect(
                self._url,
                connect_timeout=CONNECT_TIMEOUT_S,
                application_name="recsys",
                keepalives_idle=10,
                tcp_user_timeout=10_000,
                autocommit=True,
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
    def guarded(self) -> Iterator[None]:
        """Refuse a call while the server does not answer."""
        if not self._breaker.enter():
            raise ConnectionError("the server did not answer a moment ago")
        try:
            yield
        finally:
            self._breaker.leave()

    @contextlib.contextmanager
    def limited(self, connection: sa.Connection) -> Iterator[None]:
        """Give up a call that takes too long."""
        self._watch.begin(connection.connection.dbapi_connection)
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

    def works(self) -> None:
        """A call succeeded."""
        self._breaker.worked()
        super().works()

    def leave_bytes(self, connection: sa.Connection) -> None:
        """Nothing: PostgreSQL removes deleted rows itself, in the background."""

    def overwrite(self, *, erased: bool = False) -> None:
        """Nothing, as in `leave_bytes`."""

    def lock(self, connection: sa.Connection, what: int, *, shared: bool = False) -> None:
        """Take an advisory lock until the transaction ends."""
        function = f"pg_advisory_xact_lock{'_shared' if shared else ''}"
        with _races():
            connection.execute(sa.text(f"SELECT {function}(:key)"), {"key": LOCK + what})

    def among(self, column: sa.ColumnElement[Any]) -> Any:
        """A condition with one parameter, so that the statement is always the same."""
        return column == sa.any_(sa.bindparam("texts", type_=sa.ARRAY(sa.Text)))

    def texts(self, values: Iterable[str]) -> dict[str, Any]:
        """The parameter of `among`."""
        return {"texts": [*values]}

    def insert_events(self, connection: sa.Connection, rows: Sequence[tuple[Any, ...]]) -> None:
        """Insert rows."""
        columns = map(list, zip(*rows, strict=True))
        with _races():
            connection.execute(INSERT_EVENTS, dict(zip(EVENT_COLUMNS, columns, strict=True)))


@contextlib.contextmanager
def _races() -> Iterator[None]:
    try:
        yield
    except DBAPIError as error:
        if isinstance(error.orig, RACES):
            raise RaceError from error
        raise


def _replace_if_read_only(context: ExceptionContext) -> None:
    """Replace connections to a database that was read-only: a new one may be writable again."""
    if isinstance(context.original_exception, psycopg.errors.ReadOnlySqlTransaction):
        context.is_disconnect = True
