"""Recognises the columns of a shop's export by their names and their content.

A name is only trusted if the content agrees. What remains ambiguous is refused, with sample values
and the flag that decides.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Literal

import pyarrow as pa
import pyarrow.compute as pc

from recsys.data import returns
from recsys.data.availability import answers, each, is_missing, plain_answer, share_of_answers
from recsys.data.cleaning import has_few_names, is_no_id, is_of_items, is_placeholder
from recsys.data.column_words import (
    EVENT_FIELDS,
    EVENT_WORDS,
    ITEM_WORDS,
    Groups,
    all_of,
    is_of_a_user,
    is_of_later,
    order,
    rank,
    words,
)
from recsys.data.ids import SHORTENED
from recsys.data.layouts import parts_repeat, refuse_without_header
from recsys.data.numbers import NO_NUMBER, share_of_points
from recsys.data.refunds import lines_of_returns
from recsys.data.report import sentence
from recsys.data.sample import (
    FILE_ORDER,
    NEEDED,
    NO_COLUMN,
    SHARE_OF_TIMES,
    SURE_SHARE,
    Found,
    Roles,
    Sample,
    free_columns,
    share_of,
)
from recsys.data.texts import as_text, examples
from recsys.data.time_formats import (
    DIGITS_OF_CLOCKS,
    TimeRules,
    share_of_times,
    without_midnight,
)
from recsys.data.unknown_columns import unknown
from recsys.errors import DataError
from recsys.event_names import normalised

ORDER_NUMBER = r"^#?[A-Za-z]{0,6}[-_/ ]?\d{2,}[A-Za-z]?$"  # such as #1001 or RE-20251
ENOUGH_ROWS = 50  # below this, repetition says nothing
MAX_TYPES = 60  # distinct names of event types
MAX_RATINGS = 101  # distinct values of a rating
SHARE_OF_EVENTS = 0.5  # of the values of a column such as `type` that must name events
BLANKS, SHARE_OF_WORDS = r"\S\s+\S", 0.5  # of titles that have a blank between words
SHARE_OF_CODES = 0.5  # of a column with the name of a code: a line such as `SHIPPING` has none
EMAIL = r"^\S+@\S+\.\w+$"
SCORE = r"^-?(\d|10|\d[.,]\d)([.,]0+)?$"  # of scores
RATE = r"^([1-9]|10|[1-9][.,]\d)([.,]0+)?$"  # of rates that are ratings: taxes are 0, too
DOCUMENT = r"^[4-9]\d{9}$"  # as unix seconds, they are after the year 2096
CLOCK = r"^\d{1,2}[:h]\d{2}(:\d{2}([.,]\d+)?)?( ?[AaPp][Mm])?( Uhr)?$"
FEW_KINDS = 3  # distinct values of a column such as `Art`, which is an article or a kind
TITLE_LENGTH = 80  # mean characters of texts that may be titles
SHARE_OF_PERSONS = 0.05  # of the rows; a column that names fewer buyers is nearly empty
SHARE_OF_KNOWN = 0.1  # items of the events that the items file must describe
# Roles of all columns that fit: any of them may say yes.
SEVERAL = ("unavailable", "taken_back", "order_status")
IN_ORDER = ("item", "timestamp", "user", "session", "behaviour", "rating", "quantity",
            "taken_back", "order_status")  # in which columns of events are recognised  # fmt: skip
FIRST_LINES = (1, 10, 100)  # numbers of the first line of an order


def recognise_events(
    sample: Sample, chosen: Mapping[str, str | None], items: Sample | None, rules: TimeRules
) -> Roles:
    """The roles of the columns of events: user, item, timestamp, behaviour, rating and session.

    Fields of the items, such as the title, have the roles of `EVENT_FIELDS`.

    Args:
        sample: rows of the events.
        chosen: role -> column, from the settings; None means that it is to be recognised.
        items: rows of the items file, if there is one.
        rules: how times are read.

    Raises:
        DataError: a needed column that cannot be told, with the setting that names it.
    """
    check_names(sample, [name for name in chosen.values() if name])
    if lines_of_returns(sample, chosen):  # whose column may also be a price, or the order
        chosen = {**chosen, "taken_back": None}
    roles = _given(sample, chosen, EVENT_WORDS)
    if items is None:  # else the names are of its columns
        roles |= _given(sample, chosen, EVENT_FIELDS)
    refuse_without_header(sample, bool(roles))
    settled = {role for role, name in chosen.items() if name is not None}
    known = None if items is None else _best_ids(items, chosen)
    doubts: dict[str, list[str]] = {}

    for role in IN_ORDER:
        fits = partial(_content_agrees, role, sample, rules)
        if role in roles or role in settled:
            continue
        ranked = _by_name(role, EVENT_WORDS[role], sample, roles, fits)
        if role == "item" and known is not None:
            ranked = _by_overlap(ranked, _unnamed(sample, roles, EVENT_WORDS), sample, known)
        if role == "item" and len(ranked) > 1:
            others = [pair for pair in ranked if not _numbers_lines(sample.texts(pair[1]))]
            ranked = others or ranked
        if role == "item" and ranked and ranked[0][0] == len(EVENT_WORDS["item"]) - 1:
            names = sample.table.column_names
            titled = any(rank(n, EVENT_FIELDS["title"]) == 0 for n in names)
            ranked = [] if titled else ranked
        if role == "item" and ranked:
            ranked = _without_titles(ranked, sample)
        if role == "item" and known is None:
            ranked = _codes_beside_titles(ranked, sample, roles)
        if role == "session" and "item" in roles:  # `product.name` numbers no order
            ranked = [
                (order, n) for order, n in ranked if order < 2 or not is_of_items(sample, roles, n)
            ]
        own = [pair for pair in ranked if role != "timestamp" or not is_of_later(pair[1])]
        if role in ("timestamp", "behaviour", "user") and not own:
            once = [name for name in free_columns(sample, roles) if sample.counts[name] == 1]
            own = [(0, name) for name in once if _is_unnamed(role, sample, rules, name)]
        ranked = own or ranked  # `updated_at` is the time where there is no other
        doubts |= _take(role, _without_twins(ranked, sample), roles, EVENT_WORDS[role], sample)
    _take_clock(sample, chosen, roles)
    _take_fields(sample, chosen, roles, named_items=items is None and "item" not in doubts)
    if "user" not in roles and "user" not in doubts and "session" in roles:
        session = roles["session"]
        if chosen.get("user") != NO_COLUMN:
            _refuse_persons(sample, roles, session.column)
        roles["user"] = Found(session.column, "there are only sessions, so each is taken as a user")
    needed = ["user", "item"] + ["timestamp"] * (chosen.get("timestamp") != FILE_ORDER)
    if missing := [role for role in needed if role not in roles]:
        raise unknown(missing, sample, doubts, roles)
    return roles


def _refuse_persons(sample: Sample, roles: Roles, session: str) -> None:
    """Raise a DataError if a column names who bought, of whom some have several orders."""
    free = free_columns(sample, roles)
    for name in (name for name in free if rank(name, EVENT_WORDS["person"]) is not None):
        if sample.counts[name] > 1 or not len(sample.texts(name)):
            continue
        ids = [pc.utf8_trim_whitespace(as_text(sample.table[n])) for n in (name, session)]
        rows = pa.table(ids, ["person", "order"])
        nobody = pc.or_(is_no_id(rows["person"]), each(rows["person"], is_placeholder))
        rows = rows.filter(pc.invert(nobody))
        persons = pc.count_distinct(rows["person"]).as_py()
        orders = rows.group_by(["person", "order"]).aggregate([]).num_rows
        if rows.num_rows >= SHARE_OF_PERSONS * sample.table.num_rows and 1 < persons < orders:
            said = {"name": name, "count": rows.num_rows, "shown": examples(rows["person"])}
            said |= {"session": session, "person": shlex.quote(f"user={name}")}
            raise DataError(f"{sentence('persons', path=sample.path, **said)}\n{sample.show()}")


def mapped(
    sample: Sample, chosen: Mapping[str, str | None], mapping: Mapping[str, str], *, of_items: bool
) -> Roles:
    """The roles that the columns had in earlier files; columns that the settings name win.

    Args:
        sample: rows of the file.
        chosen: role -> column, from the settings.
        mapping: role -> column of the earlier files.
        of_items: whether the file describes items.

    Raises:
        DataError: the file lacks such a column.
    """
    if {*mapping.values()}.isdisjoint(sample.table.column_names):
        refuse_without_header(sample, False, of_items, mapping)
    marks = lines_of_returns(sample, chosen)
    given = {**chosen, "taken_back": None} if marks else chosen
    roles = _given(sample, given, ITEM_WORDS if of_items else EVENT_WORDS)
    for role, name in mapping.items():
        kind = role.partition(" ")[0]
        if chosen.get(kind) is not None and not (kind in NEEDED and chosen[kind] == NO_COLUMN):
            continue
        if name not in sample.table.column_names:
            if kind == "nanosecond":
                continue
            without = "" if kind in NEEDED else f", or go on without it: --column {kind}=none"
            said = {"path": sample.path, "name": name, "kind": kind, "without": without}
            raise DataError(f"{sentence('no_column_of_first_run', **said)}\n{sample.show()}")
        roles[role] = Found(name, "as in the first run")
    return roles | marks


def check_new_columns(
    sample: Sample,
    chosen: Mapping[str, str | None],
    roles: Roles,
    before: Collection[str],
    rules: TimeRules,
) -> None:
    """Refuse a column that the first run did not have, and that may say what is negative.

    Args:
        sample: rows of the events.
        chosen: role -> column, from the settings.
        roles: of the columns, from `mapped`.
        before: the columns without a role in the files of the first run.
        rules: how times are read.

    Raises:
        DataError: such a column, with the settings that decide.
    """
    for role in ("behaviour", "rating", "quantity", "taken_back", "order_status"):
        if chosen.get(role) is not None or (role in roles and role not in SEVERAL):
            continue
        for name in free_columns(sample, roles):
            fits = role == "behaviour" and _is_kind(sample, name)
            if name not in before and rank(name, EVENT_WORDS[role]) is not None:
                fits = fits or _content_agrees(role, sample, rules, name)
            back = returns.values_of_returns(name, sample.texts(name))
            unread = role == "taken_back" and name not in before and len(back) > 0
            if fits or (unread and not is_of_a_user(name)):
                shown = examples(sample.texts(name) if fits else back)
                flag = shlex.quote(f"{role}={name}")
                way_out = f"read it with --column {flag}" if fits else (
                    "say in a column 'returned' which events were taken back as a whole: yes or no"
                )  # fmt: skip
                said = {"name": name, "shown": shown, "role": role, "way_out": way_out}
                raise DataError(sentence("new_column", path=sample.path, **said))


def recognise_items(
    sample: Sample, chosen: Mapping[str, str | None], item: str, events: pa.ChunkedArray,
    rules: TimeRules, mapping: Mapping[str, str] | None = None,
) -> Roles:  # fmt: skip
    """The roles of the columns of the items file.

    With the `mapping` of an earlier file (`mapped`), only columns of availability are recognised
    beside it, because a shop may begin to say what is in stock.

    Args:
        sample: rows of the items file.
        chosen: role -> column, from the settings.
        item: the column of items in the events, which the items file may have too.
        events: item ids of the events, to compare with.
        rules: how times are read.
        mapping: role -> column of an earlier file; None recognises all.

    Raises:
        DataError: the id column cannot be told, or a named column does not exist.
    """
    check_names(sample, sample.table.column_names)
    roles = _given(sample, chosen, ITEM_WORDS)
    refuse_without_header(sample, bool(roles), of_items=True)
    names = ITEM_WORDS
    if mapping is not None:
        roles = mapped(sample, chosen, mapping, of_items=True)
        names = {role: ITEM_WORDS[role] for role in ITEM_WORDS if "available" in role}

    if "id" not in roles and chosen.get("item") in sample.table.column_names:
        roles["id"] = Found(item, "named in the settings")
    for role, groups in names.items():
        if role in roles or chosen.get(role) == NO_COLUMN:
            continue
        fits = partial(_content_agrees, role, sample, rules)
        ranked = _by_name(role, groups, sample, roles, fits)
        if role == "id":
            ranked = _by_overlap(ranked, _unnamed(sample, roles, ITEM_WORDS), sample, events)
        if role == "title" and not ranked and "id" in roles:
            ranked = _titles_under_names_of_items(sample, roles, "id")
        doubts = _take(role, ranked, roles, groups, sample)
        if role == "id" and "id" not in roles:
            raise unknown(["id"], sample, doubts, roles)
        if role == "available" and ranked:
            _take_published(ranked, roles)
    named = [role for role in ("title", "text") if chosen.get(role) or role in (mapping or ())]
    if "title" not in roles and not named:
        _take_short_text(sample, roles)
    return roles


def _take_short_text(sample: Sample, roles: Roles) -> None:
    """Take the shortest text as the title of items that have no other: often a `description`."""
    taken = [roles.pop("text").column] if "text" in roles else []
    named = [
        name for name in free_columns(sample, roles) if rank(name, ITEM_WORDS["text"]) is not None
    ]
    lengths = {n: pc.mean(pc.utf8_length(sample.texts(n))).as_py() or 0.0 for n in named}
    best = min(lengths, key=lambda name: lengths[name], default=None)
    if best is not None and lengths[best] <= TITLE_LENGTH:
        roles["title"] = Found(best, "there is no other name, and these texts are short")
        taken = [name for name in [*taken, *named] if name != best]
    if taken:
        roles["text"] = Found(taken[0], "by name and content")


def _take_fields(
    sample: Sample, chosen: Mapping[str, str | None], roles: Roles, *, named_items: bool
) -> None:
    """Take the columns of the events that describe items, and a title as the item without an id."""
    for role, groups in EVENT_FIELDS.items():
        if role in roles or chosen.get(role) == NO_COLUMN:
            continue
        ranked = _by_name(role, groups, sample, roles, lambda name: bool(len(sample.texts(name))))
        if role == "title" and "item" in roles and not any(order == 0 for order, _ in ranked):
            ranked += _titles_under_names_of_items(sample, roles, "item")
        if "item" in roles and role != "price":  # the price of an item changes
            sure = role == "title"  # names such as `Lineitem name`, which variants do not share
            ranked = [
                (order, n)
                for order, n in ranked
                if (sure and order == 0)
                or is_of_items(sample, roles, n)
                or (sure and has_few_names(sample, roles, n))
            ]
        if ranked:
            roles[role] = Found(ranked[0][1], "by name: it describes the items")
    bare = "title" in roles and rank(roles["title"].column, EVENT_FIELDS["title"][:2]) is None
    if "item" not in roles and "title" in roles and named_items and not bare:
        title = roles.pop("title").column
        roles["item"] = Found(title, "there are no item ids, so the names stand for the items")


def _is_unnamed(role: str, sample: Sample, rules: TimeRules, name: str) -> bool:
    """Whether a column with any name has a role by its content."""
    values = sample.texts(name)
    if role == "behaviour":
        return _is_kind(sample, name)
    if role == "user" and share_of(values, EMAIL) < SURE_SHARE:
        return False
    if role == "timestamp" and (is_of_later(name) or share_of(values, DOCUMENT) >= SURE_SHARE):
        return False
    return _content_agrees(role, sample, rules, name)


def _is_kind(sample: Sample, name: str) -> bool:
    """Whether the values of a column show that it says which lines are sales and returns."""
    states = (EVENT_WORDS["order_status"], EVENT_WORDS["taken_back"])
    if sample.counts[name] > 1 or any(rank(name, words) is not None for words in states):
        return False
    return not is_of_a_user(name) and returns.are_kinds(sample.texts(name))


def _numbers_lines(values: pa.ChunkedArray) -> bool:
    """Whether a column such as `Item` numbers the lines of each order, as 10, 20, 10, 20, 30."""
    if not len(values) or share_of(values, r"^0*[1-9]\d{0,3}$") < 1:
        return False
    numbers = pc.cast(values, pa.int64()).to_numpy()
    rises, begins = numbers[1:] > numbers[:-1], numbers[1:] == numbers[0]
    return bool((rises | begins).all() and numbers.min() == numbers[0] in FIRST_LINES)


def _without_titles(ranked: list[tuple[int, str]], sample: Sample) -> list[tuple[int, str]]:
    """Of the surest columns of items, the one with codes, if all others have titles.

    `SKU` is the item and `Product` its title, or the other way round.
    """
    surest = [pair for pair in ranked if pair[0] == ranked[0][0]]
    kinds = [_looks_like(sample.texts(name)) for _, name in surest]
    if kinds.count("codes") == 1 and kinds.count("titles") == len(kinds) - 1:
        return [surest[kinds.index("codes")]]
    return ranked


def _codes_beside_titles(
    named: list[tuple[int, str]], sample: Sample, roles: Roles
) -> list[tuple[int, str]]:
    """(0, column) of the columns such as `Code` and `Ref.` that tell the titles of items apart.

    Without one, or where columns that are named as items hold codes, these (`named`) stay.
    """
    if any(_looks_like(sample.texts(name)) == "codes" for order, name in named if order <= 1):
        return named
    of_items = (*EVENT_FIELDS["title"], *EVENT_WORDS["item"][:2])
    free = [n for n in free_columns(sample, roles) if sample.counts[n] == 1]
    titles = [n for n in free if rank(n, of_items) is not None]
    titles = [n for n in titles if _looks_like(sample.texts(n)) == "titles"]
    codes = []
    for name in free if titles else ():
        values = sample.texts(name)
        is_code = normalised(name) in words("ids") and share_of(values, BLANKS) <= 1 - SURE_SHARE
        is_code = is_code and share_of(values, r"\d") > SHARE_OF_CODES
        if is_code and pc.count_distinct(values).as_py() < len(values):
            column = {"item": Found(name, "")}
            codes += [(0, name)] if any(is_of_items(sample, column, t) for t in titles) else []
    return codes or named


def _without_twins(ranked: list[tuple[int, str]], sample: Sample) -> list[tuple[int, str]]:
    """The candidates, of which the surest are one if each has one value for each of the others."""
    if not ranked:
        return ranked
    surest = [name for order, name in ranked if order == ranked[0][0]]
    unclear = any(sample.counts[name] > 1 for name in surest)
    if unclear or len(surest) < 2 or len({*surest}) < len(surest):
        return ranked
    columns = [sample.table[name] for name in surest]
    if any(pa.types.is_nested(column.type) for column in columns):
        return ranked
    rows = pa.table(columns, surest).group_by(surest).aggregate([]).num_rows
    same = all(len(pc.unique(column)) == rows for column in columns)
    return ranked[:1] + ranked[len(surest) :] if same else ranked


def _titles_under_names_of_items(sample: Sample, roles: Roles, role: str) -> list[tuple[int, str]]:
    """(1, column) of the free columns such as `Product` that hold titles beside a column of ids."""
    codes = _looks_like(sample.texts(roles[role].column)) == "codes"
    titles = []
    for name in free_columns(sample, roles):
        if rank(name, EVENT_WORDS["item"]) in (0, 1):
            values = sample.texts(name)
            words = codes or share_of(values, BLANKS) >= SHARE_OF_WORDS
            words = words and pc.count_distinct(values).as_py() > FEW_KINDS
            titles += [(1, name)] if words and _looks_like(values) == "titles" else []
    return titles


def _looks_like(values: pa.ChunkedArray) -> Literal["codes", "titles"] | None:
    """Codes have digits and no blanks; most titles have a blank between words, or no digits."""
    if not len(values):
        return None
    blanks, digits = share_of(values, BLANKS), share_of(values, r"\d")
    if digits >= SURE_SHARE and blanks <= 1 - SURE_SHARE:
        return "codes"
    return "titles" if blanks >= SHARE_OF_WORDS or digits <= 0.5 else None


def check_names(sample: Sample, named: Iterable[str]) -> None:
    """Refuse names that several columns have."""
    for name in named:
        if sample.counts[name] > 1:
            raise _repeated(sample.path, name, sample.counts[name])


def _repeated(path: Path, name: str, times: int) -> DataError:
    return DataError(f"{path}: {times} columns are called {name!r}; rename all but one")


def _given(sample: Sample, chosen: Mapping[str, str | None], words: Mapping[str, Groups]) -> Roles:
    """The roles that the settings name."""
    roles = {}
    for role in words:
        name = chosen.get(role)
        if name in (None, NO_COLUMN) or (role == "timestamp" and name == FILE_ORDER):
            continue
        if name not in sample.table.column_names:
            missing = sentence("no_column_of_settings", path=sample.path, name=name, role=role)
            raise DataError(f"{missing}\n{sample.show()}")
        roles[role] = Found(name, "named in the settings")
    return roles


def _unnamed(sample: Sample, roles: Roles, words: Mapping[str, Groups]) -> list[tuple[int, str]]:
    """(0, column) of the free columns whose names show no role."""
    free = free_columns(sample, roles)
    return [(0, n) for n in free if all(rank(n, groups) is None for groups in words.values())]


def _by_name(
    role: str, groups: Groups, sample: Sample, roles: Roles, fits: Callable[[str], bool]
) -> list[tuple[int, str]]:
    """(rank, column) of the columns whose name fits the role and whose content agrees."""
    ranked = []
    for name in free_columns(sample, roles):
        order = rank(name, groups)
        if order is None:
            continue
        if sample.counts[name] > 1:
            raise _repeated(sample.path, name, sample.counts[name])
        if fits(name):
            ranked.append((order, name))
    return sorted(ranked, key=lambda pair: pair[0])


def _by_overlap(
    named: list[tuple[int, str]],
    others: list[tuple[int, str]],
    sample: Sample,
    known: pa.ChunkedArray,
) -> list[tuple[int, str]]:
    """The named columns, or else the others, that share most values with known item ids."""
    known = pc.unique(known)
    for candidates in (named, others):
        shares = {}
        for _, name in candidates:
            values = pc.unique(sample.texts(name))
            inside = pc.sum(pc.is_in(values, value_set=known)).as_py() or 0
            if inside >= SHARE_OF_KNOWN * max(min(len(values), len(known)), 1):
                shares[name] = inside / (len(values) + len(known) - inside)
        if best := max(shares.values(), default=0.0):
            return [(0, name) for name, share in shares.items() if share == best]
    return named


def _best_ids(items: Sample, chosen: Mapping[str, str | None]) -> pa.ChunkedArray:
    """All values of the columns of the items file that may hold the item id."""
    names = items.table.column_names
    named = chosen.get("id") or chosen.get("item")
    if named is not None and named in names:
        names = [named]
    elif likely := [name for name in names if rank(name, ITEM_WORDS["id"]) is not None]:
        names = likely
    parts = [items.texts(name) for name in names if items.counts[name] == 1]
    chunks = [chunk for part in parts for chunk in part.chunks]
    return pa.chunked_array(chunks, pa.string())


def _take(
    role: str, ranked: list[tuple[int, str]], roles: Roles, groups: Groups, sample: Sample
) -> dict[str, list[str]]:
    """Give the role to the surest candidate; to all, as `role`, `role 2`, ..., if it is `SEVERAL`.

    Returns:
        role -> equal candidates for a needed role, which nobody gets.
    """
    if not ranked:
        return {}
    equal = [name for place, name in ranked if place == ranked[0][0]]
    if role in NEEDED and len(equal) > 1:
        return {role: equal}
    if role in SEVERAL:
        for number, (_, name) in enumerate(ranked, 1):
            roles[role if number == 1 else f"{role} {number}"] = Found(name, "by name and content")
        return {}
    # `Order #` of some tills begins anew each day, and `Order ID` does not.
    distinct = {name: len(pc.unique(sample.table[name])) for name in equal if role == "session"}
    orders = {name: count for name, count in distinct.items() if count < sample.table.num_rows}
    name = min(equal, key=lambda name: (-orders.get(name, 0), order(name, groups)))
    why = "by name and content" if rank(name, groups) is not None else "by content"
    roles[role] = Found(name, why)
    return {}


def _take_published(ranked: list[tuple[int, str]], roles: Roles) -> None:
    """Take columns that say whether an item is published beside one that says what is in stock."""
    published = [name for _, name in ranked if normalised(name) in words("published")]
    stock = [name for _, name in ranked if name not in published]
    for number, name in enumerate(stock[:1] + published, 1):
        label = "available" if number == 1 else f"available {number}"
        roles[label] = Found(name, "by name and content")


def _take_clock(sample: Sample, chosen: Mapping[str, str | None], roles: Roles) -> None:
    """Find the time of day, or what divides seconds, in a column of its own."""
    if chosen.get("clock") is not None or "timestamp" not in roles:
        return
    free, name = free_columns(sample, roles), roles["timestamp"].column
    stem = name.removesuffix("seconds")  # {"_seconds": 1767225600, "_nanoseconds": 5000000}
    below = [n for n in (f"{stem}nanoseconds", f"{stem}nanos") if n in free and stem != name]
    if below:
        roles["nanosecond"] = Found(below[0], "by name: it divides the seconds")
    clocks = clocks_beside_dates(sample, roles)
    ranked = [n for n, reads in clocks.items() if reads]
    named = [n for n in ranked if rank(n, EVENT_WORDS["clock"]) is not None]
    if len(ranked) == 1 or len(named) == 1:
        roles["clock"] = Found((named or ranked)[0], "by content: the time of day of each date")
    elif hours := _numbered_below_100(sample, list(clocks), "hours"):
        roles["clock hour"] = Found(hours[0], "by name and content: the hour of each date")
        if minutes := _numbered_below_100(sample, free, "minutes"):
            roles["clock minute"] = Found(
                minutes[0], "by name and content: the minute of each date"
            )


def _numbered_below_100(sample: Sample, names: Iterable[str], unit: str) -> list[str]:
    """The columns with the name of a unit of time that hold its numbers."""
    named = [name for name in names if normalised(name) in words(unit)]
    return [name for name in named if share_of(sample.texts(name), r"^\d{1,2}$") == 1]


def clocks_beside_dates(sample: Sample, roles: Roles) -> dict[str, bool]:
    """The free columns that seem to have the time of day of dates, and whether it can be read."""
    dates = without_midnight(sample.texts(roles["timestamp"].column))
    if all_of("clock", roles) or pc.any(pc.match_substring_regex(dates, r":|^\d{9,}")).as_py():
        return {}
    clocks = {}
    for name in free_columns(sample, roles):
        values = sample.texts(name) if sample.counts[name] == 1 else sample.texts(name)[:0]
        named = rank(name, EVENT_WORDS["clock"]) is not None
        ends = named or normalised(name).endswith(tuple(words("clocks")))
        forms = (CLOCK, *(DIGITS_OF_CLOCKS if ends and share_of(values, r"^\d{3}") > 0.5 else ()))
        reads = any(share_of(values, form) >= SURE_SHARE for form in forms)
        if len(values) and (reads or named):
            clocks[name] = reads
    return clocks


def _content_agrees(role: str, sample: Sample, rules: TimeRules, name: str) -> bool:
    """Whether the values of a column can have a role."""
    values = sample.texts(name)
    if role in ("timestamp", "available_from", "available_until"):
        readable, possible = share_of_times(sample.table[name], rules)
        often = len(values) >= SHARE_OF_TIMES * sample.table.num_rows
        return (possible * often if role == "timestamp" else readable) >= SHARE_OF_TIMES
    if not len(values):
        return role == "taken_back" and not is_of_a_user(name)
    distinct = pc.count_distinct(values).as_py()
    if role == "session" and rank(name, EVENT_WORDS["session"][:2]) is None:
        return share_of(values, ORDER_NUMBER) >= SURE_SHARE and distinct < len(values)
    if role == "item" and name.rstrip().endswith("#"):
        return False  # the number of a line
    if role == "item" and normalised(name) == "material" and _looks_like(values) != "codes":
        return False  # what it is made of
    if role in ("user", "item", "session"):
        one = distinct == 1 and not share_of(values, SHORTENED)  # which are refused later
        repeats = distinct < len(values) and not (one and role == "user")
        repeats = repeats or (role == "item" and parts_repeat(values))
        return bool(repeats) or len(values) < ENOUGH_ROWS
    if role == "id":
        return bool(distinct >= 0.5 * len(values))
    if role == "behaviour":
        longest = pc.max(pc.utf8_length(values)).as_py()
        few = distinct <= max(2, len(values) // 2) or len(values) < ENOUGH_ROWS
        sure = rank(name, EVENT_WORDS["behaviour"][:1]) is not None
        said = sure or share_of(values, r"^\d+$") == 1 or returns.are_codes(values)
        said = said or returns.share_of_events(values) >= SHARE_OF_EVENTS
        said = said or returns.take_back_others(values)
        return bool(distinct <= MAX_TYPES and longest <= 60 and few and said)
    if role == "available":
        return share_of_answers(values) >= SURE_SHARE
    if role == "taken_back":
        said = returns.share_of_taken_back(values, sample.table.num_rows) >= SURE_SHARE
        return not is_of_a_user(name) and (said or pc.all(each(values, is_missing)).as_py())
    if role == "order_status":
        back = pc.count(returns.read_order_status(values)).as_py()
        known = back or returns.knows_order_status(values)  # some may be cancelled later
        return bool(known and back < sample.table.num_rows and not is_of_a_user(name))
    if role == "unavailable":
        return answers(values, sample.table.num_rows, plain_answer) >= SURE_SHARE
    if role == "price":
        return share_of(values, r"\d") >= SURE_SHARE
    if role == "rating":
        values = values.filter(each(values, lambda text: text.lower() not in NO_NUMBER))
        surest = max(share_of_points(values), share_of_answers(values))
        record, _, own = name.rpartition(".")
        if own.lower() in ("rate", "score", "grade"):  # of anything: discounts, taxes, frauds
            surest = min(surest, share_of(values, RATE if own.lower() == "rate" else SCORE))
            if record and not re.search("review|rating|feedback|bewertung", record.lower()):
                surest = 0.0
        named = rank(name, EVENT_WORDS["rating"][:1]) is not None
        return bool(distinct <= MAX_RATINGS and surest >= (0.5 if named else SURE_SHARE))
    if role == "quantity":
        pieces = returns.read_pieces(values)  # a few below 0 are returns, whatever the others are
        less = pc.sum(pc.less_equal(pieces, 0)).as_py() or 0
        return bool(less or 2 * pieces.null_count <= len(pieces))
    return True
