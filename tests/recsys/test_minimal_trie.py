"""The minimal trie: fewer nodes, the same sequences, the same answers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from recsys.constraint import ItemTrie
from recsys.constraint.boost import Boost
from recsys.constraint.mask import RowMask
from recsys.decoding import beam_search
from recsys.testing import random_prompts, tiny_model

MODEL = tiny_model("llama-gqa", dtype=torch.float64)


def build(rng, items, levels, codes, ragged):
    tokens = rng.integers(1, 1 + codes, (items, levels))
    if not ragged:
        return ItemTrie.build(tokens)
    lengths = rng.integers(1, levels + 1, items)
    return ItemTrie.build([t[:n] for t, n in zip(tokens, lengths, strict=True)], end=50)


def continuations(trie, depth):
    """How many different sets of rests, told apart by an end before them, there are at a depth."""
    rests = {}
    for row in trie.rows.tolist():
        rests.setdefault(tuple(row[:depth]), set()).add(tuple(row[depth:]))
    ended = {p: bool(p) and p[-1] == trie.end for p in rests}
    return len({(frozenset(rest), ended[prefix]) for prefix, rest in rests.items()})


@given(
    seed=st.integers(0, 100_000),
    items=st.sampled_from([1, 3, 30, 200]),
    levels=st.integers(1, 5),
    codes=st.sampled_from([2, 3, 40]),
    ragged=st.booleans(),
)
@settings(max_examples=200, deadline=None)
def test_it_has_one_node_for_all_that_ends_alike_and_the_same_rows(
    seed, items, levels, codes, ragged
):
    trie = build(np.random.default_rng(seed), items, levels, codes, ragged)
    small = trie.minimised()
    depths = range(trie.num_levels + 1)
    assert list(small.depth_nodes) == [continuations(trie, depth) for depth in depths]
    assert small.sequences(np.arange(trie.num_rows)).tolist() == trie.rows.tolist()
    assert small.rows_below[0] == trie.num_rows
    assert [small.width(d, 7) for d in depths] == [trie.width(d, 7) for d in depths]
    assert (
        small.target > np.repeat(np.arange(len(small.rows_below)), np.diff(small.first_edge))
    ).all()
    statistics = small.statistics()
    assert statistics["bytes"] == small.nbytes
    assert [level["states"] for level in statistics["levels"]] == np.diff(trie.depth_start).tolist()


@given(
    seed=st.integers(0, 100_000),
    items=st.sampled_from([1, 3, 30, 150]),
    levels=st.integers(1, 4),
    codes=st.sampled_from([3, 40]),
    ragged=st.booleans(),
    beams=st.integers(1, 9),
    shares=st.lists(st.sampled_from([None, 0.0, 0.1, 0.6]), min_size=1, max_size=3),
    normalize=st.sampled_from(["vocabulary", "allowed"]),
)
@settings(max_examples=120, deadline=None)
def test_beam_search_over_it_equals_beam_search_over_the_trie(
    seed, items, levels, codes, ragged, beams, shares, normalize
):
    rng = np.random.default_rng(seed)
    trie = build(rng, items, levels, codes, ragged)
    small = trie.minimised()
    prompts = random_prompts(rng, len(shares), 6)
    kept = [None if s is None else rng.random(items) < s for s in shares]
    options = {
        "exclude": [rng.permutation(trie.num_rows)[: rng.integers(0, 20)] for _ in shares],
        "normalize": normalize,
    }
    masks = [
        [None if k is None else make(k) for k in kept]
        for make in (lambda k: RowMask.of(trie, k), small.mask)
    ]
    for large, little in zip(*masks, strict=True):
        if large is not None:
            assert large.rows.tolist() == little.rows.tolist()
            assert large.eligible == little.eligible
    one = beam_search(MODEL, prompts, trie, beams, masks=masks[0], **options)
    other = beam_search(MODEL, prompts, small, beams, masks=masks[1], **options)
    assert torch.equal(one.rows, other.rows)
    assert torch.equal(one.scores, other.scores)
    found = one.rows >= 0
    assert torch.equal(one.tokens[found], other.tokens[found])
    assert torch.equal(one.is_global, other.is_global)


def test_catalogues_of_variants_take_less_and_random_ones_do_not():
    # every product comes in the same sizes and colours
    products, variants = np.arange(400), np.arange(60)
    codes = np.array([[p // 20, 20 + p % 20, 50 + v] for p in products for v in variants])
    trie = ItemTrie.build(codes)
    small = trie.minimised()
    assert small.depth_nodes == (1, 1, 1, 1)
    assert len(small.target) == 20 + 20 + 60
    # what says which items a row holds stays
    assert small.nbytes < 12 * trie.num_items + 2000 < trie.nbytes
    random = ItemTrie.build(np.random.default_rng(0).integers(0, 64, (2000, 3)))
    assert random.minimised().depth_nodes[1] == 64


def test_what_it_cannot_do_is_refused():
    trie = ItemTrie.build(np.array([[1, 2], [1, 3]]))
    boost = Boost.of(trie, np.ones(2, np.float32))
    with pytest.raises(ValueError, match="boosts: a minimal trie has none"):
        beam_search(MODEL, [[1]], trie.minimised(), 2, boosts=[boost])
    with pytest.raises(ValueError, match="candidates: a minimal trie cannot"):
        beam_search(MODEL, [[1]], trie.minimised(), 2, candidates=[[0]])
