"""Alignment losses against hand-written numbers, slow twins and finite differences, in float64."""

import math

import pytest
import torch
from torch.autograd import gradcheck

from recsys.training import losses


def logs(*probabilities):
    return torch.tensor(probabilities, dtype=torch.float64).log()


def draw(*shape, seed=0):
    """Log-probs over the whole of a vocabulary that has more than these tokens."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(*shape[:-1], shape[-1] + 2, generator=generator, dtype=torch.float64)
    return logits.log_softmax(-1)[..., : shape[-1]]


P, Q = logs(0.5, 0.3, 0.2), logs(0.2, 0.5, 0.3)
REAL = torch.tensor([[True, True, True, False], [True, True, False, False]])


def test_atspeed_s_by_hand():
    # V_c = the two best under q: tokens 1 and 2; p(y_K) = .2.
    reverse = 0.5 * math.log(0.5 / 0.3) + 0.3 * math.log(0.3 / 0.2)
    density = 0.5 * math.log(0.5 / 0.2) + 0.3 * math.log(0.3 / 0.2)
    last = torch.tensor(0.2, dtype=torch.float64).log()
    assert losses.atspeed_s(P, Q, last, 2).item() == pytest.approx(reverse - density)
    assert losses.atspeed_s(P, Q, last, 2, density=False).item() == pytest.approx(reverse)


def test_atspeed_s_is_least_with_all_mass_on_the_best_token():
    last = torch.tensor(0.2, dtype=torch.float64).log()
    sharp = losses.atspeed_s(P, logs(1 - 2e-9, 1e-9, 1e-9), last, 3)
    assert sharp < losses.atspeed_s(P, P, last, 3)
    assert sharp < losses.atspeed_s(P, logs(1e-9, 1 - 2e-9, 1e-9), last, 3)


def test_sequence_cross_entropy_by_hand():
    share = torch.tensor([0.25, 0.0, 0.75], dtype=torch.float64)
    expected = -(0.25 * math.log(0.2) + 0.75 * math.log(0.3))
    assert losses.sequence_cross_entropy(Q, share).item() == pytest.approx(expected)


def test_listwise_by_hand_at_a_temperature():
    # At temperature 2 distributions are those of the square roots.
    roots = [[math.sqrt(v) for v in row] for row in ((0.5, 0.3, 0.2), (0.2, 0.5, 0.3))]
    p, q = ([v / sum(row) for v in row] for row in roots)
    expected = 4 * sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))
    found = losses.listwise(P, Q, torch.ones(3, dtype=torch.bool), 2.0)
    assert found.item() == pytest.approx(expected)


def slow(log_p, log_q, real, rule):
    """One row and one token at a time."""
    out = []
    for row in range(len(log_p)):
        p = [math.exp(v) for v, r in zip(log_p[row].tolist(), real[row].tolist(), strict=True) if r]
        q = [math.exp(v) for v, r in zip(log_q[row].tolist(), real[row].tolist(), strict=True) if r]
        out.append(rule(p, q))
    return out


def normalised(values):
    return [v / sum(values) for v in values]


def twin_s(p, q):
    p, q = normalised(p), normalised(q)
    best = sorted(range(len(q)), key=lambda v: -q[v])[:2]
    return sum(q[v] * math.log(q[v] / p[v]) - q[v] * math.log(q[v] / 0.05) for v in best)


def twin_r(p, q):
    best = sorted(range(len(p)), key=lambda v: -p[v])[:2]
    p, q = normalised([p[v] for v in best]), normalised([q[v] for v in best])
    return sum(abs(a - b) for a, b in zip(p, q, strict=True)) / 2


def twin_rest(p, q):
    p, q = [*p, 1 - sum(p)], [*q, 1 - sum(q)]
    return sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))


LAST = torch.full((2,), math.log(0.05), dtype=torch.float64)
ROWS = {
    "atspeed-s": (
        twin_s,
        lambda p, q: losses.atspeed_s(losses.allowed(p, REAL), losses.allowed(q, REAL), LAST, 2),
    ),
    "atspeed-r": (
        twin_r,
        lambda p, q: losses.atspeed_r(losses.allowed(p, REAL), losses.allowed(q, REAL), 2),
    ),
    "kl with rest": (
        twin_rest,
        lambda p, q: losses.forward_kl(losses.with_rest(p, REAL), losses.with_rest(q, REAL)),
    ),
}


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("seed", range(5))
def test_each_loss_equals_its_slow_twin_with_padding(name, seed):
    twin, fast = ROWS[name]
    p, q = draw(2, 4, seed=seed), draw(2, 4, seed=seed + 100)
    assert fast(p, q).tolist() == pytest.approx(slow(p, q, REAL, twin))


@pytest.mark.parametrize("name", ROWS)
def test_padding_may_be_minus_infinity_and_gets_no_gradient(name):
    p = draw(2, 4).masked_fill(~REAL, -torch.inf)
    q = draw(2, 4, seed=1).requires_grad_()
    ROWS[name][1](p.masked_fill(~REAL, losses.NOWHERE), q).sum().backward()
    assert q.grad.isfinite().all()
    assert (q.grad[~REAL] == 0).all()


@pytest.mark.parametrize("name", ROWS)
def test_gradients_equal_finite_differences(name):
    p, q = draw(2, 4), draw(2, 4, seed=1).requires_grad_()
    assert gradcheck(lambda values: ROWS[name][1](p, values), (q,))


def test_gradients_of_the_other_losses_equal_finite_differences():
    p, q = draw(2, 4), draw(2, 4, seed=1).requires_grad_()
    share = torch.rand(2, 4, dtype=torch.float64)
    for loss in (
        lambda v: losses.forward_kl(p, v.log_softmax(-1)),
        lambda v: losses.total_variation(p, v.log_softmax(-1)),
        lambda v: losses.sequence_cross_entropy(v.log_softmax(-1), share),
        lambda v: losses.listwise(p, v, REAL, 2.0),
        lambda v: losses.atspeed_s(p, v.log_softmax(-1), LAST, 3, density=False),
    ):
        assert gradcheck(loss, (q,))
