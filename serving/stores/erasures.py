"""Erased users, of whom a store keeps a salted hash and the time of the erasure.

What happened before it does not return with a late delivery, an import or a data set. Erasures of
another store are taken over with its salt, so a user may be erased under more than one.
"""

from collections.abc import Collection, Iterable, Sequence

import sqlalchemy as sa

from recsys.serving.stores.database import SALTS, Database
from recsys.serving.stores.records import Erasure, now_ms, user_hash
from recsys.serving.stores.schema import ERASURES, EVENTS, EXPOSURES, RECOMMENDATIONS

CREDIBLE_MS = 1_750_000_000_000  # a clock that shows less is behind: this program is younger
UNDER_WAY_MS = 60_000  # an answer this soon after an erasure may be of the old history
OF_USERS = ((EVENTS, 0), (RECOMMENDATIONS, UNDER_WAY_MS), (EXPOSURES, UNDER_WAY_MS))
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
    salts = [bytes.fromhex(salt) for salt in database.state(connection, SALTS)]
    hashes = {user_hash(user, salt): user for user in users for salt in salts}
    query = TIMES.where(database.among(ERASURES.c.salted_hash))
    rows = connection.execute(query, database.texts(hashes)).all()
    erased: dict[str, int] = {}
    now = now_ms()
    for name, erased_ms in rows:
        is_ahead = CREDIBLE_MS < now < erased_ms - UNDER_WAY_MS
        if is_ahead:
            row = ERASURES.c.salted_hash == name
            connection.execute(sa.update(ERASURES).where(row).values(erased_ms=now - UNDER_WAY_MS))
        counts_ms = now - UNDER_WAY_MS if is_ahead else erased_ms
        erased[hashes[name]] = max(counts_ms, erased.get(hashes[name], 0))
    return erased


def erase(database: Database, connection: sa.Connection, erasure: Erasure, user: str) -> None:
    """Erase a user: events, remembered answers and exposures."""
    _keep(database, connection, [erasure])
    for table, _ in OF_USERS:
        connection.execute(sa.delete(table).where(table.c.user_id == user))
    database.leave_bytes(connection)


def take_over(database: Database, connection: sa.Connection, erasures: Sequence[Erasure]) -> int:
    """Record erasures of stores, and delete what they erase; returns how many were not known."""
    known = dict(connection.execute(TIMES).all())
    fresh = [
        erasure for erasure in erasures if erasure.erased_ms > known.get(erasure.user_hash, -1)
    ]
    if not fresh:
        return 0
    salts = dict.fromkeys(erasure.salt for erasure in fresh)
    _keep(database, connection, fresh)
    every = dict.fromkeys([*database.state(connection, SALTS), *salts])
    database.put_state(connection, SALTS, [*every])
    times = {erasure.user_hash: erasure.erased_ms for erasure in fresh}
    for table, more_ms in OF_USERS:
        user = table.c.user_id
        users = connection.scalars(sa.select(user).distinct().where(user.is_not(None))).all()
        hashes = [(user_hash(name, bytes.fromhex(salt)), name) for name in users for salt in salts]
        rows = [{"user": u, "until": times[name] + more_ms} for name, u in hashes if name in times]
        if rows:
            is_old = (user == sa.bindparam("user")) & (table.c.time_ms <= sa.bindparam("until"))
            connection.execute(sa.delete(table).where(is_old), rows)
    database.leave_bytes(connection)
    return len(fresh)


def _keep(database: Database, connection: sa.Connection, erasures: Iterable[Erasure]) -> None:
    """Record erasures, in the place of earlier ones of the same users."""
    row = database.insert(ERASURES)
    replaced = {"erased_ms": row.excluded.erased_ms}
    connection.execute(
        row.on_conflict_do_update(index_elements=["salted_hash"], set_=replaced),
        [{"salted_hash": e.user_hash, "erased_ms": e.erased_ms, "salt": e.salt} for e in erasures],
    )
