"""The state of a service for Prometheus, read when somebody asks for the metrics."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric

from app.calls.service import Service
from convgrad import __version__
from kernels.target import target

__all__ = ["ServiceState"]


class ServiceState:
    """Read engine, queue and memory when the metrics are asked for."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def collect(self) -> Iterator[Metric]:
        """Give the metrics of the moment."""
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
