r"""ItemTrie: the catalog's token sequences as flat arrays, built with NumPy in one sort.

Rows are the distinct sequences in lexicographic order. States are numbered breadth first, so

- states of one depth are contiguous and in row order: a smaller state is a lower row;
- the children of a state are contiguous: `first_child[s] .. first_child[s + 1]`;
- a state covers the rows `row_start[s] .. row_stop[s]`, and leaves are the rows themselves.

        root 0            depth 0     rows [0, 3)
        /    \
     5: 1    9: 2         depth 1     rows [0, 2)  [2, 3)
     /  \      \
   3: 3  7: 4   1: 5      depth 2     rows [0, 1)  [1, 2)  [2, 3)

A state is one integer, so copying or rewinding a beam costs nothing. Values that follow from other
arrays are not stored: ten million items take less than 40 bytes each. `DeviceTrie.of` makes the
tensors that decoding reads (`recsys.constraint.transitions`).
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from recsys.arguments import integers

NO_STATE = (1 << 31) - 1
"""The state of a beam that does not exist. It is greater than every state of a trie, so ascending
states stay in order, and every array of a trie is shorter than it."""
_TABLE = 1 << 24  # tokens below it are looked up in a table, larger ones are sorted


@dataclass(frozen=True, eq=False)
class ItemTrie:
    """A frozen trie over item token sequences; R rows, S states, I of them inner, L levels.

    >>> trie = ItemTrie.build([[5, 7], [9, 1], [5, 3]])
    >>> trie.rows.tolist()
    [[5, 3], [5, 7], [9, 1]]
    >>> trie.item_row.tolist()
    [1, 2, 0]
    >>> trie.num_states, trie.branching
    (6, (2, 2))

    Attributes:
        rows: (R, L) int16, or int32 for larger tokens: distinct sequences, sorted.
        row_items: (items,) int32 items grouped by row, ascending inside a row.
        row_item_start: (R + 1,) int32; where each row's items begin in `row_items`.
        item_row: (items,) int32 row of each item.
        alphabet: (A,) int64 tokens that occur, ascending.
        symbol: (S,) int16, or int32 for larger alphabets: index in `alphabet` of the token that
            leads into each state; 0 for the root, which has none.
        first_child: (I + 1,) int32; inner states come before the leaves.
        inner_start: (I,) int32 first row of each inner state.
        depth_start: (L + 2,) first state of each depth.
        branching: (L,) largest number of children of a state, by depth of the state.
    """

    rows: NDArray[np.signedinteger]
    row_items: NDArray[np.int32]
    row_item_start: NDArray[np.int32]
    item_row: NDArray[np.int32]
    alphabet: NDArray[np.int64]
    symbol: NDArray[np.signedinteger]
    first_child: NDArray[np.int32]
    inner_start: NDArray[np.int32]
    depth_start: tuple[int, ...]
    branching: tuple[int, ...]
    on_devices: dict[str, Any] = field(default_factory=dict, repr=False)

    @classmethod
    def build(cls, tokens: ArrayLike) -> ItemTrie:
        """Build from one token sequence per item.

        Args:
            tokens: (items, L) integers from 0 to 2^31 - 1 in any order; rows may repeat
                (collisions).

        Raises:
            ValueError: empty, not 2-D, not integers, or a token out of range.
        """
        tokens = np.asarray(tokens)
        if tokens.ndim != 2 or 0 in tokens.shape:
            raise ValueError(f"tokens must be (items, L) with items, L >= 1, got {tokens.shape}")
        if not np.issubdtype(tokens.dtype, np.integer):
            raise ValueError(f"tokens must be integers, got {tokens.dtype}")
        least, most = tokens.min(axis=0).tolist(), tokens.max(axis=0).tolist()
        if min(least) < 0 or max(most) > np.iinfo(np.int32).max:
            item, level = np.argwhere((tokens < 0) | (tokens > np.iinfo(np.int32).max))[0]
            raise ValueError(f"item {item} has token {tokens[item, level]} at level {level + 1}")
        order, columns = _sorted(tokens.astype(np.int64, copy=False), least, most)
        # new[d]: the prefix of length d + 1 of sorted sequence i differs from its predecessor's.
        new: list[NDArray[np.bool_]] = []
        for depth, column in enumerate(columns):
            differs = np.ones(len(column), np.bool_)
            np.not_equal(column[1:], column[:-1], out=differs[1:])
            new.append(differs if depth == 0 else differs | new[-1])
        item_row = np.empty(len(order), np.int32)
        item_row[order] = np.cumsum(new[-1], dtype=np.int32) - 1
        starts = np.flatnonzero(new[-1]).astype(np.int32)
        row_item_start = np.append(starts, np.int32(len(order)))
        if len(starts) < len(order):
            columns = [column[starts] for column in columns]
            new = [flags[starts] for flags in new]
        rows = np.stack(columns, axis=1)
        return cls(rows, order, row_item_start, item_row, *_number_states(columns, new))

    @property
    def num_rows(self) -> int:
        """Number of distinct sequences, R."""
        return len(self.rows)

    @property
    def num_items(self) -> int:
        """Number of items; items that share a row count separately."""
        return len(self.item_row)

    @property
    def num_levels(self) -> int:
        """Length of a sequence, L."""
        return int(self.rows.shape[1])

    @property
    def num_states(self) -> int:
        """Number of states S, including the root and the leaves."""
        return len(self.symbol)

    @property
    def nbytes(self) -> int:
        """Bytes of all stored arrays."""
        return sum(getattr(self, name).nbytes for name in _ARRAYS)

    @property
    def padded_states(self) -> int:
        """S + C: length of arrays from which C entries can be read at any state."""
        return self.num_states + max(self.branching)

    @cached_property
    def shared_rows(self) -> NDArray[np.intp]:
        """Rows that hold several items, ascending."""
        return np.flatnonzero(np.diff(self.row_item_start) > 1)

    @cached_property
    def row_start(self) -> NDArray[np.int32]:
        """(S,) first row of each state."""
        return np.concatenate([self.inner_start, np.arange(self.num_rows, dtype=np.int32)])

    @cached_property
    def row_stop(self) -> NDArray[np.int32]:
        """(S,) end of the row range of each state, exclusive."""
        stop = np.append(self.row_start[1:], np.int32(self.num_rows))
        stop[np.asarray(self.depth_start[1:]) - 1] = self.num_rows
        return stop

    def starts_at(self, depth: int) -> NDArray[np.int32]:
        """First row of each state at `depth`, 0 .. L - 1, in order."""
        return self.inner_start[self.depth_start[depth] : self.depth_start[depth + 1]]

    def width(self, depth: int, beams: int) -> int:
        """Upper bound on the live beams of a `beams`-wide search at `depth`."""
        width = 1
        for d in range(depth):
            states = self.depth_start[d + 2] - self.depth_start[d + 1]
            width = min(beams, width * self.branching[d], states)
        return width

    def items_of(self, row: int) -> NDArray[np.int32]:
        """Items that share row `row`, ascending."""
        return self.row_items[self.row_item_start[row] : self.row_item_start[row + 1]]

    def excluded_rows(
        self, items: ArrayLike, allowed: NDArray[np.bool_] | None = None
    ) -> NDArray[np.int32]:
        """Rows whose items are all excluded, ascending, each once.

        Args:
            items: excluded items, as dense indices.
            allowed: (items,) bool in the order of `row_items`, as `RowMask.items`; items that are
                not allowed count as excluded. None allows all.

        Raises:
            ValueError: items that are not integers, or are out of range.
        """
        items = integers("items", items)
        if len(items) and (items.min() < 0 or items.max() >= self.num_items):
            bad = items[(items < 0) | (items >= self.num_items)][0]
            raise ValueError(f"items has item {bad}; items lie in 0 .. {self.num_items - 1}")
        if allowed is None and self.num_rows == self.num_items:  # a row is an item
            return np.unique(self.item_row[items]).astype(np.int32)
        distinct = np.unique(items)
        rows = np.unique(self.item_row[distinct])
        owner, positions = self.places_of(rows)
        left = np.isin(self.row_items[positions], distinct, invert=True)
        if allowed is not None:
            left &= allowed[positions]
        return np.asarray(rows[np.bincount(owner[left], minlength=len(rows)) == 0], np.int32)

    def places_of(self, rows: NDArray[np.integer]) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
        """Positions in `row_items` of all items of some rows, row by row.

        Returns the index of its row in `rows` for each position, and the positions.
        """
        start = self.row_item_start[rows].astype(np.intp)
        sizes = self.row_item_start[rows + 1] - start
        owner = np.repeat(np.arange(len(rows)), sizes)
        ends = np.cumsum(sizes)
        return owner, start[owner] + np.arange(len(owner)) - (ends - sizes)[owner]

    def item_places(self, items: NDArray[np.integer]) -> NDArray[np.intp]:
        """Position in `row_items` of each of some items of the trie."""
        rows = self.item_row[items]
        if self.num_rows == len(self.row_items):  # a row is an item
            return np.asarray(rows, np.intp)
        which, positions = self.places_of(rows)
        return np.asarray(positions[self.row_items[positions] == items[which]], np.intp)

    def release(self) -> None:
        """Free the tensors, which hold a reference to the trie and so form a reference cycle."""
        self.on_devices.clear()


_ARRAYS = tuple(f.name for f in fields(ItemTrie) if str(f.type).startswith("NDArray"))


def _smallest(most: int) -> type[np.int16 | np.int32]:
    """The smallest integer type for 0 .. most."""
    return np.int16 if most <= np.iinfo(np.int16).max else np.int32


def _sorted(
    tokens: NDArray[Any], least: list[int], most: list[int]
) -> tuple[NDArray[np.int32], list[NDArray[Any]]]:
    """Stable sort of the sequences: the order, and each level in that order.

    If they fit, sequence and index are packed into one integer and the integers are sorted, which
    needs no indirect sort and no gathers.
    """
    dtype = _smallest(max(most))
    bits = [int(b - a).bit_length() for a, b in zip(least, most, strict=True)]
    index_bits = (len(tokens) - 1).bit_length()
    if sum(bits) + index_bits > 63:
        order = np.lexsort(tokens.T[::-1])
        return order.astype(np.int32), [column[order].astype(dtype) for column in tokens.T]
    key = np.zeros(len(tokens), np.int64)
    for column, a, width in zip(tokens.T, least, bits, strict=True):
        key <<= width
        key |= column - a
    key <<= index_bits
    key |= np.arange(len(tokens))
    key.sort()
    columns: list[NDArray[Any]] = []
    shift = index_bits + sum(bits)
    for a, width in zip(least, bits, strict=True):
        shift -= width
        columns.append((((key >> shift) & ((1 << width) - 1)) + a).astype(dtype))
    return (key & ((1 << index_bits) - 1)).astype(np.int32), columns


def _number_states(
    columns: list[NDArray[Any]], new: list[NDArray[np.bool_]]
) -> tuple[
    NDArray[np.int64],
    NDArray[np.signedinteger],
    NDArray[np.int32],
    NDArray[np.int32],
    tuple[int, ...],
    tuple[int, ...],
]:
    """Number the states of sorted distinct rows; `new[d][r]` marks a new prefix of length d + 1."""
    num_levels = len(columns)
    starts = [np.zeros(1, np.int32)]
    starts += [np.flatnonzero(flags).astype(np.int32) for flags in new]
    depth_start = np.concatenate([[0], np.cumsum([len(s) for s in starts])])
    if depth_start[-1] >= NO_STATE:
        raise ValueError(f"the catalog has {depth_start[-1]} prefixes; at most {NO_STATE - 1}")
    inner = depth_start[num_levels]
    first_child = np.full(inner + 1, depth_start[-1], np.int32)
    branching = []
    for depth in range(num_levels):
        # how many states of the next depth begin before each state's first row
        before = np.cumsum(new[depth], dtype=np.int32)[starts[depth]] - 1
        first_child[depth_start[depth] : depth_start[depth + 1]] = before + depth_start[depth + 1]
        branching.append(int(np.diff(before, append=len(starts[depth + 1])).max()))
    token = np.concatenate(
        [columns[0][:1], *(c[s] for c, s in zip(columns, starts[1:], strict=True))]
    )
    most = int(max(column.max() for column in columns))
    if most < _TABLE:
        used = np.zeros(most + 1, np.bool_)
        used[token] = True
        alphabet = np.flatnonzero(used)
        symbol_of = np.zeros(most + 1, _smallest(len(alphabet) - 1))
        symbol_of[alphabet] = np.arange(len(alphabet))
        symbol = symbol_of[token]
    else:
        alphabet, number = np.unique(token, return_inverse=True)
        symbol = number.astype(_smallest(len(alphabet) - 1))
    symbol[0] = 0
    return (
        alphabet.astype(np.int64),
        symbol,
        first_child,
        np.concatenate(starts[:-1]),
        tuple(int(d) for d in depth_start),
        tuple(branching),
    )
