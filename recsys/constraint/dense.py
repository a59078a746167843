"""Dense depths: depths whose states have a large share of all symbols as children.

At other depths, a step lists the children of each state and gathers their log-probabilities. If
there are many children, it is faster to read the logits of all symbols of the depth in place, with
one flag per symbol that says whether it is a child. A depth is dense if at least one in eight pairs
of a state and a symbol exists, so its flags take at most eight bytes per child. NumPy only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

_SPARSE = 8  # largest number of pairs of state and symbol per pair that exists
BLOCK = 64  # symbols that are counted one by one to find the number of a child
NO_ROW = 0  # start of the flags of a beam that does not exist: no symbol follows it


@dataclass(frozen=True, eq=False)
class DenseDepth:
    """Layout of the flags of a dense depth with n states and V symbols.

    Attributes:
        low: the first symbol at this depth, an index into `ItemTrie.alphabet`.
        width: V; symbols are `low` .. `low` + V - 1.
        start: where the n rows of V flags begin in `ItemTrie.dense_flags`.
        before: (n, V / `BLOCK`) int16 or int32 children of each state before each block of symbols.
    """

    low: int
    width: int
    start: int
    before: NDArray[np.signedinteger]


def lay_out(
    depth_start: Sequence[int],
    branching: Sequence[int],
    symbol: NDArray[np.integer],
    first_child: NDArray[np.integer],
) -> tuple[NDArray[np.bool_], tuple[DenseDepth | None, ...]]:
    """Find the dense depths of a trie and compute their flags.

    The arguments are the attributes of `ItemTrie` of the same names.

    Returns:
        (F,) flags, row by row and depth by depth, and the layout of each depth 0 .. L - 1, None
        if it is not dense. The flags begin with False as often as the widest depth has symbols
        (`NO_ROW`).
    """
    sizes, start = np.diff(depth_start), 0
    shapes: list[tuple[int, int, int] | None] = []
    for depth in range(len(branching)):
        most = _SPARSE * int(sizes[depth + 1]) // int(sizes[depth])
        shapes.append(None)
        if branching[depth] <= most:
            symbols = symbol[depth_start[depth + 1] : depth_start[depth + 2]]
            low = int(symbols.min())
            width = int(symbols.max()) - low + 1
            if width <= most:
                shapes[-1] = low, width, start
                start += int(sizes[depth]) * width
    widest = max((shape[1] for shape in shapes if shape is not None), default=0)
    flags = np.zeros(widest + start + BLOCK, np.bool_)  # a block may be read from any start
    found: list[DenseDepth | None] = []
    for depth, shape in enumerate(shapes):
        found.append(None)
        if shape is None:
            continue
        low, width, start = shape
        start += widest
        first, last, behind = depth_start[depth : depth + 3]
        rows = flags[start : start + (last - first) * width]
        place = np.arange(0, len(rows), width) - low
        place = np.repeat(place, np.diff(first_child[first : last + 1]))
        place += symbol[last:behind]
        rows[place] = True
        counts = np.add.reduceat(
            rows.view(np.uint8).reshape(-1, width), np.arange(0, width, BLOCK), axis=1, dtype=int
        )
        kind = np.int16 if width <= np.iinfo(np.int16).max else np.int32
        found[-1] = DenseDepth(low, width, start, (np.cumsum(counts, axis=1) - counts).astype(kind))
    return flags, tuple(found)
