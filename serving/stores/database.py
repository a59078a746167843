"""Access to a SQL database: connections, transactions, schema, failures.

Each thread has its own connection, which is replaced when it is lost. Of the tables, only `state`
is used here. The modules `sqlite` and `postgres` hold the differences between the databases.
"""

import json
import logging
import secrets
import threading
import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, ClassVar

from recsys.serving.stores.records import StoreAwayError, StoreError

logger = logging.getLogger("recsys.serving.stores")
SCHEMA_VERSION = 8
STORE_ID, SALT = "store_id", "erasure_salt"  # keys of `state`
LEFT_BYTES = "left_bytes"  # key of `state` while bytes of erased users may be on the disk


class Database(ABC):
    """A SQL database with the schema of this program.

    Cursors are those of sqlite3 or psycopg.

    Attributes:
        place: name of the database in messages, without secrets.
        store_id: random id of its content, the same for every process.
        salt: random bytes of the hashes of erased users, the same for every process.
    """

    schema: ClassVar[Sequence[str]]  # statements that make the tables, and write the version
    begin: ClassVar[str]
    begin_snapshot: ClassVar[str]
    failures: ClassVar[tuple[type[Exception], ...]]
    unavailable: ClassVar[tuple[type[Exception], ...]]
    outdated: ClassVar[tuple[type[Exception], ...]] = ()  # a new connection may have no such error
    is_remote: ClassVar[bool] = False  # it may be away for a while

    def __init__(self, place: str) -> None:
        """Open the database, and make its tables where there are none.

        Raises:
            StoreError: the schema is that of another version of this program.
        """
        self.place = place
        self._local = threading.local()
        self._connections: list[Any] = []
        self._fails = self._is_away = False
        with self._explained(), self._connected() as connection:
            self._prepare(connection)
            self.store_id = self._constant(connection, STORE_ID)
            self.salt = bytes.fromhex(self._constant(connection, SALT))

    def close(self) -> None:
        """Close all connections; no thread may use them any more."""
        for connection in self._connections:
            connection.close()

    @property
    def reachable(self) -> bool:
        """Whether the last call reached the database."""
        return not self._is_away

    # Differences between databases

    @abstractmethod
    def _connect(self, *, patient: bool = False) -> Any:
        """A new connection in autocommit mode, usable from any thread.

        A `patient` one is for bulk work; requests wait for the calls of others.
        """

    def _guarded(self) -> AbstractContextManager[None]:
        """The time of a call that requests wait for; one of `unavailable` if it is refused."""
        return nullcontext()

    def _limited(self, connection: Any) -> AbstractContextManager[None]:
        """The time that this thread waits for the database, which is limited."""
        return nullcontext()

    @abstractmethod
    def _prepare(self, connection: Any) -> None:
        """Make or check the tables (`_make_or_check`), in one transaction."""

    def _sql(self, query: str) -> str:
        """Translate a query with `?` for parameters."""
        return query

    def _is_lost(self, connection: Any) -> bool:
        return False

    @abstractmethod
    def _roll_back(self, connection: Any) -> None:
        """Roll back a transaction, unless the database has done so."""

    @property
    @abstractmethod
    def advice(self) -> str:
        """What a person can do about a failure."""

    # Queries

    def _query(self, query: str, parameters: Sequence[Any]) -> list[Any]:
        """Rows of a query on this thread's connection; a lost connection is replaced, once."""
        sql = self._sql(query)
        with self._explained(), self._guarded():
            for last in (False, True):
                connection = self._own_connection()
                try:
                    with self._limited(connection):
                        rows = list(connection.execute(sql, parameters).fetchall())
                    self._works()
                    return rows
                except self.unavailable:
                    if last or not self._drop_if_lost(connection):
                        raise
        raise AssertionError  # pragma: no cover - the loop returns or raises

    # The schema

    def _make_or_check(self, connection: Any, version: int | None) -> None:
        """Make the tables if there is no version; within a transaction."""
        if version is None:
            for statement in self.schema:
                connection.execute(statement)
        elif version != SCHEMA_VERSION:
            raise StoreError(
                f"{self.place}: schema {version}, and this program has {SCHEMA_VERSION}; run "
                "`recsys store export events.ndjson` with the recsys that wrote it, and with this "
                "one `recsys store import events.ndjson --store EMPTY_STORE`"
            )
        for key, value in ((STORE_ID, uuid.uuid4().hex), (SALT, secrets.token_hex(32))):
            connection.execute(
                self._sql("INSERT INTO state VALUES (?, ?) ON CONFLICT DO NOTHING"),
                (key, json.dumps(value)),
            )

    def _constant(self, connection: Any, key: str) -> str:
        query = self._sql("SELECT value FROM state WHERE key = ?")
        (found,) = connection.execute(query, (key,)).fetchone()
        return str(json.loads(found))

    # Connections and transactions

    @contextmanager
    def _connected(self) -> Iterator[Any]:
        connection = self._connect(patient=True)
        try:
            yield connection
        finally:
            connection.close()

    def _own_connection(self) -> Any:
        """This thread's connection."""
        if not hasattr(self._local, "connection"):
            self._local.connection = self._connect()
            self._connections.append(self._local.connection)
        return self._local.connection

    def _drop_if_lost(self, connection: Any) -> bool:
        if not self._is_lost(connection):
            return False
        self._drop(connection)
        return True

    def _drop(self, connection: Any) -> None:
        connection.close()
        if connection in self._connections:
            self._connections.remove(connection)
            del self._local.connection

    def _begun(self) -> Any:
        """Begin a transaction on this thread's connection; a lost connection is replaced."""
        connection = self._own_connection()
        try:
            with self._limited(connection):
                connection.execute(self.begin)
        except self.unavailable:
            if not self._drop_if_lost(connection):
                raise
            connection = self._own_connection()
            with self._limited(connection):
                connection.execute(self.begin)
        return connection

    @contextmanager
    def _committed(self, connection: Any) -> Iterator[Any]:
        """Commit a transaction, or roll it back if the block raises."""
        try:
            yield connection
            connection.execute("COMMIT")
        except BaseException as error:
            self._roll_back(connection)
            if isinstance(error, self.outdated):
                self._drop(connection)
            raise

    # Failures

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except self.failures as error:
            raise self._explain(error) from error

    def _explain(self, error: BaseException) -> StoreError:
        away = isinstance(error, self.unavailable)
        self._is_away = self._is_away or away
        kind = StoreAwayError if away and self.is_remote else StoreError
        explained = kind(f"store {self.place}: {' '.join(str(error).split())}; {self.advice}")
        if not self._fails:  # logged once, not with every request
            self._fails = True
            logger.warning("%s", explained)
        return explained

    def _works(self) -> None:
        self._is_away = False
        if self._fails:
            self._fails = False
            logger.info("store %s works again", self.place)
