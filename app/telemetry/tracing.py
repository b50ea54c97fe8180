"""OpenTelemetry spans, when it is installed (extra `[otel]`) and an endpoint is set.

A request is a child of the span in its `traceparent`, and each call is a child of its request. Without an endpoint no
spans are created, but `traceparent` is still propagated.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from starlette.types import Scope

from app.telemetry.context import RequestContext, TraceParent
from convgrad import __version__
from convgrad._launch import install_hint

if TYPE_CHECKING:
    from opentelemetry.trace import Span

__all__ = ["Tracing"]

_WRITTEN_WITHIN_S = 5
_LONGEST_PATH = 256


class Tracing:
    """Create spans and send them to `endpoint`, the HTTP address of an OTLP collector; None creates none.

    Raises `ValueError` when OpenTelemetry is needed and not installed.
    """

    def __init__(self, endpoint: str | None = None) -> None:
        self._tracer: Any = None
        self._provider: Any = None
        if endpoint is not None:
            self._provider = _provider(endpoint)
            self._tracer = self._provider.get_tracer("convgrad", __version__)

    def close(self) -> None:
        """Send the pending spans and shut down."""
        if self._provider is not None:
            self._provider.force_flush(_WRITTEN_WITHIN_S * 1000)
            self._provider.shutdown()

    @contextmanager
    def request(self, scope: Scope, headers: Mapping[str, str], context: RequestContext) -> Iterator[None]:
        """Trace the block as a request; sets `context.trace` to its span."""
        given = TraceParent.read(headers.get("traceparent", ""))
        if self._tracer is None:
            context.trace = given and given.child()
            yield
            return
        with self._span(scope, headers, context) as span:
            try:
                yield
            finally:  # also of a request that is cancelled
                span.set_attributes(_facts(context))

    @contextmanager
    def _span(self, scope: Scope, headers: Mapping[str, str], context: RequestContext) -> Iterator[Span]:
        from opentelemetry.trace import SpanKind, use_span
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        names = ("traceparent", "tracestate")
        parent = TraceContextTextMapPropagator().extract({name: headers[name] for name in names if name in headers})
        attributes = {"http.request.method": scope["method"], "url.path": scope["path"][:_LONGEST_PATH]}
        span = self._tracer.start_span(
            f"{scope['method']} {context.api}", context=parent, kind=SpanKind.SERVER, attributes=attributes
        )
        made = span.get_span_context()
        context.trace = TraceParent(f"{made.trace_id:032x}", f"{made.span_id:016x}", int(made.trace_flags) & 1)
        with use_span(span, end_on_exit=True, record_exception=False):
            yield span

    def call(self, name: str, seconds: float, facts: Mapping[str, Any]) -> None:
        """Record a call that ends now and took `seconds`, as a child of the current request's span."""
        if self._tracer is not None:
            end = time.time_ns()
            span = self._tracer.start_span(name, start_time=end - round(seconds * 1e9), attributes=dict(facts))
            span.end(end)


def _facts(context: RequestContext) -> dict[str, Any]:
    parts = {f"convgrad.{part}_ms": seconds * 1000 for part, seconds in context.timings.seconds.items()}
    return {
        "convgrad.request_id": context.request_id,
        "convgrad.key": context.key,
        "convgrad.outcome": context.outcome,
        **parts,
    }


def _provider(endpoint: str) -> Any:
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise ValueError(f"otlp_endpoint needs the package {error.name}: {install_hint('otel')}") from None
    # OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES win over these.
    resource = Resource({"service.name": "convgrad", "service.version": __version__}).merge(_from_environment())
    provider = TracerProvider(resource=resource)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint)))
    return provider


def _from_environment() -> Any:
    from opentelemetry.sdk.resources import OTELResourceDetector

    return OTELResourceDetector().detect()
