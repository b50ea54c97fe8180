"""From a problem to units of work, and from a unit to bytes: the public face of the kernels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from kernels.problem import ConvProblem, storage_dtype

__all__ = ["Kernel", "Plan", "Storage", "Unit", "box", "compute", "plan", "run_unit"]

Storage = npt.NDArray[Any]
Stop = Callable[[], bool]


@dataclass(frozen=True)
class Unit:
    """One piece of work for one worker; pure: run twice, it writes the same bytes.

    `offset` and `shape` are the box of the output that is final when the unit is done, None for a unit that only
    leaves partial sums in the shared scratch. All units of a stage finish before the next stage starts. `part` is
    the kernel's own description of the work. Of src and diff_dst a unit reads the first `images` alone, where that is
    given: it can run before the others are there.
    """

    index: int
    stage: int
    offset: tuple[int, ...] | None
    shape: tuple[int, ...] | None
    macs: int
    part: tuple[int, ...] = ()
    images: int | None = None


@dataclass(frozen=True)
class Plan:
    """How a problem is computed: the kernel, its units, the scratch they share, and why other kernels refused."""

    problem: ConvProblem
    kernel: str
    units: tuple[Unit, ...]
    stages: int
    scratch_bytes: int
    refusals: tuple[str, ...]

    @property
    def macs(self) -> int:
        """Nominal multiply-adds of the whole problem."""
        return self.problem.macs


class Kernel(Protocol):
    """One way to compute some problems."""

    name: str

    def refuse(self, problem: ConvProblem) -> str | None:
        """Say why this kernel does not take the problem; None when it does."""

    def units(self, problem: ConvProblem, workers: int) -> tuple[list[Unit], int]:
        """Cut the problem into units for that many workers; also give the bytes of shared scratch they need."""

    def run(
        self,
        problem: ConvProblem,
        unit: Unit,
        inputs: Sequence[Storage],
        output: Storage,
        scratch: Storage | None,
        stop: Stop,
    ) -> bool:
        """Do one unit; False when `stop` said so."""


def box(output: Storage, unit: Unit) -> Storage:
    """View the part of the output that `unit` makes final."""
    assert unit.offset is not None
    assert unit.shape is not None
    return output[tuple(slice(start, start + size) for start, size in zip(unit.offset, unit.shape, strict=True))]


@lru_cache(maxsize=1024)
def plan(problem: ConvProblem, *, workers: int = 1, reference: bool = False) -> Plan:
    """Choose a kernel for `problem` and cut the work into units for `workers`.

    The bits of the result depend on the problem alone: more workers get more units, but every sum is formed in the
    same order. With `reference` the float64 kernel is taken.
    """
    from kernels.registry import candidates

    refusals: list[str] = []
    for kernel in candidates(reference):
        reason = kernel.refuse(problem)
        if reason is None:
            units, scratch_bytes = kernel.units(problem, workers)
            stages = max(unit.stage for unit in units) + 1
            return Plan(problem, kernel.name, tuple(units), stages, scratch_bytes, tuple(refusals))
        refusals.append(f"{kernel.name}: {reason}")
    raise AssertionError(f"no kernel takes {problem}: {refusals}")


def run_unit(
    plan: Plan,
    unit: Unit,
    inputs: Sequence[Storage],
    output: Storage,
    scratch: Storage | None = None,
    stop: Stop = lambda: False,
) -> bool:
    """Do one unit of a plan in this thread, without the GIL while it computes.

    `inputs` and `output` are C-contiguous with the problem's shapes, f32 as float32, f16 and bf16 as the uint16 that
    hold their bits; `scratch` holds `plan.scratch_bytes`. `stop` is asked every few milliseconds of work.

    Returns False when `stop` ended the work early; the unit's part of the output is then undefined.
    """
    from kernels.registry import by_name

    return by_name(plan.kernel).run(plan.problem, unit, inputs, output, scratch, stop)


def compute(problem: ConvProblem, *inputs: Storage, reference: bool = False, workers: int = 1) -> Storage:
    """Compute the whole problem in this thread and return the stored result (see `run_unit` for the dtypes)."""
    chosen = plan(problem, reference=reference, workers=workers)
    output = np.empty(problem.output_shape, storage_dtype(problem.dtype))
    scratch = np.empty(chosen.scratch_bytes, np.uint8) if chosen.scratch_bytes else None
    for unit in chosen.units:
        run_unit(chosen, unit, inputs, output, scratch)
    return output
