"""The compiled loops of forward operations on AMX: bands of dst whose src is staged as rows of tile registers.

A panel has a row of 64 bytes, 32 channels, for each src position that a band meets, zeros outside. So a tap is one
offset for all positions of a phase, and tiles of 16 rows read the panel where it lies. What is summed is listed by
`kernels.forward.gather`; here src and weights are packed, as sums of bf16 (`kernels.emit.dots`), and sums are written.

Products with zeros count here. Where something in a band's src is not finite, or values are so small that the
instructions would take them, their parts, or sums of their products as zero, as they do with subnormal numbers (of f16
none is so small: sums are multiples of 2**-48), a pair of blocks `failed` in that band: it is left to register tiles.
So are dst channels whose weights are not finite; the others keep their bits.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from kernels.emit.brgemm import Batch
from kernels.emit.compiler import Record, Rows, Table, Vector, inlined, jit, numbers, together
from kernels.emit.dots import BEGIN, BLOCKS, DOWN, END, STEP, TILE, TileSteps
from kernels.emit.intrinsics import F32, address_of, call_entry, copy_panel, fill_zero, load, stack_array, stack_record
from kernels.forward.gather import sum_block
from kernels.forward.lists import list_room
from kernels.forward.output import bring_bias, fill, write
from kernels.forward.records import Call, GatherShare, Pass, Tables, Work
from kernels.pack.lines import SPLIT_BYTES, split_f16
from kernels.pack.magnitudes import LEAST_BIAS, LEAST_SUM, SPECIAL, clear_lane, lane_peaks, magnitudes
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
    "stage_weights",
]

LANES = 2 * TILE
"""Dst channels that are computed together: what four tile registers hold of 32 rows."""

ROW_BYTES = 2 * STEP
TILE_BYTES = TILE * ROW_BYTES

SPARE = 64
"""Rows behind a panel that a last tile may read."""

NARROW = 8
"""Positions of a line below which lines are written together where channels come first."""

MOST_SUM = 350
"""Sum of the exponents, as f32 stores them, of two factors that are f32: sums of 2**29 products fit."""

LEAST_BIASES = (LEAST_BIAS, np.float32(0), LEAST_BIAS * np.float32(2.0**16))
"""Smallest bias, by parts: those of f32 have 24 digits."""

MOST_ROWS = np.array([TILE * DOWN[1], TILE * DOWN[2]])
"""Rows of the tallest tiles, by blocks across."""


class Segment(Record):
    """Src positions along (d, h, w) that are `residue` modulo the step of src; a panel begins with the one `least`."""

    residue: Vector = numbers(3)
    least: Vector = numbers(3)


class RowPanel(Record):
    """How src is staged, in panels of one segment after another, and what the rows of its tiles are.

    Values are sums of so many `parts`. A segment has `depth` planes of 32 channels, each of `positions`, with `pitches`
    along (n, d, h, w). Positions are `src_strides` apart in src, which has `sizes`, and meet dst positions that are
    `strides` apart. Rows go along the axes that are `joined`, the last one always: line after line, with the panel's
    gaps between. The sums of their phases lie one after another, those of the last one side by side.
    """

    parts: int
    depth: int
    positions: int
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


@together
class PackedRows(NamedTuple):
    """What packs a segment, and how each one was packed last: along each axis how many positions, and from where on."""

    packings: Rows[Packing]
    boxes: Rows[PackedBox]
    last: Table


class Magnitudes(Record):
    """The least and the largest exponent of some values, and whether all are finite."""

    least: int
    largest: int
    finite: bool


BATCH, MAGNITUDES, PACKED_BOX, PACKING, TILE_STEPS, WORK = (
    each.dtype for each in (Batch, Magnitudes, PackedBox, Packing, TileSteps, Work)
)


@inlined
def _blocks(one: Pass) -> int:
    """Count the blocks of 16 dst channels of a pass."""
    blocks: int = (one.channels + TILE - 1) // TILE
    return blocks


@jit
def _range(parts: int, panel: int, part: int, size: int, found: Magnitudes) -> None:
    """Find the magnitudes of what `parts` pieces of memory hold."""
    found.least, found.largest, found.finite = 512, 0, True
    for p in range(parts):
        least, most = magnitudes(panel + p * part, size // ROW_BYTES)
        found.least, found.largest = min(found.least, (least + 1) >> 7), max(found.largest, most >> 7)
        found.finite = found.finite and most < SPECIAL


@jit
def _fits(parts: int, a: Magnitudes, b: Magnitudes) -> bool:
    """Return whether two tensors may be multiplied as sums of bf16, zeros among them."""
    finite: bool = a.finite and b.finite
    if parts == 2:
        return finite
    vanish = min(a.least, b.least) < 1 or a.least + b.least < LEAST_SUM
    return finite and not vanish and (parts == 1 or a.largest + b.largest <= MOST_SUM)


@jit
def stage_weights(
    shares: Rows[GatherShare], staged: Staged, passes: Rows[Pass], calls: Rows[Call], taps: Rows[PackedBox],
    nonfinite: Vector,
) -> None:  # fmt: skip
    """Pack weights to [part][block][tap][steps of src channels], each a tile, from the boxes of the `taps`.

    Dst channels that hold Inf or NaN are marked `nonfinite`, and zeros take their place.
    """
    share, one, call, packing = shares[0], passes[0], calls[0], stack_record(PACKING)
    weights, parts = one.weights, staged.panels[0].parts
    blocks, block = _blocks(one), share.panel.block_bytes
    packing.pairs, packing.parts, packing.channels, packing.scratch = True, parts, one.channels, call.products
    packing.source, packing.channel = call.weights + weights.start, weights.dst_channel
    packing.strides[3] = weights.src_channel
    packing.target, packing.planes, packing.plane = call.panels, blocks, block
    whole = share.channels % STEP == 0 and one.channels % TILE == 0  # no place is left for zeros
    pack_boxes(packing, taps, taps if whole else taps[:0])
    if parts == 2:
        split_f16(call.panels, call.panels + blocks * block, blocks * block // ROW_BYTES)
    lanes = stack_array(TILE, np.uint16)
    for b in range(blocks):
        place = call.panels + b * block
        if lane_peaks(place, block // ROW_BYTES, address_of(lanes)) < SPECIAL:
            continue
        for lane in range(TILE):
            nonfinite[TILE * b + lane] = 1 if lanes[lane] >= SPECIAL else 0
            for p in range(parts if lanes[lane] >= SPECIAL else 0):
                clear_lane(place + p * blocks * block + 4 * lane, block // ROW_BYTES)


@jit
def _weigh(share: GatherShare, parts: int, one: Pass, call: Call, theirs: Rows[Magnitudes]) -> None:
    """Find the magnitudes of the weights of each pair of blocks; a bias that is too small counts as not finite."""
    blocks, size = _blocks(one), share.panel.block_bytes
    for p in range(theirs.shape[0]):
        found = theirs[p]
        _range(parts, call.panels + 2 * p * size, blocks * size, min(2, blocks - 2 * p) * size, found)
        bring_bias(share.kind, one, call, 0, LANES * p, LANES, call.products)
        for lane in range(LANES if parts != 2 else 0):
            value = abs(load(F32, call.products + 4 * lane))
            if 0 < value < LEAST_BIASES[parts - 1]:
                found.finite = False


@jit
def _stage(
    share: GatherShare, panel: RowPanel, one: Pass, call: Call, segments: Rows[Segment], s: int, work: Work,
    packed: PackedRows,
) -> None:  # fmt: skip
    """Pack a segment of the src that a band meets.

    A step of channels is a line of a box, a pixel of a line a plane of its own.
    """
    src, low, images, segment, sizes = one.src, work.band.low, work.band.sizes[0], segments[s], packed.last[s]
    packing, boxes, plane = packed.packings[0], packed.boxes, panel.positions * ROW_BYTES
    to, same = call.source + s * panel.parts * panel.depth * plane, sizes[6] == images
    source, place, strides = call.src + src.start + low[0] * src.strides[0], 0, packing.strides
    sizes[6], packing.steps[3] = images, 0
    for axis in range(3):
        step = panel.src_strides[axis]
        packing.steps[axis] = ROW_BYTES * panel.pitches[axis]
        first, extent = low[1 + axis] // panel.strides[1 + axis], panel.pitches[axis] // panel.pitches[1 + axis]
        first += segment.least[axis]
        positions = (panel.sizes[axis] - segment.residue[axis] + step - 1) // step
        begin, end = max(0, first), min(positions, first + extent)
        met = max(0, end - begin)
        at = begin - first if met > 0 else 0
        same = same and sizes[2 * axis] == met and sizes[2 * axis + 1] == at
        sizes[2 * axis], sizes[2 * axis + 1] = met, at
        place += at * panel.pitches[1 + axis] * ROW_BYTES
        source += (segment.residue[axis] + begin * step if met > 0 else 0) * src.strides[1 + axis]
        strides[1 + axis] = step * src.strides[1 + axis]
    if sizes[0] * sizes[2] * sizes[4] == 0:
        fill_zero(to, panel.parts * panel.depth * plane)
        return
    packing.channel, strides[0], strides[3] = strides[3], src.strides[0], src.channel
    packing.pairs, packing.parts, packing.channels = False, panel.parts, sizes[4]
    packing.source, packing.target, packing.planes, packing.plane = 0, to, panel.depth * panel.positions, ROW_BYTES
    packing.scratch = call.products
    for j in range(panel.depth):
        box = boxes[j]
        box.source, box.place = source + j * STEP * src.channel, j * plane + place
        box.sizes[0], box.sizes[1], box.sizes[2] = images, sizes[0], sizes[2]
        box.sizes[3] = min(STEP, share.channels - j * STEP)
    pack_boxes(packing, boxes, boxes if same else boxes[:0])
    if panel.parts == 2:
        split_f16(to, to + panel.depth * plane, panel.depth * panel.positions)


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

    The call's `source` holds a panel, its `sums` those of a band for a pair of blocks, twice, `products` a bias.
    """
    share, panel, one, call, segments = shares[0], staged.panels[0], passes[0], calls[0], staged.segments
    dst, parts, blocks, block = one.dst, panel.parts, _blocks(one), share.panel.block_bytes
    lists = list_room(tables, panel.depth)
    packed = PackedRows(
        stack_array(1, PACKING), np.zeros(panel.depth, PACKED_BOX), np.full((segments.shape[0], 7), -1)
    )  # fmt: skip
    batch, work, more = stack_record(BATCH), stack_record(WORK), stack_record(TILE_STEPS)
    mine, theirs = stack_record(MAGNITUDES), np.empty(failed.shape[1], MAGNITUDES)
    _weigh(share, parts, one, call, theirs)
    size = parts * panel.depth * panel.positions * ROW_BYTES
    batch.a_step, batch.b_step, batch.b_vector, batch.indirection = share.src.word, TILE_BYTES, block, address_of(more)
    more.a_part, more.b_part, more.a_tile, more.c_vector = size // parts, blocks * block, TILE_BYTES, ROW_BYTES
    bias = call.products + SPLIT_BYTES
    work.place, work.start, work.tile.blocks = call.sums, call.source, 1
    for item in range(failed.shape[0]):
        _lay_band(share, panel, work, first + item)
        for s in range(segments.shape[0]):
            _stage(share, panel, one, call, segments, s, work, packed)
        _range(1, call.source, 0, segments.shape[0] * size, mine)
        place = call.dst + dst.start
        for axis in range(4):
            place += work.band.low[axis] * dst.strides[axis]
            work.src[axis], work.band.low[axis] = ROW_BYTES * panel.pitches[axis], 0
        call_entry(table[BEGIN], 0, 0, 0, 0, 0, 0, 0, 0)
        for p in range(failed.shape[1]):
            failed[item, p] = 0 if _fits(parts, mine, theirs[p]) else 1
            if failed[item, p] == 1:
                continue
            across, valid = min(2, blocks - 2 * p), min(LANES, one.channels - LANES * p)
            work.dst[3] = across * ROW_BYTES
            for axis in range(2, -1, -1):
                work.dst[axis] = work.dst[axis + 1] * work.band.high[axis + 1]
            bring_bias(share.kind, one, call, 0, LANES * p, LANES, bias)
            if not share.covered:
                fill(F32, bias, across * TILE, work.band.high[:], call.sums, work.dst[:])
            batch.start, batch.b, more.c_tile = bias, call.panels + 2 * p * block, TILE * panel.strides[3] * work.dst[3]
            work.tile.limit, work.tile.last = MOST_ROWS[across - 1], table[BLOCKS + 2 * (parts - 1) + across - 1]
            sum_block(work.tile.last, share, tables, work, lists, batch, one, call)
            out = Values(share.kind, place + LANES * p * dst.channel, dst.strides[:], dst.channel, 0)
            _write(panel, work, out, across * TILE, valid, bias + 4 * LANES)
        call_entry(table[END], 0, 0, 0, 0, 0, 0, 0, 0)
