"""MinimalTrie: the trie with equal ends shared, an automaton, where that saves memory.

States of the trie from which the same sequences follow are one node. A node does not say which row
a search is in, so each edge holds how many rows lie below its smaller siblings: summed up on the
way, they are the row's number. So a decoding state is the number of its first row and a node, in
one integer, and filters and exclusions are counts over a range of rows. Rows are the
trie's, but their tokens are not stored: they are walked to.

It pays where many sequences end alike, as those of products in the same variants do. Residual codes
of real catalogues share little: a tenth or so of a trie's bytes, which a trie's faster steps are
worth. `statistics` says what it takes, and the trie's says what that does. Beam search decodes over
it; speculation, boosts and given candidates want the trie. NumPy, but for `to`.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import numpy as np

from recsys.constraint.mask import RowMask

if TYPE_CHECKING:
    import torch
    from numpy.typing import ArrayLike, NDArray

    from recsys.constraint.transitions import DeviceTrie
    from recsys.constraint.trie import ItemTrie


@dataclass(frozen=True, eq=False)
class MinimalTrie:
    """A trie whose states are shared; R rows, N nodes, E edges.

    Attributes:
        row_items: as `ItemTrie.row_items`.
        row_item_start: as `ItemTrie.row_item_start`.
        item_row: as `ItemTrie.item_row`.
        alphabet: as `ItemTrie.alphabet`.
        first_edge: (N + 1,) int32; the edges of a node lie side by side, by rising symbol. Node 0
            is the root.
        symbol: (E,) int16 or int32 place in `alphabet` of the token that each edge takes.
        target: (E,) int32 node that it leads to.
        before: (E,) int32 rows below the edges of the same node that come before it.
        rows_below: (N,) int32 rows that a node's sequences are.
        ended: (N,) bool, whether `end` leads to it: what follows costs nothing.
        depth_nodes: (L + 1,) nodes of each depth.
        depth_states: (L + 1,) states that the trie has there.
        branching: (L,) as `ItemTrie.branching`.
        end: as `ItemTrie.end`.
    """

    row_items: NDArray[np.int32]
    row_item_start: NDArray[np.int32]
    item_row: NDArray[np.int32]
    alphabet: NDArray[np.int64]
    first_edge: NDArray[np.int32]
    symbol: NDArray[np.signedinteger]
    target: NDArray[np.int32]
    before: NDArray[np.int32]
    rows_below: NDArray[np.int32]
    ended: NDArray[np.bool_]
    depth_nodes: tuple[int, ...]
    depth_states: tuple[int, ...]
    branching: tuple[int, ...]
    end: int | None = None

    @classmethod
    def of(cls, trie: ItemTrie) -> MinimalTrie:
        """Share what ends alike, from the leaves up: states of one depth with equal edges."""
        ended = np.zeros(trie.num_states, np.bool_)
        if trie.end is not None:
            ended = trie.token == trie.end
        # leaves differ in nothing but how they were reached
        kinds, node = np.unique(ended[trie.depth_start[-2] :], return_inverse=True)
        rows = np.ones(len(node), np.int64)  # below each state of the depth
        none, count = np.zeros(0, np.int64), trie.num_states
        levels: list[tuple[NDArray[Any], ...]]
        levels = [(np.zeros(len(kinds), int), none, none, none, rows[: len(kinds)], kinds)]
        for depth in reversed(range(trie.num_levels)):
            count -= len(levels[0][0])  # an offset that leaves room for all; it is closed below
            first, last, behind = trie.depth_start[depth : depth + 3]
            starts = trie.first_child[first : last + 1] - last
            symbol, flags = trie.symbol[last:behind], ended[first:last]
            chosen, kind = _equal_runs((symbol, node), starts, flags)
            total = np.append(0, np.cumsum(rows))
            place, owner = _places(starts, chosen)
            before = total[place] - total[starts[chosen]][owner]
            rows = total[starts[1:]] - total[starts[:-1]]
            edges = symbol[place], node[place] + count, before
            levels.insert(0, (np.diff(starts)[chosen], *edges, rows[chosen], flags[chosen]))
            node = kind
        nodes = [len(level[0]) for level in levels]
        joined: list[NDArray[Any]] = [np.concatenate(p) for p in zip(*levels, strict=True)]
        counts, symbol, target, before, rows, ended = joined
        return cls(
            trie.row_items,
            trie.row_item_start,
            trie.item_row,
            trie.alphabet,
            np.append(0, np.cumsum(counts)).astype(np.int32),
            symbol.astype(trie.symbol.dtype),
            (target - (trie.num_states - sum(nodes))).astype(np.int32),
            before.astype(np.int32),
            rows.astype(np.int32),
            ended,
            tuple(nodes),
            tuple(np.diff(trie.depth_start).tolist()),
            trie.branching,
            trie.end,
        )

    @property
    def num_rows(self) -> int:
        """R."""
        return len(self.row_item_start) - 1

    @property
    def num_levels(self) -> int:
        """L."""
        return len(self.branching)

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        arrays = (getattr(self, f.name) for f in fields(self))
        return sum(array.nbytes for array in arrays if isinstance(array, np.ndarray))

    def width(self, depth: int, beams: int) -> int:
        """As `ItemTrie.width`."""
        width = 1
        for d in range(depth):
            width = min(beams, width * self.branching[d], self.depth_states[d + 1])
        return width

    def mask(self, items: NDArray[np.bool_]) -> RowMask:
        """What a filter allows, by place in `row_items`, for decoding over this automaton only."""
        rows = items
        if self.num_rows < len(items):
            rows = np.logical_or.reduceat(items, self.row_item_start[:-1])
        return RowMask(items, rows, rows)

    def statistics(self) -> dict[str, Any]:
        """What is shared, by depth, and bytes."""
        pairs = zip(self.depth_nodes, self.depth_states, strict=True)
        levels = [{"nodes": nodes, "states": states} for nodes, states in pairs]
        edges = len(self.target)
        nodes = len(self.rows_below)
        return {"nodes": nodes, "edges": edges, "bytes": self.nbytes, "levels": levels}

    def sequences(self, rows: ArrayLike) -> NDArray[np.int64]:
        """(n, L) tokens of (n,) rows."""
        rank = np.array(rows, np.int64)
        node, found = np.zeros(len(rank), np.int64), []
        most = np.arange(max(self.branching))
        for _ in range(self.num_levels):
            first, last = self.first_edge[node], self.first_edge[node + 1]
            edges = np.minimum(first[:, None] + most, last[:, None] - 1)
            edge = first + (self.before[edges] <= rank[:, None]).sum(1) - 1
            edge = np.minimum(edge, last - 1)  # the last one was counted for what is not there
            found.append(self.alphabet[self.symbol[edge]])
            rank, node = rank - self.before[edge], self.target[edge].astype(np.int64)
        return np.stack(found, axis=1)

    def to(self, device: str | torch.device = "cpu") -> DeviceTrie:
        """What beam search looks at, as tensors; it stands in for the trie's."""
        from recsys.constraint.minimal_transitions import DeviceMinimalTrie

        return DeviceMinimalTrie.of(self, device)


def _places(starts: NDArray[np.integer], runs: NDArray[np.intp]) -> tuple[NDArray[np.intp], ...]:
    """Places of all that is in some runs, run by run, and which of them each is in."""
    sizes = np.diff(starts)[runs]
    owner = np.repeat(np.arange(len(runs)), sizes)
    within = np.arange(len(owner)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    return starts[runs].astype(np.intp)[owner] + within, owner


def _equal_runs(
    values: tuple[NDArray[np.integer], ...],
    starts: NDArray[np.integer],
    flags: NDArray[np.bool_],
) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Which runs of values are equal.

    Runs are told apart by a random sum of what is in them; then the values themselves are compared,
    and sums are drawn again in the case, which nobody will see, that different runs had the same.

    Args:
        values: arrays side by side; no run is empty.
        starts: (n + 1,) where runs begin.
        flags: (n,) something else that equal runs have in common.

    Returns:
        One run of each kind, the first, and (n,) the kind of every run.
    """
    rng = np.random.default_rng(0)
    while True:
        odd = rng.integers(0, 1 << 62, (2, len(values)), dtype=np.uint64) * 2 + 1
        mixed = np.zeros(len(values[0]), np.uint64)
        for value, first, second in zip(values, *odd, strict=True):
            mixed = (mixed ^ (value.astype(np.uint64) + np.uint64(1)) * first) * second
            mixed ^= mixed >> np.uint64(29)
        sums = np.add.reduceat(mixed, starts[:-1]) * 2 + flags
        _, chosen, kind = np.unique(sums, return_index=True, return_inverse=True)
        order = np.argsort(chosen)  # kinds by their first run
        place = np.empty(len(order), np.intp)
        place[order] = np.arange(len(order))
        chosen, kind = chosen[order], place[kind]
        like, sizes = chosen[kind], np.diff(starts)
        if (sizes == sizes[like]).all() and (flags == flags[like]).all():
            mine, _ = _places(starts, np.arange(len(sizes)))
            other, _ = _places(starts, like)
            if all((value[mine] == value[other]).all() for value in values):
                return chosen, kind
