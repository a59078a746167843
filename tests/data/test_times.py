"""Times of events: numbers in several units, and ISO texts with and without a zone."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pyarrow as pa
import pytest

from recsys.data.time_formats import unix_seconds
from recsys.errors import DataError


def seconds(*values: str) -> list[int]:
    column = pa.chunked_array([list(values)])
    found = unix_seconds(column, "at", Path("f"), range(10).__getitem__, "auto", Counter())
    return found.second.to_pylist()


@pytest.mark.parametrize(
    ("text", "nanosecond"),
    [("1700000000123.25", 123_250_000), ("1700000000123456.75", 123_456_750)],
)
def test_decimals_of_small_units_are_kept(text, nanosecond):
    column = pa.chunked_array([[text]])
    found = unix_seconds(column, "at", Path("f"), range(10).__getitem__, "auto", Counter())
    assert found.second.to_pylist() == [1_700_000_000]
    assert found.nanosecond.to_pylist() == [nanosecond]


@pytest.mark.parametrize("bad", ["", "yesterday", "2024-13-01", "now"])
def test_a_text_that_is_no_time_is_refused(bad):
    with pytest.raises(DataError, match="use unix seconds or ISO dates throughout"):
        seconds("2024-05-01", bad)
