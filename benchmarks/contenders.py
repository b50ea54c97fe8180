"""What is timed: one computation of one layer in one layout, by our kernels or by a peer."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np

from benchmarks.accuracy import Tensor, stored
from benchmarks.memory import empty
from benchmarks.team import Team
from kernels import ConvProblem, Unit, plan, run_unit, storage_dtype
from kernels.arena import arena_bytes

__all__ = ["CLOCKS", "Contender", "Ours"]

CLOCKS: dict[str, Callable[[], float]] = {"wall": time.perf_counter, "cpu": time.thread_time}
"""Wall clock, or CPU clock of the calling thread: for a single thread on a shared machine."""


class Contender(ABC):
    """One way to compute one layer in one layout."""

    def __init__(self, who: str, problem: ConvProblem, clock: str) -> None:
        self.who = who
        self.problem = problem
        self.layout = problem.data_format
        self.clock = CLOCKS[clock]

    @property
    def part(self) -> str:
        """The part of a layer's row that it is recorded in."""
        return self.who if self.who in ("ours", "direct") else "peer"

    @abstractmethod
    def call(self) -> Any:
        """Compute once, into memory of its own."""

    @abstractmethod
    def result(self, called: Any) -> tuple[Tensor, ConvProblem]:
        """Return what `call` returned as a tensor, with the problem whose output layout it has."""

    def first(self) -> tuple[float, Any]:
        """Compute once; return the seconds and what `call` returned."""
        begin = self.clock()
        called = self.call()
        return self.clock() - begin, called

    def time(self, repeats: int) -> float:
        """Return the seconds per call, the mean of `repeats` consecutive calls."""
        begin = self.clock()
        for _ in range(repeats):
            self.call()
        return (self.clock() - begin) / repeats

    def about(self) -> dict[str, Any]:
        """Return how it computes, as far as that is known."""
        return {}

    def close(self) -> None:  # noqa: B027 -- most have nothing to give back
        """Release threads and memory."""


class Ours(Contender):
    """Our kernels: the units of the plan on `threads` threads, stage by stage.

    Each contender has its own threads, so that their scratch memory is what this layer and layout need.
    """

    def __init__(self, problem: ConvProblem, inputs: list[Tensor], threads: int, clock: str, who: str = "ours") -> None:
        super().__init__(who, problem, clock)
        self.plan = plan(problem, workers=threads)
        self._inputs = [stored(tensor) for tensor in inputs]
        self._scratch = np.empty(self.plan.scratch_bytes, np.uint8) if self.plan.scratch_bytes else None
        self._stages = [[u for u in self.plan.units if u.stage == s] for s in range(self.plan.stages)]
        self._team = Team(threads)
        self._first = ThreadPoolExecutor(1, initializer=self._team.keep)

    def call(self) -> Tensor:
        """Compute with this thread and, for stages with more than one unit, with the others of the team."""
        output = empty(self.problem.output_shape, storage_dtype(self.problem.dtype))
        for units in self._stages:
            left = iter(units)
            if len(units) == 1:
                self._work(left, output)
            else:
                self._team.run(partial(self._work, left, output))
        return output

    def _work(self, units: Iterable[Unit], output: Tensor) -> None:
        """Run units until none is left; the iterator is shared and its steps are atomic."""
        for unit in units:
            run_unit(self.plan, unit, self._inputs, output, self._scratch)

    def first(self) -> tuple[float, Any]:
        """Compute on the team's first thread, which then holds the scratch."""
        return self._first.submit(super().first).result()

    def time(self, repeats: int) -> float:
        """Time on that thread."""
        return self._first.submit(super().time, repeats).result()

    def result(self, called: Any) -> tuple[Tensor, ConvProblem]:
        """Return the output with its problem."""
        return called, self.problem

    def about(self) -> dict[str, Any]:
        """Return the kernel, how the work is split, and the bytes of scratch: the most of a thread, and the shared."""
        held: list[int] = []
        self._first.submit(self._team.run, lambda: held.append(arena_bytes())).result()
        return {
            "kernel": self.plan.kernel,
            "units": len(self.plan.units),
            "stages": self.plan.stages,
            "worker_scratch_bytes": max(held),
            "shared_scratch_bytes": self.plan.scratch_bytes,
        }

    def close(self) -> None:
        """Stop the threads, which frees their scratch memory."""
        self._first.shutdown()
        self._team.close()
