"""Cleans whole histories of a shop's export: placeholder users, bots, repeated steps, dislikes.

The rules work on arrays of dense numbers in the order of user and time, of all or some users.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import pyarrow as pa
from numpy.typing import NDArray

from recsys.data import cleaning
from recsys.data.behaviours import choose_types
from recsys.data.report import EXAMPLES, Report, sentence
from recsys.errors import DataError
from recsys.event_names import PURCHASE, is_partial, is_return, level
from recsys.interactions import Behaviour, Role

NEAR_DUPLICATES_S = 30 * 60  # consecutive events on one item within this time are one step
BOT_FACTOR = 20  # times the events of the user at the percentile
HIGHEST, LONG_SCALES = 10.0, (20.0, 100.0)  # ends of scales of ratings

Columns = dict[str, NDArray[Any]]


@dataclass(frozen=True)
class Facts:
    """Facts about all events, before histories are cleaned.

    Attributes:
        user_ids: outside ids by number, (users,) string.
        events_of_user: (users,) events.
        events_of_type: (types,) events.
        repeated: (types,) users with at least two events of the type.
        ratings: the distinct ratings, ascending.
    """

    user_ids: pa.Array
    events_of_user: NDArray[np.int64]
    events_of_type: NDArray[np.int64]
    repeated: NDArray[np.int64]
    ratings: NDArray[np.float32]


class Cleaned(NamedTuple):
    """Histories that were cleaned.

    Attributes:
        columns: as they were given, with merged values.
        keep: (n,) the rows to keep.
        disliked: `user`, `item`, `timestamp` (if known) and `stands` of negative events; the last
            says whether the user's last event on the item is negative, too.
        pieces: `user`, `item` and `pieces` that are left, where they are not the number of events.
    """

    columns: Columns
    keep: NDArray[np.bool_]
    disliked: Columns
    pieces: Columns


class HistoryCleaner:
    """Applies the rules to histories, whole users at a time; the report is told what was done.

    Raises:
        DataError: every user is a placeholder or a bot; the message has the rules.
    """

    def __init__(
        self,
        facts: Facts,
        config: cleaning.CleanConfig,
        names: Sequence[str],
        roles: Mapping[str, Role],
        report: Report,
    ) -> None:
        self._config, self._report = config, report
        self.unwanted = unwanted_by_rule(facts, config, report)
        unwanted = np.logical_or.reduce(list(self.unwanted.values()))
        if len(unwanted) and unwanted.all():
            raise DataError(f"no events are left. {report.in_words()}")
        types: tuple[Behaviour, ...] = ()
        if names:
            column = report.mapping.get("events", {}).get("behaviour", "")
            types, notes = choose_types(names, roles, facts.repeated, len(facts.user_ids), column)
            counted = zip(types, facts.events_of_type.tolist(), strict=True)
            report.behaviours = [{**kind._asdict(), "events": count} for kind, count in counted]
            for note in notes:
                report.note(note)
        self._negative = np.array([b.role == "negative" for b in types] or [False])
        self._bought = np.array([level(b.name) == PURCHASE for b in types] or [True])
        self._returned = np.array([is_return(b.name) for b in types] or [False])
        self._partial = np.array([is_partial(b.name) for b in types] or [False])
        self._weight = np.array([b.weight for b in types] or [0.0])
        self._bound = negative_rating(facts.ratings, config)
        if config.negative_rating is None and "negative_rating" in report.mapping:
            self._bound = report.mapping["negative_rating"]  # of the scale of the first run
        if len(facts.ratings):
            report.mapping["negative_rating"] = self._bound
        if self._bound is not None and config.applies("negative_feedback"):
            report.note(sentence("low_ratings", bound=self._bound))
        elif are_counts(facts.ratings) and config.negative_rating is None:
            report.note(sentence("counts", first=facts.ratings[0], last=facts.ratings[-1]))
        behaviours = [
            b for b in types if b.role != "negative" or not config.applies("negative_feedback")
        ]
        self.behaviours: tuple[Behaviour, ...] = tuple(behaviours) if len(behaviours) > 1 else ()
        numbers = {b.name: number for number, b in enumerate(self.behaviours)}
        self._place = np.array([numbers.get(b.name, 0) for b in types] or [0], np.uint8)

    def clean(self, columns: Columns) -> Cleaned:
        """Merge repeated steps and drop negative feedback.

        A return of a part of the pieces is dropped as well, but the purchase stays.

        Args:
            columns: `user`, `item` and, if known, `timestamp`, `rating`, `behaviour` and
                `quantity`, in order; the result lacks the last.
        """
        columns = dict(columns)
        types = columns.get("behaviour", np.zeros(len(columns["user"]), np.uint8))
        negative, low = self._negative[types], np.zeros(len(types), np.bool_)
        if "rating" in columns and self._bound is not None:
            low = ~negative & (columns["rating"] <= self._bound)
            negative = negative | low
        partial, pieces = negative & self._partial[types], columns.pop("quantity", None)
        left = None
        if pieces is not None:
            signed = self._signed(pieces, types, negative)
            left = pieces_left(columns["user"], columns["item"], signed)
            partial = (partial & np.isnan(pieces)) | (negative & (left > 0))
        columns, keep = self._merge(columns | {"behaviour": types}, negative)
        disliked = _disliked(columns, np.zeros(len(types), np.bool_), negative)
        if self._config.applies("negative_feedback") and negative.any():
            negative &= ~partial
            keep = self._remove("partial_returns_dropped", columns, keep, partial)
            disliked = _disliked(columns, keep & negative, negative)
            row = np.arange(len(types))
            last = pd.Series(np.where(negative, row, -1)).groupby(
                [columns["user"], columns["item"]]
            )
            earlier = row <= last.transform("max").to_numpy()
            keep = self._remove("low_ratings_dropped", columns, keep, negative & low)
            keep = self._remove("negative_events_dropped", columns, keep, negative)
            keep = self._remove("events_before_negative_dropped", columns, keep, earlier)
        types = columns.pop("behaviour")
        rest = {n: columns[n][:0] for n in ("user", "item")} | {"pieces": np.zeros(0, np.float32)}
        if left is not None:
            rest = _rest(columns, keep, keep & self._bought[types], left)
        if self.behaviours:
            columns["behaviour"] = self._place[types]
        return Cleaned(columns, keep, disliked, rest)

    def _signed(
        self, pieces: NDArray[np.float32], types: NDArray[np.uint8], negative: NDArray[np.bool_]
    ) -> NDArray[np.float64]:
        """(n,) pieces that each row adds; a dislike, or a return of unknown size, takes all."""
        known = ~np.isnan(pieces)
        signed = np.where(known, pieces, self._bought[types].astype(np.float64))
        whole = negative & ~(known & self._returned[types]) & ~self._partial[types]
        signed[negative & ~known] = 0
        signed[whole] = -np.inf
        return signed

    def _remove(
        self, rule: str, columns: Columns, keep: NDArray[np.bool_], bad: NDArray[np.bool_]
    ) -> NDArray[np.bool_]:
        """`keep` without the bad rows, which are counted."""
        gone, left = keep & bad, keep & ~bad
        users, items = columns["user"], columns["item"]
        lost = np.setdiff1d(users[gone], users[left])
        by_rating = self._bound is not None and rule != "negative_events_dropped"
        shown = []
        if by_rating and rule not in self._report.counts:  # said once for all parts
            shown = [f"ratings of {self._bound:g} and less"]
        self._report.remove(
            rule, int(gone.sum()), shown, items=np.unique(items[gone]).tolist(), users=len(lost)
        )
        return left

    def _merge(
        self, columns: Columns, negative: NDArray[np.bool_]
    ) -> tuple[Columns, NDArray[np.bool_]]:
        """One step for a user's consecutive events on an item: the last row, the strongest type."""
        n = len(columns["user"])
        keep = np.ones(n, bool)
        merges = self._config.applies("near_duplicates")
        if not merges or "timestamp" not in columns or n < 2:
            return columns, keep
        same = (
            (np.diff(columns["user"]) == 0)
            & (np.diff(columns["item"]) == 0)
            & (np.diff(columns["timestamp"]) <= NEAR_DUPLICATES_S)
            & (negative[1:] == negative[:-1])
        )
        if not same.any():
            return columns, keep
        keep[:-1] = ~same
        starts = np.flatnonzero(np.concatenate([[True], ~same]))
        # The strongest type of each run: weights first, and the later one among equals.
        strength = self._weight[columns["behaviour"]]
        order = np.lexsort((np.arange(n), strength, np.cumsum(np.concatenate([[0], ~same]))))
        ends = np.append(starts[1:], n) - 1
        behaviour = columns["behaviour"].copy()
        behaviour[ends] = columns["behaviour"][order[ends]]
        merged = columns | {"behaviour": behaviour}
        if "rating" in columns:
            rating = columns["rating"].copy()
            best = np.fmax.reduceat(columns["rating"], starts)
            rating[ends] = np.where(np.isnan(rating[ends]), best, rating[ends])
            merged["rating"] = rating
        merged_items = np.unique(columns["item"][~keep]).tolist()
        self._report.remove("near_duplicate_events_merged", int((~keep).sum()), items=merged_items)
        return merged, keep


def unwanted_by_rule(
    facts: Facts, config: cleaning.CleanConfig, report: Report
) -> dict[str, NDArray[np.bool_]]:
    """Rule -> (users,) whether it drops each user: placeholders and bots."""
    events, total = facts.events_of_user, int(facts.events_of_user.sum())
    usual = float(np.quantile(events, cleaning.PERCENTILE, method="lower")) if len(events) else 0.0
    many = np.flatnonzero(events > min(usual, cleaning.PLACEHOLDER_SHARE * total))
    found: dict[str, NDArray[np.bool_]] = {}
    unwanted = np.zeros(len(events), bool)
    if config.applies("placeholder_users"):
        # A number such as 0 may be a person with fewer.
        most = max(cleaning.NUMBER_FACTOR * usual, cleaning.PLACEHOLDER_SHARE * total)
        for user in many[np.argsort(-events[many])][:1000].tolist():
            name = facts.user_ids[user].as_py()
            number = re.fullmatch(cleaning.NUMBERS, name) is not None and events[user] > most
            unwanted[user] = cleaning.is_placeholder(name) or number
    found["events_of_placeholder_users_dropped"] = unwanted
    if config.bots and not unwanted.all():
        usual = float(np.quantile(events[~unwanted], cleaning.PERCENTILE, method="lower"))
        bots = (events > max(config.bots, BOT_FACTOR * usual)) & ~unwanted
        found["events_of_bots_dropped"] = bots
    for rule, users in found.items():
        count = int(events[users].sum())
        report.remove(rule, count, _examples(users, facts), users=int(users.sum()))
    return found


def negative_rating(ratings: NDArray[np.float32], config: cleaning.CleanConfig) -> float | None:
    """The highest rating that is negative; None if neither config nor scale shows one."""
    if config.negative_rating is not None:
        return config.negative_rating
    two_sided = len(ratings) > 1 and ratings[0] <= 0  # such as 0 and 1, or -1 and 1
    if are_counts(ratings):
        return None
    if (len(ratings) < 4 and not two_sided) or ratings[0] >= (1 + ratings[-1]) / 2:
        return None
    bound = float(ratings[0]) + 0.4 * float(ratings[-1] - ratings[0])
    return float(ratings[ratings <= bound].max())


def are_counts(ratings: NDArray[np.float32]) -> bool:
    """Whether numbers are no scale of ratings, whose end is at most 10, or 20 or 100.

    >>> are_counts(np.float32([1, 2, 5])), are_counts(np.float32([1, 2, 60]))
    (False, True)
    """
    return (
        len(ratings) > 0 and float(ratings[-1]) > HIGHEST and float(ratings[-1]) not in LONG_SCALES
    )


def pieces_left(
    user: NDArray[np.int64], item: NDArray[np.int64], signed: NDArray[np.float64]
) -> NDArray[np.float64]:
    """(n,) the pieces that the user has of the item after each row; never less than none.

    Each row adds the pieces `signed`, of which `-inf` takes all; the users ascend.
    """
    pairs = pd.DataFrame({"user": user, "item": item}).groupby(["user", "item"])
    pair, step = pairs.ngroup().to_numpy(), pairs.cumcount().to_numpy()  # of each row in its pair
    by_step, ends = np.argsort(step, kind="stable"), np.cumsum(np.bincount(step))
    left, now = np.zeros(len(pair)), np.zeros(pair.max(initial=-1) + 1)
    for rows in np.split(by_step, ends[:-1]):  # the first rows of all pairs, the second ones, ...
        left[rows] = now[pair[rows]] = np.maximum(0, now[pair[rows]] + signed[rows])
    return left


def _disliked(columns: Columns, chosen: NDArray[np.bool_], negative: NDArray[np.bool_]) -> Columns:
    """The chosen negative events, as `Cleaned.disliked`."""
    pairs = pd.Series(negative).groupby([columns["user"], columns["item"]])
    last = pairs.transform("last").to_numpy(bool)
    disliked = {n: columns[n][chosen] for n in ("user", "item", "timestamp") if n in columns}
    return disliked | {"stands": last[chosen]}


def _rest(
    columns: Columns, keep: NDArray[np.bool_], bought: NDArray[np.bool_], left: NDArray[np.float64]
) -> Columns:
    """`Cleaned.pieces`: of the pairs with rows to keep, of which `bought` are purchases."""
    rows = pd.DataFrame({n: columns[n] for n in ("user", "item")})
    grouped = rows.assign(events=bought, keep=keep, pieces=left).groupby(["user", "item"])
    pairs = grouped.agg({"events": "sum", "keep": "any", "pieces": "last"}).reset_index()
    pairs = pairs[pairs["keep"] & (pairs["pieces"] != pairs["events"])]
    return {
        "user": pairs["user"].to_numpy(columns["user"].dtype),
        "item": pairs["item"].to_numpy(columns["item"].dtype),
        "pieces": pairs["pieces"].to_numpy(np.float32),
    }


def _examples(users: NDArray[np.bool_], facts: Facts) -> list[str]:
    return [
        f"{facts.user_ids[user].as_py()[:40]}: {facts.events_of_user[user]:,} events"
        for user in np.flatnonzero(users)[:EXAMPLES].tolist()
    ]
