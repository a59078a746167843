"""Short series of what happened in the last ten minutes, for the operations view."""

from bisect import bisect_left
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

SLOT_S = 5.0
SLOTS = 120
# 0.1 ms to 100 s, each edge 10 % above the one before: quantiles are at most 10 % too large.
_EDGES = tuple(0.1 * 1.1**i for i in range(146))


@dataclass
class Slot:
    """What happened in `SLOT_S` seconds: sums by name, and the answers in each bin of `_EDGES`."""

    began: float
    counts: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    latency: Counter[int] = field(default_factory=Counter)


class Series:
    """The last `SLOTS` slots of `SLOT_S` seconds; memory does not grow with the requests.

    `clock` returns seconds and never goes back.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._slots: deque[Slot] = deque([Slot(clock())], maxlen=SLOTS)

    def count(self, **amounts: float) -> None:
        """Add to the sums of the current slot."""
        counts = self.current.counts
        for name, amount in amounts.items():
            counts[name] += amount

    def observe(self, latency_ms: float) -> None:
        """Count an answer and its latency."""
        slot = self.current
        slot.counts["answers"] += 1
        slot.latency[min(bisect_left(_EDGES, latency_ms), len(_EDGES) - 1)] += 1

    @property
    def current(self) -> Slot:
        """The slot of now; slots without any event are added up to it."""
        slot, now = self._slots[-1], self._clock()
        steps = int((now - slot.began) // SLOT_S)
        for step in range(max(1, steps - SLOTS + 1), steps + 1):
            self._slots.append(Slot(slot.began + step * SLOT_S))
        return self._slots[-1]

    def snapshot(self) -> dict[str, Any]:
        """Parallel lists, oldest slot first, and the figures of the last minute.

        A value is None where there is nothing to take the mean of.
        """
        last, now = self.current, self._clock()
        slots = list(self._slots)
        figures = [_figures([slot], now) for slot in slots]
        return {
            "slot_seconds": SLOT_S,
            "ago_seconds": [round(last.began - slot.began, 1) for slot in slots],
            **{name: [row[name] for row in figures] for name in figures[0]},
            "last_minute": _figures(slots[-int(60 / SLOT_S) :], now),
        }


def _figures(slots: Sequence[Slot], now: float) -> dict[str, float | None]:
    """Figures of consecutive slots taken together; the last slot may not be over yet."""
    seconds = max(1.0, min(now, slots[-1].began + SLOT_S) - slots[0].began)
    counts: defaultdict[str, float] = defaultdict(float)
    latency: Counter[int] = Counter()
    for slot in slots:
        latency.update(slot.latency)
        for name, amount in slot.counts.items():
            counts[name] += amount

    def mean(part: str, whole: str) -> float | None:
        return round(counts[part] / counts[whole], 3) if counts[whole] else None

    return {
        "qps": round(counts["answers"] / seconds, 2),
        "answers": counts["answers"],
        "p50_ms": _quantile(latency, 0.50),
        "p99_ms": _quantile(latency, 0.99),
        "errors": counts["errors"],
        "batch_size": mean("batched", "batches"),
        "target_passes": mean("passes", "decoded"),
        "acceptance": mean("accepted", "drafted"),
        "fallbacks": counts["fallbacks"],
        "events": counts["events"],
        "shadow_overlap": mean("overlap", "shadowed"),
        "shadow_accepted_levels": mean("shadow_accepted", "shadowed"),
    }


def _quantile(latency: Counter[int], q: float) -> float | None:
    """Upper edge, in milliseconds, of the bin that holds the quantile."""
    bins = sorted(latency)
    if not bins:
        return None
    counts = list(accumulate(latency[bin_] for bin_ in bins))
    return round(_EDGES[bins[bisect_left(counts, q * counts[-1])]], 2)
