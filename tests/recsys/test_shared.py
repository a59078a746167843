"""Shared search: each request gets what it gets alone, and their prompt is run once."""

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from recsys.constraint import ItemTrie
from recsys.constraint.mask import RowMask
from recsys.decoding import SearchRequest, beam_search, shared_beam_search
from recsys.testing import random_catalog, random_prompts, tiny_model

MODELS = {n: tiny_model(n, dtype=torch.float64) for n in ("llama-gqa", "mistral-window")}
VOCABULARY = 64


def random_case(seed):
    """A catalog, prompts, and requests that have them, each with wishes of its own."""
    rng = np.random.default_rng(seed)
    levels = int(rng.integers(1, 5))
    trie = ItemTrie.build(random_catalog(rng, int(rng.integers(1, 60)), levels, VOCABULARY))
    prompts = random_prompts(rng, int(rng.integers(1, 5)), 12)
    owner = rng.integers(0, len(prompts), int(rng.integers(1, 9)))
    some = [rng.integers(0, trie.num_rows, int(rng.integers(0, 12))) for _ in owner]
    return rng, trie, prompts, owner, some


@given(
    st.integers(0, 10**6),
    st.sampled_from(list(MODELS)),
    st.sampled_from([None, 0, 5]),
    st.integers(1, 12),
)
@settings(max_examples=15, deadline=None)
def test_shared_search_equals_beam_search(seed, architecture, nodes, num_beams):
    rng, trie, prompts, owner, rows = random_case(seed)
    exclude = [rng.integers(0, trie.num_rows, int(rng.integers(0, 9))) for _ in owner]
    mask = RowMask.of(trie, rng.random(trie.num_items) < 0.7)
    masks = [mask if rng.random() < 0.5 else None for _ in owner]
    wishes = {"exclude": exclude, "masks": masks, "candidates": rows, "candidate_nodes": nodes}
    model = MODELS[architecture]
    request = SearchRequest([prompts[i] for i in owner], **wishes)
    alone = beam_search(model, request, trie, num_beams)
    found = shared_beam_search(model, request, trie, num_beams)
    assert torch.equal(found.rows, alone.rows)
    pairs = [(found.scores, alone.scores), (found.candidate_scores, alone.candidate_scores)]
    for mine, theirs in pairs:
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-9)
    assert found.certificates == alone.certificates


def test_shared_prefixes_are_run_once():
    rng = np.random.default_rng(3)
    trie = ItemTrie.build(random_catalog(rng, 60, 4, VOCABULARY))
    (prompt,) = random_prompts(rng, 1, 12)
    model = MODELS["llama-gqa"]
    (once,) = beam_search(model, [prompt], trie, 8).stats
    thrice = shared_beam_search(model, [prompt] * 3, trie, 8).stats
    assert {s.target_tokens for s in thrice} == {once.target_tokens}
    assert {s.target_passes for s in thrice} == {once.target_passes}
    found = beam_search(model, [prompt], trie, 8).rows[0]
    along = shared_beam_search(model, SearchRequest([prompt], candidates=[found]), trie, 8)
    assert along.stats[0].target_tokens == once.target_tokens  # they are beams already
    torch.testing.assert_close(along.candidate_scores, along.scores, rtol=0, atol=1e-9)


def test_candidates_that_branch_at_any_depth_have_room():
    wide = [[first, 40, 41] for first in range(20)]
    deep = [[30, second, 41] for second in range(39)]
    trie = ItemTrie.build([*wide, *deep])
    rows = [np.arange(20), np.arange(20, 59)]
    request = SearchRequest([[1, 2], [3, 4]], candidates=rows, candidate_nodes=40)
    alone = beam_search(MODELS["llama-gqa"], request, trie, 1)
    found = shared_beam_search(MODELS["llama-gqa"], request, trie, 1)
    assert torch.equal(found.rows, alone.rows)
    torch.testing.assert_close(found.candidate_scores, alone.candidate_scores, rtol=0, atol=1e-9)
