"""The training loss against torch's own, and what it must not look at."""

import pytest
import torch
from oracles import assert_as_exact, exact_twin, tiny_model
from torch.nn.functional import cross_entropy

from recsys.training.objective import (
    NextToken,
    mixed_targets,
    smoothed_cross_entropy,
    soft_cross_entropy,
)


@pytest.mark.parametrize("smoothing", [0.0, 0.05, 0.3])
@pytest.mark.parametrize("shape", [(1, 2), (7, 33), (50, 1032)])
def test_loss_and_gradient_equal_torchs(smoothing, shape):
    torch.manual_seed(0)
    ours = torch.randn(shape) * 4
    targets = torch.randint(shape[1], (shape[0],))
    check_loss(
        ours,
        lambda logits: smoothed_cross_entropy(logits, targets, smoothing),
        lambda logits: cross_entropy(logits, targets, label_smoothing=smoothing),
    )


def check_loss(logits, loss, theirs):
    """Value and gradient of a loss against another's, both compared with that one in float64."""
    ways = ((loss, logits), (theirs, logits), (theirs, logits.double()))
    copies = [(way, given.detach().clone().requires_grad_()) for way, given in ways]
    values = [way(given) for way, given in copies]
    for value in values:
        (value * 3).backward()
    assert_as_exact(*values)
    assert_as_exact(*(given.grad for _, given in copies))


def batch():
    tokens = torch.tensor([[1, 5, 6, 7, 8], [1, 9, 10, 0, 0]])
    loss = torch.tensor([[0, 0, 0, 1, 1], [0, 1, 1, 0, 0]], dtype=torch.bool)
    return tokens, loss


def test_the_module_is_the_plain_loss_at_the_asked_places():
    model = tiny_model()
    tokens, loss = batch()
    asked = loss[:, 1:]
    expected = [
        cross_entropy(m(tokens).logits[:, :-1][asked], tokens[:, 1:][asked], label_smoothing=0.1)
        for m in (model, exact_twin(model))
    ]
    assert_as_exact(NextToken(model, label_smoothing=0.1)(tokens, loss), *expected)


def test_padding_changes_nothing():
    module, exact = NextToken(tiny_model()), NextToken(tiny_model(dtype=torch.float64))
    tokens, loss = batch()
    wide = torch.nn.functional.pad(tokens, (0, 3), value=0)
    wide_loss = torch.nn.functional.pad(loss, (0, 3), value=False)
    assert_as_exact(module(wide, wide_loss), module(tokens, loss), exact(tokens, loss))


def test_dropout_acts_in_training_only():
    module = NextToken(tiny_model(), dropout=0.5)
    module.train()
    torch.manual_seed(0)
    assert module(*batch()) != module(*batch())
    module.eval()
    assert module(*batch()) == module(*batch())


def test_bf16_autocast_is_close_and_keeps_float32_weights():
    model = tiny_model()
    exact = NextToken(model)(*batch())
    rough = NextToken(model, dtype=torch.bfloat16)(*batch())
    assert rough.dtype == torch.float32
    assert rough.item() == pytest.approx(exact.item(), rel=0.05)
    rough.backward()
    assert {p.grad.dtype for p in model.parameters()} == {torch.float32}


def test_agreement_adds_the_kl_to_the_early_exit():
    model = tiny_model().train()
    tokens, loss = batch()
    found = NextToken(model, agreement=0.5, exit_layer=1)(tokens, loss)
    asked = loss[:, 1:]

    def parts(model):
        states = model(tokens, output_hidden_states=True)
        log_p = states.logits[:, :-1][asked].log_softmax(-1)
        early = model.lm_head(model.model.norm(states.hidden_states[1][:, :-1][asked]))
        divergence = (log_p.exp() * (log_p - early.log_softmax(-1))).sum(-1).mean()
        return cross_entropy(log_p, tokens[:, 1:][asked]), divergence

    expected = [parts(m) for m in (model, exact_twin(model))]
    assert_as_exact(found, *(plain + 0.5 * divergence for plain, divergence in expected))
    found.backward()
    grown = [layer.mlp.up_proj.weight.grad for layer in model.model.layers]
    assert all(grad.abs().max() > 0 for grad in grown), "the last layers learn to be followed"
    asking = NextToken(model, agreement=0.5).eval()
    assert_as_exact(asking(tokens, loss), *(plain for plain, _ in expected))  # a training loss


def dense(targets, shares, width):
    return torch.zeros(len(targets), width).scatter_add_(1, targets, shares)


def test_soft_targets_equal_torch_even_with_repeated_targets():
    torch.manual_seed(0)
    targets = torch.tensor([[1, 1, 4], [0, 8, 2], [5, 6, 7]])
    shares = torch.tensor([[0.5, 0.2, 0.3], [1.0, 0.0, 0.0], [0.1, 0.1, 0.8]])
    wanted = dense(targets, shares, 9)
    check_loss(
        torch.randn(3, 9),
        lambda logits: soft_cross_entropy(logits, targets, shares, 0.1),
        lambda logits: cross_entropy(logits, wanted.to(logits.dtype), label_smoothing=0.1),
    )


def test_a_soft_label_speaks_below_the_asked_items_prefix():
    own = torch.tensor([1, 3, 5])  # one item of three codes
    label = torch.tensor([[[1, 3, 6], [1, 4, 5], [2, 3, 5], [1, 3, 6]]])
    shares = torch.tensor([[0.4, 0.2, 0.3, 0.1]])
    found = dense(*mixed_targets(own, label, shares, 0.5), 7)
    wanted = torch.zeros(3, 7)
    wanted[0, 1], wanted[0, 2] = 0.5 + 0.35, 0.15  # all of it by the first code
    wanted[1, 3], wanted[1, 4] = 0.5 + 0.5 * 5 / 7, 0.5 * 2 / 7  # .7 of it begins with 1
    wanted[2, 5], wanted[2, 6] = 0.5, 0.5  # .5 begins with 1, 3, and all of that is 6
    torch.testing.assert_close(found, wanted)


def test_where_a_soft_label_has_nothing_the_target_is_hard():
    own = torch.tensor([1, 3])
    label, shares = torch.tensor([[[2, 3], [0, 0]]]), torch.tensor([[1.0, 0.0]])
    found = dense(*mixed_targets(own, label, shares, 0.5), 4)
    assert found.tolist() == [[0, 0.5, 0.5, 0], [0, 0, 0, 1]]
    nothing = torch.zeros(1, 2)
    assert dense(*mixed_targets(own, label, nothing, 0.5), 4).tolist() == [
        [0, 1, 0, 0],
        [0, 0, 0, 1],
    ]


def test_the_module_mixes_soft_labels_in():
    model = tiny_model()
    tokens, loss = batch()
    label, shares = torch.tensor([[[11, 12]], [[9, 13]]]), torch.ones(2, 1)
    target = dense(*mixed_targets(tokens[loss], label, shares, 0.4), 64)
    logits = (m(tokens).logits[:, :-1][loss[:, 1:]] for m in (model, exact_twin(model)))
    expected = [cross_entropy(each, target.to(each.dtype), label_smoothing=0.1) for each in logits]
    module = NextToken(model, label_smoothing=0.1, soft_labels=0.4)
    assert_as_exact(module(tokens, loss, label, shares), *expected)
