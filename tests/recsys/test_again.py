"""Buying again: values of the items of a history, by a reference in plain Python."""

import math
from dataclasses import replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from recsys.interactions import Behaviour, Histories
from recsys.retrieval.again import PRIOR, Chosen, Repeats, that_count
from recsys.retrieval.reranker import AGAIN_VALUES, Reranker

ITEMS = 6
histories = st.lists(st.lists(st.integers(0, ITEMS - 1), max_size=12), min_size=1, max_size=4)


def places(history, item):
    return [place for place, other in enumerate(history) if other == item]


def mean_gap(own):
    return max((own[-1] - own[0]) / (len(own) - 1), 1)


def slow_counts(trained):
    """Log-odds of a repeat and logarithm of the usual gap, of each item and of an unknown one."""
    owned = [(i, places(h, i)) for h in trained for i in range(ITEMS) if i in h]
    again = [(i, len(own) - 1, mean_gap(own)) for i, own in owned if len(own) > 1]
    share = sum(n for _, n, _ in again) / sum(map(len, trained))
    usual = sum(n * math.log(gap) for _, n, gap in again) / sum(n for _, n, _ in again)
    rates, gaps = [], []
    for item in range(ITEMS + 1):
        times = sum(n for i, n, _ in again if i == item)
        events = sum(len(own) for i, own in owned if i == item)
        rate = (times + PRIOR * share) / (events + PRIOR)
        logs = sum(n * math.log(gap) for i, n, gap in again if i == item)
        rates.append(math.log(rate / (1 - rate)))
        gaps.append((logs + PRIOR * usual) / (times + PRIOR))
    return rates, gaps


def slow_values(history, item, rates, gaps):
    """The values in `AGAIN_VALUES`."""
    own = places(history, item)
    if not own:
        return [0.0] * len(AGAIN_VALUES)
    since, n, known = math.log(len(history) - own[-1]), len(own), min(item, ITEMS)
    usual = ((n - 1) * math.log(mean_gap(own)) if n > 1 else 0.0) + gaps[known]
    late = since - usual / n
    return [1.0, math.log(n), since, rates[known], late, max(late, 0.0)]


@settings(deadline=None)
@given(histories)
def test_counts_are_those_of_plain_python(trained):
    repeats = Repeats.count(Histories.of(trained), ITEMS)
    if all(len(set(history)) == len(history) for history in trained):
        assert repeats is None
    else:
        rates, gaps = slow_counts(trained)
        np.testing.assert_allclose(repeats.rates, rates)
        np.testing.assert_allclose(repeats.gaps, gaps, atol=1e-12)


@settings(deadline=None)
@given(st.lists(st.lists(st.integers(0, ITEMS + 2), max_size=12), min_size=1, max_size=4))
def test_values_are_those_of_plain_python_alone_and_together(asked):
    rates, gaps = np.linspace(-1, 1, ITEMS + 1), np.linspace(0, 3, ITEMS + 1)
    repeats, items = Repeats(rates, gaps), np.tile(np.arange(-1, ITEMS + 3), (len(asked), 1))
    found = repeats.values(Chosen.of(Histories.of(asked)), items)
    assert list(found) == list(AGAIN_VALUES)
    for row, history in enumerate(asked):
        expected = [slow_values(history, item, rates, gaps) for item in items[row]]
        values = np.stack([found[name][row] for name in AGAIN_VALUES], axis=-1)
        np.testing.assert_allclose(values, expected, atol=1e-12)
        alone = repeats.values(Chosen.of(Histories.of([history])), items[:1])
        for name in AGAIN_VALUES:
            np.testing.assert_array_equal(alone[name][0], found[name][row])


@settings(deadline=None)
@given(histories, st.integers(1, 4), st.integers(0, 5))
def test_the_best_are_those_of_most_events_that_are_free(asked, k, seed):
    blocked = np.random.default_rng(seed).random((len(asked), ITEMS)) < 0.3
    best = Chosen.of(Histories.of(asked)).best(len(asked), k, blocked)
    for row, history in enumerate(asked):
        ages = {item: places(history[::-1], item) for item in history}
        free = [item for item in sorted(ages) if not blocked[row, item]]
        order = sorted(free, key=lambda item: (-len(ages[item]), ages[item][0]))
        expected = (order + [-1] * k)[:k]
        assert best[row].tolist() == expected


def test_with_types_only_what_counts_as_seen_is_chosen_again():
    types = (Behaviour("view", "context", 0.2), Behaviour("purchase", "target", 1.0))
    asked = replace(Histories.of([[0, 1, 0, 1, 2]]), behaviours=np.array([0, 1, 1, 1, 0], np.uint8))
    chosen = Chosen.of(that_count(asked, types))
    assert chosen.item.tolist() == [0, 1]
    assert chosen.count.tolist() == [1, 2]
    assert chosen.age.tolist() == [1, 0]
    values = {name: np.ones((1, 2)) for name in ("seen:view", *AGAIN_VALUES)}
    values["again"][0, 1] = 0
    reranker = Reranker({"seen:view": 1.0, "again.count": 2.0, "again.seen:view": 4.0})
    assert reranker.score(values, np.ones((1, 2), np.bool_)).tolist() == [[6.0, 1.0]]
