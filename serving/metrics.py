"""Metrics of one application, as Prometheus text.

Each application has its own registry, so two applications of one process (in tests) share nothing.
The values of labels come from closed sets or from names that an administrator chose, never from a
request, so their number is bounded.
"""

from collections import Counter as Tally
from collections.abc import Iterable, Mapping, Sequence

from prometheus_client import (
    GC_COLLECTOR,
    PLATFORM_COLLECTOR,
    PROCESS_COLLECTOR,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    generate_latest,
)

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
SECONDS = (
    0.001, 0.0025, 0.005, 0.01, 0.02, 0.035, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0,
)  # fmt: skip
STAGES = ("history", "queue", "compute", "total")  # of an answer; `compute` is its whole batch
SIZES = (1, 2, 4, 8, 16, 32, 64, 128)
PASSES = (1, 2, 3, 4, 5, 6, 8, 12, 16)


class Metrics:
    """Metrics of one application.

    A metric that is counted in one place is an attribute, for example `erasures`; what several
    metrics count together is a method.

    Attributes:
        registry: of Prometheus; the service adds the loaded models (`Models.collect`).
    """

    def __init__(self) -> None:
        """Start with empty metrics."""
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = registry = CollectorRegistry()
        for collector in (PROCESS_COLLECTOR, PLATFORM_COLLECTOR, GC_COLLECTOR):
            registry.register(collector)

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"recsys_{name}", text, labels, registry=registry)

        def gauge(name: str, text: str, *labels: str) -> Gauge:
            return Gauge(f"recsys_{name}", text, labels, registry=registry)

        def histogram(name: str, text: str, buckets: Sequence[float], *labels: str) -> Histogram:
            return Histogram(f"recsys_{name}", text, labels, registry=registry, buckets=buckets)

        # HTTP
        self._http_requests = counter("http_requests", "Requests.", "method", "route", "status")
        self._http_seconds = histogram("http_seconds", "Time to respond.", SECONDS, "route")
        self.in_flight = gauge("http_in_flight", "Requests in progress.")
        self.errors = counter("errors", "Problem responses by code.", "code")
        self.rate_limited = counter("rate_limited", "Requests refused by the rate limit.")
        # Recommendations
        stages = histogram("recommend_seconds", "Time of each stage.", SECONDS, "stage")
        self._stages = {stage: stages.labels(stage) for stage in STAGES}
        self._answers = counter(
            "recommendations", "Answers by model and certificate.", "model", "certificate"
        )
        self._items = counter("recommended_items", "Recommended items by source.", "source")
        self._passes = histogram("target_passes", "Target passes per answer.", PASSES)
        self._tokens = counter("target_tokens", "Tokens that the target processed.")
        self._cached = counter("cached_tokens", "Prompt tokens found in the prefix cache.")
        self._drafted = counter("drafted_levels", "Drafted levels.", "level")
        self._accepted = counter("accepted_levels", "Drafted levels that were accepted.", "level")
        self._batch_sizes = histogram("batch_size", "Requests per batch.", SIZES)
        self._batch_seconds = histogram("batch_seconds", "Time per batch.", SECONDS)
        self.fallbacks = counter("fallbacks", "Answers filled up from a fallback.", "source")
        # Store
        self._store_seconds = histogram("store_seconds", "Time per call.", SECONDS, "operation")
        self.events = counter("events", "Received events.", "result")
        self.erasures = counter("erasures", "Erased users.")
        # Models
        self.swaps = counter("swaps", "Changes of an alias by outcome.", "alias", "outcome")
        self.ready = gauge("ready", "1 while recommendations are answered.")

    def responded(self, method: str, route: str, status: int, seconds: float) -> None:
        """Count a response; `route` is the template of its path."""
        self.in_flight.dec()
        self._http_requests.labels(method, route, str(status)).inc()
        self._http_seconds.labels(route).observe(seconds)

    def answered(
        self,
        seconds: Mapping[str, float],
        *,
        stats: Mapping[str, float] | None = None,
        levels: int = 0,
        model: str = "",
        certificate: str = "",
        sources: Iterable[str] = (),
    ) -> None:
        """Count an answered recommendation.

        Args:
            seconds: duration of each of `STAGES`; a missing one took no time.
            stats: counters of its decode (`recsys.decoding.DecodeStats` as a mapping); None if the
                model was not run.
            levels: number of codes in a semantic ID, to count the drafted levels.
            model: name of the bundle.
            certificate: of the answer.
            sources: source of each item.
        """
        for stage, histogram in self._stages.items():
            histogram.observe(seconds.get(stage, 0.0))
        self._answers.labels(model, certificate or "none").inc()
        for source, items in Tally(sources).items():
            self._items.labels(source).inc(items)
        if stats is None:
            return
        passes = stats.get("target_passes", 0)
        self._passes.observe(passes)
        self._tokens.inc(stats.get("target_tokens", 0))
        self._cached.inc(stats.get("cached_tokens", 0))
        if stats.get("drafted_nodes", 0) and levels > 1:
            accepted = min(int(stats.get("accepted_levels", 0)), levels - 1)
            for level in range(1, levels):
                self._drafted.labels(str(level)).inc()
                if level <= accepted:
                    self._accepted.labels(str(level)).inc()

    def batch(self, size: int, seconds: float) -> None:
        """Count a batch of `size` requests that took `seconds`."""
        self._batch_sizes.observe(size)
        self._batch_seconds.observe(seconds)

    def store_call(self, operation: str, seconds: float) -> None:
        """Count a call of the store: `history`, `append`, `erase`, ... (`Observer`)."""
        self._store_seconds.labels(operation).observe(seconds)

    def exposition(self) -> bytes:
        """Prometheus' text format (content type `CONTENT_TYPE`)."""
        return generate_latest(self.registry)
