"""SQLite: a store in one file in WAL mode, the embedded default."""

import json
import sqlite3
import uuid
from collections.abc import Iterable
from pathlib import Path
from typing import Any, ClassVar

import sqlalchemy as sa
from sqlalchemy.dialects import sqlite

from recsys.errors import DataError
from recsys.locks import locked
from recsys.serving.stores.database import FAILURES, Database, logger
from recsys.serving.stores.records import StoreError
from recsys.serving.stores.schema import STATE
from recsys.serving.whole_files import replaced

LEFT_BYTES = "left_bytes"  # key of STATE while bytes of erased users may be on the disk
# Of a call that a request waits for. The one behind it waits twice that, within every deadline.
BUSY_TIMEOUT_S = 0.5
PATIENT_S = 30.0  # of bulk work
OVERWRITE_WAIT_MS = 100  # for a reader or another writer, before overwriting is put off
AT_ONCE_BYTES = 16 << 20  # largest file that is rewritten while the store is used


class SqliteDatabase(Database):
    """One SQLite file, in which readers and the writer do not block each other.

    A commit is synced to disk before it is acknowledged (`synchronous = FULL`), so acknowledged
    writes survive a killed process and a power cut.

    `secure_delete` overwrites deleted rows, but not the copies that SQLite leaves in unused parts
    of pages when it balances a tree. So the file is rewritten (`VACUUM`) after an erasure, while
    other writes wait: at once if that takes less than a second, and otherwise at a start when no
    other process uses the file. A row of the state stands for what is left to do.
    """

    readers: ClassVar[int] = 2
    # The write lock is taken at once, so rows read in the transaction do not change.
    begin: ClassVar[str] = "BEGIN IMMEDIATE"
    begin_snapshot: ClassVar[str] = "BEGIN"
    is_remote: ClassVar[bool] = False
    advice: ClassVar[str] = (
        "check that the folder is writable and has space, or name another place with "
        "--set serve.store=PATH"
    )
    insert: ClassVar[Any] = staticmethod(sqlite.insert)

    def __init__(self, path: Path) -> None:
        """Open the file, creating it where there is none."""
        self._path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch(mode=0o600)  # histories are private
        except OSError as error:
            raise StoreError(f"store {path}: {error}; {self.advice}") from error
        super().__init__(str(path), "sqlite://")
        with self.bulk() as connection:
            connection.exec_driver_sql("PRAGMA journal_mode = WAL")  # a backup has another one

    def _connect(self, *, patient: bool = False) -> sqlite3.Connection:
        timeout_s = PATIENT_S if patient else BUSY_TIMEOUT_S
        # Connections are closed on another thread than the one that uses them.
        connection = sqlite3.connect(self._path, timeout=timeout_s, check_same_thread=False)
        try:
            connection.execute("PRAGMA synchronous = FULL")
            connection.execute("PRAGMA secure_delete = ON")  # an erased user's pages are zeroed
        except BaseException:
            connection.close()
            raise
        return connection

    def among(self, column: sa.ColumnElement[Any]) -> Any:
        """A condition with one parameter: SQLite limits their number."""
        texts = sa.func.json_each(sa.bindparam("texts")).table_valued("value")
        return column.in_(sa.select(texts.c.value))

    def texts(self, values: Iterable[str]) -> dict[str, Any]:
        """The parameter of `among`."""
        return {"texts": json.dumps([*values])}

    def back_up(self, file: Path) -> None:
        """Write a copy of the store to a new file, atomically; other processes may use the store.

        Its owner alone can read it.

        Raises:
            DataError, LockedError: there is a file already, or another process writes it.
        """
        with locked(file), self.bulk() as connection:
            if file.exists():
                raise DataError(f"{file} is there already; name another file")
            with replaced(file, 0o600) as path:
                connection.exec_driver_sql("VACUUM INTO ?", (str(path),))

    def leave_bytes(self, connection: sa.Connection) -> None:
        """Record that bytes are left until the file is rewritten."""
        # A value of its own: who has rewritten the file before removes no later row.
        self.put_state(connection, LEFT_BYTES, uuid.uuid4().hex)

    def overwrite(self, *, at_start: bool = False) -> None:
        """Rewrite a file that has bytes of erased users, and empty its log.

        A large one is rewritten `at_start` alone, where no other process has opened it.
        """
        try:
            with self._bulk_engine.connect() as connection:
                reason = self.state(connection, LEFT_BYTES)
            is_large = self._path.stat().st_size > AT_ONCE_BYTES
            if reason is None or (is_large and not at_start):
                return
            with self._bulk_engine.connect() as connection:
                connection.exec_driver_sql(f"PRAGMA busy_timeout = {OVERWRITE_WAIT_MS}")
                if is_large:
                    self._engine.dispose()  # its idle connections are others, too
                    connection.exec_driver_sql("PRAGMA locking_mode = EXCLUSIVE")
                connection.exec_driver_sql("VACUUM")
                # The log has the old pages; an active reader delays its truncation.
                (busy, _, _) = connection.exec_driver_sql("PRAGMA wal_checkpoint(TRUNCATE)").one()
                if busy:
                    logger.warning("store %s is read: erased bytes may stay", self.place)
                else:
                    is_done = (STATE.c.key == LEFT_BYTES) & (STATE.c.value == json.dumps(reason))
                    connection.execute(sa.delete(STATE).where(is_done))
        except FAILURES as error:  # the erasure itself is committed
            message = getattr(error, "orig", error)
            logger.warning("store %s: bytes of erased users stay for now: %s", self.place, message)
