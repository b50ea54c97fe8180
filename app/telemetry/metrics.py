"""Counts and times for Prometheus: one registry for each service, read at `/metrics`.

What happens to a request is counted when it ends, a call when it ends; what the engine and the memory
count themselves is only read when somebody asks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric

from app.telemetry.counters import Counter, Histogram
from app.telemetry.tracing import Tracing
from convgrad import __version__
from convgrad._errors import Overloaded
from kernels.target import target

if TYPE_CHECKING:
    from app.calls.call import Call
    from app.calls.service import Service
    from app.http.context import RequestContext

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

    def watch(self, service: Service) -> None:
        """Report the state of a service whenever the metrics are read."""
        self.registry.register(_State(service))

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

    def call_done(self, call: Call, context: RequestContext, outcome: str, seconds: float) -> None:
        """Count a call that is over."""
        op, plan = call.prepared.op, call.prepared.plan
        self._calls.add(1, op.op, op.dtype, context.api, outcome)
        self.tracing.call(
            op.op,
            seconds,
            {
                "convgrad.call": call.id,
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


class _State:
    """Read engine, queue and memory when the metrics are asked for."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def collect(self) -> Iterator[Metric]:
        service = self._service
        engine = service.engine.snapshot()
        yield InfoMetricFamily("convgrad_build", "The version that runs.", {"version": __version__})
        yield InfoMetricFamily(
            "convgrad_target", "The processor that the kernels are compiled for.", {"name": str(target())}
        )
        yield _gauge("targets_unfit", "Wider targets whose code does not work on this processor.", len(service.unfit))
        yield _gauge("ready", "1 while calls are taken, else 0.", float(service.status == "ready"))
        yield _gauge("failed", "1 while no worker can be had.", float(service.status == "failed"))
        yield _gauge("warm_up_ratio", "Share of the kernels that are compiled, 0 to 1.", service.engine.progress())
        yield _gauge("connections_open", "Connections that have been let in.", service.connections())
        yield _gauge("connections_limit", "Connections that may be open at a time.", service.settings.connections)
        yield _gauge("requests_open", "Admitted requests that are not answered yet.", service.requests)
        yield _gauge("calls_open", "Calls that wait or compute: the queue.", len(service.calls))
        yield _gauge("calls_limit", "Calls that may wait or compute at a time.", service.settings.queue_length)
        yield _gauge("units_waiting", "Pieces of work that wait for a worker.", engine.get("units_waiting", 0))
        yield from _workers(engine)
        yield from _memory(service)


def _workers(engine: dict[str, Any]) -> Iterator[Metric]:
    workers = engine.get("workers", [])
    busy = sum(worker["unit"] is not None for worker in workers)
    ready = sum(bool(worker["ready"]) for worker in workers)
    family = GaugeMetricFamily("convgrad_workers", "Worker processes, by what they do.", labels=["state"])
    for state, count in (("busy", busy), ("idle", ready - busy), ("starting", len(workers) - ready)):
        family.add_metric([state], count)
    yield family
    yield _gauge("workers_wanted", "Worker processes that there should be.", engine.get("workers_wanted", 0))
    counters = engine.get("counters", {})
    for name, key, what in _ENGINE_COUNTERS:
        yield CounterMetricFamily(f"convgrad_{name}", what, value=counters.get(key, 0))
    restarts = engine.get("fork_server", {}).get("restarts", 0)
    yield CounterMetricFamily(
        "convgrad_fork_server_restarts", "Restarts of the process that forks the workers.", value=restarts
    )


_ENGINE_COUNTERS = (
    ("worker_restarts", "deaths", "Worker processes that died and were replaced."),
    ("worker_hangs", "hangs", "Workers killed because they showed no sign of life."),
    ("worker_stops_enforced", "enforced_stops", "Workers killed because they did not stop a cancelled unit in time."),
    ("units", "units", "Pieces of work done."),
    ("units_retried", "retried_units", "Pieces of work that ran again because their worker died."),
    ("macs", "macs", "Multiply-adds done."),
    ("compute_seconds", "compute_s", "Time of all workers at work, added up."),
)


def _memory(service: Service) -> Iterable[Metric]:
    stats = service.segments.stats()
    family = GaugeMetricFamily(
        "convgrad_shared_memory_bytes", "Shared memory for tensors: in use, or kept warm for reuse.", labels=["state"]
    )
    family.add_metric(["used"], stats.used)
    family.add_metric(["idle"], stats.total - stats.used)
    return (
        family,
        _gauge("shared_memory_limit_bytes", "Most bytes of tensors of all calls together.", stats.limit),
        _gauge("shared_memory_peak_bytes", "Most shared memory there ever was.", stats.peak),
        CounterMetricFamily(
            "convgrad_shared_memory_refused", "Times that memory for tensors was refused.", value=stats.refused
        ),
    )


def _gauge(name: str, what: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"convgrad_{name}", what, value=value)
