"""The tree forward against the plain forward: nodes in any slots, any tree, any order."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from recsys.decoding.beam import pad_prompts, prefill
from recsys.models.mask import tree_mask
from recsys.models.tree_forward import TreeModel
from recsys.testing import ARCHITECTURES, tiny_model


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_tree_in_arbitrary_slots_equals_one_plain_forward_a_path(architecture):
    model = TreeModel.of(tiny_model(architecture, dtype=torch.float64))
    plain = tiny_model(architecture, dtype=torch.float64)
    prompts = [np.arange(1, 12), np.array([5, 9, 2])]
    #      prompt
    #      /    \
    #    a:20   b:21        depth 1
    #    /  \     \
    #  c:22 d:23  e:24      depth 2
    #   |
    #  f:25                 depth 3
    nodes = torch.tensor([20, 21, 22, 23, 24, 25])
    parents = [None, None, 0, 0, 1, 2]
    depth = torch.tensor([1, 1, 2, 2, 2, 3])
    slots = torch.tensor([4, 0, 9, 7, 2, 5])
    tokens, lengths = pad_prompts(prompts, 64)
    cache = model.new_cache(2, 10, tokens.shape[1])
    prefill(model, tokens, lengths, cache)
    paths = []
    for i, parent in enumerate(parents):
        paths.append([i] if parent is None else [*paths[parent], i])
    ancestors = torch.zeros(2, 6, cache.nodes, dtype=torch.bool)
    node_depth = torch.zeros(cache.nodes, dtype=torch.int64)
    node_depth[slots] = depth
    for i, path in enumerate(paths):
        ancestors[:, i, slots[path]] = True
    logits = model.forward(
        nodes.expand(2, -1),
        lengths[:, None] + depth - 1,
        lambda window: tree_mask(
            ancestors,
            lengths,
            cache.prompt,
            depth=depth,
            node_depth=node_depth,
            window=window,
            dtype=torch.float64,
        ),
        cache,
        write=slots,
        view=(0, cache.slots),
    )
    for b, prompt in enumerate(prompts):
        for i, path in enumerate(paths):
            whole = torch.tensor([[*prompt.tolist(), *nodes[path].tolist()]])
            with torch.inference_mode():
                expected = plain(whole).logits[0, -1]
            torch.testing.assert_close(logits[b, i], expected, atol=1e-10, rtol=1e-8)


def test_models_that_scale_their_logits_are_refused():
    model = tiny_model()
    model.config.final_logit_softcapping = 30.0
    with pytest.raises(ValueError, match="final_logit_softcapping"):
        TreeModel.of(model)


def test_attention_that_ignores_masks_is_refused():
    model = tiny_model()
    model.config._attn_implementation = "flex_attention"
    with pytest.raises(ValueError, match="load the model with attn_implementation='sdpa'"):
        TreeModel.of(model)
