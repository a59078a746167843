from dataclasses import replace
from types import SimpleNamespace

import pytest
from prometheus_client.parser import text_string_to_metric_families

from recsys.decoding.captures import EngineStatistics
from recsys.serving.metrics import Metrics
from recsys.serving.models import Alias, Model, Models


def samples(metrics):
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(metrics.exposition().decode())
        for sample in family.samples
    }


def value(metrics, name, **labels):
    return samples(metrics)[f"recsys_{name}", tuple(sorted(labels.items()))]


def test_an_answer_is_counted_in_every_respect():
    metrics = Metrics()
    for accepted in (2, 0):
        metrics.answered(
            {"total": 0.1, "history": 0.01, "queue": 0.02, "compute": 0.07},
            stats={
                "target_passes": 2,
                "target_tokens": 40,
                "cached_tokens": 10,
                "drafted_nodes": 128,
                "accepted_levels": accepted,
            },
            levels=4,
            model="demo",
            certificate="beam-exact",
            sources=["model", "model", "popular"],
        )
    assert value(metrics, "recommend_seconds_sum", stage="total") == pytest.approx(0.2)
    assert value(metrics, "recommend_seconds_sum", stage="queue") == pytest.approx(0.04)
    assert value(metrics, "recommendations_total", model="demo", certificate="beam-exact") == 2
    assert value(metrics, "recommended_items_total", source="model") == 4
    assert value(metrics, "target_passes_sum") == 4
    assert value(metrics, "cached_tokens_total") == 20
    drafted = [value(metrics, "drafted_levels_total", level=str(i)) for i in (1, 2, 3)]
    assert drafted == [2, 2, 2]
    accepted = [value(metrics, "accepted_levels_total", level=str(i)) for i in (1, 2)]
    assert accepted == [1, 1]
    assert ("recsys_accepted_levels_total", (("level", "3"),)) not in samples(metrics)


def test_answers_without_model_or_draft_count_no_pass_or_level():
    metrics = Metrics()
    metrics.answered({"total": 0.001}, sources=["popular"])
    metrics.answered({"total": 0.001}, stats={"target_passes": 4}, levels=4)
    assert value(metrics, "target_passes_count") == 1


def test_the_rest_is_counted():
    metrics = Metrics()
    metrics.batch(8, 0.2)
    metrics.fallbacks.labels("retrieval").inc()
    assert value(metrics, "batch_size_sum") == 8
    assert value(metrics, "fallbacks_total", source="retrieval") == 1


def loaded(metrics, **models):
    """The aliases of models whose metrics are read; three requests wait for each model."""
    aliases = Models()
    metrics.registry.register(aliases)
    for alias, (name, recommender) in models.items():
        aliases.aliases[alias] = Alias(Model(name, recommender, [1, 2, 3]))
    return aliases.aliases


def recommender(number=1, items=10, statistics=None):
    stats = SimpleNamespace(hits=5, misses=2, bytes=64)
    return SimpleNamespace(
        epoch=SimpleNamespace(number=number, num_items=items, filters=SimpleNamespace(stats=stats)),
        device=SimpleNamespace(type="cpu" if statistics is None else "cuda"),
        engine=SimpleNamespace(captures=SimpleNamespace(statistics=lambda: statistics)),
        manifest=SimpleNamespace(digest="1"),
    )


def test_models_are_those_that_are_loaded_now():
    metrics = Metrics()
    aliases = loaded(metrics, champion=("a", recommender(3, 100)), other=("b", recommender()))
    assert value(metrics, "model_info", model="a", version="1", alias="champion") == 1
    assert value(metrics, "catalog_epoch", model="a") == 3
    assert value(metrics, "catalog_items", model="a") == 100
    assert value(metrics, "queue_depth") == 6
    assert value(metrics, "filter_cache_total", result="hit") == 5
    assert value(metrics, "filter_cache_bytes") == 64
    aliases["champion"] = aliases.pop("other")
    named = [key for key in samples(metrics) if dict(key[1]).get("model")]
    assert {dict(labels)["model"] for _, labels in named} == {"b"}
    assert value(metrics, "queue_depth") == 3


def test_captured_graphs_are_told_by_model():
    metrics = Metrics()
    told = EngineStatistics(
        passes=9, decodes=4, seconds=2.5, device_bytes=1000, replays=7, patched=3,
        fallbacks={"beams": 2, "catalog": 1}, eager_passes={"cache": 5},
    )  # fmt: skip
    eager = recommender(statistics=replace(told, passes=0))
    loaded(metrics, champion=("a", recommender(statistics=told)), other=("b", eager))
    assert value(metrics, "captured_decodes_total", model="a") == 7
    assert value(metrics, "uncaptured_decodes_total", model="a", reason="catalog") == 1
    assert value(metrics, "eager_passes_total", model="a", reason="cache") == 5
    assert ("recsys_captured_decodes_total", (("model", "b"),)) not in samples(metrics)


async def test_the_endpoint_speaks_prometheus(client):
    await client.get("/v1/models")
    await client.get("/v1/nothing/at/all")
    response = await client.get("/metrics")
    assert response.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    families = {f.name: f for f in text_string_to_metric_families(response.text)}
    routes = {sample.labels["route"] for sample in families["recsys_http_requests"].samples}
    assert routes == {"/v1/models", "unmatched"}  # paths never become labels
    (in_flight,) = families["recsys_http_in_flight"].samples
    assert in_flight.value == 1  # this one
    (errors,) = families["recsys_errors"].samples
    assert errors.labels == {"code": "not_found"}
    assert "process_resident_memory_bytes" in families
