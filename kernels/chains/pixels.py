"""Forward operations of the reference on the nest of `kernels.forward.gather`: an element is a tap, and ends a chain.

Rows of tiles are dst positions, lanes dst channels, or groups where these have few. Taps are phases of their own, whose
sums are added to memory; those of few channels are listed together, and their sums stay in registers.
"""

from __future__ import annotations

from functools import partial
from itertools import accumulate
from math import prod

import numpy as np

from kernels.arena import address, arena_address
from kernels.cache import cached
from kernels.chains.boxes import Array, Stored, bytes_of, cut, operand, records, room_of, together, up
from kernels.emit.doubles import CHAINS, EXACT, LANES, PARTS, SHAPES, WIDE, chain_table
from kernels.forward.axes import chain_tables
from kernels.forward.gather import gather_doubles
from kernels.forward.records import Band
from kernels.gradient.geometry import Axis, Tensor, geometry
from kernels.pack.doubles import F64, pack_groups
from kernels.plan import Stop, Storage
from kernels.problem import ConvProblem

__all__ = ["pixel_sums", "write_pixels"]

_FEW_TERMS, _MOST_TAPS = 16, 1 << 10
"""Terms of a kernel position below which sums stay in registers over all of them, and the most of these."""

_WEIGHTS_BYTES = 1 << 20
"""What packed weights should take at a time: as much as a large L2."""

_ONE = np.ones(4, np.int64)


@cached
class _Pixels:
    """Tables for dst of one image, all groups, some of each one's channels at a time."""

    def __init__(self, problem: ConvProblem, images: int, kind: int, parts: int, result: int) -> None:
        dims, geo, shape = problem.dims, geometry(problem, images=1), EXACT if parts == PARTS else CHAINS
        terms, out, taps, lanes = dims.src_channels, dims.dst_channels, prod(dims.kernel), LANES * SHAPES[shape][1]
        axes, self.parts = geo.axes[1:], parts
        by_group = parts == 1 and 2 * up(dims.groups, lanes) * out < dims.groups * up(out, lanes)
        shape, alone = WIDE if by_group else shape, by_group and terms == 1  # each product is a chain
        listed = parts == 1 and taps <= _MOST_TAPS and terms <= (1 if by_group else _FEW_TERMS)
        self.table, self.tables = chain_table(shape), chain_tables(axes, dims.gathers, alone=not listed)
        both = [[axis.size for axis in axes], [axis.wide for axis in axes]]
        sizes, src_sizes = both if dims.gathers else both[::-1]
        width = lanes if by_group else terms if terms < 8 else up(terms, 8)  # packing writes whole vectors
        most = max(lanes, _WEIGHTS_BYTES // (8 * dims.groups * taps * terms) // lanes * lanes)
        density = max(1.0, prod(src_sizes) / max(1, prod(sizes)))
        bands, room, self.positions = [], [1, 1, 1], 1
        each = int(8 * density * (width * terms if by_group else width) + 8 * lanes * parts)
        for low, high in cut(sizes, each, dims.groups * min(most, out) * terms * taps):
            spans = [_window(dims.gathers, *each) for each in zip(axes, low, high, strict=True)]
            counts = [max(0, end - first) for first, end in spans]
            bands.append(((0, *low), (1, *high), (0, *(first for first, _ in spans)), (1, *counts)))
            room = [*map(max, room, counts)]
            self.positions = max(self.positions, prod(end - first for first, end in zip(low, high, strict=True)))
        self.bands = np.array(bands, Band.dtype)
        group, wide, narrow, tap = problem.weights_strides
        to, of = (narrow, wide) if dims.gathers else (wide, narrow)
        turned = tap < of  # so that weights are read in the order of memory
        inner, steps = ((terms, taps), (of, tap)) if turned else ((taps, terms), (tap, of))
        self.sizes = np.array([1, 1, *inner])
        self.image = bytes_of(result) * prod(problem.output_shape[1:])
        src, dst = (geo.wide, geo.narrow) if dims.gathers else (geo.narrow, geo.wide)
        weights = Tensor((0, 0, *steps), to, group, terms)
        bias = Tensor((0, 0, 0, 0), 1, out, out)
        self.jobs, make = [], partial(operand, lanewise=by_group)
        for first in range(0, out, out if by_group else most):
            some = (0, dims.groups), (first, out if by_group else min(out, first + most))
            operands = [
                make(src, kind, prod(problem.src_shape[1:]), (some[0], (0, terms)), width, room),
                make(weights, kind, prod(problem.weights_shape), some, lanes, (1, *inner), turned=turned),
                make(bias, kind, problem.dst_channels, some, lanes, (1, 1, 1)),
                make(dst, result, images * prod(problem.output_shape[1:]), some, lanes, (1, 1, 1)),
            ]
            self.jobs.append(records(operands))
            if first == 0:
                rooms, blocks = [*map(room_of, operands[:3])], operands[1]["groups"]
        kernel = (len(axis.shifts) for axis in axes)
        self.facts = np.array([SHAPES[shape][0], parts, not listed, not alone, *kernel])
        held = blocks * rooms[1], blocks * rooms[2], rooms[0], lanes * parts * self.positions
        self.rooms = [8 * at for at in accumulate(held, initial=0)]  # panels, bias, src, sums, f32
        self.spare = max(*rooms, lanes * self.positions)
        self.shape = problem.output_shape[1:]
        self.each = prod(problem.src_shape[1:]) + prod(self.shape), dims.groups * out * terms * taps * prod(sizes)

    def run(self, stored: Stored, images: range, output: Storage | None, biased: bool, stop: Stop) -> Storage | None:
        result = np.empty((self.parts, len(images), *self.shape)) if output is None else output
        weights = stored(1, slice(0))
        room = arena_address("panels", self.rooms[-1] // 4 + self.spare)
        panels, biases, src, sums, spare = [room + at for at in self.rooms]
        for operands in self.jobs:
            pack_groups(operands, 1, address(weights), self.sizes, panels, spare)
            if biased:
                values = stored(2, slice(0))  # which may be a copy: its name keeps it
                pack_groups(operands, 2, address(values), _ONE, biases, spare)
            for some in together(images, *self.each):
                of, to = stored(0, some), address(result) + (some.start - images.start) * self.image
                count = some.stop - some.start
                call = np.array([address(of), panels, biases if biased else 0, src, spare, sums, to, count, self.image])
                for band in range(len(self.bands)):
                    if stop():
                        return None
                    gather_doubles(self.table, self.facts, operands, self.tables, self.bands, band, call)
        return result


def _window(gathers: bool, axis: Axis, low: int, high: int) -> tuple[int, int]:
    """Return the src positions of an axis that the dst positions ``low..high`` meet, or some more."""
    if gathers:
        return axis.window(low, high)
    first, last = axis.shifts[0], axis.shifts[-1]
    return max(0, -((last - low) // axis.stride)), min(axis.size, (high - 1 - first) // axis.stride + 1)


def pixel_sums(problem: ConvProblem, images: range, kind: int, stored: Stored, stop: Stop, parts: int) -> Array | None:
    """Return dst of some images, without a bias, as (parts, images, ..); None when `stop` said so."""
    return _Pixels(problem, len(images), kind, parts, F64).run(stored, images, None, False, stop)


def write_pixels(problem: ConvProblem, images: range, kind: int, stored: Stored, output: Storage, stop: Stop) -> bool:
    """Write dst of some images, rounded, whose inputs are not f64; False when `stop` said so."""
    return _Pixels(problem, len(images), kind, 1, kind).run(stored, images, output, problem.bias, stop) is not None
