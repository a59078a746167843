"""The journal of a store, which has the changes of the catalog; and its state."""

import json
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import sqlalchemy as sa

from recsys.serving.stores.calls import Calls
from recsys.serving.stores.database import JOURNALING
from recsys.serving.stores.schema import JOURNAL, STATE

PAGE, PAGE_BYTES = 10_000, 8 << 20  # records that are read at once
ANY = "any"  # revision
LAST = sa.select(sa.func.coalesce(sa.func.max(JOURNAL.c.id), 0))


class OutdatedError(Exception):
    """The value has another revision by now."""


class Journaled(NamedTuple):
    """Range of places of written records: after `before`, up to `last`, without other records."""

    before: int
    last: int


class JournalTable:
    """Records of changes (JSON objects) by the name of their journal.

    Places grow in the order of commits, over all processes that share the store: reading again
    after the last place misses nothing.
    """

    def __init__(self, calls: Calls) -> None:
        self._calls = calls

    async def read(self, name: str, after: int = 0) -> list[tuple[int, dict[str, Any]]]:
        """The next records after a place, oldest first, with their places; none at the end.

        A page has at most `PAGE_BYTES`, or one record.
        """
        place, record = JOURNAL.c.id, JOURNAL.c.record
        here = (JOURNAL.c.model == name) & (place > after)
        sizes = sa.select(place, sa.func.length(record)).where(here).order_by(place).limit(PAGE)

        def read() -> list[tuple[int, dict[str, Any]]]:
            last = total = 0
            for position, size in self._calls.database.read(sizes):
                total += size
                if last and total > PAGE_BYTES:
                    break
                last = position
            if not last:
                return []
            query = sa.select(place, record).where(here, place <= last).order_by(place)
            rows = self._calls.database.read(query)
            return [(position, json.loads(text)) for position, text in rows]

        return await self._calls.read("journal", read, limited=False)

    async def append(self, name: str, records: Sequence[Mapping[str, Any]]) -> Journaled:
        """Write records durably: all or nothing.

        A record with an `item_id` replaces earlier records of the item, so the journal grows with
        the number of changed items and not with the number of changes.
        """
        rows: dict[Any, dict[str, Any]] = {}
        for number, record in enumerate(records):
            # As JSON, which PostgreSQL accepts for any id.
            key = json.dumps(record["item_id"]) if "item_id" in record else None
            rows.pop(key, None)  # the later record replaces it
            row = {"model": name, "key": key, "record": json.dumps(dict(record))}
            rows[number if key is None else key] = row
        keys = [row["key"] for row in rows.values() if row["key"] is not None]
        database, is_here = self._calls.database, JOURNAL.c.model == name

        def append(connection: sa.Connection) -> Journaled:
            database.lock(connection, JOURNALING)  # so that places are in the order of commits
            before = connection.execute(LAST.where(is_here)).scalar_one()
            if rows:
                connection.execute(sa.insert(JOURNAL), [*rows.values()])
            # Deleted last: SQLite gives the id of a deleted last row to the next one.
            delete = sa.delete(JOURNAL).where(is_here, JOURNAL.c.id <= before)
            connection.execute(delete.where(database.among(JOURNAL.c.key)), database.texts(keys))
            return Journaled(before, connection.execute(LAST.where(is_here)).scalar_one())

        return await self._calls.change("journal", append)


class StateTable:
    """JSON values by keys, for example the aliases."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls

    async def get(self, key: str) -> Any:
        """A value, or None."""
        query = sa.select(STATE.c.value).where(STATE.c.key == key)

        def read() -> Any:
            rows = self._calls.database.read(query)
            return json.loads(rows[0][0]) if rows else None

        return await self._calls.read("state", read, limited=False)

    async def revision(self, key: str) -> Any:
        """What `change` has last returned in any process, before the value: another each time."""
        return await self.get(_revision(key))

    async def change(
        self, key: str, change: Callable[[Any], None], before: str | None = ANY
    ) -> tuple[str, Any]:
        """Let `change` alter the stored value, durably and while no other process does.

        If it raises, nothing is altered. Returns the new revision and the new value.

        Raises:
            OutdatedError: the value does not have the revision `before`.
        """
        database, revision = self._calls.database, uuid.uuid4().hex

        def alter(connection: sa.Connection) -> tuple[str, Any]:
            database.lock(connection, JOURNALING)
            if before not in (ANY, database.state(connection, _revision(key))):
                raise OutdatedError
            value = database.state(connection, key) or {}
            change(value)
            database.put_state(connection, key, value)
            database.put_state(connection, _revision(key), revision)
            return revision, value

        return await self._calls.change("state", alter)


def _revision(key: str) -> str:
    return f"{key}.revision"
