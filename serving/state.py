"""State: what a process serves with. It is made once, when the store is open, and never changes.

Each part knows those before it, and none behind it.
"""

import asyncio
from dataclasses import dataclass
from typing import Self

from recsys.recommender import Recommender
from recsys.serving.aliases import Aliases
from recsys.serving.catalog_changes import CatalogChanges
from recsys.serving.daily_figures import DailyFigures
from recsys.serving.experiments import Experiments
from recsys.serving.limits import Room
from recsys.serving.lists import Lists
from recsys.serving.metrics import Metrics
from recsys.serving.models import Models
from recsys.serving.off_loop import OffLoop
from recsys.serving.rules import Rules
from recsys.serving.settings import ServingSettings
from recsys.serving.stores.store import Store
from recsys.serving.worker import DecodeWorker

MOST_ANSWERS = 8 << 20  # bytes of large answers that batches have at a time
BATCHED = 1 / 4  # share of the queue for requests of batches; the proxy bounds the others


@dataclass(frozen=True)
class State:
    """The store, and what is made of it and of the loaded models."""

    store: Store
    models: Models
    rules: Rules
    experiments: Experiments
    catalog_changes: CatalogChanges
    aliases: Aliases
    lists: Lists
    today: DailyFigures
    answer_bytes: Room
    batched: asyncio.Semaphore

    @classmethod
    def of(
        cls,
        settings: ServingSettings,
        store: Store,
        worker: DecodeWorker,
        metrics: Metrics,
        off_loop: OffLoop,
    ) -> Self:
        """Make the parts; nothing is loaded before `start`."""
        models = Models()
        rules = Rules(store, models)
        changes = CatalogChanges(store, models, metrics, off_loop)
        metrics.queue_depth, metrics.captured = models.queue_depth, models.captured
        metrics.filter_stats = models.filter_stats
        return cls(
            store=store,
            models=models,
            rules=rules,
            experiments=Experiments(store, models, off_loop),
            catalog_changes=changes,
            aliases=Aliases(settings, store, worker, metrics, models, rules, changes),
            lists=Lists(store, models, rules, off_loop, settings.not_history),
            today=DailyFigures(models, off_loop, settings.not_history),
            answer_bytes=Room(MOST_ANSWERS),
            batched=asyncio.Semaphore(max(1, int(settings.queue_limit * BATCHED))),
        )

    async def start(self, recommender: Recommender | None) -> None:
        """Read rules and experiments, and load the models; a loaded recommender is the champion."""
        await self.rules.start()
        await self.experiments.start()
        await self.aliases.start(recommender)

    def follow(self) -> None:
        """Begin what runs beside the requests."""
        self.catalog_changes.follow()
        self.experiments.guard()

    async def close(self) -> None:
        """Answer the waiting requests, and end what runs beside them."""
        await self.today.cached.close()
        await self.lists.close()
        await self.catalog_changes.close()
        await self.rules.close()
        await self.experiments.close()
        await self.aliases.close()
