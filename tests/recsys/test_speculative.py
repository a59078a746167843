"""Passes of strict speculative search are as promised; its answers are in the suite of searches."""

import json

import numpy as np
import pytest
import torch
from oracles import random_prompts, tiny_model
from safetensors.torch import save_file

from recsys.constraint import ItemTrie
from recsys.constraint.transitions import DeviceTrie
from recsys.decoding import (
    ModelDrafter,
    StateDrafter,
    beam_search,
    speculative_beam_search,
)
from recsys.decoding.draft import split_nodes
from recsys.decoding.expand import Step
from recsys.decoding.tree import PromptBatch
from recsys.errors import ArtifactError
from recsys.models.state_draft import StateDraft, is_state_draft
from recsys.models.tree_forward import TreeModel
from recsys.vocabulary import Vocabulary

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


def test_a_state_draft_takes_the_pass_of_the_prompt_and_one_that_verifies(wide):
    """With room for all nodes of the catalog it cannot be wrong."""
    prompts = random_prompts(np.random.default_rng(0), 4, 12)
    draft = StateDraft.of(TARGET, Vocabulary((64,) * 4, (0,) * 4, 64)).eval()
    found = speculative_beam_search(
        TARGET, StateDrafter(draft, 1300), prompts, wide, 10, traced=True
    )
    assert [s.target_passes for s in found.stats] == [2] * 4
    assert [s.accepted_levels for s in found.stats] == [3] * 4
    assert [s.draft_passes for s in found.stats] == [0] * 4
    fates = [(node.target_pass, node.fate) for node in found.traces[0].nodes]
    assert {number for number, _ in fates} == {2}
    assert sum(fate == "accepted" for _, fate in fates) == 30
    assert not any(fate == "patched" for _, fate in fates)


def test_a_state_draft_equals_its_networks_by_hand():
    """Numbers of a small one, with the state read off the logits."""
    vocabulary = Vocabulary((5, 4, 3), (2, 7, 11), 64)
    model = tiny_model("llama", dtype=torch.float64)
    draft = StateDraft.of(model, vocabulary).double().eval()
    state = torch.randn(2, model.config.hidden_size, dtype=torch.float64)
    logits = state @ model.lm_head.weight.T
    # The 12 codes have fewer rows than the state has values: what they see of it is read exactly.
    head = model.lm_head.weight[2:14]
    torch.testing.assert_close(head @ draft.states(logits)[0], logits[0, 2:14], atol=1e-5, rtol=0)
    level = draft.levels[0]
    x = draft.states(logits)[1]
    hidden = level.state.weight @ x + level.state.bias + level.codes[0].weight[3]
    gelu = 0.5 * hidden * (1 + torch.erf(hidden / 2**0.5))
    out = x + level.out.weight @ gelu + level.out.bias
    norm = (out - out.mean()) / (out.var(unbiased=False) + 1e-5).sqrt()
    found = draft(draft.states(logits), torch.tensor([[[5]], [[5]]]))[1, 0]
    torch.testing.assert_close(found, level.head.weight @ norm)
    assert torch.equal(level.head.weight.float(), model.lm_head.weight[7:11].float())


def test_a_damaged_state_draft_is_refused(tmp_path):
    draft = StateDraft((0, 4, 8), (4, 4, 4), 8, 6)
    draft.save_pretrained(tmp_path)
    assert is_state_draft(tmp_path)
    again = StateDraft.load(tmp_path)
    assert all(torch.equal(v, draft.state_dict()[k]) for k, v in again.state_dict().items())
    file = tmp_path / "state_draft.safetensors"
    whole = file.read_bytes()
    damage = [(b"8, 6]", b"9, 6]"), (b"[[0", b"{[0"), (b"sizes", b"sizez"), (b"0, 4", b"-1,4")]
    damage.append((b"[[0, 4, 8]", b"[[0, 4  ]"))
    for old, new in damage:
        assert old in whole
        file.write_bytes(whole.replace(old, new))
        with pytest.raises(ArtifactError, match="not a loadable draft"):
            StateDraft.load(tmp_path)
    levels = [[0] * 400, [1] * 400, 8, 6]  # modules of all pairs of levels would take 20 s
    save_file(draft.state_dict(), file, {"sizes": json.dumps(levels)})
    with pytest.raises(ArtifactError, match="want 3 to 16"):
        StateDraft.load(tmp_path)
    draft.reader.fill_(torch.nan)
    draft.save_pretrained(tmp_path)
    with pytest.raises(ArtifactError, match="not finite"):
        StateDraft.load(tmp_path)
