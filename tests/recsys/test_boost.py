"""Boosts: bounds by hand and by enumeration, and searches that rank by log p + boost."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from recsys.constraint import ItemTrie
from recsys.constraint.boost import Boost
from recsys.constraint.mask import RowMask
from recsys.decoding import (
    Engine,
    ModelDrafter,
    SearchRequest,
    beam_search,
    speculative_beam_search,
)
from recsys.testing import random_catalog, random_prompts, tiny_model

TARGET = tiny_model("llama-gqa", dtype=torch.float64)
DRAFT = tiny_model("llama", layers=1, seed=9, dtype=torch.float64)


def test_a_state_has_the_largest_boost_below_it():
    trie = ItemTrie.build(np.array([[9, 1], [5, 7], [5, 3], [5, 7]]))  # rows 53, 57 (two), 91
    boost = Boost.of(trie, np.array([-1, 2, 3, 0.5], np.float32))  # of items 2, 1, 3, 0
    assert boost.most.tolist() == [3, 3, 0.5, -1, 3, 0.5]


@given(
    seed=st.integers(0, 100_000),
    items=st.sampled_from([1, 3, 20, 120]),
    levels=st.integers(1, 4),
    beams=st.integers(1, 12),
    strengths=st.lists(st.sampled_from([None, 0.5, 5.0]), min_size=1, max_size=4),
    shares=st.sampled_from([None, 0.3]),
    how=st.sampled_from(["exhaustive", "draft"]),
    normalize=st.sampled_from(["vocabulary", "allowed"]),
)
@settings(max_examples=60, deadline=None)
def test_answers_are_ranked_by_log_probability_and_boost(
    seed, items, levels, beams, strengths, shares, how, normalize
):
    rng = np.random.default_rng(seed)
    tokens = random_catalog(rng, items, levels)
    trie = ItemTrie.build(tokens)
    prompts = random_prompts(rng, len(strengths), 8)
    gains = [
        None if s is None else (s * rng.normal(size=items)).astype(np.float32) for s in strengths
    ]
    boosts = [None if g is None else Boost.of(trie, g) for g in gains]
    masks = [
        None if shares is None else RowMask.of(trie, rng.random(items) < shares) for _ in strengths
    ]
    plain = SearchRequest(prompts, masks=masks, normalize=normalize)
    boosted = replace(plain, boosts=boosts)
    every = beam_search(TARGET, plain, trie, trie.num_rows)
    found = beam_search(TARGET, boosted, trie, beams)
    drafter = ModelDrafter(DRAFT, 20) if how == "draft" else None
    fast = speculative_beam_search(TARGET, drafter, boosted, trie, beams)
    assert torch.equal(fast.rows, found.rows)
    assert fast.certificates == found.certificates
    best = Engine(TARGET, trie).decode(boosted, beams, mode="beam", until_global=True)
    for i in range(len(prompts)):
        rows = every.rows[i][every.rows[i] >= 0]
        worth = every.scores[i][: len(rows)]
        if boosts[i] is not None:
            worth = worth + torch.from_numpy(boosts[i].most).double()[trie.depth_start[-2] + rows]
        order = sorted(range(len(rows)), key=lambda r: (-float(worth[r]), int(rows[r])))
        wanted = [int(rows[r]) for r in order[:beams]]
        assert best.beams.certificates[i] == "global-exact"
        assert best.beams.rows[i][: len(wanted)].tolist() == wanted
        if found.certificates[i] == "global-exact":
            assert found.rows[i][: len(wanted)].tolist() == wanted
        scores = dict(zip(rows.tolist(), every.scores[i].tolist(), strict=False))
        for row, score in zip(found.rows[i].tolist(), found.scores[i].tolist(), strict=True):
            assert row < 0 or score == pytest.approx(scores[row], abs=1e-9)
