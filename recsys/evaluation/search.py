"""Search: ranks the users of an evaluation, on threads that share the models.

The native library and torch release Python's lock while they compute: two threads kept two cores
busy for 95 % of the time.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from queue import SimpleQueue
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from recsys.evaluation.protocol import EvaluationConfig
from recsys.evaluation.rankings import Ranked, rank_histories
from recsys.interactions import Histories
from recsys.progress import track

if TYPE_CHECKING:
    from recsys.recommender import Recommender

CHUNK = 256  # users that a thread takes at a time


def rank_users(
    recommender: Recommender,
    histories: Histories,
    modes: tuple[bool, ...],
    config: EvaluationConfig,
) -> list[tuple[Ranked, Ranked]]:
    """`rank_histories` of all histories on `evaluate.threads` threads, with a progress bar."""
    import torch

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
            found = rank_histories(
                own, mine, k, modes, beams=config.beams, batch_size=config.batch_size
            )
        finally:
            idle.put(own)
        for mode, both in enumerate(found):
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
