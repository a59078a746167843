"""Finds users who stand for nobody, such as `Walk-in Customer`, and what else says who bought."""

from __future__ import annotations

import re
from collections.abc import Mapping

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from recsys.data.cleaning import is_no_id
from recsys.data.column_words import EVENT_WORDS, rank, words
from recsys.data.sample import NO_COLUMN, Found, Roles, Sample, free_columns
from recsys.data.texts import as_strings
from recsys.event_names import normalised

PLACEHOLDERS = words("placeholders")
BESIDE = words("users") | words("beside_placeholders")
NUMBERS = frozenset(["0", "-1", "00000000-0000-0000-0000-000000000000"])
PERCENTILE = 0.99
PLACEHOLDER_SHARE = 0.01  # of all events, for ids that are numbers
NUMBER_FACTOR = 5  # a number such as 0 may also be a person with a usual number of events
ENOUGH_USERS = 20  # below this, the number of orders of the others says nothing
SHARE_OF_ORDERS, ORDERS_FACTOR = 0.05, 10  # an id with more, and more times those of the others
OTHER_IDS = len(EVENT_WORDS["user"]) - 1  # the group of names of addresses and devices
SHARE_OF_FILLED = 0.5
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
    counts = {row["values"]: row["counts"] for row in pc.value_counts(users).to_pylist()}
    counts = {name: count for name, count in counts.items() if name}
    persons = [n for name, n in counts.items() if name not in NUMBERS and not is_placeholder(name)]
    usual = float(np.quantile(persons, PERCENTILE, method="lower")) if persons else 0.0
    placeholders_by_name = [
        name
        for name, count in counts.items()
        if is_placeholder(name)
        or (name in NUMBERS and count > max(NUMBER_FACTOR * usual, PLACEHOLDER_SHARE * len(users)))
    ]
    if orders is None or len(persons) < ENOUGH_USERS:
        return placeholders_by_name
    pairs = pa.table([users, orders], ["user", "order"]).group_by(["user", "order"]).aggregate([])
    of_user = pc.value_counts(pairs["user"].drop_null())
    most = max(
        SHARE_OF_ORDERS * pairs.num_rows,
        ORDERS_FACTOR * float(np.quantile(of_user.field("counts"), PERCENTILE, method="lower")),
    )
    many = (
        of_user.filter(pc.greater_equal(of_user.field("counts"), most)).field("values").to_pylist()
    )
    return placeholders_by_name + [
        name for name in many if name and name not in placeholders_by_name
    ]


def other_ids(sample: Sample, roles: Roles, chosen: Mapping[str, str | None]) -> Roles:
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
