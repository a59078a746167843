"""Windows become batches: every question once, in rows under a budget, in a repeatable order."""

from collections import Counter
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recsys.interactions import Histories
from recsys.prompts import PromptConfig, PromptEncoder
from recsys.training.batches import TrainingBatches
from recsys.training.soft_labels import SoftLabels

L = 2
TOKENS = np.arange(40).reshape(20, L) + 2  # item i is (2i + 2, 2i + 3)


def batches(histories, *, window=4, block=2, **settings):
    values = {"prefix": (1,), "pad": 0, "max_tokens": 40, "seed": 0, **settings}
    return TrainingBatches.of(
        Histories.of(histories), PromptConfig(window, block), TOKENS, **values
    )


def equal(a, b):
    return len(a) == len(b) and all(
        np.array_equal(x.tokens, y.tokens) and np.array_equal(x.loss, y.loss)
        for x, y in zip(a, b, strict=True)
    )


def test_a_sample_keeps_whole_windows_with_their_labels():
    data = batches([[i, i + 1, i + 2] for i in range(10)])
    few = data.sample(0.3)
    assert len(few.windows.first) == 3
    rows = {tuple(row) for batch in data.epoch(0) for row in batch.tokens.tolist()}
    kept = {tuple(row) for batch in few.epoch(0) for row in batch.tokens.tolist()}
    assert len(kept) == 3
    assert kept < rows
    assert few.items is data.items
    assert len(data.sample(1e-9).windows.first) == 1


HISTORIES = st.lists(st.lists(st.integers(0, 19), max_size=14), min_size=1, max_size=8)


@settings(max_examples=60, deadline=None)
@given(HISTORIES, st.integers(1, 6), st.integers(10, 80))
def test_each_item_is_predicted_once_from_serving_context(histories, window, max_tokens):
    block = max(1, window // 2)
    data = batches(histories, window=window, block=block, max_tokens=max_tokens)
    asked = Counter()
    for batch in data.epoch(0):
        for tokens, loss in zip(batch.tokens.tolist(), batch.loss, strict=True):
            for end in np.flatnonzero(loss)[::L]:
                asked[tuple(tokens[: end + L])] += 1
    encoder = PromptEncoder(TOKENS, (1,), PromptConfig(window, block))
    expected = Counter(
        (*encoder.encode(h[:n]).tolist(), *TOKENS[h[n]].tolist())
        for h in histories
        for n in range(1, len(h))
    )
    assert asked == expected


@settings(max_examples=60, deadline=None)
@given(HISTORIES, st.integers(1, 60), st.floats(0, 0.9))
def test_a_batch_keeps_its_budget_unless_it_is_a_single_row(histories, max_tokens, dropout):
    for batch in batches(histories, max_tokens=max_tokens, item_dropout=dropout).epoch(0):
        assert batch.tokens.size <= max_tokens or len(batch.tokens) == 1
        assert batch.loss.any(axis=1).all(), "a row that asks nothing is waste"


def long_histories():
    rng = np.random.default_rng(0)
    return [rng.integers(0, 20, rng.integers(2, 12)).tolist() for _ in range(60)]


def test_an_epoch_resumed_in_the_middle_has_the_same_batches():
    data = batches(long_histories(), item_dropout=0.3)
    whole = list(data.epoch(1))
    assert len(whole) == data.count(1)
    for start in (0, 1, len(whole) - 1, len(whole)):
        assert equal(list(data.epoch(1, start)), whole[start:])


def test_batches_group_similar_lengths_in_random_order():
    data = batches(long_histories(), window=20, block=8, max_tokens=100)
    widths = [batch.tokens.shape[1] for batch in data.epoch(0)]
    assert widths != sorted(widths)
    padding = np.mean([(b.tokens == 0).mean() for b in data.epoch(0)])
    assert padding < 0.15
    spans = sorted(
        (min(w), max(w)) for w in [((b.tokens != 0).sum(1).tolist()) for b in data.epoch(0)]
    )
    assert all(a[1] <= b[0] + L * 2 for a, b in pairwise(spans))


def test_item_dropout_leaves_out_that_share_of_items():
    data = batches([list(range(20))] * 200, window=20, block=8, item_dropout=0.25)
    kept = sum(int((b.tokens > 1).sum()) for b in data.epoch(0)) / L
    assert kept / (200 * 20) == pytest.approx(0.75, abs=0.03)


def test_dropped_context_does_not_shift_the_loss():
    # Two windows: 0 to 4, and 2 to 5 which asks only for 5.
    data = batches([[0, 1, 2, 3, 4, 5]], item_dropout=0.4)
    for epoch in range(30):
        for batch in data.epoch(epoch):
            for tokens, loss in zip(batch.tokens, batch.loss, strict=True):
                items = ((tokens[1:][tokens[1:] > 0] - 2) // L)[::L].tolist()
                asked = ((tokens[loss] - 2) // L)[::L].tolist()
                assert items == sorted(items), "order is kept"
                assert asked == [5] if 5 in items else asked == [i for i in items if i > 0]


def test_soft_labels_stand_beside_the_asked_items_in_their_order():
    histories = [[5, 7, 9], [3, 4]]
    labels = SoftLabels(
        np.array([[0, 1], [2, -1], [3, 4], [0, 0], [6, 7]], np.int32),
        np.array([[0.5, 0.5], [1, 0], [0.7, 0.3], [0, 0], [0.6, 0.4]], np.float32),
    )
    (batch,) = replace(batches(histories), soft=labels).epoch(0)
    tokens, shares = batch.soft
    asked = batch.tokens[batch.loss].reshape(-1, L)
    wanted = {7: 1, 9: 2, 4: 4}  # item -> its event
    for own, label, share in zip(asked, tokens, shares, strict=True):
        event = wanted[(own[0] - 2) // L]
        real = labels.items[event] >= 0
        assert (label[real] == TOKENS[labels.items[event][real]]).all()
        assert share.tolist() == labels.shares[event].tolist()
    assert len(batch.inputs) == 4
