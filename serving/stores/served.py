"""Remembered answers of a store, and the exposures of experiments."""

import itertools
import json
from collections import deque
from collections.abc import Collection, Sequence
from typing import Any

import sqlalchemy as sa

from recsys.serving.stores.calls import Calls
from recsys.serving.stores.erasures import UNDER_WAY_MS, erased_among
from recsys.serving.stores.records import SKEW_MS, Exposed, Given, Served
from recsys.serving.stores.schema import EVENTS, EXPOSURES, RECOMMENDATIONS

SERVED_KEPT = 100_000  # answers remembered at most
ITEM_BYTES = 2_048  # of the items of one, as JSON; those behind are not remembered
SERVED_WAITING = 10_000  # of them, not yet written
DROPPED_AT_ONCE = 2_000  # exposures in a transaction, about 0.03 s
EXPOSURES_OF_USER = 100  # in one experiment; later answers do not count
LAST = sa.func.max(RECOMMENDATIONS.c.id)


def _insert_exposure() -> sa.Insert:
    """An insertion of an exposure, up to a window after the first one of its user.

    A program that asks again and again for one user does not fill an experiment.
    """
    x = EXPOSURES.c
    values = {
        c.name: sa.bindparam(c.name, type_=c.type) for c in EXPOSURES.columns if c is not x.id
    }
    number, first_ms = sa.func.count(), sa.func.min(x.time_ms)
    since_ms = sa.bindparam("since_ms", type_=sa.BigInteger)
    counts = (
        sa.select(
            (number < sa.bindparam("most")) & (sa.func.coalesce(first_ms, since_ms + 1) > since_ms)
        )
        .where(x.experiment == values["experiment"], x.user_id == values["user_id"])
        .scalar_subquery()
    )
    return sa.insert(EXPOSURES).from_select([*values], sa.select(*values.values()).where(counts))


INSERT_EXPOSURE = _insert_exposure()


class ServedTable:
    """Answers that are remembered to link feedback to them, the newest `SERVED_KEPT`.

    Of the items of one, those are remembered that fit in `ITEM_BYTES`. Answers are written in the
    background, with the next group of writes.
    """

    def __init__(self, calls: Calls) -> None:
        self._calls = calls
        self._waiting: deque[Served] = deque(maxlen=SERVED_WAITING)

    def remember(self, served: Served) -> None:
        """Remember an answer; of those that wait to be written, the oldest are dropped."""
        if served.user is None or "\0" not in served.user:  # PostgreSQL refuses it
            self._waiting.append(served)

    async def last(self) -> tuple[int, int | None]:
        """The place of the last remembered answer, 0 without any.

        The second value is the time of the oldest one, None if no older ones were forgotten.
        """
        (position,) = await self._calls.rows("today", sa.select(sa.func.coalesce(LAST, 0)), int)
        query = sa.select(RECOMMENDATIONS.c.time_ms).order_by(RECOMMENDATIONS.c.id).limit(1)
        times = await self._calls.rows("today", query, int) if position > SERVED_KEPT else ()
        return position, times[0] if times else None

    async def page(self, after: int, limit: int, since_ms: int) -> list[Given]:
        """Remembered answers since a time, newest first: at most `limit` up to `after`."""
        t = RECOMMENDATIONS.c
        query = sa.select(t.id, t.recommendation_id, t.user_id, t["items"], t.time_ms)
        query = query.where(t.id <= after, t.time_ms >= since_ms)
        return await self._calls.rows("today", query.order_by(t.id.desc()).limit(limit), Given)

    async def exposed(
        self, experiment: str, event: str, window_ms: int, after: str, limit: int
    ) -> list[Exposed]:
        """Users of an experiment, by their ids: at most `limit` after an id.

        An answer is followed if the user sent an event of this type with its `recommendation_id`
        that happened at most `window_ms` later.
        """
        e, x = EVENTS.c, EXPOSURES.c
        is_followed = sa.exists().where(
            e.user_id == x.user_id,
            e.recommendation_id == x.recommendation_id,
            e.type == event,
            e.time_ms.between(x.time_ms - SKEW_MS, x.time_ms + window_ms),
        )
        followed = sa.func.sum(sa.case((is_followed, 1), else_=0))
        query = (
            sa.select(
                x.user_id, sa.func.min(x.arm), sa.func.min(x.time_ms), sa.func.count(), followed
            )
            .where(x.experiment == experiment, x.user_id > after)
            .group_by(x.user_id)
            .order_by(x.user_id)
            .limit(limit)
        )
        return await self._calls.rows("exposed", query, Exposed)

    async def count_exposures(self) -> dict[str, int]:
        """Numbers of exposures by experiment."""
        query = sa.select(EXPOSURES.c.experiment, sa.func.count())
        query = query.group_by(EXPOSURES.c.experiment)
        return dict(await self._calls.rows("exposed", query, lambda *row: row))

    async def drop_exposures(self, experiments: Collection[str]) -> None:
        """Delete the exposures of some experiments; other writes go on meanwhile."""
        is_one = EXPOSURES.c.experiment.in_(experiments)
        some = sa.select(EXPOSURES.c.id).where(is_one).limit(DROPPED_AT_ONCE)
        drop = sa.delete(EXPOSURES).where(EXPOSURES.c.id.in_(some))
        dropped = DROPPED_AT_ONCE if experiments else 0
        while dropped == DROPPED_AT_ONCE:
            dropped = await self._calls.change("exposures", lambda c: c.execute(drop).rowcount)

    # On the writing thread

    def take(self) -> list[Served]:
        """The answers that wait to be written."""
        return [self._waiting.popleft() for _ in range(len(self._waiting))]

    def put_back(self, answers: Sequence[Served]) -> None:
        """Return answers to the queue for the next group; without room, the oldest are dropped."""
        room = SERVED_WAITING - len(self._waiting)
        self._waiting.extendleft(reversed(answers[max(0, len(answers) - room) :]))

    def insert(self, connection: sa.Connection, answers: Sequence[Served]) -> None:
        """Insert answers and their exposures, except those under way when a user was erased."""
        if not answers:
            return
        database = self._calls.database
        users = {answer.user for answer in answers if answer.user is not None}
        erased = erased_among(database, connection, users)
        fresh = [
            answer
            for answer in answers
            if answer.user not in erased or answer.time_ms > erased[answer.user] + UNDER_WAY_MS
        ]
        if fresh:
            insert = database.insert(RECOMMENDATIONS).on_conflict_do_nothing()
            connection.execute(insert, [_row(answer) for answer in fresh])
        if exposures := [
            _exposure(answer) for answer in fresh if answer.exposure and answer.user is not None
        ]:
            connection.execute(INSERT_EXPOSURE, exposures)
        oldest = sa.select(LAST - SERVED_KEPT).scalar_subquery()
        connection.execute(sa.delete(RECOMMENDATIONS).where(RECOMMENDATIONS.c.id <= oldest))


def _row(served: Served) -> dict[str, Any]:
    ends = itertools.accumulate(len(item.encode()) + 4 for item in served.items)  # ", " and quotes
    fitting = served.items[: sum(end <= ITEM_BYTES for end in ends)]
    return {
        "recommendation_id": served.recommendation_id,
        "user_id": served.user,
        "model": served.model,
        "items": json.dumps(fitting, ensure_ascii=False),
        "time_ms": served.time_ms,
    }


def _exposure(served: Served) -> dict[str, Any]:
    exposure = served.exposure
    assert exposure is not None  # noqa: S101 - the caller has looked
    return {
        "experiment": exposure.experiment,
        "user_id": served.user,
        "arm": exposure.arm,
        "recommendation_id": served.recommendation_id,
        "time_ms": served.time_ms,
        "most": EXPOSURES_OF_USER,
        "since_ms": served.time_ms - exposure.window_ms,
    }
