"""Reads the times of a shop's export: unix times, ISO dates and the usual local forms.

A column may mix the forms. Arrow parses them; a value that is no time becomes null.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from recsys.data.times import SECONDS_END, UNITS, TimeUnit

EARLIEST = 631_152_000  # 1990-01-01: earlier times of a shop's events are errors
DAY_S = 86_400
NUMBER = r"^\d{1,19}(\.\d*)?([eE]\+?\d{1,2})?$"
COMPACT = r"^(19|20)\d{2}(0[1-9]|1[0-2])(0[1-9]|[12]\d|3[01])(\d{4}|\d{6})?$"
YEAR_FIRST = r"^\d{4}-\d{1,2}-\d{1,2}(\s|$)"
YEAR_LAST = r"^\d{1,2}-\d{1,2}-(\d{4}|\d{2})(\s|$)"
WORDS = r"^(\d{1,2}[- ][A-Za-z]{3,9}[- ]\d{4}|[A-Za-z]{3,9} \d{1,2} \d{4})"
ZONED = r":\d{2}([.,]\d+)?\s*(Z|z|UTC|GMT|[+-]\d{2}(:?\d{2})?)$"
SPLIT_ZONE = r"^(?P<rest>.*:\d{2}(?:[.,]\d+)?)\s*(?P<zone>Z|z|UTC|GMT|[+-]\d{2}(?::?\d{2})?)$"
CLOCKS = ("", " %H:%M:%S", " %H:%M", " %I:%M %p", " %I:%M:%S %p")
# Replacements that bring the local forms to a few: `31.12.2024, 13:05 Uhr` -> `31-12-2024 13:05`.
TIDY = (
    (r"^(Mon|Tue|Wed|Thu|Fri|Sat|Sun)[a-z]*,? +", ""),
    (r"^(\d{1,4})[./](\d{1,2})[./](\d{1,4})", r"\1-\2-\3"),
    (r"^(\d{4}-\d{1,2}-\d{1,2})T", r"\1 "),
    (r"(:\d{2})[.,]\d+", r"\1"),
    (r",? +(um )?", " "),
    (r"(?i) (uhr|h)$", ""),
    (r"(?i)(\d) ?([ap])\.?m\.?$", r"\1 \2M"),
)


@dataclass(frozen=True)
class TimeRules:
    """How times are read.

    Attributes:
        unit: of numbers; `auto` decides for each by its size.
        zone: of times without a zone.
        day_first: whether 03/04/2024 is the third of April; None if the data have not shown it.
        now: unix seconds of the present.
    """

    unit: TimeUnit
    zone: str
    day_first: bool | None
    now: float

    @property
    def latest(self) -> int:
        """Unix seconds of the latest possible event."""
        return int(self.now) + DAY_S


def read_times(
    column: pa.ChunkedArray, rules: TimeRules, counts: Counter[str] | None = None
) -> pa.ChunkedArray:
    """Convert times to unix seconds; a value that is no time becomes null.

    Args:
        column: numbers, dates, times or texts.
        rules: how they are read; dates like 03/04/2024 are null while `day_first` is None.
        counts: is increased by the number of values in each unit below a second.
    """
    kind = column.type
    counts = Counter() if counts is None else counts
    if pa.types.is_date(kind) or pa.types.is_timestamp(kind):
        seconds = pc.cast(column, pa.timestamp("s", getattr(kind, "tz", None)), safe=False)
        return _as_seconds(seconds if getattr(kind, "tz", None) else _in_zone(seconds, rules.zone))
    if pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind):
        column = pc.cast(column, pa.string())
    if not (pa.types.is_string(column.type) or pa.types.is_large_string(column.type)):
        return pa.chunked_array([pa.nulls(len(column), pa.int64())])
    texts = pc.fill_null(column, "")
    compact = pc.match_substring_regex(texts, COMPACT)
    number = pc.and_(pc.match_substring_regex(texts, NUMBER), pc.invert(compact))
    found = _of_numbers(pc.if_else(number, texts, None), rules.unit, counts)
    if pc.all(number).as_py():
        return found
    return pc.coalesce(found, _of_texts(pc.if_else(number, "", texts), rules))


def show_day_first(columns: Iterable[pa.ChunkedArray]) -> tuple[bool, bool | None]:
    """Find out whether dates like 03/04/2024 begin with the day.

    Args:
        columns: texts, part by part; reading stops at the first part that shows it.

    Returns:
        whether there are such dates, and whether the day comes first (None if no value shows it).
    """
    seen = False
    for column in columns:
        if not pa.types.is_string(column.type):
            continue
        form = r"^\s*(?P<one>\d{1,2})(?P<mark>[-/.])(?P<two>\d{1,2})[-/.]\d{2}"
        parts = pc.extract_regex(pc.fill_null(column, ""), form)
        parts = parts.filter(pc.is_valid(parts))
        if not len(parts):
            continue
        seen = True
        one, mark, two = (pc.struct_field(parts, name) for name in ("one", "mark", "two"))
        days = int(pc.sum(pc.greater(pc.cast(one, pa.int64()), 12)).as_py() or 0)
        months = int(pc.sum(pc.greater(pc.cast(two, pa.int64()), 12)).as_py() or 0)
        if pc.all(pc.equal(mark, ".")).as_py():
            return True, True
        if days or months:
            return True, days >= months
    return seen, None


class Zones(NamedTuple):
    """How the times of a column are written.

    Attributes:
        local: texts with a clock and without a zone.
        zoned: texts with a clock and a zone.
        names: distinct zones, as written.
    """

    local: int
    zoned: int
    names: list[str]


def find_zones(column: pa.ChunkedArray) -> Zones:
    """Count the times with and without a zone; only texts with a clock count."""
    if not (pa.types.is_string(column.type) or pa.types.is_large_string(column.type)):
        return Zones(0, 0, [])
    texts = pc.utf8_trim_whitespace(pc.fill_null(column, ""))
    clock = pc.sum(pc.match_substring_regex(texts, r"\d{1,2}:\d{2}")).as_py() or 0
    zoned = texts.filter(pc.match_substring_regex(texts, ZONED))
    if not len(zoned):
        return Zones(clock, 0, [])
    names = pc.unique(pc.struct_field(pc.extract_regex(zoned, SPLIT_ZONE), "zone"))
    return Zones(clock - len(zoned), len(zoned), [name for name in names.to_pylist() if name])


def share_of_times(column: pa.ChunkedArray, rules: TimeRules) -> tuple[float, float]:
    """The share of the values that are times, and the share that are possible times of events."""
    filled = column.filter(pc.is_valid(column))
    if pa.types.is_string(filled.type):
        filled = filled.filter(pc.not_equal(filled, ""))
    if not len(filled):
        return 0.0, 0.0
    if rules.day_first is None:
        rules = TimeRules(rules.unit, rules.zone, show_day_first([filled])[1] is not False, 0)
    seconds = read_times(filled, rules)
    possible = pc.greater_equal(seconds, EARLIEST)
    return 1 - seconds.null_count / len(filled), (pc.sum(possible).as_py() or 0) / len(filled)


def _of_numbers(texts: pa.ChunkedArray, unit: TimeUnit, counts: Counter[str]) -> pa.ChunkedArray:
    values = pc.cast(texts, pa.float64())
    values = pc.if_else(pc.less(values, 9e18), values, None)
    for key, (word, per_second) in UNITS.items():
        if unit not in ("auto", key):
            continue
        other = pc.fill_null(pc.greater(values, float(SECONDS_END // 1_000 * per_second)), False)
        if unit == key:
            other = pc.is_valid(values)
        if converted := pc.sum(other).as_py() or 0:
            values = pc.if_else(other, pc.divide(values, float(per_second)), values)
            counts[f"timestamps_in_{word}"] += converted
    values = pc.if_else(pc.less_equal(values, float(SECONDS_END)), values, None)
    return pc.cast(pc.floor(values), pa.int64())


def _of_texts(texts: pa.ChunkedArray, rules: TimeRules) -> pa.ChunkedArray:
    """Dates and times in words and digits; empty texts become null."""
    offset = None
    texts = pc.utf8_trim_whitespace(texts)
    if pc.any(pc.match_substring_regex(texts, ZONED)).as_py():
        parts = pc.extract_regex(texts, SPLIT_ZONE)
        texts = pc.coalesce(pc.struct_field(parts, "rest"), texts)
        offset = _offset(pc.struct_field(parts, "zone"))
    for pattern, new in TIDY:
        texts = pc.replace_substring_regex(texts, pattern, new)
    found = pa.chunked_array([pa.nulls(len(texts), pa.timestamp("s"))])
    order = {True: "%d-%m-", False: "%m-%d-", None: None}[rules.day_first]
    forms = [(YEAR_FIRST, ["%Y-%m-%d"]), (COMPACT, ["%Y%m%d", "%Y%m%d%H%M", "%Y%m%d%H%M%S"])]
    if order:
        forms += [(YEAR_LAST.replace(r"|\d{2}", ""), [order + "%Y"])]
        forms += [(YEAR_LAST.replace(r"\d{4}|", ""), [order + "%y"])]
    forms += [(WORDS, ["%d-%b-%Y", "%d %b %Y", "%b %d %Y", "%d %B %Y", "%B %d %Y"])]
    for pattern, dates in forms:
        fitting = pc.match_substring_regex(texts, pattern)
        if not pc.any(fitting).as_py():
            continue
        mine = pc.if_else(fitting, texts, None)
        for form in (d + c for d in dates for c in (CLOCKS if pattern != COMPACT else ("",))):
            parsed = pc.strptime(mine, format=form, unit="s", error_is_null=True)
            found = pc.coalesce(found, parsed)
            if not pc.any(pc.and_(fitting, pc.is_null(found))).as_py():
                break
    local = _as_seconds(_in_zone(found, rules.zone))
    if offset is None:
        return local
    return pc.if_else(pc.is_valid(offset), pc.subtract(_as_seconds(found), offset), local)


def _offset(zones: pa.ChunkedArray) -> pa.ChunkedArray:
    """Seconds east of UTC; null where no zone is given. There are few distinct zones."""
    encoded = zones.combine_chunks().dictionary_encode()
    seconds = []
    for zone in encoded.dictionary.to_pylist():
        digits = zone[1:].replace(":", "") if zone and zone[0] in "+-" else ""
        size = int(digits[:2] or 0) * 3_600 + int(digits[2:] or 0) * 60
        seconds.append(-size if zone and zone[0] == "-" else size)
    return pa.chunked_array([pa.array(seconds, pa.int64()).take(encoded.indices)])


def _in_zone(local: pa.ChunkedArray, zone: str) -> pa.ChunkedArray:
    if zone == "UTC":
        return local
    return pc.assume_timezone(local, zone, ambiguous="earliest", nonexistent="earliest")


def _as_seconds(times: pa.ChunkedArray) -> pa.ChunkedArray:
    return pc.cast(times, pa.int64())
