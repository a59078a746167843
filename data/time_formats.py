"""Reads the times of a shop's export: unix times, ISO dates and the usual local forms.

A column may mix the forms. Arrow parses them; a value that is no time becomes null. The unit of a
number can be inferred from its size: 1e11 seconds are in the year 5138, while 1e11 milliseconds are
in 1973.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from decimal import Decimal
from typing import Literal, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from recsys.data.column_words import TIMES, WORDS
from recsys.data.texts import as_text, each_value
from recsys.event_names import normalised

TimeUnit = Literal["auto", "s", "ms", "us", "ns"]
# Name in the counts, and units per second; smallest unit first.
UNITS: dict[str, tuple[str, int]] = {
    "ns": ("nanoseconds", 1_000_000_000),
    "us": ("microseconds", 1_000_000),
    "ms": ("milliseconds", 1_000),
}
SECONDS_END = 100_000_000_000  # no date before the year 5138 has so many seconds
BILLION = 1_000_000_000
# Units of .NET, 100 ns since the year 1, until 1970, and in 2000 and 2050; as unix nanoseconds,
# these would be times of half a year around 1990.
TICKS_1970, TICKS_2000, TICKS_2050 = (
    621_355_968_000_000_000, 630_822_816_000_000_000, 646_602_048_000_000_000
)  # fmt: skip
EARLIEST = 631_152_000  # 1990-01-01: earlier times of a shop's events are errors
DAY_S = 86_400
CHANGES = ("times_in_a_skipped_hour", "times_in_a_doubled_hour")  # rules of the report
NUMBER = r"^\d{1,19}(\.\d*)?([eE]\+?\d{1,2})?$"
COMPACT = r"^(19|20)\d{2}(0[1-9]|1[0-2])(0[1-9]|[12]\d|3[01])(\d{4}|\d{6}|\d{9})?$"
YEAR_FIRST = r"^\d{4}-\d{1,2}-\d{1,2}(\s|$)"
YEAR_LAST = r"^\d{1,2}-\d{1,2}-(\d{4}|\d{2})(\s|$)"
ZONES = dict(zone.split("=") for zone in WORDS["hours_of_zones"].split())
OFFSET = r"[+-]\d{2}(?::?\d{2})?|(?:GMT|UTC)[+-]\d{1,2}(?::?\d{2})?"
ZONE = rf"Z|z|UTC|{OFFSET}|GMT|{'|'.join(ZONES)}"
SPLIT_ZONE = (
    r"^(?P<rest>.*:\d{2}(?:[.,]\d+)?(?: ?[AaPp]\.?[Mm]\.?)?)"
    rf"\s*(?P<zone>{ZONE})(?: \([^()]*\))?$"
)
# Dates with the name of a month: 5 Jan 2026, Jan-05-26, 2026-Jan-05, and Mon Jan 5 10:00:00 2026.
WEEKDAY, MONTH = r"^(?:\pL\pL+\.?,? +)?", r"(?P<month>\pL+)\.?"
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
TIDY, SIGNS_OF_PROGRAMS = TIMES["local"], TIMES["of_programs"]


class Moments(NamedTuple):
    """Times of a column.

    Attributes:
        second: (rows,) int64 unix seconds; null where a value is no time.
        nanosecond: (rows,) int32 after the second; 0 where the time is not that fine.
        is_date: (rows,) bool, whether a value is taken as the end of a day.
    """

    second: pa.ChunkedArray
    nanosecond: pa.ChunkedArray
    is_date: pa.ChunkedArray


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


def with_clocks(dates: pa.ChunkedArray, clocks: pa.ChunkedArray) -> pa.ChunkedArray:
    """Dates and the times of day of another column, as texts.

    >>> clocks = pa.chunked_array([["14:30", "900", "5", "143005", None]])
    >>> with_clocks(pa.chunked_array([["2026-01-05"] * 5]), clocks).to_pylist()[1:]
    ['2026-01-05 09:00', '2026-01-05 00:05', '2026-01-05 14:30:05', '2026-01-05 ']
    """
    clocks = each_value(clocks, _clock, pa.string())
    days = without_midnight(dates)
    return pc.binary_join_element_wise(days, clocks, " ", null_handling="replace")


def _clock(text: str) -> str:
    """A time of day, of which digits such as 900 and 143005 are divided."""
    if not re.fullmatch(r"\d{1,6}", text):
        return text
    return ":".join(re.findall("..", text.zfill(4 if len(text) <= 4 else 6)))


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
    kind, types = column.type, pa.types
    counts = Counter() if counts is None else counts
    if pa.types.is_date(kind) or pa.types.is_timestamp(kind):
        return _of_arrow(column, rules.zone, ends, counts)
    if any(is_kind(kind) for is_kind in (types.is_integer, types.is_decimal, types.is_floating)):
        column = as_text(column)
    if not (types.is_string(column.type) or types.is_large_string(column.type)):
        column = pa.chunked_array([pa.nulls(len(column), pa.string())])
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


def find_zones(column: pa.ChunkedArray) -> tuple[int, int, list[str]]:
    """Count texts with a clock: without a zone, with one, and the distinct zones as written."""
    if not (pa.types.is_string(column.type) or pa.types.is_large_string(column.type)):
        return 0, 0, []
    texts = _with_colons(pc.fill_null(column, ""))
    clock = pc.sum(pc.match_substring_regex(texts, r"\d{1,2}:\d{2}")).as_py() or 0
    names = pc.struct_field(pc.extract_regex(texts, SPLIT_ZONE), "zone").drop_null()
    return clock - len(names), len(names), pc.unique(names).to_pylist()


def _of_numbers(
    texts: pa.ChunkedArray, unit: TimeUnit, counts: Counter[str]
) -> tuple[pa.ChunkedArray, pa.ChunkedArray]:
    """Seconds and nanoseconds of numbers, digit for digit.

    Numbers that do not fit in 64 bits, and times after the year 5138, are null.
    """
    exponent = pc.match_substring_regex(texts, "[eE]")
    if pc.any(exponent).as_py():
        written = pc.if_else(exponent, texts, None)
        whole = each_value(written, lambda text: f"{Decimal(text):f}", pa.string())
        texts = pc.coalesce(whole, texts)
    parts = pc.extract_regex(texts, r"^(?P<whole>\d+)\.?(?P<decimals>\d*)$")
    whole, decimals = (pc.struct_field(parts, name) for name in ("whole", "decimals"))
    fits = pc.less(pc.utf8_lpad(whole, 19, "0"), "9")  # a longer one is not shortened
    fits = pc.and_(fits, pc.less_equal(pc.binary_length(whole), 19))
    whole = pc.cast(pc.if_else(fits, whole, None), pa.int64())
    below = pc.cast(pc.utf8_slice_codeunits(pc.utf8_rpad(decimals, 9, "0"), 0, 9), pa.int64())
    second, nanosecond = in_seconds(whole, below, unit, counts)
    return pc.if_else(pc.less_equal(second, SECONDS_END), second, None), nanosecond


def _of_arrow(column: pa.ChunkedArray, zone: str, ends: bool, counts: Counter[str]) -> Moments:
    """Dates and timestamps of Arrow."""
    is_date = constant(pa.types.is_date(column.type), len(column))
    if pa.types.is_date(column.type):
        column = pc.cast(column, pa.timestamp("s"), safe=False)
    below = pc.round(pc.multiply(pc.subsecond(column), BILLION))
    nanosecond = pc.cast(pc.fill_null(below, 0), pa.int32())
    local = pc.floor_temporal(column, unit="second")
    if column.type.tz:
        seconds = pc.cast(local, pa.timestamp("s", column.type.tz))
        return Moments(_as_seconds(seconds), nanosecond, is_date)
    local = pc.cast(local, pa.timestamp("s"))
    if ends:
        if _all_midnight(local, nanosecond):
            is_date = pc.is_valid(local)
        local = pc.if_else(is_date, _next_day(local), local)
    return Moments(_in_zone(local, zone, counts), nanosecond, is_date)


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
    no_dates = ends and offset is None and not pc.any(is_date).as_py()
    if no_dates and _all_midnight(moments, nanosecond):
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


def constant(value: bool, rows: int) -> pa.ChunkedArray:
    """(rows,) bool."""
    return pa.chunked_array([np.full(rows, value)])


def in_seconds(
    whole: pa.ChunkedArray, below: pa.ChunkedArray, unit: TimeUnit, counts: Counter[str]
) -> tuple[pa.ChunkedArray, pa.ChunkedArray]:
    """Seconds and nanoseconds of numbers in a unit, or in units by their sizes (`auto`).

    Args:
        whole: (rows,) int64, not negative.
        below: (rows,) int64 billionths that are added.
        unit: of the numbers.
        counts: is increased by the number of converted values of each unit.
    """
    ticks = pc.and_(pc.greater_equal(whole, TICKS_2000), pc.less(whole, TICKS_2050))
    if unit == "auto" and pc.any(ticks).as_py():
        counts["timestamps_in_ticks"] += pc.sum(ticks).as_py()
        whole = pc.if_else(ticks, pc.multiply(pc.subtract(whole, TICKS_1970), 100), whole)
    for key, (word, per_second) in UNITS.items():
        if unit == "auto":
            other = pc.greater(whole, SECONDS_END // 1_000 * per_second)
        else:
            other = pc.and_(pc.is_valid(whole), unit == key)
        other = pc.fill_null(other, False)
        converted = pc.sum(other).as_py() or 0
        if not converted:
            continue
        second = pc.if_else(other, pc.divide(whole, per_second), whole)
        rest = pc.subtract(whole, pc.multiply(pc.if_else(other, second, 0), per_second))
        fine = pc.add(pc.multiply(rest, BILLION // per_second), pc.divide(below, per_second))
        below = pc.if_else(other, fine, below)
        whole = second
        counts[f"timestamps_in_{word}"] += converted
    return whole, pc.cast(pc.fill_null(below, 0), pa.int32())
