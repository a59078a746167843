"""Listing: what a search found, rows of the trie, becomes items again, named and explained."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from recsys.blending import Lists
from recsys.catalog import Catalog
from recsys.constraint import ItemTrie
from recsys.constraint.boost import Boost
from recsys.constraint.mask import RowMask
from recsys.decoding.output import Beams
from recsys.decoding.trace import Trace
from recsys.interactions import Histories
from recsys.requests import SOURCES, Recommendation


def items_of_rows(
    trie: ItemTrie,
    rows: NDArray[np.int64],
    row_scores: NDArray[np.floating[Any]],
    excluded: Histories,
    masks: Sequence[RowMask | None],
    boosts: Sequence[Boost | None],
    k: int,
) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """Items of the rows (n, K), best first; a shared leaf gives its items one by one.

    Those that are excluded, or that the request's mask hides, are left out. Boosts count for items
    one by one, and may change their order.
    """
    n, width = rows.shape
    items = np.full((n, k), -1, np.int32)
    scores = np.full((n, k), -np.inf, np.float32)
    real = np.flatnonzero(rows.reshape(-1) >= 0)
    which, places = trie.places_of(rows.reshape(-1)[real])
    owner, flat = real[which] // width, trie.row_items[places]
    flat_scores = row_scores.reshape(-1)[real[which]]
    keep = np.ones(len(flat), np.bool_)
    for request, mask in enumerate(masks):
        if mask is not None:
            here = owner == request
            keep[here] = mask.items[places[here]]
    if len(excluded.items):
        keys = excluded.rows * trie.num_items + excluded.items
        keep &= ~np.isin(owner * trie.num_items + flat, keys)
    for request, boost in enumerate(boosts):
        if boost is not None:
            here = owner == request
            flat_scores[here] += boost.items[places[here]]
    flat, owner, flat_scores = flat[keep], owner[keep], flat_scores[keep]
    if any(boosts):
        order = np.lexsort((-flat_scores, owner))  # stable: equal scores keep row order
        flat, flat_scores = flat[order], flat_scores[order]
    first = np.searchsorted(owner, np.arange(n))
    place = np.arange(len(flat)) - first[owner]
    kept = place < k
    items[owner[kept], place[kept]] = flat[kept]
    scores[owner[kept], place[kept]] = flat_scores[kept]
    return items, scores


def covers(trie: ItemTrie, beams: Beams, i: int, boost: Boost | None, last: float) -> bool:
    """Whether what is proven of the leaves of answer i holds for its items.

    A leaf that several items share is searched by the most that one of them gains, so the last
    item may score less than the last leaf found, and than an item of a leaf that was not.
    """
    row = int(beams.rows[i, -1])
    if boost is None or row < 0 or trie.num_rows == trie.num_items:
        return True
    most = boost.most[trie.depth_start[trie.num_levels] + row]
    return bool(last >= np.float32(float(beams.scores[i, -1]) + most))


def named(
    catalog: Catalog, found: Lists, request: int, k: int, because: NDArray[np.int64] | None
) -> list[Recommendation]:
    """The first k items found for one request, with what is known of each."""
    lines = [part[request, :k].tolist() for part in (found.items, found.scores, found.source)]
    reasons = [-1] * k if because is None else because[:k].tolist()
    return [
        Recommendation(
            catalog.item_id(item),
            score,
            catalog.title(item),
            tuple(catalog.codes[item].tolist()),
            SOURCES[source],
            catalog.item_id(reason) if reason >= 0 else None,
        )
        for item, score, source, reason in zip(*lines, reasons, strict=False)
        if item >= 0
    ]


def told(trace: Trace, trie: ItemTrie, sizes: Sequence[int], mask: RowMask | None) -> Trace:
    """A trace with what the catalog and the request's mask have to say of its nodes."""
    place = trie.row_item_start
    if mask is not None:
        place = np.append(0, np.cumsum(mask.items))[place]
    state = np.array([0, *(node.state for node in trace.nodes)], np.int64)
    items = place[trie.row_stop[state]] - place[trie.row_start[state]]
    nodes = [replace(n, items=int(count)) for n, count in zip(trace.nodes, items[1:], strict=True)]
    blocked = dict.fromkeys(range(1, trie.num_levels + 1), 0)
    beams = [0, *(n.state for n in nodes if n.fate != "rejected")]
    depths = [0, *(n.depth for n in nodes if n.fate != "rejected")]
    for beam, depth in zip(beams, depths, strict=True):
        first, last = trie.first_child[beam : beam + 2].tolist()
        open_ = last - first if mask is None else int(np.count_nonzero(mask.alive[first:last]))
        blocked[depth + 1] += sizes[depth] - open_
    return replace(trace, nodes=nodes, blocked=blocked)
