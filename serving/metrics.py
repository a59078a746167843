"""Metrics: what the service counts, as Prometheus text and as short series for the page.

The other modules call one small method for each thing that happens and know no metric's name. Each
application has a registry of its own, so that two in one process (tests) share nothing. Labels are
taken from closed sets or from what an administrator named, never from a request, so their number is
bounded.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter as Tally
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

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
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from recsys.serving.telemetry import Telemetry

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
SECONDS = (
    0.001, 0.0025, 0.005, 0.01, 0.02, 0.035, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0,
)  # fmt: skip
STAGES = ("history", "queue", "compute", "total")
SIZES = (1, 2, 4, 8, 16, 32, 64, 128)
PASSES = (1, 2, 3, 4, 5, 6, 8, 12, 16)
SLOT_S = 5.0
SLOTS = 120
# 0.1 ms to 100 s in steps of a tenth: a quantile read from it is at most a tenth too large.
_EDGES = tuple(0.1 * 1.1**i for i in range(146))


class Metrics:
    """Counters of one application.

    Attributes:
        registry: of Prometheus.
        series: the last ten minutes, for `/v1/stats`.
        telemetry: told of the stages of each answer; traces nothing unless it is replaced.
    """

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        """Start from nothing. `clock` counts seconds and never goes back."""
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.telemetry = Telemetry()
        self.registry = registry = CollectorRegistry()
        self.series = Series(clock)
        for collector in (PROCESS_COLLECTOR, PLATFORM_COLLECTOR, GC_COLLECTOR):
            registry.register(collector)

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"recsys_{name}", text, labels, registry=registry)

        def gauge(name: str, text: str, *labels: str) -> Gauge:
            return Gauge(f"recsys_{name}", text, labels, registry=registry)

        def histogram(name: str, text: str, buckets: Sequence[float], *labels: str) -> Histogram:
            return Histogram(f"recsys_{name}", text, labels, registry=registry, buckets=buckets)

        self._http = counter("http_requests", "Requests.", "method", "route", "status")
        self._http_seconds = histogram("http_seconds", "Time to answer.", SECONDS, "route")
        self._in_flight = gauge("http_in_flight", "Requests under way.")
        self._errors = counter("errors", "Problems answered, by code.", "code")
        self._stages = histogram(
            "recommend_seconds",
            "Time of a recommendation by stage: history, queue, compute, total.",
            SECONDS,
            "stage",
        )
        self._of_stage = [self._stages.labels(stage) for stage in STAGES]
        self._answers = counter(
            "recommendations", "Answers by model and certificate.", "model", "certificate"
        )
        self._items = counter("recommended_items", "Items by what proposed them.", "source")
        self._passes = histogram("target_passes", "Target passes an answer.", PASSES)
        self._tokens = counter("target_tokens", "Tokens the target was run on.")
        self._cached = counter("cached_tokens", "Prompt tokens kept from an earlier answer.")
        self._drafted = counter("drafted_levels", "Levels that were drafted.", "level")
        self._accepted = counter("accepted_levels", "Drafted levels that were accepted.", "level")
        self._batch_sizes = histogram("batch_size", "Requests computed together.", SIZES)
        self._batch_seconds = histogram("batch_seconds", "Time of a batch.", SECONDS)
        self._fallbacks = counter("fallbacks", "Answers not of the model alone.", "source")
        self._history_cache = counter("history_cache", "Histories asked of the cache.", "result")
        self._store_seconds = histogram("store_seconds", "Time of a call.", SECONDS, "operation")
        self._events = counter("events", "Events received.", "result")
        self._erasures = counter("erasures", "Users erased.")
        self._shadow_overlap = histogram(
            "shadow_overlap",
            "Share of the answer's items that the shadow has too.",
            (0.0, 0.2, 0.4, 0.6, 0.8, 0.9, 0.999),
        )
        self._shadow_seconds = histogram("shadow_seconds", "Time of a shadow answer.", SECONDS)
        self._shadow_passes = counter("shadow_target_passes", "Target passes of shadow answers.")
        self._shadow_drops = counter("shadow_drops", "Samples not run, by reason.", "reason")
        self._models = gauge("model_info", "Models loaded.", "model", "version", "alias")
        self._epochs = gauge("catalog_epoch", "Number of the catalog's epoch.", "model")
        self._catalog = gauge("catalog_items", "Items that can be recommended.", "model")
        self._swaps = counter("swaps", "Changes of an alias, by outcome.", "alias", "outcome")
        self._limited = counter("rate_limited", "Requests refused by the rate limit.")
        self._ready = gauge("ready", "1 while recommendations are answered.")
        registry.register(_Watched(self))
        self._queue_depth: Callable[[], int] = lambda: 0
        self._filter_stats: Callable[[], Any] = lambda: None

    # HTTP (the middleware)

    def began(self) -> None:
        """A request came in."""
        self._in_flight.inc()

    def ended(self, method: str, route: str, status: int, seconds: float) -> None:
        """A request was answered (or its client left: 499).

        Args:
            method: of HTTP; one that no route has is passed as `OTHER`.
            route: its template, never the path itself; `unmatched` where there is none.
            status: of HTTP.
            seconds: from its first byte to the end of its answer.
        """
        self._in_flight.dec()
        self._http.labels(method, route, str(status)).inc()
        self._http_seconds.labels(route).observe(seconds)

    def error(self, code: str) -> None:
        """A problem of this code was answered."""
        self._errors.labels(code).inc()
        self.series.now.errors += 1

    def limited(self) -> None:
        """The rate limit refused a request."""
        self._limited.inc()

    # Recommendations (the service)

    def answered(
        self,
        *,
        total_s: float,
        history_s: float = 0.0,
        queue_s: float = 0.0,
        compute_s: float = 0.0,
        stats: Mapping[str, float] | None = None,
        levels: int = 0,
        model: str = "",
        certificate: str = "",
        sources: Iterable[str] = (),
    ) -> None:
        """A recommendation was answered.

        Args:
            total_s: from request to answer, in seconds; so are the stages.
            history_s: reading the history.
            queue_s: waiting for the worker.
            compute_s: the batch it was in.
            stats: counters of its decode (`recsys.decoding.DecodeStats` as a mapping); None if the
                model was not asked.
            levels: of a semantic ID; needed to tell which drafted levels were accepted.
            model: name of the bundle.
            certificate: of the answer.
            sources: of each item.
        """
        for histogram, seconds in zip(
            self._of_stage, (history_s, queue_s, compute_s, total_s), strict=True
        ):
            histogram.observe(seconds)
        self.telemetry.stages(
            {"history": history_s, "queue": queue_s, "decode": compute_s}, stats or {}
        )
        self._answers.labels(model, certificate or "none").inc()
        for source, items in Tally(sources).items():
            self._items.labels(source).inc(items)
        slot = self.series.now
        slot.observe(total_s * 1000)
        if stats is None:
            return
        passes = stats.get("target_passes", 0)
        self._passes.observe(passes)
        self._tokens.inc(stats.get("target_tokens", 0))
        self._cached.inc(stats.get("cached_tokens", 0))
        slot.passes += passes
        slot.decoded += 1
        if stats.get("drafted_nodes", 0) and levels > 1:
            accepted = int(stats.get("accepted_levels", 0))
            for level in range(1, levels):
                self._drafted.labels(str(level)).inc()
                if level <= accepted:
                    self._accepted.labels(str(level)).inc()
            slot.drafted += levels - 1
            slot.accepted += min(accepted, levels - 1)

    def batch(self, size: int, seconds: float) -> None:
        """A batch of `size` requests was computed in `seconds`."""
        self._batch_sizes.observe(size)
        self._batch_seconds.observe(seconds)
        slot = self.series.now
        slot.batches += 1
        slot.batched += size

    def fallback(self, source: str) -> None:
        """An answer was filled up, or made, by `retrieval` or `popular`."""
        self._fallbacks.labels(source).inc()
        self.series.now.fallbacks += 1

    def shadow(self, overlap: float, accepted: float, seconds: float, *, passes: float = 0) -> None:
        """A sampled request was run again in the background.

        Args:
            overlap: share of the answer's items that the shadow's answer has, too.
            accepted: drafted levels that the shadow's first pass accepted.
            seconds: that it took.
            passes: target passes that it took.
        """
        self._shadow_overlap.observe(overlap)
        self._shadow_seconds.observe(seconds)
        self._shadow_passes.inc(passes)
        slot = self.series.now
        slot.shadowed += 1
        slot.overlap += overlap
        slot.shadow_accepted += accepted

    def shadow_dropped(self, reason: str) -> None:
        """A sampled request was not run again: `busy`, `stale` or `failed`."""
        self._shadow_drops.labels(reason).inc()

    # Histories and events (the stores)

    def history_cache(self, *, hit: bool) -> None:
        """The history cache was asked."""
        self._history_cache.labels("hit" if hit else "miss").inc()

    def store_call(self, operation: str, seconds: float) -> None:
        """The store was called: `history`, `append`, `erase`, ..."""
        self._store_seconds.labels(operation).observe(seconds)

    def events(self, accepted: int, duplicates: int = 0) -> None:
        """Events were stored, or were there already."""
        self._events.labels("accepted").inc(accepted)
        self._events.labels("duplicate").inc(duplicates)
        self.series.now.events += accepted

    def erased(self) -> None:
        """A user was erased."""
        self._erasures.inc()

    # Models (loading, aliases, the live catalog)

    def models(self, loaded: Iterable[tuple[str, str, str]]) -> None:
        """These (model, version, alias or "") are loaded now, and no others."""
        self._models.clear()
        for model, version, alias in loaded:
            self._models.labels(model, version, alias).set(1)

    def catalog(self, model: str, epoch: int, items: int) -> None:
        """A model's catalog has this epoch and so many items."""
        self._epochs.labels(model).set(epoch)
        self._catalog.labels(model).set(items)

    def forget(self, model: str) -> None:
        """A model was unloaded."""
        for metric in (self._epochs, self._catalog):
            metric.remove_by_labels({"model": model})

    def swapped(self, alias: str, outcome: str) -> None:
        """An alias was asked to change: `done`, `refused` or `rolled_back`."""
        self._swaps.labels(alias, outcome).inc()

    def ready(self, yes: bool) -> None:
        """Whether recommendations are answered."""
        self._ready.set(float(yes))

    def watch(
        self,
        *,
        queue_depth: Callable[[], int] | None = None,
        filter_stats: Callable[[], Any] | None = None,
    ) -> None:
        """Read these whenever somebody looks.

        Args:
            queue_depth: requests waiting.
            filter_stats: `recsys.constraint.filter_cache.FilterStats` of the model that answers, or
                None.
        """
        self._queue_depth = queue_depth or self._queue_depth
        self._filter_stats = filter_stats or self._filter_stats

    # Readers

    @property
    def queue_depth(self) -> int:
        """Requests waiting."""
        return self._queue_depth()

    def exposition(self) -> bytes:
        """Prometheus' text format (content type `CONTENT_TYPE`)."""
        return generate_latest(self.registry)

    def watched(self) -> Iterable[Metric]:
        """Metrics that are read when somebody looks."""
        yield GaugeMetricFamily(
            "recsys_queue_depth", "Requests waiting for the worker.", value=self.queue_depth
        )
        found = self._filter_stats()
        if found is None:
            return
        masks = CounterMetricFamily(
            "recsys_filter_cache", "Filter masks asked of the cache.", labels=["result"]
        )
        masks.add_metric(["hit"], found.hits)
        masks.add_metric(["miss"], found.misses)
        yield masks
        yield GaugeMetricFamily(
            "recsys_filter_cache_bytes", "Memory of kept filter masks.", value=found.bytes
        )


class _Watched:
    """A collector for `Metrics.watched`."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def collect(self) -> Iterable[Metric]:
        return self._metrics.watched()


@dataclass
class Slot:
    """What happened in `SLOT_S` seconds.

    Attributes:
        began: on the series' clock.
        latency: answers by the bin of their latency.
    """

    began: float
    latency: dict[int, int] = field(default_factory=dict)
    errors: int = 0
    batches: int = 0
    batched: int = 0
    decoded: int = 0
    passes: float = 0.0
    drafted: int = 0
    accepted: int = 0
    fallbacks: int = 0
    events: int = 0
    shadowed: int = 0
    overlap: float = 0.0
    shadow_accepted: float = 0.0

    def observe(self, ms: float) -> None:
        """Count an answer of this latency."""
        bin_ = bisect_left(_EDGES, ms)
        self.latency[bin_] = self.latency.get(bin_, 0) + 1

    @property
    def answers(self) -> int:
        """Recommendations answered."""
        return sum(self.latency.values())


class Series:
    """The last `SLOTS` slots of `SLOT_S` seconds each; memory does not grow with requests."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """Start an empty series on `clock`."""
        self._clock = clock
        self._slots: deque[Slot] = deque([Slot(clock())], maxlen=SLOTS)

    @property
    def now(self) -> Slot:
        """The slot to count in."""
        slot, now = self._slots[-1], self._clock()
        if now - slot.began < SLOT_S:
            return slot
        steps = int((now - slot.began) // SLOT_S)
        for step in range(max(1, steps - SLOTS + 1), steps + 1):  # quiet slots are slots, too
            self._slots.append(Slot(slot.began + step * SLOT_S))
        return self._slots[-1]

    def snapshot(self) -> dict[str, Any]:
        """Parallel lists, oldest first, and totals of the last minute.

        A value is None where nothing happened that it could be of.
        """
        now = self.now
        slots = list(self._slots)
        recent = slots[-int(60 / SLOT_S) :]
        return {
            "slot_seconds": SLOT_S,
            "ago_seconds": [round(now.began - slot.began, 1) for slot in slots],
            **_columns([[slot] for slot in slots], self._clock()),
            "last_minute": {
                key: values[0] for key, values in _columns([recent], self._clock()).items()
            },
        }


def _columns(groups: Sequence[Sequence[Slot]], now: float) -> dict[str, list[Any]]:
    rows = [_facts(group, now) for group in groups]
    return {key: [row[key] for row in rows] for key in rows[0]}


def _facts(slots: Sequence[Slot], now: float) -> dict[str, float | int | None]:
    """Figures of some neighbouring slots taken together; the last may have only begun."""
    seconds = max(1.0, min(now, slots[-1].began + SLOT_S) - slots[0].began)

    def total(name: str) -> Any:
        return sum(getattr(slot, name) for slot in slots)

    def mean(part: str, whole: str) -> float | None:
        return round(total(part) / total(whole), 3) if total(whole) else None

    latency: dict[int, int] = {}
    for slot in slots:
        for bin_, count in slot.latency.items():
            latency[bin_] = latency.get(bin_, 0) + count
    return {
        "qps": round(total("answers") / seconds, 2),
        "answers": total("answers"),
        "p50_ms": _quantile(latency, 0.50),
        "p99_ms": _quantile(latency, 0.99),
        "errors": total("errors"),
        "batch_size": mean("batched", "batches"),
        "target_passes": mean("passes", "decoded"),
        "acceptance": mean("accepted", "drafted"),
        "fallbacks": total("fallbacks"),
        "events": total("events"),
        "shadow_overlap": mean("overlap", "shadowed"),
        "shadow_accepted_levels": mean("shadow_accepted", "shadowed"),
    }


def _quantile(latency: Mapping[int, int], q: float) -> float | None:
    """Upper edge, in milliseconds, of the bin that holds the quantile."""
    bins = sorted(latency)
    if not bins:
        return None
    counts = list(accumulate(latency[bin_] for bin_ in bins))
    found = bins[bisect_left(counts, q * counts[-1])]
    return round(_EDGES[min(found, len(_EDGES) - 1)], 2)
