"""The item trie: numbers by hand, and properties against sets of prefixes."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from recsys.constraint import ItemTrie
from recsys.constraint.boost import Boost
from recsys.constraint.mask import RowMask
from recsys.constraint.restrictions import Allowed, Excluded
from recsys.constraint.transitions import DeviceTrie
from recsys.transfers import Upload

catalogs = hnp.arrays(
    np.int64, st.tuples(st.integers(1, 40), st.integers(1, 5)), elements=st.integers(0, 6)
)

#       0
#     /   \
#   5:1   9:2
#   / \     \
# 3:3 7:4   1:5
DRAWN = np.array([[9, 1], [5, 7], [5, 3], [5, 7]])


def reachable(trie: ItemTrie, excluded=None, allowed=None) -> set[tuple[int, ...]]:
    """Every sequence that walking the tensors from the root can produce."""
    device = DeviceTrie.of(trie)
    found = {(0, ())}
    for depth in range(trie.num_levels):
        step = set()
        for state, path in found:
            children = device.children(torch.tensor([[state]]), depth, excluded, allowed)
            alive = children.alive[0, 0]
            states, tokens = children.states[0, 0][alive], children.symbols[0, 0][alive]
            tokens = device.alphabet[tokens]
            step |= {(s, (*path, t)) for s, t in zip(states.tolist(), tokens.tolist(), strict=True)}
        found = step
    return {path for _, path in found}


def test_the_drawn_trie_has_the_drawn_numbers():
    trie = ItemTrie.build(DRAWN)
    assert trie.rows.tolist() == [[5, 3], [5, 7], [9, 1]]
    assert trie.alphabet[trie.symbol[1:]].tolist() == [5, 9, 3, 7, 1]
    assert trie.first_child.tolist() == [1, 3, 5, 6]
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


@given(catalogs)
@settings(deadline=None)
def test_every_item_finds_its_row_whatever_the_input_order(tokens):
    trie = ItemTrie.build(tokens)
    assert (trie.rows[trie.item_row] == tokens).all()
    for row in range(trie.num_rows):
        assert (trie.item_row[trie.items_of(row)] == row).all()
    assert sorted(trie.row_items.tolist()) == list(range(len(tokens)))


@given(catalogs)
@settings(deadline=None)
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


@pytest.mark.parametrize(("levels", "codes"), [(4, 256), (3, 2048)])
def test_an_item_takes_at_most_forty_bytes(levels, codes):
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, codes, (100_000, levels)) + np.arange(levels) * codes
    assert ItemTrie.build(tokens).nbytes / 100_000 <= 40


def test_tokens_beyond_any_table_are_found_too():
    tokens = np.array([[2**31 - 1, 5], [2**30, 2**31 - 2], [2**30, 7]])
    trie = ItemTrie.build(tokens)
    assert trie.alphabet[trie.symbol[1:]].tolist() == [2**30, 2**31 - 1, 7, 2**31 - 2, 5]
    assert trie.rows.tolist() == sorted(tokens.tolist())
    with pytest.raises(ValueError, match="item 1 has token 2147483648 at level 2"):
        ItemTrie.build([[1, 2], [3, 2**31]])


masks = st.sampled_from([0.0, 0.02, 0.2, 0.5, 0.9, 1.0, None])


@given(catalogs, st.lists(st.tuples(masks, st.floats(0, 1)), min_size=1, max_size=4), st.data())
@settings(max_examples=150, deadline=None)
def test_reachable_rows_are_allowed_and_not_excluded(tokens, requests, data):
    trie = ItemTrie.build(tokens)
    rng = np.random.default_rng(data.draw(st.integers(0, 1 << 30)))
    kinds = {
        share: None if share is None else rng.random(len(tokens)) < share for share, _ in requests
    }
    made = {
        share: None if items is None else RowMask.of(trie, items[trie.row_items])
        for share, items in kinds.items()
    }
    wanted = [made[share] for share, _ in requests]
    rows = [rng.permutation(trie.num_rows)[: round(e * trie.num_rows)] for _, e in requests]
    excluded = Excluded.of(trie, Upload("cpu"), rows, wanted)
    allowed = Allowed.of(trie, Upload("cpu"), wanted)
    for place, (share, _) in enumerate(requests):
        items = np.ones(len(tokens), bool) if share is None else kinds[share]
        if share is not None:
            assert made[share].eligible == items.sum()
        items = items & ~np.isin(trie.item_row, rows[place])
        here = torch.tensor([place])
        found = reachable(
            trie, excluded.take(here), None if allowed is None else allowed.take(here)
        )
        assert found == {tuple(row) for row in tokens[items].tolist()}


def test_a_state_has_the_largest_boost_below_it():
    trie = ItemTrie.build(np.array([[9, 1], [5, 7], [5, 3], [5, 7]]))  # rows 53, 57 (two), 91
    boost = Boost.of(trie, np.array([-1, 2, 3, 0.5], np.float32))  # of items 2, 1, 3, 0
    assert boost.most.tolist() == [3, 3, 0.5, -1, 3, 0.5]
