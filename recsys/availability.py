"""Availability: which items may be recommended at a moment, by three columns of the items.

`available` (true or false), `available_from` and `available_until` (unix seconds) make a standing
rule: an item that is not available is never recommended, without a filter in any request. An item
without a value is available. In histories, all items are understood.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from recsys.constraint.attributes import Attributes
from recsys.constraint.filters import ItemFilter
from recsys.errors import FilterError

MINUTE = 60  # seconds
AVAILABLE, FROM, UNTIL = "available", "available_from", "available_until"
_KINDS = {AVAILABLE: "truth value", FROM: "number", UNTIL: "number"}


def standing_rule(attributes: Attributes, now: int) -> ItemFilter | None:
    """The filter that available items pass; None if the items have none of the columns.

    A column of another type than its name promises is an ordinary attribute.

    Args:
        attributes: columns of the items.
        now: unix seconds.
    """
    clauses: dict[str, dict[str, Any]] = {
        AVAILABLE: {"key": AVAILABLE, "match": False},
        FROM: {"key": FROM, "range": {"gt": now}},
        UNTIL: {"key": UNTIL, "range": {"lte": now}},
    }
    used = [clauses[name] for name, kind in _KINDS.items() if _kind(attributes, name) == kind]
    return ItemFilter.parse({"must_not": used}) if used else None


def available_items(items: pa.Table, now: int) -> NDArray[np.bool_] | None:
    """Which rows of a table of items are available at `now`: (items,) bool; None if all are.

    Args:
        items: a catalog, perhaps with columns of availability.
        now: unix seconds.
    """
    attributes = Attributes(items, np.arange(len(items), dtype=np.int32))
    rule = standing_rule(attributes, now)
    available = None if rule is None else rule.evaluate(attributes)
    return None if available is None or available.all() else available


def depends_on_time(attributes: Attributes) -> bool:
    """Whether the rule changes with time."""
    return any(_kind(attributes, name) == _KINDS[name] for name in (FROM, UNTIL))


def _kind(attributes: Attributes, name: str) -> str | None:
    try:
        return attributes.column(name).kind
    except FilterError:
        return None
