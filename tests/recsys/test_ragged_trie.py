"""Sequences of unequal length: filled, saved and refused; `test_random_exactness` searches them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recsys.constraint import ItemTrie

END = 63

sequences = st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=4), min_size=1, max_size=25)


@given(sequences)
def test_shorter_sequences_are_filled_with_their_end(items):
    trie = ItemTrie.build(items, end=END)
    longest = max(map(len, items))
    filled = [[*s, *[END] * (longest - len(s))] for s in items]
    assert trie.rows[trie.item_row].tolist() == filled
    assert trie.end == END


def test_the_end_token_is_saved(tmp_path):
    ItemTrie.build([[1], [2, 3]], end=END).save(tmp_path)
    assert ItemTrie.open(tmp_path).end == END


@pytest.mark.parametrize(
    ("items", "says"),
    [
        ([], "items, L >= 1"),
        ([[1], []], "item 1 has an empty sequence"),
        ([[1], [2, END, 3]], "item 1 has the token 63, which ends sequences"),
        ([[1], [2, -3]], "item 1 has token -3 at level 2"),
        ([[1.5], [2]], "must be integers"),
    ],
)
def test_impossible_ends_are_refused(items, says):
    with pytest.raises(ValueError, match=says):
        ItemTrie.build(items, end=END)
