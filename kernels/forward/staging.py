"""The compiled loops of forward operations on AMX: bands of dst whose src is staged as rows of tile registers.

A panel has a row of 64 bytes, 32 channels, for each src position that a band meets, zeros outside. So a tap is one
offset for all positions of a phase, and tiles of 16 rows read the panel where it lies. What is summed is listed by
`kernels.forward.gather`; here src and weights are packed, and sums are written.

Products with zeros count here. Where something in a band's src or in the weights is not finite, or values are so small
that the instructions would take them, or sums of their products, as zero, as they do with subnormal numbers, a pair of
blocks `failed` in that band: it is left to register tiles.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from kernels.emit.brgemm import Batch
from kernels.emit.compiler import Record, Rows, Table, Vector, inlined, jit, numbers, together
from kernels.emit.dots import BEGIN, BLOCKS, DOWN, END, STEP, TILE
from kernels.emit.intrinsics import F32, call_entry, copy_panel, fill_zero, load, stack_array, stack_record
from kernels.forward.gather import sum_block
from kernels.forward.lists import list_room
from kernels.forward.output import bring_bias, fill, write
from kernels.forward.records import Call, GatherShare, Pass, Tables, Work
from kernels.pack.magnitudes import LEAST_BIAS, LEAST_SUM, SPECIAL, magnitudes
from kernels.pack.pairs import PackedBox, Packing, pack_boxes
from kernels.pack.panels import Values

__all__ = [
    "LANES",
    "ROW_BYTES",
    "SPARE",
    "TILE_BYTES",
    "RowPanel",
    "Segment",
    "Staged",
    "gather_staged",
]

LANES = 2 * TILE
"""Dst channels that are computed together: what four tile registers hold of 32 rows."""

ROW_BYTES = 2 * STEP
TILE_BYTES = TILE * ROW_BYTES

SPARE = 64
"""Rows behind a panel that a last tile may read."""

NARROW = 8
"""Positions of a line below which lines are written together where channels come first."""


class Segment(Record):
    """Src positions along (d, h, w) that are `residue` modulo the step of src; a panel begins with the one `least`."""

    residue: Vector = numbers(3)
    least: Vector = numbers(3)


class RowPanel(Record):
    """How src is staged, in panels of one segment after another, and what the rows of its tiles are.

    A segment has planes of 32 channels, whose positions have `pitches` along (n, d, h, w). Positions are `src_strides`
    apart in src, which has `sizes`, and meet dst positions that are `strides` apart. Rows go along the axes that are
    `joined`, the last one always: line after line, with the panel's gaps between. The sums of their phases lie one
    after another, those of the last one side by side.
    """

    pitches: Vector = numbers(4)
    sizes: Vector = numbers(3)
    src_strides: Vector = numbers(3)
    strides: Vector = numbers(4)
    joined: Vector = numbers(4)


@together
class Staged(NamedTuple):
    """How src is staged."""

    panels: Rows[RowPanel]
    segments: Rows[Segment]


BATCH, PACKED_BOX, PACKING, WORK = (each.dtype for each in (Batch, PackedBox, Packing, Work))


@inlined
def _blocks(one: Pass) -> int:
    """Count the blocks of 16 dst channels of a pass."""
    blocks: int = (one.channels + TILE - 1) // TILE
    return blocks


@inlined
def _least_exponent(place: int, size: int) -> int:
    """Return the smallest exponent of the bf16 in a piece of memory that are not 0; 0 where some are not finite."""
    least, most = magnitudes(place, size // ROW_BYTES)
    return int((least + 1) >> 7) if most < SPECIAL else 0


@jit
def _weigh(share: GatherShare, one: Pass, call: Call, exponents: Vector) -> None:
    """Find the smallest exponent of the weights of each pair of blocks; 0 where its bias is too small as well."""
    blocks, size = _blocks(one), share.panel.block_bytes
    for p in range(exponents.shape[0]):
        exponents[p] = _least_exponent(call.panels + 2 * p * size, min(2, blocks - 2 * p) * size)
        bring_bias(share.kind, one, call, 0, LANES * p, LANES, call.products)
        for lane in range(LANES):
            if 0 < abs(load(F32, call.products + 4 * lane)) < LEAST_BIAS:
                exponents[p] = 0


@jit
def _stage(
    share: GatherShare, panel: RowPanel, one: Pass, call: Call, segment: Segment, to: int, work: Work,
    boxes: Rows[PackedBox],
) -> None:  # fmt: skip
    """Pack a segment of the src that a band meets, with a box for each step of channels.

    A step of channels is a line of a box, a pixel of a line a plane of its own.
    """
    src, low, packing, sizes = one.src, work.band.low, stack_record(PACKING), stack_array(3, np.int64)
    source, place, strides = call.src + src.start + low[0] * src.strides[0], 0, packing.strides
    plane, depth = share.src.word, share.panel.words
    fill_zero(to, depth * plane)
    for axis in range(3):
        step = panel.src_strides[axis]
        packing.steps[axis] = ROW_BYTES * panel.pitches[axis]
        first, extent = low[1 + axis] // panel.strides[1 + axis], panel.pitches[axis] // panel.pitches[1 + axis]
        first += segment.least[axis]
        positions = (panel.sizes[axis] - segment.residue[axis] + step - 1) // step
        begin, end = max(0, first), min(positions, first + extent)
        met = max(0, end - begin)
        if met == 0:
            return
        sizes[axis] = met
        place += (begin - first) * panel.pitches[1 + axis] * ROW_BYTES
        source += (segment.residue[axis] + begin * step) * src.strides[1 + axis]
        strides[1 + axis] = step * src.strides[1 + axis]
    packing.channel, strides[0], strides[3] = strides[3], src.strides[0], src.channel
    packing.channels = sizes[2]
    packing.source, packing.target, packing.plane = 0, to, ROW_BYTES
    for j in range(depth):
        box = boxes[j]
        box.source, box.place = source + j * STEP * src.channel, j * plane + place
        box.sizes[0], box.sizes[1], box.sizes[2] = work.band.sizes[0], sizes[0], sizes[1]
        box.sizes[3] = min(STEP, share.channels - j * STEP)
    pack_boxes(packing, boxes)


@jit
def _lay_band(share: GatherShare, panel: RowPanel, work: Work, band: int) -> None:
    """Note the dst positions of a band, `sizes` of them from `low` on, and how many (`high`) its sums have."""
    cut, grid, rows = work.band, share.grid, 0
    for axis in range(3, -1, -1):
        parts = (grid.high[axis] - grid.low[axis] + grid.step[axis] - 1) // grid.step[axis]
        cut.low[axis] = grid.low[axis] + band % parts * grid.step[axis]
        cut.sizes[axis] = cut.high[axis] = min(grid.high[axis] - cut.low[axis], grid.step[axis])
        band //= parts
        if panel.joined[axis] == 1:
            cut.high[axis] = panel.strides[axis]
            rows += (cut.sizes[axis] - 1) // panel.strides[axis] * panel.pitches[axis]
    cut.high[3] *= (rows + TILE) // TILE * TILE


@jit
def _write(panel: RowPanel, work: Work, dst: Values, lanes: int, valid: int, buffer: int) -> None:
    """Write the sums of a band to dst, line by line; short lines of a channel are brought together first."""
    line, steps, counts = np.ones(4, np.int64), dst.steps, work.band.sizes
    narrow, dense = dst.channel > steps[3] and counts[3] < NARROW, work.place + work.band.high[0] * work.dst[0]
    line[3] = counts[3]
    for n in range(counts[0]):
        for d in range(counts[1]):
            for h in range(counts[2]):
                source = work.place
                for axis, at in enumerate((n, d, h)):
                    stride = panel.strides[axis]
                    if panel.joined[axis] == 1:
                        source += at // stride * panel.pitches[axis] * panel.strides[3] * work.dst[3]
                        at %= stride
                    source += at * work.dst[axis]
                if narrow:
                    place = dense + ((n * counts[1] + d) * counts[2] + h) * counts[3] * 4 * lanes
                    copy_panel(F32, lanes, place, 4 * lanes, source, 4 * lanes, counts[3])
                else:
                    to = dst.place + n * steps[0] + d * steps[1] + h * steps[2]
                    write(Values(dst.kind, to, steps, dst.channel, 0), source, lanes, valid, line, buffer)
    if narrow:
        write(dst, dense, lanes, valid, counts[:], buffer)


@jit
def gather_staged(
    table: Vector, shares: Rows[GatherShare], staged: Staged, passes: Rows[Pass], calls: Rows[Call], tables: Tables,
    first: int, failed: Table,
) -> None:  # fmt: skip
    """Compute some bands from the `first` on for one group, and say which pairs of blocks `failed` in which band.

    The call's `source` holds a panel, its `sums` those of a band for a pair of blocks, twice, `products` a
    bias.
    """
    share, panel, one, call, segments = shares[0], staged.panels[0], passes[0], calls[0], staged.segments
    dst, blocks, block, bias = one.dst, _blocks(one), share.panel.block_bytes, call.products
    lists, boxes = list_room(tables, share.panel.words), np.zeros(share.panel.words, PACKED_BOX)
    batch, work, exponents = stack_record(BATCH), stack_record(WORK), np.empty(failed.shape[1], np.int64)
    _weigh(share, one, call, exponents)
    size = share.panel.words * share.src.word
    batch.a_step, batch.b_step, batch.b_vector = share.src.word, TILE_BYTES, block
    work.place, work.start, work.tile.blocks = call.sums, call.source, 1
    for item in range(failed.shape[0]):
        _lay_band(share, panel, work, first + item)
        for s in range(segments.shape[0]):
            _stage(share, panel, one, call, segments[s], call.source + s * size, work, boxes)
        least = _least_exponent(call.source, segments.shape[0] * size)
        place = call.dst + dst.start
        for axis in range(4):
            place += work.band.low[axis] * dst.strides[axis]
            work.src[axis], work.band.low[axis] = ROW_BYTES * panel.pitches[axis], 0
        call_entry(table[BEGIN])
        for p in range(failed.shape[1]):
            keeps = min(least, exponents[p]) >= 1 and least + exponents[p] >= LEAST_SUM
            failed[item, p] = 0 if keeps else 1
            if failed[item, p] == 1:
                continue
            across, valid = min(2, blocks - 2 * p), min(LANES, one.channels - LANES * p)
            work.dst[3] = across * ROW_BYTES
            for axis in range(2, -1, -1):
                work.dst[axis] = work.dst[axis + 1] * work.band.high[axis + 1]
            bring_bias(share.kind, one, call, 0, LANES * p, LANES, bias)
            if not share.covered:
                fill(F32, bias, across * TILE, work.band.high[:], call.sums, work.dst[:])
            batch.start, batch.b = bias, call.panels + 2 * p * block
            work.tile.limit, work.tile.last = TILE * DOWN[across - 1], table[BLOCKS + across - 1]
            sum_block(work.tile.last, share, tables, work, lists, batch)
            out = Values(share.kind, place + LANES * p * dst.channel, dst.strides[:], dst.channel, 0)
            _write(panel, work, out, across * TILE, valid, bias + 4 * LANES)
        call_entry(table[END])
