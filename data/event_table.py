"""The events of a source as a table of DuckDB: numbered, in canonical order, filtered by SQL.

DuckDB keeps to a memory limit and moves what does not fit into a folder, so that data of any size
take one path. Users and items are numbered by first appearance. Each rule deletes rows and counts
them; a column that the source does not have is null in every row.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from recsys.data.cleaning import Duplicates
from recsys.data.raw import EVENT_COLUMNS
from recsys.data.report import RULES
from recsys.errors import DataError

PART_ROWS = 1 << 22  # rows of users that are processed together; one long user may exceed it
BATCH = 1 << 20  # rows that are read from a table at a time
# Arrow holds the rows that DuckDB returns; the rest of the process needs memory, too.
ENGINE_SHARE = 0.5
SURE_ORDER = 0.99  # share of neighbouring rows that must be newest first
SQL = {"string": "VARCHAR", "int64": "BIGINT", "int32": "INTEGER", "float": "FLOAT",
       "uint8": "UTINYINT", "uint64": "UBIGINT"}  # fmt: skip
KINDS = {name: SQL[str(kind)] for name, kind in EVENT_COLUMNS.items()}
NUMBERED = KINDS | {"user": "INTEGER", "item": "INTEGER"}
EQUAL = '"user", item, timestamp, nanosecond, rating, split, behaviour, quantity'
PAIR = '"user", item'
# Equal lines of orders each count, although one event stays of them. A row of another file, or one
# of the same order that differs in what is not read, such as the payment, repeats a line.
LINES = """
    CREATE TABLE lines AS
    SELECT min(place) AS place, sum(count) AS count, sum(rows) AS rows FROM (
        SELECT {columns}, min(place) AS place, max(count) AS count, sum(count) AS rows FROM (
            SELECT {columns}, line, min(rowid) AS place, count(*) AS count FROM events
            WHERE quantity <> 0 GROUP BY {columns}, line
        ) GROUP BY {columns}, line >> 32
    ) GROUP BY {columns} HAVING sum(rows) > 1
"""
REPEATED = """
    SELECT place FROM (
        SELECT rowid AS place, row_number() OVER (PARTITION BY {columns} ORDER BY rowid) AS number
        FROM events
    ) WHERE number > 1
"""
TIES = """
    SELECT count(*) FROM (
        SELECT
            item <> lag(item) OVER before
            AND timestamp = lag(timestamp) OVER before
            AND nanosecond IS NOT DISTINCT FROM lag(nanosecond) OVER before AS tied
        FROM events
        WINDOW before AS (PARTITION BY "user" ORDER BY rowid)
    ) WHERE tied
"""
# Neighbours in the file of which the second is earlier, and later: of one user, and of any. Rows of
# one item say nothing, since a file may be in order of items.
STEPS = """
    SELECT
        count(*) FILTER (step < 0 AND of_user), count(*) FILTER (step > 0 AND of_user),
        count(*) FILTER (step < 0), count(*) FILTER (step > 0)
    FROM (
        SELECT
            CASE WHEN timestamp <> lag(timestamp) OVER before
                THEN timestamp - lag(timestamp) OVER before
                ELSE nanosecond - lag(nanosecond) OVER before
            END AS step,
            "user" = lag("user") OVER before AND item <> lag(item) OVER before AS of_user
        FROM source
        WINDOW before AS (ORDER BY rowid)
    )
"""
OF_TYPES = """
    SELECT kind, sum(events) AS events, count(*) FILTER (events >= 2) AS users FROM (
        SELECT "user", behaviour AS kind, count(*) AS events FROM events
        WHERE behaviour IS NOT NULL GROUP BY ALL
    ) GROUP BY kind
"""
FEW = "SELECT {name} FROM events GROUP BY {name} HAVING count(*) < ?"


@contextmanager
def connected(folder: Path, memory_gb: float) -> Iterator[duckdb.DuckDBPyConnection]:
    """A connection to DuckDB; what does not fit in a share of the memory goes to `folder`."""
    connection = duckdb.connect(
        ":memory:",
        config={
            "memory_limit": f"{memory_gb * ENGINE_SHARE:.2f}GiB",
            "temp_directory": str(folder),
            "autoinstall_known_extensions": False,
            "autoload_known_extensions": False,
        },
    )
    connection.execute("SET enable_progress_bar = false")
    try:
        yield connection
    finally:
        connection.close()


class EventTable:
    """The events of a source; `sort` comes before the rules.

    Args:
        connection: gets the tables `source`, later `events`, `users` and `items`.
        parts: tables with columns of `RawData.events`, in the order of the source.

    Attributes:
        columns: names of the columns of the source; without `nanosecond` if all are 0.
        rows: number of rows now.
        counts: rows that each rule has dropped or found.
        users: outside ids by number, (users,) string.
        items: outside ids by number, (items,) string.

    Raises:
        DataError: no events.
    """

    def __init__(self, connection: duckdb.DuckDBPyConnection, parts: Iterable[pa.Table]) -> None:
        self._connection = connection
        self.columns: set[str] = set()
        self.rows, self.counts = 0, Counter[str]()
        for part in parts:
            if not self.columns:
                self.columns = set(part.column_names)
                self._create("source", KINDS)
            self.insert("source", part)
            self.rows += part.num_rows
        if not self.rows:
            raise DataError("the source has no events")
        if self.value("SELECT coalesce(max(nanosecond), 0) FROM source") == 0:
            self.columns.discard("nanosecond")
        self.users, self.items = (self._number(name) for name in ("user", "item"))

    def _number(self, name: str) -> pa.Array:
        """Create the table `users` or `items` of ids and numbers; return the ids by number."""
        self._run(
            f"""
            CREATE TABLE {name}s AS
            SELECT id, CAST(row_number() OVER (ORDER BY first) - 1 AS INTEGER) AS number
            FROM (SELECT "{name}" AS id, min(rowid) AS first FROM source GROUP BY ALL)
            """  # noqa: S608
        )
        ids = self.table(f"SELECT id FROM {name}s ORDER BY number")["id"]  # noqa: S608
        return ids.combine_chunks()

    @property
    def newest_first(self) -> bool:
        """Whether the rows of the source are newest first, before they are sorted.

        Those of each user show it, or if they do not, all.
        """
        (steps,) = self._run(STEPS)
        for earlier, later in (steps[:2], steps[2:]):
            if earlier + later:
                return bool(earlier >= SURE_ORDER * (earlier + later))
        return False

    def sort(self, *, turned: bool = False, last: Sequence[int] = ()) -> None:
        """Make `events`: by user, then time; rows of one time keep the order of the source.

        They have the opposite order if they are `turned`; types that are `last` follow the others.
        """
        others = "".join(f", {name}" for name in KINDS if name in self.columns - {"user", "item"})
        types = ", ".join(map(str, last)) if "timestamp" in self.columns else ""
        follows = f"coalesce(behaviour IN ({types}), false), " if types else ""
        self._create("events", NUMBERED)
        self._run(
            f"""
            INSERT INTO events BY NAME
            SELECT users.number AS "user", items.number AS item{others}
            FROM source
            JOIN users ON users.id = source."user"
            JOIN items ON items.id = source.item
            ORDER BY users.number, timestamp, nanosecond, {follows}source.rowid
                {"DESC" * turned}
            """  # noqa: S608
        )
        self._run("DROP TABLE source")

    @property
    def ties(self) -> int:
        """The number of rows that have the user and time of the row before, and another item."""
        return int(self.value(TIES))

    def of_types(self, types: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The events of each type, and the users with at least two of them: (types,) each."""
        counted = self.table(OF_TYPES)
        made = np.zeros((2, types), np.int64)
        if types:
            made[:, counted["kind"]] = [counted["events"], counted["users"]]
        return made[0], made[1]

    def ratings(self) -> NDArray[np.float32]:
        """The distinct ratings, ascending."""
        distinct = self.table("SELECT DISTINCT rating FROM events WHERE rating IS NOT NULL")
        return np.sort(np.asarray(distinct["rating"], np.float32))

    def times(self) -> NDArray[np.int64]:
        """(rows,) unix seconds, in any order."""
        return np.asarray(self.table("SELECT timestamp FROM events")["timestamp"], np.int64)

    def events_of(self, name: str) -> NDArray[np.int64]:
        """The number of events of each `user` or `item`, by number."""
        counted = self.table(f'SELECT "{name}" AS id, count(*) AS rows FROM events GROUP BY ALL')  # noqa: S608
        made = np.zeros(len(self.users if name == "user" else self.items), np.int64)
        made[np.asarray(counted["id"])] = np.asarray(counted["rows"])
        return made

    def drop_users(self, users: NDArray[np.int64]) -> NDArray[np.int64]:
        """Drop users by number; return the items of their events."""
        self._connection.register("unwanted", pa.table({"number": users}))
        where = '"user" IN (SELECT number FROM unwanted)'
        items = self.table(f"SELECT DISTINCT item FROM events WHERE {where}")["item"]  # noqa: S608
        self._delete(where)
        self._connection.unregister("unwanted")
        return np.asarray(items, np.int64)

    def drop_duplicates(self, policy: Duplicates) -> None:
        """Drop duplicates and count them; of equal rows of an order, the first gets all pieces.

        Args:
            policy: `keep`; `drop-exact` (rows equal in every column; without times there are none,
                because the place of a row is its time); or `keep-first` (one event for each user
                and item).
        """
        rows = self.rows
        if policy == "keep-first":
            self._delete(f"rowid IN ({REPEATED.format(columns=PAIR)})")
        elif policy != "keep" and "timestamp" in self.columns:
            counts = "quantity" in self.columns
            if counts:
                self._run(LINES.format(columns=EQUAL))
            self._delete(f"rowid IN ({REPEATED.format(columns=EQUAL)})")
            if counts:
                self._add_pieces()
        self.columns.discard("line")
        self.counts["duplicate_rows_dropped"] += rows - self.rows

    def _add_pieces(self) -> None:
        """Give each row that stays the pieces of its equal `lines`."""
        self._run(
            "UPDATE events SET quantity = quantity * count FROM lines "
            "WHERE events.rowid = lines.place"
        )
        for rule, count in (("added", "count - 1"), ("dropped", "rows - count")):
            number = self.value(f"SELECT coalesce(sum({count}), 0) FROM lines")  # noqa: S608
            self.counts[f"pieces_of_equal_rows_{rule}"] += int(number)
        self._run("DROP TABLE lines")

    def drop_ratings_below(self, minimum: float) -> None:
        """Drop events rated lower, or not rated."""
        where = "rating IS NULL OR rating < CAST(? AS FLOAT)"
        self._drop("rows_below_min_rating_dropped", where, minimum)

    def k_core(self, k: int) -> None:
        """Drop users and items with fewer than `k` events until all have at least `k`."""
        few = (FEW.format(name=name) for name in ('"user"', "item"))
        where = '"user" IN ({}) OR item IN ({})'.format(*few)
        while self._drop("rows_outside_core_dropped", where, k, k):
            pass

    def _drop(self, reason: str, where: str, *values: object) -> int:
        """Drop rows, and count them under `reason`; refuse to drop all."""
        dropped = self._delete(where, *values)
        self.counts[reason] += dropped
        self.check(reason)
        return dropped

    def _delete(self, where: str, *values: object) -> int:
        dropped: int
        ((dropped,),) = self._run(f"DELETE FROM events WHERE {where}", *values)  # noqa: S608
        self.rows -= dropped
        return dropped

    def check(self, reason: str) -> None:
        """Raise a DataError that names a rule if no rows are left."""
        if not self.rows:
            rule = RULES.get(reason) or RULES.get(f"{reason}_dropped")
            why = f": {rule.found}, and are {rule.done}" if rule else ""
            why += f"; --set {rule.otherwise}" if rule and rule.otherwise else ""
            raise DataError(f"no events are left after {reason.removesuffix('_dropped')!r}{why}")

    def parts(self) -> Iterator[dict[str, NDArray[Any]]]:
        """The rows in order as columns, part by part; no user is in two parts.

        The column `place` numbers the rows, and a rating or quantity that is null is NaN.
        """
        ends = np.cumsum(self.events_of("user"))
        stops = np.arange(PART_ROWS, ends[-1] + PART_ROWS, PART_ROWS).clip(max=ends[-1])
        names = [name for name in KINDS if name in self.columns]
        start = 0
        for stop in (np.unique(np.searchsorted(ends, stops)) + 1).tolist():
            part = self.table(
                f"""
                SELECT rowid AS place, {", ".join(f'"{name}"' for name in names)} FROM events
                WHERE "user" >= {start} AND "user" < {stop} ORDER BY rowid
                """  # noqa: S608
            )
            yield {name: part[name].to_numpy(zero_copy_only=False) for name in part.column_names}
            start = stop

    def replace(self, parts: Iterable[Mapping[str, NDArray[Any]]], columns: set[str]) -> None:
        """Put other rows, in order and with these columns, in the place of all rows."""
        before, self.columns = self.columns, columns
        self._create("other", NUMBERED)
        self.columns = before
        for part in parts:
            rows = pa.table({name: part[name] for name in KINDS if name in columns})
            self.insert("other", rows)
        self._run("DROP TABLE events")
        self._run("ALTER TABLE other RENAME TO events")
        self.columns, self.rows = columns, int(self.value("SELECT count(*) FROM events"))

    def _create(self, table: str, kinds: Mapping[str, str]) -> None:
        """Create a table of events; columns that the source does not have take no memory."""
        missing = "{} GENERATED ALWAYS AS (CAST(NULL AS {})) VIRTUAL"
        made = dict(kinds)
        for name in kinds.keys() - self.columns:
            made[name] = missing.format(kinds[name], kinds[name])
        self.create(table, **made)

    def create(self, table: str, **kinds: str) -> None:
        """Create a table with columns of these types."""
        columns = ", ".join(f'"{name}" {kind}' for name, kind in kinds.items())
        self._run(f"CREATE TABLE {table} ({columns})")

    def insert(self, table: str, rows: pa.Table) -> None:
        """Append rows; NaN becomes null, and so does a column that they lack."""
        values = ", ".join(
            f"nullif({name}, CAST('nan' AS FLOAT)) AS {name}"
            if name in ("rating", "quantity")
            else f'"{name}"'
            for name in rows.column_names
        )
        self._connection.register("rows_to_insert", rows)
        query = f"SELECT {values} FROM rows_to_insert"  # noqa: S608
        self._run(f"INSERT INTO {table} BY NAME {query}")
        self._connection.unregister("rows_to_insert")

    def with_ids(self, table: str, columns: Iterable[str]) -> pa.RecordBatchReader:
        """The rows of a table in their order: `user_id` and `item_id`, then these columns."""
        others = ", ".join(columns)
        return self._connection.sql(
            f"""
            SELECT users.id AS user_id, items.id AS item_id, {others}
            FROM {table}
            JOIN users ON users.number = {table}."user"
            JOIN items ON items.number = {table}.item
            ORDER BY {table}.rowid
            """  # noqa: S608
        ).to_arrow_reader(BATCH)

    def table(self, query: str) -> pa.Table:
        """The result of a query."""
        return self._connection.sql(query).to_arrow_table()

    def value(self, query: str) -> Any:
        """The only value of a query."""
        ((single,),) = self._run(query)
        return single

    def _run(self, query: str, *values: object) -> list[tuple[Any, ...]]:
        rows: list[tuple[Any, ...]] = self._connection.execute(query, values).fetchall()
        return rows
