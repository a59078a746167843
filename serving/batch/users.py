"""Users to score, read in ranges of rows from parquet files or from a canonical data set.

Only a few thousand histories are in memory at a time, whatever the number of users.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
import pyarrow.parquet as pq

from recsys.artifacts import read_manifest, sha256
from recsys.dataset import Dataset, Disliked, event_files
from recsys.errors import DataError
from recsys.serving.stores.records import NOT_HISTORY, TypedHistory

USER, HISTORY = "user_id", "history"
ROWS_A_BATCH = 1024
History = TypedHistory | None  # None: the user has no history


class UsersFile:
    """Rows of a parquet file, or of the files of a folder in the order of their names.

    Columns: `user_id` (string or integer) and, unless a data set has the histories, `history` (list
    of item ids, oldest first).

    Attributes:
        path: path of the file or folder.
        has_histories: whether the files have the column `history`.
    """

    def __init__(self, path: Path) -> None:
        """Open a file or folder.

        Raises:
            DataError: there is no file, or a column is missing or of another type.
        """
        self.path = path
        self._files = sorted(path.glob("*.parquet")) if path.is_dir() else [path]
        self._rows = 0
        try:
            names = [set(pq.read_schema(file).names) for file in self._files]
            self.has_histories = all(HISTORY in columns for columns in names)
            self._columns = [USER, HISTORY] if self.has_histories else [USER]
            for file in self._files:
                with pq.ParquetFile(file) as opened:
                    self._check(file, opened.schema_arrow)
                    self._rows += opened.metadata.num_rows
        except (OSError, pa.ArrowInvalid) as error:
            raise DataError(f"{path}: not a parquet file of users: {error}") from error
        if not self._files:
            raise DataError(f"{path}: no file in it ends with .parquet")
        self._stream: Iterator[pa.RecordBatch] = iter(())
        self._begin, self._held = self._rows, pa.record_batch({USER: pa.array([])})

    def __len__(self) -> int:
        return self._rows

    @cached_property
    def digest(self) -> str:
        """Digest of the content."""
        return ",".join(sha256(file)[:16] for file in self._files)

    def ids(self, start: int, stop: int) -> list[str]:
        """User ids of a range of rows."""
        return self._texts(self._table(start, stop)[USER], start)

    def read(self, start: int, stop: int) -> tuple[list[str], list[History]]:
        """User ids and histories of a range of rows; fastest in ascending order.

        Raises:
            DataError: a user id or an item of a history is null.
        """
        table = self._table(start, stop)
        histories = table[HISTORY].cast(pa.list_(pa.string())).to_pylist()
        for row, history in enumerate(histories, start):
            if history is not None and None in history:
                raise DataError(f"{self.path}: the history in row {row} has an item that is null")
        return self._texts(table[USER], start), [
            None if items is None else TypedHistory(items, []) for items in histories
        ]

    def _table(self, start: int, stop: int) -> pa.Table:
        if start < self._begin:
            self._stream, self._begin = self._batches(), 0
            self._held = next(self._stream)
        tables = []
        while True:
            end = self._begin + len(self._held)
            first, last = max(start, self._begin), min(stop, end)
            if first < last:
                tables.append(self._held.slice(first - self._begin, last - first))
            if end >= stop:
                return pa.Table.from_batches(tables)
            self._begin, self._held = end, next(self._stream)

    def _batches(self) -> Iterator[pa.RecordBatch]:
        for file in self._files:
            with pq.ParquetFile(file) as opened:
                for batch in opened.iter_batches(
                    ROWS_A_BATCH, columns=self._columns, use_threads=False
                ):
                    yield batch.select(self._columns)

    def _texts(self, column: pa.ChunkedArray, start: int) -> list[str]:
        ids: list[Any] = column.cast(pa.string()).to_pylist()
        if None in ids:
            raise DataError(f"{self.path}: the user_id in row {start + ids.index(None)} is null")
        return ids

    def _check(self, file: Path, schema: pa.Schema) -> None:
        for name in self._columns:
            if name not in schema.names:
                raise DataError(
                    f"{file}: there is no column {name!r}; found {', '.join(schema.names)}"
                )
            kind = schema.field(name).type
            if name == HISTORY:
                if not (pa.types.is_list(kind) or pa.types.is_large_list(kind)):
                    raise DataError(f"{file}: {name!r} is {kind}, not a list of item ids")
                kind = kind.value_type
            texts = (pa.string(), pa.large_string(), pa.null())
            if not (kind in texts or pa.types.is_integer(kind)):
                raise DataError(f"{file}: {name!r} is of {kind}, not of text or integers")


@dataclass(frozen=True)
class DatasetUsers:
    """Users of a canonical data set with their histories as the service's store gives them.

    They are in its order, or those that were `chosen`. Events of the types `not_history` are left
    out. Items that a user disliked in the data set are not recommended.
    """

    path: Path
    chosen: UsersFile | None = None
    not_history: Sequence[str] = NOT_HISTORY

    def __len__(self) -> int:
        return len(self._listed)

    @property
    def digest(self) -> str:
        """Digest of the content."""
        own = read_manifest(self.path, "dataset").digest
        return own if self.chosen is None else f"{own},{self.chosen.digest}"

    @cached_property
    def _listed(self) -> UsersFile:
        if self.chosen is not None:
            return self.chosen
        return UsersFile(self.path / "users.parquet")

    @cached_property
    def _all(self) -> pa.Array:
        table = pq.read_table(self.path / "users.parquet", columns=[USER])
        return table[USER].combine_chunks()

    @cached_property
    def _items(self) -> pa.Array:
        table = pq.read_table(self.path / "items.parquet", columns=["item_id"])
        return table["item_id"].combine_chunks()

    @cached_property
    def _events(self) -> Any:
        return ds.dataset([str(file) for file in event_files(self.path)], format="parquet")

    @cached_property
    def _types(self) -> list[str]:
        """Names of the types of events; empty without types."""
        return [behaviour.name for behaviour in Dataset.behaviours_of(self.path)]

    @cached_property
    def _disliked(self) -> Disliked | None:
        return Disliked.read(self.path)

    def read(self, start: int, stop: int) -> tuple[list[str], list[History]]:
        """User ids and histories of a range of rows."""
        ids = self._listed.ids(start, stop)
        if self.chosen is None:
            users = np.arange(start, stop)
            condition = (ds.field("user") >= start) & (ds.field("user") < stop)
        else:
            numbers = pc.index_in(pa.array(ids, self._all.type), self._all)
            users = numbers.fill_null(-1).to_numpy(zero_copy_only=False)
            condition = ds.field("user").isin(pa.array(np.unique(users[users >= 0]), pa.int32()))
        left_out = [n for n, name in enumerate(self._types) if name in self.not_history]
        if left_out:
            condition &= ~ds.field("behaviour").isin(pa.array(left_out, pa.uint8()))
        columns = ["user", "item", *(["behaviour"] if self._types else [])]
        events = self._events.to_table(columns=columns, filter=condition, use_threads=False)
        types = [None] * events.num_rows
        if self._types:
            types = [self._types[number] for number in events["behaviour"].to_pylist()]
        owner = events["user"].to_numpy()
        order = np.argsort(owner, kind="stable")
        items = self._items.take(events["item"].combine_chunks()).to_pylist()
        first = np.searchsorted(owner, users, side="left", sorter=order)
        last = np.searchsorted(owner, users, side="right", sorter=order)
        positions = (order[a:b] for a, b in zip(first.tolist(), last.tolist(), strict=True))
        disliked = [[] for _ in ids] if self._disliked is None else self._disliked.of(ids)
        return ids, [
            TypedHistory([items[i] for i in own], [types[i] for i in own], tuple(hidden))
            if len(own) or hidden
            else None
            for own, hidden in zip(positions, disliked, strict=True)
        ]


Users = UsersFile | DatasetUsers


def open_users(
    users: Path | None, histories: Path | None, not_history: Sequence[str] = NOT_HISTORY
) -> Users:
    """Open the users to score: a parquet file or folder, or every user of a data set.

    The data set `histories` gives the histories if `users` has no column `history`, without events
    of the types `not_history`.

    Raises:
        ArtifactError: `histories` is not a data set.
        DataError: there are no histories, or the file is malformed.
    """
    if users is None:
        if histories is None:
            raise DataError(
                "no users to score: give a file with --users, or a data set with --histories"
            )
        return DatasetUsers(histories, not_history=not_history)
    listed = UsersFile(users)
    if listed.has_histories:
        return listed
    if histories is None:
        raise DataError(
            f"{users}: there is no column 'history'; add it, or give the data set with the users' "
            "histories with --histories"
        )
    return DatasetUsers(histories, listed, not_history)
