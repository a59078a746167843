"""Users to score, read by DuckDB in ranges of rows from parquet files or from a canonical data set.

Only the users and histories of a range are in memory at a time, whatever the number of users; of
a data set, what users disliked is in memory as a whole.
"""

from collections.abc import Sequence
from functools import cached_property
from glob import escape
from pathlib import Path

import duckdb

from recsys.artifacts import read_manifest, sha256
from recsys.dataset import Dataset, Disliked, event_files
from recsys.errors import DataError
from recsys.serving.stores.records import NOT_HISTORY, TypedHistory

USER, HISTORY = "user_id", "history"
KINDS = ("VARCHAR", "INT", "INTEGER")  # the ends of the names of types of text and integers
SKIPPED = 1024  # rows that are passed over at once
History = TypedHistory | None  # None: the user has no history
# The numbers of users in the data set, null for those who are not in it, in the order of `ids`.
NUMBERS = """
    SELECT "user" FROM (SELECT unnest($ids) AS user_id, unnest(range(len($ids))) AS position)
    LEFT JOIN users USING (user_id)
    ORDER BY position
"""
# Of the users with these numbers, by their places in the list, the items and types of their events
# in the order of the data set. All events of a user are in one file.
EVENTS = """
    SELECT position, list(item_id ORDER BY row), list(type ORDER BY row)
    FROM (SELECT unnest($users) AS "user", unnest(range(len($users))) AS position)
    JOIN (SELECT "user", item, {type} AS type, file_row_number AS row
          FROM read_parquet($events, file_row_number = true)) USING ("user")
    JOIN items USING (item)
    WHERE type IS NULL OR NOT list_contains($left_out, type)
    GROUP BY position
"""


class Users:
    """The users of parquet files, or of a canonical data set, in their order.

    Files have the columns `user_id` (string or integer) and, unless a data set has the histories,
    `history` (list of item ids, oldest first). The histories of a data set are those that the
    service's store gives: events of the types `not_history` are left out, and items that a user
    disliked in the data set are not recommended.

    Attributes:
        digest: of the content.
    """

    def __init__(
        self, users: Path | None, histories: Path | None, not_history: Sequence[str] = NOT_HISTORY
    ) -> None:
        """Open the users: a parquet file, a folder of them, or every user of a data set.

        The data set `histories` gives the histories if `users` has no column `history`.

        Raises:
            ArtifactError: `histories` is not a data set.
            DataError: there are no histories, or a file is malformed.
        """
        if users is None and histories is None:
            raise DataError(
                "no users to score: give a file with --users, or a data set with --histories"
            )
        self._database = duckdb.connect(config={"threads": 1})
        self._path, self._histories, self._not_history = users or histories, histories, not_history
        self._are_chosen = users is not None
        files = []
        if users is not None:
            files = sorted(users.glob("*.parquet")) if users.is_dir() else [users]
            if self._has_histories(files):
                self._histories = None
            elif histories is None:
                raise DataError(
                    f"{users}: there is no column 'history'; add it, or give the data set with the "
                    "users' histories with --histories"
                )
        digests = [sha256(file)[:16] for file in files]
        if self._histories is not None:
            digests.insert(0, read_manifest(self._histories, "dataset").digest)
            files = files or [self._histories / "users.parquet"]
            for kind in ("user", "item"):  # ids and their numbers
                file = escape(str(self._histories / f"{kind}s.parquet"))
                rows = self._database.read_parquet(file, file_row_number=True)
                rows.project(f'{kind}_id, file_row_number AS "{kind}"').create_view(f"{kind}s")
        self.digest = ",".join(digests)
        self._files = [escape(str(file)) for file in files]
        self._count = self._listed().count("*").fetchall()[0][0]
        self._rows, self._next = self._listed(), 0  # those that follow, and the place of the first

    def __len__(self) -> int:
        return int(self._count)

    def read(self, start: int, stop: int) -> tuple[list[str], list[History]]:
        """User ids and histories of a range of rows; fastest in ascending order.

        Raises:
            DataError: a user id or an item of a history is null.
        """
        if start < self._next:
            self._rows, self._next = self._listed(), 0
        while self._next < start:
            self._next += len(self._rows.fetchmany(min(SKIPPED, start - self._next)))
        rows = self._rows.fetchmany(stop - start)
        self._next += len(rows)
        for number, (user, items) in enumerate(rows, start):
            if user is None:
                raise DataError(f"{self._path}: the user_id in row {number} is null")
            if items is not None and None in items:
                raise DataError(
                    f"{self._path}: the history in row {number} has an item that is null"
                )
        ids = [user for user, _ in rows]
        if self._histories is not None:
            numbers = [*range(start, start + len(ids))]  # without a file: all users of the data set
            if self._are_chosen:
                rows_of_ids = self._database.execute(NUMBERS, {"ids": ids}).fetchall()
                numbers = [number for (number,) in rows_of_ids]
            return ids, self._of_dataset(self._histories, ids, numbers)
        return ids, [None if items is None else TypedHistory(items, []) for _, items in rows]

    def _listed(self) -> duckdb.DuckDBPyRelation:
        """All rows: user id and history, with a connection of its own, which no query ends."""
        history = "history::VARCHAR[]" if self._histories is None else "NULL"
        # by name: ids are texts in all files if they are in one, so that 007 does not become 7
        rows = self._database.cursor().read_parquet(self._files, union_by_name=True)
        return rows.project(f"user_id::VARCHAR, {history}")

    @cached_property
    def _disliked(self) -> Disliked | None:
        return None if self._histories is None else Disliked.read(self._histories)

    def _of_dataset(self, path: Path, ids: list[str], numbers: list[int]) -> list[History]:
        """The histories of users, who have these numbers in a data set."""
        names = [behaviour.name for behaviour in Dataset.behaviours_of(path)]
        rows = self._database.execute(
            EVENTS.format(type="behaviour" if names else "NULL"),
            {
                "events": [escape(str(file)) for file in event_files(path)],
                "users": numbers,
                "left_out": [n for n, name in enumerate(names) if name in self._not_history],
            },
        ).fetchall()
        events = {position: (items, types) for position, items, types in rows}
        disliked = [[] for _ in ids] if self._disliked is None else self._disliked.of(ids)
        histories: list[History] = []
        for position, hidden in enumerate(disliked):
            items, types = events.get(position, ([], []))
            typed = [None if number is None else names[number] for number in types]
            is_known = bool(items or hidden)
            histories.append(TypedHistory(items, typed, tuple(hidden)) if is_known else None)
        return histories

    def _has_histories(self, files: Sequence[Path]) -> bool:
        """Check the columns of files; whether they have histories."""
        if not files:
            raise DataError(f"{self._path}: no file in it ends with .parquet")
        columns: dict[Path, dict[str, str]] = {}
        for file in files:
            try:
                rows = self._database.read_parquet(escape(str(file)))
            except (duckdb.Error, OSError) as error:
                raise DataError(f"{file}: not a parquet file of users: {error}") from error
            columns[file] = dict(zip(rows.columns, map(str, rows.types), strict=True))
        has_histories = all(HISTORY in types for types in columns.values())
        for file, types in columns.items():
            if USER not in types:
                raise DataError(f"{file}: there is no column {USER!r}; found {', '.join(types)}")
            history = types[HISTORY] if has_histories else "VARCHAR[]"
            if not history.endswith("[]"):
                raise DataError(f"{file}: {HISTORY!r} is {history}, not a list of item ids")
            for name, kind in ((USER, types[USER]), (HISTORY, history.removesuffix("[]"))):
                if not kind.endswith(KINDS):
                    raise DataError(f"{file}: {name!r} is of {kind}, not of text or integers")
        return has_histories
