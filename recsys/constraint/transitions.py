"""The trie as tensors: children of states by batched gathers. No Python per beam, no host sync.

Beams and children that do not exist have the state `NO_STATE`, which has no children and no row.
The live states of a request are distinct and ascending, followed by `NO_STATE`.

Shapes: B requests, W states of a request, C most children at the depth. Look-up tables have the
smallest integer type that fits; indices into them are int64, with which PyTorch indexes fastest.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from recsys.constraint.restrictions import Allowed, Excluded, look_up, read_runs
from recsys.constraint.trie import NO_STATE, ItemTrie


class Children(NamedTuple):
    """Children of (B, W) states, padded to C; candidates lie in row order if the states do.

    Attributes:
        states: (B, W, C) int64; `NO_STATE` for padding.
        symbols: (B, W, C) int64 token that leads into each, as an index into
            `DeviceTrie.alphabet`; arbitrary for padding.
        alive: (B, W, C) bool; False for padding and for states without an allowed row below.
    """

    states: torch.Tensor
    symbols: torch.Tensor
    alive: torch.Tensor

    def masked(self, values: torch.Tensor) -> torch.Tensor:
        """(B, W, C) values of candidates, from (B, W, A) values by symbol; -inf if not alive."""
        return values.gather(-1, self.symbols).masked_fill(~self.alive, -torch.inf)

    def at(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """States and symbols at (B, K) indices among the W * C candidates."""
        return self.states.flatten(1).gather(1, positions), self.symbols.flatten(1).gather(
            1, positions
        )


@dataclass(frozen=True, eq=False)
class DeviceTrie:
    """`ItemTrie` on a device; on a CPU most tensors share its memory.

    C is the most children of any state.

    >>> trie = DeviceTrie.of(ItemTrie.build([[5, 7], [9, 1], [5, 3]]))
    >>> children = trie.children(torch.tensor([[0]]), depth=0)
    >>> children.states.tolist(), trie.alphabet[children.symbols].tolist()
    ([[[1, 2]]], [[[5, 9]]])

    Attributes:
        source: the arrays on the host; sizes and depths are read there.
        alphabet: (A,) int64 tokens that occur in the trie, ascending; a step reads only these.
        symbol: (S + C,) int16 or int32 index in `alphabet` of the token that leads into each state;
            0 after the last state, so that C children may be read from any state.
        first_child: (I + 1,) int32; the I inner states come before the leaves.
        row_start: (I,) int32.
        rows: (R, L) int16 or int32.
        ramp: (2 C,) bool, C times True and then C times False.
    """

    source: ItemTrie
    alphabet: torch.Tensor
    symbol: torch.Tensor
    first_child: torch.Tensor
    row_start: torch.Tensor
    rows: torch.Tensor
    ramp: torch.Tensor

    @classmethod
    def of(cls, trie: ItemTrie | DeviceTrie, device: str | torch.device = "cpu") -> DeviceTrie:
        """The arrays of `trie` on `device`, copied once and kept; a `DeviceTrie` as it is."""
        if isinstance(trie, DeviceTrie):
            return trie
        key = str(device)
        if key not in trie.on_devices:
            trie.on_devices[key] = cls._copy(trie, device)
        cached: DeviceTrie = trie.on_devices[key]
        return cached

    @classmethod
    def _copy(cls, trie: ItemTrie, device: str | torch.device) -> DeviceTrie:
        most = max(trie.branching)
        symbol = np.append(trie.symbol, np.zeros(most, trie.symbol.dtype))
        ramp = np.arange(2 * most) < most
        arrays = (trie.alphabet, symbol, trie.first_child, trie.inner_start, trie.rows, ramp)
        return cls(trie, *(torch.from_numpy(a).to(device) for a in arrays))

    @property
    def device(self) -> torch.device:
        """Device of the tensors."""
        return self.symbol.device

    def children(
        self,
        states: torch.Tensor,
        depth: int,
        excluded: Excluded | None = None,
        allowed: Allowed | None = None,
    ) -> Children:
        """Children of (B, W) int64 states that are at `depth`, 0 for the root; others get none.

        A child is alive if a row below it is allowed and not excluded. With both restrictions,
        `excluded` must have been made with the masks of `allowed`.
        """
        width = self.source.branching[depth]
        here, inside = self._at_depth(states, depth)
        first = look_up(self.first_child, inside)
        count = (look_up(self.first_child, inside + 1) - first) * here
        # children are contiguous, so their values are read in runs
        real = read_runs(self.ramp, len(self.ramp) // 2 - count, width)
        offset = torch.arange(width, device=states.device)
        child = torch.where(real, first.unsqueeze(-1) + offset, NO_STATE)  # (B, W, C)
        alive = real if allowed is None else real & allowed.runs(first, width)
        if excluded is not None and excluded.dead[depth].shape[1]:
            dead, flat = excluded.dead[depth], child.flatten(1)
            nearest = torch.searchsorted(dead, flat).clamp_(max=dead.shape[1] - 1)
            alive = alive & (dead.gather(1, nearest) != flat).view_as(child)
        return Children(child, read_runs(self.symbol, first, width).long(), alive)

    def _at_depth(self, states: torch.Tensor, depth: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Whether each state is at `depth`, and the states, others replaced by the depth's first.

        Values that are looked up by the second result must be dropped where the first is False.
        """
        start, stop = self.source.depth_start[depth : depth + 2]
        here = (states >= start) & (states < stop)
        return here, torch.where(here, states, start)

    def tokens_of(self, states: torch.Tensor) -> torch.Tensor:
        """Token that leads into each state; arbitrary for the root. No state may be `NO_STATE`."""
        return self.alphabet[look_up(self.symbol, states)]

    def parents_of(self, states: torch.Tensor) -> torch.Tensor:
        """Parent of each state, the last whose first child is not after it; not of the root."""
        inner = self.first_child[:-1]
        return torch.searchsorted(inner, states.to(inner.dtype), right=True) - 1

    def sequences(self, rows: torch.Tensor) -> torch.Tensor:
        """(..., L) int64 tokens of rows, on the device or on the host; all -1 for row -1."""
        nothing = rows < 0
        table = self.rows if rows.device == self.device else torch.from_numpy(self.source.rows)
        tokens = table[rows.masked_fill(nothing, 0)].long()
        return tokens.masked_fill_(nothing.unsqueeze(-1), -1)

    def rows_of(self, leaves: torch.Tensor) -> torch.Tensor:
        """Row of each leaf; -1 for other states."""
        first, behind = self.source.depth_start[-2:]
        return torch.where((leaves >= first) & (leaves < behind), leaves - first, -1)

    def sizes(self, states: torch.Tensor, depth: int) -> torch.Tensor:
        """Number of rows below each state; 0 for states that are not at `depth`."""
        source = self.source
        here, inside = self._at_depth(states, depth)
        if depth == source.num_levels:
            return here.long()
        start, stop = source.depth_start[depth : depth + 2]
        starts, offset = self.row_start[start:stop], inside - start
        last = offset == stop - start - 1
        following = look_up(starts, (offset + 1).masked_fill(last, 0))
        ends = torch.where(last, source.num_rows, following)
        return (ends - look_up(starts, offset)) * here


def read(values: torch.Tensor, positions: torch.Tensor, missing: float) -> torch.Tensor:
    """(B, n) entries of (B, m) values at (B, n) indices; `missing` for index m."""
    nothing = positions == values.shape[1]
    return values.gather(1, positions.masked_fill(nothing, 0)).masked_fill_(nothing, missing)
