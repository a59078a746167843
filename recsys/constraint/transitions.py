"""The trie as tensors: children of states by batched gathers. No Python per beam, no host sync.

Beams and children that do not exist have the state `NO_STATE`, which has no children and no row.
The live states of a request are distinct and ascending, followed by `NO_STATE`.

Shapes: B requests, W states of a request, C most children at the depth, V symbols of a dense depth,
F flags of dense depths. Look-up tables have the smallest integer type that fits; indices into them
are int64, with which PyTorch indexes fastest.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch

from recsys.constraint.dense import BLOCK, NO_ROW, DenseDepth
from recsys.constraint.restrictions import Allowed, Excluded, look_up, read_runs
from recsys.constraint.trie import NO_STATE, ItemTrie

_INFINITY = -1024  # its bits are those of -inf in float16


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

    def at(self, places: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """States and symbols at (B, K) indices among the W * C candidates."""
        return self.states.flatten(1).gather(1, places), self.symbols.flatten(1).gather(1, places)


@dataclass(frozen=True, eq=False)
class Continuations:
    """What may follow (B, W) ascending states, in row order, ready to be ranked.

    Of a dense depth (`recsys.constraint.dense`), C stands for all V symbols of the depth.

    Attributes:
        alive: (B, W, C) bool; False for symbols that do not follow, and for states without an
            allowed row.
        parents: (B, W) int64 parents of the candidates; an arbitrary state of the depth for a beam
            without candidates.
        symbols: (B, W, C) int64 as in `Children`; None at a dense depth.
        depth: depth of the parents.
        trie: the trie.
    """

    alive: torch.Tensor
    parents: torch.Tensor
    symbols: torch.Tensor | None
    depth: int
    trie: DeviceTrie

    def masked(self, values: torch.Tensor) -> torch.Tensor:
        """(B, W, C) values of candidates, from (B, W, A) values by symbol; -inf if not alive."""
        if self.symbols is not None:
            return values.gather(-1, self.symbols).masked_fill_(~self.alive, -torch.inf)
        dense = self._dense
        # 0 or -inf by integer operations on the bits: on a CPU five times as fast as `where`
        infinite = self.alive.to(torch.int16).sub_(1).bitwise_and_(_INFINITY).view(torch.float16)
        return infinite.to(values.dtype).add_(values.narrow(-1, dense.low, dense.width))

    def at(self, places: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """States and symbols at (B, K) indices among the W * C candidates.

        Both are arbitrary at an index that is not alive; the caller drops it.
        """
        width = self.alive.shape[-1]
        beam = places // width
        state, place = self.parents.gather(1, beam), places - beam * width
        first = look_up(self.trie.first_child, state)
        if self.symbols is not None:
            return first + place, self.symbols.flatten(1).gather(1, places)
        dense = self._dense
        row = state - self.trie.source.depth_start[self.depth]
        block = place // BLOCK
        before = self.trie.before[self.depth]
        counted = look_up(before.flatten(), row * before.shape[1] + block)
        flags = read_runs(
            self.trie.dense_flags, row * dense.width + dense.start + block * BLOCK, BLOCK
        )
        upto = read_runs(self.trie.block, BLOCK - 1 - place + block * BLOCK, BLOCK)
        counted += (flags & upto).sum(-1)
        return first + counted - 1, place + dense.low

    @property
    def _dense(self) -> DenseDepth:
        dense = self.trie.source.dense[self.depth]
        if dense is None:
            raise ValueError(f"depth {self.depth} is not dense")
        return dense


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
        block: (2 `BLOCK`,) bool, likewise.
    """

    source: ItemTrie
    alphabet: torch.Tensor
    symbol: torch.Tensor
    first_child: torch.Tensor
    row_start: torch.Tensor
    rows: torch.Tensor
    ramp: torch.Tensor
    block: torch.Tensor

    @classmethod
    def of(cls, trie: ItemTrie | DeviceTrie, device: str | torch.device = "cpu") -> DeviceTrie:
        """The arrays of `trie` on `device`, copied once and kept; a `DeviceTrie` as it is."""
        if isinstance(trie, DeviceTrie):
            return trie
        key = str(device)
        if key not in trie.on_devices:
            trie.on_devices[key] = cls._copy(trie, device)
        kept: DeviceTrie = trie.on_devices[key]
        return kept

    @classmethod
    def _copy(cls, trie: ItemTrie, device: str | torch.device) -> DeviceTrie:
        most = max(trie.branching)
        symbol = np.append(trie.symbol, np.zeros(most, trie.symbol.dtype))
        ramp = np.arange(2 * most) < most
        block = np.arange(2 * BLOCK) < BLOCK
        arrays = (trie.alphabet, symbol, trie.first_child, trie.inner_start, trie.rows, ramp, block)
        return cls(trie, *(torch.from_numpy(a).to(device) for a in arrays))

    @property
    def device(self) -> torch.device:
        """Device of the tensors."""
        return self.symbol.device

    @cached_property
    def dense_flags(self) -> torch.Tensor:
        """(F,) `ItemTrie.dense_flags`."""
        return torch.from_numpy(self.source.dense_flags).to(self.device)

    @cached_property
    def before(self) -> tuple[torch.Tensor, ...]:
        """`DenseDepth.before` of each depth; empty if it is not dense."""
        nothing = np.zeros((0, 0), np.int16)
        counts = (nothing if d is None else d.before for d in self.source.dense)
        return tuple(torch.from_numpy(c).to(self.device) for c in counts)

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
        first, real = self._children(here, inside, width)
        place = torch.arange(width, device=states.device)
        child = torch.where(real, first.unsqueeze(-1) + place, NO_STATE)  # (B, W, C)
        alive = real if allowed is None else real & allowed.runs(first, width)
        if excluded is not None and excluded.dead[depth].shape[1]:
            dead, flat = excluded.dead[depth], child.flatten(1)
            nearest = torch.searchsorted(dead, flat).clamp_(max=dead.shape[1] - 1)
            alive = alive & (dead.gather(1, nearest) != flat).view_as(child)
        return Children(child, read_runs(self.symbol, first, width).long(), alive)

    def candidates(
        self,
        states: torch.Tensor,
        depth: int,
        excluded: Excluded | None = None,
        allowed: Allowed | None = None,
    ) -> Continuations:
        """As `children`, in a form that is faster to rank.

        The states ascend, and those of live beams are distinct.
        """
        dense, symbols = self.source.dense[depth], None
        here, inside = self._at_depth(states, depth)
        if dense is not None:
            width = dense.width
            first = (inside - self.source.depth_start[depth]).mul_(width).add_(dense.start)
            first = first.masked_fill_(~here, NO_ROW)
            if allowed is not None:
                alive = allowed.runs(first, width, dense=True)
            else:
                alive = read_runs(self.dense_flags, first, width)
        else:
            width = self.source.branching[depth]
            first, alive = self._children(here, inside, width)
            if allowed is not None:
                alive &= allowed.runs(first, width)
            symbols = read_runs(self.symbol, first, width).long()
        if excluded is not None:
            excluded.hide(alive, states, depth)
        return Continuations(alive, inside, symbols, depth, self)

    def _at_depth(self, states: torch.Tensor, depth: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Whether each state is at `depth`, and the states, others replaced by the depth's first.

        Values that are looked up by the second result must be dropped where the first is False.
        """
        start, stop = self.source.depth_start[depth : depth + 2]
        here = (states >= start) & (states < stop)
        return here, torch.where(here, states, start)

    def _children(
        self, here: torch.Tensor, inside: torch.Tensor, width: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(B, W) first child of each state, and (B, W, `width`) whether each successor is a child.

        Children are contiguous, so their values are read in runs.
        """
        first = look_up(self.first_child, inside)
        count = (look_up(self.first_child, inside + 1) - first) * here
        return first, read_runs(self.ramp, len(self.ramp) // 2 - count, width)

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
        starts, place = self.row_start[start:stop], inside - start
        last = place == stop - start - 1
        following = look_up(starts, (place + 1).masked_fill(last, 0))
        ends = torch.where(last, source.num_rows, following)
        return (ends - look_up(starts, place)) * here


def read(values: torch.Tensor, places: torch.Tensor, missing: float) -> torch.Tensor:
    """(B, n) entries of (B, m) values at (B, n) indices; `missing` for index m."""
    nothing = places == values.shape[1]
    return values.gather(1, places.masked_fill(nothing, 0)).masked_fill_(nothing, missing)
