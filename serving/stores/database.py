"""Access to the database of a store: connections, transactions, failures.

What SQLite and PostgreSQL do differently is in `sqlite` and `postgres`.
"""

import json
import logging
import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, ClassVar, TypeVar

import sqlalchemy as sa
from sqlalchemy.exc import DBAPIError, InterfaceError, OperationalError

from recsys.serving.stores.records import StoreError
from recsys.serving.stores.schema import EVENTS, METADATA, SCHEMA_VERSION, STATE

logger = logging.getLogger("recsys.serving.stores")
T = TypeVar("T")
SCHEMA, SALT, SEEDS = "schema", "salt", "seeds"  # keys of STATE
SEEDING, JOURNALING, ERASING = range(3)  # activities of one process at a time
FAILURES = (DBAPIError, OSError)
UNAVAILABLE = (OperationalError, InterfaceError, OSError)


class Database(ABC):
    """A database with the tables of a store.

    Attributes:
        place: name of the database in messages, without secrets.
        salt: random bytes of the hashes of users, the same for every process.
        is_away: whether the last call did not reach the database.
    """

    readers: ClassVar[int]  # threads
    begin: ClassVar[str]
    begin_snapshot: ClassVar[str]
    is_remote: ClassVar[bool]  # it may be away for a while, and is not of this program alone
    advice: ClassVar[str]  # what a person can do about a failure
    insert: ClassVar[Any]  # the dialect's form of `sqlalchemy.insert`
    json_list: ClassVar[str] = "json_group_array"  # makes a list of a column's values

    def __init__(self, url: str, dialect: str) -> None:
        """Open the database, and make its tables where there are none.

        Raises:
            StoreError: the schema is that of another version of this program.
        """
        self.place = url
        self._fails = self.is_away = False
        # Each statement is committed, unless a transaction is begun.
        options: dict[str, Any] = {"isolation_level": "AUTOCOMMIT", "hide_parameters": True}
        self._engine = sa.create_engine(
            dialect,
            creator=self._connect,
            poolclass=sa.QueuePool,
            pool_size=self.readers + 1,
            pool_use_lifo=True,  # few connections, whose caches are warm
            **options,
        )
        self._bulk_engine = sa.create_engine(
            dialect, creator=partial(self._connect, patient=True), poolclass=sa.NullPool, **options
        )
        with self.bulk(self.begin) as connection:
            self.lock(connection, SEEDING)
            self._make_or_check(connection)
            self.salt = bytes.fromhex(self.state(connection, SALT))
            connection.exec_driver_sql("COMMIT")

    def close(self) -> None:
        """Close all connections; no thread may use them any more."""
        self._engine.dispose()

    # Differences between databases

    @abstractmethod
    def _connect(self, *, patient: bool = False) -> Any:
        """A new connection of the driver, usable from any thread.

        A `patient` one is for bulk work; clients wait for the calls of others.
        """

    @abstractmethod
    def among(self, column: sa.ColumnElement[Any]) -> Any:
        """A condition that a column is one of any number of texts, the parameters of `texts`."""

    @abstractmethod
    def texts(self, values: Iterable[str]) -> dict[str, Any]:
        """The parameters of a statement with `among`, which is made once."""

    # ruff: noqa: B027 - for SQLite or PostgreSQL alone
    def lock(self, connection: sa.Connection, number: int, *, shared: bool = False) -> None:
        """Exclude other processes from an activity (`SEEDING`, ...) until the transaction ends.

        Those that only must not run beside the activity share the lock with each other. A
        transaction of SQLite locks the file anyway.
        """

    def leave_bytes(self, connection: sa.Connection) -> None:
        """Record, in a transaction, that it leaves bytes of erased users on the disk.

        PostgreSQL removes deleted rows itself, in the background.
        """

    def overwrite(self, *, at_start: bool = False) -> None:
        """Remove such bytes from the disk if nobody waits long for it; at the start, nobody may."""

    def check_reachable(self) -> None:
        """Refuse a call that clients wait for, by an `OSError`, if it would only wait."""

    def limited(self, connection: sa.Connection) -> AbstractContextManager[None]:
        """The time that a thread waits for the database, which is limited."""
        return nullcontext()

    # Queries and transactions

    def insert_events(self, connection: sa.Connection, rows: Sequence[Mapping[str, Any]]) -> None:
        """Insert rows of `EVENT_COLUMNS`."""
        connection.execute(sa.insert(EVENTS), rows)

    def read(
        self, query: sa.Executable, parameters: Mapping[str, Any] | None = None
    ) -> Sequence[sa.Row[Any]]:
        """Rows of a query."""
        with self.explained():
            self.check_reachable()
            rows: Sequence[sa.Row[Any]]
            connection, rows = self._open(lambda c: c.execute(query, parameters).all())
            connection.close()
            self.works()
            return rows

    @contextmanager
    def transaction(self) -> Iterator[sa.Connection]:
        """A transaction, committed at the end of the block or rolled back with its error."""
        connection, _ = self._open(lambda c: c.exec_driver_sql(self.begin))
        with self.limited(connection), connection:
            yield connection
            connection.exec_driver_sql("COMMIT")

    @contextmanager
    def bulk(self, begin: str = "") -> Iterator[sa.Connection]:
        """A connection for bulk work, with a transaction that the caller commits."""
        with self.explained(), self._bulk_engine.connect() as connection:
            if begin:
                connection.exec_driver_sql(begin)
            yield connection

    def _open(self, first: Callable[[sa.Connection], T]) -> tuple[sa.Connection, T]:
        """A connection, and the result of a first statement; a lost one is replaced, once."""
        for last in (False, True):
            connection = self._engine.connect()
            with self.limited(connection):
                try:
                    return connection, first(connection)
                except BaseException as error:
                    connection.close()
                    lost = isinstance(error, DBAPIError) and error.connection_invalidated
                    if last or not lost:
                        raise
        raise AssertionError  # pragma: no cover - the loop returns or raises

    # State and schema

    def state(self, connection: sa.Connection, key: str) -> Any:
        """A value of the state, or None."""
        value = connection.scalar(sa.select(STATE.c.value).where(STATE.c.key == key))
        return None if value is None else json.loads(value)

    def put_state(self, connection: sa.Connection, key: str, value: Any) -> None:
        """Write a JSON value under a key."""
        row = self.insert(STATE).values(key=key, value=json.dumps(value))
        replaced = {"value": row.excluded.value}
        connection.execute(row.on_conflict_do_update(index_elements=["key"], set_=replaced))

    def _make_or_check(self, connection: sa.Connection) -> None:
        tables = sa.inspect(connection).get_table_names()
        if STATE.name in tables:
            version = self.state(connection, SCHEMA)
            if version != SCHEMA_VERSION:
                raise StoreError(
                    f"{self.place}: schema {version or 'of an older version'}, not "
                    f"{SCHEMA_VERSION}; use the recsys that wrote it, or a new store (serve.store)"
                )
            for index in EVENTS.indexes:  # a store may be older than some of them
                index.create(connection, checkfirst=True)
            if not self.is_remote:  # which `events_of_histories` replaces
                connection.exec_driver_sql("DROP INDEX IF EXISTS events_counted")
        elif tables and not self.is_remote:
            raise StoreError(f"{self.place} is another program's database; {self.advice}")
        else:
            METADATA.create_all(connection)
            self.put_state(connection, SCHEMA, SCHEMA_VERSION)
            self.put_state(connection, SALT, secrets.token_hex(32))
            self.put_state(connection, SEEDS, [])

    # Failures

    @contextmanager
    def explained(self) -> Iterator[None]:
        """Turn failures of the database into `StoreError`."""
        try:
            yield
        except FAILURES as error:
            raise self.explain(error) from error

    def explain(self, error: BaseException) -> StoreError:
        """The error that tells what failed and what can be done; it is logged once."""
        self.is_away = self.is_away or isinstance(error, UNAVAILABLE)
        message = str(getattr(error, "orig", error))  # without the statement
        explained = StoreError(f"store {self.place}: {' '.join(message.split())}; {self.advice}")
        if not self._fails:  # logged once, not with every request
            self._fails = True
            logger.warning("%s", explained)
        return explained

    def works(self) -> None:
        """A call succeeded."""
        self.is_away = False
        if self._fails:
            self._fails = False
            logger.info("store %s works again", self.place)
