"""Engine: owns the recommender and the one thread that may touch it. Batch in, batch out."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from recsys.artifacts import Manifest
    from recsys.catalog import Catalog
    from recsys.recommender import RecommendRequest, RecommendResult
    from serving.settings import ServingSettings


class Recommends(Protocol):
    """What the engine needs of a recommender (`recsys.Recommender` is one)."""

    @property
    def catalog(self) -> Catalog:
        """Items that can be recommended."""

    @property
    def manifest(self) -> Manifest:
        """Manifest of the bundle; its digest is the model's version."""

    def recommend_batch(self, requests: Sequence[RecommendRequest]) -> list[RecommendResult]:
        """Answers, one a request, in order."""

    def warm_up(self) -> None:
        """Pay the one-time costs of the first answer now."""


class Engine:
    """Loads, warms and runs a recommender on a thread of its own.

    Everything that touches the device happens on that thread, so that thread-local state of torch
    (threads, streams) is set where it is used and two batches never run at once.
    """

    def __init__(self, settings: ServingSettings, recommender: Recommends | None = None) -> None:
        """Make an engine for `settings.bundle`, or for a recommender that is loaded already."""
        self._settings = settings
        self._recommender = recommender
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="engine")

    @property
    def recommender(self) -> Recommends:
        """The recommender; only its immutable parts may be read from outside the thread.

        Raises:
            RuntimeError: `start` has not returned yet.
        """
        if self._recommender is None:
            raise RuntimeError("the engine has not started")
        return self._recommender

    async def start(self) -> None:
        """Load the bundle if need be, and warm up.

        Raises:
            ArtifactError: the bundle is missing, incomplete or altered.
        """
        await asyncio.get_running_loop().run_in_executor(self._worker, self._start)

    async def run(self, requests: Sequence[RecommendRequest]) -> list[RecommendResult]:
        """Answer a batch."""
        return await asyncio.get_running_loop().run_in_executor(
            self._worker, self.recommender.recommend_batch, requests
        )

    def close(self) -> None:
        """Wait for the batch that runs and end the thread."""
        self._worker.shutdown()

    def _start(self) -> None:
        settings = self._settings
        if settings.threads is not None:
            import torch

            torch.set_num_threads(settings.threads)
        if self._recommender is None:
            from recsys.recommender import Recommender

            self._recommender = Recommender.load(
                settings.bundle,
                device=settings.device,
                dtype=settings.dtype,
                mode=settings.mode,
                prefix_bytes=settings.prefix_mb << 20,
                max_batch=settings.max_batch,
            )
        self._recommender.warm_up()
