"""OpenTelemetry traces (`serve.otel`): a span for each request, with a span for each stage.

Without the setting, the SDK is not imported, and a request costs an empty `with` block. The
exporter is configured by the standard's variables (`OTEL_EXPORTER_OTLP_ENDPOINT`, ...).
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

from recsys.errors import ConfigError

SERVICE = "recsys"


class RequestSpan(Protocol):
    """The span of one request."""

    def end(self, method: str, route: str | None, status: int) -> None:
        """Record the response."""


class Telemetry:
    """Records no traces; the default."""

    def request(
        self, scope: MutableMapping[str, Any], headers: Mapping[str, str]
    ) -> AbstractContextManager[RequestSpan]:
        """Open the span of a request."""
        return _NOTHING

    def stages(self, stages: Mapping[str, float], attributes: Mapping[str, Any]) -> None:
        """Record the stages by duration in seconds, in order; the last one has just ended."""

    def close(self) -> None:
        """Export the remaining spans."""


class _NoSpan:
    def end(self, method: str, route: str | None, status: int) -> None:
        pass


_NOTHING: AbstractContextManager[RequestSpan] = nullcontext(_NoSpan())


class OpenTelemetry(Telemetry):
    """Records traces with OpenTelemetry."""

    def __init__(self, provider: Any) -> None:
        """Trace with `provider`, a `TracerProvider` of the SDK."""
        from opentelemetry import propagate, trace

        self._provider, self._trace, self._extract = provider, trace, propagate.extract
        self._tracer = provider.get_tracer("recsys.serving")

    @classmethod
    def exporting(cls) -> OpenTelemetry:
        """Export to the collector of the environment variables.

        Raises:
            ConfigError: the extra `otel` is not installed.
        """
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

    @contextmanager
    def _request(self, headers: Mapping[str, str]) -> Iterator[RequestSpan]:
        with self._tracer.start_as_current_span(
            "request", context=self._extract(dict(headers)), kind=self._trace.SpanKind.SERVER
        ) as span:
            yield _Span(span)

    def request(
        self, scope: MutableMapping[str, Any], headers: Mapping[str, str]
    ) -> AbstractContextManager[RequestSpan]:
        """The span around a request, below the caller's if it sent a `traceparent`."""
        return self._request(headers)

    def stages(self, stages: Mapping[str, float], attributes: Mapping[str, Any]) -> None:
        """Record the stages by duration in seconds, in order; the last one has just ended."""
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
        self._provider.shutdown()


class _Span:
    def __init__(self, span: Any) -> None:
        self._span = span

    def end(self, method: str, route: str | None, status: int) -> None:
        self._span.update_name(f"{method} {route}" if route else method)
        self._span.set_attributes(
            {
                "http.request.method": method,
                "http.route": route or "",
                "http.response.status_code": status,
            }
        )
