"""Times of events: whatever a source counts in, as unix seconds, and a count of what was converted.

Numbers so large that no date of their unit is meant are told by their size: 1e11 seconds are the
year 5138, 1e11 milliseconds 1973.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from recsys.errors import DataError

TimeUnit = Literal["auto", "s", "ms", "us", "ns"]
# Name in the counts, and how many make a second, smallest unit first.
UNITS: dict[str, tuple[str, int]] = {
    "ns": ("nanoseconds", 1_000_000_000),
    "us": ("microseconds", 1_000_000),
    "ms": ("milliseconds", 1_000),
}
SECONDS_END = 100_000_000_000  # no date before the year 5138 has so many seconds


def unix_seconds(
    column: pa.ChunkedArray,
    name: str,
    path: Path,
    first: int,
    unit: TimeUnit,
    counts: Counter[str],
) -> pa.ChunkedArray:
    """A time column as unix seconds.

    Args:
        column: numbers, dates, or texts that are numbers.
        name: of the column, for errors.
        path: of the file, for errors.
        first: the place of the first value in the file, for errors.
        unit: what numbers count; `auto` tells each by its size.
        counts: gets how many values were converted, by unit.

    Raises:
        DataError: a value that is no moment, or one too large for the unit asked for.
    """
    kind = column.type
    if pa.types.is_floating(kind):
        column = pc.if_else(pc.is_finite(column), column, None)
    odd = pc.is_null(column)
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):  # a column of one kind is typed
        odd = pc.invert(pc.match_substring_regex(pc.fill_null(column, ""), r"^\d+(\.\d*)?$"))
    row = pc.index(odd, True).as_py()
    if row >= 0:
        raise DataError(
            f"{path}: column {name!r} has {column[row].as_py()!r} in data row {first + row + 1}; "
            "write unix seconds or ISO dates throughout"
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
            f"{path}: column {name!r}: data row {first + row + 1} lies after the year 5138 if it "
            f"counts {unit}; it may count a smaller unit: say --set data.time_unit=auto, ms, us or "
            "ns"
        )
    return column
