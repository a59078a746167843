"""The item trie: numbers by hand, and properties against sets of prefixes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from recsys.constraint import ItemTrie

catalogues = hnp.arrays(
    np.int64, st.tuples(st.integers(1, 40), st.integers(1, 5)), elements=st.integers(0, 6)
)

#       0
#     /   \
#   5:1   9:2
#   / \     \
# 3:3 7:4   1:5
DRAWN = np.array([[9, 1], [5, 7], [5, 3], [5, 7]])


def reachable(trie: ItemTrie, excluded: torch.Tensor | None = None) -> set[tuple[int, ...]]:
    """Every sequence that walking the tensors from the root can produce."""
    device = trie.to()
    found = {(0, ())}
    for depth in range(trie.num_levels):
        step = set()
        for state, path in found:
            children = device.children(torch.tensor([[state]]), depth, excluded)
            alive = children.alive[0, 0]
            states, tokens = children.states[0, 0][alive], children.symbols[0, 0][alive]
            tokens = device.alphabet[tokens]
            step |= {(s, (*path, t)) for s, t in zip(states.tolist(), tokens.tolist(), strict=True)}
        found = step
    return {path for _, path in found}


def test_the_drawn_trie_has_the_drawn_numbers():
    trie = ItemTrie.build(DRAWN)
    assert trie.rows.tolist() == [[5, 3], [5, 7], [9, 1]]
    assert trie.token.tolist() == [-1, 5, 9, 3, 7, 1]
    assert trie.first_child.tolist() == [1, 3, 5, 6, 6, 6, 6]
    assert trie.row_start.tolist() == [0, 0, 2, 0, 1, 2]
    assert trie.row_stop.tolist() == [3, 2, 3, 1, 2, 3]
    assert trie.depth_start == (0, 1, 3, 6)
    assert trie.branching == (2, 2)
    assert trie.item_row.tolist() == [2, 1, 0, 1]
    assert trie.items_of(1).tolist() == [1, 3]
    assert [trie.width(d, 20) for d in (0, 1, 2)] == [1, 2, 3]
    assert [trie.width(d, 2) for d in (0, 1, 2)] == [1, 2, 2]


def test_a_shared_leaf_is_excluded_only_with_all_its_items():
    trie = ItemTrie.build(DRAWN)
    assert trie.excluded_rows([1]).tolist() == []
    assert trie.excluded_rows([1, 3, 3, 2]).tolist() == [0, 1]


def test_statistics_by_hand():
    stats = ItemTrie.build(DRAWN).statistics()
    assert (stats["items"], stats["rows"], stats["states"], stats["largest_leaf"]) == (4, 3, 6, 2)
    assert [level["states"] for level in stats["levels"]] == [2, 3]
    assert stats["levels"][1]["branching_mean"] == 1.5
    assert stats["levels"][1]["single_child_share"] == 0.5


@given(catalogues)
def test_reachable_sequences_are_exactly_the_catalogue(tokens):
    assert reachable(ItemTrie.build(tokens)) == {tuple(row) for row in tokens.tolist()}


@given(catalogues, st.data())
def test_with_exclusions_they_are_the_rows_that_still_hold_an_item(tokens, data):
    trie = ItemTrie.build(tokens)
    gone = data.draw(st.lists(st.integers(0, len(tokens) - 1)))
    excluded = trie.to().pad_excluded([trie.excluded_rows(gone)])
    kept = {tuple(row) for i, row in enumerate(tokens.tolist()) if i not in gone}
    assert reachable(trie, excluded) == kept


@given(catalogues)
def test_every_item_finds_its_row_whatever_the_input_order(tokens):
    trie = ItemTrie.build(tokens)
    assert (trie.rows[trie.item_row] == tokens).all()
    for row in range(trie.num_rows):
        assert (trie.item_row[trie.items_of(row)] == row).all()
    assert sorted(trie.row_items.tolist()) == list(range(len(tokens)))


@given(catalogues)
def test_states_are_ranges_of_rows_with_one_prefix(tokens):
    trie = ItemTrie.build(tokens)
    for depth in range(trie.num_levels + 1):
        states = range(trie.depth_start[depth], trie.depth_start[depth + 1])
        ranges = [(trie.row_start[s], trie.row_stop[s]) for s in states]
        assert [a for a, _ in ranges] == [0, *[b for _, b in ranges[:-1]]]
        assert ranges[-1][1] == trie.num_rows
        for start, stop in ranges:
            assert len(np.unique(trie.rows[start:stop, :depth], axis=0)) == 1


def test_levels_too_wide_for_one_integer_key_sort_the_same():
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 2**31 - 1, (200, 4))
    trie = ItemTrie.build(tokens)
    assert trie.rows.tolist() == sorted(tokens.tolist())


@pytest.mark.parametrize(
    ("tokens", "says"),
    [
        (np.zeros((0, 4), int), "items, L >= 1"),
        (np.zeros(4, int), r"got \(4,\)"),
        (np.zeros((2, 2)), "must be integers"),
        (np.array([[1, 2], [3, -4]]), "item 1 has token -4 at level 2"),
    ],
)
def test_bad_input_is_named(tokens, says):
    with pytest.raises(ValueError, match=says):
        ItemTrie.build(tokens)
