"""Sentences on columns that are not read as a shop may expect."""

from __future__ import annotations

import re
import shlex
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from recsys.data.availability import each, read_available
from recsys.data.cleaning import is_no_id
from recsys.data.column_words import EVENT_WORDS, ITEM_WORDS, all_of, is_of_a_user, rank, words
from recsys.data.columns import clocks_beside_dates
from recsys.data.report import sentence
from recsys.data.returns import (
    BELOW_0,
    CREDIT_NOTE,
    may_be_yes,
    names_of_returns,
    read_order_status,
    unread_marks,
    unread_states,
    values_of_returns,
)
from recsys.data.sample import NO_COLUMN, SURE_SHARE, Roles, Sample, free_columns, share_of
from recsys.data.service_lines import says
from recsys.data.texts import as_strings, as_text, examples
from recsys.data.time_formats import find_zones
from recsys.errors import DataError
from recsys.event_names import normalised

AMOUNTS, BESIDE_SALES = words("prices") | words("amounts"), words("beside_sales")
PIECES = r"^[-−]?(\d|10)$"  # of a line of an order
MOST_RETURNS = 0.5  # of the rows; more are no returns
SURE_NAMES = 2  # groups of names of a column of availability that mean nothing else


def ignored_availability(
    sample: Sample, chosen: Mapping[str, str | None], roles: Roles
) -> str | None:
    """A sentence on what is not read of availability; None if all is.

    A column was left alone because it allows no item, or because its values do not say yes or no.
    """
    if chosen.get("available") == NO_COLUMN:
        return None
    for match in all_of("available", roles):
        values = sample.texts(match.column)
        unread = values.filter(pc.is_null(read_available(values)))
        if len(unread):
            return _note("available_unread", sample, match.column, unread)
    if "available" in roles:
        return None
    for name in free_columns(sample, roles):
        values = sample.texts(name)
        if rank(name, ITEM_WORDS["available"]) is None or not len(values):
            continue
        answers = read_available(values).drop_null()
        if len(answers) >= SURE_SHARE * len(values) and not pc.any(answers).as_py():
            setting = shlex.quote(f"available={name}")
            return _note("all_unavailable", sample, name, values, setting=setting)
        unread = values.filter(pc.is_null(read_available(values)))
        if len(unread) and rank(name, ITEM_WORDS["available"][:SURE_NAMES]) is not None:
            return _note("availability_ignored", sample, name, unread, every=len(values))
    return None


def _note(note: str, sample: Sample, name: str, values: pa.ChunkedArray, **others: Any) -> str:
    """A sentence on some values of a column of a file."""
    values_shown = {"file": sample.path.name, "count": len(values), "shown": examples(values)}
    return sentence(note, name=name, **values_shown, **others)


def shortened_ids(sample: Sample, roles: Roles) -> list[str]:
    """Sentences on columns of ids and times that a spreadsheet has shortened to powers of ten."""
    notes = []
    for role in ("user", "item", "id", "timestamp"):
        if role not in roles:
            continue
        name = roles[role].column
        values = sample.texts(name)
        kind, digits = ("times", "{1,8}") if role == "timestamp" else ("ids", "+")
        form = rf"^\d([.,]\d{digits})?[Ee]\+\d+$"
        short = values.filter(pc.match_substring_regex(values, form))
        if len(short):
            notes.append(_note("shortened_ids", sample, name, short, what=kind))
    return notes


def unread_clocks(sample: Sample, roles: Roles) -> list[str]:
    """Sentences on columns that seem to have times of day or zones of times, and are not read."""
    if "timestamp" not in roles:
        return []
    date, zones = roles["timestamp"].column, list[str]()
    if all_of("clock", roles) or find_zones(sample.table[date])[0]:
        zones = [n for n in free_columns(sample, roles) if normalised(n) in words("zones")]
    clocks = clocks_beside_dates(sample, roles)
    notes = [_note("unread_clock", sample, n, sample.texts(n), date=date) for n in clocks]
    filled = [(name, texts) for name in zones if len(texts := sample.texts(name))]
    return notes + [_note("unread_zone", sample, name, texts) for name, texts in filled]


def ask_about_returns(
    sample: Sample, roles: Roles, chosen: Mapping[str, str | None], unasked: Collection[str] = ()
) -> list[str]:
    """Refuse events without types of which some seem to be returns, and nothing else says so.

    Tills and payment services write amounts and pieces below 0, and ledgers the numbers of credit
    notes. A row with a quantity below 0 is a return already.

    Returns:
        the columns that newer files are not asked about, as `unasked` of the first run.

    Raises:
        DataError: the message has the settings that decide.
    """
    if "behaviour" in roles or any(_show_returns(role, sample, roles) for role in roles):
        return list(sample.table.column_names)
    mostly: list[str] = []
    items = items_of(sample.table, roles, sample.path)
    known = pc.is_in(items, value_set=pa.array(items_below_0(sample, roles), pa.string()))
    known = pc.or_(known, each(items, lambda text: says(text) in ("sure", "weak")))
    if "quantity" in roles:
        pieces = _texts(sample, roles["quantity"].column)
        known = pc.or_(known, pc.match_substring_regex(pieces, BELOW_0))
    owners = pc.binary_join_element_wise(_texts(sample, roles["user"].column), items, "\x1f")
    prices = [match.column for match in all_of("price", roles)]
    for name in dict.fromkeys([*prices, *sample.table.column_names]):
        values = sample.texts(name)
        is_free = name in prices or name in free_columns(sample, roles)
        zones = normalised(name) in words("zones")
        if not len(values) or sample.counts[name] > 1 or is_of_a_user(name) or zones:
            continue
        role, form, what = "taken_back", BELOW_0, "is below 0 or a credit"
        if rank(name, EVENT_WORDS["session"][:2]) is not None:
            form, what = CREDIT_NOTE, "begins like a credit note"
        elif not is_free:
            continue
        elif not any(word in normalised(name) for word in AMOUNTS):
            if "quantity" in roles or share_of(values, PIECES) < SURE_SHARE:
                continue
            role = "quantity"
        is_beside = name not in prices and any(word in normalised(name) for word in BESIDE_SALES)
        if chosen.get(role) is not None or is_beside or name in unasked:
            continue
        texts = _texts(sample, name)
        rows = pc.and_not(pc.match_substring_regex(texts, form), known)
        count = pc.sum(rows).as_py() or 0
        if count > MOST_RETURNS * len(values):
            mostly.append(name)
        elif count and not (form == CREDIT_NOTE and _are_countries(texts, rows, owners)):
            said = {"says": what, "count": count, "shown": examples(texts.filter(rows))}
            without = roles[role].column if role in roles else NO_COLUMN
            yes, no = (shlex.quote(f"{role}={column}") for column in (name, without))
            said |= {"yes": yes, "no": no, "role": role}
            raise DataError(sentence("lines_of_returns", path=sample.path, name=name, **said))
    return mostly


def _are_countries(
    numbers: pa.ChunkedArray, rows: pa.ChunkedArray, owners: pa.ChunkedArray
) -> bool:
    """Whether numbers begin with countries, and no user of most of the rows has bought the item.

    The `owners` are the users and items of all rows.
    """
    begins = pc.unique(pc.replace_substring_regex(pc.utf8_lower(numbers), "[^a-z].*", ""))
    bought = pc.is_in(owners.filter(rows), value_set=owners.filter(pc.invert(rows)))
    few = 2 * (pc.sum(bought).as_py() or 0) <= len(bought)
    return few and words("countries").issuperset(begins.to_pylist())


def _show_returns(role: str, sample: Sample, roles: Roles) -> bool:
    """Whether some values of a column of states or marks say that a row was taken back."""
    values, kind = sample.texts(roles[role].column), role.partition(" ")[0]
    if kind == "order_status":
        return bool(pc.count(read_order_status(values)).as_py())
    return kind == "taken_back" and bool(pc.any(each(values, may_be_yes)).as_py())


def items_below_0(sample: Sample, roles: Roles) -> list[str]:
    """The items of which each line has a price below 0, as vouchers; none if they are most rows."""
    if "price" not in roles:
        return []
    items = items_of(sample.table, roles, sample.path)
    prices = _texts(sample, roles["price"].column)
    below = pc.match_substring_regex(prices, BELOW_0)
    if "quantity" in roles:  # the line of a return may have a price below 0, too
        pieces = _texts(sample, roles["quantity"].column)
        below = pc.and_not(below, pc.match_substring_regex(pieces, BELOW_0))
    others = items.filter(pc.invert(below))
    only = pc.and_not(below, pc.is_in(items, value_set=pc.unique(others)))
    return pc.unique(items.filter(only)).to_pylist() if len(others) > len(items) / 2 else []


def items_of(rows: pa.Table, roles: Roles, path: Path) -> pa.ChunkedArray:
    """The item of each row, or its title where it has no id."""
    ids, title = as_strings(rows[roles["item"].column], "item", path), roles.get("title")
    if title is None:
        return ids
    return pc.if_else(is_no_id(ids), as_strings(rows[title.column], "title", path), ids)


def _texts(sample: Sample, name: str) -> pa.ChunkedArray:
    """The values of a column in all rows; empty where one is missing."""
    column = sample.table.column(sample.table.schema.get_all_field_indices(name)[0])
    return pc.utf8_trim_whitespace(pc.fill_null(as_text(column), ""))


def unread_exclusions(
    sample: Sample, roles: Roles, chosen: Mapping[str, str | None] | None = None
) -> list[str]:
    """Sentences on columns such as `sold_out` and `returned` whose values cannot be read as such.

    They seem to say that items must not be recommended, or that events must not count. So does a
    column with values that name returns, unless the settings (`chosen`) say that none is read.
    """
    ignored = {role for role, column in (chosen or {}).items() if column == NO_COLUMN}
    notes, of_items = [], "id" in roles
    names = words("unavailable") | {"deletedat"}
    states = [roles[role].column for role in roles if re.match("order_status(?! paid)", role)]
    marks = [roles[role].column for role in roles if re.fullmatch(r"taken_back( \d+)?", role)]
    for name in [*free_columns(sample, roles), *states, *marks]:
        key, values = normalised(name), sample.texts(name)
        back = pa.array([], pa.string()) if of_items else values_of_returns(name, values)
        if is_of_a_user(name):
            continue
        if of_items and re.sub("^(is|has)|qty|quantity", "", key) in names:
            said = values.filter(each(values, may_be_yes))
        elif name in marks:
            said = unread_marks(values)
        elif len(back) and name not in states:
            said = back if "taken_back" not in ignored else back[:0]
        elif name in states or (not of_items and "status" in key and "order_status" not in ignored):
            said = unread_states(values, unknown=name in states)
            unread = pc.is_in(values, value_set=pa.array(said, pa.string()))
            if name not in states:
                unread = pc.or_(unread, pc.is_valid(read_order_status(values)))
            said = values.filter(unread)
        elif not of_items and rank(name, EVENT_WORDS["rating"][:1]) is not None:
            is_read = "rating" in ignored or "rating" in roles
            said = values[:0] if is_read else values
        elif not of_items and "behaviour" not in ignored:
            back = pa.array(names_of_returns(values), pa.string())
            said = values.filter(pc.is_in(values, value_set=back))
        else:
            continue
        if not len(said):
            continue
        advice = sentence("unread_items" if of_items else "unread_events")
        if not of_items and "behaviour" not in roles and names_of_returns(values):
            flag = shlex.quote(f"behaviour={name}")
            advice += f"; if it says what kind of event a row is, read it with --column {flag}"
        notes.append(_note("unread", sample, name, said, advice=advice))
    return notes
