"""Levels at which nothing but one token is allowed: no forward where that is exact, else one."""

import numpy as np
import pytest
import torch
from oracles import reference_beam_search, tiny_model

from recsys.constraint import ItemTrie
from recsys.decoding import SearchRequest, beam_search
from recsys.decoding.draft import ModelDrafter
from recsys.decoding.speculative import speculative_beam_search

TARGET = tiny_model("llama-gqa", dtype=torch.float64)
DRAFT = tiny_model("llama", layers=1, seed=9, dtype=torch.float64)


def test_only_levels_with_a_choice_are_run():
    # after the first token everything is known: 1 pass of 4; the last level alone is, too: 3 of 4
    # a forced level in the middle is run with the next one: 2 of 3
    spans = np.array([[1, 5, 6, 7], [2, 8, 9, 3], [3, 5, 6, 7]])
    parting = np.array([[1, 5, 6, 7], [1, 5, 8, 7], [1, 9, 6, 7]])
    middle = np.array([[1, 5, 6], [1, 5, 8], [2, 9, 6], [3, 9, 7]])
    for catalog, passes, forced in ((spans, 1, 3), (parting, 3, 1), (middle, 2, 1)):
        trie = ItemTrie.build(catalog)
        beams = beam_search(
            TARGET, SearchRequest([[4, 2]], normalize="allowed"), trie, len(catalog)
        )
        expected = reference_beam_search(
            TARGET, np.array([4, 2]), catalog, len(catalog), normalize="allowed"
        )
        assert [tuple(t) for t in beams.tokens[0].tolist()] == [t for t, _ in expected]
        assert beams.scores[0].tolist() == pytest.approx([s for _, s in expected], abs=1e-10)
        (stats,) = beams.stats
        assert (stats.target_passes, stats.forced_levels) == (passes, forced)
        assert stats.target_tokens == stats.kv_slots


def test_speculation_skips_a_forced_last_level():
    trie = ItemTrie.build(np.array([[1, 5], [2, 8], [3, 9], [4, 9]]))
    drafter = ModelDrafter(DRAFT, widths=[1])  # one node of the four that would be needed
    request = SearchRequest([[4, 2]], normalize="allowed")
    found = speculative_beam_search(TARGET, drafter, request, trie, 4)
    assert (found.stats[0].target_passes, found.stats[0].forced_levels) == (1, 1)
    plain = beam_search(TARGET, request, trie, 4)
    assert torch.equal(found.rows, plain.rows)
    assert found.scores[0].tolist() == pytest.approx(plain.scores[0].tolist(), abs=1e-10)
