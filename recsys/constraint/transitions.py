"""The trie as tensors: children of states as batched gathers. No Python per beam, no host sync.

Shapes: B requests, W states a request, C the most children at that depth, E excluded rows, D dead
states, F filters. Arrays that are looked things up in are as small as they can be; places in them
are int64, which PyTorch indexes fastest with.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import numpy as np
import torch

from recsys.constraint.mask import dead_states

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from recsys.constraint.boost import Boost
    from recsys.constraint.mask import RowMask
    from recsys.constraint.trie import ItemTrie

T = TypeVar("T")


class Children(NamedTuple):
    """Children of (B, W) states, padded to C; candidates lie in row order if the states do.

    Attributes:
        states: (B, W, C) int64; padding repeats the last child.
        symbols: (B, W, C) int64 token that leads into each, as a place in `DeviceTrie.alphabet`.
        alive: (B, W, C) bool; False for padding and for branches with nothing left to recommend.
    """

    states: torch.Tensor
    symbols: torch.Tensor
    alive: torch.Tensor


@dataclass(frozen=True, eq=False)
class Excluded:
    """What each request must not get, as the states that hold nothing else.

    Attributes:
        dead: one (B, D) int64 a depth 1 .. L, ascending, padded behind the last state; D may be 0.
    """

    dead: tuple[torch.Tensor, ...]

    def take(self, requests: torch.Tensor) -> Excluded:
        """The same for some requests of the batch."""
        return Excluded(tuple(states[requests] for states in self.dead))


@dataclass(frozen=True, eq=False)
class Allowed:
    """What each request may get, as the states that hold some of it.

    Attributes:
        alive: (S + C,) bool each, one a distinct mask (`RowMask`).
        line: (B,) int64 which of them is each request's.
    """

    alive: tuple[torch.Tensor, ...]
    line: torch.Tensor

    def take(self, requests: torch.Tensor) -> Allowed:
        """The same for some requests of the batch."""
        return Allowed(self.alive, self.line[requests])

    def runs(self, first: torch.Tensor, width: int) -> torch.Tensor:
        """(B, W, C) of the C = `width` states from each of the (B, W) states `first` on."""
        if len(self.alive) == 1:
            return _runs(self.alive[0], first, width)
        if first.device.type == "cpu":  # asking one by one is faster than joining the masks
            lines = zip(first, self.line.tolist(), strict=True)
            return torch.stack([_runs(self.alive[line], f, width) for f, line in lines])
        size = len(self.alive[0])
        return _runs(torch.cat(self.alive), first + (self.line * size)[:, None], width)


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
        """(B, W, C) of each of the states."""
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
    """

    source: ItemTrie
    alphabet: torch.Tensor
    symbol: torch.Tensor
    first_child: torch.Tensor
    row_start: torch.Tensor
    rows: torch.Tensor
    ramp: torch.Tensor

    @classmethod
    def of(cls, trie: ItemTrie, device: str | torch.device) -> DeviceTrie:
        """The arrays of `trie` on `device`."""
        most = max(trie.branching)
        symbol = np.append(trie.symbol, np.zeros(most, trie.symbol.dtype))
        ramp = np.arange(2 * most) < most
        arrays = (trie.alphabet, symbol, trie.first_child, trie.inner_start, trie.rows, ramp)
        return cls(trie, *(torch.from_numpy(a).to(device) for a in arrays))

    @property
    def device(self) -> torch.device:
        """Where the tensors lie."""
        return self.symbol.device

    def children(
        self,
        states: torch.Tensor,
        depth: int,
        excluded: Excluded | None = None,
        allowed: Allowed | None = None,
    ) -> Children:
        """Children of `states`, all at `depth`.

        Args:
            states: (B, W) int64.
            depth: depth of the states, 0 for the root.
            excluded: from `pad_excluded`, or None.
            allowed: from `allow`, or None. With both, `excluded` must have been made for the same
                masks. A child is alive while its rows hold one that is allowed and not excluded.
        """
        width = self.source.branching[depth]
        first = _look_up(self.first_child, states)
        count = _look_up(self.first_child, states + 1) - first
        # children lie side by side, so all that is known of them is read in runs
        alive = _runs(self.ramp, len(self.ramp) // 2 - count, width)
        if allowed is not None:
            alive &= allowed.runs(first, width)
        place = torch.arange(width, device=states.device)
        child = first.unsqueeze(-1) + torch.minimum(place, count.unsqueeze(-1) - 1)  # (B, W, C)
        if excluded is not None and excluded.dead[depth].shape[1]:
            dead, flat = excluded.dead[depth], child.flatten(1)
            nearest = torch.searchsorted(dead, flat).clamp_(max=dead.shape[1] - 1)
            alive &= (dead.gather(1, nearest) != flat).view_as(child)
        return Children(child, _runs(self.symbol, first, width).long(), alive)

    def tokens_of(self, states: torch.Tensor) -> torch.Tensor:
        """Token that leads into each state; any for the root."""
        return self.alphabet[_look_up(self.symbol, states)]

    def rows_of(self, leaves: torch.Tensor) -> torch.Tensor:
        """Row of each leaf; 0 for other states."""
        return (leaves - self.source.depth_start[-2]).clamp(min=0)

    def leaves_of(self, rows: torch.Tensor) -> torch.Tensor:
        """Leaf of each row."""
        return rows + self.source.depth_start[-2]

    def sizes(self, states: torch.Tensor, depth: int) -> torch.Tensor:
        """Rows below each of the states, all at `depth`."""
        source = self.source
        if depth == source.num_levels:
            return torch.ones_like(states)
        start, stop = source.depth_start[depth : depth + 2]
        place = (states - start).clamp(0, stop - start - 1)
        starts = self.row_start[start:stop]
        following = (place + 1).clamp(max=stop - start - 1)
        ends = torch.where(following > place, _look_up(starts, following), source.num_rows)
        return ends - _look_up(starts, place)

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
        dead = dead_states(self.source, excluded, masks)
        return Excluded(tuple(torch.from_numpy(d).to(self.device) for d in dead))

    def allow(self, masks: Sequence[RowMask | None]) -> Allowed | None:
        """What each request may get, ready for `children`; None where all may get everything.

        Args:
            masks: of each request; None for everything.
        """
        if not any(masks):
            return None
        distinct, line = self._distinct(masks)
        size = self.source.num_states + max(self.source.branching)
        everything = torch.ones(size, dtype=torch.bool, device=self.device)
        return Allowed(
            tuple(everything if m is None else m.to(self.device) for m in distinct), line
        )

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


def _runs(table: torch.Tensor, first: torch.Tensor, width: int) -> torch.Tensor:
    """(..., width) runs of `table` from each of the places `first` on.

    A run is copied as a whole, which takes a quarter of the time of reading entry by entry.
    """
    rows: torch.Tensor = table.unfold(0, width, 1).index_select(0, first.flatten())
    return rows.view(*first.shape, width)


def _look_up(table: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """`table[places]` as int64; on a CPU many times as fast as that."""
    return table.index_select(0, places.flatten()).view_as(places).long()
