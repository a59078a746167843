"""The trie as tensors: children of states as batched gathers. No Python per beam, no host sync.

Shapes: B requests, W states a request, C the most children at that depth, E excluded rows, D dead
states, F filters. Arrays that are looked things up in are as small as they can be; places in them
are int64, which PyTorch indexes fastest with.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch

from recsys.constraint.mask import dead_states

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

    from recsys.constraint.mask import RowMask
    from recsys.constraint.trie import ItemTrie


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
        alive: (F, S) bool, one line a distinct filter.
        line: (B,) int64 each request's.
    """

    alive: torch.Tensor
    line: torch.Tensor

    def take(self, requests: torch.Tensor) -> Allowed:
        """The same for some requests of the batch."""
        return Allowed(self.alive, self.line[requests])

    def at(self, states: torch.Tensor) -> torch.Tensor:
        """(B, W, C) bool, whether each of the states holds something allowed."""
        if len(self.alive) > 1:
            states = states + (self.line * self.alive.shape[1])[:, None, None]
        return self.alive.flatten().index_select(0, states.flatten()).view_as(states)


@dataclass(frozen=True, eq=False)
class DeviceTrie:
    """`ItemTrie` on a device; on a CPU the tensors share its memory.

    Attributes:
        source: the arrays it was made from (sizes and depths are read from there, on the host).
        alphabet: (A,) int64 tokens that occur in the trie, ascending; all that a step looks at.
        symbol: (S,) int16 or int32 place in `alphabet` of the token that leads into each state.
        first_child: (I + 1,) int32; the I inner states come before the leaves.
        row_start: (I,) int32.
        rows: (R, L) int16 or int32.
    """

    source: ItemTrie
    alphabet: torch.Tensor
    symbol: torch.Tensor
    first_child: torch.Tensor
    row_start: torch.Tensor
    rows: torch.Tensor

    @classmethod
    def of(cls, trie: ItemTrie, device: str | torch.device) -> DeviceTrie:
        """The arrays of `trie` on `device`."""
        arrays = (trie.alphabet, trie.symbol, trie.first_child, trie.inner_start, trie.rows)
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
        states = states.unsqueeze(-1)
        first = _look_up(self.first_child, states)  # (B, W, 1)
        count = _look_up(self.first_child, states + 1) - first
        place = torch.arange(self.source.branching[depth], device=states.device)
        alive = place < count
        child = first + torch.minimum(place, count - 1)  # (B, W, C)
        if allowed is not None:
            alive &= allowed.at(child)
        if excluded is not None and excluded.dead[depth].shape[1]:
            dead, flat = excluded.dead[depth], child.flatten(1)
            nearest = torch.searchsorted(dead, flat).clamp_(max=dead.shape[1] - 1)
            alive &= (dead.gather(1, nearest) != flat).view_as(child)
        return Children(child, _look_up(self.symbol, child), alive)

    def tokens_of(self, states: torch.Tensor) -> torch.Tensor:
        """Token that leads into each state; any for the root."""
        return self.alphabet[_look_up(self.symbol, states)]

    def rows_of(self, leaves: torch.Tensor) -> torch.Tensor:
        """Row of each leaf; 0 for other states."""
        return (leaves - self.source.depth_start[-2]).clamp(min=0)

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
        distinct = {id(mask): mask for mask in masks}
        if not any(distinct.values()):
            return None
        line = {key: place for place, key in enumerate(distinct)}
        alive = [
            torch.ones(self.source.num_states, dtype=torch.bool, device=self.device)
            if mask is None
            else mask.to(self.device)
            for mask in distinct.values()
        ]
        return Allowed(
            torch.stack(alive) if len(alive) > 1 else alive[0][None],
            torch.tensor([line[id(mask)] for mask in masks], device=self.device),
        )


def _look_up(table: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """`table[places]` as int64; on a CPU many times as fast as that."""
    return table.index_select(0, places.flatten()).view_as(places).long()
