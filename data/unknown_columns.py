"""Says why columns are not recognised, and the options that name them."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping

import pyarrow.compute as pc

from recsys.data.column_words import EVENT_WORDS, ITEM_WORDS, has_role, is_of_later, rank, words
from recsys.data.day_orders import share_of_times
from recsys.data.report import sentence
from recsys.data.returns import share_of_events
from recsys.data.sample import (
    FILE_ORDER,
    NEEDED,
    SHARE_OF_TIMES,
    SURE_SHARE,
    Found,
    Roles,
    Sample,
    free_columns,
    share_of,
)
from recsys.data.time_formats import TimeRules
from recsys.errors import DataError
from recsys.event_names import normalised

NO_IDS = r"^-?\d+[.,]\d{1,2}$|^\d{1,4}[-./]\d{1,2}[-./]\d{1,4}|\d:\d\d"  # amounts and times
EXCEL_DAY = r"^[2-6]\d{4}([.,]\d+)?$"  # 33000 is in 1990, and 46000 in 2025


def unknown(
    missing: list[str], sample: Sample, doubts: Mapping[str, list[str]], roles: Roles
) -> DataError:
    """The error for roles that no column, or several columns, could have: all of them at once."""
    reasons, named = [], dict(roles)
    for role in missing:
        reason, column = _why_unknown(role, sample, doubts.get(role, []), named)
        reasons.append(reason)
        named[role] = Found(column, "")
    options = " ".join(
        f"--column {shlex.quote(f'{role}={named[role].column}')}" for role in missing
    )
    settings = ", ".join(f"data.columns.{role}" for role in missing)
    in_file_order = "timestamp" in missing and named["timestamp"].column == FILE_ORDER
    hints = [sentence("in_file_order")] * in_file_order
    hints += [sentence("one_column")] * (sample.table.num_columns == 1)
    said = {"path": sample.path, "reasons": "; ".join(reasons), "options": options}
    said |= {"settings": settings, "hints": "".join(f" {hint}" for hint in hints)}
    return DataError(f"{sentence('unknown_columns', **said)}\n{sample.show()}")


def _why_unknown(role: str, sample: Sample, equal: list[str], roles: Roles) -> tuple[str, str]:
    """Why a role is not known, and the column that a command may name."""
    description = NEEDED[role]
    if equal:
        others = [name for name in free_columns(sample, roles) if name in equal]
        return f"both {' and '.join(map(repr, equal))} could be {description}", (others or equal)[0]
    if role == "timestamp":
        return _without_time(sample, roles)
    taken = {  # but for types of which none is known, such as the events of a concert hall
        role: match
        for role, match in roles.items()
        if role != "behaviour" or share_of_events(sample.texts(match.column))
    }
    free = {name: sample.texts(name) for name in free_columns(sample, taken)}
    groups = ITEM_WORDS["id"] if role == "id" else EVENT_WORDS[role]
    for name, values in free.items():
        unique = len(values) > 0 and len(values) == len(pc.unique(values))
        if rank(name, groups) is not None and unique:
            return sentence("never_twice", description=description, name=name), name
    distinct = {name: pc.count_distinct(values).as_py() for name, values in free.items()}
    rules = TimeRules("auto", "UTC", None, 0)
    repeated = [
        name
        for name, values in free.items()
        if 1 < distinct[name] < len(values)
        and share_of(values, NO_IDS) < SURE_SHARE
        and (share_of(values, r"^\d+$") or share_of_times(values, rules)[1] < SURE_SHARE)
    ]
    kinds = ("users", "guests") if role == "user" else ("items", "maybe_items")
    nouns = [noun for kind in kinds for noun in words(kind) if len(noun) > 3 or noun == "sku"]
    if role != "user":
        of_persons = words("persons") | words("users")
        repeated = [n for n in repeated if not any(w in normalised(n) for w in of_persons)]
        of_rows = ("timestamp", "session")
        repeated = [n for n in repeated if not any(has_role(role, [n]) for role in of_rows)]
    alike = [name for name in repeated if any(noun in normalised(name) for noun in nouns)]
    orders = [n for n in free if role == "user" and rank(n, EVENT_WORDS["session"]) is not None]
    others = list(free) if len(free) > 1 else []
    ids = [name for name in repeated if re.search(r"(?i)[\W_](id|nr|no|code)\W*$", name)]
    persons = [n for n in free if role == "user" and rank(n, EVENT_WORDS["person"]) is not None]
    best = max(
        alike or persons or orders or ids or repeated or others,
        key=lambda name: distinct[name],
        default="NAME",
    )
    named = [n for n, values in free.items() if not len(values) and rank(n, groups) is not None]
    empty = f": {named[0]!r} is empty in every row" if named else ""
    return f"no column is recognised as {description}{empty}", best


def _without_time(sample: Sample, roles: Roles) -> tuple[str, str]:
    """Why events have no time, and a column that holds other times, or `FILE_ORDER`."""
    free = free_columns(sample, roles)
    like = [n for n in free if rank(n, EVENT_WORDS["timestamp"]) is not None]
    like += [n for n in free if normalised(n) in words("month_columns")]
    filled = {n: len(sample.texts(n)) / sample.table.num_rows for n in free}
    like.sort(key=lambda name: filled[name] < SHARE_OF_TIMES)
    reason = "no column holds the time of the events"
    if not like or filled[like[0]] < SHARE_OF_TIMES:
        rules = TimeRules("auto", "UTC", None, 0)
        for name in (n for n in free if sample.counts[n] == 1):
            times = share_of_times(sample.table[name], rules)[1]
            if is_of_later(name) and filled[name] * times >= SHARE_OF_TIMES:
                return f"{reason}: by its name, {name!r} says when something else happened", name
    if not like:
        return reason, FILE_ORDER
    values = sample.texts(like[0])
    hint = sentence("unknown_times")
    if filled[like[0]] < SHARE_OF_TIMES:
        hint = f"it is empty in {1 - filled[like[0]]:.0%} of the rows"
    elif share_of(values, EXCEL_DAY) >= SURE_SHARE:
        hint = sentence("days_of_spreadsheets", shown=values[0])
    return f"{reason}: {like[0]!r} looks like a time, but {hint}", FILE_ORDER
