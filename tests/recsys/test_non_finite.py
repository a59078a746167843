"""Logits that are not finite: an error for the requests that have them, and for nobody else.

The suite of searches has the same of all that search for the best.
"""

import pickle
from dataclasses import replace

import numpy as np
import pytest
import torch
from oracles import assert_as_exact, exact_scores, tiny_model
from search_suite import BROKEN, CATALOG, CLEAN, MIXED, beside_beams, broken_model

from recsys.constraint import ItemTrie
from recsys.decoding import (
    SearchRequest,
    beam_search,
    score_rows,
    speculative_beam_search,
)
from recsys.errors import NonFiniteError
from recsys.models.tree_forward import TreeModel
from recsys.text import BeamSettings, generate_text, sample_text

TRIE = ItemTrie.build(CATALOG)


class AnyText:
    """Allows every token but `BROKEN`."""

    vocabulary_size, end_tokens = BROKEN, (BROKEN - 1,)

    def initial(self):
        return 0

    def allowed(self, states):
        return np.ones((len(states), BROKEN), np.bool_)

    def advance(self, states, tokens):
        return np.zeros(len(states), np.int64)

    def forced(self, states):
        return [[] for _ in states]


def test_the_error_is_the_same_behind_a_process():
    error = pickle.loads(pickle.dumps(NonFiniteError([1, 3])))
    assert (error.requests, str(error)) == ((1, 3), str(NonFiniteError([1, 3])))


def model(value=float("nan")):
    return broken_model(BROKEN, value, torch.float32)


SEARCHES = {
    "relaxed": lambda m, p: speculative_beam_search(
        m, m, SearchRequest(p, seeds=range(len(p))), TRIE, 8, "relaxed"
    ),
    "sample": lambda m, p: beam_search(m, SearchRequest(p, seeds=range(len(p))), TRIE, 8),
    "rows": lambda m, p: score_rows(m, p, TRIE, [[0, 1]] * len(p)),
    "text": lambda m, p: generate_text(m, p, BeamSettings(3, 6)),
    "constrained text": lambda m, p: sample_text(m, p, AnyText(), 8),
}


@pytest.mark.parametrize("search", SEARCHES)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_the_error_names_requests_and_later_ones_are_not_affected(search, value):
    """One such history once left keys behind that made later answers empty and certified."""
    tree = TreeModel.of(model(value))
    expected = SEARCHES[search](TreeModel.of(model(value)), CLEAN)
    for _ in range(2):
        with pytest.raises(NonFiniteError, match="not finite for request 1, 3") as caught:
            SEARCHES[search](tree, MIXED)
        assert caught.value.requests == (1, 3)
        found = SEARCHES[search](tree, CLEAN)
        if isinstance(found, torch.Tensor):
            assert torch.equal(found, expected)
        elif isinstance(found, list):
            assert [text.tokens for text in found] == [text.tokens for text in expected]
        else:
            assert torch.equal(found.tokens, expected.tokens)
            assert torch.equal(found.scores, expected.scores)


def test_prompts_that_are_not_finite_are_never_stored():
    tree = TreeModel.of(model())
    tree.keep_prefixes(1 << 20)
    shared = [1, 2, 3, 4, 5, 6, 7, 8]
    with pytest.raises(NonFiniteError):
        beam_search(tree, [[*shared, BROKEN, 1, 1, 1, 1], [*shared, 9, 9, 9, 9, 9]], TRIE, 4)
    # Attention weighs masked values by 0, and 0 x NaN is NaN: what comes before is broken, too.
    assert tree.prefixes.used > 0
    tokens = np.array([[*shared, 9, 9, 9, 9, 9], [*shared, BROKEN, 1, 1, 1, 1]])
    assert tree.prefixes.known(tokens, [13, 13]).tolist() == [0, 0]
    assert tree.prefixes.used == 0
    expected = beam_search(model(), [[*shared, 2]], TRIE, 4)
    found = beam_search(tree, [[*shared, 2]], TRIE, 4)
    assert torch.equal(found.rows, expected.rows)
    exact = exact_scores(model(), [[*shared, 2]], TRIE, found.rows)
    assert_as_exact(found.scores, expected.scores, exact)
    tree.prefixes.clear()
    assert tree.prefixes.used == 0


@pytest.mark.parametrize("way", ["candidates", "relaxed"])
@pytest.mark.parametrize("bad", [0, 1, 9])
def test_tokens_outside_all_beams_are_never_run(way, bad):
    """Places without a beam once ran another token, whose keys could break the request."""
    broken = broken_model(bad, dtype=torch.float32)
    trie, request, expected = beside_beams(bad)
    if way == "candidates":
        request = replace(request, candidates=[expected, expected[:1]])
        found = beam_search(broken, request, trie, 8)
    else:
        request = replace(request, seeds=[1, 2])
        found = speculative_beam_search(broken, broken, request, trie, 8, "relaxed")
    for line in found.rows.tolist():
        assert sorted(line) == [-1] * 5 + expected


def test_finite_requests_of_a_failed_batch_are_stored():
    tree = TreeModel.of(model())
    tree.keep_prefixes(1 << 20)
    with pytest.raises(NonFiniteError):
        beam_search(tree, [[1, 2, 3, 4, BROKEN, 6], CLEAN[2]], TRIE, 4)
    expected = beam_search(model(), [CLEAN[2]], TRIE, 4)
    found = beam_search(tree, [CLEAN[2]], TRIE, 4)
    assert found.stats[0].cached_tokens == 4
    assert torch.equal(found.rows, expected.rows)


def test_a_distribution_without_probability_is_an_error(monkeypatch):
    monkeypatch.setenv("RECSYS_NATIVE", "0")  # a native search would not call what is replaced here
    tree = TreeModel.of(tiny_model("llama", 64))
    plain = tree.forward
    tree.forward = lambda *a, **k: plain(*a, **k).fill_(-torch.inf)
    with pytest.raises(NonFiniteError):
        beam_search(tree, [[1]], TRIE, 4)
