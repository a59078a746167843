"""Stage retrieval: fitted on training events alone; the reranker is fitted on validation."""

from __future__ import annotations

import json
from dataclasses import asdict

import numpy as np
import pyarrow as pa
import pytest

from recsys.artifacts import read_manifest
from recsys.bundle import RETRIEVAL, Bundle
from recsys.dataset import Dataset
from recsys.errors import ConfigError
from recsys.pipeline import Context
from recsys.recommender import Recommender, RecommendRequest
from recsys.retrieval import ItemItem, PairRules, Retrieval, digest
from recsys.splits import TEST, TRAIN
from recsys.training import bundle, draft, retrieval, target

FAST = {"nodes": 20, "beams": 10, "candidates": 10}


@pytest.fixture
def context(make_context):
    context = make_context(retrieval=FAST)
    target.stage(context)
    return context


def test_what_is_served_is_at_least_as_good_as_each_part(context):
    path = retrieval.stage(context)
    info = read_manifest(path, "retrieval").info
    assert info["fitted_on"] == "train"
    validation = info["validation"]
    served = validation["parts"].pop("served")
    assert {"popularity", "item-kNN", "directional", "pair rules", "model"} <= set(
        validation["parts"]
    )
    assert served["ndcg@10"] >= validation["parts"]["model"]["ndcg@10"]
    draft.train(context)
    folder = bundle.stage(context)
    found = Bundle.load(folder).retrieval
    assert found.reranker == Retrieval.load(path).reranker
    assert found.reranker.nodes == 20
    dataset = Dataset.load(context.workspace.dataset)
    trained = dataset.train_histories
    assert found.fitted_on == digest(dataset.interactions.histories)
    assert Bundle.load(folder, trained=True).retrieval.fitted_on == digest(trained)
    assert read_manifest(folder).info["ids_fitted_on"] == digest(trained)
    validated = json.loads((folder / "eval" / "validation.json").read_text())
    assert validated["retrieval"] == read_manifest(path, "retrieval").info["validation"]
    assert read_manifest(folder).parents["retrieval"] == read_manifest(path).digest
    recommender, request = Recommender.load(folder), RecommendRequest(["i3"], 5)
    assert len(recommender.fallback(request).recommendations) == 5
    assert len(recommender.recommend_batch([request])[0].recommendations) == 5


def test_a_pair_of_the_newest_events_is_counted_by_what_is_served_alone(context, shop):
    dataset = shop.chain_dataset()
    events, last = dataset.interactions, dataset.split == TEST
    pairs = events.item[:-1] * shop.ITEMS + events.item[1:]
    of_test = last[1:] & (np.diff(events.user) == 0)
    (canary,) = np.setdiff1d(pairs[of_test], pairs[~of_test])[:1]
    before, after = divmod(int(canary), shop.ITEMS)
    path = retrieval.stage(context)
    served, trained = Retrieval.load(path), Retrieval.load(path, trained=True)
    assert served.item_item.weights[before, after] > 0
    assert trained.item_item.weights[before, after] == 0
    assert served.counts.sum() == len(events)
    assert trained.counts.sum() == (dataset.split == TRAIN).sum()
    assert served.reranker == trained.reranker


def test_the_pair_rules_of_validation_users_are_counted(context, monkeypatch):
    rules = PairRules(3, 0.5, 0.1, 0.7, 3, 0.2, 1, 0.4)
    monkeypatch.setattr(retrieval, "search_rules", lambda *_: rules)
    path = retrieval.stage(context)
    dataset = Dataset.load(context.workspace.dataset)
    counted = ItemItem.count(dataset.train_histories, len(dataset.item_ids), rules)
    loaded = Retrieval.load(path, trained=True).item_item
    np.testing.assert_array_equal(loaded.weights.toarray(), counted.weights.toarray())
    assert loaded.decay == counted.decay
    assert read_manifest(path).info["pair_rules"] == asdict(rules)


def test_no_users_fit_nothing(context, make_context):
    path = retrieval.stage(make_context(retrieval={**FAST, "users": 0}))
    assert Retrieval.load(path).reranker is None


def test_validation_users_whose_next_item_is_sold_out_are_left_out(context, shop):
    dataset = shop.chain_dataset()
    trained = np.bincount(dataset.train_histories.items, minlength=shop.ITEMS)
    gone = np.argsort(-trained)[1:20:2]
    available = pa.array(~np.isin(np.arange(shop.ITEMS), gone))
    items = dataset.items.append_column("available", available)
    sold_out = Dataset(dataset.interactions, dataset.split, items)
    shop.write_parents(context.workspace, dataset=sold_out, centroids=True)
    target.stage(context)
    validation = read_manifest(retrieval.stage(context)).info["validation"]
    wanted = dataset.examples("valid").targets.items
    assert validation["users"] == int((~np.isin(wanted, gone)).sum()) < len(wanted)


def test_where_no_item_is_available_the_reranker_is_fitted_as_if_all_were(context, shop, capsys):
    dataset = shop.chain_dataset()
    expired = dataset.items.append_column("available_until", pa.array([1.7e9] * shop.ITEMS))
    shop.write_parents(
        context.workspace, dataset=Dataset(dataset.interactions, dataset.split, expired)
    )
    target.stage(context)
    validation = read_manifest(retrieval.stage(context)).info["validation"]
    assert validation["users"] == len(dataset.examples("valid"))
    assert "no item is available now" in capsys.readouterr().err


def test_a_run_without_retrieval_makes_a_bundle_without(context):
    draft.train(context)
    folder = bundle.stage(context)
    assert Bundle.load(folder).retrieval is None
    assert not (folder / RETRIEVAL).exists()


def test_a_number_out_of_range_is_refused_by_name(make_context):
    with pytest.raises(ConfigError, match="beams"):
        retrieval.stage(make_context(retrieval={"beams": 0}))


def test_when_time_is_over_the_reranker_is_fitted_on_a_sample(context, monkeypatch):
    monkeypatch.setattr(retrieval, "BATCH", 8)
    monkeypatch.setattr(retrieval, "LEAST_DECODED", 16)
    monkeypatch.setattr(Context, "deadline", lambda self, stage: 0.0)  # long ago
    users = len(Dataset.load(context.workspace.dataset).examples("valid"))
    info = read_manifest(retrieval.stage(context)).info
    assert info["validation"]["users"] == 16 < users
