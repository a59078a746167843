"""Today: what was recommended in the last hours, and what came of it, for the people of a shop.

Everything is derived from what the store keeps for other purposes: the last answers (at most
`SERVED_KEPT`) and the newest events (`DEPTH` of them are looked at). An answer is followed if its
user sent an event with its `recommendation_id`, as in an experiment. That an answer was given does
not mean that anybody saw it.
"""

import json
from collections import Counter, defaultdict
from collections.abc import Collection, Hashable, Iterable
from itertools import islice

import numpy as np
from numpy.typing import NDArray
from scipy.special import stdtrit

from recsys.live import Epoch
from recsys.serving.cached_results import CachedResults
from recsys.serving.models import Models
from recsys.serving.off_loop import OffLoop
from recsys.serving.schemas.common import CHAMPION
from recsys.serving.schemas.today import Coverage, ItemFigures, Rate, Today
from recsys.serving.stores.records import SKEW_MS, Act, Given, Returned, Sign, now_ms
from recsys.serving.stores.store import Store

LEVEL = 0.95
HOUR_MS = 3_600_000
DEPTH = 200_000  # of the newest events, whatever their times
PAGE = 2_000  # events that are read and counted at once, in some milliseconds
ANSWERS = 200  # answers that are, with up to 200 items each
ALWAYS = ("click", "purchase")  # types of events that are shown even if there are none
MOST_TYPES, MOST_ITEMS = 8, 20  # of a list
KEPT_S = 10.0


class Tally:
    """Counts events, then the answers that they refer to, page by page in any order."""

    def __init__(self, since_ms: int, until_ms: int, not_history: Collection[str]) -> None:
        """Of a period; events of the types `not_history` are no sign of interest in an item.

        What a user did with an item before returning it does not count.
        """
        self._since_ms, self._until_ms = since_ms, until_ms
        self._not_history, self._returned = frozenset(not_history), Returned(not_history)
        self.events = 0
        self._feedback: defaultdict[Hashable, list[Act]] = defaultdict(list)  # by answer
        self._seen: dict[tuple[Hashable, str], int] = {}  # of a user and an item: the last interest
        self.answers = 0
        self._groups: Counter[str] = Counter()  # answers of each user, or of an answer without one
        self._without_user = 0
        self._followed: defaultdict[str, Counter[str]] = defaultdict(Counter)  # by type, by group
        self._shown: Counter[str] = Counter()
        self._chosen: Counter[str] = Counter()

    def add_events(self, events: Iterable[Act]) -> None:
        """Count events."""
        for event in events:
            self.events += 1
            self._returned.add(event)
            if event.recommendation_id is not None:
                self._feedback[event.recommendation_id].append(event)
            if event.type not in self._not_history:
                pair = event.user, event.item
                self._seen[pair] = max(event.time_ms, self._seen.get(pair, 0))

    def add_answers(self, answers: Iterable[Given]) -> None:
        """Count answers, once all events are counted."""
        for answer in answers:
            self.answers += 1
            self._without_user += answer.user is None
            group = f"u{answer.user}" if answer.user is not None else f"a{answer.recommendation_id}"
            self._groups[group] += 1
            items = set(json.loads(answer.items))
            self._shown.update(items)
            answered = [
                event
                for event in self._feedback.get(answer.recommendation_id, ())
                if answer.user in (None, event.user)
                and event.time_ms >= answer.time_ms - SKEW_MS
                and not self._gone(event)
            ]
            for name in {event.type for event in answered}:
                self._followed[name][group] += 1
            liked = {event.item for event in answered if event.type not in self._not_history}
            self._chosen.update(liked & items)

    def _gone(self, event: Act) -> bool:
        """Whether it is a part of a history that its user took back."""
        is_part = self._returned.sign(event.type) is Sign.PART
        return is_part and self._returned.has(event.user, event.item, event.time_ms)

    def figures(self, epoch: Epoch, *, complete: bool, events_complete: bool) -> Today:
        """The figures, with the items that `epoch` can recommend as the catalog."""
        by_type = {name: sum(groups.values()) for name, groups in self._followed.items()}
        others = sorted(by_type.keys() - set(ALWAYS), key=lambda name: (-by_type[name], name))
        sizes = np.array(list(self._groups.values()), float)
        rates = []
        for name in [*ALWAYS, *others[:MOST_TYPES]]:
            followed = np.array([self._followed[name][group] for group in self._groups], float)
            rate, low, high = interval(followed, sizes)
            rates.append(
                Rate(type=name, followed=int(followed.sum()), rate=rate, low=low, high=high)
            )
        catalog = epoch.catalog
        alive = epoch.alive
        shown = catalog.index(self._shown)
        shown = shown[shown >= 0]
        missing = alive.copy()
        missing[shown] = False
        interest = Counter(
            item for (user, item), then in self._seen.items()
            if catalog.find(item) >= 0 and not self._returned.has(user, item, then)
        )  # fmt: skip
        searched = [item for item, _ in interest.most_common() if _at(missing, catalog.find(item))]
        rest = (catalog.item_id(row) for row in np.flatnonzero(missing).tolist())
        never_shown = [*dict.fromkeys([*searched[:MOST_ITEMS], *islice(rest, MOST_ITEMS)])]
        ignored = [item for item, _ in self._shown.most_common() if item not in self._chosen]
        ignored = [item for item in ignored if _at(alive, catalog.find(item))]

        def listed(items: Iterable[str]) -> list[ItemFigures]:
            return [
                ItemFigures(
                    item_id=item,
                    title=_title(epoch, item),
                    shown=self._shown[item],
                    followed=self._chosen[item],
                    people=interest[item],
                )
                for item in islice(items, MOST_ITEMS)
            ]

        return Today(
            since_ms=self._since_ms,
            until_ms=self._until_ms,
            answers=self.answers,
            answers_complete=complete,
            people=len(self._groups) - self._without_user,
            answers_without_user=self._without_user,
            events=self.events,
            events_complete=events_complete,
            level=LEVEL,
            rates=rates,
            coverage=Coverage(
                items=int(alive.sum()),
                shown=int((alive & ~missing).sum()),
                never_shown=int(missing.sum()),
                never_followed=len(ignored),
            ),
            most_shown=listed(item for item, _ in self._shown.most_common(MOST_ITEMS)),
            never_shown=listed(never_shown),
            never_followed=listed(ignored),
        )


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


def _at(mask: NDArray[np.bool_], row: int) -> bool:
    return row >= 0 and bool(mask[row])


def _title(epoch: Epoch, item: str) -> str:
    row = epoch.catalog.find(item)
    return "" if row < 0 else epoch.catalog.title(row)


class DailyFigures:
    """Makes the figures of today, and keeps them for a while."""

    def __init__(self, models: Models, off_loop: OffLoop, not_history: Collection[str]) -> None:
        """Without figures yet."""
        self._models, self._off_loop, self._not_history = models, off_loop, not_history
        self.cached: CachedResults[bytes] = CachedResults(KEPT_S)

    async def __call__(self, store: Store, days: int) -> bytes:
        """The figures of the last days: a `Today` as JSON.

        Raises:
            StoreError: the store cannot be read.
        """
        return await self.cached.get(days, lambda: self._make(store, days))

    async def _make(self, store: Store, days: int) -> bytes:
        until_ms = now_ms()
        since_ms = until_ms - days * 24 * HOUR_MS
        tally = Tally(since_ms, until_ms, self._not_history)
        first, last, oldest_ms = await store.history.newest_places(DEPTH)
        for start in range(first, last + 1, PAGE):
            up_to = min(start + PAGE - 1, last)
            if events := await store.history.acts(start, up_to, since_ms):
                short = (event.short(self._models.knows) for event in events)
                await self._off_loop(tally.add_events, short)
        page = ANSWERS
        start, forgotten_ms = await store.served.last()
        while page == ANSWERS:
            answers = await store.served.page(start, ANSWERS, since_ms)
            await self._off_loop(tally.add_answers, (answer.short() for answer in answers))
            page, start = len(answers), answers[-1].place - 1 if answers else 0
        epoch = self._models.get(CHAMPION).recommender.epoch
        return await self._off_loop(
            lambda: (
                tally.figures(
                    epoch,
                    complete=forgotten_ms is None or forgotten_ms < since_ms,
                    events_complete=oldest_ms < since_ms,
                )
                .model_dump_json()
                .encode()
            )
        )
