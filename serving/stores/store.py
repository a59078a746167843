"""Store: four tables in a database, SQLite or PostgreSQL, which are written together.

Readers are a few threads; all writes go through one thread (`calls`), in one transaction a group.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Sequence
from functools import partial
from itertools import groupby
from typing import Any

from sqlalchemy.exc import DBAPIError

from recsys.serving.stores.calls import Calls, Write
from recsys.serving.stores.database import ERASING, FAILURES, UNAVAILABLE, Database
from recsys.serving.stores.erasures import UNFINISHED, erase_more
from recsys.serving.stores.history import HistoryTable
from recsys.serving.stores.journal import JournalTable, StateTable
from recsys.serving.stores.records import NOT_HISTORY, Observer, Served, StoreError
from recsys.serving.stores.served import ServedTable

logger = logging.getLogger("recsys.serving.stores")
RACES = ("23505", "40P01")  # SQLSTATE: another process wrote the event, or waits for this one
ATTEMPTS = 5


class Store:
    """A store. Every call of its tables may raise `StoreError`.

    Attributes:
        database: where the rows are.
        history: events of users.
        journal: changes of the catalog.
        state: values by keys, such as the rules.
        served: remembered answers, and exposures of experiments.
        limit_reads: limits the reads that clients wait for (`Calls.limit_reads`).
    """

    def __init__(
        self,
        database: Database,
        *,
        not_history: Collection[str] = NOT_HISTORY,
        observer: Observer | None = None,
    ) -> None:
        """Use a database, which is closed with the store.

        Args:
            database: an open database.
            not_history: types of events that are not part of a history.
            observer: counts every call.
        """
        self.database = database
        self._calls = Calls(database, observer)
        self.history = HistoryTable(self._calls, not_history)
        self.journal = JournalTable(self._calls)
        self.state = StateTable(self._calls)
        self.served = ServedTable(self._calls)
        self.limit_reads = self._calls.limit_reads
        self._calls.start(self._commit)

    async def prepare(self) -> None:
        """Do what the last stop of a service has left to do, or leave it to the next start."""
        change = partial(erase_more, self.database, None)
        try:
            is_left = bool(await self.state.get(UNFINISHED))
            while is_left:
                is_left = await self._calls.write("erase", Write(change=change, erases=True))
        except StoreError as error:  # what is left of erased users is not read
            logger.warning("store %s: an erasure is not finished: %s", self.database.place, error)
        await asyncio.to_thread(self.database.overwrite, at_start=True)

    def close(self) -> None:
        """Write what is queued and release everything; no call may follow."""
        self._calls.close()
        self.database.close()

    def _commit(self, group: list[Write]) -> list[Any]:
        """Make a group durable, and remember answers (on the writing thread)."""
        answers = self.served.take()
        if not group and not answers:
            return []
        try:
            self.database.check_reachable()
            outcomes = self._write(group, answers)
        except UNAVAILABLE as error:
            self.served.put_back(answers)
            return [self.database.explain(error)] * len(group)
        except Exception as error:
            if len(group) <= 1 and not answers:
                return [self.database.explain(error) if isinstance(error, FAILURES) else error]
            # Only the failing write shall fail: commit each on its own.
            self._write_answers(answers)
            return [outcome for write in group for outcome in self._commit([write])]
        self.database.works()
        if any(write.erases for write in group):
            self.database.overwrite()
        return outcomes

    def _write_answers(self, answers: Sequence[Served]) -> None:
        """Write answers whose group was refused; if it was their fault, they are dropped."""
        if not answers:
            return
        try:
            self._write([], answers)
        except UNAVAILABLE:
            self.served.put_back(answers)
        except Exception:
            logger.exception("store %s: %d answers were dropped", self.database.place, len(answers))

    def _write(self, group: list[Write], answers: Sequence[Served]) -> list[Any]:
        for attempt in range(ATTEMPTS):
            try:
                with self.database.transaction() as connection:
                    # An erasure sees the events of all transactions before it, and no later ones.
                    # After a race, the group is written while no other process writes.
                    shared = attempt == 0 and not any(write.erases for write in group)
                    self.database.lock(connection, ERASING, shared=shared)
                    self.served.insert(connection, answers)
                    outcomes: list[Any] = []
                    for is_append, run in groupby(group, lambda write: write.change is None):
                        if is_append:
                            batches = [write.events for write in run]
                            outcomes += self.history.insert(connection, batches)
                        else:
                            outcomes += [write.change(connection) for write in run]  # type: ignore[misc]
                return outcomes
            except DBAPIError as error:
                if getattr(error.orig, "sqlstate", None) not in RACES:
                    raise
        raise StoreError(
            f"store {self.database.place}: other processes write the same events; try again"
        )
