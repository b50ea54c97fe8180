"""From a problem to units of work, and from a unit to bytes: who computes what, in order; the reference comes last."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache

import numpy as np

from kernels.arena import arena_trim
from kernels.bias import BIAS_ADD, BIAS_SUMS
from kernels.cache import cached
from kernels.emit.compiler import ENTRIES
from kernels.forward.tiles import CONV_TRANSPOSE, CONVOLUTION, FORWARD_DOTS
from kernels.gpu.unit import GPU_KERNELS
from kernels.gradient.tiles.unit import BWD_WEIGHTS
from kernels.plan import Device, Kernel, Plan, Runs, Stop, Storage, Unit
from kernels.problem import ConvProblem, storage_dtype
from kernels.reference import REFERENCE
from kernels.target import target
from kernels.winograd.rules import refusals

__all__ = ["by_name", "compute", "explain", "plan", "register", "run_unit", "warmup"]

KERNELS: tuple[Kernel, ...] = (
    (BWD_WEIGHTS, CONV_TRANSPOSE, CONVOLUTION, BIAS_SUMS, BIAS_ADD, REFERENCE) if target().compiles else (REFERENCE,)
)

if target().dots:  # compiled only where the processor can run it
    from kernels.gradient.dots.unit import BWD_DOTS

    if target().dots == "amx":
        from kernels.forward.amx import FORWARD_AMX as FORWARD_DOTS
    KERNELS = (*FORWARD_DOTS, BWD_DOTS, *KERNELS)

if target().compiles:
    from kernels.forward.winograd import ForwardWinograd
    from kernels.gradient.winograd.unit import BwdWinograd

    KERNELS = (ForwardWinograd(), BwdWinograd(KERNELS), *KERNELS)


_ELSEWHERE: dict[str, Runs] = {}


def register(runs: Runs) -> None:
    """Let `run_unit` find what another package computes, by its name; whoever unpickles its plan imports it."""
    _ELSEWHERE[runs.name] = runs


@cache
def by_name(name: str) -> Runs:
    """Find a kernel by its name."""
    return _ELSEWHERE.get(name) or next(kernel for kernel in (*KERNELS, *GPU_KERNELS.values()) if kernel.name == name)


def explain(problem: ConvProblem) -> str:
    """Return which kernel takes `problem` and why the ones before it refused."""
    chosen = plan(problem)
    return "\n".join([*chosen.refusals, f"{chosen.kernel}: taken, {len(chosen.units)} units"])


@cached
def plan(problem: ConvProblem, *, workers: int = 1, reference: bool = False, device: Device = "cpu") -> Plan:
    """Choose a kernel for `problem` and cut the work into units for `workers`.

    The bits of the result depend on the problem alone: more workers get more units, but every sum is formed in the
    same order. With `reference` the float64 kernel is taken, and always for f64, which no other kernel has. On the
    device "cuda" a problem is one unit for a GPU (`kernels.gpu`).

    Raises ValueError with the rules that `problem` breaks where its algorithm is ``winograd``
    (`kernels.winograd.rules.refusals` gives them one by one, before any tensor is there).
    """
    if problem.algorithm == "winograd" and not reference and (broken := refusals(problem)):
        raise ValueError("; ".join(str(each) for each in broken))
    reasons: list[str] = []
    exact = reference or problem.dtype == "f64"
    on_cpu = (REFERENCE,) if exact else KERNELS
    for kernel in on_cpu if device == "cpu" else (GPU_KERNELS[exact],):
        reason = kernel.refuse(problem)
        if reason is None:
            units, scratch_bytes = kernel.units(problem, workers)
            stages = max(unit.stage for unit in units) + 1
            return Plan(problem, kernel.name, tuple(units), stages, scratch_bytes, tuple(reasons))
        reasons.append(f"{kernel.name}: {reason}")
    raise AssertionError(f"no kernel takes {problem}: {reasons}")


def run_unit(
    plan: Plan,
    unit: Unit,
    inputs: Sequence[Storage],
    output: Storage,
    scratch: Storage | None = None,
    stop: Stop = lambda: False,
) -> bool:
    """Do one unit of a plan in this thread, without the GIL while it computes.

    `inputs` and `output` are C-contiguous with the problem's shapes, f32 and f64 as such, f16 and bf16 as the uint16
    that hold their bits; `scratch` holds `plan.scratch_bytes`. `stop` is asked every few milliseconds of work.

    Returns False when `stop` ended the work early; the unit's part of the output is then undefined.
    """
    try:
        return by_name(plan.kernel).run(plan.problem, unit, inputs, output, scratch, stop)
    finally:
        arena_trim()


def compute(problem: ConvProblem, *inputs: Storage, reference: bool = False, workers: int = 1) -> Storage:
    """Compute the whole problem in this thread and return the stored result (see `run_unit` for the dtypes)."""
    chosen = plan(problem, reference=reference, workers=workers)
    output = np.empty(problem.output_shape, storage_dtype(problem.dtype))
    scratch = np.empty(chosen.scratch_bytes, np.uint8) if chosen.scratch_bytes else None
    for unit in chosen.units:
        run_unit(chosen, unit, inputs, output, scratch)
    return output


def warmup() -> Iterator[tuple[int, int]]:
    """Compile, or load from the cache, everything that a call may need, and yield (done, total) as it goes."""
    entries = ENTRIES if target().compiles else []
    for done, entry in enumerate(entries):
        yield done, len(entries)
        entry.make()
    yield len(entries), len(entries)
