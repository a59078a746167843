"""The trie as tensors: children of states as batched gathers. No Python per beam, no host sync.

Shapes: B requests, W states a request, C the most children at that depth, E excluded rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from recsys.constraint.trie import ItemTrie


class Children(NamedTuple):
    """Children of (B, W) states, padded to C; candidates lie in row order if the states do.

    Attributes:
        states: (B, W, C) int64; padding repeats an existing state.
        symbols: (B, W, C) int64 token that leads into each, as a place in `DeviceTrie.alphabet`.
        alive: (B, W, C) bool; False for padding and for branches with nothing left to recommend.
    """

    states: torch.Tensor
    symbols: torch.Tensor
    alive: torch.Tensor


@dataclass(frozen=True, eq=False)
class DeviceTrie:
    """`ItemTrie` on a device.

    Attributes:
        source: the arrays it was made from (sizes and depths are read from there, on the host).
        alphabet: (A,) int64 tokens that occur in the trie, ascending; all that a step looks at.
        symbol: (S,) int64 place in `alphabet` of the token that leads into each state.
        first_child: (S + 1,) int64.
        row_start: (S,) int64.
        row_stop: (S,) int64.
        rows: (R, L) int64.
    """

    source: ItemTrie
    alphabet: torch.Tensor
    symbol: torch.Tensor
    first_child: torch.Tensor
    row_start: torch.Tensor
    row_stop: torch.Tensor
    rows: torch.Tensor

    @classmethod
    def of(cls, trie: ItemTrie, device: str | torch.device) -> DeviceTrie:
        """Copy the arrays of `trie` to `device`."""
        alphabet, symbol = np.unique(trie.token[1:], return_inverse=True)
        symbol = np.insert(symbol, 0, 0)  # nothing leads into the root; any valid place will do
        arrays = (alphabet, symbol, trie.first_child, trie.row_start, trie.row_stop, trie.rows)
        return cls(trie, *(torch.from_numpy(a).to(device, torch.int64) for a in arrays))

    @property
    def device(self) -> torch.device:
        """Where the tensors lie."""
        return self.symbol.device

    def children(
        self, states: torch.Tensor, depth: int, excluded: torch.Tensor | None = None
    ) -> Children:
        """Children of `states`, all at `depth`.

        Args:
            states: (B, W) int64.
            depth: depth of the states, 0 for the root.
            excluded: (B, E) rows from `pad_excluded`, or None. A child is alive while its range
                holds a row that is not excluded (counted by binary search, DESIGN 4.2).
        """
        width = self.source.branching[depth]
        first = self.first_child[states].unsqueeze(-1)  # (B, W, 1)
        last = self.first_child[states + 1].unsqueeze(-1)
        child = first + torch.arange(width, device=states.device)  # (B, W, C)
        alive = child < last
        child = torch.where(alive, child, first)
        if excluded is not None and excluded.shape[1]:
            flat = child.flatten(1)
            start, stop = self.row_start[flat], self.row_stop[flat]
            gone = torch.searchsorted(excluded, stop) - torch.searchsorted(excluded, start)
            alive = alive & (stop - start > gone).view_as(child)
        return Children(child, self.symbol[child], alive)

    def pad_excluded(self, excluded: Sequence[NDArray[np.integer]]) -> torch.Tensor:
        """(B, E) ascending rows of each request, padded behind the last row of the trie.

        Args:
            excluded: rows of each request, ascending and distinct (`ItemTrie.excluded_rows`).
        """
        width = max((len(rows) for rows in excluded), default=0)
        padded = np.full((len(excluded), width), self.source.num_rows, np.int64)
        for line, rows in zip(padded, excluded, strict=True):
            line[: len(rows)] = rows
        return torch.from_numpy(padded).to(self.device)
