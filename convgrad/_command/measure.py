"""Measure a running service with one call: latency as its callers see it, and throughput."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from convgrad._dtypes import dtype
from convgrad._events import Array, Result

__all__ = ["Measurements", "measure", "random_tensor"]


@dataclass
class Measurements:
    """The measurements of a run; all times are in seconds."""

    latencies: list[float] = field(default_factory=list)
    compute: list[float] = field(default_factory=list)
    seconds: float = 0.0
    gmac: float = 0.0

    def add(self, seconds: float, result: Result) -> None:
        """Record one answered call."""
        self.latencies.append(seconds)
        self.compute.append(float(result.stats.get("compute_ms", 0.0)) / 1000)
        self.gmac += float(result.stats.get("gmac", 0.0))

    def summary(self, sent: int) -> dict[str, Any]:
        """Return the figures; `sent` is the number of tensor bytes in each call."""
        calls = len(self.latencies)
        return {
            "calls": calls,
            "seconds": round(self.seconds, 3),
            "p50_ms": _milliseconds(self.latencies, 50),
            "p90_ms": _milliseconds(self.latencies, 90),
            "p99_ms": _milliseconds(self.latencies, 99),
            "mean_ms": round(statistics.fmean(self.latencies) * 1000, 3),
            "compute_p50_ms": _milliseconds(self.compute, 50),
            "calls_per_s": round(calls / self.seconds, 2),
            "sent_mb_per_s": round(calls * sent / self.seconds / 1e6, 2),
            "gmac_per_s": round(self.gmac / self.seconds, 2),
        }


def measure(call: Callable[[], Result], *, seconds: float, clients: int, warm_up: int = 2) -> Measurements:
    """Repeat `call` for `seconds` in `clients` threads, at least once in each.

    The first calls, which open connections and fill caches, are not counted. An error in any call ends the run.
    """
    for _ in range(warm_up):
        call()
    report, errors = Measurements(), list[BaseException]()
    start = time.perf_counter()
    threads = [threading.Thread(target=_repeat, args=(call, report, errors, start + seconds)) for _ in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    report.seconds = time.perf_counter() - start
    if errors:
        raise errors[0]
    return report


def random_tensor(description: dict[str, Any]) -> Array:
    """Return random numbers of the described dtype and shape, the same every time."""
    numbers = np.random.default_rng(0).standard_normal(description["shape"], np.float32)
    array: Array = numbers.astype(dtype(description["dtype"]).numpy)
    return array


def _repeat(call: Callable[[], Result], report: Measurements, errors: list[BaseException], end: float) -> None:
    try:
        while not errors:
            start = time.perf_counter()
            result = call()
            now = time.perf_counter()
            report.add(now - start, result)
            if now >= end:
                return
    except BaseException as error:  # noqa: BLE001 - raised again by the waiting thread
        errors.append(error)


def _milliseconds(values: list[float], percentile: int) -> float:
    return round(float(np.percentile(values, percentile)) * 1000, 3)
