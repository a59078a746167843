"""The search for pair rules: its measure against full lists, and known best rules."""

import numpy as np
import pytest

from recsys.dataset import Examples
from recsys.interactions import Histories
from recsys.retrieval import ItemItem, PairRules, pair_search, search_rules
from recsys.retrieval.item_item import DIRECTIONAL

ITEMS = 40


def walks(gap, users=60, length=12, seed=0):
    """Random items, but each item is followed by the next number `gap` events later."""
    rng, found = np.random.default_rng(seed), []
    for _ in range(users):
        walk = rng.integers(0, ITEMS, length)
        for place in range(gap, length):
            walk[place] = (walk[place - gap] + 1) % ITEMS
        found.append(walk)
    return found


def examples_of(sequences):
    histories = Histories.of([walk[:-1] for walk in sequences])
    targets = Histories.of([walk[-1:] for walk in sequences])
    return Examples(np.arange(len(histories)), histories, targets)


def test_gains_are_those_of_full_lists(monkeypatch):
    monkeypatch.setattr(pair_search, "USERS_AT_A_TIME", 7)
    rng = np.random.default_rng(1)
    examples = examples_of([rng.integers(0, ITEMS, rng.integers(1, 9)) for _ in range(50)])
    model = ItemItem.count(Histories.of(walks(1)), ITEMS, PairRules(2, target_damping=0.3))
    lists, _ = model.rank(examples.histories, 10, exclude_seen=True)
    for items, target, gain in zip(
        lists.tolist(),
        examples.targets.items.tolist(),
        pair_search._gains(model, examples),
        strict=True,
    ):
        wanted = 1 / np.log2(items.index(target) + 2) if target in items else 0
        assert gain == pytest.approx(wanted)


def test_the_gap_of_the_pairs_that_predict_is_found():
    """Items lead to what comes three events later, and nothing to what comes directly after."""
    trained, asked = walks(3), examples_of(walks(3, seed=1))
    rules = search_rules(Histories.of(trained), ITEMS, asked)
    assert rules.window >= 3
    assert rules.reverse < DIRECTIONAL.reverse
    assert search_rules(Histories.of(trained), ITEMS, asked) == rules
    gains = [
        pair_search._gains(ItemItem.count(Histories.of(trained), ITEMS, r), asked).mean()
        for r in (DIRECTIONAL, rules)
    ]
    assert gains[1] > gains[0] + 0.05


def test_the_rules_are_the_usual_ones_without_time_users_or_a_gain():
    trained, asked = Histories.of(walks(3)), examples_of(walks(3, seed=1))
    assert search_rules(trained, ITEMS, asked, end=0.0) == DIRECTIONAL
    assert search_rules(trained, ITEMS, asked.take(np.arange(29))) == DIRECTIONAL
    rng = np.random.default_rng(2)
    at_random = examples_of([rng.permutation(ITEMS)[:4] for _ in range(30)])
    pairs = Histories.of([[item, (item + 1) % ITEMS] for item in range(ITEMS)])
    assert search_rules(pairs, ITEMS, at_random) == DIRECTIONAL
