"""The certificate and completion against all sequences scored one by one."""

import numpy as np
import pytest
import torch
from oracles import random_catalog, random_prompts, tiny_model

from recsys.constraint import ItemTrie
from recsys.decoding import SearchRequest, beam_search, complete

TARGET = tiny_model("llama-gqa", dtype=torch.float64)


def everything(prompts, trie, exclude, normalize):
    """All sequences by falling score: a beam search that prunes nothing."""
    return beam_search(
        TARGET, SearchRequest(prompts, exclude=exclude, normalize=normalize), trie, trie.num_rows
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
    same = complete(TARGET, beams, prompts, trie, max_nodes=6)
    assert torch.equal(same.rows, beams.rows)
    assert same.certificates == ["beam-exact"]
    assert same.stats[0].target_passes > beams.stats[0].target_passes
    with pytest.raises(ValueError, match="max_nodes: want at least 6 for 2 beams"):
        complete(TARGET, beams, prompts, trie, max_nodes=5)
