"""Soft labels against a slow twin that counts the other users' pairs one by one."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recsys.interactions import Histories
from recsys.training.soft_labels import SoftLabels

ITEMS = 8


def slow(histories, number):
    """{item: share} of event `number`, from all users but its own."""
    taken = [h.tolist() for h in histories]
    user = int(histories.rows[number])
    place = number - int(histories.offsets[user])
    counts = np.bincount(histories.items, minlength=ITEMS)
    evidence = {}
    for age, seen in enumerate(reversed(taken[user][:place])):
        for other, items in enumerate(taken):
            if other == user:
                continue
            for i, a in enumerate(items):
                for j, b in enumerate(items):
                    if i != j and abs(i - j) <= 5 and a == seen:
                        weight = (1 if j > i else 0.5) / abs(i - j)
                        weight *= 0.6**age / np.sqrt(counts[seen])
                        evidence[b] = evidence.get(b, 0) + weight
    evidence = {b: e for b, e in evidence.items() if b not in taken[user][:place]}
    return {b: e / sum(evidence.values()) for b, e in evidence.items()}


@settings(max_examples=40, deadline=None)
@given(st.lists(st.permutations(range(ITEMS)), min_size=1, max_size=5), st.data())
def test_they_are_what_other_users_took_after_such_a_history(orders, data):
    histories = Histories.of([o[: data.draw(st.integers(1, ITEMS))] for o in orders])
    labels = SoftLabels.of(histories, ITEMS, k=ITEMS)
    for event in range(len(histories.items)):
        real = labels.items[event] >= 0
        found = dict(
            zip(labels.items[event][real].tolist(), labels.shares[event][real], strict=True)
        )
        assert found == pytest.approx(slow(histories, event), abs=1e-5)
        assert not labels.shares[event][~real].any()
        assert (np.diff(labels.shares[event]) <= 0).all(), "best first"


def test_only_the_best_are_kept_and_share_everything():
    labels = SoftLabels.of(Histories.of([[0, 7], [0, 1], [0, 1], [0, 2]]), ITEMS, k=1)
    assert labels.items[1].tolist() == [1]
    assert labels.shares[1].tolist() == [1.0]


@pytest.mark.parametrize("minutes", [None, 0.0, 5.0])
def test_labels_of_chosen_events_and_within_a_time_limit_are_those_of_all_or_none(minutes):
    rng = np.random.default_rng(0)
    histories = Histories.of([rng.integers(0, ITEMS, rng.integers(1, 7)) for _ in range(12)])
    whole, chosen = SoftLabels.of(histories, ITEMS), np.array([1, 4, 5, 20])
    some = SoftLabels.of(histories, ITEMS, minutes=minutes, events=chosen)
    labelled = chosen if minutes != 0 else chosen[:0]
    np.testing.assert_array_equal(some.items[labelled], whole.items[labelled])
    np.testing.assert_array_equal(some.shares[labelled], whole.shares[labelled])
    assert not np.delete(some.shares, labelled, axis=0).any()
