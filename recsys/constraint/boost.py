"""Boosts: what recommending an item is worth beside its log-probability; a soft constraint.

An item's score is log p + boost. A prefix is ranked by its log-probability and the most that any
row below it gains, so a prefix's score still bounds those of all its descendants: beam search
prunes by an upper bound, and its certificate, and best-first completion, hold as they are. What a
mask or an exclusion hides still counts in that bound, which is then looser, not wrong. NumPy, but
for `to`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from recsys.constraint.trie import ItemTrie

MOST = 100_000.0
"""Largest boost: beyond it a sum of log-probabilities would lose its last digits to rounding."""


@dataclass(frozen=True, eq=False)
class Boost:
    """Scores added to items, and their maxima below each state of a trie.

    >>> trie = ItemTrie.build([[5, 7], [9, 1], [5, 3]])
    >>> boost = Boost.of(trie, np.array([0.5, 0, -1], np.float32)[trie.row_items])
    >>> boost.most.tolist()  # the root, the states behind 5 and 9, and the three rows
    [0.5, 0.5, 0.0, -1.0, 0.5, 0.0]

    Attributes:
        trie: the boost is made for; no other trie takes it.
        items: (items,) float32, by place in `ItemTrie.row_items`.
        most: (S,) float32 the most that any item below a state gains. At a leaf that several items
            share it may be more than the gain of the one that is shown.
    """

    trie: ItemTrie
    items: NDArray[np.float32]
    most: NDArray[np.float32]
    _devices: dict[str, torch.Tensor] = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, trie: ItemTrie, items: NDArray[np.float32]) -> Boost:
        """From (items,) float32, by place in `trie.row_items`.

        Raises:
            ValueError: another type or shape, or a value that is not finite or beyond `MOST`.
        """
        items = np.asarray(items)
        if items.dtype.kind not in "fiu" or items.shape != trie.row_items.shape:
            raise ValueError(
                f"a boost is {trie.row_items.shape} numbers, one an item; got {items.dtype} "
                f"{items.shape}"
            )
        items = items.astype(np.float32, copy=False)
        if not (np.abs(items) <= MOST).all():
            raise ValueError(f"boosts must be finite, and at most {MOST:g} either way")
        below = items
        if trie.num_rows < trie.num_items:
            below = np.maximum.reduceat(items, trie.row_item_start[:-1])
        levels = [below]
        for depth in reversed(range(trie.num_levels)):
            first, last = trie.depth_start[depth : depth + 2]
            below = np.maximum.reduceat(below, trie.first_child[first:last] - last)
            levels.append(below)
        return cls(trie, items, np.concatenate(levels[::-1]))

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return self.items.nbytes + self.most.nbytes

    def to(self, device: str | torch.device) -> torch.Tensor:
        """`most` on `device`; copied once a device and kept."""
        import torch

        key = str(device)
        if key not in self._devices:
            self._devices[key] = torch.from_numpy(self.most).to(device)
        return self._devices[key]
