"""The trie as tensors: children of states as batched gathers. No Python per beam, no host sync.

A beam that does not exist has the state `NO_STATE`, and so has a child that does not exist. Nothing
follows it, and it has no row. The live states of a request are distinct and ascend; `NO_STATE`
comes after them.

Shapes: B requests, W states a request, C the most children at that depth, V the symbols of a dense
depth, D dead states, F flags of dense depths. Arrays that are looked things up in are as small as
they can be; places in them are int64, which PyTorch indexes fastest with.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from recsys.constraint.boost import Boost
from recsys.constraint.dense import BLOCK, NO_ROW, DenseDepth
from recsys.constraint.mask import MaskRoom, RowMask, all_flags, dead_states
from recsys.constraint.trie import NO_STATE, ItemTrie

T = TypeVar("T")
_INFINITY = -1024  # as the bits of a float16, the negative one


class Children(NamedTuple):
    """Children of (B, W) states, padded to C; candidates lie in row order if the states do.

    Attributes:
        states: (B, W, C) int64; `NO_STATE` for padding.
        symbols: (B, W, C) int64 token that leads into each, as a place in `DeviceTrie.alphabet`;
            any for padding.
        alive: (B, W, C) bool; False for padding and for branches with nothing left to recommend.
    """

    states: torch.Tensor
    symbols: torch.Tensor
    alive: torch.Tensor

    def masked(self, values: torch.Tensor) -> torch.Tensor:
        """(B, W, C) of (B, W, A) values by symbol; -inf where not alive."""
        return values.gather(-1, self.symbols).masked_fill(~self.alive, -torch.inf)

    def at(self, places: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """States and symbols of (B, K) places among the W * C candidates."""
        return self.states.flatten(1).gather(1, places), self.symbols.flatten(1).gather(1, places)


@dataclass(frozen=True, eq=False)
class Excluded:
    """What each request must not get, as the states that hold nothing else.

    Attributes:
        dead: one (B, D) int64 a depth 1 .. L, ascending, padded with `NO_STATE`; D may be 0.
        parent: (B, D) int64 a depth, their parents; -1, which is no state, for padding.
        place: where each lies among the candidates of its parent (`DeviceTrie.candidates`).
    """

    dead: tuple[torch.Tensor, ...]
    parent: tuple[torch.Tensor, ...]
    place: tuple[torch.Tensor, ...]

    def take(self, requests: torch.Tensor) -> Excluded:
        """The same for some requests of the batch."""
        parts = (self.dead, self.parent, self.place)
        return Excluded(*(tuple(states[requests] for states in part) for part in parts))

    def hide(self, alive: torch.Tensor, states: torch.Tensor, depth: int) -> None:
        """Take what is dead out of (B, W, C) candidates of (B, W) ascending states, in place.

        Live states are distinct, so each dead child has one parent among them, or none.
        """
        parent = self.parent[depth]
        if not parent.shape[1]:
            return
        beam = torch.searchsorted(states, parent).clamp_(max=states.shape[1] - 1)
        spared = states.gather(1, beam) != parent  # the parent is no beam: leave the place alone
        place = beam.mul_(alive.shape[-1]).add_(self.place[depth])
        flat = alive.view(torch.uint8).flatten(1)
        flat.scatter_reduce_(1, place, spared.view(torch.uint8), "amin")


@dataclass(frozen=True, eq=False)
class Allowed:
    """What each request may get, as the states that hold some of it.

    Attributes:
        alive: (n (S + C + F),) bool each, one or several masks (`RowMask`) in a row.
        line: (B,) int64 which of them holds each request's mask.
        start: (B, 1) int64 where its states' flags begin there.
        dense_start: (B, 1) int64 where those of its dense depths do.
        masks: whose memory that is; kept, so that it stays theirs.
    """

    alive: tuple[torch.Tensor, ...]
    line: torch.Tensor
    start: torch.Tensor
    dense_start: torch.Tensor
    masks: tuple[RowMask | None, ...]

    def take(self, requests: torch.Tensor) -> Allowed:
        """The same for some requests of the batch."""
        line, start, dense = (part[requests] for part in (self.line, self.start, self.dense_start))
        return Allowed(self.alive, line, start, dense, self.masks)

    def runs(self, first: torch.Tensor, width: int, *, dense: bool = False) -> torch.Tensor:
        """(B, W, `width`) flags from each of the (B, W) states, or places of dense depths, on."""
        first = first + (self.dense_start if dense else self.start)
        if len(self.alive) == 1:
            return _runs(self.alive[0], first, width)
        lines = zip(first, self.line.tolist(), strict=True)
        return torch.stack([_runs(self.alive[line], f, width) for f, line in lines])


@dataclass(frozen=True, eq=False)
class Candidates:
    """What may follow (B, W) ascending states, in row order, ready to be ranked.

    Of a dense depth (`recsys.constraint.dense`), C stands for all V symbols of the depth.

    Attributes:
        alive: (B, W, C) bool; False for what does not follow, or leads to nothing that is left.
        parents: (B, W) int64 whose candidates they are; any state of the depth for a beam that
            has no candidates.
        symbols: (B, W, C) int64 as in `Children`; None at a dense depth.
        depth: of the states.
        trie: whose they are.
    """

    alive: torch.Tensor
    parents: torch.Tensor
    symbols: torch.Tensor | None
    depth: int
    trie: DeviceTrie

    def masked(self, values: torch.Tensor) -> torch.Tensor:
        """(B, W, C) of (B, W, A) values by symbol; -inf where not alive."""
        if self.symbols is not None:
            return values.gather(-1, self.symbols).masked_fill_(~self.alive, -torch.inf)
        dense = self._dense
        # 0 or -inf, made of the bits of the latter: on a CPU a fifth of the time of `where`
        infinite = self.alive.to(torch.int16).sub_(1).bitwise_and_(_INFINITY).view(torch.float16)
        return infinite.to(values.dtype).add_(values.narrow(-1, dense.low, dense.width))

    def at(self, places: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """States and symbols of (B, K) places among the W * C candidates, if those are alive.

        For a place that is not alive both are any; whoever chose too few drops them.
        """
        width = self.alive.shape[-1]
        beam = places // width
        state, place = self.parents.gather(1, beam), places - beam * width
        first = _look_up(self.trie.first_child, state)
        if self.symbols is not None:
            return first + place, self.symbols.flatten(1).gather(1, places)
        dense = self._dense
        row = state - self.trie.source.depth_start[self.depth]
        block = place // BLOCK
        before = self.trie.before[self.depth]
        counted = _look_up(before.flatten(), row * before.shape[1] + block)
        flags = _runs(self.trie.dense_flags, row * dense.width + dense.start + block * BLOCK, BLOCK)
        upto = _runs(self.trie.block, BLOCK - 1 - place + block * BLOCK, BLOCK)
        counted += (flags & upto).sum(-1)
        return first + counted - 1, place + dense.low

    @property
    def _dense(self) -> DenseDepth:
        dense = self.trie.source.dense[self.depth]
        if dense is None:
            raise ValueError(f"depth {self.depth} is not dense")
        return dense


@dataclass(frozen=True, eq=False)
class Gains:
    """What each request's items gain, as the most below each state.

    Attributes:
        most: (S,) float32 each, one a distinct boost (`Boost`).
        line: (B,) int64 which of them is each request's.
    """

    most: tuple[torch.Tensor, ...]
    line: torch.Tensor

    def take(self, requests: torch.Tensor) -> Gains:
        """The same for some requests of the batch."""
        return Gains(self.most, self.line[requests])

    def at(self, states: torch.Tensor) -> torch.Tensor:
        """(B, W, C) of each of the states; 0 for `NO_STATE`."""
        nothing = states == NO_STATE
        return self._of_real(states.masked_fill(nothing, 0)).masked_fill_(nothing, 0)

    def _of_real(self, states: torch.Tensor) -> torch.Tensor:
        if len(self.most) == 1:
            return self.most[0].index_select(0, states.flatten()).view_as(states)
        if states.device.type == "cpu":
            lines = zip(states, self.line.tolist(), strict=True)
            return torch.stack(
                [self.most[line].index_select(0, s.flatten()).view_as(s) for s, line in lines]
            )
        places = states + (self.line * len(self.most[0]))[:, None, None]
        return torch.cat(self.most).index_select(0, places.flatten()).view_as(places)


@dataclass(frozen=True, eq=False)
class DeviceTrie:
    """`ItemTrie` on a device; on a CPU most tensors share its memory.

    C is the most children of any state.

    Attributes:
        source: the arrays it was made from (sizes and depths are read from there, on the host).
        alphabet: (A,) int64 tokens that occur in the trie, ascending; all that a step looks at.
        symbol: (S + C,) int16 or int32 place in `alphabet` of the token that leads into each state;
            0 behind the last one, so that C children may be read from any state.
        first_child: (I + 1,) int32; the I inner states come before the leaves.
        row_start: (I,) int32.
        rows: (R, L) int16 or int32.
        ramp: (2 C,) bool, C times True and then False.
        block: (2 `BLOCK`,) bool, alike.
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
        """The arrays of `trie` on `device`; made once per device and kept by the trie.

        A `DeviceTrie` is returned as it is.
        """
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
        """Where the tensors lie."""
        return self.symbol.device

    @cached_property
    def dense_flags(self) -> torch.Tensor:
        """(F,) `ItemTrie.dense_flags`."""
        return torch.from_numpy(self.source.dense_flags).to(self.device)

    @cached_property
    def before(self) -> tuple[torch.Tensor, ...]:
        """`DenseDepth.before` of each depth; empty for those that are not dense."""
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
        """Children of the states at `depth`; others have none here.

        Args:
            states: (B, W) int64.
            depth: 0 for the root.
            excluded: from `pad_excluded`, or None.
            allowed: from `allow`, or None. With both, `excluded` must have been made for the same
                masks. A child is alive while its rows hold one that is allowed and not excluded.
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
        return Children(child, _runs(self.symbol, first, width).long(), alive)

    def candidates(
        self,
        states: torch.Tensor,
        depth: int,
        excluded: Excluded | None = None,
        allowed: Allowed | None = None,
    ) -> Candidates:
        """What `children` says, in the form in which it is ranked fastest.

        Args:
            states: (B, W) int64, ascending; those of live beams are distinct.
            depth: 0 for the root; states of other depths have no candidates.
            excluded: as for `children`.
            allowed: as for `children`.
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
                alive = _runs(self.dense_flags, first, width)
        else:
            width = self.source.branching[depth]
            first, alive = self._children(here, inside, width)
            if allowed is not None:
                alive &= allowed.runs(first, width)
            symbols = _runs(self.symbol, first, width).long()
        if excluded is not None:
            excluded.hide(alive, states, depth)
        return Candidates(alive, inside, symbols, depth, self)

    def _at_depth(self, states: torch.Tensor, depth: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Whether each state is at `depth`, and the states, with the depth's first for those not.

        Whoever looks something up at the second must drop it where the first is False.
        """
        start, stop = self.source.depth_start[depth : depth + 2]
        here = (states >= start) & (states < stop)
        return here, torch.where(here, states, start)

    def _children(
        self, here: torch.Tensor, inside: torch.Tensor, width: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(B, W) first child of each state, and (B, W, `width`) which runs of it are children.

        Children lie side by side, so all that is known of them is read in runs.
        """
        first = _look_up(self.first_child, inside)
        count = (_look_up(self.first_child, inside + 1) - first) * here
        return first, _runs(self.ramp, len(self.ramp) // 2 - count, width)

    def tokens_of(self, states: torch.Tensor) -> torch.Tensor:
        """Token that leads into each state, none of which is `NO_STATE`; any for the root."""
        return self.alphabet[_look_up(self.symbol, states)]

    def parents_of(self, states: torch.Tensor) -> torch.Tensor:
        """Parent of each state, which is neither the root nor `NO_STATE`.

        It is the last state whose children begin at or before the child.
        """
        inner = self.first_child[:-1]
        return torch.searchsorted(inner, states.to(inner.dtype), right=True) - 1

    def ended(self, states: torch.Tensor) -> torch.Tensor:
        """Whether a sequence has ended at a state; False for the root and for `NO_STATE`."""
        inner = (states > 0) & (states < self.source.num_states)
        return (self.tokens_of(torch.where(inner, states, 0)) == self.source.end) & inner

    def sequences(self, rows: torch.Tensor) -> torch.Tensor:
        """(..., L) int64 tokens of rows; -1 throughout for row -1."""
        nothing = rows < 0
        tokens = self.rows[rows.masked_fill(nothing, 0)].long()
        return tokens.masked_fill_(nothing.unsqueeze(-1), -1)

    def rows_of(self, leaves: torch.Tensor) -> torch.Tensor:
        """Row of each leaf; -1 for other states."""
        first, behind = self.source.depth_start[-2:]
        return torch.where((leaves >= first) & (leaves < behind), leaves - first, -1)

    def sizes(self, states: torch.Tensor, depth: int) -> torch.Tensor:
        """Rows below each of the states; 0 for states that are not at `depth`."""
        source = self.source
        here, inside = self._at_depth(states, depth)
        if depth == source.num_levels:
            return here.long()
        start, stop = source.depth_start[depth : depth + 2]
        starts, place = self.row_start[start:stop], inside - start
        last = place == stop - start - 1
        following = _look_up(starts, (place + 1).masked_fill(last, 0))
        ends = torch.where(last, source.num_rows, following)
        return (ends - _look_up(starts, place)) * here

    def pad_excluded(
        self,
        excluded: Sequence[NDArray[np.integer]],
        masks: Sequence[RowMask | None] | None = None,
    ) -> Excluded:
        """What each request must not get, ready for `children`.

        Args:
            excluded: rows of each request (`ItemTrie.excluded_rows`).
            masks: what each request may get; None for everything.
        """
        source = self.source
        dead = dead_states(source, excluded, masks)
        parents, places = [], []
        for depth, (states, dense) in enumerate(zip(dead, source.dense, strict=True)):
            first, last = source.depth_start[depth : depth + 2]
            real = states != NO_STATE
            child = states[real]
            starts = source.first_child[first:last]
            above = np.searchsorted(starts, child.astype(starts.dtype), side="right") - 1
            parent, place = np.full(states.shape, -1, np.int64), np.zeros(states.shape, np.int64)
            parent[real] = above + first
            place[real] = (
                child - starts[above] if dense is None else source.symbol[child] - dense.low
            )
            parents.append(parent)
            places.append(place)
        tensors = (
            tuple(torch.from_numpy(a).to(self.device) for a in arrays)
            for arrays in (dead, parents, places)
        )
        return Excluded(*tensors)

    def allow(self, masks: Sequence[RowMask | None]) -> Allowed | None:
        """What each request may get, ready for `children`; None where all may get everything.

        Args:
            masks: of each request; None for everything.
        """
        if not any(masks):
            return None
        room = next((m.room[0] for m in masks if m is not None and m.room is not None), None)
        distinct, line = self._distinct(masks)
        if self.device.type == "cpu":
            parts = [self._memory(mask, room) for mask in distinct]
        else:  # copying is cheap there, and one look-up for all is worth it
            flags = [
                torch.from_numpy(all_flags(self.source)) if m is None else m.to(self.device)
                for m in distinct
            ]
            joined = torch.cat([f.to(self.device) for f in flags])
            parts = [(joined, i * len(flags[0])) for i in range(len(flags))]
        memory = {id(flags): flags for flags, _ in parts}
        places = {key: i for i, key in enumerate(memory)}
        lines, starts = torch.tensor(
            [[places[id(flags)], start] for flags, start in parts], device=self.device
        ).T
        return Allowed(
            tuple(torch.as_tensor(flags) for flags in memory.values()),
            lines[line],
            starts[line, None],
            starts[line, None] + self.source.padded_states,
            tuple(distinct),
        )

    def _memory(self, mask: RowMask | None, room: MaskRoom | None) -> tuple[Any, int]:
        """The array that a mask's flags lie in, and where they begin."""
        if mask is None:
            return (all_flags(self.source) if room is None else room.flags), 0
        return (mask.alive, 0) if mask.room is None else (mask.room[0].flags, mask.room[1])

    def gain(self, boosts: Sequence[Boost | None]) -> Gains | None:
        """What each request's items gain, ready for a step; None where none gains anything.

        Args:
            boosts: of each request; None for nothing.
        """
        if not any(boosts):
            return None
        distinct, line = self._distinct(boosts)
        nothing = torch.zeros(self.source.num_states, device=self.device)
        return Gains(tuple(nothing if b is None else b.to(self.device) for b in distinct), line)

    def _distinct(self, given: Sequence[T]) -> tuple[list[T], torch.Tensor]:
        """The different objects among those given, and (B,) the place of each one's."""
        distinct = {id(one): one for one in given}
        place = {key: i for i, key in enumerate(distinct)}
        return list(distinct.values()), torch.tensor(
            [place[id(one)] for one in given], device=self.device
        )


def read(values: torch.Tensor, places: torch.Tensor, missing: float) -> torch.Tensor:
    """(B, n) values at (B, n) places of (B, m) values; `missing` at place m, behind the last."""
    nothing = places == values.shape[1]
    return values.gather(1, places.masked_fill(nothing, 0)).masked_fill_(nothing, missing)


def _runs(table: torch.Tensor, first: torch.Tensor, width: int) -> torch.Tensor:
    """(..., width) runs of `table` from each of the places `first` on.

    A run is copied as a whole, which takes a quarter of the time of reading entry by entry.
    """
    rows: torch.Tensor = table.unfold(0, width, 1).index_select(0, first.flatten())
    return rows.view(*first.shape, width)


def _look_up(table: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """`table[places]` as int64; on a CPU many times as fast as that."""
    return table.index_select(0, places.flatten()).view_as(places).long()
