"""Dataset: canonical data on disk and in memory, and the examples of each split.

A data set is an artifact with `interactions.parquet` (user, item, timestamp, rating, split, and
`behaviour` if events have types, which the metadata of the file's schema describe, and
`nanosecond` if times are finer than seconds),
`items.parquet` (item_id, title, text, then attribute columns), `users.parquet` (user_id) and
optionally `codes.npy` (imported semantic IDs), `disliked.parquet` (see `Disliked`) and
`pieces.parquet` (see `Dataset.pieces`). Large data have a folder `interactions/` with
`part-00000.parquet` and so on instead of the first file. Each part holds all rows of some users,
and the parts in order have the rows of the single file. Raw formats are read by `recsys.data`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from recsys.artifacts import Manifest, read_manifest, read_whole
from recsys.errors import DataError
from recsys.interactions import Behaviour, Histories, Interactions, count_as_seen
from recsys.splits import LABELS, TRAIN, SplitName, starts_session

ITEM_COLUMNS = ("item_id", "title", "text")
AVAILABILITY = ("available", "available_from", "available_until")
DISLIKED, PIECES = "disliked.parquet", "pieces.parquet"
INTERACTIONS = "interactions"  # stem of the file, or the folder of parts
PAIR = ("user_id", "item_id")
DISLIKED_COLUMNS = pa.schema(
    [(name, pa.string()) for name in PAIR] + [("timestamp", pa.int64()), ("stands", pa.bool_())]
)
PIECES_COLUMNS = pa.schema([(name, pa.string()) for name in PAIR] + [("pieces", pa.float32())])
EVENT_COLUMNS = {
    "user": np.int32,
    "item": np.int32,
    "timestamp": np.int64,
    "rating": np.float32,
    "split": np.uint8,
    "behaviour": np.uint8,
    "nanosecond": np.int32,
}
Targets = Literal["next", "all"]


class Events(NamedTuple):
    """The columns of `interactions.parquet`, with all rows of all or some users.

    Attributes:
        user: (n,) int32 dense users, ascending.
        item: (n,) int32 dense items.
        timestamp: (n,) int64, ascending within a user.
        rating: (n,) float32.
        split: (n,) uint8, `recsys.splits` labels.
        behaviour: (n,) uint8, a place in `Dataset.behaviours`; None without types.
        nanosecond: (n,) int32, after the second; None if all times are whole seconds.
    """

    user: NDArray[np.int32]
    item: NDArray[np.int32]
    timestamp: NDArray[np.int64]
    rating: NDArray[np.float32]
    split: NDArray[np.uint8]
    behaviour: NDArray[np.uint8] | None = None
    nanosecond: NDArray[np.int32] | None = None


@dataclass(frozen=True)
class Examples:
    """The examples of one split: histories, and the targets to be predicted from them.

    Attributes:
        users: (n,) int32 dense users, one row each.
        histories: n sequences, all events of the user before the first target.
        targets: n non-empty sequences: the split's next target item, or all of them.
    """

    users: NDArray[np.int32]
    histories: Histories
    targets: Histories

    def __len__(self) -> int:
        return len(self.users)

    def take(self, indices: NDArray[np.int64]) -> Examples:
        """A subset of the rows."""
        return Examples(
            self.users[indices], self.histories.take(indices), self.targets.take(indices)
        )

    def servable(self, available: NDArray[np.bool_] | None) -> Examples:
        """The rows whose first target can be served, without other targets that cannot.

        Args:
            available: (items,) which items a list may have; None for all. If it allows no first
                target, no row is left out: every list then misses its target.
        """
        if available is None:
            return self
        rows = np.flatnonzero(available[self.targets.items[self.targets.offsets[:-1]]])
        if not len(rows):
            return self
        examples = self.take(rows)
        return replace(examples, targets=examples.targets.where(available[examples.targets.items]))

    def sample(self, count: int) -> Examples:
        """At most `count` rows: the same random ones each time, shortest history first.

        Neighbours have histories of similar length, so that a batch of them needs little padding.
        """
        chosen = np.random.default_rng(0).permutation(len(self))[:count]
        return self.take(chosen[np.argsort(self.histories.lengths[chosen], kind="stable")])


@dataclass(frozen=True)
class Disliked:
    """Negative events of the source: items that users disliked, returned or rated low.

    They are no interactions. Their users may have no interactions at all.

    Attributes:
        table: `user_id`, `item_id` (outside ids), `timestamp` (as the interactions'; null without
            times) and `stands` (whether the user's last event on the item was negative, too).
    """

    table: pa.Table

    @classmethod
    def read(cls, path: Path) -> Disliked | None:
        """The disliked items of the data set at `path`; None if the data set has none."""
        file = path / DISLIKED
        return cls(pq.read_table(file)) if file.is_file() else None

    @property
    def standing(self) -> pa.Table:
        """The rows that stand: no list for the user may have the item."""
        return self.table.filter(self.table["stands"])

    @cached_property
    def _by_user(self) -> tuple[pa.Array, list[str], Histories]:
        """User ids, item ids, and the places of the standing items of each user."""
        rows = self.standing
        user, item = (rows[name].combine_chunks().dictionary_encode() for name in PAIR)
        order = np.argsort(user.indices.to_numpy(), kind="stable")
        counts = np.bincount(user.indices.to_numpy(), minlength=len(user.dictionary))
        offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
        items = item.indices.to_numpy()[order].astype(np.int32)
        return user.dictionary, item.dictionary.to_pylist(), Histories(offsets, items)

    def of(self, user_ids: Sequence[str]) -> list[list[str]]:
        """The standing items of each user."""
        users, items, positions = self._by_user
        numbers = pc.index_in(pa.array(user_ids, pa.string()), users).fill_null(-1).to_pylist()
        return [
            [items[i] for i in dict.fromkeys(positions[at].tolist())] if at >= 0 else []
            for at in numbers
        ]

    def before(
        self, times: NDArray[np.int64], user_ids: Sequence[str], item_ids: NDArray[np.str_]
    ) -> Histories:
        """The dense items that each of n users disliked before a time.

        Args:
            times: (n,) as the interactions' timestamps.
            user_ids: n outside ids.
            item_ids: outside ids in dense order.
        """
        names = (pa.array(user_ids, pa.string()), pa.array(item_ids.tolist(), pa.string()))
        user, item = (
            pc.index_in(self.table[name], ids).fill_null(-1).to_numpy()
            for name, ids in zip(PAIR, names, strict=True)
        )
        when = self.table["timestamp"]
        known = (user >= 0) & (item >= 0) & when.is_valid().to_numpy()
        rows = np.flatnonzero(known)
        rows = rows[when.fill_null(0).to_numpy()[rows] < times[user[rows]]]
        rows = rows[np.argsort(user[rows], kind="stable")]
        counts = np.bincount(user[rows], minlength=len(times))
        offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
        return Histories(offsets, item[rows].astype(np.int32))


@dataclass(frozen=True)
class Dataset:
    """Canonical data in memory.

    Attributes:
        interactions: every event.
        split: (n,) uint8, `recsys.splits` labels, ascending within a user.
        items: table with `item_id`, `title`, `text` and attribute columns (string, list of string,
            number or bool); row i describes dense item i.
        codes: (items, L) int32 imported semantic IDs, or None.
        behaviours: the types of events; `interactions.behaviour` numbers them. Empty without types.
        disliked: negative events of the source, which are no interactions; None for none.
        sessions: whether each user is one session of an anonymous visitor, who is asked for items
            after the first event only.
        pieces: `PIECES_COLUMNS`: how many pieces of an item a user has bought and not returned,
            where that is not the number of events; None for none.
        baskets: whether many events of a user have one time, as the lines of an order or the events
            of a day, so that which of them comes next is an accident of the file.
    """

    interactions: Interactions
    split: NDArray[np.uint8]
    items: pa.Table
    codes: NDArray[np.int32] | None = None
    behaviours: tuple[Behaviour, ...] = ()
    disliked: Disliked | None = None
    sessions: bool = False
    pieces: pa.Table | None = None
    baskets: bool = False

    def __post_init__(self) -> None:
        if len(self.split) != len(self.interactions):
            raise DataError(
                f"split has {len(self.split)} labels for {len(self.interactions)} events"
            )
        if len(self.split) and self.split.max() > max(LABELS.values()):
            raise DataError(f"split labels must be among {LABELS}, found {self.split.max()}")
        same_user = np.diff(self.interactions.user) == 0
        if (same_user & (np.diff(self.split.astype(np.int8)) < 0)).any():
            raise DataError("a user's test or validation events must come after the training ones")
        missing = [c for c in ITEM_COLUMNS if c not in self.items.column_names]
        if missing:
            raise DataError(f"items lack the columns {missing}")
        if self.items["item_id"].to_pylist() != list(self.interactions.item_ids):
            raise DataError("items.item_id must list interactions.item_ids in the same order")
        if self.codes is not None and len(self.codes) != len(self.interactions.item_ids):
            raise DataError(f"codes: {len(self.codes)} rows for {len(self.item_ids)} items")
        types = self.interactions.behaviour
        if (types is None) != (not self.behaviours):
            raise DataError("events have types if and only if the data set names them")
        if types is not None and types.max(initial=0) >= len(self.behaviours):
            raise DataError(
                f"type {types.max()} is not among the {len(self.behaviours)} behaviours"
            )

    @property
    def item_ids(self) -> NDArray[np.str_]:
        """(items,) outside ids."""
        return self.interactions.item_ids

    @property
    def events(self) -> Events:
        """The columns of the interactions, with their split."""
        rows = self.interactions
        columns = rows.user, rows.item, rows.timestamp, rows.rating, self.split, rows.behaviour
        return Events(*columns, rows.nanosecond)

    @property
    def is_target(self) -> NDArray[np.bool_]:
        """(n,) whether an event may be predicted: all events, or those of a target type."""
        types = self.interactions.behaviour
        if types is None:
            return np.ones(len(self.interactions), bool)
        return np.array([b.role == "target" for b in self.behaviours])[types]

    @property
    def is_asked(self) -> NDArray[np.bool_]:
        """(n,) whether an event may be an example's target: not the first one of a session."""
        return self.is_target & ~starts_session(self.interactions.user, self.sessions)

    @property
    def attributes(self) -> list[str]:
        """Names of the attribute columns."""
        return [c for c in self.items.column_names if c not in (*ITEM_COLUMNS, *AVAILABILITY)]

    @property
    def train_histories(self) -> Histories:
        """Training events of every user (some may have none)."""
        return self.interactions.histories.where(self.split == TRAIN)

    @property
    def train_times(self) -> NDArray[np.int64] | None:
        """Unix seconds of the training events; None if times of users cannot be compared."""
        events = self.interactions
        return events.timestamp[self.split == TRAIN] if events.has_time else None

    def examples(self, split: SplitName, targets: Targets = "next") -> Examples:
        """One example for each user with at least one target event in the split.

        The history holds everything before the first of these targets: for `test` also the
        validation events, and with types also context events of the split itself. It may be empty
        under a global-temporal split. Items that the user disliked by then are hidden in it.
        """
        everything = self.interactions.histories
        if everything.behaviours is not None:
            seen = count_as_seen(everything.behaviours, self.behaviours)
            everything = replace(everything, seen=seen)
        chosen = (self.split == LABELS[split]) & self.is_asked
        asked = everything.where(chosen)
        users = np.flatnonzero(asked.lengths > 0)
        first = np.zeros(len(everything), np.int64)  # row of the user's first target
        first[users] = np.flatnonzero(chosen)[asked.offsets[users]]
        before = np.arange(len(everything.items)) < first[everything.rows]
        histories = everything.where(before).take(users)
        asked = asked.take(users)
        if targets == "next":
            asked = asked.where(np.isin(np.arange(len(asked.items)), asked.offsets[:-1]))
        histories = replace(histories, hidden=self._disliked_before(first[users], users, histories))
        return Examples(users.astype(np.int32), histories, asked)

    def validation(self) -> Examples:
        """The validation examples with one target each, to fit and to choose on.

        The target is the user's next event. With baskets it is one of all events of the split, the
        same random one each time: its mean over users is that of all their events.
        """
        if not self.baskets:
            return self.examples("valid")
        examples = self.examples("valid", "all")
        lengths = examples.targets.lengths
        drawn = (np.random.default_rng(0).random(len(examples)) * lengths).astype(np.int64)
        chosen = np.zeros(len(examples.targets.items), np.bool_)
        chosen[examples.targets.offsets[:-1] + drawn] = True
        return replace(examples, targets=examples.targets.where(chosen))

    def _disliked_before(
        self, rows: NDArray[np.int64], users: NDArray[np.int64], histories: Histories
    ) -> Histories | None:
        """The items that users disliked before their event at `rows`, and not chosen since.

        None if the times are not known.
        """
        events = self.interactions
        if self.disliked is None or not events.has_time:
            return None
        ids = events.user_ids[users].tolist()
        disliked = self.disliked.before(events.timestamp[rows], ids, self.item_ids)
        size = len(self.item_ids)
        chosen = np.isin(
            disliked.rows * size + disliked.items, histories.rows * size + histories.items
        )
        return disliked.where(~chosen)

    def save(self, folder: Path) -> None:
        """Write the parquet files into `folder` (an artifact being written)."""
        has_time = self.interactions.has_time
        write_events(
            folder,
            self.events,
            has_time=has_time,
            behaviours=self.behaviours,
            sessions=self.sessions,
            baskets=self.baskets,
        )
        write_catalog(folder, pa.array(self.interactions.user_ids), self.items, self.codes)
        if self.disliked is not None:
            pq.write_table(self.disliked.table, folder / DISLIKED)
        if self.pieces is not None:
            pq.write_table(self.pieces, folder / PIECES)

    @classmethod
    def load(cls, path: Path | str) -> Dataset:
        """Read a canonical data set.

        Raises:
            ArtifactError: `path` holds no data set.
            DataError: its files contradict each other.
        """
        path = Path(path)
        read_manifest(path, "dataset")
        try:
            return read_whole(path, lambda: cls.read(path))
        except DataError:
            raise
        except (KeyError, OSError, ValueError) as error:  # Arrow's errors are ValueErrors
            raise DataError(f"{path}: {error}; prepare the data set again") from error

    @classmethod
    def read(cls, path: Path) -> Dataset:
        """Read the files of a data set, which may be no artifact yet."""
        events, metadata = _read_events(path)
        items = pq.read_table(path / "items.parquet")
        codes = path / "codes.npy"
        interactions = Interactions(
            events.user,
            events.item,
            events.timestamp,
            events.rating,
            np.asarray(pq.read_table(path / "users.parquet")["user_id"].to_pylist(), np.str_),
            np.asarray(items["item_id"].to_pylist(), np.str_),
            metadata.get(b"has_time") == b"1",
            events.behaviour,
            events.nanosecond,
        )
        return cls(
            interactions,
            events.split,
            items,
            np.load(codes, allow_pickle=False) if codes.exists() else None,
            _behaviours(metadata),
            Disliked.read(path),
            metadata.get(b"sessions") == b"1",
            pq.read_table(path / PIECES) if (path / PIECES).is_file() else None,
            metadata.get(b"baskets") == b"1",
        )

    @staticmethod
    def behaviours_of(path: Path | str) -> tuple[Behaviour, ...]:
        """The types of events of the data set at `path`; empty without types."""
        file = event_files(Path(path))[0]
        return _behaviours(pq.read_schema(file).metadata or {})

    @staticmethod
    def manifest(path: Path | str) -> Manifest:
        """The manifest of the data set at `path`."""
        return read_manifest(Path(path), "dataset")


def write_events(
    folder: Path,
    events: Events,
    *,
    has_time: bool,
    behaviours: Sequence[Behaviour] = (),
    sessions: bool = False,
    baskets: bool = False,
    part: int | None = None,
) -> None:
    """Write the interactions of a data set, or a part of them, into `folder`."""
    file = folder / f"{INTERACTIONS}.parquet"
    if part is not None:
        file = folder / INTERACTIONS / f"part-{part:05d}.parquet"
        file.parent.mkdir(exist_ok=True)
    columns = {name: column for name, column in events._asdict().items() if column is not None}
    metadata = {"has_time": str(int(has_time))}
    if sessions:
        metadata["sessions"] = "1"
    if baskets:
        metadata["baskets"] = "1"
    if behaviours:
        metadata["behaviours"] = json.dumps([b._asdict() for b in behaviours])
    pq.write_table(pa.table(columns).replace_schema_metadata(metadata), file)


def write_catalog(
    folder: Path, user_ids: pa.Array, items: pa.Table, codes: NDArray[np.int32] | None
) -> None:
    """Write the users and the items of a data set into `folder`."""
    pq.write_table(pa.table({"user_id": user_ids}), folder / "users.parquet")
    pq.write_table(items, folder / "items.parquet")
    if codes is not None:
        np.save(folder / "codes.npy", codes.astype(np.int32), allow_pickle=False)


def event_files(path: Path) -> list[Path]:
    """The files of events: the single file, or the parts in order."""
    parts = sorted((path / INTERACTIONS).glob("part-*.parquet"))
    return parts or [path / f"{INTERACTIONS}.parquet"]


def _behaviours(metadata: Mapping[bytes, bytes]) -> tuple[Behaviour, ...]:
    """The types of events that the metadata of a file describe."""
    return tuple(Behaviour(**b) for b in json.loads(metadata.get(b"behaviours", b"[]")))


def _read_events(path: Path) -> tuple[Events, Mapping[bytes, bytes]]:
    """All events, and the metadata of `write_events`; parts are read into preallocated arrays."""
    files = event_files(path)
    rows = [pq.read_metadata(file).num_rows for file in files]
    schema = pq.read_schema(files[0])
    metadata: Mapping[bytes, bytes] = schema.metadata or {}
    absent = set(Events._field_defaults) - set(schema.names)
    kinds = {name: kind for name, kind in EVENT_COLUMNS.items() if name not in absent}
    if len(files) == 1:
        table = pq.read_table(files[0])
        return Events(**{n: np.asarray(table[n].to_numpy(), k) for n, k in kinds.items()}), metadata
    events = {name: np.empty(sum(rows), kind) for name, kind in kinds.items()}
    start = 0
    for file, count in zip(files, rows, strict=True):
        table = pq.read_table(file)
        for name, column in events.items():
            column[start : start + count] = table[name].to_numpy()
        start += count
    return Events(**events), metadata
