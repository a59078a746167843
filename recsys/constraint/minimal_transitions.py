"""The minimal trie as tensors, with the part of `DeviceTrie` that beam search looks at.

A decoding state is the number of the first row below it times 2^32, and its node: so states ascend
like rows, and what may be reached is counted in a range of rows. Shapes as in
`recsys.constraint.transitions`; R rows, n different masks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import numpy as np
import torch

from recsys.constraint.transitions import Children, DeviceTrie

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from recsys.constraint.boost import Boost
    from recsys.constraint.mask import RowMask
    from recsys.constraint.minimal import MinimalTrie

_NODES = 32  # bits of a state that are a node


@dataclass(frozen=True, eq=False)
class _Allowed:
    """What each request may get: (n, R + 1) running counts of rows, and (B,) which is whose."""

    before: torch.Tensor
    line: torch.Tensor

    def count(self, start: torch.Tensor, stop: torch.Tensor) -> torch.Tensor:
        """(B, W, C) allowed rows from `start` to before `stop`."""
        line = (self.line * self.before.shape[1])[:, None, None]
        flat = self.before.flatten()
        return flat[line + stop] - flat[line + start]

    def take(self, requests: torch.Tensor) -> _Allowed:
        """The same for some requests of the batch."""
        return _Allowed(self.before, self.line[requests])


@dataclass(frozen=True, eq=False)
class _Excluded:
    """What each request must not get: (B, D) rows, ascending, padded behind the last row."""

    rows: torch.Tensor

    def count(self, start: torch.Tensor, stop: torch.Tensor) -> torch.Tensor:
        """(B, W, C) excluded rows from `start` to before `stop`."""
        both = (torch.searchsorted(self.rows, at.flatten(1)).view_as(at) for at in (start, stop))
        first, last = both
        return last - first

    def take(self, requests: torch.Tensor) -> _Excluded:
        """The same for some requests of the batch."""
        return _Excluded(self.rows[requests])


@dataclass(frozen=True, eq=False)
class DeviceMinimalTrie:
    """`MinimalTrie` on a device; the attributes are those arrays.

    Edges have C more behind the last one, so that C may be read from any.
    """

    source: MinimalTrie
    alphabet: torch.Tensor
    first_edge: torch.Tensor
    symbol: torch.Tensor
    target: torch.Tensor
    before: torch.Tensor
    rows_below: torch.Tensor
    is_end: torch.Tensor

    @classmethod
    def of(cls, trie: MinimalTrie, device: str | torch.device) -> DeviceTrie:
        """The arrays of `trie` on `device`; typed as what they stand in for."""
        pad = np.zeros(max(trie.branching), np.int32)
        edges = (np.append(a, pad.astype(a.dtype)) for a in (trie.symbol, trie.target, trie.before))
        arrays = (trie.alphabet, trie.first_edge, *edges, trie.rows_below, trie.ended)
        return cast("DeviceTrie", cls(trie, *(torch.from_numpy(a).to(device) for a in arrays)))

    def children(
        self,
        states: torch.Tensor,
        depth: int,
        excluded: _Excluded | None = None,
        allowed: _Allowed | None = None,
    ) -> Children:
        """As `DeviceTrie.children`."""
        node, rank = states & ((1 << _NODES) - 1), states >> _NODES
        first = self.first_edge[node].long().unsqueeze(-1)
        count = self.first_edge[node + 1].unsqueeze(-1) - first
        place = torch.arange(self.source.branching[depth], device=states.device)
        edge = first + torch.minimum(place, (count - 1).clamp(min=0))
        target = self.target[edge].long()
        start = rank.unsqueeze(-1) + self.before[edge]
        held: torch.Tensor = self.rows_below[target].long()
        stop, alive = start + held, place < count
        if allowed is not None:
            held = allowed.count(start, stop)
        if excluded is not None:
            held = held - excluded.count(start, stop)
        states = (start << _NODES) | target
        return Children(states, self.symbol[edge].long(), alive & (held > 0))

    def candidates(
        self,
        states: torch.Tensor,
        depth: int,
        excluded: _Excluded | None = None,
        allowed: _Allowed | None = None,
    ) -> Children:
        """The children: there are no dense depths."""
        return self.children(states, depth, excluded, allowed)

    def at_depth(self, states: torch.Tensor, depth: int) -> torch.Tensor:
        """The states themselves: children of any may be asked for."""
        del depth
        return states

    def ended(self, states: torch.Tensor) -> torch.Tensor:
        """As `DeviceTrie.ended`."""
        return self.is_end[states & ((1 << _NODES) - 1)]

    def rows_of(self, leaves: torch.Tensor) -> torch.Tensor:
        """Row of each leaf."""
        return leaves >> _NODES

    def sequences(self, rows: torch.Tensor) -> torch.Tensor:
        """As `DeviceTrie.sequences`; found on the host."""
        found = self.source.sequences(rows.flatten().cpu().numpy())
        return torch.from_numpy(found).view(*rows.shape, -1).to(rows.device)

    def pad_excluded(
        self,
        excluded: Sequence[NDArray[np.integer]],
        masks: Sequence[RowMask | None] | None = None,
    ) -> _Excluded:
        """As `DeviceTrie.pad_excluded`; what is not allowed anyway counts once."""
        each = [None] * len(excluded) if masks is None else masks
        kept = []
        for rows, mask in zip(excluded, each, strict=True):
            distinct = np.unique(np.asarray(rows, np.int64))
            kept.append(distinct if mask is None else distinct[mask.rows[distinct]])
        width = max((len(rows) for rows in kept), default=0)
        padded = np.full((len(kept), width), self.source.num_rows, np.int64)
        for line, rows in zip(padded, kept, strict=True):
            line[: len(rows)] = rows
        return _Excluded(torch.from_numpy(padded).to(self.alphabet.device))

    def allow(self, masks: Sequence[RowMask | None]) -> _Allowed | None:
        """As `DeviceTrie.allow`; masks are those of `MinimalTrie.mask`."""
        if not any(mask is not None for mask in masks):
            return None
        distinct = {id(mask): mask for mask in masks}
        everything = np.arange(self.source.num_rows + 1, dtype=np.int32)
        before = np.stack([everything if m is None else m.before for m in distinct.values()])
        place = {key: i for i, key in enumerate(distinct)}
        line = torch.tensor([place[id(mask)] for mask in masks])
        device = self.alphabet.device
        return _Allowed(torch.from_numpy(before).to(device), line.to(device))

    def gain(self, boosts: Sequence[Boost | None]) -> None:
        """Nothing gains anything.

        Raises:
            ValueError: something would.
        """
        if any(boost is not None for boost in boosts):
            raise ValueError("boosts: a minimal trie has none; decode over the trie it was made of")
