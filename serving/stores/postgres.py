"""PostgreSQL: a store that any number of processes can share."""

import contextlib
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, ClassVar
from urllib.parse import urlsplit

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql
from sqlalchemy.engine import ExceptionContext

from recsys.errors import ConfigError
from recsys.serving.stores.database import Database

try:
    import psycopg
except ImportError as error:
    raise ConfigError(
        "a store in PostgreSQL needs psycopg; install the extra: pip install 'recbeam[postgres]'"
    ) from error

HOST = re.compile(r"(\[[^\]]*\]|[^:\[\]]*)(:\d*)?")  # with its port
ODD_PERCENT = re.compile(r"%(?![0-9a-fA-F]{2})")
LOCK = 0x7265637379  # first key of pg_advisory_xact_lock
CONNECT_TIMEOUT_S = 3
AWAY_S = 1.0
# An event is acknowledged after it is on the disk, whatever the database's default is.
SYNCED = """SELECT set_config('synchronous_commit', 'on', false)
    WHERE current_setting('synchronous_commit') = 'off'"""
CALL_S = 3.0  # of a call that a request waits for; less than the deadline of requests


class Watch:
    """Ends calls that take longer than `CALL_S`, on a thread that looks from time to time."""

    def __init__(self, end: Callable[[object], None]) -> None:
        """Call `end` with the connection of such a call."""
        self._end = end
        self._calls: dict[int, tuple[float, object]] = {}
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="store-watch", daemon=True)
        self._thread.start()

    def begin(self, connection: object) -> None:
        """A call of this thread begins."""
        self._calls[threading.get_ident()] = (time.monotonic() + CALL_S, connection)

    def finish(self) -> None:
        """The call of this thread has ended."""
        self._calls.pop(threading.get_ident(), None)

    def close(self) -> None:
        """End the thread."""
        self._closed.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._closed.wait(CALL_S / 10):
            now = time.monotonic()
            for thread, (deadline, connection) in list(self._calls.items()):
                if now >= deadline and self._calls.pop(thread, None) is not None:
                    self._end(connection)


class PostgresDatabase(Database):
    """A PostgreSQL database.

    A call fails after `CALL_S`, since a server that hangs would hold its thread for ever. While
    the server does not answer, calls fail at once, except for one that tries `AWAY_S` after the
    last failure; they work again when it is back.
    """

    readers: ClassVar[int] = 4
    begin: ClassVar[str] = "BEGIN"
    begin_snapshot: ClassVar[str] = "BEGIN ISOLATION LEVEL REPEATABLE READ"
    is_remote: ClassVar[bool] = True
    advice: ClassVar[str] = "check that the server runs and that the URL in serve.store is right"
    insert: ClassVar[Any] = staticmethod(postgresql.insert)
    json_list: ClassVar[str] = "json_agg"

    def __init__(self, url: str) -> None:
        """Connect, and make the tables where there are none."""
        self._url = url
        self._again_at = 0.0  # monotonic time, until which calls fail at once
        self._trying = threading.Lock()
        self._watch = Watch(self._give_up)
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
            self._fail_at_once()
            raise
        finally:
            if not patient:
                self._watch.finish()

    def check_reachable(self) -> None:
        """Refuse a call while the server does not answer, unless it is the one that tries again."""
        with self._trying:
            now = time.monotonic()
            if now < self._again_at:
                raise ConnectionError("the server did not answer a moment ago")
            if self._again_at:
                self._again_at = now + CALL_S  # the others wait for the outcome of this one

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
        self._fail_at_once()
        with (
            contextlib.suppress(psycopg.Error, OSError),
            socket.socket(fileno=os.dup(connection.fileno())) as copy,
        ):
            copy.shutdown(socket.SHUT_RDWR)

    def works(self) -> None:
        """A call succeeded."""
        self._again_at = 0.0
        super().works()

    def _fail_at_once(self) -> None:
        self._again_at = time.monotonic() + AWAY_S

    def lock(self, connection: sa.Connection, number: int, *, shared: bool = False) -> None:
        """Take an advisory lock until the transaction ends."""
        function = f"pg_advisory_xact_lock{'_shared' if shared else ''}"
        connection.execute(sa.text(f"SELECT {function}(:key)"), {"key": LOCK + number})

    def among(self, column: sa.ColumnElement[Any]) -> Any:
        """A condition with one parameter, so that the statement is always the same."""
        return column == sa.any_(sa.bindparam("texts", type_=sa.ARRAY(sa.Text)))

    def texts(self, values: Iterable[str]) -> dict[str, Any]:
        """The parameter of `among`."""
        return {"texts": [*values]}


def _replace_if_read_only(context: ExceptionContext) -> None:
    """Replace connections to a database that was read-only: a new one may be writable again."""
    if isinstance(context.original_exception, psycopg.errors.ReadOnlySqlTransaction):
        context.is_disconnect = True


def place_of(url: str, setting: str) -> str:
    """A URL without user, password and options, for messages.

    >>> place_of("postgresql://shop:secret@db.example.org:5433/shop?sslmode=require", "serve.store")
    'postgresql://db.example.org:5433/shop'

    Raises:
        ConfigError: the URL is malformed. The message names the setting, and nothing of the URL: in
            a password, a `/`, `?` or `#` ends what is read as the host.
    """
    try:
        parts = urlsplit(url)
    except ValueError:
        raise _malformed(url, setting) from None
    login, _, hosts = parts.netloc.rpartition("@")
    rest = parts.path + parts.fragment + ("" if login else parts.query)
    if "@" in rest or ODD_PERCENT.search(url) or not all(map(HOST.fullmatch, hosts.split(","))):
        raise _malformed(url, setting)
    return f"{parts.scheme}://{hosts}{parts.path}"


def _malformed(url: str, setting: str) -> ConfigError:
    return ConfigError(
        f"{setting}: expected {url.partition(':')[0]}://USER:PASSWORD@HOST:PORT/NAME; in a "
        "password, write / as %2F, ? as %3F, # as %23, @ as %40 and % as %25"
    )
