"""The loaded models of a process, by the aliases that stand for them.

A request holds a lease on its model, which stays loaded until the last of them is answered. Aliases
are changed by `aliases`.
"""

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import NamedTuple, Self

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from recsys.constraint.filter_cache import FilterStats
from recsys.recommender import Recommender
from recsys.retrieval import Retrieval
from recsys.serving.batcher import MUCH, Batcher
from recsys.serving.errors import ProblemError
from recsys.serving.schemas.common import CHAMPION, ModelRef, made
from recsys.serving.schemas.models import ModelInfo
from recsys.serving.settings import ServingSettings
from recsys.serving.worker import DecodeWorker, Done, Work


class Version(NamedTuple):
    """A version of a bundle: made again under the same name, it has another digest."""

    bundle: str
    digest: str


@dataclass(eq=False)
class Model:
    """A loaded bundle and its queues; `unused` is set while there are no leases.

    The second queue is for requests of much work, which a thread of its own computes; None if there
    is no such thread.
    """

    name: str
    recommender: Recommender
    batcher: Batcher[Work, Done]
    aside: Batcher[Work, Done] | None = None
    leases: int = 0
    unused: asyncio.Event = field(default_factory=asyncio.Event)

    @classmethod
    def of(
        cls, name: str, recommender: Recommender, worker: DecodeWorker, settings: ServingSettings
    ) -> Self:
        """A loaded bundle of this name, whose batches the worker computes."""

        def queue(*, aside: bool) -> Batcher[Work, Done]:
            return Batcher(
                partial(worker.run, recommender, aside=aside),
                max_batch=settings.max_batch,
                max_wait_ms=settings.max_wait_ms,
                queue_limit=settings.queue_limit,
            )

        is_cpu = recommender.device.type == "cpu"
        return cls(name, recommender, queue(aside=False), queue(aside=True) if is_cpu else None)

    @cached_property
    def version(self) -> str:
        """Digest of the manifest of the bundle, as clients see it."""
        return self.recommender.manifest.digest

    @property
    def bundle(self) -> Version:
        """Name and digest of the bundle."""
        return Version(self.name, self.version)

    @property
    def batchers(self) -> list[Batcher[Work, Done]]:
        """The queues of the model; the last one is for much work."""
        return [self.batcher] if self.aside is None else [self.batcher, self.aside]

    def queue(self, work: float) -> Batcher[Work, Done]:
        """The queue for a request of this amount of work."""
        return self.batchers[-1 if work > MUCH else 0]

    async def close(self) -> None:
        """Refuse new requests, and return when the waiting ones are answered."""
        await asyncio.gather(*(batcher.close() for batcher in self.batchers))

    @property
    def retrieval(self) -> Retrieval:
        """The bundle's retrieval; `ProblemError` if it has none."""
        if self.recommender.retrieval is None:
            raise ProblemError(
                "unsupported_by_model",
                f"Bundle {self.name!r} has no part 'retrieval'; make one with the stage of that "
                "name.",
            )
        return self.recommender.retrieval

    def ref(self, alias: str, epoch: int | None = None) -> ModelRef:
        """The model as answers name it, at an epoch of its catalog (by default the current one)."""
        number = self.recommender.epoch.number if epoch is None else epoch
        return made(
            ModelRef,
            {"name": self.name, "version": self.version, "alias": alias, "epoch": number},
        )


@dataclass(frozen=True)
class Alias:
    """What an alias stands for.

    Attributes:
        model: the model that answers.
        previous: earlier versions, the latest last.
    """

    model: Model
    previous: tuple[Version, ...] = ()


class Models(Collector):
    """The loaded models of a process.

    Attributes:
        aliases: by name.
        retiring: models that no alias stands for, while requests have them.
    """

    def __init__(self) -> None:
        """Start without models."""
        self.aliases: dict[str, Alias] = {}
        self.retiring: set[Model] = set()

    @contextmanager
    def lease(self, alias: str = CHAMPION) -> Iterator[Model]:
        """Hold the model of an alias, which stays loaded until the block is left."""
        model = self.get(alias)
        model.leases += 1
        model.unused.clear()
        try:
            yield model
        finally:
            model.leases -= 1
            if not model.leases:
                model.unused.set()

    def get(self, alias: str = CHAMPION) -> Model:
        """Return the model of an alias, without a lease.

        Raises:
            ProblemError: there is no such alias.
        """
        return self.find(alias).model

    def find(self, alias: str) -> Alias:
        """What an alias stands for; errors are those of `get`."""
        if alias not in self.aliases:
            detail = f"No model has the alias {alias!r}; /v1/models lists them."
            raise ProblemError("unknown_model", detail)
        return self.aliases[alias]

    @property
    def loaded(self) -> list[Model]:
        """The models of all aliases, each once, the champion first."""
        names = sorted(self.aliases, key=lambda name: (name != CHAMPION, name))
        return list(dict.fromkeys(self.aliases[name].model for name in names))

    def knows(self, item_id: str) -> bool:
        """Whether a model can recommend an item."""
        return any(model.recommender.catalog.find(item_id) >= 0 for model in self.loaded)

    def queue_depth(self) -> int:
        """Number of requests that wait for the worker."""
        models = (*self.loaded, *self.retiring)
        return sum(len(batcher) for model in models for batcher in model.batchers)

    def collect(self) -> Iterator[Metric]:
        """Metrics of the models as they are when Prometheus asks (`prometheus_client` calls it)."""
        yield GaugeMetricFamily(
            "recsys_queue_depth", "Requests in the queue.", value=self.queue_depth()
        )
        info = GaugeMetricFamily(
            "recsys_model_info", "Loaded models.", labels=["model", "version", "alias"]
        )
        for name, alias in self.aliases.items():
            info.add_metric([*alias.model.bundle, name], 1)
        by_name = {model.name: model.recommender for model in reversed(self.loaded)}
        epochs = GaugeMetricFamily(
            "recsys_catalog_epoch", "Epoch of the live catalog.", labels=["model"]
        )
        items = GaugeMetricFamily(
            "recsys_catalog_items", "Items that can be recommended.", labels=["model"]
        )
        for name, recommender in by_name.items():
            epochs.add_metric([name], recommender.epoch.number)
            items.add_metric([name], recommender.epoch.num_items)
        yield from (info, epochs, items)
        if self.loaded:
            yield from _filter_cache(self.get().recommender.epoch.filters.stats)
        yield from _captured(by_name)

    def info(self) -> list[ModelInfo]:
        """Describe the loaded models."""
        return [
            ModelInfo(
                name=model.name,
                version=model.version,
                epoch=epoch.number,
                items=epoch.num_items,
                levels=epoch.catalog.codes.shape[1],
                exclude_seen=model.recommender.exclude_seen,
                aliases=sorted(n for n, alias in self.aliases.items() if alias.model is model),
            )
            for model in self.loaded
            for epoch in [model.recommender.epoch]
        ]


def _filter_cache(stats: FilterStats) -> tuple[Metric, Metric]:
    """How the cache of filters of the champion is used."""
    masks = CounterMetricFamily(
        "recsys_filter_cache", "Lookups in the cache of filter masks.", labels=["result"]
    )
    masks.add_metric(["hit"], stats.hits)
    masks.add_metric(["miss"], stats.misses)
    memory = GaugeMetricFamily(
        "recsys_filter_cache_bytes", "Memory of cached filter masks.", value=stats.bytes
    )
    return masks, memory


def _captured(recommenders: Mapping[str, Recommender]) -> Sequence[Metric]:
    """How models on a GPU used their graphs; nothing where there are none."""

    def counter(name: str, text: str, *labels: str) -> CounterMetricFamily:
        return CounterMetricFamily(f"recsys_{name}", text, labels=["model", *labels])

    replays = counter("captured_decodes", "Decodes run as one graph.")
    others = counter("uncaptured_decodes", "Decodes not run as one graph.", "reason")
    eager = counter("eager_passes", "Passes without graph.", "reason")
    for name, recommender in recommenders.items():
        if recommender.device.type == "cpu":
            continue
        statistics = recommender.engine.captures.statistics()
        if not statistics.passes:
            continue
        replays.add_metric([name], statistics.replays)
        for family, counts in ((others, statistics.fallbacks), (eager, statistics.eager_passes)):
            for reason, count in counts.items():
                family.add_metric([name, reason], count)
    return (replays, others, eager) if replays.samples else ()
