"""Times of events: numbers in several units, and ISO texts with and without a zone."""

from __future__ import annotations

import pyarrow as pa
import pytest

from recsys.data.time_formats import TimeRules, read_moments


def seconds(*values: str) -> list[int]:
    column = pa.chunked_array([list(values)])
    return read_moments(column, TimeRules("auto", "UTC", None, 0)).second.to_pylist()


@pytest.mark.parametrize(
    ("text", "nanosecond"),
    [("1700000000123.25", 123_250_000), ("1700000000123456.75", 123_456_750)],
)
def test_decimals_of_small_units_are_kept(text, nanosecond):
    column = pa.chunked_array([[text]])
    found = read_moments(column, TimeRules("auto", "UTC", None, 0))
    assert found.second.to_pylist() == [1_700_000_000]
    assert found.nanosecond.to_pylist() == [nanosecond]


@pytest.mark.parametrize("bad", ["", "yesterday", "2024-13-01", "now"])
def test_a_text_that_is_no_time_is_null(bad):
    assert seconds("2024-05-01", bad) == [1_714_521_600, None]
