"""Cleans the rows of a shop's export while they are read; every dropped row is counted.

It finds users who stand for nobody, such as `Walk-in Customer`, and what else says who bought, and
has the settings of all filters. Rules for whole histories are in `recsys.data.histories`, those for
items in `recsys.data.item_cleaning`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
from pydantic import BeforeValidator, Field, NonNegativeInt

from recsys.config import Share, section
from recsys.data.column_words import EVENT_WORDS, rank, words
from recsys.data.report import EXAMPLES, Report, sentence
from recsys.data.sample import NO_COLUMN, Chosen, Found, Roles, Sample, free_columns
from recsys.data.service_lines import ServiceLines
from recsys.data.texts import MISSING, NOTHING, as_strings, as_text
from recsys.data.time_formats import EARLIEST, TimeRules
from recsys.errors import DataError
from recsys.event_names import normalised
from recsys.interactions import Role

NO_ID = pa.concat_arrays([MISSING, NOTHING])
SHORT_CODE = r"^[A-Za-z]{2,3}$"  # among such codes, NA is one


Rule = Literal[
    "missing_ids", "cancelled_orders", "unreadable_times", "impossible_times", "placeholder_users",
    "near_duplicates", "negative_feedback", "unknown_items", "item_texts", "prices",
    "category_paths", "constant_columns",
]  # fmt: skip


@section
class CleanConfig:
    """Section `data.clean`: how a `table` source is cleaned."""

    most_removed: Annotated[float, Field(ge=0)] = 0.3
    """The largest share of events or of users that one rule may remove; all together may remove
    half of the events at least. Where more would be removed, nothing is written, and the error
    names the settings that decide. Low ratings may be half of all, because the lower part of a
    scale is ordinary in reviews."""
    drop_items: tuple[str, ...] = ()
    """Lines that are no products: ids, patterns of ids with `*`, or `COLUMN=VALUE` of either file.
    They are in no history and are never recommended. Lines that are named like shipping, fees or
    discounts are recognised besides, unless `none` is among these; `!ID` keeps one item."""
    item_separator: str | None = None
    """Divides several items in one cell; by default it is recognised, and `none` keeps each cell as
    one item."""
    damaged_rows: Share = 0.01
    """Largest share of rows that may be damaged; such rows are skipped."""
    bots: NonNegativeInt = 500
    """Smallest number of events of a bot; a bot also has 20 times the events of the 99th percentile
    of users. 0 keeps all."""
    negative_rating: float | None = None
    """The highest rating that is negative; None takes the lowest two fifths of a scale with at
    least four values, or with a value of 0 or less (0 and 1, -1 and 1). Numbers that end neither at
    10 or less nor at 20 or 100 are no scale but counts, and none of them is negative. Yes and no
    are 1 and 0."""
    skip: Annotated[
        tuple[Rule, ...],
        BeforeValidator(lambda value: value.split(",") if isinstance(value, str) else value),
    ] = ()
    """Rules that are not applied, as a list or separated by commas."""

    def applies(self, rule: Rule) -> bool:
        """Whether a rule is applied."""
        return rule not in self.skip


@dataclass
class RowCleaner:
    """Drops rows of events that cannot be used, and tells the report.

    Whether ids of items are short codes, of which NA may be one, is known from the first rows on.
    """

    path: Path
    config: CleanConfig
    times: TimeRules
    report: Report
    service: ServiceLines | None = None
    rows: int = 0
    unreadable: int = 0
    short_codes: bool | None = None

    def clean(self, events: pa.Table, written: Mapping[str, pa.ChunkedArray]) -> pa.Table:
        """The rows that can be used.

        Args:
            events: `user` and `item` (string), and if known `timestamp` (int64, null where it
                cannot be read) and `cancelled` and `named` (bool), which the result does not have:
                the order was cancelled; the line is named as no product in the settings. Other
                columns stay.
            written: role -> the column as it stands in the file, for examples.

        Raises:
            DataError: a row that cannot be used, if the rule for it is turned off.
        """
        first = self.rows + 1
        self.rows += events.num_rows
        events = events.append_column("row", pa.array(np.arange(first, first + events.num_rows)))

        def drop(bad: pa.ChunkedArray, rule: str, role: str, allowed: bool) -> None:
            nonlocal events
            count = pc.sum(bad).as_py() or 0
            if not count:
                return
            gone = events.filter(bad)
            rows = gone["row"].slice(0, EXAMPLES).to_pylist()
            values = [written[role][row - first].as_py() for row in rows]
            shown = ["" if value is None else str(value)[:40] for value in values]
            texts = [f"data row {row}: {text!r}" for row, text in zip(rows, shown, strict=True)]
            if not allowed:
                said = {"path": self.path, "role": role, "shown": texts[0]}
                raise DataError(sentence("unusable_row", **said))
            items, owners = (
                ids.filter(pc.invert(is_no_id(ids))).to_pylist()
                for ids in (pc.unique(gone["item"]), pc.unique(gone["user"]))
            )
            self.report.remove(rule, count, texts, items=items, owners=owners)
            events = events.filter(pc.invert(bad))

        for role in ("user", "item"):
            bad = is_no_id(events[role])
            if role == "item":
                if self.short_codes is None:
                    self.short_codes = are_short_codes(events["item"])
                bad = is_no_item(events["item"], self.short_codes)
            drop(bad, "rows_without_user_or_item_dropped", role, self.config.applies("missing_ids"))
        if self.service is not None:
            bad = self.service.find(events)
            drop(bad, "rows_of_no_products_dropped", "item", True)
        if "cancelled" in events.column_names and self.config.applies("cancelled_orders"):
            drop(events["cancelled"], "rows_of_cancelled_orders_dropped", "item", True)
        if "timestamp" in events.column_names:
            bad = pc.is_null(events["timestamp"])
            self.unreadable += pc.sum(bad).as_py() or 0
            rule = "rows_with_unreadable_times_dropped"
            drop(bad, rule, "timestamp", self.config.applies("unreadable_times"))
            if self.config.applies("impossible_times"):
                early = pc.less(events["timestamp"], EARLIEST)
                bad = pc.or_(early, pc.greater(events["timestamp"], self.times.latest))
                drop(bad, "rows_with_impossible_times_dropped", "timestamp", True)
        own = {"row", "named", "cancelled"} & {*events.column_names}
        return events.drop_columns([*own])

    def finish(self, column: str | None) -> None:
        """Refuse a file of which more than half of the times cannot be read."""
        if self.unreadable * 2 > self.rows:
            counts = {"unreadable": self.unreadable, "rows": self.rows}
            raise DataError(sentence("few_times", path=self.path, column=column, **counts))


def is_no_id(texts: pa.ChunkedArray | pa.Array) -> pa.ChunkedArray | pa.Array:
    """Whether texts are missing, or stand for a missing value."""
    return pc.is_in(pc.utf8_lower(pc.fill_null(texts, "")), value_set=NO_ID)


def are_short_codes(items: pa.ChunkedArray) -> bool:
    """Whether most ids are codes of two or three letters.

    >>> are_short_codes(pa.chunked_array([["DE", "NA", "FR"]]))
    True
    """
    ids = pc.unique(items)
    short = pc.fill_null(pc.match_substring_regex(ids, SHORT_CODE), False)
    return 2 * (pc.sum(short).as_py() or 0) > len(ids)


def is_no_item(items: pa.ChunkedArray, short_codes: bool) -> pa.ChunkedArray:
    """`is_no_id` for ids of items: NA stands for none, unless it may be one of `short_codes`."""
    missing = is_no_id(items)
    if short_codes:
        return missing
    return pc.or_(missing, pc.equal(pc.utf8_lower(pc.fill_null(items, "")), "na"))


PLACEHOLDERS = words("placeholders")
BESIDE = words("users") | words("beside_placeholders")
NUMBERS = r"-1|[0-]*0|9{4,}"  # also 00000000-0000-0000-0000-000000000000
PERCENTILE = 0.99
PLACEHOLDER_SHARE = 0.01  # of all events, for ids that are numbers
NUMBER_FACTOR = 5  # a number such as 0 may also be a person with a usual number of events
ENOUGH_USERS = 20  # below this, the number of orders of the others says nothing
SHARE_OF_ORDERS, ORDERS_FACTOR = 0.25, 10  # an id with more, and more times those of the others
SHARE_OF_NAMED = 0.5  # a name without digits may be a hotel's that buys for its guests
OTHER_IDS = len(EVENT_WORDS["user"]) - 1  # the group of names of addresses and devices
SHARE_OF_FILLED = 0.5
MOST_NAMES = 2.5  # of an item, on average
SHARE_OF_ONE = 0.8  # of an item's rows that have its most frequent value, in a field of items
OTHER_ID = "session 2"  # the role of such a column


def is_placeholder(name: str) -> bool:
    """Whether a user id is a word such as `guest` or `NA`, which stands for nobody.

    >>> [is_placeholder(n) for n in ("Walk-in Customer", "Gastkunde", "no-reply@shop.example")]
    [True, True, True]
    >>> is_placeholder("guest-0042"), is_placeholder("Anna Guest")
    (False, False)
    """
    parts = [normalised(part) for part in re.split(r"[\W_]+", name.partition("@")[0])]
    rest = "".join(part for part in parts if part not in BESIDE)
    return not PLACEHOLDERS.isdisjoint(["".join(parts), rest])


def placeholders(users: pa.ChunkedArray, orders: pa.ChunkedArray | None = None) -> list[str]:
    """The ids among the users of many rows that stand for nobody, where other columns say who.

    Args:
        users: (rows,) string.
        orders: (rows,) string, the order of each row; an id with very many of all orders is one.
    """
    counts = users.to_pandas().value_counts(sort=False).drop("", errors="ignore")
    by_name, numbers = counts.index.map(is_placeholder), counts.index.str.fullmatch(NUMBERS)
    persons = counts[~(by_name.to_numpy(bool) | numbers)]
    usual = float(np.quantile(persons, PERCENTILE, method="lower")) if len(persons) else 0.0
    many = counts > max(NUMBER_FACTOR * usual, PLACEHOLDER_SHARE * len(users))
    names: list[str] = counts.index[by_name.to_numpy(bool) | (numbers & many)].tolist()
    if orders is None or len(persons) < ENOUGH_USERS:
        return names
    pairs = pd.DataFrame({"user": users.to_pandas(), "order": orders.to_pandas()}).drop_duplicates()
    of_user = pairs["user"].value_counts(sort=False)
    usual_orders = float(np.quantile(of_user, PERCENTILE, method="lower"))
    share = of_user / len(pairs)
    share = share[of_user >= ORDERS_FACTOR * usual_orders].drop("", errors="ignore")
    most = [SHARE_OF_ORDERS if re.search(r"\d", name) else SHARE_OF_NAMED for name in share.index]
    return names + [name for name in share.index[share >= most] if name not in names]


def other_ids(sample: Sample, roles: Roles, chosen: Chosen) -> Roles:
    """A column of addresses or devices, with the role `OTHER_ID`, for rows without a user."""
    user, session = roles["user"].column, roles.get("session")
    if chosen.get("session") == NO_COLUMN or (session is not None and session.column == user):
        return {}
    users = as_strings(sample.table[user], "user", sample.path)
    names = placeholders(users)
    nobody = pc.or_(is_no_id(users), pc.is_in(users, value_set=pa.array(names, pa.string())))
    for name in free_columns(sample, roles) if pc.any(nobody).as_py() else ():
        named = rank(name, EVENT_WORDS["user"]) == OTHER_IDS and sample.counts[name] == 1
        if named and len(sample.texts(name)):
            texts = as_strings(sample.table[name].filter(nobody), "user", sample.path)
            empty = pc.cast(is_no_id(texts), pa.float64())
            if pc.mean(empty).as_py() <= 1 - SHARE_OF_FILLED:
                return {OTHER_ID: Found(name, "by name, for rows without a user")}
    return {}


def is_of_items(sample: Sample, roles: Roles, name: str, share: float = SHARE_OF_ONE) -> bool:
    """Whether a column has mostly one value for each item, and several in all."""
    both = pa.table([sample.table[roles["item"].column], sample.table[name]], ["item", "value"])
    both = both.filter(pc.and_not(both["value"].is_valid(), is_no_id(as_text(both["item"]))))
    rows = both.group_by(["item", "value"]).aggregate([([], "count_all")])
    most = rows.group_by("item").aggregate([("count_all", "max")])
    several = pc.count_distinct(both["value"]).as_py() > 1 or most.num_rows == 1
    same = pc.sum(most["count_all_max"]).as_py() or 0
    return bool(several and same >= share * both.num_rows)


def has_few_names(sample: Sample, roles: Roles, name: str) -> bool:
    """Whether items have few names each, such as those of a shirt and of its size M."""
    both = pa.table([sample.table[roles["item"].column], sample.table[name]], ["item", "value"])
    items, names = (pc.count_distinct(both[column]).as_py() for column in both.column_names)
    pairs = both.group_by(both.column_names).aggregate([]).num_rows
    return bool(pairs <= MOST_NAMES * items and names >= items / 2 and both.num_rows >= 2 * pairs)


Split = Literal["leave-one-out", "global-temporal", "own"]
Duplicates = Literal["keep", "drop-exact", "keep-first"]


@dataclass(frozen=True)
class Rules:
    """How rows are filtered and split; see `DataConfig`.

    The default split is the source's own; else by time if the source was cleaned, has times, and
    enough users can be asked; else leave-one-out. Dates are unix seconds.
    """

    duplicates: Duplicates = "drop-exact"
    min_rating: float | None = None
    k_core: int = 0
    split: Split | None = None
    ratio: tuple[float, float] = (0.8, 0.1)
    dates: tuple[int, int] | None = None
    clean: CleanConfig = field(default_factory=CleanConfig)
    roles: Mapping[str, Role] = field(default_factory=dict)


def decided_rules(rules: Rules) -> tuple[str, ...]:
    """The rules of cleaning of which the settings say what they remove."""
    decided = []
    if rules.clean.negative_rating is not None:
        decided.append("low_ratings_dropped")
    if "negative" in rules.roles.values():
        decided.append("negative_events_dropped")
    return (*decided, "events_before_negative_dropped") if decided else ()
