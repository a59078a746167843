"""Related items: those that are similar to one, and those that are chosen together with some."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy import sparse

from recsys.retrieval.item_item import best_of
from recsys.retrieval.retrieval import Retrieval
from recsys.retrieval.vectors import select_largest


class Companions(NamedTuple):
    """What is chosen together with some items, best first.

    Attributes:
        items: (n,) int32 dense items.
        shares: (n,) float64 share of each in the evidence.
        because: (n,) int64 which of the given items has the most evidence for each.
    """

    items: NDArray[np.int32]
    shares: NDArray[np.float64]
    because: NDArray[np.int64]


def similar(
    retrieval: Retrieval,
    items: NDArray[np.integer],
    k: int,
    allowed: NDArray[np.bool_] | None = None,
) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """Items similar to each of `items`, by co-occurrence and by vectors.

    Args:
        retrieval: the fitted parts.
        items: (m,) dense items.
        k: number of similar items.
        allowed: (items,) bool, the items to choose from; None for all.

    Returns:
        (m, k) items, best first, padded with -1, and their scores in (0, 2]: the weight of the
        pair divided by the largest weight of the row, plus the cosine.
    """
    rows = retrieval.item_item.weights[np.asarray(items, np.int64)].tocoo()
    line, other = rows.coords
    most = np.zeros(len(items), np.float32)
    np.maximum.at(most, line, rows.data)
    close = np.zeros((len(items), len(retrieval)), np.float32)
    if retrieval.vectors is not None:
        vectors = retrieval.vectors.vectors
        np.maximum(vectors[items] @ vectors.T, 0, out=close)
    close[line, other] += rows.data / most[line]
    close[np.arange(len(items)), items] = 0
    if allowed is not None:
        close *= allowed
    # The k best, and those that equal the last of them: of equal ones, the lower items are taken.
    best = np.take_along_axis(close, select_largest(close, k), axis=1)
    least = best.min(axis=1, keepdims=True, initial=np.inf)
    line, other = np.nonzero((close >= least) & (close > 0))
    both = sparse.csr_array((close[line, other], (line, other)), shape=close.shape)
    related = np.full((len(items), k), -1, np.int32)
    scores = np.zeros((len(items), k), np.float32)
    at, column, item, score = best_of(both, k)
    related[at, column], scores[at, column] = item, score
    return related, scores


def related_items(
    retrieval: Retrieval,
    codes: NDArray[np.int32],
    item: int,
    k: int,
    alive: NDArray[np.bool_],
) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """The items related to one of the catalog, at most k, best first, and their scores.

    They are the `similar` ones. An item without any, as one that was added later, has those that
    share most leading codes of its semantic ID; the score is the share.
    """
    if item < len(retrieval):
        (nearest,), (scores,) = similar(retrieval, np.array([item]), k, alive[: len(retrieval)])
        if (nearest >= 0).any():
            return nearest[nearest >= 0], scores
    shared = (codes == codes[item]).cumprod(axis=1).mean(axis=1)
    shared[~alive] = shared[item] = 0
    nearest = np.argsort(-shared, kind="stable")[:k].astype(np.int32)
    nearest = nearest[shared[nearest] > 0]
    return nearest, shared[nearest].astype(np.float32)


def together(retrieval: Retrieval, items: NDArray[np.integer]) -> Companions:
    """What is chosen together with some items; pairs count in the directions of the rules.

    The evidence is that of pairs which end in a target event, such as a purchase; without types
    of events, or if there is no such pair, it is that of all pairs.

    Args:
        retrieval: the fitted parts.
        items: dense items; those beyond the catalog have no evidence.
    """
    distinct = np.unique(np.asarray(items, np.int64))
    distinct = distinct[(distinct >= 0) & (distinct < len(retrieval))]
    targets = [] if retrieval.types is None else [retrieval.types.to_targets]
    for source in (*targets, retrieval.item_item):
        rows = source.weights[distinct].tocoo()
        row, other = rows.coords
        keep = ~np.isin(other, distinct)
        row, other, weight = row[keep], other[keep], rows.data[keep].astype(np.float64)
        if len(other):
            break
    order = np.lexsort((row, -weight, other))  # by item, the strongest reason first
    row, other, weight = row[order], other[order], weight[order]
    partners, first = np.unique(other, return_index=True)
    shares = np.add.reduceat(weight, first) / weight.sum() if len(first) else np.zeros(0)
    best = np.argsort(-shares, kind="stable")
    return Companions(partners[best].astype(np.int32), shares[best], distinct[row[first[best]]])
