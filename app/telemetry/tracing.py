"""OpenTelemetry spans of requests and calls, sent where the standard `OTEL_EXPORTER_OTLP_*` variables say.

Needs the extra `[otel]`. Without an endpoint in the environment nothing of OpenTelemetry is imported.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.telemetry.context import CONTEXT, api_of
from convgrad import __version__
from convgrad._launch import install_hint

__all__ = ["Tracing"]

_log = logging.getLogger("convgrad")

_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_WRITTEN_WITHIN_S = 5


class Tracing:
    """Create spans for requests and calls, or nothing if `environment` names no endpoint."""

    def __init__(self, environment: Mapping[str, str] = os.environ) -> None:
        self._provider: Any = None
        self.enabled = False
        """Whether there are spans."""
        endpoint = next((name for name in _ENDPOINTS if environment.get(name)), None)
        if endpoint is None:
            return
        try:
            self._provider = _provider()
        except ImportError as error:
            _log.warning("%s: no spans without the package %s: %s", endpoint, error.name, install_hint("otel"))
            return
        self._tracer = self._provider.get_tracer("convgrad", __version__)
        self.enabled = True

    async def close(self) -> None:
        """Send the pending spans and shut down."""
        if self.enabled:
            await asyncio.to_thread(self._provider.force_flush, _WRITTEN_WITHIN_S * 1000)
            await asyncio.to_thread(self._provider.shutdown)

    def around(self, app: ASGIApp) -> ASGIApp:
        """Return an application that has a span for each request, or `app` itself."""
        if not self.enabled:
            return app
        from opentelemetry.instrumentation.asgi import OpenTelemetryMiddleware
        from opentelemetry.instrumentation.propagators import TraceResponsePropagator, set_global_response_propagator

        set_global_response_propagator(TraceResponsePropagator())  # type: ignore[no-untyped-call] # theirs
        traced: ASGIApp = OpenTelemetryMiddleware(
            _described(app),
            default_span_details=lambda scope: (f"{scope['method']} {api_of(scope['path'])}", {}),
            tracer_provider=self._provider,
            exclude_spans=["receive", "send"],
        )
        return traced

    def call(self, name: str, seconds: float, facts: Mapping[str, Any]) -> None:
        """Record a call that ends now and took `seconds`, as a child of the current request's span; if `enabled`."""
        end, attributes = time.time_ns(), {f"convgrad.{name}": value for name, value in facts.items()}
        self._tracer.start_span(name, start_time=end - round(seconds * 1e9), attributes=attributes).end(end)

    @contextmanager
    def job(self, facts: Mapping[str, Any]) -> Iterator[None]:
        """Record the attempt at a job in the block, with the calls in it; it gets the facts known at the end."""
        if not self.enabled:
            yield
            return
        with self._tracer.start_as_current_span("job") as span:
            try:
                yield
            finally:
                span.set_attributes({f"convgrad.{name}": value for name, value in facts.items()})


def _described(app: ASGIApp) -> ASGIApp:
    """Add what the service knows of a request to its span, before the end of the reply, which ends the span."""
    from opentelemetry.trace import get_current_span

    async def described(scope: Scope, receive: Receive, send: Send) -> None:
        async def send_described(message: Message) -> None:
            span, context = get_current_span(), scope[CONTEXT]
            context.trace_id = f"{span.get_span_context().trace_id:032x}"
            if not message.get("more_body", message["type"] == "http.response.start"):
                parts = {f"convgrad.{part}_ms": seconds * 1000 for part, seconds in context.timings.seconds.items()}
                facts = {"request_id": context.request_id, "key": context.key, "outcome": context.outcome}
                span.set_attributes({f"convgrad.{name}": value for name, value in facts.items()} | parts)
            await send(message)

        await app(scope, receive, send_described)

    return described


def _provider() -> Any:
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.instrumentation import asgi  # noqa: F401 -- found missing here rather than later
    from opentelemetry.sdk.resources import OTELResourceDetector, Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    # OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES win over these.
    resource = Resource({"service.name": "convgrad", "service.version": __version__})
    provider = TracerProvider(resource=resource.merge(OTELResourceDetector().detect()))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return provider
