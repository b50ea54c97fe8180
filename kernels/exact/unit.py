"""The units of the reference: every operation, summed in float64 in one order and rounded once.

An element of dst is one chain of products: over the kernel's positions in order, and over the src channels of each. An
element of a weight gradient is one over the images, and over the pixels of each, in order. Nothing but the problem
decides that, so the bits are those of every processor and any number of workers.

Where the dtype is f64, three words hold each sum, and its error is below 2^-100 of the sum of the magnitudes. Elements
of a list end where the problem alone says, as they are added to the words there.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import numpy as np
import numpy.typing as npt

from kernels.arena import address, arena
from kernels.emit.compiler import row_of
from kernels.exact.driver import F64, KINDS, finish, pack
from kernels.exact.forward import Change, Sums, add_forward
from kernels.exact.gradient import add_gradient, lanes_are_wide
from kernels.exact.parts import Part, dst_tensor, is_lanewise, padded, part_of, units_of, words
from kernels.exact.records import Operand
from kernels.exact.tables import Pair
from kernels.plan import Stop, Storage, Unit
from kernels.problem import ConvProblem, storage_dtype
from kernels.reference import widen

__all__ = ["EXACT", "ExactSums"]

_NONE = Change()


class ExactSums:
    """Sums in float64, whose order and bits are the same on every target, rounded once; takes every problem."""

    name = "reference_f64"

    def refuse(self, problem: ConvProblem) -> str | None:
        """Refuse nothing."""
        return None

    def units(self, problem: ConvProblem, workers: int) -> tuple[list[Unit], int]:
        """Cut by what takes the least packing; a sum is never cut."""
        return units_of(problem, workers), 0

    def run(
        self, problem: ConvProblem, unit: Unit, inputs: Sequence[Storage], output: Storage,
        scratch: Storage | None, stop: Stop,
    ) -> bool:  # fmt: skip
        """Compute one box of the output."""
        return self.write(problem, unit, inputs, (output, None), stop, kind=KINDS[problem.dtype])

    def write(
        self, problem: ConvProblem, unit: Unit, inputs: Sequence[Storage], outputs: tuple[Storage, Storage | None],
        stop: Stop, *, kind: int = F64, change: Change = _NONE,
    ) -> bool:  # fmt: skip
        """Write a unit's box of sums to the first of `outputs`, by default in f64; False when `stop` said so.

        Of sums of f64 the second one, if there is one, gets what rounding to f64 left of them, as f64. Bias is added,
        changed as the other inputs are if they are squared, but not multiplied.
        """
        if stop():
            return False
        if outputs[0].size == 0:
            return True
        part = part_of(unit)
        groups, rows, lanes = self._shape(problem, part)
        count, many = groups * rows * padded(lanes), words(problem)
        memory = arena("exact_sums", 2 * many * count)[: 2 * many * count].view(np.float64)
        memory.fill(0)
        sums = Sums(address(memory), 8 * padded(lanes), 8 * count if many > 1 else 0)
        places = [address(tensor) for tensor in inputs]
        if problem.op == "BiasAdd":
            _copy(problem, part, places[0], sums, change)
        elif problem.forward:
            if not add_forward(problem, part, (places[0], places[1]), sums, change, stop):
                return False
        elif not add_gradient(problem, part, places, sums, change, stop):
            return False
        bias = self._bias(problem, inputs, change)
        for output, low in zip(outputs, (False, True), strict=True):
            if output is not None:
                _write(problem, part, sums, bias, output, kind, low)
        return True

    def _shape(self, problem: ConvProblem, part: Part) -> tuple[int, int, int]:
        """Return the groups of sums of a part, the rows of each, and the lanes of a row."""
        groups, src, dst = (high - low for low, high in (part.groups, part.src, part.dst))
        if is_lanewise(problem):
            return 1, part.positions, groups
        if problem.computes != "diff_weights":
            return groups, part.positions, dst
        lanes, rows = (src, dst) if _lanes_are_src(problem) else (dst, src)
        return groups, part.positions * rows, lanes

    def _bias(self, problem: ConvProblem, inputs: Sequence[Storage], change: Change) -> npt.NDArray[np.float64]:
        """Return what is added to each channel of dst: -0.0, which changes nothing, where there is no bias."""
        if not problem.bias:
            return np.full(max(problem.src_channels, problem.dst_channels), -0.0)
        values = widen(inputs[-1], problem.dtype)
        return np.square(values) if change.square else values


def _start(box: Sequence[Pair], steps: Sequence[int]) -> int:
    """Return the offset of the first value of a box."""
    return sum(low * step for (low, _), step in zip(box, steps, strict=True))


def _lanes_are_src(problem: ConvProblem) -> bool:
    return lanes_are_wide(problem) != problem.op.startswith("ConvT")


def _copy(problem: ConvProblem, part: Part, place: int, sums: Sums, change: Change) -> None:
    """Put the values of src where sums are."""
    src, size = dst_tensor(problem), storage_dtype(problem.dtype).itemsize
    start = _start(part.axes, src.steps)
    factors = np.array(change.factors or (1.0, 1.0))
    box = row_of(
        Operand, kind=KINDS[problem.dtype], place=0, steps=tuple(size * step for step in src.steps),
        sizes=tuple(high - low for low, high in part.axes), channels=problem.dst_channels,
        channel=size * src.channel, group=0, packed=sums.address, line=sums.line,
        factor=address(factors) if change.factors else 0, square=int(change.square),
    )  # fmt: skip
    pack(box[0], place + size * start)


def _write(
    problem: ConvProblem, part: Part, sums: Sums, bias: npt.NDArray[np.float64], output: Storage, kind: int, low: bool
) -> None:
    """Write sums to their box of the output."""
    size, lanewise = output.itemsize, is_lanewise(problem)
    groups = 1 if lanewise else part.groups[1] - part.groups[0]
    shape = [high - low for low, high in part.axes]
    if problem.computes != "diff_weights":
        dst = dst_tensor(problem)
        steps, channel, group = dst.steps, dst.channel, dst.group
        if problem.computes == "diff_bias":
            shape, steps, channel, group = [1, 1, 1, 1], (0,) * 4, 1, 0
        lanes = part.dst[1] - part.dst[0]
        first = part.groups[0] * (problem.dst_channels // problem.groups) if problem.op != "BiasAdd" else 0
        start = _start(part.axes, steps) if problem.forward else 0
        start += part.groups[0] * group + part.dst[0] * channel
        if lanewise:
            lanes, channel = part.groups[1] - part.groups[0], group
        finish(
            kind, sums.address, sums.word, low, np.array([groups, *shape]), lanes, sums.line,
            address(bias) + 8 * (first + part.dst[0]), 8 * (problem.dst_channels // problem.groups),
            address(output) + size * start, np.array([group, *steps]) * size, channel * size,
        )  # fmt: skip
        return
    group, wide, narrow, tap = problem.weights_strides
    of_src, of_dst = (narrow, wide) if problem.op.startswith("ConvT") else (wide, narrow)
    steps_of_taps = [tap * prod(problem.dims.kernel[axis + 1 :]) for axis in range(3)]
    start = part.groups[0] * group + part.src[0] * of_src + part.dst[0] * of_dst
    start += _start(part.axes, steps_of_taps)
    (row, rows), (lane, lanes) = (of_src, part.src[1] - part.src[0]), (of_dst, part.dst[1] - part.dst[0])
    if _lanes_are_src(problem):
        (row, rows), (lane, lanes) = (lane, lanes), (row, rows)
    if lanewise:
        rows, lanes, lane = 1, part.groups[1] - part.groups[0], group
    for g in range(groups):
        finish(
            kind, sums.address + g * prod(shape) * rows * sums.line, sums.word, low, np.array([*shape, 1, rows]),
            lanes, sums.line, address(bias), 0, address(output) + size * (start + g * group),
            np.array([*steps_of_taps, 0, row]) * size, lane * size,
        )  # fmt: skip


EXACT = ExactSums()
