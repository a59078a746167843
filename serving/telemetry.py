"""OpenTelemetry traces (`serve.otel`): a span for each request, with a span for each stage.

Without the setting, the SDK is not imported, and a request costs an empty `with` block. The
exporter is configured by the standard's variables (`OTEL_EXPORTER_OTLP_ENDPOINT`, ...).
"""

import time
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Self

from recsys.errors import ConfigError

SERVICE = "recsys"


class Telemetry:
    """Records traces with a `TracerProvider` of the SDK; without one, it records nothing."""

    def __init__(self, provider: Any = None) -> None:
        self._provider = provider
        if provider is not None:
            from opentelemetry import propagate, trace

            self._trace, self._extract = trace, propagate.extract
            self._tracer = provider.get_tracer("recsys.serving")

    @property
    def is_on(self) -> bool:
        """Whether anything is recorded."""
        return self._provider is not None

    @classmethod
    def exporting(cls) -> Self:
        """Export to the collector of the environment variables."""
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
        except ImportError as error:
            raise ConfigError(
                f"serve.otel: {error.name} is not installed; pip install 'recbeam[otel]'"
            ) from error
        provider = TracerProvider(resource=Resource.create({"service.name": SERVICE}))
        provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
        return cls(provider)

    def request(self, headers: Mapping[str, str]) -> AbstractContextManager[object]:
        """Open the span of a request, below that of the client if it sent a `traceparent`."""
        if self._provider is None:
            return nullcontext()
        context, kind = self._extract(dict(headers)), self._trace.SpanKind.SERVER
        span: AbstractContextManager[object] = self._tracer.start_as_current_span(
            "request", context=context, kind=kind
        )
        return span

    def respond(self, method: str, route: str | None, status: int) -> None:
        """Record the response in the span of the request."""
        if self._provider is None:
            return
        span = self._trace.get_current_span()
        span.update_name(f"{method} {route}" if route else method)
        span.set_attributes(
            {
                "http.request.method": method,
                "http.route": route or "",
                "http.response.status_code": status,
            }
        )

    def stages(self, stages: Mapping[str, float], attributes: Mapping[str, Any]) -> None:
        """Record the stages by duration in seconds, in order; the last one has just ended."""
        if self._provider is None:
            return
        moment = time.time_ns() - round(sum(stages.values()) * 1e9)
        for name, seconds in stages.items():
            if seconds <= 0:
                continue
            span = self._tracer.start_span(name, start_time=moment)
            moment += round(seconds * 1e9)
            if name == "decode":
                span.set_attributes(attributes)
            span.end(end_time=moment)

    def close(self) -> None:
        """Export the remaining spans."""
        if self._provider is not None:
            self._provider.shutdown()
