"""The compiled loops of a weight gradient: pack a slab of pixels, walk it in blocks, write the sums out.

Everything is addresses, byte steps and integer tables that `kernels.gradient.tiles.schedule` and
`kernels.gradient.tiles.unit` have laid out; nothing is checked here. Tables, by column:

* operand: 0 address, 1 end of the tensor, 2 bytes between groups, 3-6 bytes for (n, d, h, w), 7 bytes between lanes
  of a line, 8 bytes between channels. The address is that of position 0 of the first group; a plan's is counted from
  the tensor's, and has no end.
* box: first (n, d, h, w), then sizes, then first (n, d, h, w) of the panel that holds it, padding included.
* blocks: 0 first channel, 1 valid lanes, 2 vectors, 3 first lane, 4 accumulator bytes, 5 panel bytes.
* ranges: 0-5 low and high of (d, h, w), 6 shift of the vector panel in lines, 7-8 first and last register tile, 9 shift
  of the scalars in bytes, 10 accumulator row, 11 number of the walk over the lane blocks that it belongs to.
* tiles: 0 accumulator row counted from the range's, 1 rows, 2-10 byte offsets of the rows' scalars.
* lines: 0 byte offset, 1 valid lanes of each line of the scalar panel.
"""

from __future__ import annotations

import numpy as np

from kernels.emit.compiler import Floats, Halves, Table, Vector, jit
from kernels.emit.intrinsics import (
    all_finite,
    call_tile,
    fill_zero,
    load_value,
    put_run,
    round_bits,
    store_value,
    transpose_panel,
)
from kernels.emit.tile_table import FROM_MEMORY, LANEWISE
from kernels.pack.panels import F16, F32, KINDS, copy_lines, pack_panels, pack_planes
from kernels.target import target

__all__ = ["LINES", "NATIVE", "PLANES", "add", "add_lanes", "add_slabs", "store"]

NATIVE, LINES, PLANES = 0, 1, 2
"""How scalars are read: where they lie, from a panel of lines, or from channel planes converted to f32."""

WIDTH = target().lanes

_load_f32 = load_value("f32")
_round_f16 = round_bits("f16")
_round_bf16 = round_bits("bf16")
_turn_f32, _turn_f16, _turn_bf16 = (transpose_panel("f32", kind) for kind in KINDS)
_put_f32, _put_f16, _put_bf16 = (put_run(kind) for kind in KINDS)


@jit
def _pack_vector(
    kind: int, count: int, left: int, operand: Vector, box: Vector, blocks: Table, panel_lines: Vector, panels: int,
    panel_bytes: int, parts: Table,
) -> None:  # fmt: skip
    """Pack `count` groups of the vector tensor, a panel for each lane block; `left` lanes exist, `parts` is scratch."""
    source, row = operand[0], 0
    for axis in range(4):
        source += box[axis] * operand[3 + axis]
    for g in range(count):
        for b in range(blocks.shape[0]):
            lanes = blocks[b, 2] * WIDTH
            parts[row, 0], parts[row, 1] = lanes, min(blocks[b, 1], left - g * WIDTH)
            parts[row, 2] = g * operand[2] + blocks[b, 0] * operand[8]
            parts[row, 3], parts[row, 4] = panels + g * panel_bytes + blocks[b, 5], 4 * lanes
            row += 1
    pack_panels(kind, parts[:row], box, panel_lines, source, operand)


@jit
def _zero_border(box: Vector, steps: Vector, panel: int, plane: int) -> None:
    """Write zeros around the box in its panel; what a line of it covers is left to the packing."""
    front = (box[2] - box[10]) * steps[2] + (box[3] - box[11]) * steps[3]
    if steps[1] != steps[0] or box[5] * box[6] * box[7] == 0:
        fill_zero(panel, plane)
        return
    for n in range(box[4]):
        start = panel + n * steps[0]
        end = panel + (n + 1) * steps[0] if n + 1 < box[4] else panel + plane
        fill_zero(start, front)
        for h in range(box[6]):
            done = start + front + h * steps[2] + box[7] * steps[3]
            following = start + front + (h + 1) * steps[2] if h + 1 < box[6] else end
            fill_zero(done, following - done)


@jit
def _set_apart(box: Vector, dense: Vector, source: int, steps: Vector, target: int) -> None:
    """Copy the lines of a dense panel to where they stand among zeros."""
    for n in range(box[4]):
        for d in range(box[5]):
            for h in range(box[6]):
                to = target + n * steps[0] + d * steps[1] + h * steps[2]
                copy_lines(steps[3] // 4, to, source + n * dense[0] + d * dense[1] + h * dense[2], box[7])


@jit
def _pack_scalar(
    kind: int, count: int, left: int, padded: bool, pack: int, operand: Vector, box: Vector, lines: Table,
    steps: Vector, plane: int, scratch: int, scratch_bytes: int, parts: Table, to: Table,
) -> int:  # fmt: skip
    """Bring `count` groups of the scalar tensor to where the tiles read them; give the address of position 0.

    `parts` and `to` are scratch.
    """
    if pack == NATIVE:
        return operand[0]  # type: ignore[no-any-return]
    source, base, first, row = operand[0], scratch, scratch, 0
    for axis in range(4):
        source += box[axis] * operand[3 + axis]
        base -= box[8 + axis] * steps[axis]
        first += (box[axis] - box[8 + axis]) * steps[axis]
        to[0, axis] = steps[axis] // steps[3]
    for g in range(count):
        for t in range(lines.shape[0]):
            panel = g * scratch_bytes + t * plane
            if padded:
                _zero_border(box, steps, scratch + panel, plane)
            parts[row, 0], parts[row, 1] = steps[3] // 4, min(lines[t, 1], left - g * WIDTH)
            parts[row, 2], parts[row, 3], parts[row, 4] = g * operand[2] + lines[t, 0], first + panel, steps[3]
            row += 1
    if pack == PLANES:
        channels = 0
        for t in range(lines.shape[0]):
            channels += lines[t, 1]
        pack_planes(kind, channels, scratch, plane, box, steps, source, operand)
    elif padded and count == 1 and box[7] < 16 and operand[5] == box[7] * operand[6]:
        # short lines that follow each other are transposed as one, then set apart
        to[1, 3], to[2, 3] = 1, steps[3]
        for axis in range(2, -1, -1):
            to[1, axis] = to[1, axis + 1] * box[5 + axis]
            to[2, axis] = to[1, axis] * steps[3]
        spare = scratch + lines.shape[0] * plane
        for t in range(lines.shape[0]):
            parts[t, 3] = spare
            pack_panels(kind, parts[t : t + 1], box, to[1], source, operand)
            _set_apart(box, to[2], spare, steps, first + t * plane)
    else:
        pack_panels(kind, parts[:row], box, to[0], source, operand)
    return base


@jit
def _clip(
    at: Vector,
    slab: Vector,
    block: Vector,
    ranges: Table,
    zero: int,
    acc_step: int,
    vector_moves: Vector,
    scalar_moves: Vector,
    live: Table,
) -> int:  # fmt: skip
    """Clip every tap's range to the block at (n, d, h, w), once for all lane blocks; give the number of ranges left.

    A row of `live`: 0 line in the vector panel, 1 byte offset of the scalars, 2-3 first and last tile, 4-14 the walk
    of the tiles (see `kernels.emit.register_tiles.fma_tile`), 15 accumulator row, 16 walk it belongs to.
    """
    count = 0
    outer = 1 if block[1] > 1 else 0
    for r in range(ranges.shape[0]):
        row = live[count]
        row[0], row[1] = ranges[r, 6] - zero + at[0] * vector_moves[0], ranges[r, 9] + at[0] * scalar_moves[0]
        row[10] = min(block[0], slab[1] - at[0])
        inside = True
        for axis in range(1, 4):
            low = max(at[axis], ranges[r, 2 * axis - 2])
            high = min(at[axis] + block[axis], slab[2 * axis + 1], ranges[r, 2 * axis - 1])
            inside = inside and low < high
            row[0] += low * vector_moves[axis]
            row[1] += low * scalar_moves[axis]
            if axis > 1 or outer == 1:
                row[9 + axis] = high - low
        if not inside:
            continue
        row[2], row[3] = ranges[r, 7], ranges[r, 8]
        for k in range(3):
            axis = outer if k == 0 else k + 1
            row[4 + k], row[7 + k] = vector_moves[axis], scalar_moves[axis]
        # lines, then planes, that follow each other without a gap are one
        if row[5] == row[6] * row[12] and row[8] == row[9] * row[12]:
            row[11], row[12] = 1, row[11] * row[12]
        if row[11] == 1 and row[4] == row[6] * row[12] and row[7] == row[9] * row[12]:
            row[10], row[12] = 1, row[10] * row[12]
        row[13], row[15], row[16] = acc_step, ranges[r, 10], ranges[r, 11]
        count += 1
    return count


@jit
def _walk(
    table: Table, lanewise: bool, in_place: bool, slab: Vector, block: Vector, blocks: Table, ranges: Table,
    tiles: Table, panels: int, zero: int, acc_step: int, vector_moves: Vector, scalars: int, scalar_moves: Vector,
    acc: int, live: Table, at: Vector,
) -> None:  # fmt: skip
    """Walk the pixel blocks of one slab of one group; see the loops in `kernels.gradient.tiles.unit`.

    A tile's channels are visited for all taps in turn, so that their pixels stay in L1.
    """
    offsets, walks = tiles.ctypes.data + 16, live.ctypes.data + 32
    for at[0] in range(slab[0], slab[1], block[0]):
        for at[1] in range(slab[2], slab[3], block[1]):
            for at[2] in range(slab[4], slab[5], block[2]):
                for at[3] in range(slab[6], slab[7], block[3]):
                    count = _clip(at, slab, block, ranges, zero, acc_step, vector_moves, scalar_moves, live)
                    start = 0
                    while start < count:
                        # all taps, or one line of the kernel where its scalars fill L1 by themselves
                        end, most = start, 0
                        while end < count and live[end, 16] == live[start, 16]:
                            most = max(most, live[end, 3] - live[end, 2])
                            end += 1
                        for b in range(blocks.shape[0]):
                            kind = LANEWISE if lanewise else blocks[b, 2] + (FROM_MEMORY if in_place else 0)
                            line = 4 * WIDTH * blocks[b, 2]
                            panel, sums = panels + blocks[b, 5], acc + blocks[b, 4]
                            for step in range(most):
                                for i in range(start, end):
                                    t = live[i, 2] + step
                                    if t < live[i, 3]:
                                        call_tile(
                                            table[kind, tiles[t, 1]], walks + 136 * i, panel + live[i, 0] * line,
                                            scalars + live[i, 1], offsets + 88 * t,
                                            sums + (live[i, 15] + tiles[t, 0]) * line,
                                        )  # fmt: skip
                        start = end


@jit
def add_slabs(
    table: Table, kind: int, groups: int, lane_groups: int, slabs: Table, vector_boxes: Table, scalar_boxes: Table,
    block: Vector, blocks: Table, ranges: Table, tiles: Table, padded_ranges: Table, padded_tiles: Table, inner: Vector,
    vector: Vector, vector_lines: Vector, vector_moves: Vector,
    pack: int, scalar: Vector, lines: Table, scalar_steps: Vector, scalar_moves: Vector, plane: int,
    together: int, panel_bytes: int, scratch_bytes: int, acc_bytes: int, acc_step: int,
    segment: int, in_place: bool, vector_address: int, vector_bytes: int, panels: int,
    scalar_address: int, scalar_bytes: int, scratch: int, acc: int,
) -> None:  # fmt: skip
    """Add slabs of pixels to the accumulators of `groups` groups (or groups of lanes) and some lane blocks.

    `table` holds the tiles' addresses. `vector_lines` are the panel's steps in lines and `vector_moves` the same for
    one narrow position; `scalar_steps` and `scalar_moves` likewise, in bytes. With `lane_groups` above 0 every lane is
    a convolution group, that many are left, and tiles run lanewise; `padded_ranges` then visit all pixels for all
    taps over a panel with zeros around it, which only finite data allow where a tap is outside: outside of the `inner`
    low and high of (d, h, w). Sums that are NaN by that are replaced by those over real taps, and all others keep their
    bits. Panels of `together` groups are packed at a time, each `panel_bytes` and
    `scratch_bytes` from the last. The caller owns panels, scratch and sums. A vector tensor that is read `in_place` is
    its own panel, of which position 0 is the first line.
    """
    live = np.empty((max(ranges.shape[0], padded_ranges.shape[0]) + 1, 17), np.int64)
    live[:, 14] = segment
    at, to = np.empty(4, np.int64), np.empty((3, 4), np.int64)
    vector_parts = np.empty((together * blocks.shape[0], 5), np.int64)
    scalar_parts = np.empty((together * lines.shape[0], 5), np.int64)
    vector_here, scalar_here = vector.copy(), scalar.copy()
    vector_here[1], scalar_here[1] = vector_address + vector_bytes, scalar_address + scalar_bytes
    padded = padded_ranges.shape[0] > 0
    apart = np.empty(acc_bytes // 4 if padded else 0, np.float32)
    for i in range(slabs.shape[0]):
        slab, vector_box, scalar_box = slabs[i], vector_boxes[i], scalar_boxes[i]
        zero = 0
        for axis in range(4):
            zero += vector_box[axis] * vector_lines[axis]
        for first in range(0, groups, together):
            count = min(together, groups - first)
            left = lane_groups - first * WIDTH if lane_groups > 0 else (2 + count) * WIDTH
            vector_here[0] = vector_address + vector[0] + first * vector[2]
            scalar_here[0] = scalar_address + scalar[0] + first * scalar[2]
            if in_place:
                panels = vector_here[0]
            else:
                _pack_vector(
                    kind, count, left, vector_here, vector_box, blocks, vector_lines, panels, panel_bytes, vector_parts
                )
            base = _pack_scalar(
                kind, count, left, padded, pack, scalar_here, scalar_box, lines, scalar_steps, plane, scratch,
                scratch_bytes, scalar_parts, to,
            )  # fmt: skip
            for g in range(count):
                here, sums = panels + g * panel_bytes, acc + (first + g) * acc_bytes
                scalars = base + g * (scalar[2] if pack == NATIVE else scratch_bytes)
                whole = True
                for b in range(blocks.shape[0] if padded else 0):
                    whole = whole and _finite_border(here + blocks[b, 5], vector_box, vector_lines, inner)
                if not whole:
                    copy_lines(8, apart.ctypes.data, sums, acc_bytes // 32)
                    _walk(
                        table, lane_groups > 0, in_place, slab, block, blocks, ranges, tiles, here, zero, acc_step,
                        vector_moves, scalars, scalar_moves, apart.ctypes.data, live, at,
                    )  # fmt: skip
                _walk(
                    table, lane_groups > 0, in_place, slab, block, blocks, padded_ranges if padded else ranges,
                    padded_tiles if padded else tiles, here, zero, acc_step, vector_moves, scalars, scalar_moves, sums,
                    live, at,
                )  # fmt: skip
                if not whole:
                    _replace_nan(sums, apart)


@jit
def _replace_nan(sums: int, others: Floats) -> None:
    """Take the `others` where sums are NaN."""
    for i in range(others.size):
        if np.isnan(_load_f32(sums + 4 * i)):
            store_value(sums + 4 * i, others[i])


@jit
def add_lanes(
    table: Vector, groups: int, acc_bytes: int, block: Vector, ranges: Table, tiles: Table, vector_moves: Vector,
    scalar_moves: Vector, starts: Vector, segment: int, slabs: Table, vector: int, scalar: int, acc: int,
) -> None:  # fmt: skip
    """Add slabs of pixels to the accumulators of `groups` groups of lanes, reading both tensors where they lie.

    `table` holds the addresses of `kernels.emit.depthwise.lane_taps` by rows. All moves are in bytes, and so are
    `starts`, from the tensors' addresses to their position 0.
    """
    vector += starts[0]
    scalar += starts[1]
    live, at = np.empty((ranges.shape[0] + 1, 17), np.int64), np.empty(4, np.int64)
    live[:, 14] = segment
    walks, offsets = live.ctypes.data + 32, tiles.ctypes.data + 16
    for i in range(slabs.shape[0]):
        slab = slabs[i]
        for at[0] in range(slab[0], slab[1], block[0]):
            for at[1] in range(slab[2], slab[3], block[1]):
                for at[2] in range(slab[4], slab[5], block[2]):
                    for at[3] in range(slab[6], slab[7], block[3]):
                        count = _clip(at, slab, block, ranges, 0, 0, vector_moves, scalar_moves, live)
                        for r in range(count):
                            live[r, 15], live[r, 16] = groups, acc_bytes
                            for t in range(live[r, 2], live[r, 3]):
                                call_tile(
                                    table[tiles[t, 1]], walks + 136 * r, vector + live[r, 0], scalar + live[r, 1],
                                    offsets + 8 * tiles.shape[1] * t, acc,
                                )  # fmt: skip


@jit
def _finite_border(panel: int, box: Vector, lines: Vector, inner: Vector) -> bool:
    """Say whether all positions of a lanewise panel outside of `inner` (low and high of d, h, w) are finite."""
    size, low, high = 4 * WIDTH, max(box[3], inner[4]) - box[3], min(box[3] + box[7], inner[5]) - box[3]
    for n in range(box[4]):
        for d in range(box[5]):
            for h in range(box[6]):
                start = panel + (n * lines[0] + d * lines[1] + h * lines[2]) * size
                inside = inner[0] <= box[1] + d < inner[1] and inner[2] <= box[2] + h < inner[3] and low < high
                first, second = (low, box[7] - high) if inside else (box[7], 0)
                if first > 0 and not all_finite(start, first * WIDTH // 8):
                    return False
                if second > 0 and not all_finite(start + high * size, second * WIDTH // 8):
                    return False
    return True


@jit
def _store_lines(kind: int, acc: int, rows: int, lanes: int, whole: int, out: int, lane_bytes: int) -> None:
    """Transpose the first `whole` lanes of accumulator lines into rows of the output; rows are at least 8."""
    size = 4 if kind == F32 else 2
    for start in range(0, rows, 64):
        # few rows at a time, 8 lanes after 8: whole cache lines are written, though lanes may lie at powers of two
        for lane in range(0, whole, 8):
            for first in range(start, min(start + 64, rows), 8):
                row = min(first, rows - 8)
                to, line = out + size * row + lane * lane_bytes, acc + (row * lanes + lane) * 4
                if kind == F32:
                    _turn_f32(to, lane_bytes, line, 1, 4 * lanes, 7)
                elif kind == F16:
                    _turn_f16(to, lane_bytes, line, 1, 4 * lanes, 7)
                else:
                    _turn_bf16(to, lane_bytes, line, 1, 4 * lanes, 7)


@jit
def _store_runs(kind: int, acc: int, lanes: int, valid: int, counts: Vector, steps: Vector, out: int) -> int:
    """Write accumulators in runs, where rows or lanes are adjacent in the output; give the number of lanes written."""
    taps, channels, whole = counts[2], counts[3], valid // 8 * 8
    size = 4 if kind == F32 else 2
    if steps[6] == 1 and taps * channels >= 8:
        _store_lines(kind, acc, taps * channels, lanes, whole, out, size * steps[2])
        return whole
    if steps[2] != 1 and steps[3] == 1 and counts[5] == 1 and channels >= 8:
        for tap in range(taps):
            line, to = acc + 4 * tap * counts[4] * lanes, out + size * tap * steps[4]
            _store_lines(kind, line, channels, lanes, whole, to, size * steps[2])
        return whole
    if steps[2] != 1 and not (steps[4] == 1 and counts[4] == 1 and taps >= 8):
        return 0
    for c in range(channels):
        line, to = acc + 4 * c * counts[5] * lanes, out + size * c * steps[3]
        if steps[2] != 1:
            _store_lines(kind, line, taps, lanes, whole, to, size * steps[2])
            continue
        for tap in range(taps):
            target, source = to + size * tap * steps[4], line + 4 * tap * counts[4] * lanes
            if kind == F32:
                _put_f32(target, source, valid)
            elif kind == F16:
                _put_f16(target, source, valid)
            else:
                _put_bf16(target, source, valid)
    return valid if steps[2] == 1 else whole


@jit
def store(
    acc: Floats, kind: int, lane_groups: int, blocks: Table, counts: Vector, steps: Vector, out32: Floats, out16: Halves
) -> None:
    """Scatter accumulators to the weights' layout, rounding once.

    `counts` are (groups, floats of a group's accumulators, taps, channels of a row, accumulator rows between taps and
    between channels); `steps` are output elements between groups, first channels of blocks, lanes, row channels and
    taps, then the first group's offset, then 1 where accumulator rows follow each other in the output too.
    """
    for g in range(counts[0]):
        for b in range(blocks.shape[0]):
            lanes = blocks[b, 2] * WIDTH
            valid = min(blocks[b, 1], lane_groups - g * WIDTH) if lane_groups > 0 else blocks[b, 1]
            base = g * counts[1] + blocks[b, 4] // 4
            place = steps[5] + g * steps[0] + blocks[b, 0] * steps[1]
            out = out32.ctypes.data + 4 * place if kind == F32 else out16.ctypes.data + 2 * place
            done = _store_runs(kind, acc.ctypes.data + 4 * base, lanes, valid, counts, steps, out)
            for tap in range(counts[2] if done < valid else 0):
                for c in range(counts[3]):
                    row = base + (tap * counts[4] + c * counts[5]) * lanes
                    to = place + c * steps[3] + tap * steps[4]
                    for lane in range(done, valid):
                        if kind == F32:
                            out32[to + lane * steps[2]] = acc[row + lane]
                        elif kind == F16:
                            out16[to + lane * steps[2]] = _round_f16(acc[row + lane])
                        else:
                            out16[to + lane * steps[2]] = _round_bf16(acc[row + lane])


@jit
def add(total: Floats, part: Floats) -> None:
    """Add partial sums in place."""
    for i in range(total.size):
        total[i] += part[i]
