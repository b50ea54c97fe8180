"""The state of a service as Prometheus metrics, read when they are scraped."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric

from app.calls.service import Service
from convgrad import __version__
from kernels.target import target

__all__ = ["ServiceMetrics"]

_COUNTERS = (
    ("worker_restarts", "deaths", "Worker processes that died and were replaced."),
    ("worker_stops_enforced", "enforced_stops", "Workers killed because they did not stop a cancelled unit in time."),
    ("units", "units", "Units of work computed."),
    ("units_retried", "retried_units", "Units of work that ran again because their worker died."),
    ("macs", "macs", "Multiply-adds computed."),
    ("compute_seconds", "compute_s", "Compute time, summed over all workers."),
    ("cluster_calls", "cluster_jobs", "Calls that were sent to the cluster."),
    ("cluster_units", "cluster_units", "Units of work computed on the cluster."),
    ("cluster_units_retried", "cluster_retried_units", "Units of work lost with a worker of the cluster."),
    ("cluster_fallbacks", "cluster_fallbacks", "Calls that the cluster began and this machine ended."),
)
"""Counters of the engine: the metric, its name there, and its meaning. Those of a cluster are there if it is used."""


class ServiceMetrics:
    """A Prometheus collector for the engine, the queue, connections and memory."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def collect(self) -> Iterator[Metric]:
        """Yield the current metrics."""
        service, engine = self._service, self._service.engine.snapshot()
        stats, counters = service.segments.stats(), engine["counters"]
        yield InfoMetricFamily("convgrad_build", "The running version.", {"version": __version__})
        kind = "The processor that the kernels are compiled for."
        yield InfoMetricFamily("convgrad_target", kind, {"name": str(target())})
        yield _gauge("targets_unfit", "Wider targets whose code does not work on this processor.", len(service.unfit))
        yield _gauge("ready", "1 while calls are accepted, else 0.", service.status == "ready")
        yield _gauge("failed", "1 while no worker can be started, else 0.", service.status == "failed")
        yield _gauge("warm_up_ratio", "Share of the kernels that are compiled, 0 to 1.", service.engine.launcher.share)
        yield _gauge("connections_limit", "Most open connections.", service.settings.connections)
        yield _gauge("requests_open", "Admitted requests that are not answered yet.", service.admission.requests)
        yield _gauge("calls_open", "Calls that wait or compute: the queue.", len(service.calls))
        yield _gauge("calls_limit", "Most calls that may wait or compute.", service.settings.queue_length)
        yield _gauge("units_waiting", "Units of work that wait for a worker.", engine["units_waiting"])
        workers = engine["workers"]
        busy, ready = (sum(bool(worker[key]) for worker in workers) for key in ("unit", "ready"))
        states = {"busy": busy, "idle": ready - busy, "starting": len(workers) - ready}
        yield _states("workers", "Worker processes, by state.", states)
        yield _gauge("workers_wanted", "Configured number of worker processes.", engine["workers_wanted"])
        speed = "GFLOP/s of f32 that a worker's register tile reaches alone at the start; 0 without compiled code."
        yield _gauge("worker_gflops_limit", speed, engine["tile_gflops"])
        for name, key, what in _COUNTERS:
            if key in counters:
                yield CounterMetricFamily(f"convgrad_{name}", what, value=counters[key])
        restarts, what = engine["fork_server"]["restarts"], "Restarts of the process that forks the workers."
        yield CounterMetricFamily("convgrad_fork_server_restarts", what, value=restarts)
        memory = {"used": stats.used, "idle": stats.total - stats.used}
        yield _states("shared_memory_bytes", "Shared memory for tensors: in use, or kept for reuse.", memory)
        total = "Limit on the tensors of all calls together."
        yield _gauge("shared_memory_limit_bytes", total, service.segments.limit)
        yield _gauge("shared_memory_peak_bytes", "Largest amount of shared memory so far.", stats.peak)
        refused = "Refused requests for tensor memory."
        yield CounterMetricFamily("convgrad_shared_memory_refused", refused, value=stats.refused)
        if (jobs := service.jobs) is not None:
            yield _states("jobs", "Jobs in the spool, by state.", jobs.counts)
            yield _gauge("spool_bytes", "Bytes of the jobs in the spool, of all replicas that share it.", jobs.size)
            yield _gauge("spool_limit_bytes", "Limit on these bytes.", jobs.spool.limits.total)
            taken = "Jobs taken over from a replica that has ended."
            yield CounterMetricFamily("convgrad_jobs_taken_over", taken, value=jobs.taken_over)
        if (cluster := engine.get("cluster")) is not None:
            yield from _cluster(cluster)


def _cluster(cluster: dict[str, Any]) -> Iterator[Metric]:
    nodes = cluster["nodes"]
    refused = sum(node["refused"] is not None for node in nodes)
    yield _gauge("cluster_connected", "1 while the service is connected to the cluster, else 0.", cluster["connected"])
    yield _gauge("cluster_workers", "Workers of the cluster that are ready.", sum(node["ready"] for node in nodes))
    yield _gauge("cluster_nodes", "Machines of the cluster.", len(nodes))
    yield _gauge("cluster_nodes_refused", "Machines that get no work: their results could have other bits.", refused)


def _gauge(name: str, what: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"convgrad_{name}", what, value=float(value))


def _states(name: str, what: str, values: dict[str, int]) -> GaugeMetricFamily:
    family = GaugeMetricFamily(f"convgrad_{name}", what, labels=["state"])
    for state, value in values.items():
        family.add_metric([state], value)
    return family
