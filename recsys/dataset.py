"""Dataset: canonical data as it lies on disk, and the examples that each split stands for.

On disk: `interactions.parquet` (user, item, timestamp, rating, split), `items.parquet` (item_id,
title, text, then attribute columns), `users.parquet` (user_id), optional `codes.npy` (an imported
index), all under a manifest. Reading and writing only; raw formats live in the `data` package.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from recsys.artifacts import Manifest, read_manifest
from recsys.errors import DataError
from recsys.interactions import Histories, Interactions
from recsys.splits import LABELS, TRAIN

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from recsys.splits import SplitName

ITEM_COLUMNS = ("item_id", "title", "text")
Targets = Literal["next", "all"]


@dataclass(frozen=True)
class Examples:
    """What one split asks: given these histories, name these targets.

    Attributes:
        users: (n,) int32 dense users, one row each.
        histories: n sequences, everything the user did before the split's first event.
        targets: n non-empty sequences; one item each for `next`, all of the split's for `all`.
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


@dataclass(frozen=True)
class Dataset:
    """Canonical data in memory.

    Attributes:
        interactions: every event.
        split: (n,) uint8, `recsys.splits` labels; within a user they never fall.
        items: table with `item_id`, `title`, `text` and attribute columns (string, list of string,
            number or bool), one row a dense item, in dense order.
        codes: (items, L) int32 imported semantic IDs, or None.
    """

    interactions: Interactions
    split: NDArray[np.uint8]
    items: pa.Table
    codes: NDArray[np.int32] | None = None

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

    @property
    def item_ids(self) -> NDArray[np.str_]:
        """(items,) outside ids."""
        return self.interactions.item_ids

    @property
    def attributes(self) -> list[str]:
        """Names of the attribute columns."""
        return [c for c in self.items.column_names if c not in ITEM_COLUMNS]

    @property
    def train_histories(self) -> Histories:
        """Training events of every user (some may have none)."""
        return self.interactions.histories.where(self.split == TRAIN)

    def examples(self, split: SplitName, targets: Targets = "next") -> Examples:
        """The examples of a split, one a user with at least one event in it.

        The history is everything before: training events for `valid`, training and validation
        events for `test`. It may be empty under a global-temporal split.
        """
        label = LABELS[split]
        everything = self.interactions.histories
        asked = everything.where(self.split == label)
        users = np.flatnonzero(asked.lengths > 0)
        histories = everything.where(self.split < label).take(users)
        asked = asked.take(users)
        if targets == "next":
            asked = Histories(np.arange(len(users) + 1), asked.items[asked.offsets[:-1]])
        return Examples(users.astype(np.int32), histories, asked)

    def save(self, folder: Path) -> None:
        """Write the parquet files into `folder` (an artifact being written)."""
        events = self.interactions
        pq.write_table(
            pa.table(
                {
                    "user": events.user,
                    "item": events.item,
                    "timestamp": events.timestamp,
                    "rating": events.rating,
                    "split": self.split,
                }
            ).replace_schema_metadata({"has_time": str(int(events.has_time))}),
            folder / "interactions.parquet",
        )
        pq.write_table(pa.table({"user_id": pa.array(events.user_ids)}), folder / "users.parquet")
        pq.write_table(self.items, folder / "items.parquet")
        if self.codes is not None:
            np.save(folder / "codes.npy", self.codes.astype(np.int32), allow_pickle=False)

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
            return cls._read(path)
        except DataError:
            raise
        except (KeyError, OSError, ValueError) as error:  # Arrow's errors are ValueErrors
            raise DataError(f"{path}: {error}; prepare the data set again") from error

    @classmethod
    def _read(cls, path: Path) -> Dataset:
        events = pq.read_table(path / "interactions.parquet")
        items = pq.read_table(path / "items.parquet")
        columns = {name: events[name].to_numpy() for name in events.column_names}
        codes = path / "codes.npy"
        interactions = Interactions(
            columns["user"].astype(np.int32),
            columns["item"].astype(np.int32),
            columns["timestamp"].astype(np.int64),
            columns["rating"].astype(np.float32),
            np.asarray(pq.read_table(path / "users.parquet")["user_id"].to_pylist(), np.str_),
            np.asarray(items["item_id"].to_pylist(), np.str_),
            (events.schema.metadata or {}).get(b"has_time") == b"1",
        )
        return cls(
            interactions,
            columns["split"].astype(np.uint8),
            items,
            np.load(codes, allow_pickle=False) if codes.exists() else None,
        )

    @staticmethod
    def manifest(path: Path | str) -> Manifest:
        """The manifest of the data set at `path`."""
        return read_manifest(Path(path), "dataset")
