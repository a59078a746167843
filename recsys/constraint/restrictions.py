"""Restrictions of the requests of a batch, as tensors: excluded rows, masks and boosts.

Shapes: B requests, W states of a request, C candidates of a state, D dead states; a trie has S
states and F flags of dense depths.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from recsys.constraint.boost import Boost
from recsys.constraint.mask import MaskRoom, RowMask, all_flags, dead_states
from recsys.constraint.trie import NO_STATE, ItemTrie

T = TypeVar("T")


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

    @classmethod
    def of(
        cls,
        trie: ItemTrie,
        device: torch.device,
        rows: Sequence[NDArray[np.integer]],
        masks: Sequence[RowMask | None] | None = None,
    ) -> Excluded:
        """Find the dead states.

        Args:
            trie: the catalog.
            device: where the tensors go.
            rows: excluded rows of each request (`ItemTrie.excluded_rows`).
            masks: mask of each request; None allows everything.
        """
        dead = dead_states(trie, rows, masks)
        parents, places = [], []
        for depth, (states, dense) in enumerate(zip(dead, trie.dense, strict=True)):
            first, last = trie.depth_start[depth : depth + 2]
            real = states != NO_STATE
            child = states[real]
            starts = trie.first_child[first:last]
            above = np.searchsorted(starts, child.astype(starts.dtype), side="right") - 1
            parent, place = np.full(states.shape, -1, np.int64), np.zeros(states.shape, np.int64)
            parent[real] = above + first
            place[real] = child - starts[above] if dense is None else trie.symbol[child] - dense.low
            parents.append(parent)
            places.append(place)
        tensors = (
            tuple(torch.from_numpy(a).to(device) for a in arrays)
            for arrays in (dead, parents, places)
        )
        return cls(*tensors)

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

    @classmethod
    def of(
        cls, trie: ItemTrie, device: torch.device, masks: Sequence[RowMask | None]
    ) -> Allowed | None:
        """Put the requests' masks on a device; None where every request may get everything."""
        if not any(masks):
            return None
        room = next((m.room[0] for m in masks if m is not None and m.room is not None), None)
        distinct, line = _distinct(masks, device)
        if device.type == "cpu":
            parts = [_memory(trie, mask, room) for mask in distinct]
        else:  # copying is cheap there, and one look-up for all is worth it
            flags = [
                torch.from_numpy(all_flags(trie)) if m is None else m.to(device) for m in distinct
            ]
            joined = torch.cat([f.to(device) for f in flags])
            parts = [(joined, i * len(flags[0])) for i in range(len(flags))]
        memory = {id(flags): flags for flags, _ in parts}
        places = {key: i for i, key in enumerate(memory)}
        lines, starts = torch.tensor(
            [[places[id(flags)], start] for flags, start in parts], device=device
        ).T
        return cls(
            tuple(torch.as_tensor(flags) for flags in memory.values()),
            lines[line],
            starts[line, None],
            starts[line, None] + trie.padded_states,
            tuple(distinct),
        )

    def take(self, requests: torch.Tensor) -> Allowed:
        """The same for some requests of the batch."""
        line, start, dense = (part[requests] for part in (self.line, self.start, self.dense_start))
        return Allowed(self.alive, line, start, dense, self.masks)

    def runs(self, first: torch.Tensor, width: int, *, dense: bool = False) -> torch.Tensor:
        """(B, W, `width`) flags from each of the (B, W) states, or places of dense depths, on."""
        first = first + (self.dense_start if dense else self.start)
        if len(self.alive) == 1:
            return read_runs(self.alive[0], first, width)
        lines = zip(first, self.line.tolist(), strict=True)
        return torch.stack([read_runs(self.alive[line], f, width) for f, line in lines])


@dataclass(frozen=True, eq=False)
class Gains:
    """What each request's items gain, as the most below each state.

    Attributes:
        most: (S,) float32 each, one a distinct boost (`Boost`).
        line: (B,) int64 which of them is each request's.
    """

    most: tuple[torch.Tensor, ...]
    line: torch.Tensor

    @classmethod
    def of(
        cls, trie: ItemTrie, device: torch.device, boosts: Sequence[Boost | None]
    ) -> Gains | None:
        """Put the requests' boosts on a device; None where no request has any."""
        if not any(boosts):
            return None
        distinct, line = _distinct(boosts, device)
        nothing = torch.zeros(trie.num_states, device=device)
        return cls(tuple(nothing if b is None else b.to(device) for b in distinct), line)

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


def _memory(trie: ItemTrie, mask: RowMask | None, room: MaskRoom | None) -> tuple[Any, int]:
    """The array that a mask's flags lie in, and where they begin."""
    if mask is None:
        return (all_flags(trie) if room is None else room.flags), 0
    return (mask.alive, 0) if mask.room is None else (mask.room[0].flags, mask.room[1])


def _distinct(given: Sequence[T], device: torch.device) -> tuple[list[T], torch.Tensor]:
    """The different objects among those given, and (B,) the place of each one's."""
    distinct = {id(one): one for one in given}
    place = {key: i for i, key in enumerate(distinct)}
    return list(distinct.values()), torch.tensor([place[id(one)] for one in given], device=device)


def read_runs(table: torch.Tensor, first: torch.Tensor, width: int) -> torch.Tensor:
    """(..., width) runs of `table` from each of the places `first` on.

    A run is copied as a whole, which takes a quarter of the time of reading entry by entry.
    """
    rows: torch.Tensor = table.unfold(0, width, 1).index_select(0, first.flatten())
    return rows.view(*first.shape, width)


def look_up(table: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """`table[places]` as int64; on a CPU many times as fast as that."""
    return table.index_select(0, places.flatten()).view_as(places).long()
