"""Requests over a bundle's catalog. Reads the catalog only and does not import torch."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from recsys.bundle import CATALOG
from recsys.catalog import CODE_COLUMN, Catalog
from recsys.serving.benchmark.client import Request

RECOMMEND = "/v1/recommendations"
KS = (1, 5, 10, 20, 50)
_FIXED = ("item_id", "title", "text", CODE_COLUMN)


class Workload:
    """Requests with random histories that the server has not seen; the seed decides them."""

    def __init__(self, bundle: Path, seed: int = 0) -> None:
        catalog = Catalog.load(bundle / CATALOG)
        self.item_ids = catalog.item_ids
        self._rng = np.random.default_rng(seed)
        self._filters = _filters(catalog.items, self._rng)

    def plain(self, k: int = 10) -> Iterator[Request]:
        """Requests with a history of 1 to 20 items and no other fields."""
        while True:
            yield Request.post(RECOMMEND, {"history": self._items(1, 20), "k": k})

    def mixed(self) -> Iterator[Request]:
        """Requests with exclusions, filters, unknown items and several k, in any combination."""
        rng = self._rng
        while True:
            history = self._items(0, 30)
            if rng.random() < 0.1:
                history.append("no-such-item")
            body: dict[str, Any] = {
                "history": history,
                "k": int(rng.choice(KS)),
                "exclude_seen": bool(rng.random() < 0.7),
            }
            if rng.random() < 0.3:
                body["exclude_items"] = self._items(1, 50)
            if self._filters and rng.random() < 0.3:
                body["filter"] = self._filters[rng.integers(len(self._filters))]
            yield Request.post(RECOMMEND, body)

    def _items(self, least: int, most: int) -> list[str]:
        size = int(self._rng.integers(least, most + 1))
        return [self.item_ids[i] for i in self._rng.integers(0, len(self.item_ids), size)]


def _filters(items: pa.Table, rng: np.random.Generator, values: int = 8) -> list[dict[str, Any]]:
    """A few filters on each attribute, with values that occur."""
    found: list[dict[str, Any]] = []
    for name in items.column_names:
        column = items[name].drop_null()
        if name in _FIXED or not len(column):
            continue
        kind = column.type
        if pa.types.is_list(kind) or pa.types.is_large_list(kind):
            column = pa.chunked_array([chunk.flatten() for chunk in column.chunks]).drop_null()
            kind = column.type
        if not len(column):
            continue
        some = column.take(rng.integers(0, len(column), values)).to_pylist()
        if pa.types.is_integer(kind) or pa.types.is_floating(kind):
            some = [value for value in some if value == value]  # not NaN
            found += [{"must": [{"key": name, "range": {"lte": value}}]} for value in some]
        elif pa.types.is_string(kind) or pa.types.is_large_string(kind):
            found += [{"must": [{"key": name, "match": value}]} for value in some]
    return found
