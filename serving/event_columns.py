"""The newest events of all users in columns, for figures of very many.

Users, answers and pairs of a user and an item are hashes, and items are numbers, so that events
with long ids take no more memory than others.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Self

import numpy as np
from numpy.typing import NDArray

from recsys.serving.off_loop import OffLoop
from recsys.serving.stores.records import Act, Sign, sign_of
from recsys.serving.stores.store import Store

DEPTH = 200_000  # of the newest events, by arrival, whatever their times
PAGE = 2_000  # events that are read at once, in some milliseconds
COLUMNS = ("user", "pair", "answer", "time_ms", "item", "type")  # a pair: of user and item
Number = Callable[[list[str]], Iterable[int]]  # of items by their ids; -1 if one does not count


class EventColumns:
    """Events that are added page by page.

    Attributes:
        rows: the events, with `COLUMNS`; an answer is 0 for none.
        types: number of each type of events.
    """

    def __init__(self, most: int, not_history: Collection[str]) -> None:
        """Without events yet, of at most so many; `not_history` is as in `sign_of`."""
        self._room = np.empty(most, np.dtype([(name, np.int64) for name in COLUMNS]))
        self.rows = self._room[:0]
        self.types: dict[str, int] = {}
        self._not_history = not_history

    @classmethod
    async def newest(
        cls,
        store: Store,
        off_loop: OffLoop,
        number: Number,
        since_ms: int,
        not_history: Collection[str],
    ) -> tuple[Self, int]:
        """Those of the newest `DEPTH` events that happened since a time.

        Returns them, and the time of the first that was looked at, 0 if there are no earlier ones.
        """
        first, last, oldest_ms = await store.history.newest_places(DEPTH)
        events = cls(last + 1 - first, not_history)
        for start in range(first, last + 1, PAGE):
            acts = await store.history.acts(start, min(last, start + PAGE - 1), since_ms)
            await off_loop(events.add, acts, number)
        return events, oldest_ms

    def add(self, acts: Sequence[Act], number: Number) -> None:
        """Add events."""
        types, size = self.types, len(self.rows)
        self._room[size : size + len(acts)] = [
            (
                hash(act.user),
                hash((act.user, act.item)),
                0 if act.recommendation_id is None else hash(act.recommendation_id),
                act.time_ms,
                item,
                types.setdefault(act.type, len(types)),
            )
            for act, item in zip(acts, number([act.item for act in acts]), strict=True)
        ]
        self.rows = self._room[: size + len(acts)]

    def by_type(self, value: Callable[[str], float]) -> NDArray[np.float64]:
        """(events,) float64: for each event, `value` of the name of its type."""
        values = np.array([value(name) for name in self.types], float)
        return np.asarray(values[self.rows["type"]])

    def has_sign(self, sign: Sign) -> NDArray[np.bool_]:
        """(events,) whether each has this sign."""
        return self.by_type(lambda name: sign_of(name, self._not_history) is sign) > 0

    def pairs(self) -> tuple[NDArray[np.intp], NDArray[np.intp], NDArray[np.int64]]:
        """The pairs of users and items.

        Returns:
            (pairs,) one event of each, (events,) the pair of each, and (pairs,) the time when the
            user returned the item last, or -1: what happened until then does not count.
        """
        _, first, pair = np.unique(self.rows["pair"], return_index=True, return_inverse=True)
        returned, back = np.full(len(first), -1, np.int64), self.has_sign(Sign.RETURN)
        np.maximum.at(returned, pair[back], self.rows["time_ms"][back])
        return first, pair, returned
