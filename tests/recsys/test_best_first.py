"""The certificate and best-first completion against all sequences scored one by one."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from recsys.constraint import ItemTrie
from recsys.decoding import SearchRequest, beam_search, complete, speculative_beam_search
from recsys.testing import random_catalog, random_prompts, tiny_model

TARGET = tiny_model("llama-gqa", dtype=torch.float64)


def everything(prompts, trie, exclude, normalize):
    """All sequences by falling score: a beam search that prunes nothing."""
    return beam_search(
        TARGET, SearchRequest(prompts, exclude=exclude, normalize=normalize), trie, trie.num_rows
    )


@given(
    seed=st.integers(0, 100_000),
    items=st.sampled_from([1, 5, 60, 300]),
    levels=st.integers(1, 5),
    beams=st.integers(1, 12),
    pass_nodes=st.sampled_from([1, 8, 64]),
    batch=st.integers(1, 4),
    excluded=st.sampled_from([0.0, 0.5, 1.0]),
    normalize=st.sampled_from(["vocabulary", "allowed"]),
)
@settings(max_examples=75, deadline=None)
def test_completed_lists_are_global_and_certificates_are_true(
    seed, items, levels, beams, pass_nodes, batch, excluded, normalize
):
    rng = np.random.default_rng(seed)
    trie = ItemTrie.build(random_catalog(rng, items, levels))
    prompts = random_prompts(rng, batch, 12)
    exclude = [
        trie.excluded_rows(np.flatnonzero(rng.random(items) < excluded)) for _ in range(batch)
    ]
    request = SearchRequest(prompts, exclude=exclude, normalize=normalize)
    expected = beam_search(TARGET, request, trie, trie.num_rows)
    width = min(beams, trie.num_rows)
    found = speculative_beam_search(TARGET, None, request, trie, beams)
    for i, certificate in enumerate(found.certificates):
        same = torch.equal(found.rows[i, :width], expected.rows[i, :width])
        assert same or certificate == "beam-exact"
    best = complete(TARGET, found, request, trie, pass_nodes=pass_nodes, max_nodes=3000)
    assert best.certificates == ["global-exact"] * batch
    assert torch.equal(best.rows[:, :width], expected.rows[:, :width])
    alive = best.scores > -torch.inf
    assert alive[:, width:].sum() == 0
    torch.testing.assert_close(
        best.scores[alive], expected.scores[:, :beams][alive[:, :width]], atol=1e-10, rtol=0
    )


@pytest.fixture
def hard():
    """A catalog and a prompt for which two beams miss the best two sequences."""
    for seed in range(200):
        rng = np.random.default_rng(seed)
        trie = ItemTrie.build(random_catalog(rng, 200, 4))
        prompts = random_prompts(rng, 1, 12)
        beams = beam_search(TARGET, prompts, trie, 2)
        if not torch.equal(beams.rows, everything(prompts, trie, None, "vocabulary").rows[:, :2]):
            return trie, prompts, beams
    raise AssertionError("no such case")


def test_completion_corrects_a_wrong_list_of_beam_search(hard):
    trie, prompts, beams = hard
    assert beams.certificates == ["beam-exact"]
    best = complete(TARGET, beams, prompts, trie)
    assert best.certificates == ["global-exact"]
    assert best.stats[0].target_passes > beams.stats[0].target_passes
    assert (best.scores[0] >= beams.scores[0]).all()


def test_a_small_budget_leaves_the_answer_unchanged(hard):
    trie, prompts, beams = hard
    same = complete(TARGET, beams, prompts, trie, pass_nodes=1, max_nodes=7)
    assert torch.equal(same.rows, beams.rows)
    assert same.certificates == ["beam-exact"]
    assert same.stats[0].target_passes > beams.stats[0].target_passes
    with pytest.raises(ValueError, match="max_nodes: want at least 7 for 2 beams"):
        complete(TARGET, beams, prompts, trie, pass_nodes=1, max_nodes=6)
