"""Erased users, of whom a store keeps a salted hash and the time of the erasure.

What happened before it does not return with a late delivery or a data set.
"""

from collections.abc import Collection

import sqlalchemy as sa

from recsys.serving.stores.database import Database
from recsys.serving.stores.records import now_ms, user_hash
from recsys.serving.stores.schema import ERASURES, EVENTS, EXPOSURES, RECOMMENDATIONS

CREDIBLE_MS = 1_750_000_000_000  # a clock that shows less is behind: this program is younger
UNDER_WAY_MS = 60_000  # an answer this soon after an erasure may be of the old history
OF_USERS = (EVENTS, RECOMMENDATIONS, EXPOSURES)
TIMES = sa.select(ERASURES.c.salted_hash, ERASURES.c.erased_ms)
FIRST = TIMES.limit(1)


def erased_among(
    database: Database, connection: sa.Connection, users: Collection[str]
) -> dict[str, int]:
    """Time of erasure of those of `users` who were erased.

    A time in the future is that of a clock that was ahead, and becomes a minute ago: later events
    shall be accepted.
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
        if is_ahead:
            row = ERASURES.c.salted_hash == name
            connection.execute(sa.update(ERASURES).where(row).values(erased_ms=now - UNDER_WAY_MS))
        erased[hashes[name]] = now - UNDER_WAY_MS if is_ahead else erased_ms
    return erased


def erase(database: Database, connection: sa.Connection, user: str) -> None:
    """Erase a user: events, remembered answers and exposures."""
    row = database.insert(ERASURES)
    replaced = {"erased_ms": row.excluded.erased_ms}
    connection.execute(
        row.on_conflict_do_update(index_elements=["salted_hash"], set_=replaced),
        {"salted_hash": user_hash(user, database.salt), "erased_ms": now_ms()},
    )
    for table in OF_USERS:
        connection.execute(sa.delete(table).where(table.c.user_id == user))
    database.leave_bytes(connection)
