"""From a resolved operation to the kernels' problem and plan, within limits."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from typing import Any

import numpy as np

from convgrad._dtypes import dtype
from convgrad._errors import TooLarge
from engine.container import memory_bytes
from engine.options import Options
from kernels import ConvProblem, Plan, plan
from kernels.plan import Device, algorithm_of
from kernels.problem import Algorithm, Dims
from kernels.reference import REFERENCE
from kernels.target import target
from kernels.winograd.rules import refusals
from schemas.broken_rules import dims as written
from schemas.ops import ResolvedOp, TensorSpec
from verify.arithmetic import Arithmetic
from verify.fast import fast_scratch, plan_fast_verification
from verify.projections import Projection, is_projectable, projected_macs
from verify.report import report_work
from verify.tolerance import plan_tolerance, reading_macs
from verify.unit import copied_bytes, plan_verification, verification_macs, verification_scratch

__all__ = [
    "Computation",
    "Limits",
    "Prepared",
    "call_bytes",
    "check_limit",
    "check_limits",
    "is_fast",
    "is_planned_at_once",
    "plan_call",
    "plan_verification_call",
    "problem_of",
    "tensor_bytes",
    "verification_cost",
    "work_of_taps",
    "work_of_tolerance",
    "work_of_verification",
]


@dataclass(frozen=True)
class Limits:
    """The limits of calls, by default the memory of this process alone; sizes are in bytes."""

    workers: int
    """Workers of this machine, which verify."""
    remote_workers: int = 0
    """Workers of other machines: calls are cut into units for both."""
    work_limit: float = math.inf
    """Most multiply-adds of a call."""
    output_limit: float = math.inf
    """Largest outputs of a call, together."""
    memory_budget: int = field(default_factory=memory_bytes)
    """Largest tensors and scratch of a call, together."""
    full_verification: float = 1e13
    """Most multiply-adds of a verification by the reference; beyond it, projections verify by default."""
    device: Device = "cpu"
    """Where operations are computed; verifications always are on the CPU."""


_MOST_TAPS, _MOST_CHANNELS = 1 << 17, 1 << 21
"""Planning takes up to a tenth of a second below these limits, and a plan's tables some tens of megabytes."""

_AT_ONCE = {"taps": 1 << 9, "phases": 1 << 8, "channels": 1 << 13, "positions": 1 << 23, "units": 1 << 8}
"""Planning takes a few milliseconds at most below these limits."""

_REFERENCE_UNITS = 1 << 14
"""Most images of a forward operation, or filter taps of a gradient, that the reference kernel takes."""

_TAP_MACS = 1 << 18
"""Overhead of a verification for one tap of one image, in multiply-adds that take as long: 26 to 40 µs, where NumPy
does 7 to 21 GMAC/s (Zen 4, layers of 16 to 256 channels)."""

_SHORT_WORK, _SHORT_UNIT, _SHORT_UNUSUAL = 1 << 28, 1 << 27, 1 << 24
"""Most work of a call of the reference kernel whose units are short, and most multiply-adds of a short unit of other
kernels, which do one a nanosecond where shapes are unusual."""

_TINY_MACS, _TINY_BYTES, _TINY_UNITS = 1 << 21, 1 << 20, 16
"""Most work, memory and units of a call that takes about a millisecond at most."""

_REFERENCE_MACS = 1 << 30
"""Most multiply-adds of a call where no compiled code works and the reference kernel computes."""

Cause = tuple[list[str | int], str]
"""What makes a call too large: its place in the request, and a text with its name and size."""

_SUMMED = ("gmac", "units", "tiles", "scratch_bytes")
"""What a description adds up over several outputs."""

_READ = {"diff_weights": ("src", "diff_dst"), "diff_src": ("diff_dst", "weights"), "diff_bias": ("diff_dst",)}
"""The inputs that each gradient is computed from, in the kernels' order; a forward operation reads all it has."""

_SWAPPED = str.maketrans("IO", "OI")


@dataclass(frozen=True)
class Computation:
    """One output of a call: its plan, and the names of the inputs that it reads, in the kernels' order."""

    output: TensorSpec
    plan: Plan
    inputs: tuple[str, ...]
    short: bool
    """Whether each unit takes some ten milliseconds at most."""
    tiny: bool = False
    """Whether all units together take about a millisecond at most."""

    # Every run needs these: they are derived once.

    @cached_property
    def nbytes(self) -> int:
        """Size in bytes of what is computed."""
        problem = self.plan.problem
        return prod(problem.output_shape) * problem.output_dtype.itemsize

    @cached_property
    def tiles(self) -> int:
        """Number of boxes that become final one by one."""
        return sum(unit.offset is not None for unit in self.plan.units)

    def stats(self) -> dict[str, Any]:
        """Return how the output is computed and what it costs, as JSON."""
        plan = self.plan
        return {"kernel": plan.kernel, "algorithm": plan.algorithm, "gmac": plan.macs / 1e9, "tiles": self.tiles}

    def describe(self) -> dict[str, Any]:
        """Return how the output would be computed, as JSON."""
        return self.stats() | {
            "reproducible": self.plan.kernel == REFERENCE.name,
            "units": len(self.plan.units),
            "stages": self.plan.stages,
            "scratch_bytes": self.plan.scratch_bytes,
            "refusals": list(self.plan.refusals),
        }


@dataclass(frozen=True)
class Prepared:
    """A call that has passed every check, with the plan of each output; its tensors may still be arriving.

    `names` are the inputs as the caller named them, by canonical name.
    """

    op: ResolvedOp
    computations: tuple[Computation, ...]
    options: Options
    names: Mapping[str, str]

    @property
    def plan(self) -> Plan:
        """The plan of the first output."""
        return self.computations[0].plan

    # Every run needs these: they are derived once.

    @cached_property
    def plans(self) -> tuple[Plan, ...]:
        """The plan of each output."""
        return tuple([each.plan for each in self.computations])

    @cached_property
    def algorithm(self) -> str:
        """How the call is summed: `winograd` if any output is."""
        return algorithm_of(self.plans)

    @cached_property
    def resolved(self) -> dict[str, Any]:
        """The reply's `resolved` object, with the algorithm if the caller chose it."""
        chosen = {} if self.options.algorithm == "direct" else {"algorithm": self.algorithm}
        return self.op.reply_attributes() | chosen

    @cached_property
    def units(self) -> int:
        """The number of units of all outputs."""
        return sum(len(computation.plan.units) for computation in self.computations)

    @cached_property
    def tiny(self) -> bool:
        """Whether the call takes about a millisecond at most."""
        return all(each.tiny for each in self.computations)

    @cached_property
    def memory(self) -> int:
        """Bytes of outputs and scratch."""
        return sum(each.nbytes + each.plan.scratch_bytes for each in self.computations)

    @cached_property
    def reads(self) -> list[list[str]]:
        """For each output, the names that the caller gave the inputs that it is computed from."""
        return [[self.names.get(name, name) for name in each.inputs] for each in self.computations]

    @cached_property
    def results(self) -> dict[str, tuple[tuple[int, ...], np.dtype[Any]]]:
        """Shape and dtype of each output, by the name that the caller reads."""
        outputs = [each.output for each in self.computations]
        return {self.op.wire_name(each.name): (each.shape, dtype(each.dtype).numpy) for each in outputs}

    def stats(self, seconds: float) -> dict[str, Any]:
        """Return how a call was computed in `seconds`, as JSON; of several outputs also one by one."""
        return {**self._stats, "compute_ms": round(seconds * 1000, 3)}

    @cached_property
    def _stats(self) -> dict[str, Any]:
        return self._joined([one.stats() for one in self.computations])

    def describe(self) -> dict[str, Any]:
        """Describe how the call would be computed and what it costs, as JSON; several outputs also one by one."""
        return self._joined([one.describe() for one in self.computations])

    def _joined(self, each: list[dict[str, Any]]) -> dict[str, Any]:
        if len(each) == 1:
            return each[0]
        names = [self.op.wire_name(one.output.name) for one in self.computations]
        summed = {key: sum(one[key] for one in each) for key in _SUMMED if key in each[0]}
        return {**each[0], "algorithm": self.algorithm, **summed, "outputs": dict(zip(names, each, strict=True))}


def problem_of(op: ResolvedOp, output: str | None = None) -> ConvProblem:
    """Build the kernels' descriptor of one output of `op`, by default the first."""
    output = output or op.output.name
    names: dict[str, Any] = {  # the schemas' tables allow exactly what the kernels' literals name
        "op": op.op,
        "dtype": op.dtype,
        "data_format": op.data_format,
    }
    if output == "diff_bias" or not op.called.operation.convolves:
        names["op"] = "BiasAdd" if output == "dst" else "BiasAddBackward"
        return ConvProblem.of_bias(**names, n=op.n, channels=op.dst_channels, spatial=op.dst_spatial)
    names |= {"weights_format": op.weights_format, "groups_axis": op.groups_axis}
    src, dst = (op.src_channels, op.src_spatial), (op.dst_channels, op.dst_spatial)
    if output == "diff_src":
        # The other forward operation on diff_dst, with I and O of the weights swapped.
        src, dst = dst, src
        names["op"] = "Convolution" if op.called.operation.transposed else "ConvTranspose"
        names["weights_format"] = op.weights_format.translate(_SWAPPED)
        names["groups_axis"] = op.groups_axis.translate(_SWAPPED)
    return ConvProblem(
        **names,
        n=op.n,
        src_channels=src[0],
        dst_channels=dst[0],
        groups=op.groups,
        src_spatial=src[1],
        dst_spatial=dst[1],
        kernel=op.kernel,
        strides=op.strides,
        dilations=op.dilations,
        pads_begin=op.pads_begin,
        bias=output == "dst" and any(spec.name == "bias" for spec in op.inputs),
    )


def tensor_bytes(spec: TensorSpec) -> int:
    """Return the size of a tensor in bytes."""
    return prod(spec.shape) * dtype(spec.dtype).itemsize


def check_limits(op: ResolvedOp, limits: Limits, taps: int = 0) -> None:
    """Raise `TooLarge` when work, tensors or the plan exceed a limit, before anything is planned.

    `taps` is the part of the work that is the overhead of a verification's filter taps.
    """
    work = "multiply-adds"
    if taps:
        work += f", {taps} of them for the overhead of its filter taps"
    cause = _weights(op) if 2 * taps > op.macs else _largest(op)
    check_limit("work", op.macs, limits.work_limit, work, cause)
    if not target().compiles:
        work += " of the reference kernel, as no compiled code works on this processor (/readyz has the reason)"
        check_limit("work", op.macs, _REFERENCE_MACS, work, cause)
    output = max(op.outputs, key=tensor_bytes)
    largest = _cause(op, "outputs", output.name, output.shape)
    check_limit("output", sum(map(tensor_bytes, op.outputs)), limits.output_limit, "bytes of output", largest)
    check_limit("memory", call_bytes(op), limits.memory_budget, "bytes of tensors", _largest(op))
    for output in op.outputs:
        problem = problem_of(op, output.name)
        channels = max(problem.dims.wide_channels, problem.dims.narrow_channels)
        check_limit("plan", prod(problem.kernel), _MOST_TAPS, "taps", _weights(op), "the filter has")
        check_limit("plan", channels, _MOST_CHANNELS, "channels", _weights(op), "a group has")


def _check_reference(op: ResolvedOp, problem: ConvProblem) -> None:
    check_limit("plan", _reference_units(problem), _REFERENCE_UNITS, "units of the reference kernel", _units(op))


def _check_scratch(op: ResolvedOp, scratch: int, limits: Limits) -> None:
    needed = call_bytes(op) + scratch
    check_limit("scratch", needed, limits.memory_budget, "bytes of tensors and scratch", _largest(op))


def check_limit(reason: str, value: int, limit: float, what: str, cause: Cause, has: str = "the call needs") -> None:
    """Raise `TooLarge` if a value exceeds its limit."""
    if value > limit:
        loc, most = cause
        raise TooLarge(
            f"{has} {value} {what}, but this service allows {limit}: {most}",
            data={"reason": reason, "limit": limit, "value": value, "loc": loc},
        )


def is_planned_at_once(op: ResolvedOp, reference: bool = False) -> bool:
    """Whether `plan_call` is fast enough for the event loop: for all but very unusual shapes."""
    return all(_is_quick(problem_of(op, output.name).dims, reference) for output in op.outputs)


def _is_quick(dims: Dims, reference: bool) -> bool:
    limit = _AT_ONCE
    return (
        prod(dims.kernel) <= limit["taps"]
        and prod(dims.strides) <= limit["phases"]
        and max(dims.wide_channels, dims.narrow_channels) <= limit["channels"]
        and dims.n * prod(dims.narrow) <= limit["positions"]
        and not (reference and dims.n > limit["units"])
    )


def plan_call(
    op: ResolvedOp, limits: Limits, reference: bool = False, algorithm: Algorithm = "direct"
) -> tuple[Computation, ...]:
    """Plan each output of `op` for this service's workers; those that Winograd can't compute are summed directly.

    Raises `TooLarge` when the scratch memory or the units exceed a limit.
    """
    computations = []
    for spec in op.outputs:
        problem = problem_of(op, spec.name)
        if algorithm != "direct" and limits.device == "cpu" and not reference and not refusals(problem):
            problem = replace(problem, algorithm=algorithm)
        if reference:
            _check_reference(op, problem)
        workers = limits.workers + limits.remote_workers
        chosen = plan(problem, workers=workers, reference=reference, device=limits.device)
        short = _is_short(problem, chosen)
        tiny = short and limits.device == "cpu" and _is_tiny(op, problem, chosen)
        computations.append(Computation(spec, chosen, _inputs_of(op, spec), short, tiny))
    _check_scratch(op, sum(each.plan.scratch_bytes for each in computations), limits)
    return tuple(computations)


def is_fast(op: ResolvedOp, limits: Limits, asked: bool | None) -> bool:
    """Whether the result of `op` is verified by projections: if requested, or if the reference takes too long."""
    beyond = work_of_verification(op, fast=False) > limits.full_verification
    return asked is not False and bool(asked or beyond) and is_projectable(problem_of(op))


def work_of_verification(op: ResolvedOp, *, fast: bool) -> int:
    """Return the multiply-adds of a verification, with the overhead of its filter taps."""
    problem = problem_of(op)
    macs = projected_macs(problem) if fast else verification_macs(op.dtype, op.macs) + report_work(problem)
    return macs + work_of_taps(op)


def work_of_tolerance(op: ResolvedOp, arithmetic: Arithmetic) -> int:
    """Return the multiply-adds of a tolerance: those of a verification, and of the sums of rounded inputs."""
    return work_of_verification(op, fast=False) + reading_macs(problem_of(op), arithmetic)


def work_of_taps(op: ResolvedOp) -> int:
    """Return the overhead of a verification's filter taps, in multiply-adds that take as long."""
    return _TAP_MACS * op.n * prod(op.kernel)


def plan_verification_call(
    op: ResolvedOp, limits: Limits, arithmetic: Arithmetic, *, explain: bool = False, fast: bool = False,
    tolerance: bool = False,
) -> Computation:  # fmt: skip
    """Plan the verification of a result, the last input of `op`, or a tolerance; raises what `plan_call` raises."""
    problem = problem_of(op)
    if tolerance:
        _check_reference(op, problem)
        chosen = plan_tolerance(problem, workers=limits.workers, arithmetic=arithmetic)
    elif fast:
        chosen = plan_fast_verification(problem, explain=explain, arithmetic=arithmetic)
    else:
        _check_reference(op, problem)
        chosen = plan_verification(problem, workers=limits.workers, explain=explain, arithmetic=arithmetic)
    copied = 0 if fast else copied_bytes(problem, limits.workers)
    _check_scratch(op, chosen.scratch_bytes + copied, limits)
    read = _inputs_of(op, op.output) if tolerance else (*_inputs_of(op, op.output), op.inputs[-1].name)
    return Computation(op.output, chosen, read, not fast and op.macs <= _SHORT_WORK)


def _inputs_of(op: ResolvedOp, output: TensorSpec) -> tuple[str, ...]:
    """Return the names of the inputs that an output is computed from, in the kernels' order."""
    return _READ.get(output.name) or tuple([given.name for given in op.inputs if given.name != output.name])


def verification_cost(op: ResolvedOp, limits: Limits) -> dict[str, Any]:
    """Return what verifying the result of `op` costs, as JSON, and whether this service allows it."""
    problem, fast = problem_of(op), is_fast(op, limits, None)
    units = Projection(problem, 0).blocks if fast else max(1, _reference_units(problem))
    scratch, macs = (fast_scratch if fast else verification_scratch)(problem), work_of_verification(op, fast=fast)
    copied = 0 if fast else copied_bytes(problem, limits.workers)
    needed = call_bytes(op) + tensor_bytes(op.output) + scratch + copied
    allowed = units <= _REFERENCE_UNITS and needed <= limits.memory_budget and macs <= limits.work_limit
    return {"gmac": macs / 1e9, "units": units + 1, "scratch_bytes": scratch, "allowed": allowed, "fast": fast}


def _is_short(problem: ConvProblem, chosen: Plan) -> bool:
    """Whether each unit takes some ten milliseconds at most."""
    if chosen.kernel == REFERENCE.name:
        work = verification_macs(problem.dtype, problem.macs) + _TAP_MACS * problem.n * prod(problem.kernel)
        return work <= _SHORT_WORK
    most = _SHORT_UNIT if _is_quick(problem.dims, reference=False) else _SHORT_UNUSUAL
    return max([unit.macs for unit in chosen.units], default=0) <= most


def _is_tiny(op: ResolvedOp, problem: ConvProblem, chosen: Plan) -> bool:
    """Whether all units together take about a millisecond at most."""
    return (
        chosen.kernel != REFERENCE.name
        and chosen.macs <= _TINY_MACS
        and call_bytes(op) + chosen.scratch_bytes <= _TINY_BYTES
        and len(chosen.units) <= _TINY_UNITS
        and _is_quick(problem.dims, reference=False)
    )


def _reference_units(problem: ConvProblem) -> int:
    return problem.n if problem.forward else prod(problem.kernel)


def call_bytes(op: ResolvedOp) -> int:
    """Return the size in bytes of all tensors of a call, outputs included."""
    return sum(map(tensor_bytes, (*op.inputs, *op.outputs)))


# What an error names when a call is too large.


def _cause(op: ResolvedOp, kind: str, name: str, shape: tuple[int, ...]) -> Cause:
    wire = op.wire_name(name)
    return [kind, wire], f"{wire} is {written(shape)}"


def _largest(op: ResolvedOp) -> Cause:
    tensors = [*(("outputs", spec) for spec in op.outputs), *(("inputs", spec) for spec in op.inputs)]
    kind, spec = max(tensors, key=lambda each: prod(each[1].shape))
    return _cause(op, kind, spec.name, spec.shape)


def _weights(op: ResolvedOp) -> Cause:
    if not op.called.operation.convolves:
        return _largest(op)
    given = any(spec.name == "weights" for spec in op.inputs)
    return _cause(op, *(("inputs", "weights") if given else ("attributes", "weights_shape")), op.weights_shape)


def _units(op: ResolvedOp) -> Cause:
    """Find the tensor that determines the number of units of the reference kernel: by images, or by filter taps."""
    if op.output.name == "diff_weights":
        return _weights(op)
    return _cause(op, "inputs", op.inputs[0].name, op.inputs[0].shape)
