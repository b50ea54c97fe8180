"""Metrics for Prometheus: one registry per service, served at `/metrics`.

Requests and calls are counted when they end; the counters of engine and memory are read on demand, at most twenty
times a second for all who ask.
"""

from __future__ import annotations

from functools import cache, partial
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, disable_created_metrics
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.openmetrics import exposition as openmetrics

from app.caching import Shared
from app.telemetry.tracing import Tracing
from kernels.plan import algorithm_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from app.telemetry.context import RequestContext
    from kernels import Plan
    from schemas.ops import ResolvedOp

__all__ = ["Telemetry"]

# From the time of a small call to the default deadline, about two steps per decade.
_SECONDS = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)

_OPENMETRICS = "application/openmetrics-text"
_MADE_EVERY_S = 0.05

disable_created_metrics()  # type: ignore[no-untyped-call] # lines with the time when each series began


class Telemetry:
    """Count the requests and calls of one service."""

    def __init__(self, tracing: Tracing | None = None) -> None:
        self.tracing = tracing or Tracing({})
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self.connections = Gauge("convgrad_connections_open", "Open connections.", registry=self.registry)
        self._requests = self._counter("requests", "HTTP requests, by API and outcome.", "api", "outcome")
        self._calls = self._counter(
            "calls",
            "Operation calls that passed every check, by outcome: ok, or the code of an error.",
            *("operation", "dtype", "api", "outcome"),
        )
        self._algorithms = self._counter(
            "algorithm_calls", "Calls as in convgrad_calls, by algorithm: direct or winograd.", "operation", "algorithm"
        )
        self._refusals = self._counter("refusals", "Requests and calls that were refused, by reason.", "api", "reason")
        self._received = self._counter("received_bytes", "Bytes of request bodies.", "api")
        self._sent = self._counter("sent_bytes", "Bytes of reply bodies.", "api")
        self._seconds = self._histogram("request_seconds", "Time from a request's head to the end of its reply.", "api")
        self._parts = self._histogram(
            "part_seconds",
            "Time of a request in one phase: receive, decode, queue, compute, encode.",
            *("api", "part"),
        )

        self._text = Shared(partial(self._made, generate_latest), _MADE_EVERY_S)
        self._openmetrics = Shared(partial(self._made, openmetrics.generate_latest), _MADE_EVERY_S)

    def request_done(self, context: RequestContext) -> None:
        """Count a finished request."""
        api = context.api
        self._requests(api, context.outcome).inc()
        for reason in context.refusals:
            self._refusals(api, reason).inc()
        if api == "pages":
            return
        self._received(api).inc(context.received)
        self._sent(api).inc(context.sent)
        self._seconds(api).observe(context.age())
        for part, seconds in context.timings.seconds.items():
            self._parts(api, part).observe(seconds)

    def call_done(
        self, name: str, op: ResolvedOp, plans: Sequence[Plan], context: RequestContext, outcome: str, seconds: float
    ) -> None:
        """Count and trace the finished call `name`, which has a plan for each output."""
        plan, algorithm = plans[0], algorithm_of(plans)
        self._calls(op.op, op.dtype, context.api, outcome).inc()
        self._algorithms(op.op, algorithm).inc()
        if self.tracing.enabled:
            how = {"dtype": op.dtype, "kernel": plan.kernel, "algorithm": algorithm}
            size = {"macs": plan.macs, "units": len(plan.units)}
            self.tracing.call(op.op, seconds, {"call": name, **how, **size, "outcome": outcome})

    async def page(self, accept: str) -> tuple[bytes, str]:
        """Return the metrics in the text format that `accept` prefers, and its content type."""
        if _OPENMETRICS in accept:
            return await self._openmetrics.get(), openmetrics.CONTENT_TYPE_LATEST
        return await self._text.get(), CONTENT_TYPE_PLAIN_0_0_4

    async def _made(self, encode: Callable[[CollectorRegistry], bytes]) -> bytes:
        return encode(self.registry)

    # Each returns the metric for some labels, of which there are few: `labels` takes as long as counting.

    def _counter(self, name: str, what: str, *labels: str) -> Callable[..., Counter]:
        return cache(Counter(f"convgrad_{name}", what, labels, registry=self.registry).labels)

    def _histogram(self, name: str, what: str, *labels: str) -> Callable[..., Histogram]:
        return cache(Histogram(f"convgrad_{name}", what, labels, registry=self.registry, buckets=_SECONDS).labels)
