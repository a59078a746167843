"""Passes of strict speculative search are as promised; its answers are in the suite of searches."""

import numpy as np
import pytest
import torch
from oracles import random_prompts, tiny_model

from recsys.constraint import ItemTrie
from recsys.constraint.transitions import DeviceTrie
from recsys.decoding import (
    ModelDrafter,
    beam_search,
    speculative_beam_search,
)
from recsys.decoding.draft import split_nodes
from recsys.decoding.expand import Step
from recsys.decoding.tree import PromptBatch
from recsys.models.tree_forward import TreeModel

TARGET = tiny_model("llama-gqa", dtype=torch.float64)


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
