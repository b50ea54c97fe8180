"""Run kernels on cases under hostile conditions, and compare bits.

Every tensor is placed, aligned to no more than its own elements, in a buffer of NaN: reads out of bounds spoil the
result, writes out of bounds are detected, and elements that are never written stay NaN.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from kernels import ConvProblem, Plan, plan, run_unit, storage_dtype
from tests import naive
from tests.problems import Case

Tensor = npt.NDArray[Any]
GUARD = 256  # bytes of NaN around each tensor


class Guarded:
    """A tensor between two guards, at an address that is aligned to its element size and no more."""

    def __init__(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> None:
        nbytes = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
        self._raw = np.full(nbytes + 2 * GUARD + 64, 0xFF, np.uint8)
        self._start = GUARD + (-self._raw.ctypes.data) % 64 + np.dtype(dtype).itemsize
        self._stop = self._start + nbytes
        self.tensor: Tensor = self._raw[self._start : self._stop].view(dtype).reshape(shape)

    @property
    def intact(self) -> bool:
        """Return whether both guards are unchanged."""
        return bool((self._raw[: self._start] == 0xFF).all() and (self._raw[self._stop :] == 0xFF).all())


def problem_of(case: Case) -> ConvProblem:
    """Return the kernels' description of a case."""
    names = ("op", "dtype", "n", "src_channels", "dst_channels", "groups", "src_spatial", "dst_spatial", "kernel")
    more = ("strides", "dilations", "pads_begin", "data_format", "weights_format", "groups_axis", "bias")
    same = case.adjoint() if case.data_gradient else case
    chosen: dict[str, Any] = {name: getattr(same, name) for name in names + more}
    problem = ConvProblem(**chosen)
    if case.of_bias:
        of: dict[str, Any] = {name: getattr(case, name) for name in ("op", "dtype", "n", "data_format")}
        problem = ConvProblem.of_bias(**of, channels=case.dst_channels, spatial=case.dst_spatial)
    assert problem.input_shapes == tuple(case.input_shapes.values())
    assert problem.output_shape == case.output_shape
    return problem


def stored(tensor: Tensor) -> Tensor:
    """Return a view of a tensor as the kernels store it: f32 and f64 as they are, f16 and bf16 as their bits."""
    return tensor if tensor.itemsize > 2 else tensor.view(np.uint16)


class Run:
    """The memory of one call, all of it guarded; output and scratch are initially all NaN."""

    def __init__(self, case: Case, inputs: dict[str, Tensor], *, workers: int = 1, reference: bool = False) -> None:
        self.case = case
        problem = problem_of(case)
        self.plan: Plan = plan(problem, workers=workers, reference=reference)
        self._originals = [stored(tensor) for tensor in inputs.values()]
        self._guards = [Guarded(tensor.shape, tensor.dtype) for tensor in self._originals]
        for guard, tensor in zip(self._guards, self._originals, strict=True):
            guard.tensor[...] = tensor
            guard.tensor.flags.writeable = False
        self._output = Guarded(problem.output_shape, storage_dtype(case.dtype))
        self._scratch = Guarded((self.plan.scratch_bytes,), np.uint8)

    @property
    def output(self) -> Tensor:
        """Return the result as stored."""
        return self._output.tensor

    def unit(self, index: int, stop: Callable[[], bool] = lambda: False) -> bool:
        """Compute one unit; return whether it was completed."""
        scratch = self._scratch.tensor if self.plan.scratch_bytes else None
        inputs = [guard.tensor for guard in self._guards]
        return run_unit(self.plan, self.plan.units[index], inputs, self._output.tensor, scratch, stop)

    def asks(self, index: int) -> int:
        """Compute one unit; return how often it asks whether to stop."""
        asked = itertools.count()
        assert self.unit(index, lambda: next(asked) < 0)
        return next(asked)

    def stopped(self, index: int, after: int) -> bool:
        """Return whether one unit obeys the answer to stop after it has asked so often in vain."""
        answers = iter([False] * after + [True])
        return not self.unit(index, lambda: next(answers))

    def stages(self) -> list[list[int]]:
        """Return the indexes of the units, stage by stage."""
        return [[unit.index for unit in self.plan.units if unit.stage == stage] for stage in range(self.plan.stages)]

    def all(self) -> Tensor:
        """Compute every unit in order, check the memory and return the result."""
        for stage in self.stages():
            for index in stage:
                assert self.unit(index), "stopped without being told to"
        self.check_memory()
        return self.output

    def check_memory(self) -> None:
        """Check that the kernel wrote only its own memory: the guards and the inputs are unchanged."""
        assert self._output.intact, "wrote outside the output"
        assert self._scratch.intact, "wrote outside the scratch"
        for guard, original in zip(self._guards, self._originals, strict=True):
            assert guard.intact, "wrote around an input"
            assert guard.tensor.tobytes() == original.tobytes(), "wrote to an input"


def assert_partition(chosen: Plan) -> None:
    """Check that the boxes of a plan's units are disjoint and cover the output."""
    covered = np.zeros(chosen.problem.output_shape, np.int8)
    for unit in chosen.units:
        if unit.offset is None or unit.shape is None:
            assert (unit.offset, unit.shape) == (None, None)
            assert unit.stage < chosen.stages - 1, "a last unit must make its box final"
            continue
        stops = [start + size for start, size in zip(unit.offset, unit.shape, strict=True)]
        assert all(start >= 0 for start in unit.offset)
        assert all(stop <= size for stop, size in zip(stops, covered.shape, strict=True))
        covered[tuple(slice(*span) for span in zip(unit.offset, stops, strict=True))] += 1
    assert (covered == 1).all(), f"{chosen.kernel}: boxes overlap or leave gaps"


def compute(case: Case, inputs: dict[str, Tensor], *, workers: int = 1, reference: bool = False) -> Tensor:
    """Compute a case in guarded memory; return the result in the case's dtype."""
    return Run(case, inputs, workers=workers, reference=reference).all().view(naive.DTYPES[case.dtype])


def assert_same_bits(got: Tensor, expected: Tensor, case: Case) -> None:
    """Compare bit by bit; a NaN equals any NaN, and zero has a sign."""
    assert got.dtype == expected.dtype
    assert got.shape == expected.shape
    bits = f"u{got.dtype.itemsize}"
    wrong = got.view(bits) != expected.view(bits)
    wrong &= ~(np.isnan(got.astype(np.float32)) & np.isnan(expected.astype(np.float32)))
    if wrong.any():
        where = tuple(int(at) for at in np.argwhere(wrong)[0])
        raise AssertionError(
            f"{int(wrong.sum())} of {wrong.size} elements differ, first at {where}: "
            f"got {got[where]}, expected {expected[where]}\n{case}"
        )


def check(case: Case, *, workers: int = 1, reference: bool = False) -> None:
    """Compare a case with exact integer data with the oracle, bit for bit."""
    inputs = case.inputs()
    assert_same_bits(compute(case, inputs, workers=workers, reference=reference), case.expected(inputs), case)
