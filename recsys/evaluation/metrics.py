"""Metrics of ranked lists, one number per user, and their bootstrap intervals.

Hits are item-level: another item with the same semantic ID is not a hit.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import sparse

from recsys.interactions import Histories

NORMAL_95 = 1.96  # standard errors to the ends of a 95 % interval
RESAMPLES_AT_A_TIME = 64  # bounds memory: 64 * users counts


@dataclass(frozen=True)
class Hits:
    """Which places of the ranked lists contain a target.

    >>> hits = Hits.of([[4, 7, 2], [1, 0, 5]], targets=Histories.of([[7], [5, 9]]))
    >>> hits.is_hit.tolist()
    [[False, True, False], [False, False, True]]
    >>> recall_at_k(hits, 3).tolist(), mrr_at_k(hits, 2).tolist()
    ([1.0, 0.5], [0.5, 0.0])

    Attributes:
        is_hit: (n, k) bool.
        num_targets: (n,) int64 distinct targets of each user, at least 1.
    """

    is_hit: NDArray[np.bool_]
    num_targets: NDArray[np.int64]

    @classmethod
    def of(cls, ranked: ArrayLike, targets: Histories) -> Hits:
        """Compare (n, k) ranked dense items with n non-empty sequences of targets.

        Lists are best first, without repetition, padded with -1; a repeated target counts once.

        Raises:
            ValueError: shapes that do not fit, a user without a target, or a negative target.
        """
        ranked = np.asarray(ranked, np.int64)
        if ranked.ndim != 2 or len(ranked) != len(targets):
            raise ValueError(f"ranked {ranked.shape} for {len(targets)} users; want (users, k)")
        if (targets.lengths == 0).any():
            raise ValueError(f"user {int(targets.lengths.argmin())} has no target")
        if targets.items.min(initial=0) < 0:
            raise ValueError("targets must be dense items, not negative")
        # A (user, item) pair is one integer, so that one sorted search finds all pairs.
        stride = 1 + max(ranked.max(initial=0), int(targets.items.max(initial=0)))
        target_keys = np.unique(targets.rows * stride + targets.items)
        shown = np.arange(len(ranked))[:, None] * stride + ranked
        position = np.searchsorted(target_keys, shown).clip(max=max(len(target_keys) - 1, 0))
        is_hit = (target_keys[position] == shown) & (ranked >= 0)
        return cls(is_hit, np.bincount(target_keys // stride, minlength=len(ranked)))

    def top(self, k: int) -> NDArray[np.bool_]:
        """(n, k) the first k places; ValueError if the lists are shorter."""
        if not 1 <= k <= self.is_hit.shape[1]:
            raise ValueError(f"k = {k}, but the ranked lists have {self.is_hit.shape[1]} places")
        return self.is_hit[:, :k]


def recall_at_k(hits: Hits, k: int) -> NDArray[np.float64]:
    """(n,) share of each user's targets among the first k."""
    return np.asarray(hits.top(k).sum(axis=1) / hits.num_targets)


def ndcg_at_k(hits: Hits, k: int) -> NDArray[np.float64]:
    """(n,) sum of 1/log2(1 + rank) over the hits, divided by that of the ideal list of length k."""
    gain = 1 / np.log2(np.arange(2, k + 2))
    ideal = np.cumsum(gain)[hits.num_targets.clip(max=k) - 1]
    return np.asarray((hits.top(k) @ gain) / ideal)


def mrr_at_k(hits: Hits, k: int) -> NDArray[np.float64]:
    """(n,) 1/rank of the first hit among the first k, or 0."""
    first_hit = hits.top(k)
    return np.where(first_hit.any(axis=1), 1 / (1 + first_hit.argmax(axis=1)), 0.0)


def coverage_at_k(ranked: NDArray[np.int32], k: int, num_items: int) -> float:
    """Share of the catalog that is among the first k items of any user."""
    shown = np.unique(ranked[:, :k])
    return float((shown >= 0).sum() / num_items)


def coverage_gap(mine: NDArray[np.int32], theirs: NDArray[np.int32], share: float) -> Interval:
    """Items in the lists of one recommender, minus a share of those in another's, in items.

    The 95 % interval over users is the jackknife's, as for numbers of species (Burnham and Overton
    1978): an item leaves the lists together with the only user who has it. A bootstrap would lose
    such items in every draw. The jackknife is rather too wide than too narrow (Efron and Stein
    1981).

    Args:
        mine: (n, k) items, -1 for padding; no list has an item twice.
        theirs: (n, w) the same of the other, for the same users.
        share: of the other's items that is subtracted.
    """
    gap, alone = 0.0, np.zeros(len(mine))
    for ranked, weight in ((mine, 1.0), (theirs, -share)):
        there = ranked >= 0
        users = np.bincount(ranked[there], minlength=1)
        gap += weight * np.count_nonzero(users)
        alone += weight * (there & (users[ranked] == 1)).sum(axis=1)
    half = NORMAL_95 * float(alone.std()) * (len(alone) - 1) ** 0.5
    return Interval(*(round(value, 2) for value in (gap, gap - half, gap + half)))


def short_share_at_k(ranked: NDArray[np.int32], k: int) -> float:
    """Share of users with fewer than k items."""
    return float(((ranked[:, :k] >= 0).sum(axis=1) < k).mean()) if len(ranked) else 0.0


def gini_at_k(ranked: NDArray[np.int32], k: int, num_items: int) -> float:
    """Gini coefficient of how often items are among the first k: 0 if all are equally often.

    G = sum_i (2 i - n - 1) x_i / (n sum x) over all n items' counts x, ascending, i from 1.
    """
    shown = ranked[:, :k]
    counts = np.sort(np.bincount(shown[shown >= 0], minlength=num_items))
    if not counts.any():
        return 0.0
    weights = 2 * np.arange(1, num_items + 1) - num_items - 1
    return float(weights @ counts / (num_items * counts.sum()))


def novelty_at_k(ranked: NDArray[np.int32], k: int, popularity: NDArray[np.int64]) -> float:
    """Mean of -log2 of an item's share of training events, over the items shown, in bits.

    One event is added to every item, so that unseen items have a share, too.
    """
    share = (popularity + 1) / (popularity + 1).sum()
    shown = ranked[:, :k]
    return float(-np.log2(share[shown[shown >= 0]]).mean()) if (shown >= 0).any() else 0.0


def diversity_at_k(ranked: NDArray[np.int32], k: int, vectors: NDArray[np.floating]) -> float:
    """1 - mean cosine of the pairs of a list's first k items, the mean over lists with two or more.

    Lists are padded with -1; (items, D) vectors have length 1, or 0.
    """
    shown = ranked[:, :k] >= 0
    length = shown.sum(axis=1)
    ends = np.append(0, np.cumsum(length))
    items = ranked[:, :k][shown]
    shape = (len(ranked), len(vectors))
    pick = sparse.csr_array((np.ones(len(items), vectors.dtype), items, ends), shape=shape)
    whole = pick @ vectors
    own = pick @ np.einsum("nd,nd->n", vectors, vectors)
    together = np.einsum("nd,nd->n", whole, whole) - own  # each pair twice
    several = length > 1
    apart = 1 - together[several] / (length * (length - 1))[several]
    return float(apart.mean()) if len(apart) else 0.0


@dataclass(frozen=True)
class Interval:
    """A mean over users and its bootstrap interval."""

    mean: float
    low: float
    high: float


def resampled_means(
    values: NDArray[np.float64], *, resamples: int = 1000, seed: int = 0
) -> NDArray[np.float64]:
    """(R, m) means of (n, m) values over users drawn with replacement R times (Efron's bootstrap).

    All columns share the draws, so a difference of two columns is a paired bootstrap. Equal seeds
    and n draw the same users.
    """
    n = len(values)
    if n == 0:
        return np.full((resamples, values.shape[1]), np.nan)
    rng = np.random.default_rng(seed)
    # Float32 has a relative error of 1e-6, which is enough for an interval, and is twice as fast.
    narrow = values.astype(np.float32)
    means = []
    for start in range(0, resamples, RESAMPLES_AT_A_TIME):
        rows = min(RESAMPLES_AT_A_TIME, resamples - start)
        drawn = rng.integers(n, size=(rows, n)) + np.arange(rows)[:, None] * n
        times = np.bincount(drawn.ravel(), minlength=rows * n).reshape(rows, n)
        means.append((times.astype(np.float32) @ narrow).astype(np.float64) / n)
    return np.concatenate(means)


def interval(mean: float, means: NDArray[np.float64]) -> Interval:
    """95 % percentile interval of (R,) resampled means, with the measured mean."""
    low, high = np.quantile(means, [0.025, 0.975])
    return Interval(*(round(float(value), 6) for value in (mean, low, high)))


def bootstrap(values: ArrayLike, *, resamples: int = 1000, seed: int = 0) -> Interval:
    """Mean of one number per user, (n,), with its percentile bootstrap interval."""
    column = np.asarray(values, np.float64)[:, None]
    means = resampled_means(column, resamples=resamples, seed=seed)
    return interval(float(column.mean()), means[:, 0])


def paired_bootstrap(
    a: ArrayLike, b: ArrayLike, *, resamples: int = 1000, seed: int = 0
) -> Interval:
    """Mean difference a - b of two recommenders over the same users, with its interval.

    If the interval excludes 0, the sampling of users alone does not explain the difference.

    Raises:
        ValueError: the lengths differ.
    """
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    if a.shape != b.shape:
        raise ValueError(f"{a.shape} and {b.shape}: a pair is two numbers of one user")
    return bootstrap(a - b, resamples=resamples, seed=seed)
