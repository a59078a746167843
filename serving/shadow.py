"""Shadow: a sample of the requests is run again in the background, and the answers are compared.

The second run uses plain beam search with the same model, which must equal an exact answer, or
another model by its alias. It runs only while no request waits or is computed. Samples that wait
too long are dropped and counted.
"""

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
LOOK_S = 0.005  # interval of the checks whether the worker is idle


@dataclass(frozen=True)
class _Sample:
    alias: str
    request: RecommendRequest
    items: frozenset[str]
    taken: float


class Shadow:
    """Samples requests and runs them again."""

    def __init__(
        self, settings: ServingSettings, models: Models, worker: DecodeWorker, metrics: Metrics
    ) -> None:
        self._fraction, self._alias = settings.shadow_fraction, settings.shadow_alias
        self._models, self._worker, self._metrics = models, worker, metrics
        self._samples: deque[_Sample] = deque()
        self._wake = asyncio.Event()
        self._random = random.Random()  # noqa: S311 - a sample, not a secret
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start, if the settings ask for samples."""
        if self._fraction > 0:
            self._task = asyncio.create_task(self._work(), name="shadow")

    async def close(self) -> None:
        """Stop; waiting samples are dropped."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def offer(
        self, alias: str, request: RecommendRequest, item_ids: Sequence[str], *, blended: bool
    ) -> None:
        """Sample an answered request with the probability of the settings.

        A blended list need not equal that of plain beam search, so it is sampled only for another
        model.
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
            except Exception:  # no answer depends on it
                logger.warning("a shadow run failed", exc_info=True)
                self._metrics.shadow_drops.labels("failed").inc()

    async def _run(self, sample: _Sample) -> None:
        request = replace(sample.request, trace=False)
        if self._alias is None:
            request = replace(request, mode="beam")
        clock = asyncio.get_running_loop().time
        with self._models.lease(self._alias or sample.alias) as model:
            start = clock()
            (result,) = await self._worker.run(model.recommender, [request])
            seconds = clock() - start
        assert isinstance(result, RecommendResult)  # noqa: S101 - of a request for one
        found = {item.item_id for item in result.recommendations}
        overlap = len(sample.items & found) / len(sample.items) if sample.items else 1.0
        passes = result.stats.get("target_passes", 0)
        self._metrics.shadow(overlap, seconds, passes=passes)
