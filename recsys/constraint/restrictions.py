"""Restrictions of the requests of a batch, as tensors: excluded rows, masks and boosts.

Shapes: B requests, W states of a request, C candidates of a state, D dead states; a trie has S
states.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from recsys.constraint.boost import Boost
from recsys.constraint.mask import RowMask, all_flags
from recsys.constraint.trie import NO_STATE, ItemTrie
from recsys.transfers import Upload

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Excluded:
    """What each request must not get, as the states below which everything is excluded.

    Attributes:
        dead: one (B, D) int64 for each depth 1 .. L, ascending, padded with `NO_STATE`; D may be 0.
    """

    dead: tuple[torch.Tensor, ...]

    @classmethod
    def of(
        cls,
        trie: ItemTrie,
        upload: Upload,
        rows: Sequence[NDArray[np.integer]],
        masks: Sequence[RowMask | None] | None = None,
    ) -> Excluded:
        """Find the dead states of requests with these excluded rows and masks (None: all)."""
        return cls(tuple(map(upload.add, dead_states(trie, rows, masks))))

    def take(self, requests: torch.Tensor) -> Excluded:
        """Select some requests of the batch."""
        return Excluded(tuple(states[requests] for states in self.dead))


@dataclass(frozen=True, eq=False)
class Allowed:
    """What each request may get, as flags of the states with an allowed row below.

    Attributes:
        alive: arrays of (n (S + C),) bool, each with the flags of n masks (`RowMask.alive`).
        line: (B,) int64 index in `alive` of the array with each request's mask.
        start: (B, 1) int64 start of the flags of its states there.
        masks: the mask of each request of the original batch.
    """

    alive: tuple[torch.Tensor, ...]
    line: torch.Tensor
    start: torch.Tensor
    masks: tuple[RowMask | None, ...]

    @classmethod
    def of(cls, trie: ItemTrie, upload: Upload, masks: Sequence[RowMask | None]) -> Allowed | None:
        """Put the requests' masks on a device; None where every request may get everything."""
        if not any(masks):
            return None
        distinct, line = _distinct(masks)
        start, device = np.zeros_like(line), upload.device
        if device.type == "cpu":
            arrays = (all_flags(trie) if mask is None else mask.alive for mask in distinct)
            alive = tuple(torch.from_numpy(array) for array in arrays)
        else:  # copying is cheap there and allows a single look-up
            flags = [_everything(trie, device) if m is None else m.to(device) for m in distinct]
            alive = (torch.cat(flags) if len(flags) > 1 else flags[0],)
            start, line = line * len(flags[0]), start
        return cls(alive, upload.add(line), upload.add(start[:, None]), tuple(masks))

    def take(self, requests: torch.Tensor) -> Allowed:
        """Select some requests of the batch."""
        return Allowed(self.alive, self.line[requests], self.start[requests], self.masks)

    def runs(self, first: torch.Tensor, width: int) -> torch.Tensor:
        """(B, W, `width`) flags, starting at each of (B, W) states."""
        first = first + self.start
        if len(self.alive) == 1:
            return read_runs(self.alive[0], first, width)
        lines = zip(first, self.line.tolist(), strict=True)
        return torch.stack([read_runs(self.alive[line], f, width) for f, line in lines])


@dataclass(frozen=True, eq=False)
class Gains:
    """Boosts of the requests, as the largest boost below each state.

    Attributes:
        most: (S,) float32 of each distinct boost (`Boost.most`).
        line: (B,) int64 index in `most` of each request's boost.
    """

    most: tuple[torch.Tensor, ...]
    line: torch.Tensor

    @classmethod
    def of(cls, trie: ItemTrie, upload: Upload, boosts: Sequence[Boost | None]) -> Gains | None:
        """Put the requests' boosts on a device; None where no request has any."""
        if not any(boosts):
            return None
        distinct, line = _distinct(boosts)
        nothing = torch.zeros(trie.num_states, device=upload.device)
        most = tuple(nothing if b is None else b.to(upload.device) for b in distinct)
        return cls(most, upload.add(line))

    def take(self, requests: torch.Tensor) -> Gains:
        """Select some requests of the batch."""
        return Gains(self.most, self.line[requests])

    def scores(self, log_probs: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        """(B, W, C) what states with these log-probabilities are ranked by."""
        return log_probs + self.at(states)

    def at(self, states: torch.Tensor) -> torch.Tensor:
        """(B, W, C) boost at each of (B, W, C) states; 0 for `NO_STATE`."""
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
        positions = states + (self.line * len(self.most[0]))[:, None, None]
        return torch.cat(self.most).index_select(0, positions.flatten()).view_as(positions)


def dead_states(
    trie: ItemTrie,
    excluded: Sequence[NDArray[np.integer]],
    masks: Sequence[RowMask | None] | None = None,
) -> list[NDArray[np.int64]]:
    """States below which all allowed rows are excluded: one (B, D) for each depth 1 .. L.

    A state is dead if as many excluded rows lie below it as allowed ones. Excluded rows that the
    mask (None for all rows) does not allow are not counted. States ascend, padded with `NO_STATE`.
    """
    batch, end = len(excluded), trie.num_states  # a key is (request, state) as one integer
    request = np.repeat(np.arange(batch), [len(rows) for rows in excluded])
    row = np.concatenate([np.zeros(0, np.int64), *excluded]).astype(np.int64)
    request, row = np.divmod(np.unique(request * trie.num_rows + row), trie.num_rows)
    groups = []
    if masks is not None:
        for mask in {id(m): m for m in masks if m is not None}.values():
            theirs = np.array([other is mask for other in masks])
            groups.append((mask, theirs))
            keep = ~theirs[request] | (mask.before[row + 1] > mask.before[row])
            request, row = request[keep], row[keep]
    dead = []
    for depth in range(1, trie.num_levels + 1):
        below: NDArray[np.int64] = row
        start: NDArray[np.integer] = row
        stop: NDArray[np.integer] = row + 1
        if depth < trie.num_levels:
            starts = trie.starts_at(depth)
            # searchsorted would convert all of `starts` to another type
            below = np.searchsorted(starts, row.astype(starts.dtype), side="right") - 1
            start, following = starts[below], np.minimum(below + 1, len(starts) - 1)
            stop = np.where(following > below, starts[following], trie.num_rows)
        count = np.asarray(stop - start)
        for mask, theirs in groups:
            here = theirs[request]
            count = np.where(here, mask.before[stop] - mask.before[start], count)
        state = trie.depth_start[depth] + below
        key, first, counts = np.unique(request * end + state, return_index=True, return_counts=True)
        key = key[counts == count[first]]
        owner, state = np.divmod(key, end)
        sizes = np.bincount(owner, minlength=batch)
        padded = np.full((batch, int(sizes.max(initial=0))), NO_STATE, np.int64)
        padded[np.arange(padded.shape[1]) < sizes[:, None]] = state
        dead.append(padded)
    return dead


def _everything(trie: ItemTrie, device: torch.device) -> torch.Tensor:
    """`all_flags` on a device, copied once and kept."""
    key = f"{device}, all flags"
    if key not in trie.on_devices:
        trie.on_devices[key] = torch.from_numpy(all_flags(trie)).to(device)
    cached: torch.Tensor = trie.on_devices[key]
    return cached


def _distinct(values: Sequence[T]) -> tuple[list[T], NDArray[np.int64]]:
    """The distinct objects among those given, and the (B,) index of each among them."""
    distinct = {id(value): value for value in values}
    number = {key: i for i, key in enumerate(distinct)}
    return list(distinct.values()), np.array([number[id(value)] for value in values], np.int64)


def read_runs(table: torch.Tensor, first: torch.Tensor, width: int) -> torch.Tensor:
    """(..., width) runs of `table`, starting at each index in `first`.

    A run is copied as a whole, in a quarter of the time of a gather of single entries.
    """
    rows: torch.Tensor = table.unfold(0, width, 1).index_select(0, first.flatten())
    return rows.view(*first.shape, width)


def look_up(table: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """`table[places]` as int64, but many times faster on a CPU."""
    return table.index_select(0, positions.flatten()).view_as(positions).long()
