"""Worker: the one thread that may touch the device, for all models of the process.

Models are loaded and warmed beside it, on a thread of their own, so that those that answer go on.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import os
import platform
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

from recsys.artifacts import Manifest
from recsys.bundle import Bundle
from recsys.live import Epoch, NewItem
from recsys.live_catalog import EpochCatalog
from recsys.recommender import Recommender, RecommendRequest, RecommendResult
from recsys.serving.settings import ServingSettings

T = TypeVar("T")
HELPERS = 2
TOUCHED = 50  # items of a history, as long as most

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h


class Recommends(Protocol):
    """What the service needs of a recommender (`recsys.Recommender` is one).

    `recommend_batch`, `score` and `warm_up` run models; the others read, or change the catalog,
    and may be called from any thread.
    """

    @property
    def catalog(self) -> EpochCatalog:
        """Items that can be recommended."""

    @property
    def bundle(self) -> Bundle:
        """What was loaded."""

    @property
    def epoch(self) -> Epoch:
        """The catalog as it is now."""

    @property
    def manifest(self) -> Manifest:
        """Manifest of the bundle; its digest is the model's version."""

    @property
    def retrieval(self) -> Any | None:
        """What similar items and fallbacks come from; None if the bundle has none."""

    def recommend_batch(self, requests: Sequence[RecommendRequest]) -> list[RecommendResult]:
        """Answers, one a request, in order."""

    def score(
        self, histories: Sequence[Sequence[str]], items: Sequence[Sequence[str]]
    ) -> list[list[float]]:
        """Exact log-probabilities of given items, one list a history."""

    def warm_up(self) -> None:
        """Pay the one-time costs of the first answer now."""

    def close(self) -> None:
        """Let go of what would wait for the garbage collector; nothing is asked afterwards."""

    def eligible(self, request: RecommendRequest) -> int | None:
        """Make the masks of the request's filter and boosts; how many items it allows."""

    def similar(self, item_id: str, k: int) -> list[tuple[str, float]]:
        """Items that go with one item, and how well."""

    def fallback(self, request: RecommendRequest) -> RecommendResult:
        """The answer without a model, to a request for a user of whom nothing is known."""

    def upsert(self, items: Sequence[NewItem]) -> Epoch:
        """Add or replace items; all or none."""

    def remove(self, item_ids: Sequence[str]) -> list[str]:
        """Take items away; those that were there."""


@dataclass(frozen=True)
class ScoreRequest:
    """Items to score for one history.

    Attributes:
        history: outside item ids, oldest first.
        items: outside ids that the catalog has.
    """

    history: Sequence[str]
    items: Sequence[str]


Work = RecommendRequest | ScoreRequest
Done = RecommendResult | list[float]


class DecodeWorker:
    """Threads of one process: a worker that runs models, and helpers that only read.

    Everything that answers happens on the worker, so that two batches never run at once and
    thread-local state of torch is warm where it is used.
    """

    def __init__(self, settings: ServingSettings) -> None:
        """Make a worker; nothing runs yet."""
        self._settings = settings
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="engine")
        self._helpers = ThreadPoolExecutor(max_workers=HELPERS, thread_name_prefix="helper")
        self._frozen = False

    async def load(self, bundle: Path, loaded: Recommends | None = None) -> Recommends:
        """Load a bundle and warm it up, while others go on answering.

        Args:
            bundle: directory.
            loaded: warm up this one instead.

        Raises:
            ArtifactError: the bundle is missing, incomplete or altered; the text names the file.
        """
        loop = asyncio.get_running_loop()
        # The thread ends with its work: OpenMP keeps helpers for each thread that ever computed,
        # and where they are more than cores, all of them fall asleep between any two operations.
        loader = ThreadPoolExecutor(max_workers=1, thread_name_prefix="loader")
        try:
            recommender = await loop.run_in_executor(loader, self._load, bundle, loaded)
        finally:
            loader.shutdown(wait=False)  # the loop does not wait with it
        await loop.run_in_executor(self._worker, _touch, recommender, self._settings.max_batch)
        return recommender

    async def run(self, recommender: Recommends, batch: Sequence[Work]) -> list[Done]:
        """Answer a batch."""
        return await asyncio.get_running_loop().run_in_executor(
            self._worker, _answer, recommender, batch
        )

    async def read(self, function: Callable[..., T], *arguments: Any) -> T:
        """Call something that needs no device, off the event loop."""
        return await asyncio.get_running_loop().run_in_executor(self._helpers, function, *arguments)

    def freeze(self) -> None:
        """Take what is loaded out of the garbage collector's sight, so that it never walks it."""
        if self._settings.gc_freeze:
            gc.collect()
            gc.freeze()
            self._frozen = True

    def close(self) -> None:
        """Wait for what runs and end the threads."""
        for threads in (self._worker, self._helpers):
            threads.shutdown()
        if self._frozen:
            gc.unfreeze()

    def _load(self, bundle: Path, loaded: Recommends | None) -> Recommends:
        recommender = loaded if loaded is not None else self._open(bundle)
        recommender.warm_up()
        return recommender

    def _open(self, bundle: Path) -> Recommender:
        import torch

        _keep_memory()
        settings = self._settings
        cores = len(os.sched_getaffinity(0))
        torch.set_num_threads(settings.threads or max(min(2, cores), cores - 1))
        return Recommender.load(
            bundle,
            device=settings.device,
            dtype=settings.dtype,
            mode=settings.mode,
            prefix_bytes=settings.prefix_mb << 20,
            max_batch=settings.max_batch,
        )


def _keep_memory() -> None:
    """Let the C library keep memory that was freed, where it is glibc.

    The tensors of a batch are some megabytes each. By default they are given back to the kernel and
    asked for anew operation by operation, and the first touch of their pages then takes longer than
    what is computed in them.
    """
    if platform.libc_ver()[0] == "glibc":
        library = ctypes.CDLL(None)
        library.mallopt(_M_MMAP_THRESHOLD, 32 << 20)  # the most that it takes
        library.mallopt(_M_TRIM_THRESHOLD, 256 << 20)


def _answer(recommender: Recommends, batch: Sequence[Work]) -> list[Done]:
    done: dict[int, Done] = {}
    asked = {i: work for i, work in enumerate(batch) if isinstance(work, RecommendRequest)}
    ranks = {i: work for i, work in enumerate(batch) if isinstance(work, ScoreRequest)}
    if asked:
        done |= zip(asked, recommender.recommend_batch(list(asked.values())), strict=True)
    if ranks:
        histories, items = zip(*((w.history, w.items) for w in ranks.values()), strict=True)
        done |= zip(ranks, recommender.score(histories, items), strict=True)
    return [done[i] for i in range(len(batch))]


def _touch(recommender: Recommends, most: int) -> None:
    """Some answers on the thread that will give all others: its own one-time costs."""
    some = recommender.catalog.item_ids[:TOUCHED]
    for size in (1, 4, most, 1):
        recommender.recommend_batch([RecommendRequest(some, 10)] * size)
    for length in (1, 4, 8, 12, 16):
        recommender.recommend_batch([RecommendRequest(some[:length], 10)])
