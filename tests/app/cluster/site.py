"""The engine `ray` with a worker of its own, and ways to see what it does."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from app.cluster.engine import RayEngine
from app.pool.jobs import Job
from app.pool.local import LocalEngine
from kernels import ConvProblem, Plan, Unit, plan
from tests.app.pool.fleet import TINY, Array, Fleet, random_inputs

JOIN_S = 150.0
"""Seconds in which a node has joined and is warm, even on a busy machine."""

WIDE = dataclasses.replace(TINY, n=8, src_channels=16, dst_channels=16, src_spatial=(58, 58), dst_spatial=(56, 56))
DEEP = dataclasses.replace(
    TINY, n=2, src_channels=256, dst_channels=256, src_spatial=(14, 14), dst_spatial=(12, 12), strides=(1, 1)
)
"""Its units are blocks of channels; those of WIDE are sums over some of the images."""


class Site:
    """A `Fleet` whose engine is `RayEngine`, which sends every job that can travel to the cluster."""

    def __init__(self, address: str, **options: Any) -> None:
        self.fleet = Fleet(1, spare=True)
        self.ray = RayEngine(self.fleet.segments, workers=1, address=address, expected=8, costs=None, **options)
        self.fleet.engine = self.ray

    @classmethod
    @contextmanager
    def open(cls, address: str, **options: Any) -> Iterator[Site]:
        """Start an engine; stop it when the block ends."""
        made = cls(address, **options)
        made.fleet.run(made.ray.start())
        try:
            yield made
        finally:
            made.fleet.run(made.ray.stop())
            made.fleet.segments.close()
            made.fleet.runner.close()

    def until(self, condition: Callable[[], object], patience_s: float = JOIN_S) -> float:
        """Wait until a condition holds; return how long it took in seconds."""
        start = time.monotonic()
        self.fleet.run(self.fleet.until(condition), patience_s)
        return time.monotonic() - start

    def ready(self) -> int:
        """Count the workers of the cluster that are ready."""
        return self.ray.cluster_workers

    def whole(self, workers: int = 1) -> float:
        """Wait until the engine's own worker and that of the other node are ready."""
        self.fleet.run(self.fleet.whole(), JOIN_S)
        return self.until(lambda: self.ready() == workers and len(self.ray.nodes) == workers)

    def counter(self, name: str) -> int:
        """Return a counter of the engine."""
        return int(self.fleet.counters[f"cluster_{name}"])

    def here(self, chosen: Plan, inputs: list[Array]) -> Array:
        """Compute a plan on this machine's workers."""
        job = self.fleet.job(chosen, inputs)

        async def finish() -> Array:
            await LocalEngine.run(self.ray, job)
            return self._result(job)

        try:
            return self.fleet.run(finish())
        finally:
            self.fleet.release(job)

    def there(
        self, chosen: Plan, inputs: list[Array], disturb: Callable[[], object] = lambda: None, **more: Any
    ) -> tuple[Array, float]:
        """Compute a plan on the cluster; call `disturb` after the first unit, and after others while it returns False.

        Returns the result and the seconds from the first unit on.
        """
        return self.fleet.run(self._compute(self.fleet.job(chosen, inputs, **more), disturb), 120.0)

    async def _compute(self, job: Job, disturb: Callable[[], object]) -> tuple[Array, float]:
        start, seen, disturbed = 0.0, list[int](), False

        def look(unit: Unit) -> None:
            nonlocal start, disturbed
            disturbed = disturbed or disturb() is not False
            start = start or time.monotonic()
            seen.append(unit.index)

        job.on_unit = look
        try:
            await self.ray.run(job)
            result = self._result(job)
            assert sorted(seen) == list(range(len(job.plan.units)))
        finally:
            self.fleet.release(job)
        return result, time.monotonic() - start

    @staticmethod
    def _result(job: Job) -> Array:
        problem = job.plan.problem
        return np.frombuffer(bytes(job.output.view), problem.output_dtype).reshape(problem.output_shape)


def many(problem: ConvProblem, seed: int = 0) -> tuple[Plan, list[Array]]:
    """Return a plan for eight workers, and inputs."""
    return plan(problem, workers=8), random_inputs(problem, seed)
