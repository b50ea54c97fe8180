"""A unit of a gradient of weights or of a bias: slabs of pixels, in their order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from math import prod

import numpy as np

from kernels.arena import arena_address
from kernels.emit.compiler import row_of, values_of
from kernels.exact.driver import KINDS, sum_gradient
from kernels.exact.forward import SPLIT, Change, Sums, tile_of
from kernels.exact.parts import MOST_MACS, Part, data_tensor, dst_tensor, is_lanewise, padded
from kernels.exact.records import GradientJob, Operand, Span
from kernels.exact.tables import Pair, axis_spans, span_rows
from kernels.plan import Stop
from kernels.problem import ConvProblem, storage_dtype

__all__ = ["add_gradient", "lanes_are_wide"]

SLAB = 1 << 17
"""Packed values of both tensors that a slab should have: 256 KiB, a part of L2."""

MOST_SLAB = 1 << 21
"""Packed values of the wide tensor that a slab may have, where taps reach far apart: 16 MiB."""


def lanes_are_wide(problem: ConvProblem) -> bool:
    """Whether channels of the wide tensor fill vectors better than those of the narrow one."""
    dims = problem.dims
    wide, narrow = dims.wide_channels, dims.narrow_channels
    return wide * padded(narrow) > narrow * padded(wide)


def _line(channels: int) -> int:
    """Return the bytes of a packed position: an odd number of cache lines, so that positions fill all sets of L1."""
    return 64 * (padded(channels) // 8 | 1)


def _slabs(sizes: Sequence[int], positions: int) -> Iterator[tuple[Pair, ...]]:
    """Cut pixels (n, d, h, w) into about so many that follow each other, whole lines if possible."""
    axis, inner = 3, 1
    while axis and inner * sizes[axis] <= positions:
        inner *= sizes[axis]
        axis -= 1
    step = max(1, positions // inner)
    if axis == 3:  # the sums of f64 go on where lines are not cut
        step = -(-step // SPLIT) * SPLIT
    for outer in product(*map(range, sizes[:axis])):
        for low in range(0, sizes[axis], step):
            yield (
                *((at, at + 1) for at in outer),
                (low, min(sizes[axis], low + step)),
                *((0, size) for size in sizes[axis + 1 :]),
            )


def add_gradient(
    problem: ConvProblem, part: Part, places: Sequence[int], sums: Sums, change: Change, stop: Stop
) -> bool:
    """Add all products of a unit to its sums; `places` are the addresses of its inputs. False if `stop` said so."""
    if problem.computes == "diff_bias":
        return _add_values(problem, part, places[0], sums, change, stop)
    work = _Work(problem, part, places, sums, change)
    slabs = [*_slabs(work.tensors[1].sizes, work.positions())]
    boxes: list[tuple[Pair, ...]] = [part.axes]
    if part.positions > 1 and work.reaches_far(slabs):
        boxes = [tuple((at, at + 1) for at in tap) for tap in product(*(range(*axis) for axis in part.axes))]
    for number, box in enumerate(boxes):
        for slab in slabs:
            if stop():
                return False
            work.add(box, slab, sums.address + number * work.tap_bytes)
    return True


class _Work:
    """What the slabs of a unit share; of pairs the first is of the wide tensor."""

    def __init__(self, problem: ConvProblem, part: Part, places: Sequence[int], sums: Sums, change: Change) -> None:
        order = (1, 0) if problem.op.startswith("ConvT") else (0, 1)
        both = data_tensor(problem, problem.src_channels, problem.src_spatial), dst_tensor(problem)
        channels = part.src, part.dst
        self.problem, self.part, self.sums, self.change, self.order = problem, part, sums, change, order
        self.lanewise, self.groups = is_lanewise(problem), part.groups[1] - part.groups[0]
        self.tensors = [both[i] for i in order]
        self.channels = [channels[i] for i in order]
        self.places = [places[i] for i in order]
        self.counts = [self.groups if self.lanewise else high - low for low, high in self.channels]
        self.lines = [_line(count) for count in self.counts]
        self.roles = (1, 0) if lanes_are_wide(problem) else (0, 1)  # of a and b
        self.rows = 1 if self.lanewise else self.counts[self.roles[0]]
        self.tap_bytes = self.rows * sums.line
        self.factors = np.array(change.factors or (1.0, 1.0))

    def positions(self) -> int:
        """Return the pixels that a slab should have."""
        macs = self.part.positions * self.groups * prod(self.counts[: 1 if self.lanewise else 2])
        return max(1, min(SLAB // (sum(self.lines) // 8), MOST_MACS // max(1, macs)))

    def reaches_far(self, slabs: Sequence[tuple[Pair, ...]]) -> bool:
        """Whether the wide pixels that all taps reach from a slab may be too many to pack."""
        dims, packed = self.problem.dims, self.lines[0] // 8
        packed *= max((slab[0][1] - slab[0][0] for slab in slabs), default=0)
        for axis, (low, high) in enumerate(self.part.axes):
            most = max((slab[1 + axis][1] - slab[1 + axis][0] for slab in slabs), default=0)
            packed *= min(dims.wide[axis], most * dims.strides[axis] + (high - low) * dims.dilations[axis])
        return packed > MOST_SLAB

    def add(self, taps: tuple[Pair, ...], slab: tuple[Pair, ...], to: int) -> None:
        """Add a slab to the sums of a box of taps."""
        dims, size = self.problem.dims, storage_dtype(self.problem.dtype).itemsize
        spans, first, sizes, hops = [], [slab[0][0]], [slab[0][1] - slab[0][0]], [1]
        for axis in range(3):
            stride = min(dims.strides[axis], max(1, dims.wide[axis]))
            hop = stride if taps[axis][1] - taps[axis][0] == 1 else 1
            rows, (low, high) = span_rows(axis_spans(dims, axis), taps[axis], slab[1 + axis], stride, hop)
            if not rows["count"].any():
                return
            spans.append(rows)
            first.append(low)
            sizes.append((high - low - 1) // hop + 1)
            hops.append(hop)
        strides = [1, *(min(stride, max(1, wide)) for stride, wide in zip(dims.strides, dims.wide, strict=True))]
        steps = [_packed_steps(sizes, self.lines[0]), _packed_steps([high - low for low, high in slab], self.lines[1])]
        for axis, rows in enumerate(spans):
            rows["a"] *= steps[0][1 + axis]
            rows["b"] *= steps[1][1 + axis]
        moved = [[step * stride // hop for step, stride, hop in zip(steps[0], strides, hops, strict=True)], steps[1]]
        boxes = [
            self._operand(0, first, sizes, hops, size),
            self._operand(1, [low for low, _ in slab], [high - low for low, high in slab], [1] * 4, size),
        ]
        a, b = self.roles
        if a:
            for rows in spans:
                rows["a"], rows["b"] = rows["b"].copy(), rows["a"].copy()
        entry, most, width = tile_of(self.sums.word > 0, self.lanewise)
        lines = prod(high - low for low, high in slab[:3])
        run = slab[3][1] - slab[3][0]
        job = row_of(
            GradientJob, entry=entry, rows=most, width=width, split=SPLIT if self.sums.word else 0,
            lanewise=self.lanewise, has_a=True, a=boxes[a], b=boxes[b], a_steps=tuple(moved[a]),
            b_steps=tuple(moved[b]), images=slab[0][1] - slab[0][0], spans=tuple(len(rows) for rows in spans),
            sums=to, group=self.part.positions * self.tap_bytes, tap=self.tap_bytes, line=self.sums.line,
            word=self.sums.word, most=lines * (run // SPLIT + 2 if self.sums.word else 1),
        )  # fmt: skip
        sum_gradient(job, np.concatenate(spans), 0, 1 if self.lanewise else self.groups)

    def _operand(
        self, which: int, first: Sequence[int], sizes: Sequence[int], hops: Sequence[int], size: int
    ) -> tuple[object, ...]:
        tensor, low, order = self.tensors[which], self.channels[which][0], self.order[which]
        start = sum(at * step for at, step in zip(first, tensor.steps, strict=True))
        start += self.part.groups[0] * tensor.group + low * tensor.channel
        packed = prod(sizes) * self.lines[which] // 8
        return values_of(
            Operand, kind=KINDS[self.problem.dtype], place=self.places[which] + size * start,
            steps=tuple(size * hop * step for hop, step in zip(hops, tensor.steps, strict=True)), sizes=tuple(sizes),
            channels=self.counts[which], channel=size * (tensor.group if self.lanewise else tensor.channel),
            group=size * tensor.group, packed=arena_address(f"exact_{'wide' if which == 0 else 'narrow'}", 2 * packed),
            line=self.lines[which], factor=self.factors.ctypes.data + 8 * order if self.change.factors else 0,
            square=int(self.change.square),
        )  # fmt: skip


def _packed_steps(sizes: Sequence[int], line: int) -> list[int]:
    """Return the byte steps of a packed box."""
    return [prod(sizes[axis + 1 :]) * line for axis in range(4)]


def _add_values(problem: ConvProblem, part: Part, place: int, sums: Sums, change: Change, stop: Stop) -> bool:
    """Add the values of diff_dst themselves: products with a 1 at address `a`."""
    tensor, size = dst_tensor(problem), storage_dtype(problem.dtype).itemsize
    channels = part.dst[1] - part.dst[0]
    line, factors, one = _line(channels), np.array(change.factors or (1.0, 1.0)), np.ones(1)
    entry, most, width = tile_of(sums.word > 0, False)
    for slab in _slabs(tensor.sizes, max(1, SLAB // (line // 8))):
        if stop():
            return False
        sizes = [high - low for low, high in slab]
        start = (
            sum(low * step for (low, _), step in zip(slab, tensor.steps, strict=True)) + part.dst[0] * tensor.channel
        )
        spans = np.zeros(3, Span.dtype)
        spans["count"], spans["at"] = sizes[1:], [low for low, _ in slab[1:]]
        steps = _packed_steps(sizes, line)
        values = values_of(
            Operand, kind=KINDS[problem.dtype], place=place + size * start,
            steps=tuple(size * step for step in tensor.steps), sizes=tuple(sizes), channels=channels,
            channel=size * tensor.channel, group=0, packed=arena_address("exact_narrow", prod(sizes) * line // 4),
            line=line, factor=factors.ctypes.data if change.factors else 0, square=int(change.square),
        )  # fmt: skip
        ones = values_of(
            Operand, kind=0, place=0, steps=(0,) * 4, sizes=(0,) * 4, channels=1, channel=0, group=0,
            packed=one.ctypes.data, line=0, factor=0, square=0,
        )  # fmt: skip
        job = row_of(
            GradientJob, entry=entry, rows=most, width=width, split=SPLIT if sums.word else 0, lanewise=False,
            has_a=False, a=ones, b=values, a_steps=(0,) * 4, b_steps=tuple(steps), images=sizes[0], spans=(1, 1, 1),
            sums=sums.address, group=0, tap=0, line=sums.line, word=sums.word,
            most=prod(sizes[:3]) * (sizes[3] // SPLIT + 2 if sums.word else 1),
        )  # fmt: skip
        sum_gradient(job, spans, 0, 1)
    return True
