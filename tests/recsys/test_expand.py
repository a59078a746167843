"""One step of constrained search: selection with ties, and scores by hand."""

from __future__ import annotations

import math

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from recsys.constraint import ItemTrie
from recsys.constraint.transitions import DeviceTrie
from recsys.decoding.expand import Frontier, Step, TokenLogits, stable_top


@given(
    st.lists(
        st.lists(st.sampled_from([-math.inf, -2.0, -1.0, 0.0, 0.5]), min_size=6, max_size=6),
        min_size=1,
        max_size=4,
    ),
    st.integers(1, 6),
)
def test_stable_top_breaks_ties_by_place(values, count):
    chosen, rest = stable_top(torch.tensor(values), count)
    for line, places, left in zip(values, chosen.tolist(), rest.tolist(), strict=True):
        by_value = sorted(range(len(line)), key=lambda i: (-line[i], i))
        chosen_ones = sorted(i for i in by_value[:count] if line[i] > -math.inf)
        assert places == chosen_ones + [len(line)] * (count - len(chosen_ones))
        assert left == [line[by_value[count]] if count < len(line) else -math.inf]


def test_scores_are_normalised_as_requested():
    trie = DeviceTrie.of(ItemTrie.build(np.array([[1, 2], [3, 2]])))
    logits = TokenLogits.of(torch.tensor([[[9.0, 1.0, 0.0, 2.0]]]), trie)
    root = Frontier.root(1, torch.float32, torch.device("cpu"))
    whole = Step(trie).expand(root, logits, 0, 2)
    total = math.log(math.exp(9) + math.exp(1) + 1 + math.exp(2))
    assert whole.tokens.tolist() == [[1, 3]]
    torch.testing.assert_close(whole.scores, torch.tensor([[1 - total, 2 - total]]))
    allowed = Step(trie, normalize="allowed").expand(root, logits, 0, 2)
    total = math.log(math.exp(1) + math.exp(2))
    torch.testing.assert_close(allowed.scores, torch.tensor([[1 - total, 2 - total]]))


def test_a_dead_beam_stays_dead_and_nothing_becomes_nan():
    trie = DeviceTrie.of(ItemTrie.build(np.array([[1, 2], [3, 2]])))
    excluded = trie.pad_excluded([np.array([0, 1])])
    root = Frontier.root(1, torch.float32, torch.device("cpu"))
    for normalize in ("vocabulary", "allowed"):
        beams = root
        for depth in (0, 1):
            logits = TokenLogits.of(torch.zeros(1, beams.scores.shape[1], 4), trie)
            beams = Step(trie, excluded, normalize).expand(beams, logits, depth, 2)
        assert (beams.scores == -torch.inf).all()
