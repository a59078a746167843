"""Unique assignment: optimal where it can be checked, minimal everywhere."""

from itertools import permutations
from math import prod

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recsys.semantic_ids.assign import assign_unique
from recsys.semantic_ids.quantizer import residual_codes


def random_case(seed: int, items: int, sizes: list[int], spread: float = 1.0):
    rng = np.random.default_rng(seed)
    centroids = [
        (rng.standard_normal((size, 2)) * 0.5**level).astype(np.float32)
        for level, size in enumerate(sizes)
    ]
    latents = (rng.standard_normal((items, 2)) * spread).astype(np.float32)
    return residual_codes(latents, centroids), latents, centroids


def loads(codes, depth):
    """How many items share each item's prefix of `depth` codes."""
    _, inverse, counts = np.unique(
        codes[:, :depth], axis=0, return_inverse=True, return_counts=True
    )
    return counts[inverse.reshape(-1)]


def colliding(codes):
    """Whether each item's whole tuple is another's too."""
    return loads(codes, codes.shape[1]) > 1


def test_two_items_on_one_leaf_move_the_one_that_loses_less():
    centroids = np.array([[[0.0], [10.0]], [[0.0], [1.0]]], np.float32)
    latents = np.array([[0.1], [0.4]], np.float32)  # both nearest to code (0, 0)
    codes = residual_codes(latents, centroids)
    assert codes.tolist() == [[0, 0], [0, 0]]
    assert assign_unique(codes, latents, centroids).tolist() == [[0, 0], [0, 1]]


@given(seed=st.integers(0, 10_000), items=st.integers(2, 5))
@settings(max_examples=40, deadline=None)
def test_a_prefix_is_spread_at_the_lowest_cost_of_all_ways(seed, items):
    codes, latents, centroids = random_case(seed, items, [6])
    movers = np.flatnonzero(colliding(codes))
    free = sorted(set(range(6)) - {int(c) for c in codes[~colliding(codes), 0]})
    cost = ((latents[:, None] - centroids[0]) ** 2).sum(-1)
    best = min(
        sum(cost[i, c] for i, c in zip(movers, choice, strict=True))
        for choice in permutations(free, len(movers))
    )
    out = assign_unique(codes, latents, centroids)
    assert sum(cost[i, out[i, 0]] for i in movers) == pytest.approx(best, rel=1e-5, abs=1e-6)


@given(
    seed=st.integers(0, 10_000),
    items=st.integers(0, 60),
    sizes=st.lists(st.integers(2, 5), min_size=1, max_size=4),
    spread=st.sampled_from([0.0, 0.2, 3.0]),
)
@settings(max_examples=150, deadline=None)
def test_rows_are_unique_whenever_the_catalog_fits(seed, items, sizes, spread):
    codes, latents, centroids = random_case(seed, items, sizes, spread)
    original = codes.copy()
    out = assign_unique(codes, latents, centroids)
    np.testing.assert_array_equal(codes, original)  # the argument is left alone
    assert out.shape == codes.shape
    assert out.dtype == np.int32
    assert ((out >= 0) & (out < sizes)).all()
    assert len(np.unique(out, axis=0)) == min(items, prod(sizes))


@given(
    seed=st.integers(0, 10_000),
    items=st.integers(2, 40),
    sizes=st.lists(st.sampled_from([3, 5, 9]), min_size=1, max_size=4),
    spread=st.sampled_from([0.1, 1.0, 3.0]),
)
@settings(max_examples=100, deadline=None)
def test_items_that_fit_are_not_moved(seed, items, sizes, spread):
    codes, latents, centroids = random_case(seed, items, sizes, spread)
    overfull = np.zeros(items, bool)
    for depth in range(len(sizes)):
        overfull |= loads(codes, depth) > prod(sizes[depth:])
    out = assign_unique(codes, latents, centroids)
    if not overfull.any():
        kept = ~colliding(codes)
        np.testing.assert_array_equal(out[kept], codes[kept])
        np.testing.assert_array_equal(out[:, :-1], codes[:, :-1])  # only the last level moved


def test_a_prefix_is_full_when_its_own_leaves_are():
    centroids = [np.array([[0.0], [4.0], [8.0]], np.float32), np.array([[0.0], [1.0]], np.float32)]
    latents = np.array([[0.0], [0.1], [1.0], [8.0]], np.float32)
    codes = residual_codes(latents, centroids)
    assert codes.tolist() == [[0, 0], [0, 0], [0, 1], [2, 0]]
    # Three first codes have two leaves each: one of three items goes to the next first code.
    assert assign_unique(codes, latents, centroids).tolist() == [[0, 0], [0, 1], [1, 0], [2, 0]]
