"""Track the units of a job: waiting, running on this machine, or on Ray."""

from __future__ import annotations

import time
from collections import Counter, deque

__all__ = ["Split", "processors"]

_OVERDUE_S, _OVERDUE_TIMES, _SEND_RATE = 1.0, 4.0, 100e6
"""A unit is overdue after this many seconds, plus the transfer of all inputs (at this many bytes per second), plus this
many times the slowest unit of the job."""

_MOST_LOSSES = 3
"""Workers of the cluster that a unit may lose; after that it is computed on this machine."""


class Split:
    """Share the units of one job between `workers` of this machine and Ray: each takes the next one when it is free."""

    def __init__(self, units: int, *, nbytes: int, workers: int) -> None:
        self._waiting, self._returned = deque(range(units)), deque[int]()
        self._here: dict[int, float] = {}
        self._there: dict[int, float] = {}
        self._losses = Counter[int]()
        self._workers, self._transfer_s, self._slowest_s = workers, nbytes / _SEND_RATE, 0.0

    @property
    def patience(self) -> float:
        """Seconds after which a unit is overdue: Ray notices that a node is gone, but not that a worker hangs."""
        return _OVERDUE_S + self._transfer_s + _OVERDUE_TIMES * self._slowest_s

    def next_here(self) -> int | None:
        """Take a unit for this machine if a worker is free; those that came back from Ray are first."""
        if len(self._here) >= self._workers or not (units := self._returned or self._waiting):
            return None
        self._here[unit := units.popleft()] = time.monotonic()
        return unit

    def next_there(self, processors: int) -> int | None:
        """Take a unit for Ray, which has `processors` for the job.

        Each gets a second unit, whose inputs are sent while it computes the first, except when few are left: those go
        to whichever side is free first.
        """
        ahead = processors if len(self._waiting) > processors + self._workers else 0
        if len(self._there) >= processors + ahead or not self._waiting:
            return None
        self._there[unit := self._waiting.popleft()] = time.monotonic()
        return unit

    def done(self, unit: int) -> None:
        """Note that either side has computed a unit."""
        since = self._here.pop(unit, 0.0) or self._there.pop(unit)
        self._slowest_s = max(self._slowest_s, time.monotonic() - since)

    def returned(self, unit: int, *, lost: bool) -> None:
        """Take a unit back from Ray: one `lost` with its worker may go to another machine, an overdue one may not."""
        del self._there[unit]
        self._losses[unit] += lost
        again = lost and self._losses[unit] < _MOST_LOSSES
        (self._waiting if again else self._returned).appendleft(unit)


def processors(workers: int, machines: int, *, most: int, jobs: int) -> int:
    """Return how many of the `workers`, which are on `machines`, a job gets that may use `most` of the machines.

    The `jobs` of its owner share that number, so that all owners get the same.
    """
    return -(-(workers * min(most, machines) // max(1, machines)) // jobs)
