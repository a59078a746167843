import pytest

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
