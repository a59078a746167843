"""FilterCache: row masks and boosts of the filters used last, for one trie and its attributes."""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from recsys.constraint.attributes import Attributes
from recsys.constraint.boost import Boost
from recsys.constraint.filters import ItemBoosts, ItemFilter
from recsys.constraint.mask import RowMask
from recsys.constraint.trie import ItemTrie

K = TypeVar("K", RowMask, Boost)


@dataclass(frozen=True)
class FilterStats:
    """Counters of a `FilterCache`; boosts count as masks.

    Attributes:
        hits: masks that were in the cache.
        misses: masks that had to be computed.
        bytes: size of the masks that are in the cache now.
    """

    hits: int = 0
    misses: int = 0
    bytes: int = 0


class FilterCache:
    """Keeps the masks of the filters used last, and boosts; threads may share it."""

    def __init__(
        self,
        trie: ItemTrie,
        attributes: Attributes,
        max_bytes: int = 1 << 28,
        *,
        left: NDArray[np.bool_] | None = None,
        after: FilterCache | None = None,
    ) -> None:
        """Make an empty cache of at most `max_bytes`.

        Args:
            trie: the catalog.
            attributes: attributes of its items.
            max_bytes: limit for all masks together, at least 0.
            left: (items,) bool in the attributes' order, the items that have not been removed; None
                if none has. No mask allows a removed item, and no boost counts for one.
            after: the cache that this one replaces. Its counters are continued.
        """
        if max_bytes < 0:
            raise ValueError(f"max_bytes must be at least 0, got {max_bytes}")
        self.trie, self.attributes = trie, attributes
        self._max_bytes, self._left = max_bytes, left
        self._kept: OrderedDict[tuple[type, bytes], RowMask | Boost] = OrderedDict()
        self._lock = threading.Lock()
        self._stats = FilterStats()
        if after is not None:
            self._stats = replace(after.stats, bytes=0)

    @property
    def stats(self) -> FilterStats:
        """Counters so far."""
        return self._stats

    def mask(self, item_filter: ItemFilter | Mapping[str, Any]) -> RowMask:
        """The items that a filter allows; computed on first use, outside of any lock.

        Raises:
            FilterError: a malformed filter, or one that does not fit the attributes.
        """
        if not isinstance(item_filter, ItemFilter):
            item_filter = ItemFilter.parse(item_filter)
        return self._get(RowMask, item_filter, self._new_mask)

    def boost(self, boosts: ItemBoosts) -> Boost:
        """As `mask`, the boosts of all items."""
        return self._get(Boost, boosts, self._new_boost)

    def _new_mask(self, items: NDArray[np.bool_]) -> RowMask:
        return RowMask.of(self.trie, items if self._left is None else items & self._left)

    def _new_boost(self, items: NDArray[np.float32]) -> Boost:
        if self._left is not None:  # a removed item must not raise the bound of a prefix
            items = np.where(self._left, items, items.min())
        return Boost.of(self.trie, items)

    def _get(
        self, kind: type[K], request: ItemFilter | ItemBoosts, make: Callable[[NDArray[Any]], K]
    ) -> K:
        # A key may be as long as a filter, and is not counted.
        key = kind, hashlib.sha256(request.key.encode("utf-8", "surrogatepass")).digest()
        with self._lock:
            cached = self._kept.get(key)
            if isinstance(cached, kind):
                self._kept.move_to_end(key)
                self._stats = replace(self._stats, hits=self._stats.hits + 1)
                return cached
        made = make(request.evaluate(self.attributes))
        with self._lock:
            # Another thread may have been faster; then all threads share its result.
            cached_now = self._kept.setdefault(key, made)
            self._kept.move_to_end(key)
            size = self._stats.bytes + (made.nbytes if cached_now is made else 0)
            while size > self._max_bytes:
                size -= self._kept.popitem(last=False)[1].nbytes
            self._stats = FilterStats(self._stats.hits, self._stats.misses + 1, size)
            return cached_now if isinstance(cached_now, kind) else made
