"""Worker: the threads that run models, for all models of the process.

One thread answers ordinary requests. On a CPU a second one answers those of much work, so that
ordinary ones need not wait until a long search has ended. A GPU is touched by one thread alone.

Models are loaded and warmed up on another thread, so that the current models keep answering.
"""

import asyncio
import gc
import logging
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from recsys.devices import AUTO, CPU, or_on_cpu
from recsys.errors import ConfigError
from recsys.modes import Captured
from recsys.native.decoder import set_threads
from recsys.recommender import Recommender, RecommendRequest, RecommendResult
from recsys.serving.memory import keep_memory, trim_memory
from recsys.serving.metrics import Metrics
from recsys.serving.settings import ServingSettings
from recsys.warm_up import warm_up

logger = logging.getLogger("recsys.serving.worker")
T = TypeVar("T")
HELPERS = 2
TOUCHED = 50  # items of a history, as long as most
TRIM_S = 3.0  # between two times that memory is given back
# A garbage collection of young objects traverses those of all requests in progress. Python begins
# one after 700 new objects, which took 5 % of the event loop's time.
COLLECT_AFTER = 10_000  # objects


@dataclass(frozen=True)
class ScoreRequest:
    """Items that the catalog has, to score for the history of a request."""

    request: RecommendRequest
    items: Sequence[str]


Work = RecommendRequest | ScoreRequest
Done = RecommendResult | list[float]


class DecodeWorker:
    """Threads of one process: those that run models, and helpers that only read.

    Batches of a kind run on one thread, so that two never run at once and the thread-local state of
    torch is warm.
    """

    def __init__(self, settings: ServingSettings, metrics: Metrics) -> None:
        """Make the threads; `metrics` counts the batches."""
        keep_memory()
        self._settings, self._metrics = settings, metrics
        self._collected_after = gc.get_threshold()
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="engine")
        self._aside = ThreadPoolExecutor(max_workers=1, thread_name_prefix="aside")
        self._helpers = ThreadPoolExecutor(max_workers=HELPERS, thread_name_prefix="helper")
        self._trimming: asyncio.TimerHandle | None = None

    async def load(self, bundle: Path, loaded: Recommender | None = None) -> Recommender:
        """Load a bundle, or take a loaded one, and warm it up while other models keep answering."""
        loop = asyncio.get_running_loop()
        # The thread ends with its work: OpenMP keeps helper threads for each thread that computed,
        # and with more helpers than cores all of them sleep between operations.
        loader = ThreadPoolExecutor(max_workers=1, thread_name_prefix="loader")
        try:
            recommender = await loop.run_in_executor(loader, self._load, bundle, loaded)
        finally:
            loader.shutdown(wait=False)  # do not block the event loop
        await loop.run_in_executor(self._worker, _touch, recommender, self._settings.max_batch)
        return recommender

    async def run(
        self, recommender: Recommender, batch: Sequence[Work], *, aside: bool = False
    ) -> list[Done]:
        """Answer a batch; `aside` on the second thread, which the device must allow."""
        thread, answer = (self._aside, _answer_aside) if aside else (self._worker, _answer)
        start = time.monotonic()
        done = await asyncio.get_running_loop().run_in_executor(thread, answer, recommender, batch)
        self._metrics.batch(len(batch), time.monotonic() - start)
        return done

    def read(self, function: Callable[..., T], *arguments: Any) -> Future[T]:
        """Call a function that needs no device, on a helper thread."""
        return self._helpers.submit(function, *arguments)

    def freeze(self) -> None:
        """Exclude all loaded objects from garbage collection, which then happens less often."""
        if self._settings.gc_freeze:
            gc.collect()
            gc.freeze()
            gc.set_threshold(COLLECT_AFTER, *gc.get_threshold()[1:])

    def trim(self) -> None:
        """Give memory back now, and every `TRIM_S` seconds from now on, whatever has used it."""
        self.read(trim_memory)
        self._trimming = asyncio.get_running_loop().call_later(TRIM_S, self.trim)

    def close(self) -> None:
        """Wait for what runs and end the threads."""
        if self._trimming is not None:
            self._trimming.cancel()
        for threads in (self._worker, self._aside, self._helpers):
            threads.shutdown()
        if self._settings.gc_freeze:
            gc.unfreeze()
            gc.set_threshold(*self._collected_after)

    def _load(self, bundle: Path, loaded: Recommender | None) -> Recommender:
        def load(device: str) -> Recommender:
            if loaded is not None and device == self._settings.device:
                recommender = loaded
            else:
                recommender = self._open(bundle, device)
            warm_up(recommender)
            return recommender

        return or_on_cpu(self._settings.device, f"answers of {bundle}", load)

    def _open(self, bundle: Path, device: str) -> Recommender:
        import threadpoolctl
        import torch

        settings = self._settings
        try:
            torch.empty(0, device=CPU if settings.device == AUTO else settings.device)
        except (RuntimeError, AssertionError) as error:
            reason = str(error).partition("\n")[0]
            raise ConfigError(f"serve.device {settings.device!r}: {reason}") from error
        cores = len(os.sched_getaffinity(0))
        threads = settings.threads or max(min(2, cores), cores - 1)
        torch.set_num_threads(threads)
        recommender = Recommender.load(
            bundle,
            device=device,
            dtype=settings.dtype,
            mode=settings.mode,
            prefix_bytes=settings.prefix_mb << 20,
            max_batch=settings.max_batch,
            capture=settings.capture if device == settings.device else Captured.PASSES,
        )
        # What is left beside native passes is small. The threads of BLAS and of OpenMP would spin
        # between such operations, and take the processor from the event loop.
        threadpoolctl.threadpool_limits(1, user_api="blas")
        if recommender.engine.target.native is not None:
            set_threads(threads)
            torch.set_num_threads(1)
        return recommender


def _answer(recommender: Recommender, batch: Sequence[Work]) -> list[Done]:
    done: dict[int, Done] = {}
    asked = {i: work for i, work in enumerate(batch) if isinstance(work, RecommendRequest)}
    ranks = {i: work for i, work in enumerate(batch) if isinstance(work, ScoreRequest)}
    if asked:
        done |= zip(asked, recommender.recommend_batch(list(asked.values())), strict=True)
    if ranks:
        requests, items = zip(*((w.request, w.items) for w in ranks.values()), strict=True)
        done |= zip(ranks, recommender.rank(requests, items), strict=True)
    return [done[i] for i in range(len(batch))]


def _answer_aside(recommender: Recommender, batch: Sequence[Work]) -> list[Done]:
    with recommender.aside() as other:
        return _answer(other, batch)


def _touch(recommender: Recommender, most: int) -> None:
    """Run some requests on the worker thread, for the one-time costs of that thread."""
    some = recommender.catalog.item_ids[:TOUCHED]
    for size in (1, 4, most, 1):
        recommender.recommend_batch([RecommendRequest(some, 10)] * size)
    for length in (1, 4, 8, 12, 16):
        recommender.recommend_batch([RecommendRequest(some[:length], 10)])
