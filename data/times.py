"""Converts times of events to unix seconds, and counts the conversions.

The unit of a number can be inferred from its size: 1e11 seconds are in the year 5138, while 1e11
milliseconds are in 1973.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Literal

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


def unix_seconds(
    column: pa.ChunkedArray,
    name: str,
    path: Path,
    row_number: Callable[[int], int],
    unit: TimeUnit,
    counts: Counter[str],
) -> pa.ChunkedArray:
    """Convert a column of times to unix seconds.

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
        odd = pc.invert(pc.match_substring_regex(pc.fill_null(column, ""), r"^\d+(\.\d*)?$"))
        if pc.all(pc.match_substring_regex(pc.fill_null(column, ""), ISO_DATE)).as_py():
            parsed = pd.to_datetime(column.to_pandas(), format="ISO8601", utc=True, errors="coerce")
            odd = pa.chunked_array([parsed.isna().to_numpy()])
            if not pc.any(odd).as_py():
                return pa.chunked_array([parsed.dt.as_unit("s").astype("int64").to_numpy()])
    row = pc.index(odd, True).as_py()
    if row >= 0:
        raise DataError(
            f"{path}: column {name!r} has {column[row].as_py()!r} in data row {row_number(row)}; "
            "use unix seconds or ISO dates throughout"
        )
    if pa.types.is_date(kind) or pa.types.is_timestamp(kind):
        return pc.cast(pc.cast(column, pa.timestamp("s"), safe=False), pa.int64())
    try:
        if not pa.types.is_integer(kind):
            column = pc.cast(pc.cast(column, pa.float64()), pa.int64(), safe=False)
        column = pc.cast(column, pa.int64())
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise DataError(f"{path}: column {name!r} is not numeric: {error}") from error
    for key, (word, per_second) in UNITS.items():
        if unit == "auto":
            other = pc.greater(column, SECONDS_END // 1_000 * per_second)
        else:
            other = pa.chunked_array([np.full(len(column), unit == key)])
        converted = pc.sum(other).as_py() or 0
        if converted:
            column = pc.if_else(other, pc.divide(column, per_second), column)
            counts[f"timestamps_in_{word}"] += converted
    row = pc.index(pc.greater(column, SECONDS_END), True).as_py()
    if row >= 0:
        raise DataError(
            f"{path}: column {name!r}: data row {row_number(row)} is after the year 5138 if its "
            f"unit is {unit}; the unit may be smaller: use --set data.time_unit=auto, ms, us or ns"
        )
    return column
