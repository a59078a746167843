"""Converts times of events to unix seconds and nanoseconds, and counts the conversions.

The unit of a number can be inferred from its size: 1e11 seconds are in the year 5138, while 1e11
milliseconds are in 1973.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

from recsys.errors import DataError

TimeUnit = Literal["auto", "s", "ms", "us", "ns"]
# Name in the counts, and units per second; smallest unit first.
UNITS: dict[str, tuple[str, int]] = {
    "ns": ("nanoseconds", 1_000_000_000),
    "us": ("microseconds", 1_000_000),
    "ms": ("milliseconds", 1_000),
}
ISO_DATE = r"^\d{4}-\d{2}-\d{2}([T ]|$)"
SECONDS_END = 100_000_000_000  # no date before the year 5138 has so many seconds
BILLION = 1_000_000_000


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


def unix_seconds(
    column: pa.ChunkedArray,
    name: str,
    path: Path,
    row_number: Callable[[int], int],
    unit: TimeUnit,
    counts: Counter[str],
) -> Moments:
    """Convert a column of times to unix seconds and nanoseconds.

    Args:
        column: numbers, dates, or texts: all of them numbers, or all of them ISO 8601 dates and
            times. A time without a zone is UTC.
        name: of the column, for errors.
        path: of the file, for errors.
        row_number: position in the column -> number of the row or line in the file, for errors.
        unit: of numbers; `auto` decides for each by its size.
        counts: is increased by the number of converted values of each unit.

    Raises:
        DataError: a value that is not a time, or one too large for the given unit.
    """
    kind = column.type
    if pa.types.is_floating(kind):
        column = pc.if_else(pc.is_finite(column), column, None)
    odd = pc.is_null(column)
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        odd = pc.invert(pc.match_substring_regex(pc.fill_null(column, ""), r"^\d{1,19}(\.\d*)?$"))
        if pc.all(pc.match_substring_regex(pc.fill_null(column, ""), ISO_DATE)).as_py():
            parsed = pd.to_datetime(column.to_pandas(), format="ISO8601", utc=True, errors="coerce")
            odd = pa.chunked_array([parsed.isna().to_numpy()])
            if not pc.any(odd).as_py():
                column = pa.chunked_array([pa.array(parsed.dt.as_unit("ns"))])
                kind = column.type
    row = pc.index(odd, True).as_py()
    if row >= 0:
        raise DataError(
            f"{path}: column {name!r} has {column[row].as_py()!r} in data row {row_number(row)}; "
            "use unix seconds or ISO dates throughout"
        )
    if pa.types.is_date(kind) or pa.types.is_timestamp(kind):
        return of_timestamps(column)
    below = None
    try:
        if pa.types.is_integer(kind):
            whole = pc.cast(column, pa.int64())
        elif pa.types.is_floating(kind):
            whole, below = _parts(pc.cast(column, pa.float64()))
        else:
            whole, below = of_digits(pc.cast(column, pa.string()))
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise DataError(f"{path}: column {name!r} is not numeric: {error}") from error
    second, nanosecond = in_seconds(whole, below, unit, counts)
    late = pc.fill_null(pc.greater(second, SECONDS_END), True)
    row = pc.index(late, True).as_py()
    if row >= 0:
        raise DataError(
            f"{path}: column {name!r}: data row {row_number(row)} is after the year 5138 if its "
            f"unit is {unit}; the unit may be smaller: use --set data.time_unit=auto, ms, us or ns"
        )
    return Moments(second, nanosecond, constant(False, len(second)))


def constant(value: bool, rows: int) -> pa.ChunkedArray:
    """(rows,) bool."""
    return pa.chunked_array([np.full(rows, value)])


def of_timestamps(column: pa.ChunkedArray) -> Moments:
    """Arrow's dates and timestamps; those without a zone are in UTC."""
    is_date = constant(pa.types.is_date(column.type), len(column))
    per_second = 1
    if pa.types.is_timestamp(column.type):
        per_second = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}[column.type.unit]
        values = pc.cast(column, pa.int64())
    else:
        values = pc.cast(pc.cast(column, pa.timestamp("s"), safe=False), pa.int64())
    second = pc.divide(values, per_second)
    below = pc.subtract(values, pc.multiply(second, per_second))
    early = pc.less(below, 0)  # Arrow divides towards zero
    second = pc.if_else(early, pc.subtract(second, 1), second)
    below = pc.if_else(early, pc.add(below, per_second), below)
    nanosecond = pc.multiply(pc.fill_null(below, 0), BILLION // per_second)
    return Moments(second, pc.cast(nanosecond, pa.int32()), is_date)


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


def _parts(values: pa.ChunkedArray) -> tuple[pa.ChunkedArray, pa.ChunkedArray]:
    """Floating numbers as whole numbers and billionths; seconds are exact to a microsecond."""
    whole = pc.floor(values)
    millionths = pc.min_element_wise(
        pc.round(pc.multiply(pc.subtract(values, whole), 1e6)), 999_999
    )
    fits = pc.less(whole, 9e18)
    whole = pc.cast(pc.if_else(fits, whole, None), pa.int64())
    return whole, pc.cast(pc.multiply(millionths, 1000), pa.int64())
