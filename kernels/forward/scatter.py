"""ConvTranspose for few dst channels: products of src pixels with all taps are added where they belong.

Lanes of a tile are (tap, dst channel) pairs and its rows src pixels; the products of a src pixel and a line of the
kernel then lie next to each other, as their dst pixels do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import ceil, prod
from typing import NamedTuple

import numpy as np

from kernels.blocks import STEPS, SUMS
from kernels.emit.brgemm import FLUSH, FLUSH_FIRST, ROWS, Batch, Element, micro_table
from kernels.emit.compiler import Record, Records, Rows, Vector, jit, numbers, row_of, together
from kernels.emit.intrinsics import (
    F32,
    add_run,
    address_of,
    call_entry,
    fill_zero,
    keep_alive,
    load,
    stack_array,
    stack_record,
    store_value,
)
from kernels.forward.axes import axis_tables
from kernels.forward.gather import bring_box
from kernels.forward.operands import Share, Span
from kernels.forward.output import bring_bias, fill, write
from kernels.forward.records import Call, Pass, Tap, Work
from kernels.pack.panels import Values, padded
from kernels.plan import Stop, Storage
from kernels.problem import ConvProblem
from kernels.target import target

__all__ = ["Scatter"]

WIDTH = target().lanes
LANES = 2 * WIDTH
MOST_ROWS = ROWS["f32"][2]


class Facts(Record):
    """The facts of a unit: products of src pixels are scattered to so many dst `channels` of a group.

    The dst positions from `low` to `high` are wanted. They meet the src positions from `first` to `last`, which are
    read in place unless they are `packed`, `pitch` bytes apart. A group has so many `src_channels`, summed `chunk` at a
    time, a line of products so many `blocks` of two vectors. `dense` says that the taps of a line meet adjacent dst
    pixels.
    """

    kind: int
    packed: bool
    src_channels: int
    channels: int
    kernel: Vector = numbers(3)
    strides: Vector = numbers(3)
    low: Vector = numbers(4)
    high: Vector = numbers(4)
    first: Vector = numbers(4)
    last: Vector = numbers(4)
    pitch: int
    blocks: int
    chunk: int
    dense: bool


@together
class SrcTaps(NamedTuple):
    """The taps of (d, h, w): the src positions from `low` to `high` meet a tap, the first one at dst position `src`."""

    planes: Rows[Tap]
    lines: Rows[Tap]
    columns: Rows[Tap]


class TapLine(Record):
    """A line of taps that a src line meets dst with: bytes from a pixel's products to its own, address of its sums."""

    products: int
    sums: int


BATCH, ELEMENT, TAP_LINE, WORK = (each.dtype for each in (Batch, Element, TapLine, Work))


@jit
def pack_columns(shares: Rows[Facts], passes: Rows[Pass], calls: Rows[Call]) -> None:
    """Pack panels [group][vector][src channel][lanes] of (tap, dst channel) pairs."""
    share, one, call = shares[0], passes[0], calls[0]
    weights, channels, out = one.weights, share.src_channels, share.channels
    lanes = 2 * WIDTH * share.blocks
    for g in range(one.groups):
        for lane in range(lanes):
            tap, c = lane // out, lane % out
            inside = tap < share.kernel[0] * share.kernel[1] * share.kernel[2]
            source = call.weights + weights.start + g * weights.group + tap * weights.tap + c * weights.dst_channel
            place = call.panels + 4 * (g * lanes * channels + lane // WIDTH * channels * WIDTH + lane % WIDTH)
            for k in range(channels):
                value = load(share.kind, source + k * weights.src_channel) if inside else 0.0
                store_value(place + 4 * WIDTH * k, np.float32(value))


@jit
def _meet(
    share: Facts, planes: Rows[Tap], lines: Rows[Tap], d: int, h: int, counts: Vector, acc: int,
    live: Rows[TapLine],
) -> int:  # fmt: skip
    """List the lines of taps that src line (d, h) meets wanted dst lines with; give their number."""
    kernel, strides, low, out = share.kernel, share.strides, share.low, share.channels
    count = 0
    for i in range(planes.shape[0]):
        plane = planes[i]
        u = plane.src + (d - plane.low) * strides[0] - low[1]
        if d < plane.low or d >= plane.high or u < 0 or u >= counts[1]:
            continue
        for j in range(lines.shape[0]):
            line = lines[j]
            v = line.src + (h - line.low) * strides[1] - low[2]
            if h >= line.low and h < line.high and v >= 0 and v < counts[2]:
                met = live[count]
                met.products = 4 * (plane.number * kernel[1] + line.number) * kernel[2] * out
                met.sums = acc + 4 * (u * counts[2] + v) * counts[3] * out
                count += 1
    return count


@jit
def _add_tile(share: Facts, columns: Rows[Tap], live: Rows[TapLine], first: int, rows: int, products: int) -> None:
    """Add the products of `rows` src pixels of a line, from column `first` on, to the sums that they belong to."""
    low, high, out, stride = share.low[3], share.high[3], share.channels, share.strides[2]
    # as src columns rise, the taps of a line that are inside fall
    start, stop = columns.shape[0], columns.shape[0]
    for x in range(first, first + rows):
        while stop > 0:
            tap = columns[stop - 1]
            if x < tap.high and tap.src + (x - tap.low) * stride < high:
                break
            stop -= 1
        while start > 0:
            tap = columns[start - 1]
            if x < tap.low or tap.src + (x - tap.low) * stride < low:
                break
            start -= 1
        k = start
        while k < stop:
            tap = columns[k]
            run = stop - k if share.dense else 1
            u = 4 * out * (tap.src + (x - tap.low) * stride - low)
            for i in range(live.shape[0]):
                met = live[i]
                add_run(met.sums + u, products + met.products + 4 * out * tap.number, run * out)
            k += run
        products += 8 * WIDTH * share.blocks


@jit
def scatter(
    table: Vector, shares: Rows[Facts], passes: Rows[Pass], calls: Rows[Call], taps: SrcTaps, begin: int, end: int
) -> None:
    """Do items ``begin..end`` in order: each is a src line of one plane, group and image.

    The call's `products` hold those of one tile, its `sums` those of one image and group [d][h][w][dst channels].
    """
    share, one, call = shares[0], passes[0], calls[0]
    planes, lines, columns = taps.planes, taps.lines, taps.columns
    kind, channels, src, dst, chunk = share.kind, share.src_channels, one.src, one.dst, share.chunk
    out, groups, used = share.channels, one.groups, share.blocks
    low, high, acc = share.low, share.high, call.sums
    counts, sums, buffer = stack_array(4, np.int64), stack_array(4, np.int64), stack_array(64, np.float32)
    work, batch, live = stack_record(WORK), stack_record(BATCH), np.empty(planes.shape[0] * lines.shape[0], TAP_LINE)
    elements = np.zeros((channels + chunk - 1) // chunk, ELEMENT)
    for number in range(elements.shape[0]):
        element, done = elements[number], number * chunk
        element.a, element.b, element.steps = 4 * done, 4 * WIDTH * done, min(chunk, channels - done)
        element.flush = FLUSH if number > 0 else FLUSH_FIRST
    elements[elements.shape[0] - 1].flush = 0
    batch.elements, batch.count, batch.valid = address_of(elements), elements.shape[0], WIDTH
    zeros = stack_array(LANES, np.float32)
    batch.start, batch.apart = address_of(zeros), 1 if channels > chunk else 0
    batch.a_step, batch.b_step, batch.b_vector = 4, 4 * WIDTH, 4 * WIDTH * channels
    batch.c_row, batch.totals_row = 8 * WIDTH * used, 8 * WIDTH
    batch.totals = call.products + MOST_ROWS * used * 8 * WIDTH if channels > chunk else 0
    for axis in range(4):
        counts[axis] = high[axis] - low[axis] if axis > 0 else 1
    sums[3] = 4 * out
    for axis in range(2, -1, -1):
        sums[axis] = sums[axis + 1] * counts[axis + 1]
    depth, height = max(1, share.last[1] - share.first[1]), max(1, share.last[2] - share.first[2])
    width, place, sizes = share.last[3] - share.first[3], work.band.first, work.band.sizes
    sizes[0], sizes[1], sizes[2], sizes[3], place[3] = 1, 1, 1, width, share.first[3]
    for item in range(begin, end):
        g, line = item // (height * depth) % groups, item % (height * depth)
        n, d, h = low[0] + item // (height * depth * groups), share.first[1] + line // height, line % height
        place[0], place[1], place[2] = n, d, share.first[2] + h
        if line == 0:
            if call.bias == 0:  # data gradients: for three channels zeros at once are several times as fast
                fill_zero(acc, sums[0])
            else:
                bring_bias(kind, one, call, g, 0, out, call.products)
                fill(F32, call.products, out, counts, acc, sums)
        source = call.src + src.start + g * src.group
        for axis in range(4):
            source += place[axis] * src.strides[axis]
        batch.a_row = src.strides[3]
        count = _meet(share, planes, lines, d, place[2], counts, acc, live)
        if share.packed and count > 0:
            batch.a_row = share.pitch
            values = Values(kind, source, src.strides[:], src.channel, call.src + src.nbytes)
            bring_box(values, channels, batch.a_row, work, call.source)
            source = call.source
        pieces = (width + MOST_ROWS - 1) // MOST_ROWS if count > 0 else 0
        for piece in range(pieces):
            x = width * piece // pieces
            batch.rows, batch.a = width * (piece + 1) // pieces - x, source + x * batch.a_row
            for b in range(used):
                batch.b = call.panels + 8 * WIDTH * channels * (g * used + b)
                batch.c = batch.next = call.products + b * 8 * WIDTH
                call_entry(table[1], address_of(batch))
            _add_tile(share, columns, live[:count], place[3] + x, batch.rows, call.products)
        if line == height * depth - 1:
            to = call.dst + dst.start + g * dst.group + n * dst.strides[0]
            for axis in range(1, 4):
                to += low[axis] * dst.strides[axis]
            values = Values(kind, to, dst.strides[:], dst.channel, call.dst + dst.nbytes)
            write(values, acc, out, out, counts, address_of(buffer))
    keep_alive(elements)


class Scatter(Share):
    """Products of src pixels with all taps, added to the dst pixels that they belong to."""

    def __init__(self, problem: ConvProblem, part: Sequence[int]) -> None:
        super().__init__(problem, part)
        dims, channels, out = self.dims, self.dims.src_channels, self.dims.dst_channels
        taps = [
            table.taps for table in axis_tables(replace(dims, gathers=True))[1:]
        ]  # what src meets, as if it was dst
        self.taps = SrcTaps(taps[0], taps[1], taps[2])
        lows, highs = zip(*self.spans, strict=True)
        firsts, lasts = zip(self.spans[0], *map(_reach, taps, self.spans[1:], self.strides), strict=True)
        packed = not (self.near and problem.dtype == "f32")
        lanes, pitch = prod(dims.kernel) * out, padded(channels)
        used = ceil(lanes / LANES)
        depth, height, width = (max(1, last - first) for first, last in zip(firsts[1:], lasts[1:], strict=True))
        groups = self.g1 - self.g0
        self.floats["panels"] = groups * channels * used * LANES
        self.floats["source"] = width * max(channels + 8, pitch) if packed else 0
        self.floats["products"] = MOST_ROWS * (used + 1) * LANES
        self.floats["sums"] = prod(high - low for low, high in self.spans[1:]) * out
        self.items = (highs[0] - lows[0]) * groups * depth * height
        self.batch = max(1, STEPS.batch_macs // (width * lanes * channels))
        self.part = self.one_pass(0, groups, out)
        self.share = row_of(
            Facts, kind=self.kind, packed=packed, src_channels=channels, channels=out, kernel=dims.kernel,
            strides=self.strides, low=lows, high=highs, first=firsts, last=lasts, pitch=4 * pitch, blocks=used,
            chunk=ceil(channels / ceil(channels / SUMS.flush_steps)), dense=dims.dilations[2] == 1,
        )  # fmt: skip

    def run(self, inputs: Sequence[Storage], output: Storage, stop: Stop) -> bool:
        """Compute some src lines after the other."""
        call = self.call(inputs, output)
        pack_columns(self.share, self.part, call)
        for item in range(0, self.items, self.batch):
            if stop():
                return False
            end = min(self.items, item + self.batch)
            scatter(micro_table(), self.share, self.part, call, self.taps, item, end)
        return True


def _reach(taps: Records, span: Span, stride: int) -> Span:
    """Return the src positions of an axis that meet some of the dst positions of a span."""
    first, last = (taps["low"] + np.maximum(0, -((taps["src"] - end) // stride)) for end in span)
    last = np.minimum(taps["high"], last)
    met = first < last
    return (int(first[met].min()), int(last[met].max())) if met.any() else (0, 0)
