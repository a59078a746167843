"""Every search against plain enumeration (`tests/stress/random_exactness.py`)."""

import math

import numpy as np
import pytest
import random_exactness as exactness
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from recsys.constraint import ItemTrie
from recsys.constraint.transitions import DeviceTrie
from recsys.constraint.trie import NO_STATE
from recsys.decoding import beam_search, speculative_beam_search
from recsys.decoding.beam import finish
from recsys.decoding.expand import Frontier, Step


@given(st.integers(0, 2**62))
@settings(max_examples=40, deadline=None)
@example(63)  # three allowed rows of seven, and twelve beams
@example(15)  # everything is excluded
def test_every_search_equals_enumeration(seed):
    assert exactness.Checker(exactness.Case.draw(seed)).run() == []


def scripted(rows, vocabulary=None):
    """A scripted model of which no two prefixes score alike, and the trie of the rows."""
    largest = max(max(row) for row in rows)
    script = exactness.Script(7, vocabulary or largest + 2, 1 << 20)
    return exactness.ScriptedModel(script), ItemTrie.build(np.array(rows))


@pytest.mark.parametrize("num_beams", [2, 4, 9])
def test_rows_of_probability_zero_are_not_returned(num_beams):
    rows = [[0, 1], [0, 2], [1, 1], [3, 0]]
    model, trie = scripted(rows)
    plain = model.forward

    def forward(*args, **kwargs):
        logits = plain(*args, **kwargs)
        logits[..., 0] = -np.inf  # no sequence can hold token 0
        return logits

    model.forward = forward
    for search in (beam_search, lambda *a: speculative_beam_search(a[0], None, *a[1:])):
        found = search(model, [[1]], trie, num_beams)
        assert found.rows[0].tolist() == [2] + [-1] * (num_beams - 1)
        assert found.scores[0, 0] > -np.inf


@pytest.mark.parametrize(
    ("scores", "rest", "expected"),
    [
        ([-1.0, -2.0], -2.5, "global-exact"),
        # A pruned prefix that scores as much may lead to a lower row that scores as much.
        ([-1.0, -2.0], -2.0, "beam-exact"),
        ([-1.0, -2.0], -1.5, "beam-exact"),
        ([-1.0, -math.inf], -5.0, "beam-exact"),
        ([-1.0, -math.inf], -math.inf, "global-exact"),
    ],
)
def test_a_list_is_global_if_no_pruned_prefix_can_reach_it(scores, rest, expected):
    trie = DeviceTrie.of(ItemTrie.build([[1, 2], [1, 3], [4, 5]]))
    first = trie.source.depth_start[2]
    values = torch.tensor([scores])
    states = torch.tensor([[first, first + 1]]).masked_fill(values == -math.inf, NO_STATE)
    place = torch.zeros_like(states)
    frontier = Frontier(states, values, place, place, values, torch.tensor([[rest]]))
    assert finish(frontier, Step(trie), 2, []).certificates == [expected]
