"""Completion says the truth about what it leaves out; its answers are in the suite of searches."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from oracles import tiny_model

from recsys.constraint import ItemTrie
from recsys.decoding import beam_search, complete
from recsys.errors import NonFiniteError
from recsys.models.tree_forward import TreeModel


def open_lists(scale):
    """A model, prompts and a catalog, and beam search's lists of one item."""
    rng = np.random.default_rng(3)
    model = tiny_model("llama-gqa", seed=3, dtype=torch.float32)
    with torch.no_grad():
        model.lm_head.weight.mul_(scale)
    tree = TreeModel(model.eval())
    tree.native = None
    sequences = np.unique(rng.integers(0, 16, (600, 4)) + np.arange(4) * 16, axis=0)
    trie = ItemTrie.build(sequences)
    prompts = [rng.integers(0, 64, rng.integers(1, 12)) for _ in range(33)]
    return tree, prompts, trie, beam_search(tree, prompts, trie, 1)


def test_an_answer_that_another_pass_rates_lower_is_not_replaced_by_a_worse_one():
    tree, prompts, trie, beams = open_lists(100)  # such logits differ by whole units between passes
    found = complete(tree, beams, prompts, trie)
    proven = found.is_global & ~beams.is_global
    assert proven.any()
    assert (found.scores[proven] >= beams.scores[proven] - 1).all()


@pytest.mark.parametrize("search", ["_bounded", "native_search"])
def test_a_request_that_is_not_finite_is_named_by_its_place_among_all(search, monkeypatch):
    tree, prompts, trie, beams = open_lists(8)

    def fail(*arguments):
        raise NonFiniteError([0])

    monkeypatch.setattr(f"recsys.decoding.completion.{search}", fail)
    if search == "native_search":
        monkeypatch.setattr("recsys.decoding.completion.native_decoder", lambda search: object())
    known = torch.arange(len(prompts)) < 2
    beams = replace(beams, is_global=known)
    with pytest.raises(NonFiniteError) as caught:
        complete(tree, beams, prompts, trie)
    assert caught.value.requests == (2,)
