"""Confidence sequences: intervals that hold at every time at once, so one may look at any time.

Howard, Ramdas, McAuliffe and Sekhon, "Time-uniform, nonparametric, nonasymptotic confidence
sequences", Annals of Statistics 49 (2021): the empirical Bernstein bound (Theorem 4) with the
gamma-exponential mixture boundary (Proposition 9). It holds for any number of users and any
distribution of values in [0, 1]; no normal approximation is used.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from scipy.special import gammainc, gammaln

Floats = NDArray[np.float64]
TUNED_FOR = (
    200.0  # sum of squared deviations for which the boundary is tightest; any would be valid
)
HALVINGS = 60


def boundary(variance: Floats, alpha: float) -> Floats:
    """What a sum of deviations exceeds at any time with probability at most `alpha`.

    Args:
        variance: (n,) sums of the squared deviations of values from their predictions, each of
            which is in [-1, 1].
        alpha: probability of error, for one side.

    Returns:
        (n,) the boundary at these sums.
    """
    target = np.log(1 / alpha)
    rho = TUNED_FOR / (2 * target + np.log(1 + 2 * target))
    # The wealth of the mixture grows with the sum; the boundary is where it reaches 1 / alpha.
    low, high = np.zeros_like(variance), 4 * (target + np.sqrt(target * (variance + rho)))
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        reached = _log_wealth(middle, variance, rho) >= target
        low, high = np.where(reached, low, middle), np.where(reached, middle, high)
    bound: Floats = high
    return bound


def _log_wealth(total: Floats, variance: Floats, rho: float) -> Floats:
    """Logarithm of the mixture supermartingale m(s, v) of Proposition 9 for c = 1."""
    first, second = variance + rho, total + variance + rho
    log_wealth: Floats = (
        rho * np.log(rho)
        - gammaln(rho)
        - np.log(gammainc(rho, rho))
        + gammaln(first)
        + np.log(gammainc(first, second))
        - first * np.log(second)
        + total
        + variance
    )
    return log_wealth


def compare(
    values: Floats,
    treated: NDArray[np.bool_],
    weight: float,
    alpha: float,
    looks: Sequence[int] | NDArray[np.int64],
) -> tuple[Floats, Floats, Floats]:
    """Difference of two arms of a randomised experiment, with a confidence sequence.

    A user's value is weighted by the inverse of the probability of their arm, after the mean of the
    arm so far is subtracted (augmented inverse probability weighting). Each term has the true
    difference as its mean, whatever the users before, so rates may drift: the interval is then for
    the mean difference over the users so far.

    Args:
        values: (n,) one value in [0, 1] for each user, in an order that does not depend on them.
        treated: (n,) whether the user is in the second arm.
        weight: probability of the second arm, between 0 and 1.
        alpha: probability that the interval misses the truth at any time.
        looks: numbers of users, from 1 to n, after which to compare.

    Returns:
        (looks,) estimates of mean of the second arm - mean of the first, and the lower and upper
        ends of the intervals, in [-1, 1].
    """
    second, first = _mean_before(values, treated), _mean_before(values, ~treated)
    deviation = values - np.where(treated, second, first)
    weighted = np.where(treated, deviation / weight, -deviation / (1 - weight))
    count = np.asarray(looks)
    estimate = np.cumsum(second - first + weighted)[count - 1] / count
    scale = 1 / min(weight, 1 - weight)  # the largest deviation that is possible
    variance = np.cumsum((weighted / scale) ** 2)[count - 1]
    radius = scale * boundary(variance, alpha / 2) / count
    return estimate, np.maximum(estimate - radius, -1.0), np.minimum(estimate + radius, 1.0)


def _mean_before(values: Floats, chosen: NDArray[np.bool_]) -> Floats:
    """(n,) mean of the chosen values before each place; 0 before the first of them."""
    count: NDArray[np.int64] = np.cumsum(chosen) - chosen
    total = np.cumsum(np.where(chosen, values, 0.0)) - np.where(chosen, values, 0.0)
    means: Floats = np.clip(total / np.maximum(count, 1), 0.0, 1.0)  # rounding may leave [0, 1]
    return means


def ratio_p_value(counts: Sequence[int], shares: Sequence[float]) -> float:
    """P-value, valid at any time, of the hypothesis that users fall into arms by these shares.

    Lindon and Malek, "Anytime-valid inference for multinomial count data" (2022): the inverse Bayes
    factor against shares that are uniform on the simplex.
    """
    observed, expected = np.asarray(counts, dtype=float), np.asarray(shares)
    log_factor = (
        gammaln(len(observed))
        - gammaln(len(observed) + observed.sum())
        + gammaln(1 + observed).sum()
        - (observed * np.log(expected)).sum()
    )
    return float(np.exp(-max(0.0, log_factor)))
