"""Which units of a job wait, run on this machine, and are with Ray."""

from __future__ import annotations

import time
from collections import deque

__all__ = ["Split"]

_OVERDUE_S, _OVERDUE_TIMES, _SEND_RATE = 1.0, 4.0, 100e6
"""A unit is overdue after these seconds, the transfer of all inputs, and so many times the job's slowest unit.

Ray itself gives up on a machine only when its node fails health checks, and never on a worker that hangs.
"""

_MOST_LOSSES = 3
"""Workers of the cluster that may end during a unit; then this machine's compute it, which find out what it does."""


class Split:
    """Share the units of one job between `workers` of this machine and Ray; both take the next one when they are free.

    A unit is in one place at a time: an overdue one has to come back from Ray before it is computed here.
    """

    def __init__(self, units: int, *, nbytes: int, workers: int) -> None:
        self._waiting, self._returned = deque(range(units)), deque[int]()
        self._here: dict[int, float] = {}
        self._there: dict[int, float] = {}
        self._recalled: set[int] = set()
        self._losses: dict[int, int] = {}
        self._workers, self._transfer_s, self._slowest_s = workers, nbytes / _SEND_RATE, 0.0

    def next_here(self) -> int | None:
        """Take a unit for this machine if a worker is free; what came back from Ray is first."""
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

    def overdue(self) -> list[int]:
        """Return the units that Ray has had for too long, each once."""
        before = time.monotonic() - self._patience()
        found = [unit for unit, since in self._there.items() if since < before and unit not in self._recalled]
        self._recalled.update(found)
        return found

    def done(self, unit: int) -> None:
        """Take note that a unit is done, by either side."""
        since = self._here.pop(unit, None) or self._there.pop(unit, None)
        if since is not None and unit not in self._recalled:
            self._slowest_s = max(self._slowest_s, time.monotonic() - since)

    def returned(self, unit: int, *, lost: bool) -> None:
        """Take a unit back from Ray: one `lost` with its worker may go to another machine, an overdue one may not."""
        del self._there[unit]
        self._losses[unit] = self._losses.get(unit, 0) + lost
        if lost and self._losses[unit] < _MOST_LOSSES:
            self._waiting.appendleft(unit)
        else:
            self._returned.append(unit)

    def _patience(self) -> float:
        return _OVERDUE_S + self._transfer_s + _OVERDUE_TIMES * self._slowest_s
