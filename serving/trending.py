"""Trending items: those of the newest events of all users, read from the store now and then.

They are read at most every `MAX_AGE_S` seconds, as `EventColumns`, so the work is bounded
however many events and requests there are. Nothing is counted incrementally: an event that is
erased, or that another process has written, is missing or there at the next reading.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from recsys.event_names import WEIGHTS, level
from recsys.serving.cached_results import CachedResults
from recsys.serving.event_columns import EventColumns
from recsys.serving.models import Models
from recsys.serving.off_loop import OffLoop
from recsys.serving.stores.records import now_ms
from recsys.serving.stores.store import Store

HALF_LIFE_MS = 86_400_000  # after which an event counts half
WINDOW_MS = 7 * 86_400_000  # older events do not count
MAX_AGE_S = 30.0
NEGATIVE, VIEW = range(2)  # of `recsys.event_names.level`


@dataclass(frozen=True, eq=False)
class Trends:
    """Items and their scores, best first; equal scores are in the order of ids.

    Attributes:
        items: outside ids.
        scores: sums over users of what their events count.
        since_ms: events from then on count.
    """

    items: Sequence[str]
    scores: Sequence[float]
    since_ms: int


def trends_of(
    events: EventColumns,
    names: Iterable[str],
    until_ms: int,
    since_ms: int,
    weigh: Callable[[str], float],
) -> Trends:
    """The items of events, by their `names` in the order of numbers.

    An event counts `weigh(type)`, and half of that after each half-life. Of a user's events on an
    item, the one that counts most does: nobody makes an item popular alone. What was returned does
    not count.
    """
    rows = events.rows
    example, pair, returned = events.pairs()
    age = np.maximum(0, until_ms - rows["time_ms"])
    values = events.by_type(weigh) * 2 ** (-age / HALF_LIFE_MS)
    best = np.zeros(len(example))
    counts = (rows["time_ms"] > returned[pair]) & (rows["time_ms"] >= since_ms)
    np.maximum.at(best, pair[counts], values[counts])
    items = rows["item"][example]
    sums = np.bincount(items[items >= 0], best[items >= 0]).tolist()
    ranked = sorted((-score, name) for name, score in zip(names, sums, strict=False) if score > 0)
    return Trends([name for _, name in ranked], [-score for score, _ in ranked], since_ms)


class Trending:
    """The trends of a store, counted again when somebody asks and they are old."""

    def __init__(self, models: Models, off_loop: OffLoop, not_history: Collection[str]) -> None:
        """Events of the types `not_history` are no sign of interest."""
        self._models, self._off_loop = models, off_loop
        self._not_history = frozenset(not_history)
        self.cached: CachedResults[Trends] = CachedResults(MAX_AGE_S)

    async def __call__(self, store: Store) -> Trends:
        """The trends of a store, about `MAX_AGE_S` seconds old at most.

        Raises:
            StoreError: the store cannot be read.
        """
        return await self.cached.get("trends", lambda: self._read(store))

    async def _read(self, store: Store) -> Trends:
        retrieval = self._models.get().recommender.retrieval
        types = None if retrieval is None else retrieval.types
        strength = level if types is None else types.strength

        def weigh(name: str) -> float:
            known_level = NEGATIVE if name in self._not_history else strength(name)
            return WEIGHTS[VIEW if known_level is None else known_level]

        until_ms = now_ms()
        numbers: dict[str, int] = {}  # of items that a model knows

        def number(names: Iterable[str]) -> list[int]:
            knows = self._models.knows
            return [numbers.setdefault(i, len(numbers)) if knows(i) else -1 for i in names]

        since_ms = until_ms - WINDOW_MS
        events, earliest_ms = await EventColumns.newest(
            store, self._off_loop, number, since_ms, self._not_history
        )
        since_ms = max(since_ms, earliest_ms)
        return await self._off_loop(trends_of, events, numbers, until_ms, since_ms, weigh)
