"""Metrics: a slow twin, numbers written by hand, properties, and whether intervals hold."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from recsys.evaluation.metrics import (
    RESAMPLES_AT_A_TIME,
    Hits,
    bootstrap,
    coverage_at_k,
    diversity_at_k,
    gini_at_k,
    mrr_at_k,
    ndcg_at_k,
    novelty_at_k,
    paired_bootstrap,
    recall_at_k,
    resampled_means,
    short_share_at_k,
)
from recsys.interactions import Histories

METRICS = (recall_at_k, ndcg_at_k, mrr_at_k)
ITEMS, WIDTH = 9, 6


@st.composite
def rankings(draw):
    """Lists of distinct items with padding behind, and one to four targets a user."""
    users = draw(st.integers(1, 6))
    ranked = np.full((users, WIDTH), -1, np.int32)
    targets = []
    for row in range(users):
        items = draw(st.lists(st.integers(0, ITEMS - 1), max_size=WIDTH, unique=True))
        ranked[row, : len(items)] = items
        targets.append(draw(st.lists(st.integers(0, ITEMS - 1), min_size=1, max_size=4)))
    return ranked, targets


def slow(metric, ranked, targets, k):
    """The definitions, a place at a time."""
    wanted = set(targets)
    found = [item in wanted for item in ranked[:k]]
    if metric is recall_at_k:
        return sum(found) / len(wanted)
    if metric is mrr_at_k:
        return next((1 / (i + 1) for i, hit in enumerate(found) if hit), 0.0)
    gain = sum(hit / math.log2(i + 2) for i, hit in enumerate(found))
    return gain / sum(1 / math.log2(i + 2) for i in range(min(k, len(wanted))))


def test_padding_is_never_a_hit():
    """As one integer a (user, item) pair, user 1's padding equals user 0's largest item."""
    ranked = [[8, -1], [-1, -1], [-1, -1]]
    hits = Hits.of(ranked, Histories.of([[8], [8], [0]]))
    assert hits.is_hit.tolist() == [[True, False], [False, False], [False, False]]


@given(rankings(), st.integers(1, WIDTH))
def test_metrics_equal_the_slow_twin(case, k):
    ranked, targets = case
    hits = Hits.of(ranked, Histories.of(targets))
    for metric in METRICS:
        expected = [slow(metric, list(r), t, k) for r, t in zip(ranked, targets, strict=True)]
        assert metric(hits, k) == pytest.approx(expected)


def test_coverage_and_short_lists_written_by_hand():
    ranked = np.asarray([[0, 1, 2], [0, 3, -1], [0, -1, -1], [-1, -1, -1]], np.int32)
    assert coverage_at_k(ranked, 1, 10) == 0.1
    assert coverage_at_k(ranked, 3, 10) == 0.4
    assert short_share_at_k(ranked, 1) == 0.25
    assert short_share_at_k(ranked, 3) == 0.75


@pytest.mark.parametrize(
    ("ranked", "targets", "text"),
    [
        ([[1, 2]], [[1], [2]], "for 2 users"),
        ([1, 2], [[1], [2]], "want"),
        ([[1], [2]], [[1], []], "user 1 has no target"),
        ([[1]], [[-1]], "not negative"),
    ],
)
def test_what_cannot_be_measured_is_refused(ranked, targets, text):
    with pytest.raises(ValueError, match=text):
        Hits.of(ranked, Histories.of(targets))


def test_resampled_means_equal_the_slow_twin_beyond_one_block():
    values = np.random.default_rng(0).random((7, 2))
    resamples = RESAMPLES_AT_A_TIME + 3
    rng = np.random.default_rng(5)
    expected = []
    for rows in (RESAMPLES_AT_A_TIME, 3):
        expected += [values[drawn].mean(axis=0) for drawn in rng.integers(7, size=(rows, 7))]
    found = resampled_means(values, resamples=resamples, seed=5)
    assert found == pytest.approx(np.asarray(expected), abs=1e-6)


def test_intervals_cover_the_truth_about_as_often_as_they_say():
    """95 % of 300 intervals should hold .3; fewer than 90 % or all of them would be luck (1e-4)."""
    rng = np.random.default_rng(1)
    covered = 0
    for trial in range(300):
        found = bootstrap(rng.random(400) < 0.3, resamples=200, seed=trial)
        covered += found.low <= 0.3 <= found.high
    assert 270 <= covered < 300


def test_paired_intervals_show_a_difference_that_others_hide():
    """B hits where A hits and for 15 of 1,000 more users: a sure gain within the noise of users."""
    rng = np.random.default_rng(3)
    a = (rng.random(1000) < 0.3).astype(float)
    b = a.copy()
    b[np.flatnonzero(a == 0)[:15]] = 1
    gap = paired_bootstrap(b, a)
    assert gap.mean == pytest.approx(0.015)
    assert gap.low > 0
    assert bootstrap(a).high > bootstrap(b).low


def test_gini_is_0_for_equal_counts_and_near_1_for_a_single_item():
    assert gini_at_k(np.arange(10).reshape(5, 2), 2, 10) == pytest.approx(0)
    assert gini_at_k(np.zeros((7, 1), np.int32), 1, 10) == pytest.approx(0.9)
    # Counts 0, 1, 3: (-2 * 0 + 0 * 1 + 2 * 3) / (3 * 4).
    assert gini_at_k(np.array([[2, 1], [2, -1], [2, -1]]), 2, 3) == pytest.approx(0.5)
    assert gini_at_k(np.full((2, 2), -1), 2, 3) == 0


def test_novelty_is_the_mean_surprise_of_what_is_shown():
    popularity = np.array([3, 1, 0, 0])  # with one more each: 4, 2, 1, 1 of 8
    assert novelty_at_k(np.array([[0, 2], [1, -1]]), 2, popularity) == pytest.approx(
        (1 + 3 + 2) / 3
    )
    assert novelty_at_k(np.full((2, 2), -1), 2, popularity) == 0


def test_diversity_is_one_less_the_cosine_of_pairs():
    vectors = np.array([[1, 0], [0, 1], [1, 0], [0, 0]], np.float32)
    ranked = np.array([[0, 1, 2], [0, 2, -1], [1, -1, -1]])
    assert diversity_at_k(ranked, 1, vectors) == 0
    assert diversity_at_k(ranked, 3, vectors) == pytest.approx(((1 - 1 / 3) + 0) / 2)
