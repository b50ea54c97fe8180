"""Pairs of bf16 for dot products: packing of weights and src, and whether their magnitudes allow the instruction.

It takes subnormal numbers as zeros, in what it reads and in what it writes. No sum is one where the smallest magnitudes
of both tensors have products whose last digit is worth 2**-126 or more.
"""

from __future__ import annotations

import numpy as np

from kernels.emit.brgemm import MICRO
from kernels.emit.compiler import Records, Rows, Vector, inlined, jit
from kernels.emit.intrinsics import address_of, fill_zero, keep_alive, stack_array, stack_record
from kernels.forward.output import lay_out
from kernels.forward.records import Call, Data, Filter, GatherShare, Pass, Work
from kernels.pack.lines import SPREAD, join3, spread1, spread3, transpose16
from kernels.pack.magnitudes import LEAST_SUM, magnitudes
from kernels.pack.pairs import PackedBox, Packing, pack_boxes, unfolded_boxes, weight_boxes
from kernels.problem import ConvProblem
from kernels.target import target

__all__ = ["bring_dots", "exponent_of", "pack_pairs", "pair_boxes"]

WIDTH, PAIRS = target().lanes, MICRO["pairs"]
LINE = 64

PACKED_BOX, PACKING = PackedBox.dtype, Packing.dtype


@jit
def _unfold(weights: Filter, channels: int, taps: int, rows: int, source: int, to: int) -> None:
    """Copy the weights of some dst channels, whose taps are adjacent, as [dst channel][tap][src channel].

    There are at least 8 taps and 8 src channels.
    """
    for first in range(0, channels, 8):
        channel = min(first, channels - 8)
        for row in range(rows):
            kernels = source + row * weights.dst_channel + channel * weights.src_channel
            place = to + 2 * (row * taps * channels + channel)
            for begin in range(0, taps, 8):
                tap = min(begin, taps - 8)
                transpose16(place + 2 * tap * channels, 2 * channels, kernels + 2 * tap, weights.src_channel)


def pair_boxes(problem: ConvProblem, numbers: Vector, words: int) -> tuple[Records, bool]:
    """Return the boxes for `pack_pairs`, where each tap has `words` words, and whether weights are unfolded."""
    taps, channels = len(numbers), problem.dims.src_channels
    if problem.weights_strides[3] == 1 and min(taps, channels) >= 8:
        return unfolded_boxes(channels, 4 * words * numbers), True
    return weight_boxes(problem, np.arange(taps), 2 * words * numbers, 4), False


@jit
def pack_pairs(
    shares: Rows[GatherShare], passes: Rows[Pass], calls: Rows[Call], taps: Rows[PackedBox], unfolds: bool
) -> None:
    """Pack panels [tap number][pair of src channels][lanes][2], one for each group and vector of dst channels.

    `taps` are boxes as `kernels.pack.pairs` takes them, of weights that are unfolded first if `unfolds`.
    """
    share, one, call, packing = shares[0], passes[0], calls[0], stack_record(PACKING)
    weights, blocks, panel = one.weights, (one.channels + WIDTH - 1) // WIDTH, share.panel
    packing.pairs, packing.channels, packing.plane = True, one.channels, panel.block_bytes
    packing.channel, packing.strides[3] = weights.dst_channel, weights.src_channel
    whole = panel.tap_bytes == 2 * WIDTH * share.channels and one.channels % WIDTH == 0  # no place is left for zeros
    kernel = taps.shape[0] * share.channels
    unfolded = np.empty(WIDTH * kernel if unfolds else 0, np.uint16)
    if unfolds:
        packing.channel, packing.strides[3] = 2 * kernel, 2
    for g in range(one.groups):
        packing.source = call.weights + weights.start + g * weights.group
        packing.target = call.panels + g * blocks * panel.block_bytes
        if not whole:
            fill_zero(packing.target, blocks * panel.block_bytes)
        if not unfolds:
            pack_boxes(packing, taps)
        for b in range(blocks if unfolds else 0):
            packing.channels = min(WIDTH, one.channels - b * WIDTH)
            source = call.weights + weights.start + g * weights.group + b * WIDTH * weights.dst_channel
            packing.source = address_of(unfolded)
            _unfold(weights, share.channels, taps.shape[0], packing.channels, source, packing.source)
            pack_boxes(packing, taps)
            packing.target += panel.block_bytes
    keep_alive(unfolded)


@jit
def exponent_of(shares: Rows[GatherShare], passes: Rows[Pass], calls: Rows[Call]) -> int:
    """Return the smallest exponent among the packed weights of a pass that are not 0."""
    share, one = shares[0], passes[0]
    panels = 1 if share.lanes.lanewise else one.groups * ((one.channels + WIDTH - 1) // WIDTH)
    return _exponent(calls[0].panels, panels * share.panel.block_bytes // LINE)


@inlined
def _exponent(place: int, lines: int) -> int:
    """Return the smallest exponent of the bf16 in some lines of memory."""
    return int((magnitudes(place, lines)[0] + 1) >> 7)


@jit
def _bring_pairs(share: GatherShare, data: Data, channels: int, source: int, work: Work, scratch: int) -> None:
    """Pack a box of src positions as pairs of their `channels`; `source` is position 0.

    A pixel of a line is a plane of its own, and its channels are the line.
    """
    packing, boxes, steps, sizes = stack_record(PACKING), stack_array(1, PACKED_BOX), work.src, work.band.sizes
    box = boxes[0]
    lay_out(work, share.src.pixel_bytes, scratch)
    positions, strides = 1, data.strides[:]
    for axis in range(4):
        source += work.band.first[axis] * strides[axis]
        positions *= sizes[axis]
    if positions == 0:
        return
    fill_zero(scratch + positions * steps[3], LINE)
    run = sizes[3]
    planes = channels == 3 and strides[3] == 2
    adjacent = strides[3] == 2 * channels and (channels == 1 or (channels == 3 and data.channel == 2))
    if (adjacent or planes) and run >= SPREAD:
        for n in range(sizes[0]):
            for d in range(sizes[1]):
                for h in range(sizes[2]):
                    line = source + n * strides[0] + d * strides[1] + h * strides[2]
                    to = scratch + ((n * sizes[1] + d) * sizes[2] + h) * steps[2]
                    if channels == 1:
                        spread1(to, line, run)
                    elif planes:
                        join3(to, line, data.channel, run)
                    else:
                        spread3(to, line, run)
        return
    for axis in range(3):
        box.sizes[axis], packing.steps[axis], packing.strides[axis] = sizes[axis], steps[axis], strides[axis]
    box.sizes[3], packing.strides[3] = channels, data.channel
    packing.channels, packing.channel = run, strides[3]
    packing.source, packing.target, packing.plane = source, scratch, steps[3]
    if steps[3] != 2 * channels:
        fill_zero(scratch, positions * steps[3])
    pack_boxes(packing, boxes)


@jit
def _keep(share: GatherShare, data: Data, call: Call, work: Work, least: int) -> bool:
    """Return whether dot products keep all sums of the src positions at hand; `least` is the weights' exponent."""
    first, sizes, lowest = work.band.first, work.band.sizes, 512
    if share.src.packed:
        size = sizes[0] * sizes[1] * sizes[2] * sizes[3] * share.src.pixel_bytes
        lowest = _exponent(call.source, (size + LINE - 1) // LINE) if size > 0 else 512
    else:
        run, origin = sizes[3] * data.strides[3], call.src + first[3] * data.strides[3]
        if run < LINE:
            return bool(run == 0)
        for n in range(first[0], first[0] + sizes[0]):
            for d in range(first[1], first[1] + sizes[1]):
                for h in range(first[2], first[2] + sizes[2]):
                    place = origin + n * data.strides[0] + d * data.strides[1] + h * data.strides[2]
                    lowest = min(lowest, _exponent(place, run // LINE))
                    lowest = min(lowest, _exponent(place + run - LINE, 1))
    keeps: bool = min(lowest, least) >= 1 and lowest + least >= LEAST_SUM
    return keeps


@jit
def bring_dots(share: GatherShare, one: Pass, call: Call, work: Work, channels: int, least: int) -> None:
    """Pack the src that a band reaches as pairs, unless it is read in place; choose what multiplies them."""
    if share.src.packed:
        _bring_pairs(share, one.src, channels, work.start, work, call.source)
    work.tile.micro = share.micro if _keep(share, one.src, call, work, least) else PAIRS
