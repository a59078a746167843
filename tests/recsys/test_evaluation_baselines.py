"""Baselines against brute force on small data, and against known figures on the real one."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from recsys.evaluation.baselines import Popularity, Repeats, fit_baselines, item_knn
from recsys.interactions import Histories
from recsys.retrieval import ItemItem, PairRules

ITEMS = 8
histories = st.lists(st.lists(st.integers(0, ITEMS - 1), max_size=9), min_size=1, max_size=7).map(
    Histories.of
)


def dense_cosine(trained):
    users = [set(map(int, history)) for history in trained]
    weights = np.zeros((ITEMS, ITEMS))
    for a in range(ITEMS):
        for b in range(ITEMS):
            common = sum(a in user and b in user for user in users)
            each = [sum(item in user for user in users) for item in (a, b)]
            if a != b and common:
                weights[a, b] = common / (np.sqrt(each[0] * each[1]) + 10)
    return weights


def dense_pairs(trained, ends, rules):
    weights, counts = np.zeros((ITEMS, ITEMS)), np.zeros(ITEMS)
    for n, history in enumerate(trained):
        for i, a in enumerate(history):
            counts[a] += 1
            for j in range(i + 1, min(i + rules.window + 1, len(history))):
                b, first = history[j], trained.offsets[n]
                if ends is None or ends[first + j]:
                    weights[a, b] += (j - i) ** -rules.fading
                    weights[b, a] += rules.reverse * (j - i) ** -rules.fading
    sources = np.maximum(counts + rules.source_offset, 1) ** rules.source_damping
    targets = np.maximum(counts + rules.target_offset, 1) ** rules.target_damping
    return weights / sources[:, None] / targets[None]


def dense_rank(weights, decay, asked, exclude_seen):
    """(n, items) scores, 0 where an item is not to be listed."""
    scores = np.zeros((len(asked), ITEMS))
    for row, history in enumerate(asked):
        for age, item in enumerate(history[::-1]):
            scores[row] += decay**age * weights[item]
        if exclude_seen:
            scores[row, history] = 0
    return scores


def assert_ranked(found, scores):
    """Lists hold every item with a score, in falling order; near ties may swap in float32."""
    for items, listed, row in zip(*found, scores, strict=True):
        n = min((row > 0).sum(), len(items))
        assert (items[:n] >= 0).all()
        assert (items[n:] == -1).all()
        assert np.isneginf(listed[n:]).all()
        assert len(set(items[:n].tolist())) == n
        assert listed[:n] == pytest.approx(row[items[:n]], rel=1e-4)
        assert listed[:n] == pytest.approx(np.sort(row)[::-1][:n], rel=1e-4)


@given(histories)
def test_item_knn_equals_its_dense_twin(trained):
    for at_a_time in (3, ITEMS):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("recsys.evaluation.baselines.ITEMS_AT_A_TIME", at_a_time)
            weights = item_knn(trained, ITEMS).weights.toarray()
        assert weights == pytest.approx(dense_cosine(trained), rel=1e-5)


rules = st.builds(
    PairRules,
    st.integers(1, 6),
    st.sampled_from([0.0, 0.5, 1.0]),
    st.floats(0, 1).map(lambda x: round(x, 2)),  # no subnormal weights: they vanish in float32
    *(st.sampled_from(values) for values in ([0.0, 0.5, 1.0], [0, 10], [0.0, 0.2], [0, 3])),
    st.floats(0.3, 1),
)


@given(histories, histories, st.booleans(), rules, st.data())
def test_pair_rules_equal_their_dense_twin(trained, asked, exclude_seen, rules, data):
    total = len(trained.items)
    masks = st.lists(st.booleans(), min_size=total, max_size=total).map(np.array)
    ends = data.draw(st.none() | masks.map(lambda mask: mask.astype(np.bool_)))
    model = ItemItem.count(trained, ITEMS, rules, ends)
    weights = dense_pairs(trained, ends, rules)
    assert model.weights.toarray() == pytest.approx(weights, rel=1e-5)
    scores = dense_rank(weights, rules.decay, asked, exclude_seen)
    assert_ranked(model.rank(asked, 5, exclude_seen), scores)


@given(histories, histories, st.booleans())
def test_popularity_equals_its_slow_twin(trained, asked, exclude_seen):
    counts = np.bincount(trained.items, minlength=ITEMS)
    items, scores = Popularity.fit(trained, ITEMS).rank(asked, 5, exclude_seen)
    for row, history in enumerate(asked):
        banned = set(history.tolist()) if exclude_seen else set()
        order = sorted((-counts[i], i) for i in range(ITEMS) if counts[i] and i not in banned)
        expected = [i for _, i in order[:5]]
        assert items[row].tolist() == expected + [-1] * (5 - len(expected))
        assert scores[row, : len(expected)].tolist() == [counts[i] for i in expected]
        assert np.isneginf(scores[row, len(expected) :]).all()


def test_equal_scores_go_to_the_lower_item():
    model = item_knn(Histories.of([[3, 5, 1, 4]]), 6)
    assert model.rank(Histories.of([[4]]), 4, exclude_seen=True)[0].tolist() == [[1, 3, 5, -1]]


@given(histories, histories, st.booleans(), st.integers(1, 4))
def test_repeats_equal_their_slow_twin(asked, hidden, exclude_seen, k):
    hidden = hidden.take(np.arange(len(asked)) % len(hidden))
    items, scores = Repeats().rank(replace(asked, hidden=hidden), k, exclude_seen)
    for row, history in enumerate(asked):
        banned = set(hidden[row].tolist()) | (set(history.tolist()) if exclude_seen else set())
        latest = dict.fromkeys(i for i in history[::-1].tolist() if i not in banned)
        expected = list(latest)[:k]
        assert items[row].tolist() == expected + [-1] * (k - len(expected))
        assert scores[row, : len(expected)] == pytest.approx(
            [1 / (1 + i) for i in range(len(expected))]
        )


def test_recent_popularity_counts_old_events_less():
    """Item 0 has three old events, item 1 two new ones: a half-life is a thirtieth of the time."""
    trained, times = Histories.of([[0, 0, 1], [0, 1]]), np.array([0, 10, 3000, 20, 2900])
    ranker = fit_baselines(trained, 3, times)["recent popularity"]
    items, scores = ranker.rank(Histories.of([[]]), 3, True)
    assert items.tolist() == [[1, 0, -1]]
    assert scores[0, 0] == pytest.approx(1 + 0.5)


def test_heuristics_of_times_and_repeats_need_times_and_repeats():
    names = ["popularity", "item-kNN", "directional", "successors"]
    assert list(fit_baselines(Histories.of([[0, 1], [0]]), 2)) == names
    assert list(fit_baselines(Histories.of([[0, 1], [0]]), 2, np.array([5, 5, 5]))) == names
    assert list(fit_baselines(Histories.of([[0, 1, 0]]), 2)) == [*names, "repeats"]
