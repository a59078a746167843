"""Import of the histories of a canonical data set into a store."""

from collections.abc import Iterator
from itertools import chain, islice
from typing import TYPE_CHECKING, Any

import sqlalchemy as sa

from recsys.serving.stores.database import Database
from recsys.serving.stores.erasures import erased_among
from recsys.serving.stores.records import DISLIKES, SEED_TYPE
from recsys.serving.stores.schema import EVENT_COLUMNS, EVENTS

if TYPE_CHECKING:  # importing Arrow is slow
    from recsys.dataset import Dataset

CHUNK = 50_000
Seed = tuple[str, str, str, int, float | None]  # user, item, type, time in ms, value


def replace_seed(
    database: Database, connection: sa.Connection, data: "Dataset", digest: str
) -> int:
    """Write the events of a data set in the place of those of another.

    Events from before the erasure of their user are left out. Returns the number of all events.
    """
    connection.execute(sa.delete(EVENTS).where(EVENTS.c.seed.is_not(None)))
    users = {*data.interactions.user_ids.tolist()}
    if data.disliked is not None:
        users.update(data.disliked.standing["user_id"].to_pylist())
    erased = erased_among(database, connection, users)
    rows = (
        {
            **dict.fromkeys(EVENT_COLUMNS),
            "user_id": user,
            "item_id": item,
            "type": kind,
            "time_ms": time_ms,
            "value": value,
            "seed": digest,
        }
        for user, item, kind, time_ms, value in chain(_interactions(data), _disliked(data))
        if user not in erased or time_ms > erased[user]
    )
    while chunk := list(islice(rows, CHUNK)):
        database.insert_events(connection, chunk)
    return len(data.interactions) + (0 if data.disliked is None else len(data.disliked.standing))


def _interactions(data: "Dataset") -> Iterator[Seed]:
    table = data.interactions
    users, items = table.user_ids.tolist(), table.item_ids.tolist()
    names = [behaviour.name for behaviour in data.behaviours]
    times = table.timestamp * (1000 if table.has_time else 1)
    if table.nanosecond is not None:
        times = times + table.nanosecond // 1_000_000
    for start in range(0, len(table), CHUNK):
        part = slice(start, start + CHUNK)
        columns: list[Any] = [
            column[part].tolist() for column in (table.user, table.item, times, table.rating)
        ]
        kinds = None if table.behaviour is None else [names[n] for n in table.behaviour[part]]
        for n, (user, item, time_ms, rating) in enumerate(zip(*columns, strict=True)):
            value = None if rating != rating else rating  # not a number: there is none
            yield users[user], items[item], kinds[n] if kinds else SEED_TYPE, time_ms, value


def _disliked(data: "Dataset") -> Iterator[Seed]:
    if data.disliked is not None:
        scale = 1000 if data.interactions.has_time else 1
        for row in data.disliked.standing.to_pylist():
            time_ms = (row["timestamp"] or 0) * scale
            yield row["user_id"], row["item_id"], DISLIKES[0], time_ms, None
