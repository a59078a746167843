"""Times of exports: usual forms, zones, and dates whose first number may be day or month."""

from __future__ import annotations

from collections import Counter

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from recsys.data.day_orders import share_of_times, show_day_first
from recsys.data.time_formats import TimeRules, find_zones, read_moments

TEN = 1_714_557_600  # 2024-05-01 10:00:00 UTC


def read(text: str | None, zone: str = "UTC", day_first: bool | None = True) -> int | None:
    rules = TimeRules("auto", zone, day_first, 1.75e9)
    return read_moments(pa.chunked_array([[text, "2024-01-01"]]), rules).second[0].as_py()


@pytest.mark.parametrize(
    "text",
    [
        "1714557600", "1714557600.9", "1.7145576e9", "1714557600123", "1714557600123456",
        "1714557600123456789", "2024-05-01T10:00:00Z", "2024-05-01T12:00:00+02:00",
        "2024-05-01T12:00:00+0200", "2024-05-01 12:00:00.123+02", "2024-05-01 10:00",
        "2024/05/01 10:00:00", "2024-5-1 10:00", "01.05.2024 10:00", "1.5.2024, 10:00 Uhr",
        "01/05/2024 10:00 AM", "1/5/24 10:00 am", "20240501100000", "01-May-2024 10:00:00",
        "20240501100000123", "638501544001234567",
        "May-01-24 10:00:00", "2024-May-01 10:00", "01/May/2024:10:00:00 +0000",
        "Wed May 1 2024 10:00", "MAY-1-2024 10:00", "Mi, 1.5.2024 10:00",
        "Wed May  1 10:00:00 UTC 2024", "May 1st, 2024 3:00:00 AM PDT", "01May24 10:00",
        "Wed May 01 2024 12:00:00 GMT+0200 (CEST)", "Mi., 1. Mai 2024, 10:00 Uhr",
        "mercredi 1er mai 2024 à 10h00", "1 de mayo de 2024 10:00 a. m.", "1 mag 2024 alle 10:00",
        "1 mei 2024 10:00", "1/mai/2024 às 10:00", "środa, 1 maja 2024 o 10:00",
        "Rechnungsdatum 1.5.2024 10:00",
        "May 1, 2024 10:00", "Wed, 01 May 2024 10:00:00 GMT", " 2024-05-01T10:00:00.900 UTC ",
    ],
)  # fmt: skip
def test_usual_forms_are_one_moment(text: str) -> None:
    assert read(text) == TEN


@pytest.mark.parametrize(
    "text",
    [
        "",
        None,
        "May 2024",
        "Mar 12",
        "31 Moon 2024",
        "Room 12 2024",
        "noon",
        "-5",
        "2024-13-01",
        "0000-00-00",
        "32.1.2024",
        "9" * 40,
        "[1]",
        "NaN",
    ],
)
def test_other_texts_are_null(text: str | None) -> None:
    assert read(text) is None


@pytest.mark.parametrize(
    ("month", "names"),
    [(3, "März Mrz. mars marzo maart março marca MAR"), (12, "Dez déc. diciembre dicembre grudnia"),
     (8, "août ago. augustus sierpnia AUG"), (10, "Okt. ottobre outubro października oct")],
)  # fmt: skip
def test_months_have_names_in_eight_languages(month: int, names: str) -> None:
    expected = read(f"2024-{month:02}-09")
    for name in names.split():
        for form in ("9 {} 2024", "9-{}-24", "{} 9, 2024", "2024 {} 09", "9 de {} de 2024"):
            assert read(form.format(name)) == expected, (name, form)


@pytest.mark.parametrize(("form", "counted"), [("2026-03-29 02:{:02}", (60, 0)),
                                               ("25.10.2026 02:{:02}", (0, 60))])  # fmt: skip
@pytest.mark.parametrize("arrow", [False, True])
def test_hours_that_a_change_of_clocks_skips_or_doubles_are_counted(form, counted, arrow) -> None:
    texts = pa.chunked_array([[form.format(n) for n in range(60)] + ["2026-01-01 02:30"]])
    rules, counts = TimeRules("auto", "Europe/Berlin", True, 0), Counter()
    if arrow:
        texts = read_moments(texts, TimeRules("auto", "UTC", True, 0)).second.cast(
            pa.timestamp("s")
        )
    read_moments(texts, rules, counts)
    assert (counts["times_in_a_skipped_hour"], counts["times_in_a_doubled_hour"]) == counted


def test_times_without_a_zone_are_in_the_given_one() -> None:
    assert read("2024-05-01 12:00", "Europe/Berlin") == TEN
    assert read("2024-05-01T10:00:00Z", "Europe/Berlin") == TEN
    assert read("1714557600", "Europe/Berlin") == TEN


@pytest.mark.parametrize(
    ("texts", "shown"),
    [
        (["03/04/2024"], (True, None)),
        (["03/04/2024", "3/13/2024"], (True, False)),
        (["03/04/2024", "13/3/2024"], (True, True)),
        (["3.4.2024"], (True, True)),
        (["3/13/2024", "13/3/2024"], (True, None)),
        (["2024-03-04"], (False, None)),
    ],
)
def test_the_data_show_whether_the_day_comes_first(
    texts: list[str], shown: tuple[bool, bool | None]
) -> None:
    found = show_day_first([pa.chunked_array([[text]]) for text in texts])
    assert (found.seen, found.day_first) == shown


@pytest.mark.parametrize("mark", ["-", ".", "/"])
def test_short_dates_begin_with_the_year_where_only_the_last_number_changes_much(mark) -> None:
    days = [f"2026-01-{day:02}" for day in range(5, 17)]
    column = pa.chunked_array([[day[2:].replace("-", mark) for day in days]])
    order = show_day_first([column])
    assert (order.seen, order.day_first, order.year_first) == (True, None, True)
    rules = TimeRules("auto", "UTC", None, 1.8e9, order.year_first)
    assert read_moments(column, rules).second.to_pylist() == [read(day) for day in days]


@given(st.datetimes(min_value=__import__("datetime").datetime(1990, 1, 1)))
def test_local_and_iso_forms_agree(when) -> None:
    when = when.replace(microsecond=0)
    assert read(when.strftime("%d.%m.%Y %H:%M:%S")) == read(when.isoformat())


def test_arrow_types_are_times_too() -> None:
    rules = TimeRules("auto", "UTC", None, 0)
    for kind in (pa.timestamp("us"), pa.timestamp("ms", "Europe/Berlin")):
        column = pa.chunked_array([pa.array([TEN], pa.timestamp("s")).cast(kind)])
        assert read_moments(column, rules).second.to_pylist() == [TEN]
    assert read_moments(pa.chunked_array([[TEN, None]]), rules).second.to_pylist() == [TEN, None]
    assert read_moments(pa.chunked_array([[[1]]]), rules).second.to_pylist() == [None]
    long = pa.chunked_array([[f"{TEN}", "1e25", "4.00638E+22"]])
    assert read_moments(long, rules).second.to_pylist() == [TEN, None, None]


def test_small_numbers_are_no_times_of_events() -> None:
    rules = TimeRules("auto", "UTC", None, 1.75e9)
    assert share_of_times(pa.chunked_array([["1", "2", "3"]]), rules) == (1.0, 0.0)


@pytest.mark.parametrize(
    ("texts", "found"),
    [
        (["31.12.2024 13:05"], (1, 0, [])),
        (["2024-12-31T13:05:00Z", "2024-12-31 13:05:00+02:00"], (0, 2, ["Z", "+02:00"])),
        (["2024-12-31T13:05:00Z", "2024-12-31 13:05:00"], (1, 1, ["Z"])),
        (["2024-12-31", "1735650300", None], (0, 0, [])),
    ],
)
def test_local_times_are_told_from_others(texts, found):
    assert find_zones(pa.chunked_array([pa.array(texts, pa.string())])) == found


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
    assert (read(bad), read("2024-05-01")) == (None, 1_714_521_600)
