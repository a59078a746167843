"""Shadow: some requests are run once more in the background, and compared.

By plain beam search of the model that answered, which an exact answer must equal; or by the model
of an alias, to see how it would do. A shadow runs only while nobody waits and nothing is computed;
what does not get a turn soon is dropped, and counted.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

from recsys.recommender import RecommendRequest, RecommendResult
from recsys.serving.metrics import Metrics
from recsys.serving.models import Models
from recsys.serving.settings import ServingSettings
from recsys.serving.worker import DecodeWorker

logger = logging.getLogger("recsys.serving.shadow")
BACKLOG = 64
MAX_AGE_S = 30.0
LOOK_S = 0.005  # between two looks whether the worker is idle, while a sample waits


@dataclass(frozen=True)
class _Sample:
    alias: str
    request: RecommendRequest
    items: frozenset[str]
    taken: float


class Shadow:
    """Samples requests and runs them again."""

    def __init__(
        self, settings: ServingSettings, models: Models, engine: DecodeWorker, metrics: Metrics
    ) -> None:
        """Make it; `start` it inside the event loop."""
        self._fraction, self._alias = settings.shadow_fraction, settings.shadow_alias
        self._models, self._engine, self._metrics = models, engine, metrics
        self._samples: deque[_Sample] = deque()
        self._wake = asyncio.Event()
        self._random = random.Random()  # noqa: S311 - a sample, not a secret
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin, if any requests are to be sampled."""
        if self._fraction > 0:
            self._task = asyncio.create_task(self._work(), name="shadow")

    async def close(self) -> None:
        """Stop; samples that wait are forgotten."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def offer(
        self, alias: str, request: RecommendRequest, item_ids: Sequence[str], *, blended: bool
    ) -> None:
        """A request that was answered with these items; now and then it is sampled.

        A blended list is none that plain beam search must equal, so it is sampled for another
        model only.
        """
        if self._task is None or (blended and self._alias is None):
            return
        if self._random.random() >= self._fraction:
            return
        if len(self._samples) >= BACKLOG:
            self._samples.popleft()
            self._metrics.shadow_drops.labels("busy").inc()
        taken = asyncio.get_running_loop().time()
        self._samples.append(_Sample(alias, request, frozenset(item_ids), taken))
        self._wake.set()

    async def _work(self) -> None:
        while True:
            while not self._samples:
                self._wake.clear()
                await self._wake.wait()
            if not self._models.idle:
                await asyncio.sleep(LOOK_S)
                continue
            sample = self._samples.popleft()
            if asyncio.get_running_loop().time() - sample.taken > MAX_AGE_S:
                self._metrics.shadow_drops.labels("stale").inc()
                continue
            try:
                await self._run(sample)
            except Exception:  # no answer depends on it; the next sample may do better
                logger.warning("a shadow failed", exc_info=True)
                self._metrics.shadow_drops.labels("failed").inc()

    async def _run(self, sample: _Sample) -> None:
        request = replace(sample.request, trace=False)
        if self._alias is None:
            request = replace(request, mode="beam")
        clock = asyncio.get_running_loop().time
        with self._models.lease(self._alias or sample.alias) as model:
            start = clock()
            (result,) = await self._engine.run(model.recommender, [request])
            seconds = clock() - start
        assert isinstance(result, RecommendResult)  # noqa: S101 - of a request for one
        found = {item.item_id for item in result.recommendations}
        overlap = len(sample.items & found) / len(sample.items) if sample.items else 1.0
        stats = result.stats
        self._metrics.shadow(
            overlap,
            stats.get("accepted_levels", 0),
            seconds,
            passes=stats.get("target_passes", 0),
        )
