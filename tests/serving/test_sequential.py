"""Intervals against numbers of a mixture integrated by quadrature, user by user in plain Python."""

import math
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import integrate, optimize

from recsys.serving.sequential import boundary, compare, ratio_p_value

# The boundary at sums of squared deviations, for 2.5 % (`integrated` makes them, below).
NUMBERS = {0.0: 13.468106, 1.0: 13.793221, 10.0: 16.456541, 100.0: 33.529954, 1000.0: 104.382358}


def integrated(variance, alpha, tuned_for=200.0):
    """Where the mixture of exp(l s - v (-log(1 - l) - l)) over l reaches 1 / alpha.

    The density of l in [0, 1) is that of 1 - l in a gamma distribution that is cut off at 1.
    """
    wanted = math.log(1 / alpha)
    rho = tuned_for / (2 * wanted + math.log(1 + 2 * wanted))

    def log_density(rate):
        return (rho - 1) * math.log(1 - rate) - rho * (1 - rate)

    def mixture(total, variance):
        def log_value(rate):
            return log_density(rate) + rate * total + variance * (math.log(1 - rate) + rate)

        peak = max((log_value(rate), rate) for rate in np.linspace(0, 0.999, 1000))
        area, _ = integrate.quad(
            lambda rate: math.exp(log_value(rate) - peak[0]), 0, 1, points=[peak[1]], limit=500
        )
        return math.log(area) + peak[0]

    normal = mixture(0.0, 0.0)
    return optimize.brentq(
        lambda total: mixture(total, variance) - normal - wanted, 0, 50 + 20 * math.sqrt(variance)
    )


def compared(values, treated, weight, alpha):
    """As `compare`, one user after the other."""
    count, total = {True: 0, False: 0}, {True: 0.0, False: 0.0}
    terms, squares = 0.0, 0.0
    scale = 1 / min(weight, 1 - weight)
    for value, arm in zip(values, treated, strict=True):
        mean = {one: total[one] / count[one] if count[one] else 0.0 for one in (True, False)}
        chance = weight if arm else 1 - weight
        deviation = (value - mean[arm]) / chance
        terms += mean[True] - mean[False] + (deviation if arm else -deviation)
        squares += (deviation / scale) ** 2
        count[arm] += 1
        total[arm] += value
    radius = scale * integrated(squares, alpha / 2)
    return [one / len(values) for one in (terms, terms - radius, terms + radius)]


@pytest.mark.parametrize("variance", NUMBERS)
def test_the_boundary_is_that_of_the_mixture(variance):
    found = boundary(np.array([variance]), 0.025)[0]
    assert found == pytest.approx(NUMBERS[variance], abs=1e-5)
    assert found == pytest.approx(integrated(variance, 0.025), rel=1e-6)


@pytest.mark.parametrize("weight", [0.5, 0.1, 0.9])
def test_an_interval_is_that_of_plain_python(weight):
    draw = random.Random(1)
    treated = [draw.random() < weight for _ in range(2_000)]
    values = [draw.randrange(4) / 3 if draw.random() < 0.4 + 0.3 * arm else 0.0 for arm in treated]
    looks = [3, 700, 2_000]
    found = np.array(compare(np.array(values), np.array(treated), weight, 0.05, looks)).T
    for row, look in zip(found, looks, strict=True):
        estimate, low, high = compared(values[:look], treated[:look], weight, 0.05)
        assert row == pytest.approx([estimate, max(low, -1), min(high, 1)], abs=1e-6)


@given(
    values=st.lists(st.sampled_from([0.0, 1 / 3, 0.5, 1.0]), min_size=1, max_size=40),
    seed=st.integers(0, 1_000),
    weight=st.sampled_from([0.01, 0.5, 0.8]),
)
def test_arms_that_change_places_change_the_sign(values, seed, weight):
    draw = random.Random(seed)
    treated = np.array([draw.random() < weight for _ in values])
    looks = [len(values)]
    found = compare(np.array(values), treated, weight, 0.05, looks)
    other = compare(np.array(values), ~treated, 1 - weight, 0.05, looks)
    assert np.allclose(found, [-other[0], -other[2], -other[1]])
    assert -1 <= found[1][0] <= found[2][0] <= 1


def test_looking_always_finds_nothing_where_nothing_is():
    wrong = 0
    looks = np.arange(20, 2_001, 20)
    for seed in range(200):
        rng = np.random.default_rng(seed)
        treated, values = rng.random(2_000) < 0.5, (rng.random(2_000) < 0.1).astype(float)
        _, low, high = compare(values, treated, 0.5, 0.05, looks)
        wrong += bool(((low > 0) | (high < 0)).any())
    assert wrong <= 10  # 5 %


def test_the_ratio_is_rarely_low_at_any_time():
    low = 0
    for seed in range(300):
        arms = np.random.default_rng(seed).choice(3, 1_000, p=(0.6, 0.3, 0.1))
        counts = [np.cumsum(arms == arm) for arm in range(3)]
        looks = zip(*(count[9::10].tolist() for count in counts), strict=True)
        low += any(ratio_p_value(look, (0.6, 0.3, 0.1)) < 0.05 for look in looks)
    assert low <= 15
    assert ratio_p_value((500, 400, 100), (0.6, 0.3, 0.1)) < 1e-6
