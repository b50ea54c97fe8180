"""Counts and times for Prometheus: one registry for each service, read at `/metrics`.

What happens to a request is counted when it ends, a call when it ends; what the engine and the memory
count themselves is only read when somebody asks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.exposition import choose_encoder

from app.telemetry.counters import Counter, Histogram
from app.telemetry.tracing import Tracing
from convgrad._errors import Overloaded

if TYPE_CHECKING:
    from app.telemetry.context import RequestContext
    from kernels import Plan
    from schemas.ops import ResolvedOp

__all__ = ["Telemetry"]

# From what a small call takes to the longest deadline in use, about three steps a decade.
_SECONDS = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)


class Telemetry:
    """Count what happens to the requests and calls of one service."""

    def __init__(self, tracing: Tracing | None = None) -> None:
        self.tracing = tracing or Tracing()
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self._requests = self._counter("requests", "HTTP requests, by API and outcome.", "api", "outcome")
        self._calls = self._counter(
            "calls",
            "Operation calls that passed every check, by how they ended: ok, or the code of an error.",
            *("operation", "dtype", "api", "outcome"),
        )
        self._refusals = self._counter("refusals", "Requests and calls turned away, by reason.", "api", "reason")
        self._received = self._counter("received_bytes", "Bytes of request bodies.", "api")
        self._sent = self._counter("sent_bytes", "Bytes of reply bodies.", "api")
        self._seconds = self._histogram("request_seconds", "Time from a request's head to its reply's end.", "api")
        self._parts = self._histogram(
            "part_seconds",
            "Time of a request in one part of its way: receive, decode, queue, compute, encode.",
            *("api", "part"),
        )

    def request_done(self, context: RequestContext) -> None:
        """Count a request that is over."""
        api = context.api
        self._requests.add(1, api, context.outcome)
        for reason in context.refusals:
            self._refusals.add(1, api, reason)
        if api == "pages":
            return
        self._received.add(context.received, api)
        self._sent.add(context.sent, api)
        self._seconds.observe(context.age(), api)
        for part, seconds in context.timings.seconds.items():
            self._parts.observe(seconds, api, part)

    def turned_away(self, api: str, error: Overloaded) -> None:
        """Count a request that got no further than its head."""
        self._requests.add(1, api, error.code)
        self._refusals.add(1, api, str(error.data["reason"]))

    def call_done(
        self, name: str, op: ResolvedOp, plan: Plan, context: RequestContext, outcome: str, seconds: float
    ) -> None:
        """Count the call `name`, which is over."""
        self._calls.add(1, op.op, op.dtype, context.api, outcome)
        self.tracing.call(
            op.op,
            seconds,
            {
                "convgrad.call": name,
                "convgrad.dtype": op.dtype,
                "convgrad.kernel": plan.kernel,
                "convgrad.macs": plan.macs,
                "convgrad.units": len(plan.units),
                "convgrad.outcome": outcome,
            },
        )

    def page(self, accept: str) -> tuple[bytes, str]:
        """Write the metrics in the text form that `accept` prefers; returns it with its content type."""
        encode, content_type = choose_encoder(accept)
        return encode(self.registry), content_type

    def _counter(self, name: str, what: str, *labels: str) -> Counter:
        counter = Counter(f"convgrad_{name}", what, *labels)
        self.registry.register(counter)
        return counter

    def _histogram(self, name: str, what: str, *labels: str) -> Histogram:
        histogram = Histogram(f"convgrad_{name}", what, *labels, bounds=_SECONDS)
        self.registry.register(histogram)
        return histogram
