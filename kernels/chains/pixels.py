"""Forward operations of the reference on the nest of `kernels.forward.gather`: an element is a tap, and ends a chain.

Rows of tiles are dst positions, lanes dst channels, or groups where these have few. Taps are phases of their own, whose
sums are added to memory; those of few channels are listed together, and their sums stay in registers.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from kernels.arena import address
from kernels.cache import cached
from kernels.chains.boxes import Array, Stored, cut, groups_of, panels_of, room, steps_of, up
from kernels.dtypes import DTYPES, KINDS
from kernels.emit.compiler import Table
from kernels.emit.doubles import CHAINS, EXACT, LANES, PARTS, SHAPES, WIDE, chain_table
from kernels.forward.axes import AxisTable, axis_table, is_plain, plain, tables_of, tap_numbers
from kernels.forward.gather import gather_doubles
from kernels.forward.records import GatherShare, Work
from kernels.plan import Stop, Storage
from kernels.problem import ConvProblem

__all__ = ["pixel_sums", "write_pixels"]

Values = npt.NDArray[Any]
Box = tuple[slice, ...]

_FEW_TERMS, _MOST_TAPS = 16, 1 << 7
"""Terms of a kernel position below which sums stay in registers over all of them, and the most of these."""

_WEIGHTS_BYTES = 1 << 24
"""What packed weights should take at a time."""


@cached
class _Pixels:
    """Tables for dst of an image, all groups, some of each one's channels at a time."""

    def __init__(self, problem: ConvProblem, parts: int, kind: int) -> None:
        dims, shape = problem.dims, EXACT if parts == PARTS else CHAINS
        terms, out, taps, lanes = dims.src_channels, dims.dst_channels, prod(dims.kernel), LANES * SHAPES[shape][1]
        self.wide = parts == 1 and 2 * up(dims.groups, lanes) * out < dims.groups * up(out, lanes)
        self.problem, self.parts, self.lanes = problem, parts, lanes
        shape, outer, count = (WIDE, out, dims.groups) if self.wide else (shape, dims.groups, out)
        self.table, tables = chain_table(shape), self._tables()
        listed = parts == 1 and taps <= _MOST_TAPS and terms <= (1 if self.wide else _FEW_TERMS)
        self.axes = tables_of((plain(1), *(table if listed else table.alone() for table in tables)), False)
        across, line = up(dims.groups, lanes) if self.wide else 1, 8 * lanes
        self.pitch = terms * (across if self.wide else dims.groups)
        self.step = lanes * max(1, _WEIGHTS_BYTES // (line * taps * terms * outer))
        self.share = np.zeros(1, GatherShare.dtype)
        share, panel = self.share[0], {"words": terms, "line": line, "tap_bytes": line * terms}
        for record, values in (
            (share, {"kind": kind, "loops": range(4), "channels": terms, "covered": all(t.covered for t in tables)}),
            (share["panel"], {**panel, "kernel": [table.kernel for table in tables]}),
            (share["src"], {"word": 8 * across, "by_tap": not listed}),
            (share["sums"], {"chunk": terms, "group": 1, "within_line": True, "flushes": True}),
        ):
            for name, value in values.items():
                record[name] = value
        sizes, size = [table.dst for table in tables], DTYPES[problem.dtype].size
        channel, position = (prod(sizes), 1) if problem.data_format == "NCX" else (1, problem.dst_channels)
        self.channel = size * channel
        self.out = np.append(steps_of(size * position, sizes), size * channel * (out if self.wide else 1))
        density = max(1, prod(table.src for table in tables) // max(1, prod(sizes)))
        some = outer * up(min(self.step, count), lanes)
        src, sums = 8 * density * terms * (lanes if self.wide else 1), 8 * some * parts
        self.boxes = []
        for low, high in cut(sizes, src + line * parts, 8 * density * self.pitch + sums, some * terms * taps):
            spans = [table.window(*span) for table, span in zip(tables, zip(low, high, strict=True), strict=True)]
            work = np.zeros(1, Work.dtype)
            band, tile = work["band"], work["tile"]
            band["low"], band["high"], tile["limit"], tile["blocks"] = [0, *low], [1, *high], SHAPES[shape][0], 1
            work["src"] = steps_of(8 * self.pitch, [end - first for first, end in spans])
            work["dst"] = steps_of(line * parts, [end - first for first, end in zip(low, high, strict=True)])
            begins = work["src"][0, 1:] @ [first for first, _ in spans], band["low"][0] @ work["dst"][0]
            shift = np.array([-begins[0], -begins[1], 0, 0, 0, band["low"][0] @ self.out[:4], 0])
            self.boxes.append((work, tuple(slice(*span) for span in spans), shift))
        self.most = max(
            (int(np.prod(work["band"]["high"] - work["band"]["low"])) for work, *_ in self.boxes), default=0
        )

    def _tables(self) -> list[AxisTable]:
        """Return the tables of (d, h, w), and note which src positions they count and whether all are one axis."""
        dims, tables = self.problem.dims, []
        read = [slice(0, size) for size in dims.src]
        for axis, (stride, size) in enumerate(zip(dims.strides, dims.narrow, strict=True)):
            last = (size - 1) * stride
            if dims.gathers and dims.kernel[axis] == 1 and dims.pads[axis] == 0 and last < dims.wide[axis]:
                read[axis] = slice(0, last + 1, stride)
                tables.append(plain(size))
            else:
                tables.append(axis_table(dims, axis).in_order(tap_numbers(dims, axis)))
        self.read, self.flat = tuple(read), all(map(is_plain, tables))
        return [plain(1), plain(1), plain(prod(dims.dst))] if self.flat else tables

    def _weights(self, values: Values) -> Values:
        """View the weights as (groups, taps, src channels, dst channels), or with groups and dst channels swapped."""
        dims, (group, wide, narrow, tap) = self.problem.dims, self.problem.weights_strides
        src, dst = (wide, narrow) if dims.gathers else (narrow, wide)
        shape = dims.groups, prod(dims.kernel), dims.src_channels, dims.dst_channels
        strides = [values.itemsize * step for step in (group, tap, src, dst)]
        found = np.lib.stride_tricks.as_strided(np.ascontiguousarray(values), shape, strides)  # a cut tensor is a view
        return found.transpose(3, 1, 2, 0) if self.wide else found

    def _view(self, image: Values, some: Box) -> Values:
        """View an image as (d, h, w, groups, channels of a group), with all positions as one axis if `flat`."""
        found = groups_of(image, self.problem)[some]
        return found.reshape(1, 1, -1, *found.shape[3:]) if self.flat else found

    def _pack(self, box: Values) -> Array:
        """Pack src positions: all channels, group by group, or all groups, channel by channel."""
        *sizes, groups, channels = box.shape
        if not self.wide:
            packed = room("panels", *box.shape)
            packed[...] = box
        else:
            packed = room("panels", *sizes, channels, up(groups, self.lanes))
            packed[..., :groups], packed[..., groups:] = box.swapaxes(-1, -2), 0
        return packed

    def _blocks(self, first: int, shape: Sequence[int]) -> Table:
        """Return for each block of lanes the bytes of `gather_doubles` from where tensors and scratch begin.

        The lanes are those from the `first` on, in panels of a `shape`; those of sums are for one position.
        """
        dims, line = self.problem.dims, 8 * self.lanes
        outer, lane = (place.reshape(-1) for place in np.indices(shape[:2]))
        number, lane, out = np.arange(len(outer)), first + self.lanes * lane, dims.dst_channels
        columns = (
            8 * (lane if self.wide else outer * dims.src_channels),
            line * self.parts * number,
            8 * prod(shape[2:]) * number,
            line * self.parts * number,
            line * number,
            self.channel * (lane * out + outer if self.wide else outer * out + lane),
            np.minimum(self.lanes, (dims.groups if self.wide else out) - lane),
        )
        return np.stack(columns, 1)

    def run(self, stored: Stored, images: range, output: Storage | None, biased: bool, stop: Stop) -> Storage | None:
        problem, lanes = self.problem, self.lanes
        result = np.empty((self.parts, len(images), *problem.output_shape[1:])) if output is None else output[None]
        weights = self._weights(stored(1, 0))
        bias = (stored(2, 0) if biased else np.zeros(problem.dst_channels)).reshape(problem.groups, -1)
        bias = bias.T if self.wide else bias
        for first in range(0, weights.shape[-1], self.step):
            some = slice(first, first + self.step)
            panels, added = panels_of(weights[..., some], lanes), panels_of(bias[..., some], lanes)
            share, blocks = self.share.copy(), self._blocks(first, panels.shape)
            share["panel"]["block_bytes"] = panels[0, 0].nbytes
            out = np.append(self.out, address(room("f32", self.most * lanes)))
            for place, image in enumerate(images):
                src = self._view(stored(0, image), self.read)
                base = [0, 0, address(panels), 0, address(added), address(result[:, place]), 0]
                for work, box, shift in self.boxes:
                    if stop():
                        return None
                    packed, sizes = self._pack(src[box]), (work["band"]["high"] - work["band"]["low"])[0].tolist()
                    sums, positions = room("sums", *panels.shape[:2], *sizes[1:], self.parts, lanes), prod(sizes)
                    base[0], base[1] = address(packed), address(sums)
                    base[3] = base[1]
                    each = blocks * (1, positions, 1, positions, 1, 1, 1) + shift + base
                    gather_doubles(self.table, share, work.copy(), self.axes, each, out)
                    if output is None:
                        self._copy(sums, first, work["band"]["low"][0, 1:].tolist(), result[:, place : place + 1])
        return result if output is None else output

    def _copy(self, sums: Array, first: int, low: Sequence[int], result: Array) -> None:
        """Copy the sums (blocks, panels, d, h, w, part, lane) of a box to where they belong in parts of an image."""
        for part, image in enumerate(result):
            whole = self._view(image, ())[*(slice(at, at + n) for at, n in zip(low, sums.shape[2:5], strict=True))]
            for panel in range(sums.shape[1]):
                at = first + panel * self.lanes
                to = (whole.swapaxes(-1, -2) if self.wide else whole)[..., at : at + self.lanes]
                to[...] = np.moveaxis(sums[:, panel, ..., part, : to.shape[-1]], 0, -2)


def pixel_sums(problem: ConvProblem, images: range, stored: Stored, stop: Stop, parts: int) -> Array | None:
    """Return dst of some images, without a bias, as (parts, images, ..); None when `stop` said so."""
    return _Pixels(problem, parts, KINDS["f64"]).run(stored, images, None, False, stop)


def write_pixels(problem: ConvProblem, images: range, stored: Stored, output: Storage, stop: Stop) -> bool:
    """Write dst of some images, rounded, whose inputs are not f64; False when `stop` said so."""
    pixels = _Pixels(problem, 1, KINDS[problem.dtype])
    return pixels.run(stored, images, output, problem.bias, stop) is not None
