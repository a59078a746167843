"""Codes -> unique semantic IDs: items that collide move to the nearest free codes.

One rule holds at every depth d = 1..L: a prefix of length d has at most as many items as it has
leaves, the product of the codebook sizes of the levels below (at depth L: one). Excess items move
to another code of level d under the same parent. At the last level, where nearly all moves happen,
they are distributed by an optimal assignment. At higher levels, where a whole subtree is full, they
move to the nearest sibling with room. Items that fit are never moved.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment

from recsys.semantic_ids.quantizer import Codebooks, residual_codes, squared_distances


def assign_unique(
    codes: NDArray[np.int32], latents: NDArray[np.float32], centroids: Codebooks
) -> NDArray[np.int32]:
    """Give every item its own tuple with few moves.

    Args:
        codes: (n, L) codes of the quantiser.
        latents: (n, D) latents of the items.
        centroids: L arrays (V_l, D).

    Returns:
        (n, L) codes; the rows are distinct if there are n leaves. Otherwise excess items keep their
        codes and share leaves.
    """
    codes = codes.copy()
    num_levels = len(centroids)
    residual = np.array(latents, np.float32)
    for level in range(num_levels):
        room = min(prod(len(book) for book in centroids[level + 1 :]), max(len(codes), 1))
        move = _spread_leaf if level == num_levels - 1 else _spread_prefix
        for members in _overfull(codes[:, : level + 1], room):
            distances = squared_distances(residual[members], centroids[level])
            moved = move(codes[members, level], distances, room)
            changed = members[moved != codes[members, level]]
            codes[members, level] = moved
            if level < num_levels - 1 and len(changed):
                rest = residual[changed] - centroids[level][codes[changed, level]]
                codes[changed, level + 1 :] = residual_codes(rest, centroids[level + 1 :])
        residual -= centroids[level][codes[:, level]]
    return codes


def _overfull(prefixes: NDArray[np.int32], room: int) -> Iterator[NDArray[np.int64]]:
    """For each parent of a prefix with more than `room` items, all items of the parent."""
    order = np.lexsort(prefixes.T[::-1])
    rows = prefixes[order]
    new_parent = np.concatenate([[True], (rows[1:, :-1] != rows[:-1, :-1]).any(axis=1)])
    new_prefix = np.concatenate([[True], (rows[1:] != rows[:-1]).any(axis=1)])
    parents = np.flatnonzero(new_parent)
    starts = np.flatnonzero(new_prefix)
    counts = np.diff(np.append(starts, len(rows)))
    bad = np.unique(np.searchsorted(parents, starts[counts > room], side="right") - 1)
    ends = np.append(parents[1:], len(rows))
    for parent in bad:
        yield np.sort(order[parents[parent] : ends[parent]])


def _spread_leaf(
    codes: NDArray[np.int32], distances: NDArray[np.float32], room: int
) -> NDArray[np.int32]:
    """Move items that share a last code to free codes by an optimal assignment."""
    out = codes.copy()
    counts = np.bincount(codes, minlength=distances.shape[1])
    movers = np.flatnonzero(counts[codes] > room)
    free = np.flatnonzero(counts != room)
    rows, columns = linear_sum_assignment(distances[np.ix_(movers, free)])
    out[movers[rows]] = free[columns]
    return out


def _spread_prefix(
    codes: NDArray[np.int32], distances: NDArray[np.float32], room: int
) -> NDArray[np.int32]:
    """Move the excess of a full subtree to siblings with room, items with least loss first."""
    out = codes.copy()
    counts = np.bincount(codes, minlength=distances.shape[1])
    for full in np.flatnonzero(counts > room):
        members = np.flatnonzero(codes == full)
        open_codes = np.flatnonzero(counts < room)
        if not len(open_codes):
            break
        loss = distances[members][:, open_codes].min(axis=1) - distances[members, full]
        for item in members[np.argsort(loss, kind="stable")][: counts[full] - room]:
            open_codes = np.flatnonzero(counts < room)
            if not len(open_codes):
                return out
            target = open_codes[distances[item, open_codes].argmin()]
            counts[target] += 1
            counts[full] -= 1
            out[item] = target
    return out
