"""Sequences of unequal length: what is reachable, and scores that stop where sequences do."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from recsys.constraint import ItemTrie
from recsys.decoding import ModelDrafter, SearchRequest, beam_search, speculative_beam_search
from recsys.testing import random_prompts, tiny_model

TARGET = tiny_model("llama-gqa", dtype=torch.float64)
DRAFT = tiny_model("llama", layers=1, seed=9, dtype=torch.float64)
END = 63

sequences = st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=4), min_size=1, max_size=25)


@given(sequences)
def test_shorter_sequences_are_filled_with_their_end(items):
    trie = ItemTrie.build(items, end=END)
    longest = max(map(len, items))
    filled = [[*s, *[END] * (longest - len(s))] for s in items]
    assert trie.rows[trie.item_row].tolist() == filled
    assert trie.end == END


@torch.inference_mode()
def score(prompt, sequence, longest):
    """Sum of log-probabilities up to the end, which the longest sequences do not have."""
    whole = [*sequence, END] if len(sequence) < longest else sequence
    logits = TARGET(torch.tensor([[*prompt, *whole]])).logits[0, len(prompt) - 1 : -1]
    return float(logits.log_softmax(-1)[range(len(whole)), whole].sum())


@given(
    sequences,
    st.integers(0, 1000),
    st.sampled_from(["beam", "exhaustive", "draft"]),
    st.booleans(),
)
@settings(max_examples=100, deadline=None)
def test_the_end_token_is_part_of_a_score(items, seed, how, sampled):
    prompt = random_prompts(np.random.default_rng(seed), 1, 8)[0].tolist()
    trie = ItemTrie.build(items, end=END)
    options = {"seeds": [seed]} if sampled else {}
    if how == "beam":
        beams = beam_search(TARGET, SearchRequest([prompt], **options), trie, 30)
    else:
        drafter = ModelDrafter(DRAFT, 20) if how == "draft" else None
        beams = speculative_beam_search(
            TARGET, drafter, SearchRequest([prompt], **options), trie, 30
        )
    distinct = sorted({tuple(s) for s in items})
    longest = max(map(len, distinct))
    found = {
        tuple(t for t in tokens if t != END): s
        for tokens, s in zip(beams.tokens[0].tolist(), beams.scores[0].tolist(), strict=True)
        if s > -torch.inf
    }
    assert sorted(found) == distinct
    if sampled:  # of what is allowed, which adds up to 1
        assert sum(np.exp(list(found.values()))) == pytest.approx(1)
    else:
        expected = [score(prompt, s, longest) for s in distinct]
        np.testing.assert_allclose([found[s] for s in distinct], expected, atol=1e-9)


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
