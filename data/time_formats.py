"""Reads the times of a shop's export: unix times, ISO dates and the usual local forms.

A column may mix the forms. Arrow parses them; a value that is no time becomes null.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from recsys.data.column_words import WORDS
from recsys.data.opening import TableFile
from recsys.data.report import Report, sentence
from recsys.data.texts import as_text, each_value
from recsys.data.times import (
    SECONDS_END,
    Moments,
    TimeUnit,
    constant,
    in_seconds,
    of_digits,
    of_floats,
    of_timestamps,
)
from recsys.errors import DataError
from recsys.event_names import normalised

EARLIEST = 631_152_000  # 1990-01-01: earlier times of a shop's events are errors
DAY_S = 86_400
# In dates like 26-01-05, so few first and so many last numbers show that the year is the first.
FEW_YEARS, MANY_DAYS = 3, 10
CHANGES = ("times_in_a_skipped_hour", "times_in_a_doubled_hour")  # rules of the report
NO_TEXTS = pa.chunked_array([], pa.string())
NUMBER = r"^\d{1,19}(\.\d*)?([eE]\+?\d{1,2})?$"
COMPACT = r"^(19|20)\d{2}(0[1-9]|1[0-2])(0[1-9]|[12]\d|3[01])(\d{4}|\d{6}|\d{9})?$"
YEAR_FIRST = r"^\d{4}-\d{1,2}-\d{1,2}(\s|$)"
ABOVE_12 = r"(1[3-9]|2\d|3[01])(\D|$)"
DAY_SECOND, DAY_THIRD = (r"^\s*\d{4}[-/.]" + part + ABOVE_12 for part in ("", r"\d{1,2}[-/.]"))
YEAR_LAST = r"^\d{1,2}-\d{1,2}-(\d{4}|\d{2})(\s|$)"
ZONES = dict(zone.split("=") for zone in WORDS["hours_of_zones"].split())
OFFSET = r"[+-]\d{2}(?::?\d{2})?|(?:GMT|UTC)[+-]\d{1,2}(?::?\d{2})?"
ZONE = rf"Z|z|UTC|{OFFSET}|GMT|{'|'.join(ZONES)}"
SPLIT_ZONE = (
    r"^(?P<rest>.*:\d{2}(?:[.,]\d+)?(?: ?[AaPp]\.?[Mm]\.?)?)"
    rf"\s*(?P<zone>{ZONE})(?: \([^()]*\))?$"
)
# Dates with the name of a month: 5 Jan 2026, Jan-05-26, 2026-Jan-05, and Mon Jan 5 10:00:00 2026.
WEEKDAY, MONTH = r"^(?:\pL{2,13}\.?,? +)?", r"(?P<month>\pL{3,12})\.?"
DAY = r"(?P<day>\d{1,2})(?:\.|st|nd|rd|th|er|º|°|ª)?"
YEAR, AFTER = r"(?P<year>\d{4}|\d{2})", r"(?P<rest>(?:[\sT,:].*)?)$"
SIGNS = r"[\s.,/'\x{2019}_-]"
NAMED_MONTHS = (
    rf"{WEEKDAY}{MONTH} +{DAY} (?P<rest>[\d:]{{7,8}})(?: UTC| GMT)? (?P<year>\d{{4}})$",
    rf"{WEEKDAY}{DAY}{SIGNS}*(?:de |of )?{MONTH}{SIGNS}*(?:del? )?{YEAR}{AFTER}",
    rf"{WEEKDAY}{MONTH}{SIGNS}*{DAY}{SIGNS}+(?:del? )?{YEAR}{AFTER}",
    rf"^{YEAR}{SIGNS}*{MONTH}{SIGNS}*{DAY}{AFTER}",
)
MONTHS = {
    word: f"{number:02}"
    for number, names in enumerate(WORDS["months"].splitlines(), 1)
    for word in names.split()
}
DOTNET = r"^/Date\((\d{1,19})(?:[+-]\d{4})?\)/$"
CLOCKS = ("", " %H:%M:%S", " %H:%M", " %I:%M %p", " %I:%M:%S %p")
FRACTION = r":\d{2}[.,](?P<fraction>\d+)"
MIDNIGHT = r"[ T]0?0:00(:00([.,]0+)?)?$"
# Times of day such as 900 and 1430, or 90500 and 143000, that a name says to be such.
DIGITS_OF_CLOCKS = (r"^([01]?\d|2[0-3])?[0-5]?\d$", r"^([01]?\d|2[0-3])[0-5]\d[0-5]\d$")
# Narrow blanks of browsers, 20260105T140503 of calendars, and 05-JAN-26 02.05.03 PM of Oracle.
SIGNS_OF_PROGRAMS = (
    (r"[\x{A0}\x{202F}]", " "),
    (r"^\s*(\d{4})(\d\d)(\d\d)T(\d\d)(\d\d)(\d\d)", r"\1-\2-\3T\4:\5:\6"),
    (r"^(\d{4})(\d\d)(\d\d)(\d\d)(\d\d)(\d\d)(\d{3})$", r"\1-\2-\3T\4:\5:\6.\7"),
    (r"(?i)^(\d{1,2}-[a-z]{3}-\d{2,4} \d{1,2})\.(\d\d)\.(\d\d)", r"\1:\2:\3"),
)
# Replacements that bring the local forms to a few: `31.12.2024, 13:05 Uhr` -> `31-12-2024 13:05`.
TIDY = (
    (r"^\pL{2,13}\.?,? +(\d)", r"\1"),
    (r"^(\d{1,4})[./](\d{1,2})[./](\d{1,4})", r"\1-\2-\3"),
    (r"^(\d{4}-\d{1,2}-\d{1,2})[T:]", r"\1 "),
    (r"(:\d{2})[.,]\d+", r"\1"),
    (r",?\s+(?:(?:a|à|as|às|at|um|om|o|alle|ore|las) +)*", " "),
    (r"(?i) (uhr|h)$", ""),
    (r"(?i) (\d{1,2}) ?h ?(\d{2})$", r" \1:\2"),
    (r"(?i)(\d) ?([ap])\. ?m\.$|(\d) ?([ap])m$", r"\1\3 \2\4M"),
)


@dataclass(frozen=True)
class TimeRules:
    """How times are read.

    Attributes:
        unit: of numbers; `auto` decides for each by its size.
        zone: of times without a zone.
        day_first: whether 03/04/2024 is the third of April; None if the data have not shown it.
        now: unix seconds of the present.
        year_first: whether 26-01-05 is the fifth of January 2026, as the data have shown.
        day_second: whether 2026-05-01 is the fifth of January, as 2026-31-01 has shown.
    """

    unit: TimeUnit
    zone: str
    day_first: bool | None
    now: float
    year_first: bool = False
    day_second: bool = False

    @property
    def latest(self) -> int:
        """Unix seconds of the latest possible event."""
        return int(self.now) + DAY_S


def without_midnight(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Dates and times as texts, of which those at midnight are dates."""
    return pc.replace_substring_regex(as_text(column), MIDNIGHT, "")


def with_clocks(
    dates: pa.ChunkedArray, clocks: pa.ChunkedArray, *minutes: pa.ChunkedArray, whole: bool = True
) -> pa.ChunkedArray:
    """Dates and the times of day of other columns, as texts; if not `whole`, hours and minutes.

    >>> clocks = pa.chunked_array([["14:30", "900", "5", "143005", None]])
    >>> with_clocks(pa.chunked_array([["2026-01-05"] * 5]), clocks).to_pylist()[1:]
    ['2026-01-05 09:00', '2026-01-05 00:05', '2026-01-05 14:30:05', '2026-01-05 ']
    """
    if not whole:
        parts = [pc.utf8_lpad(part, 2, "0") for part in (clocks, *minutes)]
        clocks = pc.binary_join_element_wise(*parts, *(["00"] * (not minutes)), ":")
    number = pc.match_substring_regex(clocks, r"^\d{1,6}$")
    size = pc.if_else(pc.less_equal(pc.utf8_length(clocks), 4), 4, 6)
    zeros = pc.binary_repeat("0", pc.subtract(size, pc.if_else(number, pc.utf8_length(clocks), 4)))
    padded = pc.replace_substring_regex(
        pc.binary_join_element_wise(zeros, clocks, ""), r"^(\d\d)(\d\d)(\d\d)?$", r"\1:\2:\3"
    )
    clocks = pc.if_else(number, pc.utf8_rtrim(padded, ":"), clocks)
    days = without_midnight(dates)
    return pc.binary_join_element_wise(days, clocks, " ", null_handling="replace")


def read_moments(
    column: pa.ChunkedArray,
    rules: TimeRules,
    counts: Counter[str] | None = None,
    *,
    ends: bool = False,
) -> Moments:
    """Convert times to unix seconds and nanoseconds; a value that is no time becomes null.

    Args:
        column: numbers, dates, times or texts.
        rules: how they are read; dates like 03/04/2024 are null while `day_first` is None.
        counts: is increased by the number of values in each unit below a second, and of those in
            an hour that a change of clocks skips or doubles (`CHANGES`).
        ends: whether a date without a time of day is the end of that day, not its start. Times
            without a zone are dates if all are midnight, as in a column of pandas or of SQL.
    """
    kind = column.type
    counts = Counter() if counts is None else counts
    if pa.types.is_date(kind) or pa.types.is_timestamp(kind):
        return _of_arrow(column, rules.zone, ends, counts)
    if pa.types.is_floating(kind):
        floats = of_floats(pc.cast(column, pa.float64()))
        return Moments(*_in_range(*floats, rules.unit, counts), constant(False, len(column)))
    if pa.types.is_integer(kind) or pa.types.is_decimal(kind):
        column = pc.cast(column, pa.string())
    if not (pa.types.is_string(column.type) or pa.types.is_large_string(column.type)):
        nothing = pa.chunked_array([pa.nulls(len(column), pa.int64())])
        zeros = pa.chunked_array([pa.array(np.zeros(len(column), np.int32))])
        return Moments(nothing, zeros, constant(False, len(column)))
    texts = pc.replace_substring_regex(pc.fill_null(column, ""), DOTNET, r"\1")
    compact = pc.match_substring_regex(texts, COMPACT)
    number = pc.and_(pc.match_substring_regex(texts, NUMBER), pc.invert(compact))
    moments = _of_numbers(pc.if_else(number, texts, None), rules.unit, counts)
    if pc.all(number).as_py():
        return Moments(*moments, constant(False, len(column)))
    other = _of_texts(pc.if_else(number, "", texts), rules, ends, counts)
    return Moments(
        pc.coalesce(moments[0], other.second),
        pc.if_else(number, moments[1], other.nanosecond),
        other.is_date,
    )


class DayOrder(NamedTuple):
    """What the dates like 03/04/2024 of a column show.

    Attributes:
        seen: whether there are such dates.
        day: a value that begins with the day, such as 13/04/2024; None without any.
        month: a value that begins with the month, such as 04/13/2024; None without any.
        year_first: whether the dates are like 26-01-05 and begin with the year.
        day_second: whether they are like 2026-31-01, with the day before the month.
    """

    seen: bool
    day: str | None
    month: str | None
    year_first: bool = False
    day_second: bool = False

    @property
    def day_first(self) -> bool | None:
        """Whether the day comes first; None if no value shows it, or values of both kinds."""
        return None if (self.day is None) == (self.month is None) else self.day is not None


def show_day_first(columns: Iterable[pa.ChunkedArray]) -> DayOrder:
    """Find out whether dates like 03/04/2024 begin with the day.

    Args:
        columns: texts, part by part; reading stops at a first part without such dates, and where
            values of both kinds are known.
    """
    seen, day, month = False, None, None
    form = (
        r"^\s*(?:\pL{2,13}\.?,? +)?"
        r"(?P<one>\d{1,2})(?P<mark>[-/.])(?P<two>\d{1,2})[-/.](?P<end>\d{2,4})"
    )
    for column in columns:
        every = pc.fill_null(column, "") if pa.types.is_string(column.type) else NO_TEXTS
        parts = pc.extract_regex(every, form)
        fitting = pc.is_valid(parts)
        texts, parts = every.filter(fitting), parts.filter(fitting)
        if not len(parts):
            if not seen:
                second, third = (pc.any(pc.match_substring_regex(every, one)).as_py()
                                 for one in (DAY_SECOND, DAY_THIRD))  # fmt: skip
                return DayOrder(False, None, None, day_second=bool(second and not third))
            continue
        first, mark, two, end = (
            pc.struct_field(parts, name) for name in ("one", "mark", "two", "end")
        )
        years, days_of_month = (pc.unique(part).to_pylist() for part in (first, end))
        if len(years) <= FEW_YEARS < MANY_DAYS <= len(days_of_month) and {
            len(text) for text in (*years, *days_of_month)
        } == {2}:
            return DayOrder(True, None, None, True)
        dotted = pc.equal(mark, ".")
        if not seen and pc.all(dotted).as_py():
            return DayOrder(True, texts[0].as_py(), None)
        seen = True
        # A date with dots begins with the day, whatever its numbers.
        days = pc.or_(dotted, pc.greater(pc.cast(first, pa.int64()), 12))
        months = pc.and_(pc.greater(pc.cast(two, pa.int64()), 12), pc.invert(days))
        day = day or next(iter(texts.filter(days).slice(0, 1).to_pylist()), None)
        month = month or next(iter(texts.filter(months).slice(0, 1).to_pylist()), None)
        if day and month:
            break
    return DayOrder(seen, day, month)


def orders_of_days(
    files: Sequence[TableFile],
    name: str | None,
    rules: TimeRules,
    report: Report,
    before: bool | None = None,
) -> dict[Path, TimeRules]:
    """The rules of times of each file, with the order of day and month that it shows.

    A file that shows none has the order of the others.

    Args:
        files: of a source.
        name: of the column of times; None without times.
        rules: from the settings.
        report: is told of files with different orders.
        before: whether the day came first in the files of the first run; None if that is not known.

    Raises:
        DataError: dates of both orders in one file, another order than in the first run, or no
            order that is shown.
    """
    orders: dict[Path, DayOrder] = {}
    if rules.day_first is None and name is not None:
        for file in files:
            order = show_day_first(batch[name] for batch in file.batches([name]))
            if order.day and order.month:
                where = f"{file.path}: column {name!r}"
                raise DataError(sentence("two_orders_of_days", where=where, order=order))
            if before is not None and order.day_first is (not before):
                words = ("day", "month") if order.day_first else ("month", "day")
                said = {"shown": order.day or order.month, "setting": str(order.day_first).lower()}
                raise DataError(
                    sentence("other_order_of_days", path=file.path, name=name, words=words, **said)
                )
            orders[file.path] = order
    if any(order.year_first for order in orders.values()):
        report.note(sentence("years_first", name=name))
    day_second = rules.day_second or any(order.day_second for order in orders.values())
    if day_second:
        report.note(sentence("days_second", name=name))
    shown = {order.day_first: path for path, order in orders.items()}
    shown.pop(None, None)
    if len(shown) > 1:
        day, month = shown[True], shown[False]
        values = {"of_day": orders[day].day, "of_month": orders[month].month}
        report.note(sentence("orders_of_days", name=name, day=day, month=month, **values))
    common = next(iter(shown)) if len(shown) == 1 else before
    for path, order in orders.items():
        if order.seen and order.day_first is None and common is None and not order.year_first:
            beside = ", and the other files contradict each other" if shown else ""
            raise DataError(sentence("no_order_of_days", path=path, name=name, beside=beside))
    own = {path: order.day_first for path, order in orders.items()}
    usual = common if rules.day_first is None else rules.day_first
    return {
        file.path: replace(
            rules,
            day_first=usual if own.get(file.path) is None else own[file.path],
            year_first=file.path in orders and orders[file.path].year_first,
            day_second=day_second,
        )
        for file in files
    }


def find_zones(column: pa.ChunkedArray) -> tuple[int, int, list[str]]:
    """Count texts with a clock: without a zone, with one, and the distinct zones as written."""
    if not (pa.types.is_string(column.type) or pa.types.is_large_string(column.type)):
        return 0, 0, []
    texts = _with_colons(pc.fill_null(column, ""))
    clock = pc.sum(pc.match_substring_regex(texts, r"\d{1,2}:\d{2}")).as_py() or 0
    names = pc.struct_field(pc.extract_regex(texts, SPLIT_ZONE), "zone").drop_null()
    return clock - len(names), len(names), pc.unique(names).to_pylist()


def share_of_times(column: pa.ChunkedArray, rules: TimeRules) -> tuple[float, float]:
    """The share of the values that are times, and the share that are possible times of events."""
    filled = column.filter(pc.is_valid(column))
    if pa.types.is_string(filled.type):
        filled = filled.filter(pc.not_equal(filled, ""))
    if not len(filled):
        return 0.0, 0.0
    if rules.day_first is None:
        order = show_day_first([filled])
        day_second = rules.day_second or order.day_second
        rules = replace(rules, day_first=order.day_first is not False, year_first=order.year_first,
                        day_second=day_second)  # fmt: skip
    seconds = read_moments(filled, rules).second
    possible = pc.greater_equal(seconds, EARLIEST)
    return 1 - seconds.null_count / len(filled), (pc.sum(possible).as_py() or 0) / len(filled)


def _of_numbers(
    texts: pa.ChunkedArray, unit: TimeUnit, counts: Counter[str]
) -> tuple[pa.ChunkedArray, pa.ChunkedArray]:
    """Seconds and nanoseconds of numbers, digit for digit unless they have an exponent."""
    exponent = pc.fill_null(pc.match_substring_regex(texts, "[eE]"), False)
    whole, below = of_digits(pc.if_else(exponent, None, texts))
    if pc.any(exponent).as_py():
        large = of_floats(pc.cast(pc.if_else(exponent, texts, None), pa.float64()))
        whole = pc.coalesce(whole, large[0])
        below = large[1] if below is None else pc.coalesce(below, large[1])
    return _in_range(whole, below, unit, counts)


def _in_range(
    whole: pa.ChunkedArray, below: pa.ChunkedArray | None, unit: TimeUnit, counts: Counter[str]
) -> tuple[pa.ChunkedArray, pa.ChunkedArray]:
    """`in_seconds`, where times after the year 5138 are null."""
    second, nanosecond = in_seconds(whole, below, unit, counts)
    return pc.if_else(pc.less_equal(second, SECONDS_END), second, None), nanosecond


def _of_arrow(column: pa.ChunkedArray, zone: str, ends: bool, counts: Counter[str]) -> Moments:
    """Dates and timestamps of Arrow."""
    moments = of_timestamps(column)
    if getattr(column.type, "tz", None):
        return moments
    local, is_date = pc.cast(moments.second, pa.timestamp("s")), moments.is_date
    if ends:
        if _all_midnight(local, moments.nanosecond):
            is_date = pc.is_valid(local)
        local = pc.if_else(is_date, _next_day(local), local)
    return Moments(_in_zone(local, zone, counts), moments.nanosecond, is_date)


def _all_midnight(local: pa.ChunkedArray, nanosecond: pa.ChunkedArray) -> bool:
    midnight = pc.equal(local, pc.floor_temporal(local, unit="day"))
    return bool(pc.all(pc.and_(midnight, pc.equal(nanosecond, 0))).as_py())


def _next_day(local: pa.ChunkedArray) -> pa.ChunkedArray:
    """The start of the following day, without a zone: days of a change of clocks are not 24 h."""
    return pc.add(local, pa.scalar(DAY_S, pa.duration("s")))


def _with_colons(texts: pa.ChunkedArray) -> pa.ChunkedArray:
    """Texts without blanks around them, and with the usual signs inside."""
    for pattern, new in SIGNS_OF_PROGRAMS:
        texts = pc.replace_substring_regex(texts, pattern, new)
    return pc.utf8_trim_whitespace(texts)


def _in_digits(texts: pa.ChunkedArray) -> pa.ChunkedArray:
    """Dates with the name of a month in digits, the year first; other texts stay."""
    for form in NAMED_MONTHS:
        parts = pc.extract_regex(texts, form)
        month, day, year, rest = (
            pc.struct_field(parts, name) for name in ("month", "day", "year", "rest")
        )
        month = each_value(month, lambda word: MONTHS.get(normalised(word)), pa.string())
        year = pc.replace_substring_regex(year, r"^([0-6]\d)$", r"20\1")
        year = pc.replace_substring_regex(year, r"^([7-9]\d)$", r"19\1")
        date = pc.binary_join_element_wise(year, month, day, "-")
        rest = pc.replace_substring_regex(rest, r"^(\d)", r" \1")
        texts = pc.coalesce(pc.binary_join_element_wise(date, rest, ""), texts)
    return texts


def _of_texts(
    texts: pa.ChunkedArray, rules: TimeRules, ends: bool, counts: Counter[str]
) -> Moments:
    """Dates and times in words and digits; empty texts become null."""
    offset = None
    texts = _with_colons(texts)
    if pc.any(pc.match_substring_regex(texts, SPLIT_ZONE)).as_py():
        parts = pc.extract_regex(texts, SPLIT_ZONE)
        texts = pc.coalesce(pc.struct_field(parts, "rest"), texts)
        offset = _offset(pc.struct_field(parts, "zone"))
    nanosecond = pa.chunked_array([pa.array(np.zeros(len(texts), np.int32))])
    if pc.any(pc.match_substring_regex(texts, FRACTION)).as_py():
        digits = pc.struct_field(pc.extract_regex(texts, FRACTION), "fraction")
        digits = pc.utf8_slice_codeunits(pc.utf8_rpad(digits, 9, "0"), 0, 9)
        nanosecond = pc.cast(pc.fill_null(digits, "0"), pa.int32())
    if pc.any(pc.match_substring_regex(texts, r"\pL{3}")).as_py():
        texts = _in_digits(texts)
    for pattern, new in TIDY:
        texts = pc.replace_substring_regex(texts, pattern, new)
    moments = pa.chunked_array([pa.nulls(len(texts), pa.timestamp("s"))])
    is_date = constant(False, len(texts))
    order = {True: "%d-%m-", False: "%m-%d-", None: None}[rules.day_first]
    iso = "%Y-%d-%m" if rules.day_second else "%Y-%m-%d"
    forms = [(YEAR_FIRST, [iso]), (COMPACT, ["%Y%m%d", "%Y%m%d%H%M", "%Y%m%d%H%M%S"])]
    if order:
        forms += [(YEAR_LAST.replace(r"|\d{2}", ""), [order + "%Y"])]
    if order or rules.year_first:
        short = "%y-%m-%d" if rules.year_first else f"{order}%y"
        forms += [(YEAR_LAST.replace(r"\d{4}|", ""), [short])]
    for pattern, dates in forms:
        fitting = pc.match_substring_regex(texts, pattern)
        if not pc.any(fitting).as_py():
            continue
        mine = pc.if_else(fitting, texts, None)
        for form in (d + c for d in dates for c in (CLOCKS if pattern != COMPACT else ("",))):
            parsed = pc.strptime(mine, format=form, unit="s", error_is_null=True)
            if ends and "%H" not in form and "%I" not in form:
                day = pc.and_(pc.is_null(moments), pc.is_valid(parsed))
                parsed, is_date = _next_day(parsed), pc.or_(is_date, day)
            moments = pc.coalesce(moments, parsed)
            if not pc.any(pc.and_(fitting, pc.is_null(moments))).as_py():
                break
    if (
        ends
        and offset is None
        and not pc.any(is_date).as_py()
        and _all_midnight(moments, nanosecond)
    ):
        moments, is_date = _next_day(moments), pc.is_valid(moments)
    bare = moments if offset is None else pc.if_else(pc.is_valid(offset), None, moments)
    local = _in_zone(bare, rules.zone, counts)
    if offset is not None:
        local = pc.if_else(pc.is_valid(offset), pc.subtract(_as_seconds(moments), offset), local)
    return Moments(local, nanosecond, is_date)


def _offset(zones: pa.ChunkedArray) -> pa.ChunkedArray:
    """Seconds east of UTC; null where no zone is given. There are few distinct zones."""

    def seconds(zone: str) -> int:
        name, sign, digits = re.findall("([A-Za-z]*)([+-]?)(.*)", zone)[0]
        digits = digits.replace(":", "")
        hours, minutes = (digits, "") if len(digits) < 3 else (digits[:-2], digits[-2:])
        size = int(hours or 0) * 3_600 + int(minutes or 0) * 60
        return int(ZONES.get(name, 0)) * 3_600 + (-size if sign == "-" else size)

    return each_value(zones, seconds, pa.int64())


def _in_zone(local: pa.ChunkedArray, zone: str, counts: Counter[str]) -> pa.ChunkedArray:
    """Unix seconds of times of a zone; an hour that a change of clocks skips is after it."""
    if zone == "UTC":
        return _as_seconds(local)
    times, last = (
        pc.assume_timezone(local, zone, ambiguous=which, nonexistent="earliest")
        for which in ("earliest", "latest")
    )
    skipped = pc.fill_null(pc.not_equal(pc.local_timestamp(times), local), False)
    for rule, rows in zip(CHANGES, (skipped, pc.not_equal(times, last)), strict=True):
        counts[rule] += pc.sum(rows).as_py() or 0
    if not pc.any(skipped).as_py():
        return _as_seconds(times)
    day = pa.scalar(DAY_S, pa.duration("s"))
    before = pc.if_else(skipped, pc.subtract(local, day), None)  # when the clocks were the old ones
    before = pc.assume_timezone(before, zone, ambiguous="earliest", nonexistent="earliest")
    return _as_seconds(pc.if_else(skipped, pc.add(before, day), times))


def _as_seconds(times: pa.ChunkedArray) -> pa.ChunkedArray:
    return pc.cast(times, pa.int64())
