"""Strict speculative search equals beam search, whoever drafts; and the passes are as promised."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from recsys.constraint import ItemTrie
from recsys.constraint.transitions import DeviceTrie
from recsys.decoding import (
    CandidateDrafter,
    ModelDrafter,
    Proposal,
    SearchRequest,
    beam_search,
    speculative_beam_search,
)
from recsys.decoding.draft import split_nodes
from recsys.decoding.expand import Frontier, Step
from recsys.decoding.tree import PromptBatch
from recsys.models.tree_forward import TreeModel
from recsys.testing import random_catalog, random_prompts, tiny_model

TARGET = tiny_model("llama-gqa", dtype=torch.float64)
# finds likely what the target finds unlikely
ADVERSARY = tiny_model("llama-gqa", dtype=torch.float64)
ADVERSARY.lm_head.weight.data.neg_()
DRAFTS = {
    "perfect": TARGET,
    "unrelated": tiny_model("llama", layers=1, seed=9, dtype=torch.float64),
    "adversary": ADVERSARY,
}
KINDS = [*DRAFTS, "exhaustive", "random", "candidates"]


class RandomDrafter:
    """Random walks of the trie: levels of any size, duplicates, padding, mostly wrong."""

    def __init__(self, seed, widths):
        self.rng, self.widths = np.random.default_rng(seed), widths

    def propose(self, prompts, step, num_beams):
        batch, trie = len(prompts), step.trie
        above = torch.zeros((batch, 1), dtype=torch.int64)
        levels = []
        for depth, width in enumerate(self.widths[: trie.source.num_levels - 1]):
            parents = torch.from_numpy(self.rng.integers(0, above.shape[1], (batch, width)))
            states = above.gather(1, parents)
            children = trie.children(states, depth)
            pick = torch.from_numpy(self.rng.random(children.states.shape)) * children.alive
            pick = pick.argmax(-1, keepdim=True)
            scores = torch.zeros(batch, width, dtype=torch.float64)
            scores[torch.from_numpy(self.rng.random((batch, width)) < 0.1)] = -torch.inf
            above = children.states.gather(-1, pick).squeeze(-1)
            symbols = children.symbols.gather(-1, pick).squeeze(-1)
            levels.append(Frontier.proposed(above, scores, trie.alphabet[symbols], parents))
        return Proposal(levels)


def drafter_of(kind, seed, nodes, trie, batch):
    if kind == "exhaustive":
        return None
    rng = np.random.default_rng(seed)
    rows = [rng.permutation(trie.num_rows)[: rng.integers(0, 30)] for _ in range(batch)]
    if kind == "candidates":
        return CandidateDrafter(rows, nodes)
    if kind == "random":
        return RandomDrafter(seed, rng.integers(1, nodes + 1, 5).tolist())
    return ModelDrafter(DRAFTS[kind], nodes)


@given(
    seed=st.integers(0, 100_000),
    kind=st.sampled_from(KINDS),
    items=st.sampled_from([1, 2, 7, 40, 300]),
    levels=st.integers(1, 5),
    beams=st.integers(1, 22),
    nodes=st.integers(1, 60),
    patch=st.sampled_from([1, 5, 128]),
    batch=st.integers(1, 5),
    excluded=st.sampled_from([0.0, 0.1, 0.8, 1.0]),
    normalize=st.sampled_from(["vocabulary", "allowed"]),
    temperature=st.sampled_from([None, 0.3, 1.0, 2.5]),  # None: the best; else a sample
)
@settings(max_examples=1000, deadline=None)
def test_strict_equals_beam_search(
    seed, kind, items, levels, beams, nodes, patch, batch, excluded, normalize, temperature
):
    rng = np.random.default_rng(seed)
    catalog = random_catalog(rng, items, levels)
    trie = ItemTrie.build(catalog)
    prompts = random_prompts(rng, batch, 12)
    exclude = [
        trie.excluded_rows(np.flatnonzero(rng.random(items) < excluded)) for _ in range(batch)
    ]
    request = SearchRequest(prompts, exclude=exclude, normalize=normalize)
    if temperature is not None:
        seeds = rng.integers(-(2**63), 2**63 - 1, batch).tolist()
        request = replace(request, normalize="vocabulary", seeds=seeds, temperature=temperature)
    expected = beam_search(TARGET, request, trie, beams)
    drafter = drafter_of(kind, seed, nodes, trie, batch)
    found = speculative_beam_search(TARGET, drafter, request, trie, beams, patch_nodes=patch)
    assert found.certificates == expected.certificates
    assert torch.equal(found.rows, expected.rows)
    alive = expected.scores > -torch.inf
    assert torch.equal(found.scores > -torch.inf, alive)
    torch.testing.assert_close(found.scores[alive], expected.scores[alive], atol=1e-10, rtol=0)
    assert all(1 <= s.target_passes <= levels for s in found.stats)
    for rows, gone in zip(found.rows.tolist(), exclude, strict=True):
        listed = [row for row in rows if row >= 0]
        assert len(set(listed)) == len(listed) == min(beams, trie.num_rows - len(gone))
        assert not set(listed) & set(gone.tolist())


@pytest.fixture
def wide():
    """A four-level catalog: bushy at the top, thin below."""
    rng = np.random.default_rng(1)
    sizes = (20, 20, 40, 40)
    rows = np.stack([rng.integers(1, size, 600) for size in sizes], axis=1)
    return ItemTrie.build(rows)


def test_a_perfect_draft_needs_one_pass(wide):
    prompts = random_prompts(np.random.default_rng(0), 4, 12)
    found = speculative_beam_search(TARGET, ModelDrafter(TARGET, 200), prompts, wide, 10)
    assert [s.target_passes for s in found.stats] == [1] * 4
    assert [s.accepted_levels for s in found.stats] == [3] * 4
    assert [s.draft_passes for s in found.stats] == [3] * 4


def test_without_a_draft_model_four_levels_take_two_passes(wide):
    prompts = random_prompts(np.random.default_rng(0), 4, 12)
    found = speculative_beam_search(TARGET, None, prompts, wide, 10, patch_nodes=300)
    assert [s.target_passes for s in found.stats] == [2] * 4
    assert [s.accepted_levels for s in found.stats] == [1] * 4


def test_finished_requests_leave_the_batch_in_order(wide):
    """Half of the prompts are drafted right, half wrong: they finish in different passes."""

    class HalfRight:
        def propose(self, prompts, step, num_beams):
            proposal = ModelDrafter(TARGET, 200).propose(prompts, step, num_beams)
            odd = torch.arange(len(prompts)) % 2 == 1
            spoiled = [
                level._replace(scores=level.scores.masked_fill(odd[:, None], -torch.inf))
                for level in proposal.levels
            ]
            return Proposal(spoiled, proposal.passes)

    prompts = random_prompts(np.random.default_rng(2), 6, 12)
    found = speculative_beam_search(TARGET, HalfRight(), prompts, wide, 10)
    expected = beam_search(TARGET, prompts, wide, 10)
    assert torch.equal(found.rows, expected.rows)
    passes = [s.target_passes for s in found.stats]
    assert passes[::2] == [1] * 3
    assert min(passes[1::2]) > 1


def test_widths_can_be_given_level_by_level(wide):
    prompts = random_prompts(np.random.default_rng(0), 4, 12)
    proposal = ModelDrafter(TARGET, widths=[40, 40, 40]).propose(
        PromptBatch.of(prompts, TreeModel.of(TARGET)), Step(DeviceTrie.of(wide)), 10
    )
    assert [level.states.shape[1] for level in proposal.levels] == [19, 40, 40]  # 19 exist
    found = speculative_beam_search(TARGET, ModelDrafter(TARGET, widths=[5]), prompts, wide, 10)
    assert torch.equal(found.rows, beam_search(TARGET, prompts, wide, 10).rows)


@pytest.mark.parametrize(
    ("nodes", "beams", "expected"),
    [
        (256, 1, [42, 85, 129]),
        (256, 20, [42, 85, 129]),
        (128, 20, [25, 41, 62]),  # the first level gets a quarter more than K
        (60, 20, [20, 20, 20]),  # and no level so much that another would get none
        (2, 20, [1, 1, 1]),
        (20, 1, [3, 6, 11]),
    ],
)
def test_deeper_levels_get_more_draft_nodes(nodes, beams, expected):
    rng = np.random.default_rng(0)
    trie = DeviceTrie.of(ItemTrie.build(rng.integers(0, 256, (20_000, 4))))
    assert split_nodes(nodes, trie, beams) == expected


def proposed(drafter, trie, prompts):
    """States of each level that a drafter proposes for the first prompt."""
    ready = PromptBatch.of(prompts, TreeModel.of(TARGET))
    levels = drafter.propose(ready, Step(DeviceTrie.of(trie)), 10).levels
    return [level.states[0][level.scores[0] > -torch.inf].tolist() for level in levels]


def test_each_prefix_of_the_candidates_is_drafted_once():
    trie = ItemTrie.build(np.array([[1, 1, 1], [1, 1, 2], [1, 2, 1], [3, 1, 1], [3, 1, 2]]))
    prompt = [np.array([1, 2])]
    # states: root 0; [1] 1, [3] 2; [1 1] 3, [1 2] 4, [3 1] 5
    assert proposed(CandidateDrafter([[0, 1, 4]]), trie, prompt) == [[1, 2], [3, 5]]
    assert proposed(CandidateDrafter([[4, 0, 1]], nodes=2), trie, prompt) == [[2], [5]]
    assert proposed(CandidateDrafter([[]]), trie, prompt) == [[], []]
    with pytest.raises(
        ValueError, match=r"candidates of request 0 has row 5; rows lie in 0 \.\. 4"
    ):
        proposed(CandidateDrafter([[5]]), trie, prompt)
    with pytest.raises(ValueError, match="candidates has 2 entries for 1 prompts"):
        proposed(CandidateDrafter([[1], [2]]), trie, prompt)
