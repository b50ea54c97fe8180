"""Forward operations of the reference on the nest of `kernels.forward.gather`: an element is a tap, and ends a chain.

Rows of tiles are dst positions, lanes dst channels, or groups where these have few.
"""

from __future__ import annotations

from itertools import accumulate
from math import prod

import numpy as np

from kernels.arena import address, arena_address
from kernels.cache import cached
from kernels.chains.boxes import Array, Stored, cut, operand, room_of, together, up
from kernels.emit.doubles import CHAINS, EXACT, LANES, PARTS, SHAPES, WIDE, chain_table
from kernels.forward.axes import chain_tables
from kernels.forward.gather import gather_doubles
from kernels.forward.records import Band
from kernels.gradient.geometry import Axis, Tensor, geometry
from kernels.pack.doubles import F64, pack_groups
from kernels.plan import Stop
from kernels.problem import ConvProblem

__all__ = ["pixel_sums"]

_WEIGHTS_BYTES = 1 << 20
"""What packed weights should take at a time: as much as a large L2."""


@cached
class _Pixels:
    """Tables for dst of one image, all groups, some of each one's channels at a time."""

    def __init__(self, problem: ConvProblem, images: int, kind: int, parts: int) -> None:
        dims, geo, shape = problem.dims, geometry(problem, images=1), EXACT if parts == PARTS else CHAINS
        terms, out, taps, lanes = dims.src_channels, dims.dst_channels, prod(dims.kernel), LANES * SHAPES[shape][1]
        axes, by_group = geo.axes[1:], parts == 1 and 2 * up(dims.groups, lanes) * out < dims.groups * up(out, lanes)
        shape = WIDE if by_group else shape
        self.table, self.tables = chain_table(shape), chain_tables(axes, dims.gathers)
        self.facts = np.array([SHAPES[shape][0], parts, *dims.kernel])
        both = [[axis.size for axis in axes], [axis.wide for axis in axes]]
        sizes, src_sizes = both if dims.gathers else both[::-1]
        width = lanes if by_group else up(terms, 8)  # packing writes whole vectors
        most = out if by_group else max(lanes, _WEIGHTS_BYTES // (8 * dims.groups * taps * terms) // lanes * lanes)
        density = max(1.0, prod(src_sizes) / max(1, prod(sizes)))
        bands, room, positions = [], [1, 1, 1], 1
        each = int(8 * density * (width * terms if by_group else width) + 8 * lanes * parts)
        for low, high in cut(sizes, each, dims.groups * min(most, out) * terms * taps):
            spans = [_window(dims.gathers, *each) for each in zip(axes, low, high, strict=True)]
            counts = [max(0, end - first) for first, end in spans]
            bands.append(((0, *low), (1, *high), (0, *(first for first, _ in spans)), (1, *counts)))
            room = [*map(max, room, counts)]
            positions = max(positions, prod(end - first for first, end in zip(low, high, strict=True)))
        self.bands = np.array(bands, Band.dtype)
        group, wide, narrow, tap = problem.weights_strides
        channels, of = (narrow, wide) if dims.gathers else (wide, narrow)
        weights, self.sizes = Tensor((0, 0, tap, of), channels, group, terms), np.array([1, 1, taps, terms])
        src, dst = (geo.wide, geo.narrow) if dims.gathers else (geo.narrow, geo.wide)
        src_values, values = prod(problem.src_shape[1:]), prod(problem.output_shape[1:])
        groups, self.jobs = (0, dims.groups), []
        for first in range(0, out, most):
            part = groups, (first, min(out, first + most))
            self.jobs.append(np.concatenate([
                operand(src, kind, src_values, (groups, (0, terms)), width, room, lanewise=by_group),
                operand(weights, kind, prod(problem.weights_shape), part, lanes, [1, taps, terms], lanewise=by_group),
                operand(dst, F64, images * values, part, lanes, [1, 1, 1], lanewise=by_group),
            ]))  # fmt: skip
        rooms = [room_of(each) for each in self.jobs[0][:2]]
        held = self.jobs[0]["groups"][1] * rooms[1], rooms[0], lanes * parts * positions
        self.rooms = [8 * int(at) for at in accumulate(held, initial=0)]  # weights, src, sums, f32
        self.spare, self.shape, self.image = (
            max(*rooms, lanes * positions),
            (parts, images, *problem.output_shape[1:]),
            8 * values,
        )
        self.each = src_values + values, dims.groups * out * terms * taps * prod(sizes)

    def run(self, stored: Stored, images: range, stop: Stop) -> Array | None:
        result, weights = np.empty(self.shape), stored(1, slice(0))
        room = arena_address("panels", self.rooms[-1] // 4 + self.spare)
        panels, src, sums, spare = [room + at for at in self.rooms]
        for operands in self.jobs:
            pack_groups(operands[1:2], address(weights), self.sizes, panels, spare)
            for some in together(images, *self.each):
                of, to = stored(0, some), address(result) + (some.start - images.start) * self.image
                call = np.array([address(of), panels, src, spare, sums, to, some.stop - some.start, self.image])
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
    return _Pixels(problem, len(images), kind, parts).run(stored, images, stop)
