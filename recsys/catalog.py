"""Catalog: maps item ids, dense items and semantic IDs to each other; titles and attributes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import repeat
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from recsys.errors import DataError

FILE = "items.parquet"
CODE_COLUMN = "semantic_id"


@dataclass(frozen=True)
class Catalog:
    """The items that can be recommended.

    Attributes:
        items: table with `item_id`, `title`, `text` and attributes; row i describes dense item i.
        codes: (items, L) int32 semantic IDs, 0-based. Items with equal rows share a leaf of the
            trie.

    >>> columns = {"item_id": ["a", "b"], "title": ["Pen", "Ink"], "text": ["", ""]}
    >>> catalog = Catalog(pa.table(columns), np.array([[0, 1], [0, 2]], np.int32))
    >>> catalog.find("b"), catalog.titles[1], catalog.index(["b", "z"]).tolist()
    (1, 'Ink', [1, -1])
    """

    items: pa.Table
    codes: NDArray[np.int32]

    def __post_init__(self) -> None:
        if self.codes.ndim != 2 or len(self.codes) != self.items.num_rows:
            raise DataError(
                f"catalog: codes of shape {self.codes.shape} for {self.items.num_rows} items"
            )
        if len(self.codes) and self.codes.min() < 0:
            row = int((self.codes < 0).any(axis=1).argmax())
            raise DataError(f"catalog: item {self.item_ids[row]!r} has a negative code")

    def __len__(self) -> int:
        return len(self.codes)

    @cached_property
    def item_ids(self) -> list[str]:
        """Outside ids in dense order."""
        return [str(i) for i in self.items["item_id"].to_pylist()]

    @cached_property
    def titles(self) -> list[str]:
        """Titles in dense order."""
        return [str(t) for t in self.items["title"].to_pylist()]

    @cached_property
    def _index(self) -> dict[str, int]:
        return {item_id: i for i, item_id in enumerate(self.item_ids)}

    def find(self, item_id: str) -> int:
        """Dense item of an outside id, or -1 if the catalog has no such item."""
        return self._index.get(item_id, -1)

    def index(self, item_ids: Iterable[str]) -> NDArray[np.int32]:
        """Dense items of outside ids, -1 for those that the catalog does not have."""
        return np.fromiter(map(self._index.get, item_ids, repeat(-1)), np.int32)

    def knows_any(self, item_ids: Iterable[str]) -> bool:
        """Whether the catalog has one of these outside ids."""
        return not self._index.keys().isdisjoint(item_ids)

    def save(self, folder: Path) -> None:
        """Write `items.parquet` into `folder`."""
        codes = pa.array(list(self.codes), pa.list_(pa.int32()))
        pq.write_table(self.items.append_column(CODE_COLUMN, codes), folder / FILE)

    @classmethod
    def load(cls, folder: Path) -> Catalog:
        """Read `items.parquet`.

        Raises:
            DataError: the codes are missing, ragged or not numbers, or two items have one id.
        """
        table = pq.read_table(folder / FILE)
        if CODE_COLUMN not in table.column_names:
            raise DataError(f"{folder / FILE}: no column {CODE_COLUMN!r}")
        try:
            codes = np.asarray(table[CODE_COLUMN].to_pylist(), np.int32)
        except (TypeError, ValueError) as error:
            raise DataError(f"{folder / FILE}: {CODE_COLUMN!r} is not a matrix: {error}") from error
        catalog = cls(table.drop_columns([CODE_COLUMN]), codes.reshape(table.num_rows, -1))
        if len(catalog._index) < len(catalog):
            twice, _ = Counter(catalog.item_ids).most_common(1)[0]
            raise DataError(
                f"{folder / FILE}: two items have the id {twice!r}; give each item an id of its "
                "own, and make the artifact again"
            )
        return catalog
