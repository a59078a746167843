"""Import of the histories of a canonical data set into a store."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
import sqlalchemy as sa

from recsys.serving.stores.database import Database
from recsys.serving.stores.erasures import erased_among
from recsys.serving.stores.records import DISLIKES, SEED_TYPE
from recsys.serving.stores.schema import EVENT_COLUMNS, EVENTS

if TYPE_CHECKING:  # importing Arrow is slow
    import pyarrow as pa

    from recsys.dataset import Dataset

CHUNK = 50_000


def replace_seed(
    database: Database, connection: sa.Connection, data: "Dataset", digest: str
) -> int:
    """Write the events of a data set in the place of those of another.

    Events from before the erasure of their user are left out. Returns the number of all events.
    """
    connection.execute(sa.delete(EVENTS).where(EVENTS.c.seed.is_not(None)))
    events, count = [*_events(data)], 0
    users = {user for table in events for user in table["user_id"].unique().to_pylist()}
    erased = erased_among(database, connection, users)
    blank = {**dict.fromkeys(EVENT_COLUMNS), "seed": digest}
    for batch in (batch for table in events for batch in table.to_batches(CHUNK)):
        rows = ({**blank, **row} for row in batch.to_pylist())
        kept = [row for row in rows if row["time_ms"] > erased.get(row["user_id"], -(2**62))]
        if kept:
            database.insert_events(connection, kept)
        count += len(batch)
    return count


def _events(data: "Dataset") -> Iterator["pa.Table"]:
    """Tables of the events of a data set, and of what stands as disliked."""
    import pyarrow as pa

    table, scale = data.interactions, 1000 if data.interactions.has_time else 1
    fine = 0 if table.nanosecond is None else table.nanosecond // 1_000_000
    types = [behaviour.name for behaviour in data.behaviours]
    kind = table.behaviour
    if kind is None:
        types, kind = [SEED_TYPE], np.zeros(len(table), np.uint8)
    columns = {
        "user_id": pa.DictionaryArray.from_arrays(table.user, table.user_ids.tolist()),
        "item_id": pa.DictionaryArray.from_arrays(table.item, table.item_ids.tolist()),
        "type": pa.DictionaryArray.from_arrays(kind, types),
        "time_ms": pa.array(table.timestamp * scale + fine),
        "value": pa.array(table.rating, from_pandas=True),  # not a number: there is none
    }
    yield pa.table(columns)
    if data.disliked is not None:
        standing = data.disliked.standing.select(["user_id", "item_id"])
        times = [(time or 0) * scale for time in data.disliked.standing["timestamp"].to_pylist()]
        types = [DISLIKES[0]] * len(times)
        yield standing.append_column("time_ms", [times]).append_column("type", [types])
