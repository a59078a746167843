from __future__ import annotations

import numpy as np
import pyarrow.compute as pc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recsys.data import filtering
from recsys.data.raw import RawData, events_table, items_table
from recsys.errors import ConfigError, DataError
from recsys.interactions import Interactions

Pairs = list[tuple[str, str]]
pairs = st.lists(st.tuples(st.sampled_from("uvwxyz"), st.sampled_from("abcdef")), max_size=60)


def raw(rows: Pairs, *, timestamp: object = None, rating: object = None) -> RawData:
    users, items = [u for u, _ in rows], [i for _, i in rows]
    ids = sorted({*items, "unseen"})
    codes = np.arange(len(ids), dtype=np.int32)[:, None]
    events = events_table(users, items, timestamp=timestamp, rating=rating)
    return RawData(events, items_table(ids, {}, {}, {}), codes)


def rows_of(data: RawData) -> Pairs:
    return list(zip(data.events["user"].to_pylist(), data.events["item"].to_pylist(), strict=True))


def test_time_order_is_by_user_then_time_then_source() -> None:
    data = raw(
        [("v", "a"), ("u", "b"), ("v", "c"), ("u", "d"), ("v", "e")], timestamp=[5, 3, 1, 3, 5]
    )
    ordered = filtering.in_time_order(data)
    assert rows_of(ordered) == [("v", "c"), ("v", "a"), ("v", "e"), ("u", "b"), ("u", "d")]


@settings(deadline=None)
@given(pairs, st.randoms(use_true_random=False))
def test_time_order_is_the_order_of_interactions(rows: Pairs, random: object) -> None:
    times = [random.randint(0, 5) for _ in rows]  # type: ignore[attr-defined]
    data = filtering.in_time_order(raw(rows, timestamp=times))
    user, item = data.events["user"].to_pylist(), data.events["item"].to_pylist()
    made = Interactions.of(user, item, data.events["timestamp"].to_numpy())
    assert made.user_ids[made.user].tolist() == user
    assert made.item_ids[made.item].tolist() == item


def test_exact_duplicates_are_equal_in_every_column() -> None:
    rows = [("u", "a")] * 4
    data = raw(rows, timestamp=[1, 1, 1, 2], rating=[5, 5, 4, 5])
    kept = filtering.drop_duplicates(data, "drop-exact")
    assert kept.events["timestamp"].to_pylist() == [1, 1, 2]
    assert kept.events["rating"].to_pylist() == [5, 4, 5]
    assert kept.counts == {"duplicate_rows_dropped": 1, "near_duplicate_rows_kept": 2}


def test_without_timestamps_a_repeat_is_another_visit() -> None:
    data = raw([("u", "a"), ("u", "a")])
    assert filtering.drop_duplicates(data, "drop-exact").events.num_rows == 2
    assert filtering.drop_duplicates(data, "keep").events.num_rows == 2
    assert filtering.drop_duplicates(data, "keep-first").events.num_rows == 1


@settings(deadline=None)
@given(pairs.filter(bool))
def test_keep_first_keeps_the_first_of_each_pair(rows: Pairs) -> None:
    kept = filtering.drop_duplicates(raw(rows), "keep-first")
    assert rows_of(kept) == list(dict.fromkeys(rows))
    assert kept.counts["duplicate_rows_dropped"] == len(rows) - len(set(rows))


def test_low_ratings_and_missing_ones_go() -> None:
    data = raw([("u", "a"), ("u", "b"), ("u", "c")], rating=[3.5, 4.0, float("nan")])
    kept = filtering.drop_ratings_below(data, 4)
    assert rows_of(kept) == [("u", "b")]
    assert kept.counts == {"rows_below_min_rating_dropped": 2}
    with pytest.raises(ConfigError, match="has no ratings"):
        filtering.drop_ratings_below(raw([("u", "a")]), 4)


def slow_core(rows: Pairs, k: int) -> Pairs:
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


@settings(deadline=None)
@given(pairs.filter(bool), st.integers(1, 4))
def test_k_core_equals_its_slow_twin(rows: Pairs, k: int) -> None:
    expected = slow_core(rows, k)
    if not expected:
        with pytest.raises(DataError, match="no events are left"):
            filtering.k_core(raw(rows), k)
        return
    kept = filtering.k_core(raw(rows), k)
    assert rows_of(kept) == expected
    assert kept.items["item_id"].to_pylist() == sorted({item for _, item in expected})
    assert kept.counts["rows_outside_core_dropped"] == len(rows) - len(expected)


def test_the_core_keeps_codes_beside_their_items() -> None:
    data = raw([("u", "b"), ("u", "a"), ("v", "b"), ("v", "a"), ("v", "c")])
    kept = filtering.k_core(data, 2)
    assert kept.items["item_id"].to_pylist() == ["a", "b"]
    assert kept.codes is not None
    assert kept.codes.tolist() == [[0], [1]]
    assert kept.counts["items_outside_core_dropped"] == 2  # c, and the one nobody touched


def test_short_users_go_and_their_items_stay() -> None:
    kept = filtering.drop_short(raw([("u", "a"), ("v", "b"), ("u", "c")]), 2)
    assert rows_of(kept) == [("u", "a"), ("u", "c")]
    assert pc.is_in("b", value_set=kept.items["item_id"].combine_chunks()).as_py()
    assert kept.counts == {"rows_of_short_users_dropped": 1}


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 2), st.integers(0, 3), st.integers(0, 2), st.integers(0, 2)),
        max_size=40,
    ),
    st.sampled_from(["keep", "drop-exact", "keep-first", "drop-near"]),
)
def test_duplicates_are_those_of_a_slow_reading(
    rows: list[tuple[int, int, int, int]], policy: filtering.Duplicates
) -> None:
    rows = sorted(rows, key=lambda row: row[:2])  # user, time, item, content
    half = filtering.NEAR_S // 2 + 1
    user, day, item, content = np.array(rows, np.int64).reshape(-1, 4).T
    keep, counts = filtering.duplicates(policy, user, item, day * half, [], content)
    seen: set[object] = set()
    stays = []
    for u, t, i, _ in rows:
        key = (u, t, i) if policy != "keep-first" else (u, i)
        stays.append(policy == "keep" or key not in seen)
        seen.add(key)
    left = [n for n, stay in enumerate(stays) if stay]
    near, copied = set(), set()
    for place, n in enumerate(left):
        for found, column, counted in ((near, 2, True), (copied, 3, rows[n][3] != 0)):
            same = [
                m
                for m in left[:place]
                if rows[m][0] == rows[n][0] and rows[m][column] == rows[n][column]
            ]
            if counted and same and (rows[n][1] - rows[same[-1]][1]) * half <= filtering.NEAR_S:
                found.add(n)
    copied -= near
    done = "dropped" if policy == "drop-near" else "kept"
    assert counts == {
        "duplicate_rows_dropped": stays.count(False),
        f"near_duplicate_rows_{done}": len(near),
        f"reviews_copied_to_other_items_{done}": len(copied),
    }
    gone = near | copied if policy == "drop-near" else set()
    assert keep.tolist() == [stay and n not in gone for n, stay in enumerate(stays)]
