"""ByteTrie: strings of bytes as a trie in flat arrays, built level by level with NumPy.

Nodes are numbered breadth first and in order of their strings, so the children of a node are
contiguous and the keys parent * 256 + byte ascend: a child is found by binary search, for many
nodes at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

NOWHERE = -1


@dataclass(frozen=True, eq=False)
class ByteTrie:
    """A trie of N nodes; node 0 is the root.

    Attributes:
        key: (N - 1,) int64 parent * 256 + byte of nodes 1 .. N - 1, ascending.
        first_child: (N + 1,) int64.
        depth_start: (deepest + 2,) first node of each depth.
        end: (strings,) int64 node at which each string ends.
    """

    key: NDArray[np.int64]
    first_child: NDArray[np.int64]
    depth_start: NDArray[np.int64]
    end: NDArray[np.int64]

    @classmethod
    def build(cls, strings: Sequence[bytes]) -> ByteTrie:
        """Build from strings in any order; equal strings end at the same node."""
        distinct = sorted(set(strings))
        lengths = np.asarray([len(s) for s in distinct], np.int64)
        start = np.cumsum(lengths) - lengths
        data = np.frombuffer(b"".join(distinct), np.uint8)
        node = np.zeros(len(distinct), np.int64)  # of each string's first `depth` bytes
        rows = np.flatnonzero(lengths > 0)  # strings that go on
        keys, depth_start, nodes = [np.zeros(0, np.int64)], [0, 1], 1
        depth = 0
        while len(rows):
            key = node[rows] * 256 + data[start[rows] + depth]
            new = np.append(True, key[1:] != key[:-1])
            node[rows] = nodes + np.cumsum(new) - 1
            keys.append(key[new])
            nodes += int(new.sum())
            depth_start.append(nodes)
            depth += 1
            rows = rows[lengths[rows] > depth]
        key = np.concatenate(keys)
        first_child = 1 + np.searchsorted(key, np.arange(nodes + 1) * 256)
        number = {string: i for i, string in enumerate(distinct)}
        end = node[np.asarray([number[s] for s in strings], np.int64)]
        return cls(key, first_child, np.asarray(depth_start), end)

    @property
    def num_nodes(self) -> int:
        """Number of nodes, N."""
        return len(self.key) + 1

    def child(self, nodes: NDArray[np.int64], byte: NDArray[np.int64]) -> NDArray[np.int64]:
        """(n,) child of each node by byte, or `NOWHERE`; nodes may be `NOWHERE`, too."""
        key = nodes * 256 + byte
        position = np.searchsorted(self.key, key)
        exists = position < len(self.key)
        exists[exists] = self.key[position[exists]] == key[exists]
        return np.where(exists, position + 1, NOWHERE)

    def children(
        self, nodes: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """All children of (n,) nodes: index of the parent in `nodes`, child, byte."""
        first = self.first_child[nodes]
        parent, child = spread(first, self.first_child[nodes + 1])
        return parent, child, self.key[child - 1] & 255


def spread(
    start: NDArray[np.int64], stop: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Index of the range, and value, of all values of (n,) ranges in order."""
    count = stop - start
    owner = np.repeat(np.arange(len(start)), count)
    before = np.cumsum(count) - count
    return owner, np.arange(len(owner)) - before[owner] + start[owner]
