"""Activity: the newest events of all users, as arrays from which popular items are computed.

They are read from the store at most every `KEPT_S` seconds, at most `DEPTH` of them, so the work is
bounded however many events and requests there are. Nothing is counted incrementally: an event that
is erased, or that another process has written, is missing or there at the next reading.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from recsys.serving.reads import Reads
from recsys.serving.renewed import Renewed
from recsys.serving.stores.records import Act, now_ms
from recsys.serving.stores.store import Store

DEPTH = 200_000  # of the newest events, by arrival
PAGE = 5_000  # events that are read and numbered at once, in some milliseconds
LONGEST_MS = 30 * 86_400_000  # older events are not read
KEPT_S = 30.0


@dataclass(frozen=True, eq=False)
class Activity:
    """Events in the order of users and their items: a *pair* is a user with an item.

    Attributes:
        since_ms: events from then on are here.
        until_ms: when they were read.
        items: outside ids of the distinct items.
        types: the distinct types.
        type: (events,) place in `types`.
        time_ms: (events,) unix milliseconds.
        starts: (pairs,) the first event of each pair.
        item: (pairs,) place in `items`.
    """

    since_ms: int
    until_ms: int
    items: list[str]
    types: list[str]
    type: NDArray[np.int32]
    time_ms: NDArray[np.int64]
    starts: NDArray[np.int64]
    item: NDArray[np.int32]

    def trending(
        self, weigh: Callable[[str], float], half_life_ms: float, window_ms: float
    ) -> tuple[NDArray[np.intp], NDArray[np.float64]]:
        """Items by the events of the last `window_ms`, and their scores, best first.

        An event counts `weigh(type)`, and half of that after each half-life. Of a user's events on
        an item, the one that counts most does: nobody makes an item popular alone.

        Returns:
            Places in `items` with a positive score, and these scores. Equal scores are in the order
            of ids.
        """
        if not len(self.starts):
            return np.zeros(0, np.intp), np.zeros(0)
        age = np.maximum(0, self.until_ms - self.time_ms)
        weights = np.array([weigh(name) for name in self.types], np.float64)
        value = np.where(age <= window_ms, weights[self.type] * np.exp2(-age / half_life_ms), 0.0)
        best = np.maximum.reduceat(value, self.starts)
        scores = np.bincount(self.item, best, minlength=len(self.items)).astype(np.float64)
        order = np.argsort(-scores, kind="stable")
        order = order[: np.count_nonzero(scores > 0)]
        return order, scores[order]


class Tally:
    """Collects events, page by page."""

    def __init__(self) -> None:
        """Without events."""
        self._users: dict[str, int] = {}
        self._items: dict[str, int] = {}
        self._types: dict[str, int] = {}
        self._pages: list[NDArray[np.int64]] = []

    def add(self, acts: Iterable[Act]) -> None:
        """Add events."""
        users, items, types = self._users, self._items, self._types
        rows = [
            (
                users.setdefault(act.user, len(users)),
                items.setdefault(act.item, len(items)),
                types.setdefault(act.type, len(types)),
                act.time_ms,
            )
            for act in acts
        ]
        self._pages.append(np.array(rows, np.int64).reshape(-1, 4))

    def activity(self, since_ms: int, until_ms: int) -> Activity:
        """The events that were added."""
        user, item, kind, time_ms = np.concatenate(self._pages or [np.zeros((0, 4), np.int64)]).T
        names = sorted(self._items)  # so that equal scores have one order
        place = np.empty(len(names), np.int64)
        place[[self._items[name] for name in names]] = np.arange(len(names))
        order = np.lexsort((item, user))
        user, item = user[order], place[item[order]]
        changes = (np.diff(user, prepend=-1) != 0) | (np.diff(item, prepend=-1) != 0)
        starts = np.flatnonzero(changes)
        return Activity(
            since_ms,
            until_ms,
            names,
            list(self._types),
            kind[order].astype(np.int32),
            time_ms[order],
            starts,
            item[starts].astype(np.int32),
        )


class Recent:
    """The newest events of the store, read again when they are too old."""

    def __init__(self, reads: Reads) -> None:
        """Without an activity yet."""
        self._reads = reads
        self.renewed: Renewed[Activity] = Renewed(KEPT_S)

    async def __call__(self, store: Store) -> Activity:
        """The activity.

        Raises:
            StoreError: the store cannot be read.
        """
        return await self.renewed.get(0, lambda: self._read(store))

    async def _read(self, store: Store) -> Activity:
        until_ms = now_ms()
        since_ms = until_ms - LONGEST_MS
        first, last, earliest_ms = await store.history.newest_places(DEPTH)
        tally = Tally()
        for place in range(first, last + 1, PAGE):
            acts = await store.history.acts(place, min(last, place + PAGE - 1), since_ms)
            await self._reads(tally.add, acts)
        return await self._reads(tally.activity, max(since_ms, earliest_ms), until_ms)
