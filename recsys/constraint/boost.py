"""Boosts: values that are added to the log-probability of items; a soft constraint.

The score of an item is log p + boost. A prefix is ranked by its log-probability plus the largest
boost of any row below it, which is an upper bound on the scores of its descendants. So beam search
prunes by an upper bound, and its certificate and completion stay valid. Items that a
mask or an exclusion hides still count in the bound, which makes it looser but not wrong. NumPy
only, but for `Boost.to`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from recsys.constraint.trie import ItemTrie

MOST = 100_000.0
"""Largest boost. With a larger one, a sum of log-probabilities would lose precision."""


@dataclass(frozen=True, eq=False)
class Boost:
    """Scores added to items, and their maxima below each state of a trie.

    >>> trie = ItemTrie.build([[5, 7], [9, 1], [5, 3]])
    >>> boost = Boost.of(trie, np.array([0.5, 0, -1], np.float32)[trie.row_items])
    >>> boost.most.tolist()  # the root, the states behind 5 and 9, and the three rows
    [0.5, 0.5, 0.0, -1.0, 0.5, 0.0]

    Attributes:
        trie: the trie that the boost belongs to.
        items: (items,) float32, in the order of `ItemTrie.row_items`.
        most: (S,) float32 largest boost of an item below each state. At a leaf that several items
            share it may be larger than the boost of the item that is shown.
    """

    trie: ItemTrie
    items: NDArray[np.float32]
    most: NDArray[np.float32]
    _devices: dict[str, torch.Tensor] = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, trie: ItemTrie, items: NDArray[np.float32]) -> Boost:
        """Make a boost from (items,) float32 in the order of `trie.row_items`.

        Raises:
            ValueError: wrong dtype or shape, or a value that is not finite or beyond `MOST`.
        """
        items = np.asarray(items)
        if items.dtype.kind not in "fiu" or items.shape != trie.row_items.shape:
            raise ValueError(
                f"a boost is {trie.row_items.shape} numbers, one per item; got {items.dtype} "
                f"{items.shape}"
            )
        items = items.astype(np.float32, copy=False)
        if not (np.abs(items) <= MOST).all():
            raise ValueError(f"boosts must be finite and lie in -{MOST:g} .. {MOST:g}")
        return cls(trie, items, most_below(trie, items))

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return self.items.nbytes + self.most.nbytes

    def to(self, device: str | torch.device) -> torch.Tensor:
        """`most` on `device`; copied once per device and kept."""
        key = str(device)
        if key not in self._devices:
            self._devices[key] = torch.from_numpy(self.most).to(device)
        return self._devices[key]


def most_below(trie: ItemTrie, items: NDArray[np.floating[Any]]) -> NDArray[np.floating[Any]]:
    """(S,) the largest value of an item below each state; `items` as in `Boost`."""
    below = items
    if trie.num_rows < trie.num_items:
        below = np.maximum.reduceat(items, trie.row_item_start[:-1])
    levels = [below]
    for depth in reversed(range(trie.num_levels)):
        first, last = trie.depth_start[depth : depth + 2]
        below = np.maximum.reduceat(below, trie.first_child[first:last] - last)
        levels.append(below)
    return np.concatenate(levels[::-1])
