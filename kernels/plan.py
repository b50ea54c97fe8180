"""What a plan is: a kernel, and the units of work into which it cuts a problem."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from kernels.problem import ConvProblem, storage_dtype

__all__ = [
    "Device",
    "Kernel",
    "Plan",
    "Runs",
    "Stop",
    "Storage",
    "Task",
    "Unit",
    "algorithm_of",
    "box",
    "macs_of",
    "work_of",
]

Storage = npt.NDArray[Any]
Stop = Callable[[], bool]
Device = Literal["cpu", "cuda"]


@dataclass(frozen=True)
class Unit:
    """One piece of work for one worker; pure: run twice, it writes the same bytes.

    `offset` and `shape` are the box of the output that is final when the unit is done, None for a unit that only
    leaves partial sums in the shared scratch. All units of a stage finish before the next stage starts. `part` is
    the kernel's own description of the work. If they are given, a unit reads only those `images` of src and diff_dst,
    from the first to behind the last, and writes only those bytes of the `scratch`.
    """

    index: int
    stage: int
    offset: tuple[int, ...] | None
    shape: tuple[int, ...] | None
    macs: int
    part: tuple[int, ...] = ()
    images: tuple[int, int] | None = None
    scratch: tuple[int, int] | None = None


BYTE_MACS = 5
"""Multiply-adds that take as long as moving a byte from or to memory: depthwise operations wait for that."""


class Task(Protocol):
    """What a plan computes, as the workers see it: the tensors that it reads, and what it writes."""

    @property
    def dtype(self) -> str:
        """The dtype of all inputs."""

    @property
    def n(self) -> int:
        """Number of images."""

    @property
    def macs(self) -> int:
        """Nominal multiply-adds."""

    @property
    def input_shapes(self) -> tuple[tuple[int, ...], ...]:
        """Shapes of the inputs."""

    @property
    def output_shape(self) -> tuple[int, ...]:
        """Shape of the output."""

    @property
    def output_dtype(self) -> np.dtype[Any]:
        """NumPy dtype in which the output is stored."""


@dataclass(frozen=True)
class Plan:
    """How a problem is computed: the kernel, its units, the scratch they share, and why other kernels refused."""

    problem: Task
    kernel: str
    units: tuple[Unit, ...]
    stages: int
    scratch_bytes: int
    refusals: tuple[str, ...]

    @property
    def macs(self) -> int:
        """Nominal multiply-adds of the whole problem."""
        return self.problem.macs

    @property
    def algorithm(self) -> Literal["direct", "winograd"]:
        """How the kernel sums, which is part of its name."""
        return "winograd" if "winograd" in self.kernel else "direct"


def macs_of(problem: ConvProblem, shape: Sequence[int]) -> int:
    """Return the nominal multiply-adds of a box of the output."""
    return problem.macs * prod(shape) // max(1, prod(problem.output_shape))


def work_of(problem: ConvProblem) -> int:
    """Return the multiply-adds that take as long as the problem, which may have to wait for memory."""
    shapes = *problem.input_shapes, problem.output_shape
    return max(problem.macs, BYTE_MACS * storage_dtype(problem.dtype).itemsize * sum(map(prod, shapes)))


def algorithm_of(plans: Sequence[Plan]) -> Literal["direct", "winograd"]:
    """Return how the outputs of a call are summed: `winograd` if any of its `plans` is."""
    return "winograd" if any(plan.algorithm == "winograd" for plan in plans) else "direct"


class Runs(Protocol):
    """What can do the units of its own plans."""

    name: str

    def run(
        self, problem: Any, unit: Unit, inputs: Sequence[Storage], output: Storage, scratch: Storage | None, stop: Stop
    ) -> bool:
        """Do one unit; False when `stop` said so."""


class Kernel(Runs, Protocol):
    """One way to compute some problems."""

    def refuse(self, problem: ConvProblem) -> str | None:
        """Return why this kernel does not take the problem; None when it does."""

    def units(self, problem: ConvProblem, workers: int) -> tuple[list[Unit], int]:
        """Cut the problem into units for that many workers; also give the bytes of shared scratch they need."""


def box(output: Storage, unit: Unit) -> Storage:
    """View the part of the output that `unit` makes final."""
    assert unit.offset is not None
    assert unit.shape is not None
    return output[tuple(slice(start, start + size) for start, size in zip(unit.offset, unit.shape, strict=True))]
