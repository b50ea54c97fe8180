"""Fast counters and histograms that `prometheus_client` can export.

Its own take a lock for every bucket, because threads may share them. These take a fraction of a microsecond, and only
the event loop may update them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from itertools import accumulate

from prometheus_client.metrics_core import CounterMetricFamily, HistogramMetricFamily, Metric

__all__ = ["Counter", "Histogram"]


class Counter:
    """Add up numbers by labels."""

    def __init__(self, name: str, what: str, *labels: str) -> None:
        self._about = name, what
        self._labels = labels
        self._values: dict[tuple[str, ...], float] = {}

    def add(self, amount: float, *labels: str) -> None:
        """Add to the sum of these labels."""
        self._values[labels] = self._values.get(labels, 0) + amount

    def collect(self) -> Iterator[Metric]:
        """Yield the current values as one metric family."""
        family = CounterMetricFamily(*self._about, labels=self._labels)
        for labels, value in self._values.items():
            family.add_metric(labels, value)
        yield family


class Histogram:
    """Count numbers by labels and by size; `bounds` are the buckets' upper bounds in ascending order."""

    def __init__(self, name: str, what: str, *labels: str, bounds: tuple[float, ...]) -> None:
        self._about = name, what
        self._labels = labels
        self._bounds = bounds
        self._names = [*map(str, bounds), "+Inf"]
        self._counts: dict[tuple[str, ...], list[int]] = {}
        self._sums: dict[tuple[str, ...], float] = {}

    def observe(self, value: float, *labels: str) -> None:
        """Count one number."""
        counts = self._counts.get(labels)
        if counts is None:
            counts = self._counts[labels] = [0] * len(self._names)
            self._sums[labels] = 0.0
        counts[bisect_left(self._bounds, value)] += 1
        self._sums[labels] += value

    def collect(self) -> Iterator[Metric]:
        """Yield the current values as one metric family."""
        family = HistogramMetricFamily(*self._about, labels=self._labels)
        for labels, counts in self._counts.items():
            buckets = list(zip(self._names, accumulate(counts), strict=True))
            family.add_metric(labels, buckets, self._sums[labels])
        yield family
