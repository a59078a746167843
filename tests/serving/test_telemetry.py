import pickle

import httpx
import pytest

from recsys.serving.cluster.door import Door
from recsys.serving.cluster.exchange import answer
from recsys.serving.metrics import Metrics
from recsys.serving.telemetry import Telemetry


@pytest.fixture
def traced():
    pytest.importorskip("opentelemetry.sdk")
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    return Telemetry(provider), exporter


def test_spans_nest_as_caller_request_and_stages(traced):
    telemetry, exporter = traced
    parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    metrics = Metrics()
    metrics.telemetry = telemetry
    with telemetry.request({"traceparent": parent}):
        metrics.answered(
            {"total": 0.03, "queue": 0.01, "compute": 0.02}, stats={"target_passes": 3}
        )
        telemetry.respond("POST", "/v1/recommendations", 200)
    queue, decode, request = exporter.get_finished_spans()
    assert (queue.name, decode.name) == ("queue", "decode")
    assert request.name == "POST /v1/recommendations"
    assert request.attributes["http.response.status_code"] == 200
    assert f"{request.context.trace_id:032x}" == "0af7651916cd43dd8448eb211c80319c"
    assert f"{request.parent.span_id:016x}" == "b7ad6b7169203331"
    for stage in (queue, decode):
        assert stage.parent.span_id == request.context.span_id
    assert decode.start_time == queue.end_time
    assert decode.end_time - decode.start_time == pytest.approx(20e6, abs=1e3)
    assert decode.attributes["target_passes"] == 3


async def test_an_application_without_it_answers_as_ever(client, service, recommender):
    assert service.metrics.telemetry._provider is None
    assert (await client.get("/v1/models")).status_code == 200


async def test_a_replicas_spans_are_in_the_trace_of_the_client(
    traced, running, settings, recommender, monkeypatch
):
    telemetry, exporter = traced
    monkeypatch.setattr("recsys.serving.app.Telemetry.exporting", lambda: telemetry)

    class Replicas:
        async def ask(self, call, session):
            return await answer(app, pickle.loads(pickle.dumps(call)))  # as between processes

    with_traces = settings.model_copy(update={"otel": True})
    async with running(with_traces, recommender=recommender) as (client, _):
        app = client._transport.app
        transport = httpx.ASGITransport(Door(Replicas(), deadline_ms=60_000, max_body_bytes=2000))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as outside:
            parent = f"00-{'a' * 32}-{'b' * 16}-01"
            body = {"history": ["item-1"], "k": 3}
            headers = {"traceparent": parent}
            asked = await outside.post("/v1/recommendations", json=body, headers=headers)
    assert asked.status_code == 200
    spans = {span.name: span for span in exporter.get_finished_spans()}
    assert {"decode", "POST /v1/recommendations"} <= set(spans)
    assert {f"{span.context.trace_id:x}" for span in spans.values()} == {"a" * 32}
    assert f"{spans['POST /v1/recommendations'].parent.span_id:x}" == "b" * 16
