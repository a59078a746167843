"""Trending items: those of the newest events of all users, read from the store now and then.

They are read at most every `KEPT_S` seconds, at most `DEPTH` of them, so the work is bounded
however many events and requests there are. Nothing is counted incrementally: an event that is
erased, or that another process has written, is missing or there at the next reading.
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass

from recsys.event_names import WEIGHTS, level
from recsys.serving.cached_results import CachedResults
from recsys.serving.models import Models
from recsys.serving.off_loop import OffLoop
from recsys.serving.stores.records import Act, Returned, now_ms
from recsys.serving.stores.store import Store

DEPTH = 200_000  # of the newest events, by arrival
PAGE = 5_000  # events that are read and counted at once, in some milliseconds
HALF_LIFE_MS = 86_400_000  # after which an event counts half
WINDOW_MS = 7 * 86_400_000  # older events do not count
KEPT_S = 30.0
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


class Tally:
    """Counts events, page by page.

    Of a user's events on an item, the one that counts most does: nobody makes an item popular
    alone. What was returned does not count.
    """

    def __init__(
        self, until_ms: int, weigh: Callable[[str], float], not_history: Collection[str] = ()
    ) -> None:
        """An event counts `weigh(type)`, and half of that after each half-life."""
        self._until_ms, self._weigh = until_ms, weigh
        self._weights: dict[str, float] = {}
        self._best: dict[tuple[Hashable, str], tuple[float, int]] = {}  # of a user and an item
        self._returned = Returned(not_history)

    def add(self, acts: Iterable[Act]) -> None:
        """Count events."""
        for act in acts:
            self._returned.add(act)
            if act.type not in self._weights:
                self._weights[act.type] = self._weigh(act.type)
            age = max(0, self._until_ms - act.time_ms)
            value = self._weights[act.type] * 2 ** (-age / HALF_LIFE_MS)
            best, then = self._best.get((act.user, act.item), (0.0, 0))
            if value > (0.0 if self._returned.has(act.user, act.item, then) else best):
                self._best[act.user, act.item] = value, act.time_ms

    def trends(self, since_ms: int) -> Trends:
        """The items of the events that were added."""
        scores: defaultdict[str, float] = defaultdict(float)
        for (user, item), (value, then) in self._best.items():
            if not self._returned.has(user, item, then):
                scores[item] += value
        items = sorted(scores, key=lambda item: (-scores[item], item))
        return Trends(items, [scores[item] for item in items], since_ms)


class Trending:
    """The trends of a store, counted again when somebody asks and they are old."""

    def __init__(self, models: Models, off_loop: OffLoop, not_history: Collection[str]) -> None:
        """Events of the types `not_history` are no sign of interest."""
        self._models, self._off_loop = models, off_loop
        self._not_history = frozenset(not_history)
        self.cached: CachedResults[Trends] = CachedResults(KEPT_S)

    async def __call__(self, store: Store) -> Trends:
        """The trends.

        Raises:
            StoreError: the store cannot be read.
        """
        return await self.cached.get("trends", lambda: self._read(store))

    async def _read(self, store: Store) -> Trends:
        retrieval = self._models.get().recommender.retrieval
        types = None if retrieval is None else retrieval.types
        strength = level if types is None else types.strength

        def weigh(name: str) -> float:
            found = NEGATIVE if name in self._not_history else strength(name)
            return WEIGHTS[VIEW if found is None else found]

        until_ms = now_ms()
        first, last, earliest_ms = await store.history.newest_places(DEPTH)
        since_ms = max(until_ms - WINDOW_MS, earliest_ms)
        tally = Tally(until_ms, weigh, self._not_history)
        for start in range(first, last + 1, PAGE):
            acts = await store.history.acts(start, min(last, start + PAGE - 1), since_ms)
            short = (act.short(self._models.knows) for act in acts)
            await self._off_loop(tally.add, short)
        return await self._off_loop(tally.trends, since_ms)
