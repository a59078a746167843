"""Sentences on columns that are not read as a shop may expect."""

from __future__ import annotations

import re
import shlex
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from functools import reduce
from itertools import combinations
from operator import add
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

from recsys.data import returns
from recsys.data.advice import call_of
from recsys.data.availability import each, read_available
from recsys.data.cleaning import is_no_id, is_of_items
from recsys.data.column_candidates import clocks_beside_dates
from recsys.data.column_words import (
    EVENT_WORDS,
    ITEM_WORDS,
    all_of,
    is_of_a_user,
    is_of_later,
    rank,
    words,
)
from recsys.data.grouped_rows import number_of_orders, print_pieces_returned
from recsys.data.numbers import CODES, CURRENCY_SIGNS, SIGNS, currency_of
from recsys.data.report import sentence
from recsys.data.sample import (
    NO_COLUMN,
    SURE_SHARE,
    Chosen,
    Found,
    Roles,
    Sample,
    free_columns,
    share_of,
)
from recsys.data.service_lines import says
from recsys.data.texts import as_strings, as_text, each_value, examples
from recsys.data.time_formats import find_zones
from recsys.errors import DataError
from recsys.event_names import normalised, words_of

AMOUNTS, BESIDE_SALES = words("prices") | words("amounts"), words("beside_sales")
SALE_SIGNS, RETURN_SIGNS, RETURN_ENDS = map(words, ("sale_signs", "return_signs", "return_ends"))
PIECES = r"^[-−]?(\d|10)$"  # of a line of an order
MOST_RETURNS = 0.5  # of the rows; more are no returns
FEW_RETURNS = 5  # rows, below which repetition says nothing
REPEATED, MOST_AGAIN = 0.8, 0.5  # shares of rows whose user has the item in other rows, too
SURE_OF_ONE = 0.99  # share of an owner's rows with one value, for a state of the owner
MOST_STRANGE = 0.15  # share of the rows with states that nobody knows; fewer are named
MOST_MORE = 0.1  # share of what is returned more often than it was bought
SURE_NAMES = 2  # groups of names of a column of availability that mean nothing else


def ignored_availability(sample: Sample, chosen: Chosen, roles: Roles) -> list[str]:
    """A sentence on what is not read of the availability of items; none if all is.

    A column was left alone because it allows no item, or because its values do not say yes or no.
    """
    if "id" not in roles or chosen.get("available") == NO_COLUMN:
        return []
    for match in all_of("available", roles):
        values = sample.texts(match.column)
        unread = values.filter(pc.is_null(read_available(values)))
        if len(unread):
            return [_note("available_unread", sample, match.column, unread)]
    if "available" in roles:
        return []
    for name in free_columns(sample, roles):
        values, answers = sample.texts(name), read_available(sample.texts(name))
        if rank(name, ITEM_WORDS["available"]) is None or not len(values):
            continue
        unread = values.filter(pc.is_null(answers))
        if len(unread) <= (1 - SURE_SHARE) * len(values) and not pc.any(answers).as_py():
            setting = shlex.quote(f"available={name}")
            return [_note("all_unavailable", sample, name, values, setting=setting)]
        if len(unread) and rank(name, ITEM_WORDS["available"][:SURE_NAMES]) is not None:
            return [_note("availability_ignored", sample, name, unread, every=len(values))]
    return []


def _note(note: str, sample: Sample, name: str, values: pa.ChunkedArray, **others: Any) -> str:
    """A sentence on some values of a column of a file."""
    values_shown = {"file": sample.path.name, "count": len(values), "shown": examples(values)}
    return sentence(note, name=name, **values_shown, **others)


def unread_times(sample: Sample, roles: Roles) -> list[str]:
    """Sentences on times that lost digits, and on columns of clocks and zones that are not read."""
    if "timestamp" not in roles:
        return []
    date, zones = roles["timestamp"].column, list[str]()
    if all_of("clock", roles) or find_zones(sample.table[date])[0]:
        zones = [n for n in free_columns(sample, roles) if normalised(n) in words("zones")]
    times, clocks = sample.texts(date), clocks_beside_dates(sample, roles)
    short = times.filter(pc.match_substring_regex(times, r"^\d([.,]\d{1,8})?[Ee]\+\d+$"))
    notes = [_note("shortened_times", sample, date, short)] if len(short) else []
    notes += [_note("unread_clock", sample, n, sample.texts(n), date=date) for n in clocks]
    filled = [(name, texts) for name in zones if len(texts := sample.texts(name))]
    return notes + [_note("unread_zone", sample, name, texts) for name, texts in filled]


def ask_about_returns(
    sample: Sample, roles: Roles, chosen: Chosen, unasked: Collection[str] = ()
) -> list[str]:
    """Refuse events without types of which some seem to be returns, and nothing else says so.

    Tills and payment services write amounts and pieces below 0, and ledgers the numbers of credit
    notes. A row with a quantity below 0 is a return already.

    Returns:
        the columns that newer files are not asked about, as `unasked` of the first run.

    Raises:
        DataError: the message has the settings that decide.
    """
    is_open = chosen.get("taken_back") is None
    for name in free_columns(sample, roles) if is_open else ():
        column = sample.table.column(sample.table.schema.get_all_field_indices(name)[0])
        if returns.is_taken_back(name) and pa.types.is_list(column.type) and name not in unasked:
            count = pc.sum(pc.greater(pc.list_value_length(column), 0)).as_py()
            if count:
                command = call_of(print_pieces_returned, sample.path, "lines.jsonl")
                said = {"path": sample.path, "name": name, "count": count, "command": command}
                raise DataError(sentence("lists_of_returns", **said))
    are_orders = {"behaviour", "rating"}.isdisjoint(roles) and chosen.get("order_status") is None
    for name, states in _strange_states(sample, roles) if is_open and are_orders else ():
        if name not in unasked:
            values = sample.texts(name).filter(pc.is_in(sample.texts(name), pa.array(states)))
            ways = (f"taken_back={name}={states[0]}", f"order_status={name}")
            raise _asked(sample, name, "has states that nobody knows", values, ways)
    if "behaviour" in roles or any(_show_returns(role, sample, roles) for role in roles):
        return list(sample.table.column_names)
    mostly: list[str] = []
    items = items_of(sample.table, roles, sample.path)
    known = pc.is_in(items, value_set=pa.array(items_below_0(sample, roles), pa.string()))
    known = pc.or_(known, each(items, lambda text: says(text) in ("sure", "weak")))
    if "quantity" in roles:
        pieces = _texts(sample, roles["quantity"].column)
        known = pc.or_(known, pc.match_substring_regex(pieces, returns.BELOW_0))
    owners = _owners(sample, roles)
    prices = [match.column for match in all_of("price", roles)]
    for name in dict.fromkeys([*prices, *sample.table.column_names]):
        values = sample.texts(name)
        is_free = name in prices or name in free_columns(sample, roles)
        zones = normalised(name) in words("zones")
        if not len(values) or sample.counts[name] > 1 or is_of_a_user(name) or zones:
            continue
        role, form, what = "taken_back", returns.BELOW_0, "is below 0 or a credit"
        if rank(name, EVENT_WORDS["session"][:2]) is not None:
            form, what = returns.CREDIT_NOTE, "begins like a credit note"
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
        elif count and not (form == returns.CREDIT_NOTE and _are_countries(texts, rows, owners)):
            without = roles[role].column if role in roles else NO_COLUMN
            ways = (f"{role}={name}", f"{role}={without}")
            raise _asked(sample, name, what, texts.filter(rows), ways)
    if is_open:
        for name, what, mark in _marks_of_returns(sample, roles, owners, unasked):
            texts = _texts(sample, name)
            rows = pc.and_not(returns.read_marks(texts, f"={mark}"), known)
            if pc.any(rows).as_py():
                ways = (f"taken_back={name}={mark}", f"taken_back={NO_COLUMN}")
                raise _asked(sample, name, what, texts.filter(rows), ways)
    return mostly


def with_lines_of_returns(sample: Sample, roles: Roles, chosen: Chosen) -> Roles:
    """The roles, with `line` behind those whose marked rows repeat a purchase, so are its return.

    Elsewhere, a column such as `Retoure` says of a purchase itself that it was taken back.
    """
    marks = {
        role: match
        for role, match in roles.items()
        if re.fullmatch(r"(taken_back|order_status)( number)?( \d)?", role)
        and chosen.get(role.partition(" ")[0]) is None
        and not returns.is_cancellation(match.column)
    }
    if not marks:
        return roles
    rows = _moments(sample, roles, _owners(sample, roles))
    for role, match in marks.items():
        texts = _texts(sample, match.column)
        back = returns.read_taken_back(texts)
        if "number" in role:
            back = returns.read_marks(texts, "=*")
        elif "order_status" in role:
            back = pc.fill_null(pc.equal(returns.read_order_status(texts), "returned"), False)
        if "back" in _kinds_of_returns(rows.assign(kind=np.where(back, "back", ""))):
            line = {f"{role} line": Found(match.column, sentence("lines_by_content"))}
            roles = {other: roles[other] for other in roles if other != role} | line
    return roles


def _strange_states(sample: Sample, roles: Roles) -> Iterator[tuple[str, list[str]]]:
    """Columns of states of orders of which many rows have values that nobody knows, with these.

    States of addresses and of products have one value for each user or item.
    """
    known = {role: match for role, match in roles.items() if "status" not in role}
    for name in free_columns(sample, known):
        values, named = sample.texts(name), rank(name, EVENT_WORDS["order_status"]) is not None
        if sample.counts[name] > 1 or is_of_a_user(name) or not named:
            continue
        states = returns.strange_states(values)
        strange = pc.sum(pc.is_in(values, value_set=pa.array(states, pa.string()))).as_py() or 0
        owners = ({"item": roles[role]} for role in ("user", "item"))
        usual = len(states) == 1 and strange > MOST_RETURNS * len(values)  # not that of returns
        if usual or strange <= MOST_STRANGE * len(values):
            continue
        if not any(is_of_items(sample, owner, name, SURE_OF_ONE) for owner in owners):
            yield name, sorted(states, key=values.to_pylist().count)


def _asked(
    sample: Sample, name: str, what: str, values: pa.ChunkedArray, ways: Sequence[str]
) -> DataError:
    """The question about rows with these values of a column, with two answers for `--column`."""
    yes, no = map(shlex.quote, ways)
    said = {"says": what, "count": len(values), "shown": examples(values), "yes": yes, "no": no}
    role = ways[0].partition("=")[0]
    return DataError(sentence("lines_of_returns", path=sample.path, name=name, role=role, **said))


def _marks_of_returns(
    sample: Sample, roles: Roles, owners: pa.ChunkedArray, unasked: Collection[str]
) -> Iterator[tuple[str, str, str]]:
    """Columns that may mark lines of returns, what they do, and the mark (`returns.read_marks`).

    Ids such as `A7-RET` stand beside `A7`. Signs are such as + and -. Of kinds without usual names,
    the rows of a few are nearly all of items that the user has in other rows as well, at another
    time and no less often, while hardly any other rows are. The `owners` are the users and items.
    """
    rows, free = _moments(sample, roles, owners), free_columns(sample, roles)
    most_again = (rows["owner"].value_counts() > 1).mean() > MOST_AGAIN
    for name in sample.table.column_names:
        is_order = rank(name, EVENT_WORDS["session"][:2]) is not None
        if name in unasked or sample.counts[name] > 1 or is_of_a_user(name):
            continue
        texts = sample.texts(name)
        if is_order or name in (roles[role].column for role in ("item", "title") if role in roles):
            yield from ((name, *mark) for mark in _ends_of_returns(texts, is_order))
            continue
        kinds = set(pc.unique(texts).to_pylist())
        signs = {kind for kind in kinds if kind.lower() in RETURN_SIGNS}
        counts = len(kinds) > 2 and all(kind.isdecimal() and int(kind) < 100 for kind in kinds)
        again = any(word in normalised(name) for word in words("repeats"))
        if name not in free or not kinds or counts or again:
            continue
        if signs and signs < kinds and all(k.lower() in SALE_SIGNS for k in kinds - signs):
            yield name, "has the sign of a return", "|".join(sorted(signs))
            continue
        column = _texts(sample, name).to_pandas().to_numpy(object)
        if len(kinds) > returns.MOST_KINDS:  # such as the number of the order that is returned
            column = np.where(column == "", "", "*")
        if most_again and "" not in column:  # as where most is bought again after a month
            continue
        taken = [kind for kind in _kinds_of_returns(rows.assign(kind=column)) if kind]
        if taken and kinds <= {*taken}:
            taken = ["*"]
        if taken:
            yield name, "marks rows that repeat a purchase", "|".join(taken)


def _ends_of_returns(ids: pa.ChunkedArray, is_order: bool) -> Iterator[tuple[str, str]]:
    """The ends of ids, such as *-RET, and the beginnings, as (RETURNED) *, and which they are.

    Most of these ids without it are other ids.
    """
    ends = "|".join(sorted(RETURN_ENDS | (words("credit_numbers") if is_order else frozenset())))
    begins = "|".join(sorted(RETURN_ENDS | words("called_off") | words("returned")))
    for what, form, wild in (
        ("ends", rf"(?i)^(?P<id>.*\w)(?P<mark>[-_/ .#](?:{ends})\d{{0,2}})$", "*{}"),
        ("begins", rf"(?i)^(?P<mark>\W?(?:{begins})\W+)(?P<id>\w.*)$", "{}*"),
    ):
        parts = pc.extract_regex(ids, form)
        marked = pc.is_valid(parts)
        plain = pc.unique(ids.filter(pc.invert(marked)))
        beside = pc.is_in(pc.struct_field(parts, "id").filter(marked), value_set=plain)
        marks = pc.unique(pc.struct_field(parts, "mark").filter(marked)).to_pylist()
        if marks and 2 * pc.sum(beside).as_py() >= len(beside):
            mark = "|".join(map(wild.format, marks[: returns.MOST_KINDS]))
            yield f"{what} like a return", mark


def _owners(sample: Sample, roles: Roles) -> pa.ChunkedArray:
    """The user and item of each row as one text."""
    items = items_of(sample.table, roles, sample.path)
    return pc.binary_join_element_wise(_texts(sample, roles["user"].column), items, "\x1f")


def _moments(sample: Sample, roles: Roles, owners: pa.ChunkedArray) -> pd.DataFrame:
    """Numbers of the `owner` and of the `moment`, an owner's time, of each row."""
    rows = pd.DataFrame({"owner": pd.factorize(owners.to_pandas())[0]})
    time = roles.get("timestamp")
    times = rows.index if time is None else _texts(sample, time.column).to_pandas()
    rows["moment"] = rows.assign(time=times).groupby(["owner", "time"]).ngroup()
    return rows


def _kinds_of_returns(rows: pd.DataFrame) -> list[str]:
    """The kinds whose rows take back those of other kinds, by `owner`, `moment` and `kind`."""
    own = rows.groupby(["owner", "kind"]).size().unstack(fill_value=0)  # (owners, kinds)
    others = -own.sub(own.sum(axis=1), axis=0)
    count = own.sum()
    divided = rows.groupby("moment")["kind"].transform("nunique") > 1  # lines, as by payments
    repeated = own.where(others > 0, 0).sum() - divided.groupby(rows["kind"]).sum()
    again = others.where(others > 1, 0).sum() <= MOST_AGAIN * others.sum()
    both = (own > 0) & (others > 0)
    more = ((own > others) & both).sum() <= MOST_MORE * both.sum()
    some = (count >= FEW_RETURNS) & (count <= MOST_RETURNS * len(rows))
    return count.index[some & again & more & (repeated >= REPEATED * count)].tolist()


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
        return bool(pc.count(returns.read_order_status(values)).as_py())
    return kind == "taken_back" and bool(pc.any(each(values, returns.may_be_yes)).as_py())


def items_below_0(sample: Sample, roles: Roles) -> list[str]:
    """The items of which each line has a price below 0, as vouchers; none if they are most rows."""
    if "price" not in roles:
        return []
    items = items_of(sample.table, roles, sample.path)
    prices = _texts(sample, roles["price"].column)
    below = pc.match_substring_regex(prices, returns.BELOW_0)
    if "quantity" in roles:  # the line of a return may have a price below 0, too
        pieces = _texts(sample, roles["quantity"].column)
        below = pc.and_not(below, pc.match_substring_regex(pieces, returns.BELOW_0))
    others = items.filter(pc.invert(below))
    only = pc.and_not(below, pc.is_in(items, value_set=pc.unique(others)))
    return pc.unique(items.filter(only)).to_pylist() if len(others) > len(items) / 2 else []


def states_of_lines(sample: Sample, roles: Roles) -> list[str]:
    """A sentence on lines of orders with a row for each state, of which each has its own time.

    Rows with one time, or a time of changes and some that were taken back, are merged later.
    """
    used = {role: match.column for role, match in roles.items()}
    order = number_of_orders(sample.table.column_names, {*used.values()})
    if not order or not {"item", "timestamp", "order_status"} <= used.keys():
        return []
    line = [order, used["item"], *all_of("user", used)]
    state, times = used["order_status"], [used["timestamp"], *all_of("clock", used)]
    if not all(len(sample.texts(name)) for name in (*line, state, *times)):  # lists, for example
        return []
    back = pc.count(returns.read_order_status(sample.texts(state))).as_py()
    if back and is_of_later(times[0]):
        return []
    texts = {name: _texts(sample, name).to_pandas() for name in (*line, state, *times)}
    times_of_rows = reduce(add, (texts[name] for name in times))
    own = pd.DataFrame({"state": texts[state], "time": times_of_rows})
    own = own[texts[order] != ""]
    lines = own.groupby([texts[name][own.index] for name in line])
    rows = lines.size()
    changed = rows.gt(1) & lines.nunique().eq(rows, axis=0).all(axis=1)
    if changed.sum() < max(FEW_RETURNS, 0.5 * rows.gt(1).sum()):
        return []
    said = {"lines": changed.sum(), "rows": sample.table.num_rows, "name": state, "time": times[0]}
    return [sentence("states_of_lines", **said)]


def several_currencies(sample: Sample, roles: Roles) -> list[str]:
    """A sentence on prices in several currencies, as their texts or a column beside them say.

    A code in the text of a price comes before the column, and that before a sign: `$` has many.
    """
    if "price" not in roles or not len(sample.texts(roles["price"].column)):
        return []
    name = roles["price"].column
    prices = _texts(sample, name)
    own = each_value(prices, currency_of, pa.string())
    codes = [pc.if_else(pc.match_substring_regex(own, "^[A-Z]{3}$"), own, None)]
    ends = words("currency_columns")
    names = {n: words_of(n.split(":")[0]) for n in sample.table.column_names}  # RecBole has types
    parts = {n: [normalised(word) for word in own] for n, own in names.items()}
    named = [n for n, own in parts.items() if not ends.isdisjoint({own[-1], "".join(own[-2:])})]
    named = [n for n in named if len(sample.texts(n))]  # no lists
    named = [n for n in named if normalised(n) in ends] or named
    in_name = re.search(CURRENCY_SIGNS, name) or CODES & {word.upper() for word in words_of(name)}
    if len(named) == 1 and not in_name:
        codes.append(each_value(_texts(sample, named[0]), currency_of, pa.string()))
    said = pc.coalesce(*codes, own).filter(pc.match_substring_regex(prices, r"\d"))
    counts = Counter(said.drop_null().to_pylist())
    meant = [SIGNS.get(code, [code]) for code in counts]
    if not any({*one}.isdisjoint(other) for one, other in combinations(meant, 2)):
        return []
    several = ", ".join(f"{code} {count:,}" for code, count in counts.most_common())
    way_out = "remove the column" if "id" in roles else "--column price=none"
    shown = {"name": name, "several": several, "rows": sample.table.num_rows}
    return [sentence("several_currencies", way_out=way_out, **shown)]


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


def unread_exclusions(sample: Sample, roles: Roles, chosen: Chosen) -> list[str]:
    """Sentences on columns such as `sold_out` and `returned` whose values cannot be read as such.

    They seem to say that items must not be recommended, or that events must not count. So does a
    column with values that name returns, unless the settings (`chosen`) say that none is read.
    """
    ignored = {role for role, column in chosen.items() if column == NO_COLUMN}
    notes, of_items = [], "id" in roles
    names = words("unavailable") | {"deletedat"}
    states = [roles[role].column for role in roles if re.match("order_status(?! paid)", role)]
    marks = [roles[r].column for r in roles if re.fullmatch(r"taken_back( \d)?( line)?", r)]
    for name in [*free_columns(sample, roles), *states, *marks]:
        key, values = normalised(name), sample.texts(name)
        back = pa.array([], pa.string()) if of_items else returns.values_of_returns(name, values)
        if is_of_a_user(name):
            continue
        if of_items and re.sub("^(is|has)|qty|quantity", "", key) in names:
            said = values.filter(each(values, returns.may_be_yes))
        elif name in marks:
            said = returns.unread_marks(values)
        elif len(back) and name not in states:
            said = back if "taken_back" not in ignored else back[:0]
        elif name in states or (not of_items and "status" in key and "order_status" not in ignored):
            said = returns.unread_states(values, unknown=name in states)
            unread = pc.is_in(values, value_set=pa.array(said, pa.string()))
            if name not in states:
                unread = pc.or_(unread, pc.is_valid(returns.read_order_status(values)))
            said = values.filter(unread)
        elif not of_items and rank(name, EVENT_WORDS["rating"][::2]) is not None:
            is_read = "rating" in ignored or "rating" in roles
            said = values[:0] if is_read else values
        elif not of_items and "behaviour" not in ignored:
            back = pa.array(returns.names_of_returns(values), pa.string())
            said = values.filter(pc.is_in(values, value_set=back))
        else:
            continue
        if not len(said):
            continue
        advice = sentence("unread_items" if of_items else "unread_events")
        if not of_items and "behaviour" not in roles and returns.names_of_returns(values):
            flag = shlex.quote(f"behaviour={name}")
            advice += f"; if it says what kind of event a row is, read it with --column {flag}"
        notes.append(_note("unread", sample, name, said, advice=advice))
    return notes
