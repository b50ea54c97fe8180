"""The units of BiasAdd and BiasAddBackward.

Sums are formed in float64: in chunks of images, or of rows where channels lie side by side, each in order; then the
chunks are added as a balanced tree and rounded once. The problem alone decides the chunks.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import ceil, prod

import numpy as np

from kernels.arena import address, arena
from kernels.bias.runs import add_to_planes, add_to_rows, sum_planes, sum_rows
from kernels.blocks import STEPS, SUMS
from kernels.dtypes import KINDS
from kernels.emit.compiler import Doubles, Floats
from kernels.plan import Stop, Storage, Unit
from kernels.problem import ConvProblem, storage_dtype
from kernels.reduction import chunks_of, sum_tree
from kernels.reference import narrow, widen

__all__ = ["BIAS_ADD", "BIAS_SUMS"]

Places = tuple[int, int]
"""Addresses of the same value of src and of dst."""


class _View:
    """A data tensor as planes of `count` values, `planes` an image, or as rows of `count` values, the channels.

    With one pixel an image the two are the same: rows are faster.
    """

    def __init__(self, problem: ConvProblem) -> None:
        pixels, channels = prod(problem.dst_spatial), problem.dst_channels
        self.in_rows = problem.data_format == "NXC" or pixels == 1
        self.images = problem.n
        self.rows = pixels if self.in_rows else 1  # of an image
        self.planes, self.count = (1, channels) if self.in_rows else (channels, pixels)
        self.kind = KINDS[problem.dtype]
        self.value = storage_dtype(problem.dtype).itemsize
        self.line = self.count * self.value  # bytes of a row or a plane
        self.image = self.planes * self.rows * self.line  # bytes
        self.joined = max(1, SUMS.bias_row // self.count)
        """Rows that are taken as one: short ones would take longer to reach than to compute."""

    @property
    def parts(self) -> int:
        """Count what a sum may be cut between: rows, or images of planes."""
        return self.images * self.rows

    def chunks(self) -> int:
        """Return the number of chunks, a power of two: as many as have enough values each."""
        return chunks_of(min(self.parts, self.parts * self.planes * self.count // SUMS.bias_chunk))


class BiasSums:
    """Sums over all images and pixels of each channel."""

    name = "bias_sums"

    def refuse(self, problem: ConvProblem) -> str | None:
        """Take every BiasAddBackward."""
        return None if problem.op == "BiasAddBackward" else "computes BiasAddBackward only"

    def units(self, problem: ConvProblem, workers: int) -> tuple[list[Unit], int]:
        """Cut by chunks, whose sums a second stage adds; or by channels where there is one chunk."""
        view, channels = _View(problem), problem.dst_channels
        chunks = view.chunks()
        if chunks > 1:
            ends = [view.parts * (chunk + 1) // chunks for chunk in range(chunks)]
            first = [
                Unit(chunk, 0, None, None, problem.macs // chunks, (chunk, 0, channels), ceil(end / view.rows))
                for chunk, end in enumerate(ends)
            ]
            join = Unit(chunks, 1, (0,), (channels,), 0, (-1, 0, channels))
            return [*first, join], 8 * chunks * channels
        parts = 1 if view.in_rows else max(1, min(channels, 4 * workers, problem.macs // STEPS.bias_unit))
        cuts = [channels * part // parts for part in range(parts + 1)]
        return [
            Unit(i, 0, (low,), (high - low,), problem.macs // parts, (0, low, high))
            for i, (low, high) in enumerate(pairwise(cuts))
        ], 0

    def run(
        self, problem: ConvProblem, unit: Unit, inputs: Sequence[Storage], output: Storage,
        scratch: Storage | None, stop: Stop,
    ) -> bool:  # fmt: skip
        """Sum one chunk, or add up all chunks."""
        chunk, low, high = unit.part
        channels = problem.dst_channels
        view = _View(problem)
        chunks = view.chunks()
        sums = np.zeros(high - low)
        if chunk < 0:
            assert scratch is not None
            sums = sum_tree(scratch.view(np.float64).reshape(chunks, channels))
        else:
            ends = view.parts * chunk // chunks, view.parts * (chunk + 1) // chunks
            add = _sum_rows if view.in_rows else _sum_planes
            if not add(view, address(inputs[0]) + low * view.line, ends, sums, stop):
                return False
        if unit.offset is None:
            assert scratch is not None
            scratch.view(np.float64)[chunk * channels : (chunk + 1) * channels] = sums
        else:
            output[low:high] = narrow(sums, problem.dtype)
        return True


def _sum_planes(view: _View, source: int, images: tuple[int, int], sums: Doubles, stop: Stop) -> bool:
    """Add planes of some images, the first channel's at `source`; False when `stop` said so."""
    piece = SUMS.bias_piece
    planes = max(1, min(len(sums), piece // view.count))
    together = max(1, piece // (len(sums) * view.count))
    for image in range(*images, together):
        for channel in range(0, len(sums), planes):
            for start in range(0, view.count, piece):
                if stop():
                    return False
                place = source + image * view.image + channel * view.line + start * view.value
                many, count = min(together, images[1] - image), min(piece, view.count - start)
                mine = sums[channel : channel + planes]
                sum_planes(view.kind, place, many, view.image, view.line, count, mine)
    return True


def _sum_rows(view: _View, source: int, rows: tuple[int, int], sums: Doubles, stop: Stop) -> bool:
    """Add some rows; False when `stop` said so."""
    lines = arena("lines", 2 * view.joined * view.count)[: 2 * view.joined * view.count].view(np.float64)
    lines[:] = 0
    step, at = view.joined * view.line, address(lines)
    many = view.joined * max(1, SUMS.bias_piece // len(lines))
    for row in range(*rows, many):
        if stop():
            return False
        whole, rest = divmod(min(many, rows[1] - row), view.joined)
        place = source + row * view.line
        sum_rows(view.kind, place, step, whole, len(lines), at)
        sum_rows(view.kind, place + whole * step, 0, min(1, rest), rest * view.count, at)
    with np.errstate(invalid="ignore"):
        sums += lines.reshape(view.joined, view.count).sum(0)
    return True


class BiasAdd:
    """The bias added to every value of its channel."""

    name = "bias_add"

    def refuse(self, problem: ConvProblem) -> str | None:
        """Take every BiasAdd."""
        return None if problem.op == "BiasAdd" else "computes BiasAdd only"

    def units(self, problem: ConvProblem, workers: int) -> tuple[list[Unit], int]:
        """Cut by images, then by what comes next in memory: channels, or lines of pixels."""
        shape, view = problem.output_shape, _View(problem)
        wanted = max(1, min(4 * workers, problem.macs // STEPS.bias_unit))
        by_image = min(max(1, shape[0]), wanted)
        whole = problem.rank == 0 or (view.in_rows and problem.data_format == "NCX")  # a row is not cut
        by_next = 1 if whole else min(shape[1], ceil(wanted / by_image))
        units: list[Unit] = []
        for image, part in np.ndindex(by_image, by_next):
            n0, n1 = (shape[0] * at // by_image for at in (image, image + 1))
            low, high = (shape[1] * at // by_next for at in (part, part + 1))
            box = (n0, low, *(0,) * (len(shape) - 2)), (n1 - n0, high - low, *shape[2:])
            units.append(Unit(len(units), 0, *box, problem.macs // (by_image * by_next), (n0, n1, low, high), n1))
        return units, 0

    def run(
        self, problem: ConvProblem, unit: Unit, inputs: Sequence[Storage], output: Storage,
        scratch: Storage | None, stop: Stop,
    ) -> bool:  # fmt: skip
        """Add the bias to one box of src."""
        n0, n1, low, high = unit.part
        view, step = _View(problem), prod(output.shape[2:])  # along the second axis
        bias = widen(inputs[1], problem.dtype).astype(np.float32)
        if not view.in_rows:
            bias = bias[low:high]
        together = high - low == output.shape[1]  # images follow one another
        images, size = (1, (n1 - n0) * output.shape[1] * step) if together else (n1 - n0, (high - low) * step)
        for image in range(n0, n0 + images):
            start = image * view.image + low * step * view.value
            places = address(inputs[0]) + start, address(output) + start
            if not (_add_to_rows if view.in_rows else _add_to_planes)(view, places, size, bias, stop):
                return False
        return True


def _add_to_rows(view: _View, places: Places, size: int, bias: Floats, stop: Stop) -> bool:
    """Add the bias to `size` values in rows; False when `stop` said so."""
    bias = _tiled(bias, view.joined)
    line = view.joined * view.line
    many = max(1, SUMS.bias_piece // len(bias))
    whole, rest = divmod(size, len(bias))
    for row in range(0, whole, many):
        if stop():
            return False
        source, target = (place + row * line for place in places)
        add_to_rows(view.kind, target, source, address(bias), min(many, whole - row), line, len(bias))
    source, target = (place + whole * line for place in places)
    add_to_rows(view.kind, target, source, address(bias), min(1, rest), 0, rest)
    return True


def _tiled(bias: Floats, times: int) -> Floats:
    """Repeat the bias, in this thread's scratch."""
    held = arena("bias", times * len(bias))[: times * len(bias)]
    held.reshape(times, len(bias))[:] = bias
    return held


def _add_to_planes(view: _View, places: Places, size: int, bias: Floats, stop: Stop) -> bool:
    """Add to `size` values in adjacent planes the bias of each; False when `stop` said so."""
    piece, planes = SUMS.bias_piece, size // view.count
    # planes of several images at once
    bias = _tiled(bias, max(1, min(planes // len(bias), 4096 // len(bias))))
    many = max(1, min(len(bias), piece // view.count))
    for first in range(0, planes, len(bias)):
        for plane in range(0, min(len(bias), planes - first), many):
            for start in range(0, view.count, piece):
                if stop():
                    return False
                source, target = (place + (first + plane) * view.line + start * view.value for place in places)
                these = min(many, len(bias) - plane, planes - first - plane)
                count = min(piece, view.count - start)
                add_to_planes(view.kind, target, source, address(bias) + 4 * plane, these, view.line, count)
    return True


BIAS_SUMS, BIAS_ADD = BiasSums(), BiasAdd()
