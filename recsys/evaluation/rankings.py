"""Rankings: the lists that a recommender gives the users of a data set, as in serving."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from queue import SimpleQueue

import numpy as np
import torch
from numpy.typing import NDArray

from recsys.evaluation.protocol import EvaluationConfig
from recsys.interactions import Histories
from recsys.listing import Batch, best_items
from recsys.progress import track
from recsys.recommender import Recommender
from recsys.requests import Kind, RecommendRequest

CHUNK = 256  # users that a thread takes at a time

Ranked = tuple[NDArray[np.int32], NDArray[np.float32]]
"""(n, k) dense items, -1 where there are no more, and (n, k) scores, -inf there."""


def rank_histories(
    recommender: Recommender,
    histories: Histories,
    k: int,
    exclude_seen: Sequence[bool] = (True,),
    *,
    beams: int | None = None,
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
        beams: beam width; by default a request's.
        batch_size: histories decoded together.

    Returns:
        For each of `exclude_seen` two rankings: that of a request, and the model's own list.
        Without a blend both are the model's.

    Raises:
        ValueError: k below 1.
    """
    request = RecommendRequest([], k)
    kind = Kind.of(request, recommender.blends(request))
    kind = replace(kind, beams=beams or kind.beams)
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
            lists = recommender.search(kind, batch, k)
            items[variant, 0, rows], scores[variant, 0, rows] = lists.items, lists.scores
            assert lists.beams is not None  # noqa: S101 - it is a search's
            own = best_items(batch, lists.beams, k)
            items[variant, 1, rows], scores[variant, 1, rows] = own
    return [((i[0], s[0]), (i[1], s[1])) for i, s in zip(items, scores, strict=True)]


def rank_users(
    recommender: Recommender,
    histories: Histories,
    modes: tuple[bool, ...],
    config: EvaluationConfig,
) -> list[tuple[Ranked, Ranked]]:
    """`rank_histories` of all histories on `evaluate.threads` threads, with a progress bar.

    Threads share the models: the native library and torch release Python's lock while they compute.
    """
    k, n = max(config.ks), len(histories)
    items = np.full((len(modes), 2, n, k), -1, np.int32)
    scores = np.full(items.shape, -np.inf, np.float32)
    # Similar lengths share a batch. The longest come first, so that no thread finishes late.
    order = np.argsort(-histories.lengths, kind="stable")
    work = [order[start : start + CHUNK] for start in range(0, n, CHUNK)]
    of_torch = torch.get_num_threads()
    threads = config.threads or (of_torch if recommender.device.type == "cpu" else 1)
    threads = max(1, min(threads, len(work)))
    idle: SimpleQueue[Recommender] = SimpleQueue()

    def rank(rows: NDArray[np.intp]) -> None:
        own, mine = idle.get(), histories.take(rows)
        try:
            by_mode = rank_histories(
                own, mine, k, modes, beams=config.beams, batch_size=config.batch_size
            )
        finally:
            idle.put(own)
        for mode, both in enumerate(by_mode):
            for which, (ranked, rated) in enumerate(both):
                items[mode, which, rows], scores[mode, which, rows] = ranked, rated

    with ExitStack() as stack, track("model", n) as bar:
        stack.callback(torch.set_num_threads, of_torch)
        torch.set_num_threads(max(1, of_torch // threads))
        idle.put(recommender)
        for _ in range(threads - 1):
            idle.put(stack.enter_context(recommender.aside()))
        pool = stack.enter_context(ThreadPoolExecutor(threads))
        for rows, _ in zip(work, pool.map(rank, work), strict=True):
            bar.advance(len(rows))
    return [((i[0], s[0]), (i[1], s[1])) for i, s in zip(items, scores, strict=True)]
