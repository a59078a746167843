"""The columns that may have a role, as (rank, column) from the surest, 0, and why none has it."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterable, Mapping
from typing import Literal

import pyarrow as pa
import pyarrow.compute as pc

from recsys.data import returns
from recsys.data.availability import answers, each, is_missing, plain_answer, share_of_answers
from recsys.data.cleaning import is_of_items
from recsys.data.column_words import (
    EVENT_FIELDS,
    EVENT_WORDS,
    ITEM_WORDS,
    Groups,
    all_of,
    has_role,
    is_of_a_user,
    is_of_later,
    rank,
    words,
)
from recsys.data.day_orders import share_of_times
from recsys.data.ids import LONG, SHORTENED
from recsys.data.item_cells import parts_repeat
from recsys.data.numbers import NO_NUMBER, share_of_points
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
from recsys.data.time_formats import DIGITS_OF_CLOCKS, TimeRules, without_midnight
from recsys.errors import DataError
from recsys.event_names import normalised

ORDER_NUMBER = r"^#?[A-Za-z]{0,6}[-_/ ]?\d{2,}[A-Za-z]?$"  # such as #1001 or RE-20251
ENOUGH_ROWS = 50  # below this, repetition says nothing
YES_OR_NO = r"(?i)^([01]|true|false|yes|no|x|[tfyn])$"
MAX_TYPES = 60  # distinct names of event types
MAX_RATINGS = 101  # distinct values of a rating
SHARE_OF_EVENTS = 0.5  # of the values of a column such as `type` that must name events
BLANKS, SHARE_OF_WORDS = r"\S\s+\S", 0.5  # of titles that have a blank between words
EMAIL = r"^\S+@\S+\.\w+$"
SCORE = r"^-?(\d|10|\d[.,]\d)([.,]0+)?$"  # of scores
RATE = r"^([1-9]|10|[1-9][.,]\d)([.,]0+)?$"  # of rates that are ratings: taxes are 0, too
DOCUMENT = r"^[4-9]\d{9}$"  # as unix seconds, they are after the year 2096
CLOCK = r"^\d{1,2}[:h]\d{2}(:\d{2}([.,]\d+)?)?( ?[AaPp][Mm])?( Uhr)?$"
FIRST_LINES = (1, 10, 100)  # numbers of the first line of an order
SHARE_OF_CODES = 0.5  # of a column with the name of a code: a line such as `SHIPPING` has none
FEW_KINDS = 3  # distinct values of a column such as `Art`, which is an article or a kind
SHARE_OF_KNOWN = 0.1  # items of the events that the items file must describe


def without_titles(ranked: list[tuple[int, str]], sample: Sample) -> list[tuple[int, str]]:
    """Of the surest columns of items, the one with codes, if all others have titles.

    `SKU` is the item and `Product` its title, or the other way round.
    """
    surest = [pair for pair in ranked if pair[0] == ranked[0][0]]
    kinds = [looks_like(sample.texts(name)) for _, name in surest]
    if kinds.count("codes") == 1 and kinds.count("titles") == len(kinds) - 1:
        return [surest[kinds.index("codes")]]
    return ranked


def codes_beside_titles(
    named: list[tuple[int, str]], sample: Sample, roles: Roles
) -> list[tuple[int, str]]:
    """(0, column) of the columns such as `Code` and `Ref.` that tell the titles of items apart.

    Without one, or where columns that are named as items hold codes, these (`named`) stay.
    """
    if any(looks_like(sample.texts(name)) == "codes" for order, name in named if order <= 1):
        return named
    of_items = (*EVENT_FIELDS["title"], *EVENT_WORDS["item"][:2])
    free = [n for n in free_columns(sample, roles) if sample.counts[n] == 1]
    titles = [n for n in free if rank(n, of_items) is not None]
    titles = [n for n in titles if looks_like(sample.texts(n)) == "titles"]
    codes = []
    for name in free if titles else ():
        values = sample.texts(name)
        is_code = normalised(name) in words("ids") and share_of(values, BLANKS) <= 1 - SURE_SHARE
        is_code = is_code and share_of(values, r"\d") > SHARE_OF_CODES
        if is_code and pc.count_distinct(values).as_py() < len(values):
            column = {"item": Found(name, "")}
            codes += [(0, name)] if any(is_of_items(sample, column, t) for t in titles) else []
    return codes or named


def without_twins(ranked: list[tuple[int, str]], sample: Sample) -> list[tuple[int, str]]:
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


def titles_under_names_of_items(sample: Sample, roles: Roles, role: str) -> list[tuple[int, str]]:
    """(1, column) of the free columns such as `Product` that hold titles beside a column of ids."""
    codes = looks_like(sample.texts(roles[role].column)) == "codes"
    titles = []
    for name in free_columns(sample, roles):
        if rank(name, EVENT_WORDS["item"]) in (0, 1):
            values = sample.texts(name)
            words = codes or share_of(values, BLANKS) >= SHARE_OF_WORDS
            words = words and pc.count_distinct(values).as_py() > FEW_KINDS
            titles += [(1, name)] if words and looks_like(values) == "titles" else []
    return titles


def check_names(sample: Sample, named: Iterable[str]) -> None:
    """Refuse names that several columns have."""
    for name in named:
        if (times := sample.counts[name]) > 1:
            said = f"{times} columns are called {name!r}; rename all but one"
            raise DataError(f"{sample.path}: {said}")


def unnamed(sample: Sample, roles: Roles, words: Mapping[str, Groups]) -> list[tuple[int, str]]:
    """(0, column) of the free columns whose names show no role."""
    free = free_columns(sample, roles)
    return [(0, n) for n in free if all(rank(n, groups) is None for groups in words.values())]


def by_name(
    role: str, groups: Groups, sample: Sample, roles: Roles, fits: Callable[[str], bool]
) -> list[tuple[int, str]]:
    """(rank, column) of the columns whose name fits the role and whose content agrees."""
    ranked = []
    for name in free_columns(sample, roles):
        order = rank(name, groups)
        if order is None:
            continue
        check_names(sample, [name])
        if fits(name):
            ranked.append((order, name))
    return sorted(ranked, key=lambda pair: pair[0])


def by_overlap(
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


def is_unnamed(role: str, sample: Sample, rules: TimeRules, name: str) -> bool:
    """Whether a column with any name has a role by its content."""
    values = sample.texts(name)
    if role == "behaviour":
        return is_kind(sample, name)
    if role == "user" and share_of(values, EMAIL) < SURE_SHARE:
        return False
    if role == "timestamp" and (is_of_later(name) or share_of(values, DOCUMENT) >= SURE_SHARE):
        return False
    return content_agrees(role, sample, rules, name)


def is_kind(sample: Sample, name: str) -> bool:
    """Whether the values of a column show that it says which lines are sales and returns."""
    states = (EVENT_WORDS["order_status"], EVENT_WORDS["taken_back"])
    if sample.counts[name] > 1 or any(rank(name, words) is not None for words in states):
        return False
    return not is_of_a_user(name) and returns.are_kinds(sample.texts(name))


def tells_no_items(values: pa.ChunkedArray) -> bool:
    """Whether a column such as `Art` has few kinds, or `Item` numbers lines, as 10, 20, 10, 20."""
    if len(pc.unique(values)) <= FEW_KINDS and not share_of(values, r"\d"):
        return True
    if not len(values) or share_of(values, r"^0*[1-9]\d{0,3}$") < 1:
        return False
    numbers = pc.cast(values, pa.int64()).to_numpy()
    rises, begins = numbers[1:] > numbers[:-1], numbers[1:] == numbers[0]
    return bool((rises | begins).all() and numbers.min() == numbers[0] in FIRST_LINES)


def looks_like(values: pa.ChunkedArray) -> Literal["codes", "titles"] | None:
    """Codes have digits and no blanks; most titles have a blank between words, or no digits."""
    if not len(values):
        return None
    blanks, digits = share_of(values, BLANKS), share_of(values, r"\d")
    if digits >= SURE_SHARE and blanks <= 1 - SURE_SHARE:
        return "codes"
    return "titles" if blanks >= SHARE_OF_WORDS or digits <= 0.5 else None


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


def content_agrees(role: str, sample: Sample, rules: TimeRules, name: str) -> bool:
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
    if role == "item" and normalised(name) == "material" and looks_like(values) != "codes":
        return False  # what it is made of
    if role in ("user", "item", "session"):
        # Those that are long or shortened are refused later.
        one = distinct == 1 and not share_of(values, f"{LONG}|{SHORTENED}")
        repeats = distinct < len(values) and not (one and role == "user")
        repeats = repeats or (role == "item" and parts_repeat(values))
        is_mark = role == "item" and distinct < 3 and share_of(values, YES_OR_NO) == 1
        return not is_mark and (bool(repeats) or len(values) < ENOUGH_ROWS)
    if role == "id":
        return bool(distinct >= 0.5 * len(values) or share_of(values, SHORTENED))
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
    options = " ".join(f"--column {shlex.quote(f'{r}={named[r].column}')}" for r in missing)
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
