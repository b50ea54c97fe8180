"""BiasAdd and BiasAddBackward: their units, and the compiled loops over planes of one channel or rows of all.

Sums are formed in float64: planes in order, and rows, where channels lie side by side, in chunks, which are added as a
balanced tree. All are rounded once. The problem alone decides the chunks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from math import ceil, prod
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types

from kernels.arena import address
from kernels.blocks import SUMS
from kernels.dtypes import KINDS
from kernels.emit import simd
from kernels.emit.compiler import Doubles, Floats, jit
from kernels.emit.intrinsics import address_of, by_kind, load_wide, size_of, store_narrow, stored_size
from kernels.plan import Stop, Storage, Unit, box
from kernels.problem import ConvProblem, storage_dtype
from kernels.reduction import chunks_of, sum_tree
from kernels.reference import narrow, widen
from kernels.target import target

__all__ = ["BIAS_ADD", "BIAS_SUMS"]

_F64 = ir.DoubleType()
_I32 = ir.IntType(32)
_LANES = target().lanes
_CHAINS = 4
"""Sums that are formed side by side: an addition takes four cycles."""


@partial(by_kind, result=types.float64)
def _sum_run(builder: Any, kind: str, source: Any, count: Any) -> Any:
    """Return the sum of `count` adjacent values in float64, in a fixed order."""
    size, lane = size_of(kind), ir.VectorType(_F64, _LANES)

    def body(width: int) -> Callable[[list[Any]], list[Any]]:
        def add_some(carried: list[Any]) -> list[Any]:
            place, single, *sums = carried
            if width == 1:
                value = builder.extract_element(load_wide(builder, place, kind, 1), _I32(0))
                single = builder.fadd(single, builder.fpext(value, _F64))
            for chain in range(width // _LANES):
                at = builder.add(place, simd.I64(size * _LANES * chain))
                value = builder.fpext(load_wide(builder, at, kind, _LANES), lane)
                sums[chain] = builder.fadd(sums[chain], value)
            return [builder.add(place, simd.I64(size * width)), single, *sums]

        return add_some

    start = [source, ir.Constant(_F64, 0.0), *[ir.Constant(lane, [0.0] * _LANES)] * _CHAINS]
    _, single, *sums = simd.runs(builder, count, start, (_CHAINS * _LANES, _LANES, 1), body)
    while len(sums) > 1:
        sums = [builder.fadd(one, other) for one, other in zip(sums[::2], sums[1::2], strict=True)]
    (total,) = sums
    width = _LANES
    while width > 1:
        width //= 2
        halves = [ir.Constant(ir.VectorType(_I32, width), list(range(i, i + width))) for i in (0, width)]
        total = builder.fadd(*(builder.shuffle_vector(total, total, half) for half in halves))
    return builder.fadd(builder.extract_element(total, _I32(0)), single)


@by_kind
def _add_to_sums(builder: Any, kind: str, sums: Any, source: Any, count: Any) -> None:
    """Add `count` adjacent values to as many float64 at `sums`."""

    def some(width: int, places: list[Any]) -> None:
        value = builder.fpext(load_wide(builder, places[1], kind, width), ir.VectorType(_F64, width))
        simd.add_to(builder, value, places[0], 8)

    simd.each_run(builder, count, (sums, source), (8, size_of(kind)), (_LANES, 1), some)


def _add_bias(each: bool, builder: Any, kind: str, target: Any, source: Any, bias: Any, count: Any) -> None:
    """Store `count` adjacent values plus a bias, rounded once.

    The bias is f32: one for `each` value, adjacent too, or one for all. A sum of two f16 or bf16 that was rounded to
    f32 rounds to 16 bits like the exact one, as f32 has more than twice as many digits.
    """

    def some(width: int, places: list[Any]) -> None:
        to, place, there = places
        if each:
            added = simd.load(builder, there, ir.VectorType(simd.F32, width))
        else:
            added = simd.splat(builder, simd.load(builder, there, simd.F32), width)
        store_narrow(builder, builder.fadd(load_wide(builder, place, kind, width), added), to, kind)

    sizes = size_of(kind), size_of(kind), 4 if each else 0
    simd.each_run(builder, count, (target, source, bias), sizes, (_LANES, 1), some)


_add_one, _add_each = by_kind(partial(_add_bias, False)), by_kind(partial(_add_bias, True))


@jit
def sum_planes(
    kind: int, source: int, image_step: int, step: int, first: int, planes: int, count: int, sums: Doubles
) -> None:
    """Add the `count` values of some planes to the sums of their channels; the `first` is counted through all images.

    Each image has as many channels as there are `sums`; their planes are `step` bytes apart.
    """
    image, channel = first // len(sums), first % len(sums)
    for _ in range(planes):
        sums[channel] += _sum_run(kind, source + image * image_step + channel * step, count)
        channel += 1
        if channel == len(sums):
            image, channel = image + 1, 0


@jit
def sum_rows(kind: int, source: int, count: int, sums: Doubles) -> None:
    """Add `count` adjacent values to `sums`, and to the first of these again after the last."""
    for first in range(0, count, len(sums)):
        place = source + first * stored_size(kind)
        _add_to_sums(kind, address_of(sums), place, min(len(sums), count - first))


@jit
def add_to_planes(
    kind: int, target: int, source: int, step: int, first: int, planes: int, count: int, bias: Floats
) -> None:
    """Add its channel's bias to the `count` values of each plane; planes are `step` bytes apart.

    They are numbered through all images, from the `first` on, and there is a bias for each channel.
    """
    channel = first % len(bias)
    for plane in range(planes):
        _add_one(kind, target + plane * step, source + plane * step, address_of(bias) + 4 * channel, count)
        channel = channel + 1 if channel + 1 < len(bias) else 0


@jit
def add_to_rows(kind: int, target: int, source: int, count: int, bias: Floats) -> None:
    """Add to `count` adjacent values those of `bias`, and the first of these again after the last."""
    for first in range(0, count, len(bias)):
        place = first * stored_size(kind)
        _add_each(kind, target + place, source + place, address_of(bias), min(len(bias), count - first))


class _View:
    """A data tensor in rows or planes of `count` values: a row has all channels of a pixel, a plane a channel's pixels.

    With one pixel an image the two are the same: rows are faster.
    """

    def __init__(self, problem: ConvProblem) -> None:
        pixels, channels = prod(problem.dst_spatial), problem.dst_channels
        self.in_rows = problem.data_format == "NXC" or pixels == 1
        self.kind = KINDS[problem.dtype]
        self.value = storage_dtype(problem.dtype).itemsize
        self.count = channels if self.in_rows else pixels
        self.line, self.image = self.count * self.value, channels * pixels * self.value  # bytes
        self.width = max(1, SUMS.bias_row // channels) * channels if self.in_rows else 1
        """Values of rows that are taken as one: short ones would take longer to reach than to compute."""

    def pieces(self, lines: int) -> Iterator[tuple[int, int, int, int]]:
        """Cut planes, or adjacent rows as one plane, into what is computed between two looks at whether to stop.

        Gives the first plane, their number, and what of each: where it begins, in bytes, and the number of values.
        """
        planes, values = (1, lines * self.count) if self.in_rows else (lines, self.count)
        piece = self.width * max(1, SUMS.bias_piece // self.width)
        many = max(1, piece // max(1, values))
        for first in range(0, planes, many):
            for start in range(0, values, piece):
                yield first, min(many, planes - first), start * self.value, min(piece, values - start)


class BiasSums:
    """Sums over all images and pixels of each channel."""

    name = "bias_sums"

    def refuse(self, problem: ConvProblem) -> str | None:
        """Take every BiasAddBackward."""
        return None if problem.op == "BiasAddBackward" else "computes BiasAddBackward only"

    def units(self, problem: ConvProblem, workers: int) -> tuple[list[Unit], int]:
        """Cut planes by channels, and rows by chunks, whose sums a second stage adds."""
        channels, pixels, macs = problem.dst_channels, prod(problem.dst_spatial), problem.macs
        if not _View(problem).in_rows:
            parts = max(1, min(channels, 4 * workers, macs // (2 * SUMS.bias_chunk)))
            spans = enumerate(pairwise(channels * part // parts for part in range(parts + 1)))
            return [Unit(i, 0, (low,), (high - low,), macs // parts, (low, high)) for i, (low, high) in spans], 0
        rows = problem.n * pixels
        chunks = chunks_of(min(rows, macs // SUMS.bias_chunk))
        if chunks == 1:
            return [Unit(0, 0, (0,), (channels,), macs, (0, rows))], 0
        spans = enumerate(pairwise(rows * chunk // chunks for chunk in range(chunks + 1)))
        size, units = 8 * channels, list[Unit]()
        for i, (low, high) in spans:
            images, place = (low // pixels, ceil(high / pixels)), (size * i, size * (i + 1))
            units.append(Unit(i, 0, None, None, macs // chunks, (low, high), images, place))
        return [*units, Unit(chunks, 1, (0,), (channels,), 0)], size * chunks

    def run(
        self, problem: ConvProblem, unit: Unit, inputs: Sequence[Storage], output: Storage,
        scratch: Storage | None, stop: Stop,
    ) -> bool:  # fmt: skip
        """Sum some channels or one chunk, or add up all chunks."""
        chunks = None if scratch is None else scratch.view(np.float64).reshape(-1, problem.dst_channels)
        if unit.stage == 1:
            assert chunks is not None
            sums: Doubles | None = sum_tree(chunks)
        else:
            sums = _sum(problem, inputs[0], unit.part, stop)
        if sums is None:
            return False
        if unit.offset is None:
            assert chunks is not None
            chunks[unit.index] = sums
        else:
            box(output, unit)[...] = narrow(sums, problem.dtype)
        return True


def _sum(problem: ConvProblem, src: Storage, span: Sequence[int], stop: Stop) -> Doubles | None:
    """Sum a span of rows, or of the channels' planes in all images; None when `stop` said so."""
    view, (low, high) = _View(problem), span
    source, channels = address(src) + low * view.line, problem.dst_channels if view.in_rows else high - low
    sums = np.zeros(view.width if view.in_rows else channels)
    for first, planes, start, count in view.pieces((high - low) * (1 if view.in_rows else problem.n)):
        if stop():
            return None
        if view.in_rows:
            sum_rows(view.kind, source + start, count, sums)
        else:
            sum_planes(view.kind, source + start, view.image, view.line, first, planes, count, sums)
    with np.errstate(invalid="ignore"):
        return sums.reshape(-1, channels).sum(0)  # type: ignore[no-any-return]


class BiasAdd:
    """The bias added to every value of its channel."""

    name = "bias_add"

    def refuse(self, problem: ConvProblem) -> str | None:
        """Take every BiasAdd."""
        return None if problem.op == "BiasAdd" else "computes BiasAdd only"

    def units(self, problem: ConvProblem, workers: int) -> tuple[list[Unit], int]:
        """Cut by images, then by what comes next in memory: channels, or lines of pixels."""
        shape, view = problem.output_shape, _View(problem)
        wanted = max(1, min(4 * workers, problem.macs // (2 * SUMS.bias_chunk)))
        by_image = min(max(1, shape[0]), wanted)
        whole = problem.rank == 0 or (view.in_rows and problem.data_format == "NCX")  # a row is not cut
        by_next = 1 if whole else min(shape[1], ceil(wanted / by_image))
        units: list[Unit] = []
        for image, part in np.ndindex(by_image, by_next):
            n0, n1 = (shape[0] * at // by_image for at in (image, image + 1))
            low, high = (shape[1] * at // by_next for at in (part, part + 1))
            placed = (n0, low, *(0,) * (len(shape) - 2)), (n1 - n0, high - low, *shape[2:])
            units.append(
                Unit(len(units), 0, *placed, problem.macs // (by_image * by_next), (n0, n1, low, high), (n0, n1))
            )
        return units, 0

    def run(
        self, problem: ConvProblem, unit: Unit, inputs: Sequence[Storage], output: Storage,
        scratch: Storage | None, stop: Stop,
    ) -> bool:  # fmt: skip
        """Add the bias to one box of src: some images, or a part of one."""
        n0, n1, low, high = unit.part
        view, step = _View(problem), prod(output.shape[2:])  # along the second axis
        start, lines = n0 * view.image + low * step * view.value, (n1 - n0) * (high - low) * step // view.count
        source, target = address(inputs[0]) + start, address(output) + start
        bias = widen(inputs[1], problem.dtype).astype(np.float32)
        bias = np.tile(bias, view.width // len(bias)) if view.in_rows else bias[low:high]
        for first, planes, start, count in view.pieces(lines):
            if stop():
                return False
            place = first * view.line + start
            if view.in_rows:
                add_to_rows(view.kind, target + place, source + place, count, bias)
            else:
                add_to_planes(view.kind, target + place, source + place, view.line, first, planes, count, bias)
        return True


BIAS_SUMS, BIAS_ADD = BiasSums(), BiasAdd()
