"""Alignment losses against hand-written numbers, slow twins and finite differences, in float64."""

import math

import numpy as np
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


def test_printed_atspeed_s_by_hand():
    # V_c = the two best under q: tokens 1 and 2; p(y_K) = .2.
    reverse = 0.5 * math.log(0.5 / 0.3) + 0.3 * math.log(0.3 / 0.2)
    density = 0.5 * math.log(0.5 / 0.2) + 0.3 * math.log(0.3 / 0.2)
    last = torch.tensor(0.2, dtype=torch.float64).log()
    found = losses.atspeed_s_eq4(P, Q, last, 2).item()
    assert found == pytest.approx(reverse - density)
    assert found == pytest.approx(-0.2027326)  # .5 log(.2 / .3) + .3 log(.2 / .2)


def test_renormalised_atspeed_s_by_hand():
    # V_c = tokens 1 and 2, in which p is (.6, .4) and q (.625, .375); p(y_K) = .4.
    reverse = 0.625 * math.log(0.625 / 0.6) + 0.375 * math.log(0.375 / 0.4)
    entropy = -0.625 * math.log(0.625) - 0.375 * math.log(0.375)
    found = losses.atspeed_s(P, Q, 2).item()
    assert found == pytest.approx(reverse + 0.4 * entropy)
    assert found == pytest.approx(0.2659371)
    assert losses.atspeed_s(P, Q, 2, density=False).item() == pytest.approx(reverse)


def test_released_atspeed_s_by_hand():
    # As above, with p = (.3, .2) and q = (.5, .3) as they are, and p(y_K) = .2.
    reverse = 0.5 * math.log(0.5 / 0.3) + 0.3 * math.log(0.3 / 0.2)
    entropy = -0.5 * math.log(0.5) - 0.3 * math.log(0.3)
    found = losses.atspeed_s(P, Q, 2, released=True).item()
    assert found == pytest.approx(reverse + 0.2 * entropy)
    assert found == pytest.approx(0.5186054)


def test_released_atspeed_r_has_all_tokens_and_the_temperature_of_the_script():
    # With a temperature of .5, probabilities are squared: p (25, 9, 4) / 38, q (4, 25, 9) / 38.
    found = losses.atspeed_r(P, Q, None, temperature=0.5).item()
    assert found == pytest.approx((21 + 16 + 5) / 38 / 2)
    # With that of the script, each has all of its mass on its best token.
    assert losses.atspeed_r(P, Q, None, temperature=losses.SCRIPT).item() == pytest.approx(1)


def test_fewer_tokens_than_k_have_no_kth_probability():
    reverse = 0.2 * math.log(0.2 / 0.5) + 0.5 * math.log(0.5 / 0.3) + 0.3 * math.log(0.3 / 0.2)
    assert losses.atspeed_s(P, Q, 4).item() == pytest.approx(reverse)
    padded = [torch.nn.functional.pad(row, (0, 1), value=losses.NOWHERE) for row in (P, Q)]
    assert losses.atspeed_s(*padded, 4).item() == pytest.approx(reverse)


# A level of 91 tokens, as the first of AtSpeed's Beauty index, and K = 20.
TOKENS, TOP = 91, 20
ZIPF = 1 / np.arange(1, TOKENS + 1)
TARGET = ZIPF / ZIPF.sum()


def descend(loss, target=TARGET):
    """The draft's distribution after gradient descent on its logits, from near-uniform ones."""
    start = np.random.default_rng(0).normal(0, 0.1, TOKENS)
    logits = torch.tensor(start, requires_grad=True)
    optimizer = torch.optim.Adam([logits], lr=0.05)
    log_p = torch.tensor(target).log()
    for _ in range(1500):
        optimizer.zero_grad()
        loss(log_p, logits.log_softmax(-1)).backward()
        optimizer.step()
    return logits.detach().softmax(-1).numpy()


def distance(p, q, top=TOP):
    """Total variation of p and q, both renormalised over the target's best tokens."""
    p, q = (v[:top] / v[:top].sum() for v in (p, q))
    return abs(p - q).sum() / 2


def test_the_optimum_of_the_renormalised_form_is_near_the_target():
    found = descend(lambda p, q: losses.atspeed_s(p, q, TOP))
    chosen = np.argsort(-found)[:TOP]
    # Tokens outside of V_c get no gradient, so the last place depends on the start.
    assert len(set(chosen) & set(range(TOP))) >= TOP - 1
    assert distance(TARGET, found) < 0.06
    best, found = (v[chosen] / v[chosen].sum() for v in (TARGET, found))
    sharper = best ** (1 / (1 - best[-1]))
    assert found == pytest.approx(sharper / sharper.sum(), abs=1e-3)


def test_the_optimum_of_the_printed_form_is_one_token():
    last = torch.tensor(TARGET[TOP - 1]).log()
    found = descend(lambda p, q: losses.atspeed_s_eq4(p, q, last, TOP))
    assert found[0] > 0.99
    assert distance(TARGET, found) > 0.7


def test_sequence_cross_entropy_by_hand():
    share = torch.tensor([0.25, 0.0, 0.75], dtype=torch.float64)
    expected = -(0.25 * math.log(0.2) + 0.75 * math.log(0.3))
    assert losses.sequence_cross_entropy(Q, share).item() == pytest.approx(expected)


def test_margin_by_hand():
    # The draft proposes the prefixes with -1 and -2; the best one that it leaves out has -3.
    candidates = torch.tensor([-1.0, -4.0, -2.0, -3.0, losses.NOWHERE], dtype=torch.float64)
    beams = torch.tensor([-1.0, -4.0, -9.0], dtype=torch.float64)
    real = torch.tensor([True, True, False])
    expected = (math.log(1 + math.exp(-2)) + math.log(1 + math.exp(1))) / 2
    assert losses.margin(beams, real, candidates, 2).item() == pytest.approx(expected)


@pytest.mark.parametrize("drafts", [4, 5, 9])
def test_margin_is_zero_where_the_draft_proposes_everything(drafts):
    candidates = torch.tensor([-1.0, -4.0, -2.0, -3.0, losses.NOWHERE], dtype=torch.float64)
    found = losses.margin(candidates[:2], torch.tensor([True, True]), candidates, drafts)
    assert found.item() == 0


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


def twin_eq4(p, q):
    p, q = normalised(p), normalised(q)
    best = sorted(range(len(q)), key=lambda v: -q[v])[:2]
    return sum(q[v] * math.log(q[v] / p[v]) - q[v] * math.log(q[v] / 0.05) for v in best)


def twin_s(p, q):
    best = sorted(range(len(q)), key=lambda v: -q[v])[:2]
    p, q = normalised([p[v] for v in best]), normalised([q[v] for v in best])
    reverse = sum(b * math.log(b / a) for a, b in zip(p, q, strict=True))
    return reverse - p[-1] * sum(b * math.log(b) for b in q)


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
        lambda p, q: losses.atspeed_s(losses.allowed(p, REAL), losses.allowed(q, REAL), 2),
    ),
    "atspeed-s-eq4": (
        twin_eq4,
        lambda p, q: losses.atspeed_s_eq4(
            losses.allowed(p, REAL), losses.allowed(q, REAL), LAST, 2
        ),
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
        lambda v: losses.margin(v[:, :3], REAL[:, :3], p, 2),
        lambda v: losses.atspeed_s(p, v.log_softmax(-1), 3, density=False),
    ):
        assert gradcheck(loss, (q,))
