"""The rules on the table of events against loops written from scratch."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recsys.data.event_table import EventTable, connected
from recsys.data.raw import events_table
from recsys.errors import DataError

Row = tuple[str, str, int]
rows_of_events = st.lists(
    st.tuples(st.sampled_from("uvwxyz"), st.sampled_from("abcdef"), st.integers(0, 5)),
    min_size=1,
    max_size=60,
)


@contextmanager
def table(
    folder: Any, rows: list[Row], *, timed: bool = True, **others: Any
) -> Iterator[EventTable]:
    """The events of (user, item, hour of the day), sorted."""
    users, items, times = zip(*rows, strict=True)
    hours = [3600 * time for time in times] if timed else None
    parts = events_table(users, items, timestamp=hours, **others)
    with connected(folder / "spilled", 1.0) as connection:
        made = EventTable(connection, [parts.slice(0, 7), parts.slice(7)])
        made.sort()
        yield made


def left(events: EventTable) -> list[tuple[str, str]]:
    found = events.with_ids("events", []).read_all()
    return list(zip(*(found[name].to_pylist() for name in ("user_id", "item_id")), strict=True))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return tmp_path_factory.mktemp("events")


@settings(deadline=None, max_examples=30)
@given(rows_of_events, st.booleans())
def test_the_order_is_by_user_then_time_then_source(folder, rows: list[Row], turned: bool) -> None:
    users = list(dict.fromkeys(user for user, *_ in rows))
    numbered = list(enumerate(rows))
    if turned:
        numbered.reverse()
    numbered.sort(key=lambda one: (users.index(one[1][0]), one[1][2]))  # a stable sort
    parts = events_table(
        *zip(*[row[:2] for row in rows], strict=True), timestamp=[r[2] for r in rows]
    )
    with connected(folder, 1.0) as connection:
        events = EventTable(connection, [parts])
        events.sort(turned=turned)
        assert left(events) == [row[:2] for _, row in numbered]
        assert events.users.to_pylist() == users
        ties = sum(
            a[1][::2] == b[1][::2] and a[1][1] != b[1][1] for a, b in itertools.pairwise(numbered)
        )
        assert events.ties == ties


def test_exact_duplicates_are_equal_in_every_column(folder) -> None:
    rows = [("u", "a", hour) for hour in (1, 1, 1, 2, 3, 3)]
    rating = [5.0, 5.0, 4.0, 5.0, None, float("nan")]
    with table(folder, rows, rating=rating) as events:
        events.drop_duplicates("drop-exact")
        assert events.counts["duplicate_rows_dropped"] == 2
        (part,) = events.parts()
    assert part["timestamp"].tolist() == [3600, 3600, 7200, 10_800]
    np.testing.assert_array_equal(part["rating"], [5, 4, 5, np.nan])


@settings(deadline=None, max_examples=30)
@given(rows_of_events)
def test_keep_first_keeps_the_first_of_each_pair(folder, rows: list[Row]) -> None:
    with table(folder, rows, timed=False) as events:
        before = left(events)
        events.drop_duplicates("keep-first")
        assert left(events) == list(dict.fromkeys(before))
        assert events.counts["duplicate_rows_dropped"] == len(rows) - events.rows


def test_low_ratings_and_missing_ones_go(folder) -> None:
    rows = [("u", item, 0) for item in "abc"]
    with table(folder, rows, rating=[3.5, 4.0, float("nan")]) as events:
        events.drop_ratings_below(4)
        assert left(events) == [("u", "b")]
        assert events.counts["rows_below_min_rating_dropped"] == 2


def slow_core(rows: list[tuple[str, str]], k: int) -> list[tuple[str, str]]:
    """One user or item at a time."""
    while True:
        for place in (0, 1):
            names = [row[place] for row in rows]
            weak = [name for name in names if names.count(name) < k]
            if weak:
                rows = [row for row in rows if row[place] != weak[0]]
                break
        else:
            return rows


@settings(deadline=None, max_examples=30)
@given(rows_of_events, st.integers(1, 4))
def test_k_core_equals_its_slow_twin(folder, rows: list[Row], k: int) -> None:
    with table(folder, rows) as events:
        expected = slow_core(left(events), k)
        if not expected:
            with pytest.raises(DataError, match="no events are left"):
                events.k_core(k)
            return
        events.k_core(k)
        assert left(events) == expected
        assert events.counts["rows_outside_core_dropped"] == len(rows) - len(expected)


@pytest.mark.parametrize(
    ("hours", "items", "newest"),
    [
        ([5, 4, 3, 2], "abcd", True),
        ([1, 2, 3, 4], "abcd", False),
        ([3, 3, 3, 3], "abcd", False),
        ([5, 4, 3, 2], "aaaa", True),  # no step of one user between items: all rows decide
        ([5, 4, 3, 9], "abcd", False),
    ],
)
def test_a_file_that_is_newest_first_is_known(folder, hours, items, newest) -> None:
    rows = events_table(["u"] * 4, list(items), timestamp=hours)
    with connected(folder, 1.0) as connection:
        assert EventTable(connection, [rows]).newest_first == newest


def test_what_does_not_fit_in_memory_goes_to_the_folder(tmp_path) -> None:
    """Three million rows of long ids, with a limit far below their size."""
    rng = np.random.default_rng(0)
    users = pa.array([f"customer-with-a-long-identifier-{n:09}" for n in range(300_000)])

    def parts() -> Iterator[pa.Table]:
        for _ in range(12):
            chosen = pa.array(rng.integers(0, len(users), 250_000))
            yield events_table(users.take(chosen), users.take(chosen), timestamp=chosen)

    with connected(tmp_path / "spilled", 0.6) as connection:
        events = EventTable(connection, parts())
        spilled = sum(file.stat().st_size for file in (tmp_path / "spilled").iterdir())
        events.sort()
        assert events.rows == 3_000_000
        assert sum(len(part["user"]) for part in events.parts()) == 3_000_000
    assert spilled > 10 << 20
