"""Recognises the columns of a shop's export by their names and their content.

A name is only trusted if the content agrees. What remains ambiguous is refused, with sample values
and the flag that decides.
"""

from __future__ import annotations

import shlex
from collections.abc import Collection, Mapping
from functools import partial

import pyarrow as pa
import pyarrow.compute as pc

from recsys.data import column_candidates as candidates
from recsys.data import returns
from recsys.data.availability import each
from recsys.data.cleaning import has_few_names, is_no_id, is_of_items, is_placeholder
from recsys.data.column_candidates import unknown
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
from recsys.data.layouts import refuse_without_header
from recsys.data.refunds import lines_of_returns
from recsys.data.report import sentence
from recsys.data.sample import (
    FILE_ORDER,
    NAMED,
    NEEDED,
    NO_COLUMN,
    Chosen,
    Found,
    Roles,
    Sample,
    free_columns,
    share_of,
)
from recsys.data.texts import as_text, examples
from recsys.data.time_formats import TimeRules
from recsys.errors import DataError
from recsys.event_names import normalised

TITLE_LENGTH = 80  # mean characters of texts that may be titles
SHARE_OF_PERSONS = 0.05  # of the rows; a column that names fewer buyers is nearly empty
# Roles of all columns that fit: any of them may say yes.
SEVERAL = ("unavailable", "taken_back", "order_status")
IN_ORDER = ("item", "timestamp", "user", "session", "behaviour", "rating", "quantity",
            "taken_back", "order_status")  # in which columns of events are recognised  # fmt: skip


def recognise_events(
    sample: Sample, chosen: Chosen, items: Sample | None, rules: TimeRules
) -> Roles:
    """The roles of the columns of events: user, item, timestamp, behaviour, rating and session.

    Columns that the settings name (`chosen`) are not recognised; the `items` of their file show the
    ids. Fields of the items, such as the title, have the roles of `EVENT_FIELDS`.

    Raises:
        DataError: a needed column that cannot be told, with the setting that names it.
    """
    candidates.check_names(sample, [name for name in chosen.values() if name])
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
        fits = partial(candidates.content_agrees, role, sample, rules)
        if role in roles or role in settled:
            continue
        ranked = candidates.by_name(role, EVENT_WORDS[role], sample, roles, fits)
        if role == "item" and known is not None:
            ranked = candidates.by_overlap(
                ranked, candidates.unnamed(sample, roles, EVENT_WORDS), sample, known
            )
        if role == "item" and len(ranked) > 1:
            others = [p for p in ranked if not candidates.tells_no_items(sample.texts(p[1]))]
            ranked = others or ranked
        if role == "item" and ranked and ranked[0][0] == len(EVENT_WORDS["item"]) - 1:
            names = sample.table.column_names
            titled = any(rank(n, EVENT_FIELDS["title"]) == 0 for n in names)
            ranked = [] if titled else ranked
        if role == "item" and ranked:
            ranked = candidates.without_titles(ranked, sample)
        if role == "item" and known is None:
            ranked = candidates.codes_beside_titles(ranked, sample, roles)
        if role == "session" and "item" in roles:  # `product.name` numbers no order
            ranked = [(at, n) for at, n in ranked if at < 2 or not is_of_items(sample, roles, n)]
        own = [
            (order, n) for order, n in ranked
            if role != "timestamp" or not (is_of_later(n) or is_of_a_user(n))
        ]  # fmt: skip
        if role in ("timestamp", "behaviour", "user") and not own:
            once = [name for name in free_columns(sample, roles) if sample.counts[name] == 1]
            own = [(0, name) for name in once if candidates.is_unnamed(role, sample, rules, name)]
        ranked = own or ranked  # `updated_at` is the time where there is no other
        doubts |= _take(
            role, candidates.without_twins(ranked, sample), roles, EVENT_WORDS[role], sample
        )
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


def mapped(sample: Sample, chosen: Chosen, mapping: Mapping[str, str], *, of_items: bool) -> Roles:
    """The roles of the columns of earlier files; those that the settings name (`chosen`) win.

    Raises:
        DataError: the file lacks such columns.
    """
    if {*mapping.values()}.isdisjoint(sample.table.column_names):
        refuse_without_header(sample, False, of_items, mapping)
    marks = lines_of_returns(sample, chosen)
    given = {**chosen, "taken_back": None} if marks else chosen
    roles = _given(sample, given, ITEM_WORDS if of_items else EVENT_WORDS)
    lost: dict[str, str] = {}
    for role, name in mapping.items():
        kind = role.partition(" ")[0]
        if chosen.get(kind) is not None and not (kind in NEEDED and chosen[kind] == NO_COLUMN):
            continue
        if name in sample.table.column_names:
            roles[role] = Found(name, "as in the first run")
        elif kind not in ("nanosecond", "millisecond"):
            lost.setdefault(kind, name)
    if lost:
        free, flags = free_columns(sample, roles), []
        for kind in lost:
            groups = (ITEM_WORDS if of_items else {**EVENT_FIELDS, **EVENT_WORDS}).get(kind, ())
            ranked = sorted((order, n) for n in free if (order := rank(n, groups)) is not None)
            name = ranked[0][1] if ranked else "NAME"
            flags.append(f"--column {shlex.quote(f'{kind}={name}')}")
        without = "".join(f" --column {kind}=none" for kind in lost if kind not in NEEDED)
        said = {"shown": ", ".join(f"{name!r} ({kind})" for kind, name in lost.items())}
        said |= {"flags": " ".join(flags), "without": without and f", or go on without:{without}"}
        text = sentence("no_columns_of_first_run", path=sample.path, **said)
        raise DataError(f"{text}\n{sample.show()}")
    return roles | marks


def check_new_columns(
    sample: Sample, chosen: Chosen, roles: Roles, before: Collection[str], rules: TimeRules
) -> None:
    """Refuse a column that the first run did not have, and that may say what is negative.

    The columns `before` had no role there. In a file of returns, it may say which were refused.

    Raises:
        DataError: such a column, with the settings that decide.
    """
    are_returns = returns.kind_of_file(sample.path.stem) is not None
    for role in ("behaviour", "rating", "quantity", "taken_back", "order_status"):
        if chosen.get(role) is not None or (role in roles and role not in SEVERAL):
            continue
        for name in free_columns(sample, roles):
            fits = role == "behaviour" and candidates.is_kind(sample, name)
            if name not in before and rank(name, EVENT_WORDS[role]) is not None:
                fits = fits or candidates.content_agrees(role, sample, rules, name)
            back = returns.values_of_returns(name, sample.texts(name))
            is_own = role == "taken_back" and name not in before
            fits = fits or (is_own and are_returns and returns.says_kept(name, sample.texts(name)))
            unread = is_own and len(back) > 0
            if fits or (unread and not is_of_a_user(name)):
                shown = examples(sample.texts(name) if fits else back)
                flag = shlex.quote(f"{role}={name}")
                way_out = f"read it with --column {flag}" if fits else (
                    "say in a column 'returned' which events were taken back as a whole: yes or no"
                )  # fmt: skip
                said = {"name": name, "shown": shown, "role": role, "way_out": way_out}
                raise DataError(sentence("new_column", path=sample.path, **said))


def recognise_items(
    sample: Sample, chosen: Chosen, item: str, events: pa.ChunkedArray,
    rules: TimeRules, mapping: Mapping[str, str] | None = None,
) -> Roles:  # fmt: skip
    """The roles of the columns of the items file.

    With the `mapping` of an earlier file (`mapped`), only columns of availability are recognised
    beside it, because a shop may begin to say what is in stock. The events' column of items
    (`item`) may be in the file, too; else the ids are compared with those of the `events`.

    Raises:
        DataError: the id column cannot be told, or a named column does not exist.
    """
    candidates.check_names(sample, sample.table.column_names)
    roles = _given(sample, chosen, ITEM_WORDS)
    refuse_without_header(sample, bool(roles), of_items=True)
    names = ITEM_WORDS
    if mapping is not None:
        roles = mapped(sample, chosen, mapping, of_items=True)
        names = {role: ITEM_WORDS[role] for role in ITEM_WORDS if "available" in role}

    if "id" not in roles and chosen.get("item") in sample.table.column_names:
        roles["id"] = Found(item, NAMED)
    for role, groups in names.items():
        if role in roles or chosen.get(role) == NO_COLUMN:
            continue
        fits = partial(candidates.content_agrees, role, sample, rules)
        ranked = candidates.by_name(role, groups, sample, roles, fits)
        if role == "id":
            ranked = candidates.by_overlap(
                ranked, candidates.unnamed(sample, roles, ITEM_WORDS), sample, events
            )
        if role == "title" and not ranked and "id" in roles:
            ranked = candidates.titles_under_names_of_items(sample, roles, "id")
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
    named = [n for n in free_columns(sample, roles) if rank(n, ITEM_WORDS["text"]) is not None]
    lengths = {n: pc.mean(pc.utf8_length(sample.texts(n))).as_py() or 0.0 for n in named}
    best = min(lengths, key=lambda name: lengths[name], default=None)
    if best is not None and lengths[best] <= TITLE_LENGTH:
        roles["title"] = Found(best, "there is no other name, and these texts are short")
        taken = [name for name in [*taken, *named] if name != best]
    if taken:
        roles["text"] = Found(taken[0], "by name and content")


def _take_fields(sample: Sample, chosen: Chosen, roles: Roles, *, named_items: bool) -> None:
    """Take the columns of the events that describe items, and a title as the item without an id."""
    for role, groups in EVENT_FIELDS.items():
        if role in roles or chosen.get(role) == NO_COLUMN:
            continue
        ranked = candidates.by_name(
            role, groups, sample, roles, lambda name: bool(len(sample.texts(name)))
        )
        if role == "title" and "item" in roles and not any(order == 0 for order, _ in ranked):
            ranked += candidates.titles_under_names_of_items(sample, roles, "item")
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


def _given(sample: Sample, chosen: Chosen, words: Mapping[str, Groups]) -> Roles:
    """The roles that the settings name."""
    roles = {}
    for role in words:
        name = chosen.get(role)
        if name in (None, NO_COLUMN) or (role == "timestamp" and name == FILE_ORDER):
            continue
        if name not in sample.table.column_names:
            missing = sentence("no_column_of_settings", path=sample.path, name=name, role=role)
            raise DataError(f"{missing}\n{sample.show()}")
        roles[role] = Found(name, NAMED)
    return roles


def _best_ids(items: Sample, chosen: Chosen) -> pa.ChunkedArray:
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


def _take_clock(sample: Sample, chosen: Chosen, roles: Roles) -> None:
    """Find the time of day, or what divides seconds, in a column of its own."""
    if chosen.get("clock") is not None or "timestamp" not in roles:
        return
    free, name = free_columns(sample, roles), roles["timestamp"].column
    stem = name.removesuffix("seconds")  # {"_seconds": 1767225600, "_nanoseconds": 5000000}
    below = [n for n in (f"{stem}nanoseconds", f"{stem}nanos") if n in free and stem != name]
    if below:
        roles["nanosecond"] = Found(below[0], "by name: it divides the seconds")
    for part in free if not below else ():
        if normalised(part) in words("milliseconds"):
            texts, times = sample.texts(part), sample.texts(name)
            if share_of(texts, r"^\d{1,3}$") == 1 and not share_of(times, r"[.,]\d|^\d{11}"):
                roles["millisecond"] = Found(part, "by name: it divides the seconds")
    clocks = candidates.clocks_beside_dates(sample, roles)
    ranked = [n for n, reads in clocks.items() if reads]
    named = [n for n in ranked if rank(n, EVENT_WORDS["clock"]) is not None]
    if len(ranked) == 1 or len(named) == 1:
        roles["clock"] = Found((named or ranked)[0], "by content: the time of day of each date")
    half = r"(?i)^[ap]\. ?m\.$|^[ap]m$"
    for part in free_columns(sample, roles) if all_of("clock", roles) else ():
        if sample.counts[part] == 1 and share_of(sample.texts(part), half) == 1:
            roles["clock half"] = Found(part, "by content: the half of the day")
