"""Calls computed in this process: prepared, run on threads, and returned as arrays that own their memory."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from convgrad._dtypes import DTYPES, dtype
from convgrad._errors import TooLarge
from engine.container import cpu_count, free_memory
from engine.graphs import GraphCall, PreparedGraph, describe_graph, prepare_graph, strided
from engine.options import Options
from engine.planning import Limits, Prepared
from engine.prepare import Metas, Preparer, describe, report_of, tolerance_of
from engine.threads import Job, OnUnit, Stop, run
from kernels import Unit, box, storage_dtype
from kernels.gpu.device import GpuMemoryError, refuse
from kernels.plan import Device
from kernels.target import target
from schemas.broken_rules import broken_rule, invalid_params
from schemas.describe import describe as describe_operation
from schemas.describe import list_operations
from schemas.tensors import TensorMeta
from verify.fast import projections_of
from verify.tolerance import places_of

__all__ = ["Array", "Computed", "Engine", "Given", "OnPart", "OnProgress", "metas_of"]

Array = npt.NDArray[Any]

Given = Mapping[str, "Array | list[int]"]
"""Inputs by name: arrays in C order and native byte order, and lists of integers."""

OnPart = Callable[[int, "tuple[int, ...] | None", "Array | None"], object]
"""Called after each unit with the number of its output, and offset and content of the box that is then final."""

OnProgress = Callable[[int, int], object]
"""Called with the number of units that are done, and of all."""

_NAMES = {entry.numpy: entry.name for entry in DTYPES.values()}
_LARGE = 64 << 20
"""Calls that need more memory than this look first whether there is as much."""


@dataclass(frozen=True, slots=True)
class Computed:
    """The outputs of a call by name, in the dialect of the operation's name, and how long it took."""

    prepared: Prepared
    outputs: dict[str, Any]
    seconds: float


class Engine:
    """Compute on at most `threads` threads at a time for each caller, by default one per processor; thread-safe.

    Every method raises what the same call to a service does, with the same words: `InvalidParams` with every broken
    rule, `UnknownOperation`, `Unsupported`, `TooLarge` for what does not fit into the machine's memory, and
    `DeadlineExceeded` and `Cancelled` where `stop` ends it.
    """

    def __init__(self, threads: int = 0, device: Device = "cpu") -> None:
        if device != "cpu" and (refusal := refuse()) is not None:
            raise RuntimeError(refusal)
        self.threads = threads or cpu_count()
        self.device = device
        self.limits = Limits(self.threads, device=device)
        self.preparer = Preparer(self.limits)

    def __repr__(self) -> str:
        return f"threads {self.threads}, target {self.target}" + (f", device {self.device}" * (self.device != "cpu"))

    def run(self, prepared: Prepared, inputs: Given, stop: Stop, on_part: OnPart | None = None) -> Computed:
        """Compute a prepared call."""
        begun = time.perf_counter()
        _check_room(prepared)
        outputs = {name: np.empty(shape, dtype) for name, (shape, dtype) in prepared.results.items()}
        arrays = list(outputs.values())
        jobs = _jobs(prepared, inputs, arrays)
        with _gpu_memory():
            threads = self.threads if self.device == "cpu" else 1
            run(jobs, threads, stop, None if on_part is None else _delivering(jobs, arrays, on_part))
        return Computed(prepared, outputs, time.perf_counter() - begun)

    def metas_on_gpu(self, inputs: Mapping[str, Any]) -> dict[str, TensorMeta | list[int]] | None:
        """Return dtype and shape of tensors of PyTorch on the GPU, and the lists; None if the tensors are not there.

        Raises `InvalidParams` if some of them are and others are not.
        """
        if self.device == "cpu":
            return None
        from kernels.gpu.arrays import device_of, is_there, name_of  # loads PyTorch and Triton

        tensors = {name: value for name, value in inputs.items() if not isinstance(value, list)}
        if not any(map(is_there, tensors.values())):
            return None
        try:
            device_of(tensors)
        except ValueError as error:
            raise invalid_params("inputs", [broken_rule(["inputs"], str(error), "device")]) from error
        described = {name: TensorMeta(name_of(value), tuple(value.shape)) for name, value in tensors.items()}
        return {name: described.get(name, value) for name, value in inputs.items()}

    def run_tensors(self, prepared: Prepared, tensors: Mapping[str, Any]) -> Computed:
        """Compute a prepared call from tensors of PyTorch on the GPU, and return such, on its current stream."""
        from kernels.gpu.arrays import compute_tensors  # loads PyTorch and Triton

        begun = time.perf_counter()
        with _gpu_memory():
            found = [
                compute_tensors(plan, [tensors[name] for name in names])
                for plan, names in zip(prepared.plans, prepared.reads, strict=True)
            ]
        return Computed(prepared, dict(zip(prepared.results, found, strict=True)), time.perf_counter() - begun)

    def validate(self, name: str, attributes: Mapping[str, Any], metas: Metas, options: Options) -> dict[str, Any]:
        """Describe a call as JSON: resolved attributes, outputs, plan and cost."""
        return describe(self.preparer.prepare(name, attributes, metas, options), self.limits)

    def judge(
        self, prepared: Prepared, inputs: Given, stop: Stop, on_progress: OnProgress | None = None,
        on_gpu: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:  # fmt: skip
        """Return the report of a prepared verification: of a result, which is among the inputs.

        Tensors that are `on_gpu` too, as PyTorch's, are projected there.
        """
        report, seconds = self._bytes(prepared, inputs, stop, on_progress, on_gpu or {})
        return report_of(prepared, report.data, prepared.stats(seconds))

    def tolerance(
        self, prepared: Prepared, inputs: Given, stop: Stop, on_progress: OnProgress | None = None
    ) -> tuple[dict[str, Any], dict[str, Array]]:
        """Return the report of a prepared tolerance, and its `reference` and `tolerance` as arrays."""
        found, seconds = self._bytes(prepared, inputs, stop, on_progress)
        spec = prepared.op.output
        kind, places = dtype(spec.dtype).numpy, places_of(spec.shape, spec.dtype)
        arrays = [found[place].view(kind).reshape(spec.shape).copy() for place in places]
        report = tolerance_of(prepared, found.data, prepared.stats(seconds))
        return report, dict(zip(("reference", "tolerance"), arrays, strict=True))

    def _bytes(
        self, prepared: Prepared, inputs: Given, stop: Stop, on_progress: OnProgress | None,
        on_gpu: Mapping[str, Any] = MappingProxyType({}),
    ) -> tuple[npt.NDArray[np.uint8], float]:  # fmt: skip
        """Return the output of a task that writes bytes, and how long it took."""
        begun = time.perf_counter()
        _check_room(prepared)
        found = np.empty(prepared.plan.problem.output_shape, np.uint8)
        jobs, on_unit = _jobs(prepared, inputs, [found]), _counting(on_progress, prepared.units)
        if on_gpu and (plans := projections_of(prepared.plan)) is not None:
            there = [on_gpu.get(name, inputs[name]) for name in prepared.reads[0]]
            run([replace(jobs[0], plan=plans[0], inputs=there)], 1, stop, on_unit)
            jobs = [replace(jobs[0], plan=plans[1])]
        run(jobs, self.threads, stop, on_unit)
        return found, time.perf_counter() - begun

    def operations(self) -> list[dict[str, Any]]:
        """List the operations, as JSON."""
        return list_operations()

    def describe(self, op: str) -> dict[str, Any]:
        """Return the table of an operation, as JSON."""
        return describe_operation(op)

    @property
    def target(self) -> str:
        """The name of the processor whose code runs."""
        return str(target())

    def validate_graph(self, call: GraphCall) -> dict[str, Any]:
        """Describe a graph as JSON."""
        return describe_graph(call, {}, self.limits)

    def run_graph(self, call: GraphCall, inputs: Mapping[str, Array], stop: Stop) -> dict[int, Array]:
        """Compute the nodes of a graph in order; return the wanted tensors by id."""
        prepared = prepare_graph(call, metas_of(inputs), self.limits)
        values = {int(name): array for name, array in inputs.items()}
        for number in prepared.in_memory:
            values[number] = np.ascontiguousarray(strided(prepared.graph.tensors[number], values[number]))
        for node, planned, reads, unused in prepared.steps():
            given = {name: values[number] for name, number in reads.items()}
            (values[node.output],) = self.run(planned, given, stop).outputs.values()
            for number in unused & values.keys():
                del values[number]
        return {number: _laid_out(prepared, number, values[number]) for number in prepared.wanted}


@contextmanager
def _gpu_memory() -> Iterator[None]:
    """Raise `TooLarge` where a GPU's memory is too small."""
    try:
        yield
    except GpuMemoryError as error:
        raise TooLarge(str(error), data={"reason": "memory", "limit": error.free, "value": error.needed}) from error


def metas_of(inputs: Given) -> dict[str, TensorMeta | list[int]]:
    """Return dtype and shape of each array, and the lists."""
    return {
        name: value if type(value) is list else TensorMeta(_NAMES[value.dtype], value.shape)  # type: ignore[union-attr]
        for name, value in inputs.items()
    }


def _check_room(prepared: Prepared) -> None:
    """Raise `TooLarge` if the machine lacks the memory for outputs and scratch."""
    needed = prepared.memory
    if needed > _LARGE and needed > (free := free_memory()):
        message = f"the call needs {needed} bytes for outputs and scratch, but this machine has {free} free"
        raise TooLarge(message, data={"reason": "memory", "limit": free, "value": needed})


def _jobs(prepared: Prepared, inputs: Given, outputs: Sequence[Array]) -> list[Job]:
    """Return what computes each output into an array; the kernels read and write f16 and bf16 as their 16 bits."""
    jobs = []
    for plan, names, output in zip(prepared.plans, prepared.reads, outputs, strict=True):
        storage = storage_dtype(plan.problem.dtype)
        given: list[Any] = [inputs[name] for name in names]
        stored = [array if array.dtype is storage else array.view(storage) for array in given]
        scratch = np.empty(plan.scratch_bytes, np.uint8) if plan.scratch_bytes else None
        target = output if output.dtype is storage else output.view(plan.problem.output_dtype)
        jobs.append(Job(plan, stored, target, scratch))
    return jobs


def _delivering(jobs: Sequence[Job], arrays: Sequence[Array], on_part: OnPart) -> OnUnit:
    def report(job: Job, unit: Unit) -> None:
        number = next(at for at, each in enumerate(jobs) if each is job)
        on_part(number, unit.offset, None if unit.offset is None else box(arrays[number], unit))

    return report


def _counting(on_progress: OnProgress | None, total: int) -> OnUnit | None:
    if on_progress is None:
        return None
    done = 0

    def report(_job: Job, _unit: Unit) -> None:
        nonlocal done
        done += 1
        on_progress(done, total)

    return report


def _laid_out(prepared: PreparedGraph, number: int, array: Array) -> Array:
    """Return a result, in the memory layout of its logical tensor if that was requested."""
    tensor = prepared.graph.tensors[number]
    if prepared.layout == "logical" or tensor.strides is None:
        return array
    memory = np.zeros(tensor.span, array.dtype)
    strided(tensor, memory)[...] = array
    return memory
