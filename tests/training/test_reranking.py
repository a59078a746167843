"""Fitting the reranker: the right weights are found, and what is served is never below a part."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

from recsys.retrieval.reranker import (
    AGAIN,
    AGAIN_VALUES,
    MODEL,
    NEW,
    RANKED,
    SOURCES,
    Reranker,
    feature_matrix,
    rank_of,
)
from recsys.training import reranking
from recsys.training.reranking import (
    COST,
    MISSED,
    RAISE,
    Candidates,
    choose,
    cross_fit,
    fit,
    fit_again,
    fit_new,
    ranks_by,
)

SHAPE = Reranker({}, candidates=8, nodes=4)
USERS, WIDTH = 900, 12


def with_ranks(values: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The values, and ranks among the candidates as if they were the whole catalog."""
    ranks = {
        rank_of(source): (values[source][:, None] > values[source][:, :, None]).sum(-1)
        for source in RANKED
        if source in values
    }
    return values | ranks


def make(weights: dict[str, float], users: int = USERS, seed: int = 0) -> Candidates:
    """Users whose next item is drawn from the softmax of a weighted sum of values."""
    rng = np.random.default_rng(seed)
    items = np.stack([rng.permutation(50)[:WIDTH] for _ in range(users)]).astype(np.int32)
    values = with_ranks({source: rng.normal(size=items.shape) for source in SOURCES})
    scores = sum(weight * values[source] for source, weight in weights.items())
    noisy = scores + rng.gumbel(size=items.shape)
    targets = items[np.arange(users), noisy.argmax(axis=1)]
    return Candidates(items, values, targets)


def only(candidates: Candidates, *sources: str) -> Candidates:
    """The same candidates with the values of some sources."""
    values = {
        n: part for n, part in candidates.values.items() if n.removesuffix(".rank") in sources
    }
    return replace(candidates, values=values)


def test_the_weights_that_drew_the_items_are_found():
    found = make({"content": 2.0, "popularity": -1.0}, users=6000)
    fitted = fit(only(found, "content", "popularity"), SHAPE)
    assert (fitted.candidates, fitted.nodes) == (8, 4)
    names, features = feature_matrix(found.values, found.there, ["content", "popularity"])
    scores = features @ np.array([fitted.weights.get(name, 0) for name in names])
    drawn = 2 * found.values["content"] - found.values["popularity"]
    centred = [part - part.mean(axis=1, keepdims=True) for part in (scores, drawn)]
    assert np.corrcoef(*(part.ravel() for part in centred))[0, 1] > 0.99


def test_ranks_count_the_candidates_before_the_next_item():
    items = np.array([[4, 7, 9, -1], [1, 2, 3, 5], [1, 2, 3, -1]], np.int32)
    values = with_ranks({source: np.zeros(items.shape) for source in SOURCES})
    values["popularity"] = np.array([[1.0, 3, 2, 99], [5, 5, 7, 5], [1, 1, 1, 1]])
    found = Candidates(items, values, np.array([9, 5, 8], np.int32))
    by_popularity = Reranker({"popularity": 1.0}, 8, 4)
    assert ranks_by(found, by_popularity.score(values, items >= 0)).tolist() == [1, 3, MISSED]


def test_values_that_hardly_vary_get_no_huge_weight():
    found = make({"content": 2.0})
    little = np.random.default_rng(0).normal(-20, 0.3, size=found.items.shape)  # of log(2e-9)
    found = replace(found, values={**only(found, "content").values, MODEL: little})
    reranker = fit(found, SHAPE)
    scores = [r.score(found.values, found.there) for r in (reranker, reranker.without_model)]
    np.testing.assert_allclose(*scores, atol=0.01)


def test_users_are_ranked_by_what_was_fitted_on_others():
    found = make({"content": 1.0}, users=30)
    ranks = cross_fit(found, partial(fit, shape=SHAPE))
    fold = np.random.default_rng(0).permutation(30) % reranking.FOLDS
    for number in range(reranking.FOLDS):
        own = found.take(np.flatnonzero(fold == number))
        others = fit(found.take(np.flatnonzero(fold != number)), SHAPE)
        expected = ranks_by(own, others.score(own.values, own.there))
        assert ranks[fold == number].tolist() == expected.tolist()


def test_a_part_that_ranks_better_alone_is_served():
    found = make({MODEL: 3.0}, users=60)
    noise = np.random.default_rng(1)
    misled = Candidates(
        found.items,
        with_ranks({s: noise.normal(size=found.items.shape) for s in SOURCES}),
        found.targets,
    )
    ranks = np.zeros(60, np.int64)  # the model's own lists are perfect
    choice = choose(misled, SHAPE, {MODEL: ranks})
    info = choice.info
    assert (choice.reranker.weights, info["served"]) == ({}, MODEL)
    assert info["parts"]["served"] == {"ndcg@10": 1.0, "recall@10": 1.0}
    assert info["parts"]["reranker"]["ndcg@10"] < 1.0


def test_without_hits_the_weights_are_those_of_the_prior(monkeypatch):
    monkeypatch.setattr(reranking, "PRIOR", {"content": 0.5, "popularity": -2.0})
    found = make({"content": 2.0}, users=30)
    nothing = replace(found, targets=np.full(30, 99, np.int32))
    weights = fit(only(nothing, "content", "popularity"), SHAPE).weights
    assert weights["content"] == pytest.approx(0.5 / found.values["content"].std())
    assert weights["popularity"] == pytest.approx(-2.0 / found.values["popularity"].std())
    assert weights["content.above_0.3"] == 0


@pytest.mark.parametrize(("users", "near"), [(2, True), (4000, False)])
def test_the_prior_matters_only_with_few_users(users, near, monkeypatch):
    monkeypatch.setattr(reranking, "PRIOR", {"popularity": 1.0})  # the data say the contrary
    found = make({"popularity": -1.0}, users=users)
    weight = fit(only(found, "popularity"), SHAPE).weights["popularity"]
    assert (weight > 0.5) if near else (weight == pytest.approx(-1.0, abs=0.1))


def test_few_users_put_no_source_before_the_reranker():
    served = []
    for users in (7, 8):
        found = make({"content": 2.0}, users=users)
        perfect = {MODEL: np.zeros(users, np.int64)}
        served.append(choose(found, SHAPE, perfect).info["served"])
    assert served == ["reranker", MODEL]


@pytest.mark.parametrize("users", [1, 2])
def test_one_user_is_enough_to_choose(users):
    found = make({"content": 2.0}, users=users)
    info = choose(found, SHAPE, {MODEL: np.full(users, MISSED)}).info
    assert info["served"] == "reranker"
    assert set(info["parts"]) >= {"reranker", MODEL, "served"}


def test_a_lead_of_one_source_within_its_error_is_chance():
    found = make({"content": 2.0, "vectors": 1.0, "popularity": 1.0})
    crossed = cross_fit(found, partial(fit, shape=SHAPE))
    slightly = crossed.copy()
    slightly[np.flatnonzero(crossed >= 2)[0]] = 0  # better for one user of 900,
    slightly[np.flatnonzero(crossed == 0)[0]] = 1  # and a little worse for another
    served = [
        choose(found, SHAPE, {MODEL: ranks}).info["served"]
        for ranks in (slightly, np.maximum(crossed - 1, 0))
    ]
    assert served == ["reranker", MODEL]


def test_metrics_are_those_of_the_ranks():
    found = make({"content": 2.0}, users=40)
    info = choose(found, SHAPE, {MODEL: np.array([0, 1, 9, 10] * 10)}).info
    gains = (1 + 1 / math.log2(3) + 1 / math.log2(11)) / 4
    assert info["parts"][MODEL] == {"ndcg@10": pytest.approx(gains), "recall@10": 0.75}


def with_interaction(users: int) -> Candidates:
    """Users whose next item has a large product of two values, of which no sum says anything."""
    found = make({}, users)
    rng = np.random.default_rng(2)
    drawn = 3 * found.values["content"] * found.values["vectors"]
    best = (drawn + rng.gumbel(size=drawn.shape)).argmax(axis=1)
    return replace(found, targets=found.items[np.arange(users), best])


def test_a_network_finds_what_no_sum_of_features_says():
    found = with_interaction(1500)
    names = ("content", "vectors", "item_item", "item_item.rank")
    found = replace(found, values={name: found.values[name] for name in names})
    choice = choose(found, SHAPE, {MODEL: np.full(1500, MISSED)})
    reranker, info = choice.reranker, choice.info
    assert reranker.network is not None
    assert info["served"] == "reranker"
    parts = info["parts"]
    assert parts["reranker"] == parts["served"]
    assert parts["reranker"]["ndcg@10"] > parts["linear"]["ndcg@10"] + 0.1
    few, units = only(with_interaction(200), *names), []
    for seed in range(2):  # of the caller
        torch.manual_seed(seed)
        units.append(fit(few, SHAPE, network=True).network.units)
    np.testing.assert_array_equal(*units)


def test_a_constant_feature_gets_no_weight_in_a_network():
    found = with_interaction(400)
    found.values["popularity"][:] = math.log1p(7)
    network = fit(only(found, "content", "vectors", "popularity"), SHAPE, network=True).network
    weights = dict(zip(network.features, network.units.T, strict=False))
    assert not weights["popularity"].any()
    assert all(weights[name].any() for name in weights if name != "popularity")


@pytest.mark.parametrize("users", [40, 900])
def test_a_network_that_gains_nothing_is_not_served(users):
    found = make({"content": 2.0}, users, seed=1)
    choice = choose(found, SHAPE, {MODEL: np.full(users, MISSED)})
    reranker, info = choice.reranker, choice.info
    assert reranker.network is None
    assert "linear" not in info["parts"]


def test_training_a_network_leaves_the_callers_random_numbers_alone():
    torch.manual_seed(5)
    wanted = torch.rand(3)
    torch.manual_seed(5)
    fit(make({"content": 1.0}, 200), SHAPE, network=True)
    assert torch.equal(torch.rand(3), wanted)


def with_new_items(users: int) -> tuple[Candidates, np.ndarray]:
    """Users of two kinds: those whose next item is known, and those whose next item is new."""
    rng = np.random.default_rng(1)
    items = np.stack([rng.permutation(50)[:WIDTH] for _ in range(users)]).astype(np.int32)
    new = items < 10
    values = {source: rng.normal(size=items.shape) for source in SOURCES}
    values["item_item"] = np.where(new, 0, np.abs(values["item_item"]))
    score = 3 * values["item_item"] + np.where(new, 2 * values["content"] + 2, 0)
    targets = items[np.arange(users), (score + rng.gumbel(size=items.shape)).argmax(axis=1)]
    values = with_ranks(values) | {NEW: new.astype(float)}
    return Candidates(items, values, targets), targets < 10


def test_weights_for_new_items_change_no_other_item():
    found, is_new = with_new_items(900)
    before = fit(only(found, "item_item", "content").take(np.flatnonzero(~is_new)), SHAPE)
    after = fit_new(found, before)
    assert {k: v for k, v in after.weights.items() if not k.startswith(NEW)} == before.weights
    known = replace(found, values=found.values | {NEW: np.zeros(found.items.shape)})
    scores = [reranker.score(known.values, known.there) for reranker in (before, after)]
    np.testing.assert_array_equal(*scores)
    assert after.weights["new.content"] > 0


def test_new_items_gain_what_other_users_can_spare():
    found, is_new = with_new_items(2000)
    rows = np.flatnonzero(~is_new)
    before = fit(only(found, "item_item", "content").take(rows), SHAPE)
    after = fit_new(found, before)

    def gain(reranker, users):
        taken = found.take(users)
        ranks = ranks_by(taken, reranker.score(taken.values, taken.there))
        return np.where(ranks < 10, 1 / np.log2(ranks + 2.0), 0).mean()

    fewer = replace(after, weights=after.weights | {NEW: after.weights[NEW] - RAISE})
    assert gain(after, rows) >= (1 - COST) * gain(fewer, rows)
    new = np.flatnonzero(is_new)
    assert gain(after, new) > gain(before, new)


def test_too_few_new_items_fit_no_weights_for_them():
    found, is_new = with_new_items(900)
    reranker = Reranker({"item_item": 1.0}, 8, 4)
    few = np.append(np.flatnonzero(~is_new), np.flatnonzero(is_new)[:20])
    assert fit_new(found.take(few), reranker) == reranker


def with_history(users: int, repeats: float) -> Candidates:
    """Users of whose candidates three are in the history, and are chosen by how often they were."""
    rng = np.random.default_rng(1)
    found = make({"item_item": 2.0}, users)
    again = np.arange(WIDTH) < 3
    values = {name: again * rng.random(found.items.shape) for name in AGAIN_VALUES}
    values[AGAIN] = np.broadcast_to(again, found.items.shape).astype(float)
    score = 2 * found.values["item_item"] + again * (repeats + 4 * values[f"{AGAIN}.count"])
    best = (score + rng.gumbel(size=score.shape)).argmax(axis=1)
    targets = found.items[np.arange(users), best]
    return Candidates(found.items, found.values | values, targets)


@pytest.mark.parametrize(("errors", "listed"), [(2.0, True), (200.0, False)])
def test_items_of_the_history_are_listed_if_that_is_surely_better(errors, listed, monkeypatch):
    monkeypatch.setattr(reranking, "ERRORS", errors)
    found = with_history(900, -1.0)
    before = fit(only(found, "item_item"), SHAPE)
    choice = fit_again(found, before)
    after, info = choice.reranker, choice.info
    assert after.lists_seen is listed
    assert after.weights[f"{AGAIN}.count"] > 1
    assert info["share"] == round(float((found.hits.argmax(axis=1) < 3).mean()), 6)
    assert info["always"]["ndcg@10"] > info["never"]["ndcg@10"] + 0.1
    others = replace(found, values=found.values | {AGAIN: np.zeros(found.items.shape)})
    scores = [reranker.score(others.values, others.there) for reranker in (before, after)]
    np.testing.assert_array_equal(*scores)


def test_too_few_repeats_fit_no_weights_for_them():
    found = with_history(900, -12.0)
    reranker = Reranker({"item_item": 1.0}, 8, 4)
    assert fit_again(found, reranker).reranker == reranker


def test_when_time_is_over_no_network_is_fitted(monkeypatch):
    monkeypatch.setattr("time.monotonic", lambda: 100.0)
    found = with_interaction(1500)
    late = choose(found, SHAPE, {MODEL: np.full(1500, MISSED)}, end=99.0)
    assert late.reranker.network is None
