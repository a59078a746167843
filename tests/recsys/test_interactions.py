from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from recsys.interactions import Histories, Interactions

sequences = st.lists(st.lists(st.integers(0, 9), max_size=6), max_size=8)


def test_histories_lie_end_to_end() -> None:
    histories = Histories.of([[3, 1], [], [2]])
    assert histories.offsets.tolist() == [0, 2, 2, 3]
    assert histories.items.tolist() == [3, 1, 2]
    assert histories.lengths.tolist() == [2, 0, 1]
    assert histories.rows.tolist() == [0, 0, 2]
    assert [h.tolist() for h in histories] == [[3, 1], [], [2]]
    assert histories[-1].tolist() == [2]
    assert histories.padded().tolist() == [[3, 1], [-1, -1], [2, -1]]
    assert histories.padded(fill=0, width=1).tolist() == [[3], [0], [2]]


@pytest.mark.parametrize("index", [3, -4])
def test_a_history_that_is_not_there_is_an_index_error(index: int) -> None:
    with pytest.raises(IndexError, match=f"history {index} of 3"):
        Histories.of([[1], [2], [3]])[index]


@pytest.mark.parametrize(
    ("offsets", "items"), [([], []), ([1, 2], [5, 5]), ([0, 2, 1], [5]), ([0, 1], [5, 5])]
)
def test_offsets_must_start_at_0_and_rise_to_the_end(offsets: Any, items: Any) -> None:
    with pytest.raises(ValueError, match="offsets"):
        Histories(np.array(offsets, np.int64), np.array(items, np.int32))


@given(sequences, st.data())
def test_take_equals_a_loop(sequences: list[list[int]], data: st.DataObject) -> None:
    histories = Histories.of(sequences)
    n = len(sequences)
    indices = data.draw(st.lists(st.integers(-n, n - 1), max_size=10) if n else st.just([]))
    taken = histories.take(indices)
    assert [h.tolist() for h in taken] == [sequences[i] for i in indices]


@given(sequences, st.integers(0, 9))
def test_where_equals_a_loop(sequences: list[list[int]], limit: int) -> None:
    histories = Histories.of(sequences)
    kept = histories.where(histories.items < limit)
    assert [h.tolist() for h in kept] == [[i for i in s if i < limit] for s in sequences]


@given(sequences, st.integers(0, 8))
def test_padding_equals_a_loop(sequences: list[list[int]], width: int) -> None:
    padded = Histories.of(sequences).padded(width=width)
    assert padded.shape == (len(sequences), width)
    assert padded.tolist() == [(s + [-1] * width)[:width] for s in sequences]


def parts(**changes: Any) -> dict[str, Any]:
    base = {
        "user": np.array([0, 0, 1], np.int32),
        "item": np.array([0, 1, 1], np.int32),
        "timestamp": np.array([1, 2, 1]),
        "rating": np.zeros(3, np.float32),
        "user_ids": np.array(["u", "v"]),
        "item_ids": np.array(["a", "b"]),
        "has_time": True,
    }
    return base | changes


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"item": np.array([0, 1], np.int32)}, "item has 2 rows, not 3"),
        ({"item": np.array([0, 2, 1], np.int32)}, r"item must lie in \[0, 2\)"),
        ({"user": np.array([-1, 0, 1], np.int32)}, r"user must lie in \[0, 2\)"),
        ({"user": np.array([0, 1, 0], np.int32)}, "sorted by user"),
        ({"timestamp": np.array([2, 1, 1])}, "sorted by user"),
        ({"item_ids": np.array(["a", "a"])}, "item_ids repeat"),
    ],
)
def test_contradictory_interactions_are_refused(changes: dict[str, Any], message: str) -> None:
    Interactions(**parts())
    with pytest.raises(ValueError, match=message):
        Interactions(**parts(**changes))
