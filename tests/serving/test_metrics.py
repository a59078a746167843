from dataclasses import replace
from types import SimpleNamespace

import pytest
from prometheus_client.parser import text_string_to_metric_families

from recsys.decoding.captures import EngineStatistics
from recsys.serving.metrics import Metrics


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


def test_models_are_those_that_are_loaded_now():
    metrics = Metrics()
    metrics.models([("a", "1", "champion"), ("b", "2", "")])
    metrics.catalog("a", 3, 100)
    metrics.models([("b", "2", "champion")])
    metrics.forget("a")
    named = [key for key in samples(metrics) if key[0] == "recsys_model_info"]
    assert [dict(labels)["model"] for _, labels in named] == ["b"]
    assert not [key for key in samples(metrics) if key[0] == "recsys_catalog_epoch"]


def test_queue_depth_and_filter_cache_are_read_on_demand():
    metrics = Metrics()
    waiting = [1, 2, 3]
    metrics.queue_depth = lambda: len(waiting)
    metrics.filter_stats = lambda: SimpleNamespace(hits=5, misses=2, bytes=64)
    assert value(metrics, "queue_depth") == 3
    waiting.clear()
    assert value(metrics, "queue_depth") == 0
    assert value(metrics, "filter_cache_total", result="hit") == 5
    assert value(metrics, "filter_cache_bytes") == 64


def test_captured_graphs_are_told_by_model():
    metrics = Metrics()
    told = EngineStatistics(
        passes=9, decodes=4, seconds=2.5, device_bytes=1000, replays=7, patched=3,
        fallbacks={"beams": 2, "catalog": 1}, eager_passes={"cache": 5},
    )  # fmt: skip
    eager = replace(told, passes=0)
    metrics.captured = lambda: {"a": told, "b": eager}
    assert value(metrics, "captured_decodes_total", model="a") == 7
    assert value(metrics, "uncaptured_decodes_total", model="a", reason="catalog") == 1
    assert value(metrics, "eager_passes_total", model="a", reason="cache") == 5
    assert not [key for key in samples(metrics) if dict(key[1]).get("model") == "b"]


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
