"""Forward operations of the reference: boxes, panels and addresses for the loops."""

from __future__ import annotations

from math import ceil, prod

import numpy as np
import numpy.typing as npt

from kernels.arena import address, arena
from kernels.cache import cached
from kernels.chains.geometry import Geometry, Stored, cut, kind_bytes, lanes_of, room_of, up
from kernels.chains.loops import F64, Operand, Pixels, pack_side, sum_pixels
from kernels.emit.compiler import row_of
from kernels.emit.doubles import EXACT, FLUSHED, LANES, LANEWISE, PARTS, SHAPES, TALL, tile_address
from kernels.plan import Stop, Storage
from kernels.problem import ConvProblem

__all__ = ["pixel_sums", "write_pixels"]

Array = npt.NDArray[np.float64]

_ONE = np.array([0, 0, 0, 1, 1, 1])

_FEW_TERMS, _MOST_TAPS = 16, 1 << 7
"""Terms of a kernel position below which sums stay in registers over all of them, and the most of these."""

_WEIGHTS_BYTES = 1 << 20
"""What packed weights should take at a time: as much as a large L2."""


@cached
class _Pixels:
    """The loops' view of dst of one image, all groups, some of each one's channels at a time."""

    def __init__(self, problem: ConvProblem, images: int, kind: int, parts: int, result: int) -> None:
        dims, geometry = problem.dims, Geometry(problem)
        channels, out, size = dims.src_channels, dims.dst_channels, kind_bytes(kind)
        broad, taps = SHAPES[EXACT if parts == PARTS else TALL][1] * LANES, len(geometry.taps)
        lanes = 0
        if parts == 1 and 2 * up(dims.groups, broad) * out < dims.groups * up(out, broad):
            lanes = dims.groups
        gathers, many = dims.gathers, geometry.taps
        if not gathers and geometry.strides == [1, 1, 1]:  # each position of dst gathers from src
            begin, end, shift = many[:, :3], many[:, 3:6], many[:, 6:]
            gathers, many = True, np.hstack([begin + shift, end + shift, -shift])
        by_lines = gathers and parts == 1 and taps <= _MOST_TAPS and channels <= (1 if lanes else _FEW_TERMS)
        shape = EXACT if parts == PARTS else LANEWISE if lanes else FLUSHED if by_lines else TALL
        self.borders = np.unique(many[:, [2, 5]])
        self.parts, self.taps, self.groups = parts, many, ceil(lanes / broad) or dims.groups
        group, wide, narrow, tap = problem.weights_strides
        to, of = (narrow, wide) if dims.gathers else (wide, narrow)
        spatial = prod(dims.dst)
        channel, position = (spatial, 1) if problem.data_format == "NCX" else (1, problem.dst_channels)
        most = max(broad, _WEIGHTS_BYTES // (8 * dims.groups * taps * channels) // broad * broad)
        width = channels if channels < 8 else up(channels, 8)  # packing writes whole vectors
        src = geometry.side(
            problem, kind, wide=dims.gathers, some=(0, channels), width=broad if lanes else width, lanes=lanes
        )
        turned = tap < of  # weights are read in the order of memory
        inner = (channels, taps) if turned else (taps, channels)
        self.jobs, self.weights_box = [], np.array([0, 0, 0, out if lanes else 1, *inner])
        self.weights_values = self.bias_values = self.spare = 0
        for first in range(0, out, out if lanes else most):
            some = out if lanes else min(most, out - first)
            weights = row_of(
                Operand,
                kind=kind,
                start=size * to * first,
                nbytes=size * prod(problem.weights_shape),
                strides=[size * to, *((size * of, size * tap) if turned else (size * tap, size * of))],
                **lanes_of(size * to, size * group, 1 if lanes else some, broad, lanes, turned=turned),
            )
            across = some if lanes else ceil(some / broad)
            bias = row_of(
                Operand,
                kind=kind,
                start=size * first,
                nbytes=size * problem.dst_channels,
                strides=[0, 0, 0],
                **lanes_of(size, size * out, some, broad, lanes),
            )
            stored = kind_bytes(result)
            inside = stored * channel * out
            job = row_of(
                Pixels,
                src=src[0],
                weights=weights[0],
                bias=bias[0],
                kind=result,
                gathers=gathers,
                groups=self.groups,
                taps=taps,
                terms=channels,
                across=across,
                strides=geometry.strides,
                steps=[images * stored * spatial * problem.dst_channels,
                       *((broad * inside, stored * channel, inside) if lanes
                         else (inside, stored * broad * channel, stored * channel)),
                       *(stored * position * step for step in geometry.steps[1 if dims.gathers else 0])],
                tile=tile_address(shape),
                tall=SHAPES[shape][0],
                parts=parts,
                by_lines=by_lines,
            )  # fmt: skip
            self.jobs.append((job, (weights, bias), stored * channel * first, self.groups * room_of(bias, 1)))
            self.bias_values = max(self.bias_values, self.jobs[-1][-1])
            panels = room_of(weights, prod(self.weights_box[3:].tolist()))
            self.weights_values = max(self.weights_values, self.groups * panels)
            self.spare = max(self.spare, panels)
        src_sizes, dst_sizes = (geometry.wide, geometry.narrow) if dims.gathers else (geometry.narrow, geometry.wide)
        across = out if lanes else ceil(min(most, out) / broad)
        density = max(1.0, prod(src_sizes) / max(1, prod(dst_sizes)))
        each = int(8 * ((broad * channels if lanes else width) * density + across * parts * broad))
        self.boxes, self.values, self.sums = [], 0, 0
        for low, counts in cut(dst_sizes, each, dims.groups * min(most, out) * channels * taps):
            source = (geometry.reached if dims.gathers else geometry.reaching)(low, counts)
            self.boxes.append(np.array([source, [*low, *counts]], np.int64))
            values = room_of(src, prod(source[3:]))
            self.values, self.spare = max(self.values, values), max(self.spare, values)
            self.sums = max(self.sums, across * parts * broad * (prod(counts) + 1))
            self.spare = max(self.spare, broad * prod(counts))
        self.shape, self.image_bytes = problem.output_shape[1:], kind_bytes(result) * prod(problem.output_shape[1:])

    def run(self, stored: Stored, images: range, output: Storage | None, biased: bool, stop: Stop) -> Storage | None:
        result = np.empty((self.parts, len(images), *self.shape)) if output is None else output
        weights = stored(1, 0)
        sizes = self.weights_values, self.bias_values, self.values, self.sums
        room = arena("panels", 2 * sum(sizes) + self.spare)
        weights_room, bias_room, panels, sums, spare = (address(room) + 8 * sum(sizes[:place]) for place in range(5))
        for job, (side, bias), at, count in self.jobs:
            pack_side(side, self.groups, address(weights), self.weights_box, weights_room, spare)
            if biased:
                values = stored(2, 0)  # which may be a copy: its name keeps it
                pack_side(bias, self.groups, address(values), _ONE, bias_room, spare)
            else:
                room[2 * sizes[0] :][: 2 * count].fill(0)
            for place, image in enumerate(images):
                src, to = stored(0, image), address(result) + at + place * self.image_bytes
                call = np.array([address(src), weights_room, panels, spare, sums, bias_room, to])
                for boxes in self.boxes:
                    if stop():
                        return None
                    sum_pixels(job, self.taps, self.borders, boxes, call)
        return result


def pixel_sums(problem: ConvProblem, images: range, kind: int, stored: Stored, stop: Stop, parts: int) -> Array | None:
    """Return dst of some images, without a bias, as (parts, images, ..); None when `stop` said so."""
    return _Pixels(problem, len(images), kind, parts, F64).run(stored, images, None, False, stop)


def write_pixels(problem: ConvProblem, images: range, kind: int, stored: Stored, output: Storage, stop: Stop) -> bool:
    """Write dst of some images, rounded, whose inputs are not f64; False when `stop` said so."""
    return _Pixels(problem, len(images), kind, 1, kind).run(stored, images, output, problem.bias, stop) is not None
