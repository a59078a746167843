from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracles import interactions_of

from recsys.interactions import Interactions
from recsys.splits import (
    TEST,
    TRAIN,
    VALID,
    dates_of_shares,
    label_baskets,
    label_ends,
    label_last_targets,
    label_times,
    tied_events,
    users_to_ask,
)

lengths = st.lists(st.integers(1, 6), max_size=10)
times = st.lists(st.tuples(st.sampled_from("uvw"), st.integers(0, 20)), min_size=1, max_size=40)


def users_with(lengths: list[int]) -> Interactions:
    users = [f"u{u}" for u, n in enumerate(lengths) for _ in range(n)]
    return interactions_of(users, ["a"] * len(users))


def at(moments: list[int]) -> Interactions:
    return interactions_of(
        [f"u{i % 3}" for i in range(len(moments))], ["a"] * len(moments), moments
    )


@given(lengths)
def test_leave_one_out_equals_a_loop(lengths: list[int]) -> None:
    expected = []
    for n in lengths:
        expected += [TRAIN] * (n - 2) + [VALID, TEST] if n >= 3 else [TRAIN] * n
    assert label_ends(users_with(lengths).user).tolist() == expected


@given(st.lists(st.lists(st.integers(1, 4), max_size=6), max_size=6))
def test_leave_one_out_of_baskets_equals_a_loop(users: list[list[int]]) -> None:
    """Each user has baskets of the given sizes, one at each time."""
    user, time, expected, tied = [], [], [], 0
    for number, sizes in enumerate(users):
        for place, size in enumerate(sizes):
            last = len(sizes) - place
            held_out = {1: TEST, 2: VALID}.get(last, TRAIN) if len(sizes) >= 3 else TRAIN
            user += [number] * size
            time += [7 * place] * size
            expected += [held_out] * size
            tied += size * (size > 1)
    columns = np.array(user, np.int32), np.array(time, np.int64)
    assert label_baskets(*columns).tolist() == expected
    assert tied_events(*columns) == tied
    fine = np.arange(len(user), dtype=np.int32)  # after the second: no event shares its time
    assert tied_events(*columns, fine) == 0
    assert label_baskets(*columns, fine).tolist() == label_ends(columns[0]).tolist()


def test_dates_are_the_first_moments_of_their_parts() -> None:
    interactions = at([10, 20, 30])
    labels = label_times(interactions.timestamp, (20, 30))
    assert labels[np.argsort(interactions.timestamp)].tolist() == [TRAIN, VALID, TEST]
    without_valid = label_times(interactions.timestamp, (20, 20))
    assert without_valid[np.argsort(interactions.timestamp)].tolist() == [TRAIN, TEST, TEST]


@given(times, st.sampled_from([(0.8, 0.1), (0.5, 0.0), (0.34, 0.33)]))
def test_the_past_never_tests_and_moments_are_not_torn_apart(
    rows: list[tuple[str, int]], ratio: tuple[float, float]
) -> None:
    interactions = interactions_of([u for u, _ in rows], ["a"] * len(rows), [t for _, t in rows])
    labels = label_times(interactions.timestamp, dates_of_shares(interactions.timestamp, ratio))
    order = np.lexsort((labels, interactions.timestamp))
    assert (np.diff(labels[order].astype(int)) >= 0).all()
    for moment in np.unique(interactions.timestamp):
        assert len(np.unique(labels[interactions.timestamp == moment])) == 1
    assert (labels == TRAIN).sum() <= ratio[0] * len(rows)


@pytest.mark.parametrize("ratio", [(0.0, 0.1), (1.0, 0.0), (0.8, 0.2), (0.8, -0.1), (1.5, 0.1)])
def test_ratios_must_leave_something_to_test(ratio: tuple[float, float]) -> None:
    with pytest.raises(ValueError, match="split ratio"):
        dates_of_shares(np.array([1, 2, 3]), ratio)


def test_dates_must_be_in_order() -> None:
    with pytest.raises(ValueError, match="validation must begin before test"):
        label_times(np.array([1, 2]), (2, 1))


def histories(rows: list[list[bool]]) -> tuple[np.ndarray, np.ndarray]:
    """Users and targets of one list per user."""
    user = np.repeat(np.arange(len(rows)), [len(row) for row in rows]).astype(np.int32)
    return user, np.array([target for row in rows for target in row], bool)


@given(st.lists(st.lists(st.booleans(), min_size=1, max_size=8), max_size=6))
def test_the_last_targets_equal_a_loop(rows: list[list[bool]]) -> None:
    expected = []
    for row in rows:
        places = [place for place, target in enumerate(row) if target]
        valid = places[-2] if len(places) > 1 and places[-2] > 0 else 99
        expected += [
            TRAIN if place < valid else VALID if place == valid else TEST
            for place in range(len(row))
        ]
    assert label_last_targets(*histories(rows)).tolist() == expected


@given(st.lists(st.lists(st.tuples(st.booleans(), st.integers(0, 2)), max_size=6), max_size=6))
def test_users_to_ask_equals_a_loop(rows: list[list[tuple[bool, int]]]) -> None:
    rows = [sorted(row, key=lambda event: event[1]) for row in rows]
    user, target = histories([[t for t, _ in row] for row in rows])
    labels = np.array([label for row in rows for _, label in row], np.uint8)
    expected = [0, 0]
    for row in rows:
        for label in (VALID, TEST):
            places = [place for place, event in enumerate(row) if event == (True, label)]
            expected[label - 1] += bool(places) and places[0] > 0
    assert users_to_ask(user, labels, target).tolist() == expected
