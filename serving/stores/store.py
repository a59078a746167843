"""Store: a store in a SQL database, whichever. How that is reached is `database`'s business.

Readers are a few threads with a connection each; all writes go through one thread (`group`), in
one transaction a group. Queries are written once, with `?` for parameters.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
import uuid
from abc import abstractmethod
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import chain, groupby, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from recsys.serving.stores.admission import admit
from recsys.serving.stores.database import SALT, STORE_ID, Database
from recsys.serving.stores.group import GroupWriter, Write
from recsys.serving.stores.records import (
    DISLIKES,
    NOT_HISTORY,
    SEED_TYPE,
    Act,
    AheadError,
    Appended,
    Erasure,
    Event,
    EventConflictError,
    Exposed,
    Given,
    Journal,
    Journaled,
    Observer,
    Served,
    Sign,
    StoredEvent,
    StoreError,
    TypedHistory,
    sign_of,
    user_hash,
)

if TYPE_CHECKING:  # redis is an optional dependency
    from recsys.serving.stores.cache import HistoryCache

logger = logging.getLogger("recsys.serving.stores")
T = TypeVar("T")
Run = Callable[[Callable[[], Any]], Awaitable[Any]]  # calls a function on another thread
CHUNK = 50_000
EARLIER = 20_000  # of a user, the newest events that decide what is not recommended
SERVED_KEPT = 100_000  # answers remembered at most
SERVED_WAITING = 10_000  # of them, not yet written
DROPPED_AT_ONCE = 2_000  # exposures in a transaction, about 0.03 s
EXPOSURES_OF_USER = 100  # in one experiment; later answers do not count
RACES = 5
SEEDING, JOURNAL, ERASING = range(3)  # activities of one process at a time
SKEW_MS = 3_600_000  # by which the clock of whoever reports feedback may be behind
UNDER_WAY_MS = 60_000  # an answer this soon after an erasure may be of the old history
EVENT_COLUMNS = (
    "event_id", "user_id", "item_id", "type", "time_ms", "value", "recommendation_id", "linked",
    "digest", "seed",
)  # fmt: skip
LAST_CHARACTER = "\U0010ffff"


class RaceError(Exception):
    """Another process wrote one of the events between the lookup and the insertion."""


class RestoredError(StoreError):
    """The store got another id while this process had it open."""


class Store(Database):
    """A store in a SQL database. Every call may raise `StoreError`.

    Whatever an awaited write has returned for is on disk.
    """

    readers: ClassVar[int]

    def __init__(
        self,
        place: str,
        *,
        not_history: Collection[str] = NOT_HISTORY,
        observer: Observer | None = None,
    ) -> None:
        """Open the database (`Database`).

        `place` is the name of the store in messages, without secrets; events of the types
        `not_history` are not part of a history.

        Raises:
            StoreError: not a store, a store of another version, or unreachable.
        """
        super().__init__(place)
        self._not_history = sorted(not_history)
        self._observer = observer
        self._cache: HistoryCache | None = None
        self._remembered: deque[Served] = deque(maxlen=SERVED_WAITING)
        self._readers = ThreadPoolExecutor(self.readers, thread_name_prefix="store-reader")
        self._run: Run = self._at_once
        self._writer = GroupWriter(self._commit)

    # Differences between databases

    @abstractmethod
    def _among(self, column: str, values: Iterable[str]) -> tuple[str, Any]:
        """An SQL condition that `column` is one of `values`, and its parameter."""

    @abstractmethod
    def _insert(self, cursor: Any, rows: Sequence[Sequence[Any]]) -> int:
        """Insert rows of `EVENT_COLUMNS` whose event id is new; return their number."""

    @abstractmethod
    def _bulk(self, cursor: Any, rows: Iterable[Sequence[Any]]) -> None:
        """Insert many new rows of `EVENT_COLUMNS`."""

    def _lock(self, cursor: Any, what: int, *, shared: bool = False) -> None:
        """Exclude other processes from an activity (`SEEDING`, ...) until the transaction ends.

        Those that only must not run beside the activity share the lock with each other. SQLite's
        `begin` does that already.
        """

    def _leave_bytes(self, cursor: Any) -> None:
        """Record, in a transaction, that it leaves bytes of erased users on the disk."""

    def _overwrite(self, *, erased: bool = False) -> None:
        """Remove such bytes from the disk, on the writing thread, if it is time to do so.

        Called about every half second, and after an erasure (`erased`). PostgreSQL decides itself
        when to do so.
        """

    # Reading

    async def history(self, user_id: str, limit: int) -> list[str] | None:
        """The user's latest items, oldest first, or None if the user is unknown.

        Equal times are in order of arrival. Events of the types `not_history` are left out.
        """
        found = await self.typed_history(user_id, limit)
        return None if found is None else found.items

    async def typed_history(self, user_id: str, limit: int) -> TypedHistory | None:
        """As `history`, with the type of each event, and the items that the user dislikes."""
        return await self._reading("history", lambda: self._history(user_id, limit), limited=True)

    async def events(
        self, user_id: str, limit: int, before: tuple[int, int] | None = None
    ) -> list[StoredEvent]:
        """A user's events of every type, newest first, at most `limit`.

        `before` is (`time_ms`, `place`) of the last event of the previous page.
        """
        if "\0" in user_id:
            return []
        clause = ""
        parameters: tuple[Any, ...] = (user_id, limit)
        if before is not None:
            clause, parameters = " AND (time_ms, id) < (?, ?)", (user_id, *before, limit)
        query = (
            f"SELECT {', '.join(EVENT_COLUMNS)}, id FROM events WHERE user_id = ?{clause}"  # noqa: S608
            " ORDER BY time_ms DESC, id DESC LIMIT ?"
        )

        def read() -> list[StoredEvent]:
            return [_stored(row) for row in self._query(query, parameters)]

        return await self._reading("events", read, limited=True)

    async def users(self, limit: int, prefix: str = "") -> list[str]:
        """Ids of users with events, sorted."""
        if "\0" in prefix:
            return []
        query = (
            "SELECT DISTINCT user_id FROM events WHERE user_id >= ? AND user_id <= ?"
            " ORDER BY user_id LIMIT ?"
        )
        bounds = (prefix, prefix + LAST_CHARACTER, limit)

        def read() -> list[str]:
            return [user for (user,) in self._query(query, bounds)]

        return await self._reading("users", read, limited=True)

    async def newest_places(self, depth: int) -> tuple[int, int, int]:
        """The last `depth` places of events, in the order of arrival, of all users.

        Returns the first and the last place, and the time of the first event there; the time is 0
        if the store has no earlier events.
        """

        def read() -> tuple[int, int, int]:
            ((last,),) = self._query("SELECT coalesce(max(id), 0) FROM events", ())
            first = max(0, last - depth) + 1
            query = "SELECT time_ms FROM events WHERE id >= ? ORDER BY id LIMIT 1"
            rows = self._query(query, (first,)) if first > 1 else ()
            return first, last, rows[0][0] if rows else 0

        return await self._reading("acts", read, limited=True)

    async def acts(self, first: int, last: int, since_ms: int) -> list[Act]:
        """Events at the places `first` to `last` that happened since a time, of all users."""
        query = (
            "SELECT user_id, item_id, type, time_ms, recommendation_id FROM events"
            " WHERE id >= ? AND id <= ? AND time_ms >= ?"
        )
        bounds = (first, last, since_ms)

        def read() -> list[Act]:
            return [Act(*row) for row in self._query(query, bounds)]

        return await self._reading("acts", read, limited=True)

    async def journal(self, model: str, after: int = 0, *, limited: bool = False) -> Journal:
        """Changes of a model's catalog after a place; `limited` with the reads of clients.

        Places grow in the order of commits, over all processes that share the store: reading again
        after the last place misses nothing.
        """
        query = "SELECT id, record FROM journal WHERE model = ? AND id > ? ORDER BY id"

        def read() -> Journal:
            rows = self._query(query, (model, after))
            place = rows[-1][0] if rows else after
            return Journal([json.loads(record) for _, record in rows], place)

        return await self._reading("journal", read, limited=limited)

    async def journal_page(
        self, model: str, after: int, limit: int
    ) -> list[tuple[int, dict[str, Any]]]:
        """The next changes of a model's catalog after a place, with their places (`journal`).

        Raises:
            AheadError: the place is behind all that was written.
            RestoredError: the store got another id since this process began.
        """
        query = "SELECT id, record FROM journal WHERE model = ? AND id > ? ORDER BY id LIMIT ?"
        bounds = (model, after, limit)

        def read() -> list[tuple[int, dict[str, Any]]]:
            found = [(place, json.loads(record)) for place, record in self._query(query, bounds)]
            self._require_id()
            ((last,),) = self._query("SELECT coalesce(max(id), 0) FROM journal", ())
            if not found and after > last:
                raise AheadError
            return found

        return await self._reading("journal", read, limited=True)

    async def state_get(self, key: str) -> Any:
        """A value of `state_put`, or None."""
        query = "SELECT value FROM state WHERE key = ?"
        rows = await self._reading("state", lambda: self._query(query, (key,)))
        return json.loads(rows[0][0]) if rows else None

    async def exposed(
        self, experiment: str, event: str, window_ms: int, after: str, limit: int
    ) -> list[Exposed]:
        """Users of an experiment, by their ids: at most `limit` after an id.

        An answer is followed if the user sent an event of this type with its `recommendation_id`
        that happened at most `window_ms` later.
        """
        query = """
            SELECT user_id, min(arm), min(time_ms), count(*), sum(CASE WHEN EXISTS (
                SELECT 1 FROM events e
                WHERE e.user_id = x.user_id AND e.recommendation_id = x.recommendation_id
                    AND e.type = ? AND e.time_ms >= x.time_ms - ? AND e.time_ms <= x.time_ms + ?
            ) THEN 1 ELSE 0 END)
            FROM exposures x WHERE experiment = ? AND user_id > ?
            GROUP BY user_id ORDER BY user_id LIMIT ?"""
        parameters = (event, SKEW_MS, window_ms, experiment, after, limit)

        def read() -> list[Exposed]:
            return [Exposed(*row) for row in self._query(query, parameters)]

        return await self._reading("exposed", read, limited=True)

    async def answers(self) -> tuple[int, int | None]:
        """The place of the last remembered answer, 0 without any.

        The second value is the time of the oldest one, None if no older ones were forgotten.
        """

        def read() -> tuple[int, int | None]:
            ((last,),) = self._query("SELECT coalesce(max(id), 0) FROM recommendations", ())
            query = "SELECT time_ms FROM recommendations ORDER BY id LIMIT 1"
            rows = self._query(query, ()) if last > SERVED_KEPT else ()
            return last, rows[0][0] if rows else None

        return await self._reading("today", read, limited=True)

    async def given(self, place: int, limit: int, since_ms: int) -> list[Given]:
        """Remembered answers since a time, newest first: at most `limit` up to `place`."""
        query = (
            "SELECT id, recommendation_id, user_id, items, time_ms FROM recommendations"
            " WHERE id <= ? AND time_ms >= ? ORDER BY id DESC LIMIT ?"
        )
        bounds = (place, since_ms, limit)

        def read() -> list[Given]:
            return [Given(*row) for row in self._query(query, bounds)]

        return await self._reading("today", read, limited=True)

    # Writing

    async def append(self, events: Sequence[Event]) -> Appended:
        """Write a batch durably: all of it or nothing. The next `history` includes it.

        An `EventConflictError` tells that an event with this id has other content.
        """
        result: Appended = await self._writing("append", Write(events=events))
        return result

    async def erase(self, user_id: str) -> None:
        """Erase a user: events, remembered answers, exposures, cached history.

        Events from before the erasure do not return with a late delivery, an import or a data set;
        later events are accepted. The call can be repeated.
        """
        if "\0" in user_id:
            return

        def forget(cursor: Any) -> None:
            self._keep_erasure(cursor, user_hash(user_id, self.salt), now_ms())
            for table in ("events", "recommendations", "exposures"):
                cursor.execute(
                    self._sql(f"DELETE FROM {table} WHERE user_id = ?"),  # noqa: S608
                    (user_id,),
                )
            self._leave_bytes(cursor)

        await self._writing("erase", Write(operation=forget, user=user_id))

    def remember(self, served: Served) -> None:
        """Remember an answer: it is written in the background, and the oldest are dropped."""
        self._remembered.append(served)

    async def journal_append(self, model: str, records: Sequence[Mapping[str, Any]]) -> Journaled:
        """Write changes of a model's catalog (JSON objects) durably: all or nothing.

        A record with an `item_id` replaces earlier records of the item, so the journal grows with
        the number of changed items and not with the number of changes.
        """
        rows: dict[Any, tuple[str, str | None, str]] = {}
        for number, record in enumerate(records):
            # As JSON, which PostgreSQL accepts for any id.
            key = json.dumps(record["item_id"]) if "item_id" in record else None
            rows.pop(key, None)  # the later record replaces it
            rows[number if key is None else key] = (model, key, json.dumps(dict(record)))
        condition, keys = self._among("key", [key for _, key, _ in rows.values() if key])

        def write(cursor: Any) -> Journaled:
            self._lock(cursor, JOURNAL)  # so that places are in the order of commits
            before = self._last_place(cursor, model)
            cursor.executemany(
                self._sql("INSERT INTO journal (model, key, record) VALUES (?, ?, ?)"),
                list(rows.values()),
            )
            # Deleted last: SQLite gives the id of a deleted last row to the next one.
            cursor.execute(
                self._sql(
                    f"DELETE FROM journal WHERE model = ? AND id <= ? AND {condition}"  # noqa: S608
                ),
                (model, before, keys),
            )
            return Journaled(before, self._last_place(cursor, model))

        written: Journaled = await self._writing("journal", Write(operation=write))
        return written

    async def drop_exposures(self, experiment: str) -> None:
        """Delete the exposures of an experiment; other writes go on meanwhile."""
        await self._drop_exposures("experiment = ?", experiment)

    async def drop_old_exposures(self, before_ms: int) -> None:
        """Delete the exposures from before a time, of whatever experiment."""
        await self._drop_exposures("time_ms < ?", before_ms)

    async def _drop_exposures(self, condition: str, value: str | int) -> None:
        query = self._sql(
            "DELETE FROM exposures WHERE id IN"  # noqa: S608
            f" (SELECT id FROM exposures WHERE {condition} LIMIT {DROPPED_AT_ONCE})"
        )

        def drop(cursor: Any) -> int:
            cursor.execute(query, (value,))
            return int(cursor.rowcount)

        while await self._writing("exposures", Write(operation=drop)) == DROPPED_AT_ONCE:
            pass

    async def state_put(self, key: str, value: Any) -> None:
        """Store a JSON value durably under a key, for example the aliases."""
        query = self._sql(
            "INSERT INTO state (key, value) VALUES (?, ?)"
            " ON CONFLICT (key) DO UPDATE SET value = excluded.value"
        )
        row = (key, json.dumps(value))
        await self._writing(
            "state", Write(operation=lambda cursor: cursor.execute(query, row) and None)
        )

    def limit_reads(self, limited: Callable[[Callable[..., Future[Any]]], Run]) -> None:
        """Limit the reads that wait; `limited` gets the function that gives one to the threads."""
        self._run = limited(self._readers.submit)

    def use_cache(self, cache: HistoryCache) -> None:
        """Look histories up in `cache` first, and invalidate them there after every change."""
        self._cache = cache

    def close(self) -> None:
        """Write what is queued and release everything; no call may follow."""
        self._writer.close()
        self._readers.shutdown()
        super().close()
        if self._cache is not None:
            self._cache.close()

    # Bulk

    def seed(self, dataset: Path) -> int:
        """Import the histories of a canonical data set, once for each of its versions.

        An earlier version of the data set is replaced in the same transaction; other events stay.

        Returns the number of imported events: 0 if this version was imported before.

        Raises:
            ArtifactError: there is no data set, or it was altered.
        """
        # Imported here: commands import this module, and importing Arrow is slow.
        from recsys.artifacts import verify
        from recsys.dataset import Dataset

        digest = Dataset.manifest(dataset).digest
        with self._explained(), self._connected() as connection:
            cursor = connection.cursor()
            if self._is_seeded(cursor, digest):
                return 0
            verify(dataset, "dataset")
            data = Dataset.load(dataset)
            cursor.execute(self.begin)
            with self._committed(connection):
                self._lock(cursor, SEEDING)
                self._check_id(cursor)
                if self._is_seeded(cursor, digest):  # by another process, meanwhile
                    return 0
                self._import(cursor, data, digest)
        if self._cache is not None:
            self._cache.invalidate_all()
        disliked = 0 if data.disliked is None else len(data.disliked.standing)
        return len(data.interactions) + disliked

    def seeds(self) -> set[str]:
        """Digests of the imported data sets."""
        with self._explained(), self._connected() as connection:
            cursor = connection.cursor()
            cursor.execute("SELECT digest FROM seeds")
            return {digest for (digest,) in cursor.fetchall()}

    async def mark_seeded(self, counts: Mapping[str, int]) -> None:
        """Record that all events of these data sets (digest -> number of events) are stored."""
        query = self._sql("INSERT INTO seeds VALUES (?, ?) ON CONFLICT (digest) DO NOTHING")
        rows = list(counts.items())
        await self._writing(
            "seed", Write(operation=lambda cursor: cursor.executemany(query, rows) and None)
        )

    def export(self) -> Iterator[StoredEvent]:
        """Iterate over one state of all events, in order of arrival."""
        return (row for row in self.dump() if isinstance(row, StoredEvent))

    def dump(self) -> Iterator[Erasure | StoredEvent]:
        """Iterate over one state of all erasures, and then of all events in order of arrival."""
        with self._explained(), self._connected() as connection:
            cursor = connection.cursor()
            cursor.execute(self.begin_snapshot)  # ends with its connection
            salt = self._constant(connection, SALT)
            cursor.execute("SELECT salted_hash, erased_ms FROM erasures ORDER BY salted_hash")
            yield from [Erasure(name, erased_ms, salt) for name, erased_ms in cursor.fetchall()]
            for rows in self._parts(cursor):
                yield from map(_stored, rows)

    def add_erasures(self, erasures: Sequence[Erasure]) -> int:
        """Take over erasures of another store with one salt, and delete what they erase.

        Erasures are compared by salted hashes. A store in which nothing depends on its salt gets
        that of the erasures, and another id: processes that have it open must be restarted.

        Returns the number of erasures that were not known.

        Raises:
            StoreError: this store has another salt, and erasures or exposures that depend on it.
        """
        salt, store_id = bytes.fromhex(erasures[0].salt), self.store_id
        with self._explained(), self._connected() as connection:
            cursor = connection.cursor()
            cursor.execute(self.begin)
            with self._committed(connection):
                self._lock(cursor, ERASING)
                self._check_id(cursor)
                if salt != self.salt:
                    self._require_no_use_of_salt(cursor)
                    store_id = uuid.uuid4().hex
                    query = self._sql("UPDATE state SET value = ? WHERE key = ?")
                    rows = ((json.dumps(salt.hex()), SALT), (json.dumps(store_id), STORE_ID))
                    cursor.executemany(query, list(rows))
                cursor.execute("SELECT salted_hash, erased_ms FROM erasures")
                known = dict(cursor.fetchall())
                fresh = {
                    name: erased_ms
                    for name, erased_ms, _ in erasures
                    if erased_ms > known.get(name, -1)
                }
                for name, erased_ms in fresh.items():
                    self._keep_erasure(cursor, name, erased_ms)
                if fresh:
                    self._delete_erased(cursor, fresh, salt)
                    self._leave_bytes(cursor)
        self.store_id, self.salt = store_id, salt
        if self._cache is not None:
            self._cache.belong_to(store_id)
            self._cache.invalidate_all()
        return len(fresh)

    def erased(self, users: Iterable[str]) -> dict[str, int]:
        """Time of erasure, in unix milliseconds, of those of `users` who were erased."""
        with self._explained(), self._connected() as connection:
            return self._all_erased(connection.cursor(), users)

    def count(self) -> int:
        """Number of events."""
        with self._explained(), self._connected() as connection:
            cursor = connection.cursor()
            cursor.execute("SELECT count(*) FROM events")
            return int(cursor.fetchone()[0])

    # Internals

    def _history(self, user_id: str, limit: int) -> TypedHistory | None:
        if "\0" in user_id:  # no event has such an id, and PostgreSQL refuses it
            return None
        if self._cache is None:
            return self._read_history(user_id, limit)
        found = self._cache.look(user_id, limit)
        if found.hit:
            return found.history
        history = self._read_history(user_id, limit)
        self._cache.keep(found, history)
        return history

    def _read_history(self, user_id: str, limit: int) -> TypedHistory | None:
        literal = [name for name in self._not_history if self._sign(name) is Sign.LEFT_OUT]
        rows = self._newest(user_id, "NOT IN", literal, limit)
        if not rows:
            return None
        kept = [row for row in rows if self._sign(row[1]) is Sign.PART]
        disliked = [item for item, name in rows if self._sign(name) is Sign.DISLIKE]
        earlier: list[tuple[str, str]] = []
        if len(rows) == limit:  # there may be older ones, for which there was no room
            query = "SELECT DISTINCT type FROM events WHERE user_id = ?"
            names = [name for (name,) in self._query(query, (user_id,))]
            others = [name for name in names if self._sign(name) is not Sign.PART]
            if len(kept) < limit:
                kept = self._newest(user_id, "NOT IN", others, limit)
            hidden = [name for name in names if self._sign(name) is Sign.DISLIKE]
            rows = self._newest(user_id, "IN", hidden, EARLIER) if hidden else []
            disliked = [item for item, _ in rows]
            if len(kept) == limit:
                earlier = self._newest(user_id, "NOT IN", others, EARLIER)[limit:]
        if not kept and not disliked:
            return None  # nothing is known of the user, who may have been erased meanwhile
        kept.reverse()
        types = [None if name == SEED_TYPE else name for _, name in kept]
        older = ((item, None if name == SEED_TYPE else name) for item, name in earlier)
        unwanted, once = tuple(dict.fromkeys(disliked)), tuple(dict.fromkeys(older))
        return TypedHistory([item for item, _ in kept], types, unwanted, once)

    def _sign(self, name: str) -> Sign:
        return sign_of(name, self._not_history)

    def _newest(
        self, user_id: str, which: str, types: Sequence[str], limit: int | None
    ) -> list[tuple[str, str]]:
        """Items and types of a user's events that are IN or NOT IN some types, newest first."""
        marks = ", ".join("?" * len(types))
        wanted = f" AND type {which} ({marks})" if types else ""
        bound = "" if limit is None else " LIMIT ?"
        return self._query(
            f"SELECT item_id, type FROM events WHERE user_id = ?{wanted}"  # noqa: S608
            f" ORDER BY time_ms DESC, id DESC{bound}",
            (user_id, *types, *([] if limit is None else [limit])),
        )

    async def _reading(self, operation: str, read: Callable[[], T], *, limited: bool = False) -> T:
        """Read on another thread; `limited` if clients ask for it, whose reads are limited.

        Rows become objects in `read`, on that thread.
        """
        start = time.perf_counter()
        try:
            found: T = await (self._run if limited else self._at_once)(read)
            return found
        finally:
            self._observe(operation, start)

    async def _at_once(self, read: Callable[[], T]) -> T:
        return await asyncio.wrap_future(self._readers.submit(read))

    async def _writing(self, operation: str, write: Write) -> Any:
        start = time.perf_counter()
        try:
            return await asyncio.wrap_future(self._writer.submit(write))
        finally:
            self._observe(operation, start)

    def _observe(self, operation: str, start: float) -> None:
        if self._observer is not None:
            self._observer.store_call(operation, time.perf_counter() - start)

    def _commit(self, group: list[Write]) -> list[Any]:
        """Make a group durable (on the writing thread)."""
        self._overwrite()
        remembered = [
            self._remembered.popleft() for _ in range(min(len(self._remembered), SERVED_WAITING))
        ]
        if not group and not remembered:
            return []
        try:
            with self._guarded():
                outcomes = self._write(group, remembered)
        except self.unavailable as error:
            self._put_back(remembered)
            return [self._explain(error)] * len(group)
        except RestoredError as error:
            return [error] * len(group)
        except Exception as error:
            if len(group) <= 1 and not remembered:
                return [self._explain(error)] if isinstance(error, self.failures) else [error]
            # Only the failing write shall fail: commit each on its own.
            self._write_served(remembered)
            return [outcome for write in group for outcome in self._commit([write])]
        self._works()
        users = {event.user for write in group for event in write.events}
        users |= {write.user for write in group if write.user is not None}
        if self._cache is not None and users:
            self._cache.invalidate(users)
        if any(write.user is not None for write in group):
            self._overwrite(erased=True)
        return outcomes

    def _put_back(self, remembered: Sequence[Served]) -> None:
        """Return answers to the queue for the next group; without room, the oldest are dropped."""
        room = SERVED_WAITING - len(self._remembered)
        self._remembered.extendleft(reversed(remembered[max(0, len(remembered) - room) :]))

    def _write_served(self, remembered: Sequence[Served]) -> None:
        """Write the answers that the database accepts; the others are found by bisection."""
        if not remembered:
            return
        try:
            self._write([], remembered)
        except self.unavailable:
            self._put_back(remembered)
        except RestoredError:
            pass  # answers from before are of no use
        except Exception as error:
            if len(remembered) == 1:
                logger.warning("store %s: an answer was dropped: %s", self.place, type(error))
                return
            half = len(remembered) // 2
            self._write_served(remembered[:half])
            self._write_served(remembered[half:])

    def _write(self, group: list[Write], remembered: Sequence[Served]) -> list[Any]:
        for _ in range(RACES):
            try:
                connection = self._begun()
                with self._limited(connection), self._committed(connection):
                    cursor = connection.cursor()
                    # An erasure sees the events of all transactions before it, and no later ones.
                    shared = all(write.user is None for write in group)
                    self._lock(cursor, ERASING, shared=shared)
                    self._check_id(cursor)
                    self._keep_served(cursor, remembered)
                    outcomes: list[Any] = []
                    for is_append, run in groupby(group, lambda write: write.operation is None):
                        if is_append:
                            outcomes += self._append(cursor, [write.events for write in run])
                        else:
                            outcomes += [write.operation(cursor) for write in run]  # type: ignore[misc]
                return outcomes
            except RaceError:
                continue
        raise StoreError(f"store {self.place}: other processes write the same events; try again")

    def _append(self, cursor: Any, batches: list[Sequence[Event]]) -> list[Any]:
        events = [event for batch in batches for event in batch]
        known = dict(self._look_up(cursor, "events", "event_id", "digest", events, "event_id"))
        erased = self._erased_among(cursor, {event.user for event in events})
        answers = {
            name
            for name, _ in self._look_up(
                cursor, "recommendations", "recommendation_id", "id", events, "recommendation_id"
            )
        }
        outcomes: list[Any] = []
        rows: list[tuple[Any, ...]] = []
        for batch in batches:
            try:
                fresh, outcome = admit(batch, known, erased, answers)
            except EventConflictError as conflict:
                outcomes.append(conflict)
                continue
            known |= {event.event_id: event.digest for event in fresh}
            rows += [_row(event, answers) for event in fresh]
            outcomes.append(outcome)
        if rows and self._insert(cursor, rows) != len(rows):
            raise RaceError
        return outcomes

    def _look_up(
        self,
        cursor: Any,
        table: str,
        key: str,
        value: str,
        events: Iterable[Event],
        field: str,
    ) -> list[Any]:
        """(key, value) of the rows whose key is the field of an event."""
        names = {name for event in events if (name := getattr(event, field)) is not None}
        if not names:
            return []
        condition, parameter = self._among(key, names)
        cursor.execute(
            self._sql(f"SELECT {key}, {value} FROM {table} WHERE {condition}"),  # noqa: S608
            (parameter,),
        )
        return list(cursor.fetchall())

    def _erased_among(self, cursor: Any, users: Iterable[str]) -> dict[str, int]:
        """Time of erasure of those of `users` who were erased, in unix milliseconds."""
        hashes = {user_hash(user, self.salt): user for user in users}
        condition, parameter = self._among("salted_hash", hashes)
        cursor.execute(
            self._sql(f"SELECT salted_hash, erased_ms FROM erasures WHERE {condition}"),  # noqa: S608
            (parameter,),
        )
        return {hashes[name]: erased_ms for name, erased_ms in cursor.fetchall()}

    def _keep_served(self, cursor: Any, served: Sequence[Served]) -> None:
        if not served:
            return
        erased = self._erased_among(cursor, {s.user for s in served if s.user is not None})
        kept = [
            s
            for s in served
            if s.user is None or s.user not in erased or s.time_ms > erased[s.user] + UNDER_WAY_MS
        ]
        cursor.executemany(
            self._sql(
                "INSERT INTO recommendations (recommendation_id, user_id, model, items, time_ms)"
                " VALUES (?, ?, ?, ?, ?) ON CONFLICT DO NOTHING"
            ),
            [(s.recommendation_id, s.user, s.model, json.dumps(s.items), s.time_ms) for s in kept],
        )
        self._keep_exposures(cursor, kept)
        cursor.execute(
            self._sql(
                "DELETE FROM recommendations WHERE id <= (SELECT max(id) FROM recommendations) - ?"
            ),
            (SERVED_KEPT,),
        )

    def _keep_exposures(self, cursor: Any, served: Iterable[Served]) -> None:
        """Insert the exposures of answers, up to a window after the first of their users.

        A program that asks again and again for one user does not fill an experiment.
        """
        rows = [
            (
                *(e.experiment, s.user, e.arm, s.recommendation_id, s.time_ms),
                *(EXPOSURES_OF_USER, s.time_ms, s.time_ms - e.window_ms, e.experiment, s.user),
            )
            for s in served
            if (e := s.exposure) is not None and s.user is not None
        ]
        if rows:
            cursor.executemany(
                self._sql(
                    "INSERT INTO exposures (experiment, user_id, arm, recommendation_id, time_ms)"
                    " SELECT ?, ?, ?, ?, ? WHERE ("
                    " SELECT count(*) < ? AND coalesce(min(time_ms), ?) > ? FROM exposures"
                    " WHERE experiment = ? AND user_id = ?)"
                ),
                rows,
            )

    def _last_place(self, cursor: Any, model: str) -> int:
        cursor.execute(
            self._sql("SELECT coalesce(max(id), 0) FROM journal WHERE model = ?"), (model,)
        )
        return int(cursor.fetchone()[0])

    def _is_seeded(self, cursor: Any, digest: str) -> bool:
        cursor.execute(self._sql("SELECT 1 FROM seeds WHERE digest = ?"), (digest,))
        return cursor.fetchone() is not None

    def _import(self, cursor: Any, dataset: Any, digest: str) -> None:
        data = dataset.interactions
        names = [behaviour.name for behaviour in dataset.behaviours]
        types = (SEED_TYPE for _ in data.user)
        if names:
            types = (names[number] for number in data.behaviour)
        cursor.execute("DELETE FROM events WHERE seed IS NOT NULL")
        cursor.execute("DELETE FROM seeds")
        users, items = data.user_ids.tolist(), data.item_ids.tolist()
        negative = [] if dataset.disliked is None else dataset.disliked.standing.to_pylist()
        known = dict.fromkeys([*users, *(row["user_id"] for row in negative)])
        erased = self._all_erased(cursor, known)
        scale = 1000 if data.has_time else 1
        times = data.timestamp * scale
        if data.nanosecond is not None:
            times = times + data.nanosecond // 1_000_000
        rows = (
            (None, users[u], items[i], kind, t, None if r != r else r, None, None,
             None, digest)
            for start in range(0, len(data), CHUNK)
            for u, i, t, r, kind in zip(
                *(
                    column[start : start + CHUNK].tolist()
                    for column in (data.user, data.item, times, data.rating)
                ),
                islice(types, min(CHUNK, len(data) - start)),
                strict=True,
            )
            if users[u] not in erased or t > erased[users[u]]
        )  # fmt: skip
        rest = (None, None, None, None, digest)
        hidden = (
            (None, row["user_id"], row["item_id"], DISLIKES[0], time, *rest)
            for row in negative
            for time in [(row["timestamp"] or 0) * scale]
            if row["user_id"] not in erased or time > erased[row["user_id"]]
        )
        every = chain(rows, hidden)
        while chunk := list(islice(every, CHUNK)):
            self._bulk(cursor, chunk)
        count = len(data) + len(negative)
        cursor.execute(self._sql("INSERT INTO seeds VALUES (?, ?)"), (digest, count))

    def _all_erased(self, cursor: Any, users: Iterable[str]) -> dict[str, int]:
        """As `_erased_among`, for more users than a query can have."""
        cursor.execute("SELECT salted_hash, erased_ms FROM erasures")
        erased = dict(cursor.fetchall())
        if not erased:
            return {}
        names = ((user, user_hash(user, self.salt)) for user in users)
        return {user: erased[name] for user, name in names if name in erased}

    def _parts(self, cursor: Any) -> Iterator[list[Any]]:
        """Events in order of arrival, in parts."""
        after = 0
        while True:
            cursor.execute(
                self._sql(
                    f"SELECT {', '.join(EVENT_COLUMNS)}, id FROM events WHERE id > ?"  # noqa: S608
                    f" ORDER BY id LIMIT {CHUNK}"
                ),
                (after,),
            )
            rows = cursor.fetchall()
            if not rows:
                return
            yield rows
            after = rows[-1][-1]

    def _keep_erasure(self, cursor: Any, name: str, erased_ms: int) -> None:
        """Record the erasure of the user with this hash."""
        cursor.execute(
            self._sql(
                "INSERT INTO erasures (salted_hash, erased_ms) VALUES (?, ?)"
                " ON CONFLICT (salted_hash) DO UPDATE SET erased_ms = excluded.erased_ms"
            ),
            (name, erased_ms),
        )

    def _delete_erased(self, cursor: Any, erased: Mapping[str, int], salt: bytes) -> None:
        """Delete what is older than the erasure of its user; `erased` has the times by hash."""
        for table, more in (
            ("events", 0),
            ("recommendations", UNDER_WAY_MS),
            ("exposures", UNDER_WAY_MS),
        ):
            cursor.execute(f"SELECT DISTINCT user_id FROM {table} WHERE user_id IS NOT NULL")  # noqa: S608
            names = ((user, user_hash(user, salt)) for (user,) in cursor.fetchall())
            rows = [(user, erased[name] + more) for user, name in names if name in erased]
            cursor.executemany(
                self._sql(f"DELETE FROM {table} WHERE user_id = ? AND time_ms <= ?"),  # noqa: S608
                rows,
            )

    def _require_no_use_of_salt(self, cursor: Any) -> None:
        for table in ("erasures", "exposures"):
            cursor.execute(f"SELECT 1 FROM {table} LIMIT 1")  # noqa: S608
            if cursor.fetchone() is not None:
                raise StoreError(
                    f"store {self.place} has {table} of its own, with which erasures of another "
                    "store cannot be compared; import the file into an empty store"
                )

    def _require_id(self) -> None:
        """As `_check_id`, after reading."""
        with self._connected() as connection:
            self._check_id(connection.cursor())

    def _check_id(self, cursor: Any) -> None:
        """RestoredError if the store has another id: its salt may be another, too."""
        cursor.execute(self._sql("SELECT value FROM state WHERE key = ?"), (STORE_ID,))
        if json.loads(cursor.fetchone()[0]) != self.store_id:
            raise RestoredError(
                f"store {self.place}: it was restored, or has the erasures of another store by "
                "`recsys store import`; restart this process"
            )


def now_ms() -> int:
    """The wall clock, in unix milliseconds."""
    return time.time_ns() // 1_000_000


def _row(event: Event, answers: Collection[str]) -> tuple[Any, ...]:
    answer = event.recommendation_id
    linked = None if answer is None else int(answer in answers)
    return (
        event.event_id, event.user, event.item, event.type, event.time_ms, event.value, answer,
        linked, event.digest, event.seed,
    )  # fmt: skip


def _stored(row: Sequence[Any]) -> StoredEvent:
    event_id, user, item, kind, time_ms, value, recommendation_id, linked, digest, seed, place = row
    return StoredEvent(
        event_id, user, item, kind, time_ms, value, recommendation_id, digest, seed, place,
        None if linked is None else bool(linked),
    )  # fmt: skip
