"""Rankings: the lists that a recommender gives many users of a data set, as in serving."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from recsys.interactions import Histories
from recsys.listing import Batch, best_items
from recsys.recommender import Recommender
from recsys.requests import MIN_BEAMS, Kind, RecommendRequest

Ranked = tuple[NDArray[np.int32], NDArray[np.float32]]
"""(n, k) dense items, -1 where there are no more, and (n, k) scores, -inf there."""


def rank_histories(
    recommender: Recommender,
    histories: Histories,
    k: int,
    exclude_seen: Sequence[bool] = (True,),
    *,
    beams: int | None = None,
    blend: bool | None = None,
    batch_size: int = 32,
) -> list[tuple[Ranked, Ranked]]:
    """Top-k of many histories of dense items, for several values of `exclude_seen`.

    Items that are not available now are in no list, as in serving. Neither are the hidden items
    of the histories.

    Args:
        recommender: what ranks.
        histories: n sequences.
        k: items wanted.
        exclude_seen: whether to leave out the items of the history.
        beams: beam width; by default max(20, k).
        blend: as a request's.
        batch_size: histories decoded together.

    Returns:
        For each of `exclude_seen` two rankings: that of a request, and the model's own list.
        Without a blend both are the model's.

    Raises:
        ValueError: k below 1.
        RequestError: a blend of a bundle that has no retrieval.
    """
    if k < 1:
        raise ValueError(f"k must be at least 1, got {k}")
    blends = recommender.blends(RecommendRequest([], k, blend=blend))
    kind = Kind(beams or max(MIN_BEAMS, k), blend=blends)
    epoch, variants = recommender.begin(), len(exclude_seen)
    items = np.full((variants, 2, len(histories), k), -1, np.int32)
    scores = np.full(items.shape, -np.inf, np.float32)
    order = np.argsort(histories.lengths, kind="stable")  # similar lengths share a batch
    for start in range(0, len(order), batch_size):
        rows = order[start : start + batch_size]
        group = histories.take(rows)
        masks = [epoch.mask] * len(group)
        for variant, with_seen in enumerate(exclude_seen):
            batch = Batch(epoch, group, group.left_out(with_seen), masks)
            lists = recommender.search(batch, kind, k)
            items[variant, 0, rows], scores[variant, 0, rows] = lists.items, lists.scores
            assert lists.beams is not None  # noqa: S101 - it is a search's
            own = best_items(batch, lists.beams, k)
            items[variant, 1, rows], scores[variant, 1, rows] = own
    return [((i[0], s[0]), (i[1], s[1])) for i, s in zip(items, scores, strict=True)]
