r"""ItemTrie: the catalogue's token sequences as flat arrays, built with NumPy in one sort.

Rows are the distinct sequences in lexicographic order. States are numbered breadth first, so

- states of one depth are contiguous and in row order: a smaller state is a lower row;
- the children of a state are contiguous: `first_child[s] .. first_child[s + 1]`;
- a state covers the rows `row_start[s] .. row_stop[s]`.

        root 0            depth 0     rows [0, 3)
        /    \
     5: 1    9: 2         depth 1     rows [0, 2)  [2, 3)
     /  \      \
   3: 3  7: 4   1: 5      depth 2     rows [0, 1)  [1, 2)  [2, 3)

A state is one integer, so forking a beam or rewinding it costs nothing. Torch is not needed here;
`to` makes the tensors that decoding reads (`recsys.constraint.transitions`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import torch
    from numpy.typing import ArrayLike, NDArray

    from recsys.constraint.transitions import DeviceTrie


@dataclass(frozen=True, eq=False)
class ItemTrie:
    """A frozen trie over item token sequences; R rows, S states, L levels.

    Attributes:
        rows: (R, L) int32 distinct token sequences, lexicographically sorted.
        row_items: (items,) int32 items grouped by row, ascending inside a row.
        row_item_start: (R + 1,) int64; where each row's items begin in `row_items`.
        item_row: (items,) int32 row of each item.
        token: (S,) int32 token that leads into each state; -1 for the root.
        first_child: (S + 1,) int32.
        row_start: (S,) int32.
        row_stop: (S,) int32.
        depth_start: (L + 2,) first state of each depth.
        branching: (L,) most children of any state, by depth of the parent.
    """

    rows: NDArray[np.int32]
    row_items: NDArray[np.int32]
    row_item_start: NDArray[np.int64]
    item_row: NDArray[np.int32]
    token: NDArray[np.int32]
    first_child: NDArray[np.int32]
    row_start: NDArray[np.int32]
    row_stop: NDArray[np.int32]
    depth_start: tuple[int, ...]
    branching: tuple[int, ...]
    _devices: dict[str, DeviceTrie] = field(default_factory=dict, repr=False)

    @classmethod
    def build(cls, tokens: ArrayLike) -> ItemTrie:
        """Build from one token sequence an item.

        Args:
            tokens: (items, L) non-negative integers in any order; rows may repeat (collisions).

        Raises:
            ValueError: empty, not 2-D, not integers, or a negative token.
        """
        tokens = np.asarray(tokens)
        if tokens.ndim != 2 or 0 in tokens.shape:
            raise ValueError(f"tokens must be (items, L) with items, L >= 1, got {tokens.shape}")
        if not np.issubdtype(tokens.dtype, np.integer):
            raise ValueError(f"tokens must be integers, got {tokens.dtype}")
        if tokens.min() < 0:
            item, level = np.argwhere(tokens < 0)[0]
            raise ValueError(f"item {item} has token {tokens[item, level]} at level {level + 1}")
        tokens = tokens.astype(np.int32, copy=False)
        order = _lexicographic_order(tokens)
        ordered = tokens[order]
        # new[i, d]: the prefix of length d + 1 of sorted sequence i differs from its predecessor's.
        new = np.ones(ordered.shape, np.bool_)
        np.logical_or.accumulate(ordered[1:] != ordered[:-1], axis=1, out=new[1:])
        rows = np.ascontiguousarray(ordered[new[:, -1]])
        starts = np.flatnonzero(new[:, -1])
        row_item_start = np.append(starts, len(order)).astype(np.int64)
        item_row = np.empty(len(order), np.int32)
        item_row[order] = np.cumsum(new[:, -1]) - 1
        return cls(
            rows,
            order.astype(np.int32),
            row_item_start,
            item_row,
            *_number_states(rows, new[new[:, -1]]),
        )

    @property
    def num_rows(self) -> int:
        """R, distinct sequences."""
        return len(self.rows)

    @property
    def num_items(self) -> int:
        """Items, colliding ones counted each."""
        return len(self.item_row)

    @property
    def num_levels(self) -> int:
        """L."""
        return int(self.rows.shape[1])

    @property
    def num_states(self) -> int:
        """S, the root and the leaves included."""
        return len(self.token)

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return sum(v.nbytes for v in vars(self).values() if isinstance(v, np.ndarray))

    def width(self, depth: int, beams: int) -> int:
        """Most beams that a `beams`-wide search can keep at `depth`; known up front."""
        width = 1
        for d in range(depth):
            states = self.depth_start[d + 2] - self.depth_start[d + 1]
            width = min(beams, width * self.branching[d], states)
        return width

    def items_of(self, row: int) -> NDArray[np.int32]:
        """Items that share row `row`, ascending."""
        return self.row_items[self.row_item_start[row] : self.row_item_start[row + 1]]

    def excluded_rows(self, items: ArrayLike) -> NDArray[np.int32]:
        """Rows all of whose items are among `items`, ascending, each once.

        A leaf that still has an allowed item stays alive, whatever else it holds.
        """
        distinct = np.unique(np.asarray(items, np.int64))
        rows, counts = np.unique(self.item_row[distinct], return_counts=True)
        sizes = self.row_item_start[rows + 1] - self.row_item_start[rows]
        return np.asarray(rows[counts == sizes], np.int32)

    def statistics(self) -> dict[str, Any]:
        """Shape of the trie per depth: states, mean and largest branching, single-child share."""
        children = np.diff(self.first_child)
        levels = []
        for depth in range(self.num_levels):
            here = children[self.depth_start[depth] : self.depth_start[depth + 1]]
            levels.append(
                {
                    "level": depth + 1,
                    "states": self.depth_start[depth + 2] - self.depth_start[depth + 1],
                    "branching_mean": float(here.mean()),
                    "branching_max": int(here.max()),
                    "single_child_share": float((here == 1).mean()),
                }
            )
        return {
            "items": self.num_items,
            "rows": self.num_rows,
            "states": self.num_states,
            "largest_leaf": int(np.diff(self.row_item_start).max()),
            "bytes": self.nbytes,
            "levels": levels,
        }

    def to(self, device: str | torch.device = "cpu") -> DeviceTrie:
        """The trie as tensors on `device`; made once a device and kept."""
        from recsys.constraint.transitions import DeviceTrie

        key = str(device)
        if key not in self._devices:
            self._devices[key] = DeviceTrie.of(self, key)
        return self._devices[key]


def _lexicographic_order(tokens: NDArray[np.int32]) -> NDArray[np.int64]:
    """Stable order of the rows; one integer sort where the levels fit into 63 bits."""
    bits = [int(column.max()).bit_length() or 1 for column in tokens.T]
    if sum(bits) > 63:
        return np.lexsort(tokens.T[::-1])
    key = np.zeros(len(tokens), np.int64)
    for column, width in zip(tokens.T, bits, strict=True):
        key = (key << width) | column
    return np.argsort(key, kind="stable")


def _number_states(
    rows: NDArray[np.int32], new: NDArray[np.bool_]
) -> tuple[
    NDArray[np.int32],
    NDArray[np.int32],
    NDArray[np.int32],
    NDArray[np.int32],
    tuple[int, ...],
    tuple[int, ...],
]:
    """States of sorted distinct rows; `new[r, d]` marks a new prefix of length d + 1."""
    num_rows, num_levels = rows.shape
    row_starts = [np.zeros(1, np.int64)] + [np.flatnonzero(new[:, d]) for d in range(num_levels)]
    counts = [len(starts) for starts in row_starts]
    depth_start = np.concatenate([[0], np.cumsum(counts)])
    token = np.full(depth_start[-1], -1, np.int32)
    first_child = np.full(depth_start[-1] + 1, depth_start[-1], np.int32)
    row_stop = np.full(depth_start[-1], num_rows, np.int32)
    branching = []
    for depth, starts in enumerate(row_starts):
        here = slice(depth_start[depth], depth_start[depth + 1])
        row_stop[here][:-1] = starts[1:]
        if depth > 0:
            token[here] = rows[starts, depth - 1]
        if depth < num_levels:
            below = np.searchsorted(row_starts[depth + 1], starts)
            first_child[here] = depth_start[depth + 1] + below
            branching.append(int(np.diff(np.append(below, counts[depth + 1])).max()))
    return (
        token,
        first_child,
        np.concatenate(row_starts).astype(np.int32),
        row_stop,
        tuple(int(d) for d in depth_start),
        tuple(branching),
    )
