"""Sentences on columns that are not read as a shop may expect."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
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
    may_be_yes,
    names_of_returns,
    read_order_status,
    read_pieces,
    unread_marks,
    unread_states,
    values_of_returns,
)
from recsys.data.sample import NO_COLUMN, SURE_SHARE, Roles, Sample, free_columns
from recsys.data.service_lines import says
from recsys.data.texts import as_strings, as_text, examples
from recsys.data.time_formats import find_zones
from recsys.event_names import normalised

REFUNDS = frozenset(["behaviour", "taken_back", "order_status"])  # roles that show them
WHOLE = r"^[-−]?\d{1,3}$"
SIGN = r"[^\pL\d]*(?:\pL{1,3}\.?\s|(?i:eur|usd|gbp|chf))?"  # EUR -5 and -EUR 5; SO-5 is a code
BELOW_0 = rf"^\(\D*\d.*\)$|^{SIGN}[-−](?:\pL{{1,3}}\.?)?{SIGN}\d|\d\s*[-−]$"
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


def negative_amounts(sample: Sample, roles: Roles, chosen: Mapping[str, str | None]) -> list[str]:
    """Sentences on prices, amounts and whole numbers below 0 in events that have no types.

    Tills and payment services write refunds so. A row with a quantity below 0 is one already.
    """
    if chosen.get("quantity") == NO_COLUMN or not REFUNDS.isdisjoint(roles):
        return []
    notes, names = [], words("prices") | words("amounts")
    items = items_of(sample.table, roles, sample.path)
    left_out = pa.array(items_below_0(sample, roles), pa.string())
    prices = [match.column for match in all_of("price", roles)]
    for name in dict.fromkeys([*prices, *free_columns(sample, roles)]):
        values = sample.texts(name)
        is_amount = any(word in normalised(name) for word in names)
        is_whole = pc.all(pc.match_substring_regex(values, WHOLE)).as_py()
        if (
            not len(values)
            or not (is_amount or is_whole)
            or (name not in prices and says(name) not in (None, "some"))
        ):
            continue
        texts = _texts(sample, name)
        rows = pc.match_substring_regex(texts, BELOW_0)
        if "quantity" in roles:
            pieces = _texts(sample, roles["quantity"].column)
            rows = pc.and_not(rows, pc.match_substring_regex(pieces, BELOW_0))
        below = texts.filter(pc.and_not(rows, pc.is_in(items, value_set=left_out)))
        if is_amount and "quantity" in roles and len(below):
            advice = "write their quantity below 0"
            notes.append(_note("below_0", sample, name, below, advice=advice))
        elif "quantity" not in roles and 0 < len(below) <= len(values) * (0.5, 1)[is_amount]:
            advice = "say -1 in their rows of a column 'quantity', and 1 in the others"
            if pc.all(pc.is_valid(read_pieces(below))).as_py():
                advice = f"read them as returns with --column {shlex.quote(f'quantity={name}')}"
            notes.append(_note("below_0", sample, name, below, advice=advice))
    return notes


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
