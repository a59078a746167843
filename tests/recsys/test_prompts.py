"""Prompts: one rule of truncation for serving and training."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from recsys.interactions import Histories
from recsys.prompts import PromptConfig, PromptEncoder, training_windows

SMALL = PromptConfig(max_items=5, block=3)


@st.composite
def configs(draw):
    most = draw(st.integers(1, 9))
    return PromptConfig(most, draw(st.integers(1, most)))


def encoder(config: PromptConfig, items: int = 60, prefix: tuple[int, ...] = (1,)) -> PromptEncoder:
    """Item i has the tokens 100 + 2 i and 101 + 2 i."""
    return PromptEncoder(100 + np.arange(2 * items).reshape(items, 2), prefix, config)


def test_the_beginning_moves_a_block_at_a_time():
    #       n: 0  1  2  3  4  5  6  7  8  9 10 11 12
    starts = [0, 0, 0, 0, 0, 0, 3, 3, 3, 6, 6, 6, 9]
    assert SMALL.start(np.arange(13)).tolist() == starts
    assert [int(SMALL.start(n)) for n in range(13)] == starts


@pytest.mark.parametrize(("most", "block"), [(5, 0), (5, 6), (0, 0), (0, 1), (-1, -1)])
def test_a_block_outside_the_window_is_refused(most, block):
    with pytest.raises(ValueError, match=f"got {block} and {most}"):
        PromptConfig(most, block)


def test_a_prompt_by_hand():
    short = encoder(SMALL, prefix=(7, 8))
    assert short.encode([3, 0]).tolist() == [7, 8, 106, 107, 100, 101]
    assert short.encode([]).tolist() == [7, 8]
    assert short.encode([9, 9, 9, 1, 2, 3]).tolist() == [7, 8, 102, 103, 104, 105, 106, 107]
    assert encoder(SMALL, prefix=()).encode([1]).tolist() == [102, 103]
    assert short.encode([]).dtype == short.encode([1]).dtype == np.int64


@given(configs(), st.integers(0, 40))
def test_no_prompt_is_longer_than_the_longest(config, n):
    assert len(encoder(config).encode(np.arange(n))) <= encoder(config).max_tokens
    assert len(encoder(config).encode(np.arange(config.max_items))) == encoder(config).max_tokens


def test_windows_by_hand():
    #  W = 5, s = 3: items 1..5 are asked from item 0 on, 6..8 from item 3 on, 9 from item 6 on.
    histories = Histories.of([np.arange(10), [4], [], [7, 7]])
    windows = training_windows(histories, SMALL)
    assert [w.tolist() for w in windows.sequences] == [
        [0, 1, 2, 3, 4, 5], [3, 4, 5, 6, 7, 8], [6, 7, 8, 9], [7, 7],
    ]  # fmt: skip
    assert windows.first.tolist() == [1, 3, 3, 1]


@given(configs(), st.lists(st.integers(0, 45), max_size=4))
def test_each_item_is_predicted_once_with_the_serving_prompt(config, lengths):
    # Each item occurs once over all histories, so it says where it came from.
    ends = np.cumsum([0, *lengths])
    items = [np.arange(a, b) for a, b in pairwise(ends)]
    asked = encoder(config, int(ends[-1]))
    windows = training_windows(Histories.of(items), config)
    questions = [
        (int(window[place]), asked.item_tokens[window[:place]].reshape(-1).tolist())
        for window, first in zip(windows.sequences, windows.first, strict=True)
        for place in range(first, len(window))
    ]
    expected = [
        (int(history[p]), asked.encode(history[:p])[1:].tolist())
        for history in items
        for p in range(1, len(history))
    ]
    assert questions == expected
