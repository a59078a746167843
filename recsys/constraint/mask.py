"""Row masks: which states of a trie a request may reach, given its filter.

A state is alive if its range of rows contains an allowed one, which running counts of the allowed
rows answer. NumPy only, but for `RowMask.to`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from recsys.constraint.trie import ItemTrie

_SPARSE = 200  # from this many rows per allowed row on, allowed rows are looked up one by one


@dataclass(frozen=True, eq=False)
class RowMask:
    """The items that a filter allows, by the rows and states of a trie.

    >>> trie = ItemTrie.build([[5, 7], [9, 1], [5, 3]])
    >>> mask = RowMask.of(trie, np.array([False, True, True])[trie.row_items])
    >>> mask.rows.tolist(), mask.eligible
    ([True, False, True], 2)

    Attributes:
        trie: the trie that the mask belongs to.
        items: (items,) bool, in the order of `ItemTrie.row_items`; `rows` itself if every row has
            one item.
        alive: (S + C,) bool, whether a state has an allowed row below; then C times False, so that
            C children may be read from any state.
        rows: (R,) bool, whether a row has an allowed item; a view of `alive`.
    """

    trie: ItemTrie
    items: NDArray[np.bool_]
    alive: NDArray[np.bool_]
    rows: NDArray[np.bool_]
    _devices: dict[str, torch.Tensor] = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, trie: ItemTrie, items: NDArray[np.bool_]) -> RowMask:
        """Make a mask from (items,) bool in the order of `trie.row_items`.

        Raises:
            ValueError: wrong dtype or shape.
        """
        items = np.asarray(items)
        if items.dtype != np.bool_ or items.shape != trie.row_items.shape:
            raise ValueError(
                f"a mask is {trie.row_items.shape} bool, one per item; got {items.dtype} "
                f"{items.shape}"
            )
        alive = np.empty(trie.padded_states, np.bool_)
        leaves = alive[trie.depth_start[-2] : trie.num_states]
        if trie.num_rows < trie.num_items:
            items.take(trie.row_item_start[:-1], out=leaves)
            owner, positions = trie.places_of(trie.shared_rows)
            leaves[trie.shared_rows[owner[items[positions]]]] = True
        else:
            leaves[:] = items
            items = leaves
        alive[trie.num_states :] = False
        if _SPARSE * np.count_nonzero(leaves) < len(leaves):
            _set_sparse(trie, alive, leaves)
        else:
            _set_levels(trie, alive, leaves)
        return cls(trie, items, alive, leaves)

    def excluded_rows(self, items: ArrayLike) -> NDArray[np.int32]:
        """Rows without an item that is allowed and not among `items`."""
        return self.trie.excluded_rows(items, self.items)

    @cached_property
    def before(self) -> NDArray[np.int32]:
        """(R + 1,) how many rows before each row have an allowed item; the last is the total."""
        return _running(self.rows)

    def to(self, device: str | torch.device) -> torch.Tensor:
        """`alive` on `device`; copied once per device and kept."""
        key = str(device)
        if key not in self._devices:
            self._devices[key] = torch.from_numpy(self.alive).to(device)
        return self._devices[key]

    @cached_property
    def eligible(self) -> int:
        """Number of allowed items."""
        return int(np.count_nonzero(self.items))

    @property
    def nbytes(self) -> int:
        """Most bytes of all arrays; `before` is computed on first use."""
        items = 0 if self.items is self.rows else self.items.nbytes
        return items + 4 * (len(self.rows) + 1) + self.alive.nbytes


def _set_sparse(trie: ItemTrie, alive: NDArray[np.bool_], leaves: NDArray[np.bool_]) -> None:
    """Set the states above the leaves of a mask, by the ancestors of each allowed leaf."""
    alive[: trie.depth_start[-2]] = False
    rows: NDArray[np.integer] = np.flatnonzero(leaves).astype(np.int32)
    for depth in reversed(range(trie.num_levels)):
        starts = trie.starts_at(depth)
        run = np.searchsorted(starts, rows, side="right") - 1
        alive[trie.depth_start[depth] + run] = True
        rows = starts[run[np.append(True, run[1:] != run[:-1])]] if len(run) else rows


def _set_levels(trie: ItemTrie, alive: NDArray[np.bool_], leaves: NDArray[np.bool_]) -> None:
    """Set the states above the leaves of a mask, by running counts of the allowed leaves."""
    before = _running(leaves)
    for depth in range(trie.num_levels):
        first, last = trie.depth_start[depth : depth + 2]
        counts = before.take(trie.starts_at(depth))
        np.not_equal(counts[1:], counts[:-1], out=alive[first : last - 1])
        alive[last - 1] = before[-1] != counts[-1]


def all_flags(trie: ItemTrie) -> NDArray[np.bool_]:
    """(S + C,) `RowMask.alive` of a mask that allows everything."""
    return np.arange(trie.padded_states) < trie.num_states


def _running(flags: NDArray[np.bool_]) -> NDArray[np.int32]:
    """Number of true flags before each index, and in total."""
    total = np.zeros(len(flags) + 1, np.int32)
    np.cumsum(flags, dtype=np.int32, out=total[1:])
    return total
