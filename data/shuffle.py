"""Numbers ids and sorts rows on disk: the only step of preparing that needs all rows at once.

DuckDB does it within a memory limit: users and items are numbered by first appearance; rows are
sorted by user, then time, and equal times keep the source's order (`turned`: the opposite order, if
the source is newest first). All other steps work on parts.
DuckDB comes with the extra `large`; only this module imports it.
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

from recsys.data.filtering import TIME, FileOrder
from recsys.data.raw import without_zeros
from recsys.errors import ConfigError, DataError

BATCH = 1 << 20  # rows of a sorted batch
ROW = "row"  # number of the row in the source
# DuckDB exceeds its limit by the batches it returns; the rest of the process needs memory too.
ENGINE_SHARE = 0.5


@dataclass(frozen=True)
class Shuffled:
    """Events as numbers, in canonical order.

    Attributes:
        users: outside ids by number, (users,) string.
        items: outside ids by number, (items,) string.
        batches: columns `user` and `item` (int32) and the other columns, batch by batch.
        pairs: users, types (0 without types) and numbers of events, one for each pair that occurs.
        ratings: distinct ratings.
        turned: whether equal times have the opposite order of the source.
    """

    users: pa.Array
    items: pa.Array
    batches: Iterator[dict[str, NDArray[Any]]]
    pairs: tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]
    ratings: NDArray[np.float32]
    turned: bool = False


@contextmanager
def shuffle(
    events: Iterable[pa.Table], work: Path, memory_gb: float, *, turn: bool = False
) -> Iterator[Shuffled]:
    """Number and sort events that arrive in parts.

    Args:
        events: tables, all with the same columns of `RawData.events`.
        work: an empty folder for temporary files, about twice the size of the events.
        memory_gb: memory limit of the whole process, in GiB.
        turn: whether equal times of a source that is newest first have the opposite order.

    Raises:
        ConfigError: DuckDB is not installed.
        DataError: no events.
    """
    duckdb = _duckdb()
    source = work / "source.parquet"
    columns, order = _spool(events, source)
    turned = turn and order.newest_first
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
        pairs, ratings = _tally(connection, columns)
        others = [f'events."{name}"' for name in columns if name not in ("user", "item")]
        by = [f'events."{name}"' for name in TIME if name in columns]
        by.append(f'events."{ROW}"' + " DESC" * turned)
        sorted_rows = connection.sql(  # the column names come from this package
            f"""
            SELECT {", ".join(["users.number AS user", "items.number AS item", *others])}
            FROM events
            JOIN users ON events."user" = users.id
            JOIN items ON events.item = items.id
            ORDER BY users.number, {", ".join(by)}
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
            pairs,
            ratings,
            turned,
        )
    finally:
        connection.close()
        shutil.rmtree(work)


def _number(connection: Any, name: str) -> pa.Array:
    """Create the table `users` or `items` of ids and their numbers; return the ids by number."""
    connection.execute(
        f"""
        CREATE TABLE {name}s AS
        SELECT id, CAST(row_number() OVER (ORDER BY first) - 1 AS INTEGER) AS number
        FROM (SELECT "{name}" AS id, min("{ROW}") AS first FROM events GROUP BY ALL)
        """  # noqa: S608
    )
    found = connection.sql(f"SELECT id FROM {name}s ORDER BY number").to_arrow_table()  # noqa: S608
    return pa.concat_arrays(found["id"].chunks).cast(pa.string())


def _tally(
    connection: Any, columns: list[str]
) -> tuple[tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]], NDArray[np.float32]]:
    """`Shuffled.pairs` and `Shuffled.ratings`."""
    kind = "events.behaviour" if "behaviour" in columns else "0"
    found = connection.sql(
        f"""
        SELECT users.number AS user, {kind} AS kind, count(*) AS events
        FROM events JOIN users ON events."user" = users.id
        GROUP BY ALL
        """  # noqa: S608
    ).to_arrow_table()
    user, kinds, counts = (np.asarray(found[n], np.int64) for n in ("user", "kind", "events"))
    ratings = np.zeros(0, np.float32)
    if "rating" in columns:
        values = connection.sql("SELECT DISTINCT rating FROM events WHERE rating IS NOT NULL")
        ratings = np.asarray(values.to_arrow_table()["rating"], np.float32)
    return (user, kinds, counts), ratings


def _duckdb() -> Any:
    try:
        import duckdb
    except ImportError as error:
        raise ConfigError(
            "data.engine: streaming needs DuckDB; install it with pip install 'recbeam[large]', "
            "or use --set data.engine=memory if the data fit in memory"
        ) from error
    return duckdb


def _spool(events: Iterable[pa.Table], path: Path) -> tuple[list[str], FileOrder]:
    """Write events with their row numbers to a file; return the columns that say something."""
    writer, place, columns, fine, order = None, 0, [], False, FileOrder()
    try:
        for table in events:
            columns = table.column_names
            order.add(table)
            fine = fine or "nanosecond" in without_zeros(table).column_names
            rows = pa.array(np.arange(place, place + table.num_rows))
            place += table.num_rows
            table = table.append_column(ROW, rows)
            # Ids compress badly, and dictionaries of millions of ids only cost time.
            writer = writer or pq.ParquetWriter(path, table.schema, use_dictionary=False)
            writer.write_table(table)
    finally:
        if writer is not None:
            writer.close()
    if not place:
        raise DataError("the source has no events")
    return [name for name in columns if fine or name != "nanosecond"], order
