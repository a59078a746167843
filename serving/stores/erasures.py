"""Erased users, of whom a store keeps a salted hash and the time of the erasure.

What happened before it does not return with a late delivery or a data set, and is not read any
more. The rows are deleted in parts, between which others write; the state names the users whose
rows are being deleted, so that a stop in between does not end it.
"""

from collections.abc import Collection

import sqlalchemy as sa

from recsys.serving.stores.database import Database
from recsys.serving.stores.records import now_ms, user_hash
from recsys.serving.stores.schema import ERASURES, EVENTS, EXPOSURES, RECOMMENDATIONS

CREDIBLE_MS = 1_750_000_000_000  # a clock that shows less is behind: this program is younger
UNDER_WAY_MS = 60_000  # an answer this soon after an erasure may be of the old history
# Key of STATE: users whose rows are being deleted, and when they were erased.
UNFINISHED = "erasing"
DELETED_AT_ONCE = 2_000  # rows in a transaction, about 0.03 s
TIMES = sa.select(ERASURES.c.salted_hash, ERASURES.c.erased_ms)
FIRST = TIMES.limit(1)
ERASED_MS = sa.select(ERASURES.c.erased_ms).where(ERASURES.c.salted_hash == sa.bindparam("hash"))
# Events of a user that are not to be deleted. No event is from before that time.
OF_USER = (
    EVENTS.c.user_id == sa.bindparam("user_id"),
    EVENTS.c.time_ms > sa.func.coalesce(ERASED_MS.scalar_subquery(), -(2**62)),
)


def erased_among(
    database: Database, connection: sa.Connection, users: Collection[str]
) -> dict[str, int]:
    """Time of erasure of those of `users` who were erased.

    A time in the future is that of a clock that was ahead, and becomes a minute ago: later events
    shall be accepted. It stays while rows from before it are being deleted.
    """
    if not users or connection.execute(FIRST).first() is None:
        return {}
    hashes = {user_hash(user, database.salt): user for user in users}
    query = TIMES.where(database.among(ERASURES.c.salted_hash))
    rows = connection.execute(query, database.texts(hashes)).all()
    erased: dict[str, int] = {}
    now = now_ms()
    for name, erased_ms in rows:
        is_ahead = CREDIBLE_MS < now < erased_ms - UNDER_WAY_MS
        is_ahead = is_ahead and hashes[name] not in _erasing(database, connection)
        if is_ahead:
            row = ERASURES.c.salted_hash == name
            connection.execute(sa.update(ERASURES).where(row).values(erased_ms=now - UNDER_WAY_MS))
        erased[hashes[name]] = now - UNDER_WAY_MS if is_ahead else erased_ms
    return erased


def erase(database: Database, user: str, connection: sa.Connection) -> bool:
    """Begin to erase a user, of whom nothing from before is read from now on.

    Returns whether there are rows left, for `erase_more`.
    """
    row, time_ms = database.insert(ERASURES), now_ms()
    replaced = {"erased_ms": row.excluded.erased_ms}
    connection.execute(
        row.on_conflict_do_update(index_elements=["salted_hash"], set_=replaced),
        {"salted_hash": user_hash(user, database.salt), "erased_ms": time_ms},
    )
    connection.execute(sa.delete(EXPOSURES).where(EXPOSURES.c.user_id == user))
    for table, until_ms in _limits(time_ms):  # rows of a clock that was ahead, which are few
        is_later = (table.c.user_id == user) & (table.c.time_ms > until_ms)
        connection.execute(sa.delete(table).where(is_later))
    database.put_state(connection, UNFINISHED, {**_erasing(database, connection), user: time_ms})
    return erase_more(database, user, connection)


def erase_more(database: Database, user: str | None, connection: sa.Connection) -> bool:
    """Delete some rows of an erased user, or of those that a stop has left (None).

    Returns whether there are rows left.
    """
    erasing = _erasing(database, connection)
    name = next(iter(erasing), None) if user is None else user
    if name not in erasing:  # another call has done it
        return False
    for table, until_ms in _limits(erasing.pop(name)):
        is_earlier = (table.c.user_id == name) & (table.c.time_ms <= until_ms)
        some = sa.select(table.c.id).where(is_earlier).limit(DELETED_AT_ONCE)
        deleted = connection.execute(sa.delete(table).where(table.c.id.in_(some)))
        if deleted.rowcount == DELETED_AT_ONCE:
            return True
    database.put_state(connection, UNFINISHED, erasing)
    database.leave_bytes(connection)
    return user is None


def _erasing(database: Database, connection: sa.Connection) -> dict[str, int]:
    return database.state(connection, UNFINISHED) or {}


def _limits(erased_ms: int) -> tuple[tuple[sa.Table, int], ...]:
    """The tables, and the time of the last row that an erasure deletes."""
    return (EVENTS, erased_ms), (RECOMMENDATIONS, erased_ms + UNDER_WAY_MS)
