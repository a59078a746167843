"""Search: ranks the users of an evaluation, in this process and in others.

The other processes take one chunk of users after another from the beginning of the list. This one
takes those from its end, so it does not wait until they have started.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Self

import numpy as np

from recsys.errors import RecsysError
from recsys.evaluation.protocol import EvaluationConfig
from recsys.evaluation.rankings import Ranked, rank_histories
from recsys.interactions import Histories
from recsys.progress import track
from recsys.recommender import Recommender

CHUNK = 256  # users that a process takes at a time
WORTH_A_PROCESS = 4000  # users; a process ranks about so many while another one starts

Lists = list[tuple[Ranked, Ranked]]
"""Of each mode, the first ranker's lists and those of the model alone."""

_in_process: list[Recommender | Exception] = []  # of another process: what it ranks with


def _load_in_process(bundle: Path, device: str, dtype: str, threads: int) -> None:
    import torch

    torch.set_num_threads(threads)
    try:
        _in_process.append(
            Recommender.load(bundle, device=device, dtype=dtype, check=False, trained=True)
        )
    except Exception as error:  # it is raised where somebody waits for a list
        _in_process.append(error)


def _recommender() -> Recommender:
    (recommender,) = _in_process
    if isinstance(recommender, Exception):
        raise recommender
    return recommender


def _rank_in_process(histories: Histories, options: dict[str, Any]) -> Lists:
    return rank_histories(_recommender(), histories, **options)


class Search:
    """A context manager, within which `evaluate.processes` processes rank."""

    def __init__(
        self, bundle: Path, recommender: Recommender, users: int, config: EvaluationConfig
    ) -> None:
        """Rank `users` users with the recommender of a bundle; other processes load their own."""
        import torch

        self.config, self._recommender, self._bundle = config, recommender, bundle
        self._pool: ProcessPoolExecutor | None = None
        self._threads = threads = torch.get_num_threads()
        processes = config.processes or min(threads, -(-users // WORTH_A_PROCESS))
        if recommender.device.type != "cpu" and config.processes is None:
            processes = 1  # others would wait for the same GPU
        self._others = max(0, processes - 1)
        if self._others:
            each = max(1, threads // processes)
            torch.set_num_threads(each)
            self._pool = ProcessPoolExecutor(
                self._others,
                mp_context=get_context("spawn"),
                initializer=_load_in_process,
                initargs=(bundle, str(recommender.device), config.dtype, each),
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        import torch

        torch.set_num_threads(self._threads)
        if self._pool is not None:
            self._pool.shutdown(wait=False)

    def rank(self, histories: Histories, modes: tuple[bool, ...]) -> Lists:
        """`rank_histories` of all histories, with a progress bar.

        Raises:
            RecsysError: a process was ended, or could not load the bundle.
        """
        k, n = max(self.config.ks), len(histories)
        items = np.full((len(modes), 2, n, k), -1, np.int32)
        scores = np.full(items.shape, -np.inf, np.float32)
        # Similar lengths share a batch. The longest come first, so that no process finishes late.
        order = np.argsort(-histories.lengths, kind="stable")
        work = [order[start : start + CHUNK] for start in range(0, n, CHUNK)]
        options: dict[str, Any] = {"k": k, "exclude_seen": modes}
        options |= {"beams": self.config.beams, "batch_size": self.config.batch_size}
        with track("model", n) as bar, _named():
            for number, lists in self._rank([histories.take(rows) for rows in work], options):
                rows = work[number]
                for mode, both in enumerate(lists):
                    for which, (ranked, rated) in enumerate(both):
                        items[mode, which, rows], scores[mode, which, rows] = ranked, rated
                bar.advance(len(rows))
        return [((i[0], s[0]), (i[1], s[1])) for i, s in zip(items, scores, strict=True)]

    def _rank(
        self, chunks: Sequence[Histories], options: dict[str, Any]
    ) -> Iterator[tuple[int, Lists]]:
        """The lists of each chunk, by its place, in any order."""
        waiting = deque(range(len(chunks)))
        running: dict[Future[Lists], int] = {}
        while waiting or running:
            # One chunk more than it ranks, so that no process waits while this one ranks.
            while self._pool is not None and waiting and len(running) < 2 * self._others:
                number = waiting.popleft()
                running[self._pool.submit(_rank_in_process, chunks[number], options)] = number
            if waiting:
                number = waiting.pop()
                yield number, rank_histories(self._recommender, chunks[number], **options)
            done = wait(running, 0 if waiting else None, FIRST_COMPLETED).done
            for future in done:
                yield running.pop(future), future.result()


@contextmanager
def _named() -> Iterator[None]:
    """Say what it means that a process has ended."""
    try:
        yield
    except BrokenProcessPool as error:
        raise RecsysError(
            "a process that ranked users was ended from outside, as by the system when memory runs "
            "out; run the command again, with --set evaluate.processes=1 if it is for memory"
        ) from error
