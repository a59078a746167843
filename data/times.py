"""Converts times of events to unix seconds and nanoseconds, and counts the conversions.

The unit of a number can be inferred from its size: 1e11 seconds are in the year 5138, while 1e11
milliseconds are in 1973.
"""

from __future__ import annotations

from collections import Counter
from typing import Literal, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

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


def constant(value: bool, rows: int) -> pa.ChunkedArray:
    """(rows,) bool."""
    return pa.chunked_array([np.full(rows, value)])


def of_timestamps(column: pa.ChunkedArray) -> Moments:
    """Arrow's dates and timestamps; those without a zone are in UTC."""
    is_date = constant(pa.types.is_date(column.type), len(column))
    if pa.types.is_date(column.type):
        column = pc.cast(column, pa.timestamp("s"), safe=False)
    below = pc.round(pc.multiply(pc.subsecond(column), BILLION))
    whole = pc.cast(pc.floor_temporal(column, unit="second"), pa.timestamp("s", column.type.tz))
    nanosecond = pc.cast(pc.fill_null(below, 0), pa.int32())
    return Moments(pc.cast(whole, pa.int64()), nanosecond, is_date)


def of_digits(texts: pa.ChunkedArray) -> tuple[pa.ChunkedArray, pa.ChunkedArray | None]:
    """Numbers such as `1700000000.25` as whole numbers and billionths (None without decimals).

    Those that do not fit in 64 bits are null.
    """
    whole, below = texts, None
    if pc.any(pc.match_substring(texts, ".")).as_py():
        parts = pc.extract_regex(texts, r"^(?P<whole>\d+)\.?(?P<decimals>\d*)$")
        whole, decimals = (pc.struct_field(parts, name) for name in ("whole", "decimals"))
        padded = pc.utf8_slice_codeunits(pc.utf8_rpad(decimals, 9, "0"), 0, 9)
        below = pc.cast(padded, pa.int64())
    fits = pc.or_(pc.less(pc.binary_length(whole), 19), pc.less(whole, "9"))
    return pc.cast(pc.if_else(fits, whole, None), pa.int64()), below


def in_seconds(
    whole: pa.ChunkedArray,
    below: pa.ChunkedArray | None,
    unit: TimeUnit,
    counts: Counter[str],
) -> tuple[pa.ChunkedArray, pa.ChunkedArray]:
    """Seconds and nanoseconds of numbers in a unit, or in units by their sizes (`auto`).

    Args:
        whole: (rows,) int64, not negative.
        below: (rows,) int64 billionths that are added; None for none.
        unit: of the numbers.
        counts: is increased by the number of converted values of each unit.
    """
    below = pa.chunked_array([pa.array(np.zeros(len(whole), np.int64))]) if below is None else below
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


def of_floats(values: pa.ChunkedArray) -> tuple[pa.ChunkedArray, pa.ChunkedArray]:
    """Floating numbers as whole numbers and billionths; seconds are exact to a microsecond.

    Those that are negative, do not fit in 64 bits or are no numbers are null.
    """
    whole = pc.floor(values)
    millionths = pc.min_element_wise(
        pc.round(pc.multiply(pc.subtract(values, whole), 1e6)), 999_999
    )
    fits = pc.and_(pc.less(whole, 9e18), pc.greater_equal(whole, 0))
    whole = pc.cast(pc.if_else(fits, whole, None), pa.int64())
    return whole, pc.cast(pc.multiply(pc.if_else(fits, millionths, None), 1000), pa.int64())
