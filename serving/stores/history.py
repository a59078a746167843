"""The events of users in a store: their histories."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from recsys.serving.stores.calls import Calls, Write
from recsys.serving.stores.database import SEEDING, SEEDS
from recsys.serving.stores.erasures import OF_USER, erase, erase_more, erased_among
from recsys.serving.stores.records import (
    SEED_TYPE,
    Act,
    Appended,
    Event,
    EventConflictError,
    Sign,
    StoredEvent,
    StoreError,
    TypedHistory,
    parts_of_history,
    sign_of,
    user_hash,
)
from recsys.serving.stores.schema import COUNTED, EVENT_COLUMNS, EVENTS, RECOMMENDATIONS, UNCOUNTED
from recsys.serving.stores.seeding import replace_seed

CHUNK = 50_000
RETRY_S = 1.0  # after a part of an erasure has failed
NEWEST = 5_000  # of a user's events, those that decide what is not recommended
CHARACTERS = 1 << 17  # of the ids of the items of those events, together
STORED = sa.select(*(EVENTS.c[name] for name in EVENT_COLUMNS), EVENTS.c.id)
NEWEST_FIRST = EVENTS.c.time_ms.desc(), EVENTS.c.id.desc()


class HistoryTable:
    """Events by their users. A call may raise `StoreError`.

    Whatever an awaited write has returned for is on disk.
    """

    def __init__(self, calls: Calls, not_history: Collection[str]) -> None:
        """Use a store; events of the types `not_history` are not part of a history."""
        self._calls, self._database = calls, calls.database
        self._not_history = not_history
        self._erasing: set[asyncio.Task[None]] = set()
        left_out = {name for name in not_history if sign_of(name, not_history) is Sign.LEFT_OUT}
        history = sa.select(EVENTS.c.item_id, EVENTS.c.type).where(*OF_USER)
        if left_out.issuperset(UNCOUNTED):  # there is an index of the other events
            history = history.where(COUNTED)
            left_out.difference_update(UNCOUNTED)
        if left_out:
            history = history.where(EVENTS.c.type.not_in(sorted(left_out)))
        characters = sa.func.sum(sa.func.length(EVENTS.c.item_id))
        history = history.add_columns(characters.over(order_by=NEWEST_FIRST, rows=(None, 0)))
        *newest, so_far = history.order_by(*NEWEST_FIRST).limit(NEWEST).subquery().c
        # In one row: for thousands of rows, each would wait for Python's lock.
        as_list = getattr(sa.func, calls.database.json_list)
        self._history = sa.select(*(as_list(column, type_=sa.JSON) for column in newest))
        self._history = self._history.where(so_far <= CHARACTERS)
        # Made once: making a statement takes as long as executing it.
        among, answer = calls.database.among, RECOMMENDATIONS.c.recommendation_id
        known = sa.select(EVENTS.c.event_id, EVENTS.c.digest)
        self._known = known.where(among(EVENTS.c.event_id))
        self._answers = sa.select(answer).where(among(answer))

    # Reading

    async def read(self, user_id: str, limit: int) -> TypedHistory | None:
        """The user's latest events, oldest first, or None if the user is unknown.

        Equal times are in order of arrival. Events of the types `not_history`, or taken back, are
        left out; items that the user dislikes, or returned last, are named apart.
        """
        if "\0" in user_id:  # no event has such an id, and PostgreSQL refuses it
            return None
        return await self._calls.read("history", lambda: self._read(user_id, limit))

    async def events(
        self, user_id: str, limit: int, before: tuple[int, int] | None = None
    ) -> list[StoredEvent]:
        """A user's events of every type, newest first, at most `limit`.

        `before` is (`time_ms`, `position`) of the last event of the previous page.
        """
        if "\0" in user_id:
            return []
        name = user_hash(user_id, self._database.salt)
        query = STORED.where(*OF_USER).params(user_id=user_id, hash=name)
        if before is not None:
            position = sa.tuple_(EVENTS.c.time_ms, EVENTS.c.id)
            query = query.where(position < sa.tuple_(*map(sa.literal, before)))
        query = query.order_by(*NEWEST_FIRST).limit(limit)
        return await self._calls.rows("events", query, _stored)

    async def newest_places(self, depth: int) -> tuple[int, int, int]:
        """The last `depth` places of events, in the order of arrival, of all users.

        Returns the first and the last place, and the time of the first event there; the time is 0
        if the store has no earlier events.
        """
        newest = sa.select(sa.func.coalesce(sa.func.max(EVENTS.c.id), 0))
        (last,) = await self._calls.rows("acts", newest, int)
        first = max(0, last - depth) + 1
        query = sa.select(EVENTS.c.time_ms).where(EVENTS.c.id >= first).order_by(EVENTS.c.id)
        times = await self._calls.rows("acts", query.limit(1), int) if first > 1 else ()
        return first, last, times[0] if times else 0

    async def acts(self, first: int, last: int, since_ms: int) -> list[Act]:
        """Events at the places `first` to `last` that happened since a time, of all users."""
        e = EVENTS.c
        query = sa.select(e.user_id, e.item_id, e.type, e.time_ms, e.recommendation_id)
        query = query.where(e.id.between(first, last), e.time_ms >= since_ms)
        return await self._calls.rows("acts", query, Act)

    # Writing

    async def append(self, events: Sequence[Event]) -> Appended:
        """Write a batch durably: all of it or nothing. The next `read` includes it.

        An `EventConflictError` tells that an event with this id has other content.
        """
        appended: Appended = await self._calls.write("append", Write(events))
        return appended

    async def erase(self, user_id: str) -> None:
        """Erase a user: events, remembered answers, exposures.

        Events from before the erasure do not return with a late delivery or a data set;
        later events are accepted. The call can be repeated. It returns when all is deleted, in
        parts, which also happens without the caller, or after a stop (`Store.prepare`).
        """
        if "\0" in user_id:
            return
        task = asyncio.create_task(self._erase(user_id))
        self._erasing.add(task)
        task.add_done_callback(self._erasing.discard)
        await asyncio.shield(task)

    async def _erase(self, user_id: str) -> None:
        change = partial(erase, self._database, user_id)
        is_left = await self._calls.write("erase", Write(change=change, erases=True))
        change = partial(erase_more, self._database, user_id)
        while is_left:
            try:
                is_left = await self._calls.write("erase", Write(change=change, erases=True))
            except StoreError:
                if self._calls.is_closed:
                    raise
                await asyncio.sleep(RETRY_S)

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
        with self._database.bulk() as connection:
            if digest in self._database.state(connection, SEEDS):
                return 0
        verify(dataset, "dataset")
        data = Dataset.load(dataset)
        with self._database.bulk(self._database.begin) as connection:
            self._database.lock(connection, SEEDING)
            if digest in self._database.state(connection, SEEDS):  # by another process, meanwhile
                return 0
            count = replace_seed(self._database, connection, data, digest)
            self._database.put_state(connection, SEEDS, [digest])
            connection.exec_driver_sql("COMMIT")
        return count

    def export(self) -> Iterator[StoredEvent]:
        """Iterate over one state of all events, in order of arrival."""
        with self._database.bulk(self._database.begin_snapshot) as connection:
            after = 0
            part = STORED.order_by(EVENTS.c.id).limit(CHUNK)
            while rows := connection.execute(part.where(EVENTS.c.id > after)).all():
                yield from itertools.starmap(_stored, rows)
                after = rows[-1].id

    def erased(self, users: Collection[str]) -> dict[str, int]:
        """Time of erasure, in unix milliseconds, of those of `users` who were erased."""
        with self._database.bulk() as connection:
            return erased_among(self._database, connection, users)

    def count(self) -> int:
        """Number of events."""
        with self._database.bulk() as connection:
            count: int = connection.scalar(sa.select(sa.func.count()).select_from(EVENTS))
            return count

    # On the writing thread

    def insert(self, connection: sa.Connection, batches: Sequence[Sequence[Event]]) -> list[Any]:
        """Insert batches; returns an `Appended` or an error for each."""
        events = [event for batch in batches for event in batch]
        texts = self._database.texts
        names = {event.event_id for event in events if event.event_id is not None}
        known = dict(connection.execute(self._known, texts(names)).all())
        erased = erased_among(self._database, connection, {event.user for event in events})
        answers: set[str] = set()
        if names := {e.recommendation_id for e in events if e.recommendation_id is not None}:
            answers = {*connection.scalars(self._answers, texts(names))}
        outcomes: list[Any] = []
        rows: list[dict[str, Any]] = []
        for batch in batches:
            try:
                fresh, outcome = admit(batch, known, erased, answers)
            except EventConflictError as conflict:
                # Its frames have this list: they would stay, with all events, until a collection.
                outcomes.append(conflict.with_traceback(None))
                continue
            known |= {event.event_id: event.digest for event in fresh}
            rows += [_row(event, answers) for event in fresh]
            outcomes.append(outcome)
        if rows:
            self._database.insert_events(connection, rows)
        return outcomes

    # Internals

    def _read(self, user_id: str, limit: int) -> TypedHistory | None:
        of_user = {"user_id": user_id, "hash": user_hash(user_id, self._database.salt)}
        ((items, types),) = self._database.read(self._history, of_user)
        items, types, disliked = parts_of_history(items or [], types or [], self._not_history)
        if not items and not disliked:
            return None
        types = [None if name == SEED_TYPE else name for name in types]
        earlier = tuple(dict.fromkeys(zip(items[limit:], types[limit:], strict=True)))
        return TypedHistory(items[:limit][::-1], types[:limit][::-1], disliked, earlier)


def admit(
    batch: Sequence[Event],
    known: Mapping[str | None, str | None],
    erased: Mapping[str, int],
    answers: Collection[str],
) -> tuple[list[Event], Appended]:
    """Separate the new events of a batch from repeated and erased ones.

    Args:
        batch: events with ids and digests.
        known: id -> digest of the stored events.
        erased: user -> time of the erasure, in unix milliseconds.
        answers: ids of the remembered answers.

    Raises:
        EventConflictError: two events have the same id and different contents.
    """
    fresh: dict[str | None, Event] = {}
    conflicts: list[str] = []
    duplicates = ignored = unlinked = 0
    for event in batch:
        if event.event_id in fresh or event.event_id in known:
            same = fresh.get(event.event_id)
            before = same.digest if same is not None else known[event.event_id]
            if before == event.digest:
                duplicates += 1
            else:
                conflicts.append(str(event.event_id))
        elif event.time_ms <= erased.get(event.user, -1):
            ignored += 1
        else:
            fresh[event.event_id] = event
            answer = event.recommendation_id
            unlinked += answer is not None and answer not in answers
    if conflicts:
        raise EventConflictError(conflicts)
    return list(fresh.values()), Appended(len(fresh), duplicates, ignored, unlinked)


def _row(event: Event, answers: Collection[str]) -> dict[str, Any]:
    """The columns of an event."""
    answer = event.recommendation_id
    return {
        "event_id": event.event_id,
        "user_id": event.user,
        "item_id": event.item,
        "type": event.type,
        "time_ms": event.time_ms,
        "value": event.value,
        "recommendation_id": answer,
        "linked": None if answer is None else int(answer in answers),
        "digest": event.digest,
        "seed": event.seed,
    }


def _stored(*columns: Any) -> StoredEvent:
    """An event from the columns of `STORED`."""
    *event, linked, digest, seed, position = columns
    reported = None if linked is None else bool(linked)
    return StoredEvent(*(*event, digest, seed, position, reported))
