"""The one step of preparing that needs all rows at once: numbering ids and sorting, on disk.

DuckDB does it, within a given memory: users and items are numbered by first appearance, rows are
sorted by user, then time; equal times keep the source's order. Everything before and after works on
parts. DuckDB comes with the extra `large` and is imported here alone.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from recsys.errors import ConfigError, DataError

BATCH = 1 << 20  # rows of a sorted batch
ROW = "row"  # a row's place in the source
# DuckDB keeps to its limit but for what it hands over; the rest of the process needs some too.
ENGINE_SHARE = 0.5


@dataclass(frozen=True)
class Shuffled:
    """Events as numbers, in canonical order.

    Attributes:
        users: outside ids by number, (users,) string.
        items: outside ids by number, (items,) string.
        batches: columns `user` and `item` (int32) and the source's others, batch by batch.
    """

    users: pa.Array
    items: pa.Array
    batches: Iterator[dict[str, NDArray[Any]]]


@contextmanager
def shuffle(events: Iterable[pa.Table], work: Path, memory_gb: float) -> Iterator[Shuffled]:
    """Number and sort events that arrive in parts.

    Args:
        events: tables with the columns of `RawData.events`, the same ones in each.
        work: an empty folder for what does not fit; about twice the size of the events.
        memory_gb: what the whole process may take, in GiB.

    Raises:
        ConfigError: DuckDB is not installed.
        DataError: no events.
    """
    duckdb = _duckdb()
    source = work / "source.parquet"
    columns = _spool(events, source)
    connection = duckdb.connect(
        str(work / "shuffle.duckdb"),
        config={
            "memory_limit": f"{memory_gb * ENGINE_SHARE:.2f}GiB",
            "temp_directory": str(work / "spilled"),
            "autoinstall_known_extensions": False,
            "autoload_known_extensions": False,
        },
    )
    connection.execute("SET enable_progress_bar = false")
    try:
        connection.read_parquet(str(source)).create_view("events")
        ids = {name: _number(connection, name) for name in ("user", "item")}
        others = [f'events."{name}"' for name in columns if name not in ("user", "item")]
        order = [f'events."{name}"' for name in ("timestamp", ROW) if name in (*columns, ROW)]
        sorted_rows = connection.sql(  # names of columns are ours
            f"""
            SELECT {", ".join(["users.number AS user", "items.number AS item", *others])}
            FROM events
            JOIN users ON events."user" = users.id
            JOIN items ON events.item = items.id
            ORDER BY users.number, {", ".join(order)}
            """  # noqa: S608
        )
        reader = sorted_rows.to_arrow_reader(BATCH)
        yield Shuffled(
            ids["user"],
            ids["item"],
            (
                {
                    name: batch.column(name).to_numpy(zero_copy_only=False)
                    for name in batch.schema.names
                }
                for batch in reader
            ),
        )
    finally:
        connection.close()
        shutil.rmtree(work)


def _number(connection: Any, name: str) -> pa.Array:
    """Make the table `users` or `items` of ids and their numbers; returns the ids by number."""
    connection.execute(
        f"""
        CREATE TABLE {name}s AS
        SELECT id, CAST(row_number() OVER (ORDER BY first) - 1 AS INTEGER) AS number
        FROM (SELECT "{name}" AS id, min("{ROW}") AS first FROM events GROUP BY ALL)
        """  # noqa: S608
    )
    found = connection.sql(f"SELECT id FROM {name}s ORDER BY number").to_arrow_table()  # noqa: S608
    return pa.concat_arrays(found["id"].chunks).cast(pa.string())


def _duckdb() -> Any:
    try:
        import duckdb
    except ImportError as error:
        raise ConfigError(
            "data.engine: streaming needs DuckDB; install it with pip install 'recbeam[large]', "
            "or say --set data.engine=memory if the data fit in memory"
        ) from error
    return duckdb


def _spool(events: Iterable[pa.Table], path: Path) -> list[str]:
    """Write events to a file with each row's place; returns their columns."""
    writer, place, columns = None, 0, []
    try:
        for table in events:
            columns = table.column_names
            rows = pa.array(np.arange(place, place + table.num_rows))
            place += table.num_rows
            table = table.append_column(ROW, rows)
            # Ids hardly compress and dictionaries of millions of them only cost time.
            writer = writer or pq.ParquetWriter(path, table.schema, use_dictionary=False)
            writer.write_table(table)
    finally:
        if writer is not None:
            writer.close()
    if not place:
        raise DataError("the source has no events")
    return columns
