"""Row masks: which part of a trie a request may reach, by what it may get and what it must not.

With the number of allowed rows before each row, a state is alive iff its range holds one; a few
excluded rows are counted against that, without touching the sums (DESIGN 4.2). NumPy, but for `to`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from numpy.typing import NDArray

    from recsys.constraint.trie import ItemTrie


@dataclass(frozen=True, eq=False)
class RowMask:
    """The items that a filter allows, as a trie sees them.

    Attributes:
        items: (items,) bool, by place in `ItemTrie.row_items`.
        before: (R + 1,) int32 how many of the rows before each one have an allowed item.
        alive: (S + C,) bool, the states that have one below; False behind the last state, so that
            C children may be read from any.
    """

    items: NDArray[np.bool_]
    before: NDArray[np.int32]
    alive: NDArray[np.bool_]
    _devices: dict[str, torch.Tensor] = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, trie: ItemTrie, items: NDArray[np.bool_]) -> RowMask:
        """From (items,) bool, by place in `trie.row_items`."""
        rows = items
        if trie.num_rows < trie.num_items:
            rows = np.diff(_running(items)[trie.row_item_start]) > 0
        before = _running(rows)
        alive = np.zeros(trie.num_states + max(trie.branching), np.bool_)
        for depth in range(trie.num_levels):
            first, last = trie.depth_start[depth : depth + 2]
            counts = before.take(trie.starts_at(depth))
            np.not_equal(counts[1:], counts[:-1], out=alive[first : last - 1])
            alive[last - 1] = before[-1] != counts[-1]
        alive[trie.depth_start[-2] : trie.num_states] = rows
        return cls(items, before, alive)

    def to(self, device: str | torch.device) -> torch.Tensor:
        """`alive` on `device`; copied once a device and kept."""
        import torch

        key = str(device)
        if key not in self._devices:
            self._devices[key] = torch.from_numpy(self.alive).to(device)
        return self._devices[key]

    @cached_property
    def eligible(self) -> int:
        """How many items are allowed."""
        return int(np.count_nonzero(self.items))

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return self.items.nbytes + self.before.nbytes + self.alive.nbytes


def dead_states(
    trie: ItemTrie,
    excluded: Sequence[NDArray[np.integer]],
    masks: Sequence[RowMask | None] | None = None,
) -> list[NDArray[np.int64]]:
    """States that hold nothing but excluded rows: one (B, D) a depth 1 .. L.

    A state is dead where as many excluded rows lie below it as allowed ones; excluded rows that are
    not allowed anyway count as neither.

    Args:
        trie: the catalogue.
        excluded: rows of each request; B of them.
        masks: what each request may get; None for everything.

    Returns:
        Ascending states, padded behind the last one.
    """
    batch, end = len(excluded), trie.num_states
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
            # of the same type, or all of `starts` would be converted
            below = np.searchsorted(starts, row.astype(starts.dtype), side="right") - 1
            start, following = starts[below], np.minimum(below + 1, len(starts) - 1)
            stop = np.where(following > below, starts[following], trie.num_rows)
        held = np.asarray(stop - start)
        for mask, theirs in groups:
            here = theirs[request]
            held = np.where(here, mask.before[stop] - mask.before[start], held)
        state = trie.depth_start[depth] + below
        key, first, counts = np.unique(request * end + state, return_index=True, return_counts=True)
        key = key[counts == held[first]]
        owner, state = np.divmod(key, end)
        sizes = np.bincount(owner, minlength=batch)
        padded = np.full((batch, int(sizes.max(initial=0))), end, np.int64)
        padded[np.arange(padded.shape[1]) < sizes[:, None]] = state
        dead.append(padded)
    return dead


def _running(flags: NDArray[np.bool_]) -> NDArray[np.int32]:
    """How many are true before each place, and in all."""
    total = np.zeros(len(flags) + 1, np.int32)
    np.cumsum(flags, dtype=np.int32, out=total[1:])
    return total
