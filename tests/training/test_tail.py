"""A share of the lists from the tail: the penalty that is chosen, and words where there is none."""

from dataclasses import replace

import numpy as np
import pytest

from recsys.errors import ConfigError
from recsys.retrieval.popularity import tail_of
from recsys.retrieval.reranker import MODEL, Reranker
from recsys.training import tail
from recsys.training.reranking import MISSED, Candidates, choose
from recsys.training.settings import RetrievalConfig
from recsys.training.tail import constrain, measure_frontier

ITEMS = 40


def test_the_head_holds_half_of_the_events():
    assert tail_of(np.array([6, 0, 3, 2, 1])).tolist() == [False, True, True, True, True]
    assert tail_of(np.array([2, 2, 2, 2])).tolist() == [False, False, True, True]
    assert tail_of(np.array([5, 3, 2])).tolist() == [False, True, True]
    assert tail_of(np.zeros(3)).tolist() == [True, True, True]


def make(users=50, width=25):
    """Candidates with a content value and the popularity of items 0 (most popular) to 39."""
    rng = np.random.default_rng(0)
    trained = np.arange(2 * ITEMS, 0, -2)
    items = np.stack([rng.permutation(ITEMS)[:width] for _ in range(users)]).astype(np.int32)
    items[:5, 20:] = -1
    popularity = np.log1p(trained)[items]
    values = {"content": rng.normal(size=items.shape), "popularity": popularity}
    targets = rng.integers(0, ITEMS, users).astype(np.int32)
    return Candidates(items, values, targets), trained


def test_without_a_penalty_the_network_is_the_one_that_was_measured():
    found, trained = make(users=500)
    scores = 3 * found.values["content"] * (found.values["popularity"] - 3)
    scores += np.random.default_rng(1).gumbel(size=scores.shape)
    best = np.where(found.there, scores, -np.inf).argmax(axis=1)
    found = replace(found, targets=found.items[np.arange(500), best])
    found = replace(found, values={name: found.values[name] for name in ("popularity", "content")})
    choice = choose(found, Reranker({}), {MODEL: np.full(500, MISSED)}, ablate=False)
    assert choice.reranker.network is not None
    points = measure_frontier(found, choice.scores, trained)
    assert points[0]["ndcg"] == choice.info["parts"]["reranker"]["ndcg@10"]


def test_each_point_is_what_a_plain_sort_gives():
    found, trained = make()
    reranker = Reranker({"content.value": 1.0, "popularity": 0.5})
    scores = reranker.score(found.values, found.there)
    points = measure_frontier(found, scores, trained)
    assert len(points) == len(tail.PENALTIES)
    # The head: 80 + 78 + ... until half of 1640 events are reached, the 12 most popular items.
    assert (~tail_of(trained)).sum() == 12
    for point in (points[0], points[10], points[-1]):
        shown, gains = [], []
        for items, content, popular, target in zip(
            found.items, found.values["content"], found.values["popularity"], found.targets,
            strict=True,
        ):  # fmt: skip
            scores = [
                (-(c + (0.5 - point["penalty"]) * p), i)
                for c, p, i in zip(content, popular, items, strict=True)
                if i >= 0
            ]
            first = [int(i) for _, i in sorted(scores)[:10]]
            shown += first
            rank = first.index(target) if target in first else None
            gains.append(0.0 if rank is None else 1 / np.log2(rank + 2))
        assert point["tail_share"] == pytest.approx(np.mean([i >= 12 for i in shown]), abs=1e-6)
        assert point["ndcg"] == pytest.approx(np.mean(gains), abs=1e-6)
        assert point["recall"] == pytest.approx(np.mean(np.array(gains) > 0), abs=1e-6)
        assert point["coverage"] == pytest.approx(len(set(shown)) / ITEMS, abs=1e-6)
        share = (trained + 1) / (trained + 1).sum()
        bits = -np.log2(share[shown]).mean()
        assert point["novelty"] == pytest.approx(bits, abs=1e-5)


def test_a_larger_penalty_never_takes_places_from_the_tail():
    found, trained = make()
    scores = np.where(found.there, found.values["content"], -np.inf)
    points = measure_frontier(found, scores, trained)
    shares = [point["tail_share"] for point in points]
    assert shares == sorted(shares)
    assert shares[-1] > shares[0]


POINTS = [
    {"penalty": p, "tail_share": share, "ndcg": ndcg}
    for p, share, ndcg in ((0.0, 0.1, 0.1), (0.1, 0.2, 0.0995), (0.2, 0.3, 0.099), (0.4, 0.5, 0.08))
]


def test_the_penalty_meets_both_bounds_with_the_highest_ndcg():
    reranker = Reranker({"content.value": 1.0, "popularity": 0.25})
    chosen, point = constrain(reranker, POINTS, 0.15, 0.02)
    assert point["penalty"] == 0.1
    assert chosen.weights == pytest.approx({"content.value": 1.0, "popularity": 0.15})
    assert constrain(Reranker({"content.value": 1.0}), POINTS, 0.3, 0.02)[0].weights == {
        "content.value": 1.0,
        "popularity": -0.2,
    }
    assert constrain(reranker, POINTS, 0.05, 0.02)[0].weights == reranker.weights


@pytest.mark.parametrize(
    ("share", "loss", "words"),
    [
        (0.4, 0.02, r"it costs 20\.0%.*at most 30\.0%"),
        (0.9, 0.5, r"no penalty reaches it.*at most 50\.0%"),
        (0.3, 0.0, r"it costs 1\.0%.*at most 10\.0%"),
    ],
)
def test_bounds_that_cannot_be_met_are_refused_in_words(share, loss, words):
    with pytest.raises(ConfigError, match=words):
        constrain(Reranker({"content.value": 1.0}), POINTS, share, loss)


@pytest.mark.parametrize("values", [{"tail_share": 1.0}, {"tail_share": -0.1}, {"tail_loss": 1.5}])
def test_shares_out_of_range_are_refused(values):
    with pytest.raises(ConfigError, match=next(iter(values))):
        RetrievalConfig(**values)
