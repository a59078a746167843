"""Today: what was recommended in the last hours, and what came of it, for the people of a shop.

Everything is derived from what the store keeps for other purposes: the last answers (at most
`SERVED_KEPT`) and the newest events (`EventColumns`). An answer is followed if its
user sent an event with its `recommendation_id`, as in an experiment. That an answer was given does
not mean that anybody saw it.
"""

import json
from array import array
from collections.abc import Collection, Sequence

import numpy as np
from numpy.typing import NDArray
from scipy.special import stdtrit

from recsys.live import Epoch
from recsys.serving.cached_results import CachedResults
from recsys.serving.event_columns import EventColumns
from recsys.serving.models import Models
from recsys.serving.off_loop import OffLoop
from recsys.serving.schemas.common import CHAMPION, as_json
from recsys.serving.schemas.today import Coverage, ItemFigures, Rate, Today
from recsys.serving.stores.records import SKEW_MS, Given, Sign, now_ms
from recsys.serving.stores.store import Store

LEVEL = 0.95
HOUR_MS = 3_600_000
ANSWERS = 100  # that are read and counted at once, with up to 200 items each
ALWAYS = ("click", "purchase")  # types of events that are shown even if there are none
MOST_TYPES, MOST_ITEMS = 8, 20  # of a list
MAX_AGE_S = 10.0


class Tally:
    """Counts answers, page by page, and the events that refer to them."""

    def __init__(self, epoch: Epoch, events: EventColumns) -> None:
        """With all events; those that are no part of a history are no sign of interest.

        What a user did with an item before returning it does not count. Items of answers and events
        are those of `epoch`; others have no figures.
        """
        self._epoch, self._events = epoch, events
        self.answers = self._without_user = 0
        self._groups = array("q")  # of each answer: its user, or itself if it has none
        self._followed = array("q")  # numbers of an answer and of a type of its events, in turn
        self._shown, self._chosen = (np.zeros(len(epoch.catalog), np.int64) for _ in range(2))
        rows = events.rows
        example, pair, returned = events.pairs()
        interests = events.has_sign(Sign.PART)
        interest = np.full(len(example), -1, np.int64)
        np.maximum.at(interest, pair[interests], rows["time_ms"][interests])
        items = rows["item"][example[interest > returned]]
        self._people = np.bincount(items[items >= 0], minlength=len(epoch.catalog))
        counts = ~interests | (rows["time_ms"] > returned[pair])
        order = np.flatnonzero(counts)[np.argsort(rows["answer"][counts], kind="stable")]
        self._feedback, self._interests = rows[order], interests[order]  # by answer

    def add_answers(self, answers: Sequence[Given]) -> None:
        """Count a page of answers."""
        events = self._feedback
        names = np.array([hash(answer.recommendation_id) for answer in answers], np.int64)
        first, last = (np.searchsorted(events["answer"], names, side) for side in ("left", "right"))
        for answer, start, end in zip(answers, first.tolist(), last.tolist(), strict=True):
            known = self._epoch.catalog.known(json.loads(answer.items))
            user, items = answer.user, {*known[known >= 0].tolist()}
            self._groups.append(hash((answer.recommendation_id,) if user is None else user))
            self._without_user += user is None
            self._shown[[*items]] += 1
            if start < end:
                on_it = events[start:end]
                counts = on_it["time_ms"] >= answer.time_ms - SKEW_MS
                if user is not None:
                    counts &= on_it["user"] == hash(user)
                on_it, interests = on_it[counts], self._interests[start:end][counts]
                for kind in {*on_it["type"].tolist()}:
                    self._followed.extend((self.answers, kind))
                liked = {*on_it["item"][interests].tolist()}
                self._chosen[[*(liked & items)]] += 1
            self.answers += 1

    def figures(self, period: tuple[int, int], complete: bool, events_complete: bool) -> Today:
        """The figures of a period, with the items that can be recommended as the catalog."""
        users, group, sizes = np.unique(
            np.array(self._groups, np.int64), return_inverse=True, return_counts=True
        )
        answer, kind = np.array(self._followed, np.int64).reshape(-1, 2).T
        totals = np.bincount(kind, minlength=len(self._events.types)).tolist()
        by_type = {name: totals[number] for name, number in self._events.types.items()}
        others = [name for name, total in by_type.items() if total and name not in ALWAYS]
        others.sort(key=lambda name: (-by_type[name], name))
        rates = []
        for name in [*ALWAYS, *others[:MOST_TYPES]]:
            of_type = group[answer[kind == self._events.types.get(name, -1)]]
            followed = np.bincount(of_type, minlength=len(users))
            rate, low, high = interval(followed.astype(float), sizes.astype(float))
            rates.append(Rate(type=name, followed=len(of_type), rate=rate, low=low, high=high))
        alive, shown = self._epoch.alive, self._shown > 0
        missing, ignored = alive & ~shown, alive & shown & (self._chosen == 0)
        return Today(
            since_ms=period[0],
            until_ms=period[1],
            answers=self.answers,
            answers_complete=complete,
            people=len(users) - self._without_user,
            answers_without_user=self._without_user,
            events=len(self._events.rows),
            events_complete=events_complete,
            level=LEVEL,
            rates=rates,
            coverage=Coverage(
                items=int(alive.sum()),
                shown=int((alive & shown).sum()),
                never_shown=int(missing.sum()),
                never_followed=int(ignored.sum()),
            ),
            most_shown=self._largest(shown, self._shown),
            never_shown=self._largest(missing, self._people),
            never_followed=self._largest(ignored, self._shown),
        )

    def _largest(self, among: NDArray[np.bool_], by: NDArray[np.int64]) -> list[ItemFigures]:
        """Figures of the first items with the largest numbers."""
        items, catalog = np.flatnonzero(among), self._epoch.catalog
        return [
            ItemFigures(
                item_id=catalog.item_id(item),
                title=catalog.title(item),
                shown=int(self._shown[item]),
                followed=int(self._chosen[item]),
                people=int(self._people[item]),
            )
            for item in items[np.argsort(-by[items], kind="stable")][:MOST_ITEMS].tolist()
        ]


def interval(
    followed: NDArray[np.float64], answers: NDArray[np.float64]
) -> tuple[float | None, float | None, float | None]:
    """The share of answers that were followed, with an interval of `LEVEL`.

    The answers of a user resemble each other, so there are fewer independent ones: as many as would
    give the variance that the ratio has over users. Wilson's interval is computed for that number,
    with a quantile of Student's t for the number of users (Franco, Little, Louis and Slud,
    "Comparative study of confidence intervals for proportions in complex sample surveys", Journal
    of Survey Statistics and Methodology 7, 2019). If no answer or each was followed, the variance
    is not known, and each user counts as one answer.

    Args:
        followed: (users,) number of answers to a user that were followed.
        answers: (users,) number of answers to the user, at least 1.

    Returns:
        The share and both ends; without answers None, and with one user no ends.
    """
    users, total = len(answers), answers.sum()
    if not users:
        return None, None, None
    rate = float(followed.sum() / total)
    if users == 1:
        return rate, None, None
    number = float(users)
    if 0 < rate < 1:
        variance = ((followed - rate * answers) ** 2).sum() * users / (users - 1) / total**2
        number = min(float(total), rate * (1 - rate) / variance) if variance else float(total)
    squared = float(stdtrit(users - 1, (1 + LEVEL) / 2)) ** 2 / number
    middle = (rate + squared / 2) / (1 + squared)
    half = np.sqrt(squared * (rate * (1 - rate) + squared / 4)) / (1 + squared)
    return rate, max(0.0, float(middle - half)), min(1.0, float(middle + half))


class DailyFigures:
    """Makes the figures of today, and keeps them for a while."""

    def __init__(self, models: Models, off_loop: OffLoop, not_history: Collection[str]) -> None:
        """Nothing is read before somebody asks."""
        self._models, self._off_loop, self._not_history = models, off_loop, not_history
        self.cached: CachedResults[bytes] = CachedResults(MAX_AGE_S)

    async def __call__(self, store: Store, days: int) -> bytes:
        """The figures of the last days: a `Today` as JSON.

        Raises:
            StoreError: the store cannot be read.
        """
        return await self.cached.get(days, lambda: self._make(store, days))

    async def _make(self, store: Store, days: int) -> bytes:
        until_ms = now_ms()
        since_ms = until_ms - days * 24 * HOUR_MS
        epoch = self._models.get(CHAMPION).recommender.epoch
        events, oldest_ms = await EventColumns.newest(
            store, self._off_loop, epoch.catalog.known, since_ms, self._not_history
        )
        tally = await self._off_loop(Tally, epoch, events)
        start, forgotten_ms = await store.served.last()
        while start:
            answers = await store.served.page(start, ANSWERS, since_ms)
            await self._off_loop(tally.add_answers, answers)
            start = answers[-1].place - 1 if len(answers) == ANSWERS else 0
        figures = await self._off_loop(
            tally.figures,
            (since_ms, until_ms),
            forgotten_ms is None or forgotten_ms < since_ms,
            oldest_ms < since_ms,
        )
        return as_json(figures)
