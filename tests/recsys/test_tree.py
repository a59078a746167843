"""The tree forward against the plain forward: any tree, mixed depths, passes, sub-batches."""

from contextlib import ExitStack

import numpy as np
import pytest
import torch
from oracles import ARCHITECTURES, tiny_model

from recsys.decoding.tree import ROOT, PromptBatch, TokenTree
from recsys.models.tree_forward import TreeModel

#      prompt
#      /    \
#    0:20   1:21        depth 1
#    /  \     \
#  2:22 3:23  4:24      depth 2
#   |
#  5:25                 depth 3
TOKENS = [20, 21, 22, 23, 24, 25]
PARENTS = [ROOT, ROOT, 0, 0, 1, 2]
DEPTH = [1, 1, 2, 2, 2, 3]
PROMPTS = [np.arange(1, 12), np.array([5, 9, 2])]


@pytest.fixture
def borrowed():
    """Caches that a test borrows; given back at its end."""
    with ExitStack() as stack:
        yield stack


def path(node):
    """Nodes from the prompt down to `node`."""
    return [] if node == ROOT else [*path(PARENTS[node]), node]


def expected(model, prompt, node):
    tokens = torch.tensor([[*prompt.tolist(), *[TOKENS[i] for i in path(node)]]])
    with torch.inference_mode():
        return model(tokens).logits[0, -1]


def both(values):
    """The same row for both requests."""
    return torch.tensor(values).expand(2, -1)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("passes", ["one", "one call", "prompt first", "level by level"])
def test_a_tree_pass_equals_one_plain_pass_per_path(architecture, passes, borrowed):
    model = tiny_model(architecture, dtype=torch.float64)
    model_ = TreeModel.of(model)
    tree = borrowed.enter_context(TokenTree(model_, PromptBatch.of(PROMPTS, model_), len(TOKENS)))
    steps = {
        "one": [range(6)],
        "one call": [range(6)],
        "prompt first": [range(0), range(6)],
        "level by level": [range(0), range(2), range(2, 5), range(5, 6)],
    }[passes]
    logits = []
    for step in steps:
        if passes == "one call":
            tree.add(both(TOKENS), both(PARENTS), both(DEPTH), within=2)
            step = ()
        for depth in sorted({DEPTH[i] for i in step}):
            here = [i for i in step if DEPTH[i] == depth]
            tree.add(both([TOKENS[i] for i in here]), both([PARENTS[i] for i in here]), depth)
        logits.append(tree.forward())
    logits = torch.cat(logits, dim=1)
    assert tree.passes == len(steps)
    for b, prompt in enumerate(PROMPTS):
        for place, node in enumerate([ROOT, *range(6)]):
            torch.testing.assert_close(
                logits[b, place], expected(model, prompt, node), atol=1e-10, rtol=1e-8
            )


def test_requests_add_nodes_at_own_depths_and_leave_the_batch(borrowed):
    model = tiny_model("qwen3-mixed-window", dtype=torch.float64)
    model_ = TreeModel.of(model)
    tree = borrowed.enter_context(TokenTree(model_, PromptBatch.of(PROMPTS, model_), 8))
    tree.add(both([20, 21]), both([ROOT, ROOT]), 1)
    tree.forward()
    # the first request goes on below node 0, the second adds another child of its prompt
    tree.add(torch.tensor([[22], [30]]), torch.tensor([[0], [ROOT]]), torch.tensor([[2], [1]]))
    logits = tree.forward()
    for b, last in enumerate(([20, 22], [30])):
        with torch.inference_mode():
            plain = model(torch.tensor([[*PROMPTS[b].tolist(), *last]])).logits[0, -1]
        torch.testing.assert_close(logits[b, 0], plain, atol=1e-10, rtol=1e-8)
    tree.keep(torch.tensor([1]))
    tree.add(torch.tensor([[31]]), torch.tensor([[2]]), 2)
    with torch.inference_mode():
        plain = model(torch.tensor([[*PROMPTS[1].tolist(), 30, 31]])).logits[0, -1]
    torch.testing.assert_close(tree.forward()[0, 0], plain, atol=1e-10, rtol=1e-8)


@pytest.mark.parametrize("own_forward", [False, True])
def test_a_node_does_not_see_an_ancestor_that_its_window_has_left(own_forward, borrowed):
    """A chain of six nodes with a window of three: nodes leave it one by one."""
    model = tiny_model("mistral", dtype=torch.float64, sliding_window=3, num_hidden_layers=1)
    ready = TreeModel(model, own_forward=own_forward)
    tree = borrowed.enter_context(TokenTree(ready, PromptBatch.of(PROMPTS, ready), 6))
    for depth, token in enumerate(TOKENS, 1):
        tree.add(both([token]), both([depth - 2 if depth > 1 else ROOT]), depth)
    logits = tree.forward()
    for b, prompt in enumerate(PROMPTS):
        with torch.inference_mode():
            plain = model(torch.tensor([[*prompt.tolist(), *TOKENS]])).logits[0]
        torch.testing.assert_close(logits[b, -6:], plain[-6:], atol=1e-10, rtol=1e-8)


def test_attention_that_ignores_masks_is_refused():
    model = tiny_model()
    model.config._attn_implementation = "flex_attention"
    with pytest.raises(ValueError, match="load the model with attn_implementation='sdpa'"):
        TreeModel.of(model)
