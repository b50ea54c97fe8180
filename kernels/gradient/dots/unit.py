"""Filter gradients on products of bf16 pairs, where the processor has instructions for them.

Values of f16 are sums of two bf16, those of f32 of three (`kernels.emit.dots`, `kernels.pack.split`).

Zeros multiply here: those that fill up channels, pairs and steps, and those of the padding. With finite data they add
nothing. A channel that holds Inf or NaN among a slab's pixels is replaced by zeros, and its sums are formed pixel by
pixel over real taps instead, for that slab: other channels' sums stay as they are, bit for bit. Where a pair of blocks
of 16 channels holds f32 so large, or f32 or bf16 so small, that their products would overflow or vanish, all of its
sums are formed so. What is formed how depends on the problem and its data alone, so the bits do not depend on the
workers.

The instructions take subnormal numbers (below 2**-126) as zero, in what they read and in what they write. For bf16 and
f32, with `P` the largest product that two channels allow in a slab (the largest magnitude of one times that of the
other), each product of the two and each addition loses at most ``2**-40 * P`` by that (of f32, whose parts are
multiplied, a few times that). With a channel of subnormal numbers alone nothing is lost. Sums of f16 are multiples of
2**-48, so none is subnormal.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from kernels.arena import address, arena, arena_keeps, arena_kept
from kernels.cache import cached
from kernels.emit.compiler import Floats, Table, Vector, jit
from kernels.emit.dots import BEGIN, BLOCKS, END, EXACT, PARTS, ROWS, SHAPES, STAGE, STEP, TILE, call_dots, dot_table
from kernels.emit.intrinsics import copy_panel, fill_zero, load_value, store_value
from kernels.gradient.dots.schedule import DotSchedule, dot_schedule
from kernels.gradient.tiles.unit import BATCH_MACS, BwdWeights, Part
from kernels.pack.halves import split_f16
from kernels.pack.magnitudes import SPECIAL, clear_lane, lane_peaks
from kernels.pack.pairs import PACK_BYTES, call_turned, pack_pairs, pack_planes, turned
from kernels.plan import Storage, Unit
from kernels.problem import ConvProblem, storage_dtype
from kernels.target import target

__all__ = ["BWD_DOTS"]

BLOCK_PIXELS = 512
"""Pixels of one walk at the most: those of 32 channels of b leave room in the first cache, or in the second."""

STAGED_PIXELS = np.array((320, 192, 128), np.int64)
"""Those of a walk of staged rows, by parts, which should stay in the first cache."""

INSIDE_PIXELS = np.array((2048, 512, 512), np.int64)
"""Those of a walk over images inside, by parts: products of parts are summed by themselves first."""

INSIDE_LINES = int(INSIDE_PIXELS.max()) // STEP
"""Lines that such a walk has at the most."""

STAGE_BYTES = 4 * ROWS * max((p + 1) * 2 * int(pixels) for p, pixels in enumerate(STAGED_PIXELS))
"""Room for staged rows, and before that for what packing needs."""

assert STAGE_BYTES >= PACK_BYTES

LEAST_USE = {("amx", "bf16"): 0.3, ("amx", "f16"): 0.5, ("amx", "f32"): 0.1, ("avx512bf16", "bf16"): 0.45}
"""Share of multiplications that are not by filling zeros, above which these instructions outdo f32 ones."""

MOST_CYCLES = 0.98
"""Of an f32 gradient, over those on f32 tiles."""

BATCH = 4 if target().dots == "amx" else 1
"""Times as much work between two looks at whether to stop as in `kernels.gradient.tiles.unit`: it is done in less
time."""

LEAST_PEAK, LEAST_PEAKS, MOST_PEAKS = 41, 168, 350
"""Exponents, as f32 stores them, of the largest values of each channel, and sums of two channels' exponents.

Within these bounds, what is lost because subnormal numbers count as zeros (parts and their products as well) is a few
2**-40 of the largest product of both channels, and sums of 2**29 pixels stay below the largest number: 2**-126 times
another channel's peak is 2**-40 of the product with a peak of 2**-86, and 2**-126 that of a product of 2**-86.
"""

_load_f32, _copy_line = load_value("f32"), copy_panel("f32", TILE // 8)

LINE = 4 * TILE
"""Bytes of an accumulator row."""


@jit
def _empty(boxes: Table, src: int, steps: Vector) -> bool:
    """Say whether all f32 of one channel are zero."""
    for b in range(boxes.shape[0]):
        box = boxes[b]
        for n in range(box[2]):
            for d in range(box[3]):
                for h in range(box[4]):
                    start = src + box[0] + n * steps[0] + d * steps[1] + h * steps[2]
                    for w in range(box[5]):
                        if _load_f32(start + w * steps[3]) != 0:
                            return False
    return True


@jit
def _peaks(
    parts: int, channels: int, together: int, panel: int, part: int, step: int, size: int, boxes: Table, src: int,
    steps: Vector, peaks: Table, odd: Vector,
) -> None:  # fmt: skip
    """Find the smallest and the largest of the channels' largest values, as bf16, for each block of 16 channels.

    The first parts of `together` channels lie every `step` bytes from `panel` on, `size` bytes of them, in lanes by
    turns of two; other parts `part` bytes further each. Channels of zeros do not count, and neither do those that hold
    Inf or NaN: they are marked `odd`, and zeros take their place. An f32 may be too small for a first part: then it
    counts as 1.
    """
    lanes = np.empty(TILE, np.uint16)
    low, high = peaks[0], peaks[1]
    low[:], high[:] = SPECIAL, 0
    for first in range(0, channels, together):
        place = panel + first // together * step
        whole = lane_peaks(place, size // LINE, lanes.ctypes.data)
        for c in range(first, min(first + together, channels)):
            peak = int(lanes[c - first]) if together == TILE else whole
            odd[c] = 1 if peak >= SPECIAL else 0
            if odd[c] == 1:
                for p in range(parts):
                    if together == TILE:
                        clear_lane(place + p * part + 4 * (c - first), size // LINE)
                    else:
                        fill_zero(place + p * part, size)
                continue
            if peak == 0 and parts == 3 and not _empty(boxes, src + c * steps[4], steps):
                peak = 1
            if peak > 0:
                low[c // TILE], high[c // TILE] = min(low[c // TILE], peak), max(high[c // TILE], peak)


@jit
def _plain(parts: int, a: Table, b: Table, small: Vector, plain: Table) -> None:
    """Say which pairs of blocks may be summed with zeros between their values, from what `_peaks` found.

    Of bf16 the sums on the way are read as well: a `small` pair, which was too small once, stays with plain f32 until
    its sums are complete.
    """
    for i in range(plain.shape[0]):
        for j in range(b.shape[1]):
            fits = True
            if parts != 2 and a[1, i] > 0 and b[1, j] > 0:
                first, second = a[0, i] >> 7, b[0, j] >> 7
                fits = min(first, second) >= LEAST_PEAK and first + second >= LEAST_PEAKS
            if parts == 3:
                fits &= (a[1, i] >> 7) + (b[1, j] >> 7) <= MOST_PEAKS
            if parts == 1:
                at = i * b.shape[1] + j
                fits &= small[at] == 0
                small[at] = 0 if fits else 1
            plain[i, j] = 1 if fits else 0


if target().dots == "amx":

    @jit
    def _together(tiles: int, b_blocks: int) -> int:
        """Give how many tiles of rows to sum at once: two, with a single block of b three or four."""
        if b_blocks > 1 or tiles < 3:
            return min(tiles, 2)
        return 3 if tiles % 3 == 0 or tiles == 5 else 4

    @jit
    def _add_tiles(
        table: Vector, parts: int, a: int, a_step: int, b: int, b_blocks: int, b_block: int, steps: int, plain: Vector,
        acc: int, acc_step: int, down: int, where: Vector,
    ) -> None:  # fmt: skip
        """Sum as many tiles of rows as `_together` says with all plain blocks of b.

        For `where` see the last argument of blocks in `kernels.emit.dots.dot_table`.
        """
        entry = BLOCKS + len(SHAPES) * (parts - 1) + (2 * down - 2 if down < 3 else 1 + down)
        for j0 in range(0, b_blocks, 2):
            across = min(2, b_blocks - j0)
            size = across if plain[j0] + plain[j0 + across - 1] == 2 else 1
            for j in range(j0, j0 + across, size):
                if plain[j] == 1:
                    call_dots(
                        table[entry + size - 1], a, a_step, b + j * b_block, b_block, steps, acc + j * acc_step,
                        acc_step, where.ctypes.data,
                    )  # fmt: skip

    @jit
    def _add_lines(
        table: Vector, parts: int, slab: Vector, span: Table, panel_steps: Vector, a: int, b: int, b_blocks: int,
        b_block: int, plain: Vector, acc: int, acc_step: int, down: int, where: Vector,
    ) -> None:  # fmt: skip
        """Sum tiles of rows over a `span` of a slab's (d, h, w), first and end, that hold images inside.

        Each position is some whole steps of `a` and `b`, so no row crosses lines, and nothing is visited that none of
        the tiles' taps meets.
        Where walks end depends on the slab alone: sums have the same bits whatever tiles go together.
        """
        step = panel_steps[2] // LINE
        left, right = (span[0, 2] - slab[4]) * step, (span[1, 2] - slab[4]) * step
        most = INSIDE_PIXELS[parts - 1] // STEP
        lines = max(1, most // max(1, (slab[5] - slab[4]) * step))
        meets = left < right and span[0, 1] < span[1, 1]
        for d in range(span[0, 0], span[1, 0] if meets else 0):
            for base in range(slab[2] + (span[0, 1] - slab[2]) // lines * lines, span[1, 1], lines):
                h = max(base, span[0, 1])
                line = (d - slab[0]) * panel_steps[0] + (h - slab[2]) * panel_steps[1]
                where[4] = min(base + lines, span[1, 1]) - h
                for start in range(left // most * most, right, most):
                    first, end = max(left, start), min(right, start + most)
                    place = line + LINE * first
                    where[6] = STEP // 2 * (panel_steps[1] - LINE * (end - first))
                    _add_tiles(
                        table, parts, a + place, LINE, b + STEP // 2 * place, b_blocks, b_block, end - first, plain,
                        acc, acc_step, down, where,
                    )  # fmt: skip
        where[4] = 1

    @jit
    def _add_rows(
        table: Vector, parts: int, i0: int, i1: int, steps: int, offsets: Vector, shifts: Table, taps: int,
        channels: int, a: int, a_plane: int, a_part: int, b: int, b_blocks: int, b_block: int, plain: Vector, acc: int,
        acc_step: int, stage: int, inside: bool, slab: Vector, panel_steps: Vector,
    ) -> None:  # fmt: skip
        """Sum tiles of rows, some at a time, with all plain blocks of b.

        Their sums stay in the second cache for all pixels. A tile of one tap of 16 channels is read where it lies, if
        there are products enough to hide that its rows cross lines of memory; others are staged. With images inside
        its rows are lines, and tiles of one tap go together.
        """
        live = shifts.shape[0]
        whole = min(i1, channels // TILE) if parts > 1 or inside else i0
        tiles, start = max(0, whole - i0) * live, TILE * max(i0, whole) * taps
        rest = (min(offsets.size, TILE * i1 * taps) - start) // ROWS
        places, span = np.empty((2, 4), np.int64), np.empty((2, 3), np.int64)
        where = np.zeros(13 + INSIDE_LINES, np.int64)
        where[4], where[5] = 1, where.ctypes.data + 104  # one walk, from 0 on
        for line in range(INSIDE_LINES):
            where[13 + line] = line * panel_steps[1]
        tile = 0
        while tile < tiles + rest:
            down = _together((tiles if tile < tiles else tiles + rest) - tile, b_blocks)
            for axis in range(3):
                span[0, axis], span[1, axis] = slab[2 * axis + 1], slab[2 * axis]
            for k in range(down):
                if tile < tiles:
                    i, t = divmod(tile + k, live)
                    if inside:
                        t, i = divmod(tile + k, whole - i0)
                    for axis in range(3 if inside else 0):
                        span[0, axis] = min(span[0, axis], max(slab[2 * axis], shifts[t, 2 + 2 * axis]))
                        span[1, axis] = max(span[1, axis], min(slab[2 * axis + 1], shifts[t, 3 + 2 * axis]))
                    places[0, k] = (i0 + i) * TILE * a_plane + shifts[t, 0]
                    places[1, k] = ((i0 + i) * TILE * taps + shifts[t, 1]) * LINE
                else:
                    places[0, k], places[1, k] = k * ROWS * LINE, (start + (tile - tiles + k) * ROWS) * LINE
            where[0], where[1], where[2], where[3] = b_blocks * b_block, a_part, a_plane, taps * LINE
            if tile >= tiles:
                where[1], where[2], where[3] = down * ROWS * LINE, LINE, LINE
            for k in range(1, down):
                where[6 + k], where[5 + down + k] = places[0, k] - places[0, 0], places[1, k] - places[1, 0]
            most = BLOCK_PIXELS if tile < tiles else STAGED_PIXELS[parts - 1]
            walks = (steps * STEP + most - 1) // most
            if inside and tile < tiles:
                walks = 0
                _add_lines(
                    table, parts, slab, span, panel_steps, a + places[0, 0], b, b_blocks, b_block, plain,
                    acc + places[1, 0], acc_step, down, where,
                )  # fmt: skip
            for walk in range(walks):
                first, end = steps * walk // walks, steps * (walk + 1) // walks
                source, pitch = a + places[0, 0] + LINE * first, LINE
                if tile >= tiles:
                    source, pitch = stage, parts * down * ROWS * LINE
                    for piece in range(parts * down):
                        p, k = divmod(piece, down)
                        call_dots(
                            table[STAGE], a + p * a_part + LINE * first,
                            offsets.ctypes.data + 8 * (start + (tile - tiles + k) * ROWS), 0, pitch, end - first,
                            stage + piece * ROWS * LINE, 0, 0,
                        )  # fmt: skip
                _add_tiles(
                    table, parts, source, pitch, b + STEP // 2 * LINE * first, b_blocks, b_block, end - first, plain,
                    acc + places[1, 0], acc_step, down, where,
                )  # fmt: skip
            tile += down

else:

    @jit
    def _add_rows(
        table: Vector, parts: int, i0: int, i1: int, steps: int, offsets: Vector, shifts: Table, taps: int,
        channels: int, a: int, a_plane: int, a_part: int, b: int, b_blocks: int, b_block: int, plain: Vector, acc: int,
        acc_step: int, stage: int, inside: bool, slab: Vector, panel_steps: Vector,
    ) -> None:  # fmt: skip
        """Sum the rows with two blocks of b at a time, where both are plain: their pixels stay in the first cache."""
        last, pairs, most = min(offsets.size, TILE * i1 * taps), steps * STEP // 2, BLOCK_PIXELS // 2
        for first in range(0, pairs, most):
            count = min(most, pairs - first)
            for j0 in range(0, b_blocks, 2):
                across = min(2, b_blocks - j0)
                size = across if plain[j0] + plain[j0 + across - 1] == 2 else 1
                for j in range(j0, j0 + across, size):
                    for row in range(TILE * i0 * taps, last if plain[j] == 1 else 0, ROWS):
                        call_dots(
                            table[BLOCKS + size - 1], a + 4 * first, offsets.ctypes.data + 8 * row,
                            b + j * b_block + LINE * first, b_block, count, acc + j * acc_step + row * LINE, acc_step,
                            0,
                        )  # fmt: skip


@jit
def _walk(
    table: Vector, parts: int, pixels: int, offsets: Vector, shifts: Table, taps: int, channels: int, a: int,
    a_plane: int, a_part: int, b: int, b_blocks: int, b_block: int, first: int, plain: Table, acc: int, acc_step: int,
    stage: int, inside: bool, slab: Vector, panel_steps: Vector,
) -> None:  # fmt: skip
    """Sum the plain pairs of blocks, from the `first` block of rows on, as many at once as have the same ones."""
    steps, i = (pixels + STEP - 1) // STEP, 0
    while i < plain.shape[0]:
        start, same, some = i, True, 0
        while same:
            i += 1
            same = i < plain.shape[0]
            for j in range(b_blocks if same else 0):
                same &= plain[i, j] == plain[start, j]
        for j in range(b_blocks):
            some += plain[start, j]
        if some > 0:
            _add_rows(
                table, parts, first + start, first + i, steps, offsets, shifts, taps, channels, a, a_plane, a_part, b,
                b_blocks, b_block, plain[start], acc, acc_step, stage, inside, slab, panel_steps,
            )  # fmt: skip


@jit
def _walk_exactly(
    exact: int, slab: Vector, shifts: Table, taps: int, a: int, a_steps: Vector, channels: int, b: int,
    b_steps: Vector, b_channels: int, plain: Table, a_odd: Vector, b_odd: Vector, acc: int, acc_step: int,
) -> None:  # fmt: skip
    """Sum all other pairs of blocks, over the pixels for which each tap is inside, from the tensors themselves.

    Of a plain pair only the sums of odd channels are kept.
    """
    where, apart = np.empty(4, np.int64), np.empty(TILE * TILE, np.float32)
    for pair in range(plain.size):
        i, j = divmod(pair, plain.shape[1])
        rows, lanes = min(TILE, channels - TILE * i), min(TILE, b_channels - TILE * j)
        some = plain[i, j] == 0
        for m in range(rows):
            some |= a_odd[TILE * i + m] == 1
        for lane in range(lanes):
            some |= b_odd[TILE * j + lane] == 1
        where[0], where[1], where[2], where[3] = a_steps[4], rows - 1, b_steps[4], lanes - 1
        for t in range(shifts.shape[0] if some else 0):
            sums = acc + j * acc_step + (i * TILE * taps + shifts[t, 1]) * LINE
            to, line = sums, taps * LINE
            if plain[i, j] == 1:
                to, line = apart.ctypes.data, LINE
                _copy_line(to, line, sums, taps * LINE, rows)
            first, second = a + TILE * i * a_steps[4] + shifts[t, 10], b + TILE * j * b_steps[4]
            low, high = max(slab[6], shifts[t, 8]), min(slab[7], shifts[t, 9])
            for n in range(max(slab[0], shifts[t, 2]), min(slab[1], shifts[t, 3]) if low < high else 0):
                for d in range(max(slab[2], shifts[t, 4]), min(slab[3], shifts[t, 5])):
                    for h in range(max(slab[4], shifts[t, 6]), min(slab[5], shifts[t, 7])):
                        call_dots(
                            exact, first + n * a_steps[0] + d * a_steps[1] + h * a_steps[2] + low * a_steps[3],
                            a_steps[3], second + n * b_steps[0] + d * b_steps[1] + h * b_steps[2] + low * b_steps[3],
                            b_steps[3], high - low, to, line, where.ctypes.data,
                        )  # fmt: skip
            for m in range(rows if plain[i, j] == 1 else 0):
                for lane in range(lanes):
                    if a_odd[TILE * i + m] + b_odd[TILE * j + lane] > 0:
                        store_value(sums + m * taps * LINE + 4 * lane, _load_f32(to + m * LINE + 4 * lane))


@jit
def add_dots(
    table: Vector, turned: int, parts: int, groups: int, slabs: Table, shifts: Table, offsets: Vector, taps: int,
    panel_steps: Vector, sizes: Vector, a: Vector, a_boxes: Table, a_steps: Vector,
    b: Vector, b_boxes: Table, b_steps: Vector, panels: int, a_last: Table, b_last: Table, acc: int, acc_bytes: int,
    acc_step: int, small: Table,
) -> None:  # fmt: skip
    """Add slabs of pixels to the accumulators of `groups` groups, [block of b][channel of a][tap][16].

    `turned` is that of `kernels.pack.pairs`; `a` and `b` are each tensor's address and its bytes between groups; for
    the other tables see `kernels.gradient.dots.schedule`. `sizes` are channels, planes and bytes of a plane of a, then
    channels and blocks of b, and positions of all images and of one, then 1 for images inside, and the channels of a
    that are packed together. `panels` holds a's planes, b's pairs and staged rows; `a_last` and `b_last` are the boxes
    that were packed there last, if any. `small` has a row for each group: the pairs of blocks that `_plain` found to be
    so. The caller owns all of them.
    """
    channels, a_plane, b_blocks, b_block, inside = sizes[0], sizes[2], sizes[4], 32 * sizes[5], sizes[7] == 1
    together, a_part, b_part = sizes[8], sizes[1] * a_plane, b_blocks * b_block
    a_peaks = np.empty((2, (together + TILE - 1) // TILE), np.int64)
    b_peaks, plain = np.empty((2, b_blocks), np.int64), np.empty((a_peaks.shape[1], b_blocks), np.int64)
    a_odd, b_odd = np.empty(together, np.int64), np.empty(sizes[3], np.int64)
    a_rows, b_rows = a_boxes.shape[0] // slabs.shape[0], b_boxes.shape[0] // slabs.shape[0]
    pairs, stage = panels + parts * a_part, panels + parts * (a_part + b_part)
    for s in range(slabs.shape[0]):
        pixels = (slabs[s, 1] - slabs[s, 0] - 1) * panel_steps[0] // 2 + sizes[6]
        a_now, b_now = a_boxes[s * a_rows : (s + 1) * a_rows], b_boxes[s * b_rows : (s + 1) * b_rows]
        for g in range(groups):
            b_group, sums = b[0] + g * b[1], acc + g * acc_bytes
            done = 0
            if inside:
                done = call_turned(
                    turned, parts, 1, sizes[3], b_blocks, b_now.ctypes.data, b_now.shape[0], b_last.ctypes.data,
                    b_last.shape[0], b_group, b_steps.ctypes.data, pairs, b_block, panel_steps.ctypes.data, stage,
                )  # fmt: skip
            if done == 0:
                pack_pairs(
                    parts, sizes[3], b_blocks, b_now, b_last, b_group, b_steps, pairs, b_block, panel_steps, stage
                )
            b_last = b_now
            if parts == 2:
                split_f16(pairs, pairs + b_part, b_part // LINE)
            _peaks(parts, sizes[3], TILE, pairs, b_part, b_block, b_block, b_now, b_group, b_steps, b_peaks, b_odd)
            for first in range(0, channels, together):
                some, a_some = min(together, channels - first), a[0] + g * a[1] + first * a_steps[4]
                done = 0
                if inside:
                    done = call_turned(
                        turned, parts, 0, some, sizes[1], a_now.ctypes.data, a_now.shape[0], a_last.ctypes.data,
                        a_last.shape[0], a_some, a_steps.ctypes.data, panels, a_plane, panel_steps.ctypes.data, stage,
                    )  # fmt: skip
                if done == 0:
                    pack_planes(
                        parts, some, sizes[1], a_now, a_last, a_some, a_steps, panels, a_plane, panel_steps, stage
                    )
                a_last = a_now
                if parts == 2:
                    split_f16(panels, panels + a_part, a_part // LINE)
                _peaks(parts, some, 1, panels, a_part, a_plane, a_plane, a_now, a_some, a_steps, a_peaks, a_odd)
                mine = plain[: (some + TILE - 1) // TILE]
                _plain(parts, a_peaks, b_peaks, small[g, first // TILE * b_blocks :], mine)
                call_dots(table[BEGIN], 0, 0, 0, 0, 0, 0, 0, 0)
                _walk(
                    table, parts, pixels, offsets, shifts, taps, channels, panels - first * a_plane, a_plane, a_part,
                    pairs, b_blocks, b_block, first // TILE, mine, sums, acc_step, stage, inside, slabs[s], panel_steps,
                )  # fmt: skip
                call_dots(table[END], 0, 0, 0, 0, 0, 0, 0, 0)
                _walk_exactly(
                    table[EXACT + parts - 1], slabs[s], shifts, taps, a_some, a_steps, some, b_group, b_steps, sizes[3],
                    mine, a_odd, b_odd, sums + first * taps * LINE, acc_step,
                )  # fmt: skip


class DotPart(Part):
    """One unit's share: some groups and blocks of b's channels, over some chunks of the pixels."""

    plan: DotSchedule  # type: ignore[assignment]  # the sums read what both kinds of schedule have

    def __init__(self, problem: ConvProblem, plan: DotSchedule, unit: Unit) -> None:
        self.problem, self.plan = problem, plan
        self.g0, self.g1, self.b0, self.b1, self.index, self.parts = unit.part
        mine = plan.blocks[self.b0 : self.b1]
        self.first_lane, self.width = int(mine[0]["lane"]), TILE * len(mine)
        self.blocks = mine.copy()
        self.blocks["acc"] = 4 * (mine["lane"] - self.first_lane) * plan.rows
        self.group_floats = plan.rows * self.width
        self.floats = (self.g1 - self.g0) * self.group_floats
        self.slabs = np.array(plan.slabs, np.int64)
        self.batch = max(1, BATCH * BATCH_MACS * len(plan.slabs) // max(1, problem.macs))
        a, b = (plan.channels, plan.a_planes, plan.a_plane), (int(mine["valid"].sum()), len(mine))
        self.sizes = np.array((*a, *b, plan.positions, plan.pixels, plan.inside, plan.together), np.int64)
        self.layout = self._layout(0)
        self.starts = {len(plan.slabs) * chunk // plan.chunks for chunk in range(plan.chunks)}

    def _small(self, first: int) -> Table:
        """Give the marks of pairs of blocks, which are new where sums begin."""
        shape = self.g1 - self.g0, -(-self.plan.channels // TILE) * len(self.blocks)
        marks = arena("small", 2 * shape[0] * shape[1])[: 2 * shape[0] * shape[1]].view(np.int64).reshape(shape)
        if first in self.starts:
            marks[...] = 0
        return marks

    def _add_slabs(self, inputs: Sequence[Storage], some: slice, acc: Floats) -> None:
        plan = self.plan
        wide, narrow = inputs[::-1] if self.problem.op.startswith("ConvT") else inputs
        parts, size = PARTS[self.problem.dtype], storage_dtype(self.problem.dtype).itemsize
        panels = plan.a_planes * plan.a_plane + 2 * self.width * plan.positions
        a = wide.ctypes.data + size * (plan.a.origin + self.g0 * plan.a.group)
        b = narrow.ctypes.data + size * (self.g0 * plan.b.group + self.first_lane * plan.b.channel)
        a_boxes, b_boxes = plan.a_boxes[some].reshape(-1, 6), plan.b_boxes[some].reshape(-1, 6)
        place, last = arena_kept("vector", (parts * panels + STAGE_BYTES) // 4, self)
        none = slice(0, 0) if last is None else slice(last, last + 1)
        add_dots(
            dot_table(), turned(), parts, self.g1 - self.g0, self.slabs[some], plan.shifts, plan.offsets, plan.taps,
            plan.panel_steps, self.sizes, np.array((a, size * plan.a.group), np.int64), a_boxes, plan.a_steps,
            np.array((b, size * plan.b.group), np.int64), b_boxes, plan.b_steps, place,
            plan.a_boxes[none].reshape(-1, 6), plan.b_boxes[none].reshape(-1, 6), address(acc), 4 * self.group_floats,
            4 * TILE * plan.rows, self._small(some.start),
        )  # fmt: skip
        arena_keeps("vector", self, some.stop - 1)


@cached
def _part(problem: ConvProblem, unit: Unit) -> DotPart:
    plan = dot_schedule(problem)
    assert plan is not None
    return DotPart(problem, plan, unit)


class BwdDots(BwdWeights):
    """Weight gradients of Convolution and ConvTranspose from products of bf16 pairs."""

    name = f"bwd_weights_{target().dots}"

    def refuse(self, problem: ConvProblem) -> str | None:
        """Take weight gradients whose channels and pixels fill the registers well."""
        if problem.forward:
            return "computes weight gradients only"
        least = LEAST_USE.get((target().dots, problem.dtype))
        if least is None:
            return f"{problem.dtype} is no sum of few bf16 products"
        plan = dot_schedule(problem)
        if plan is None:
            return "pixels with zeros between them would take too much room"
        if plan.use < least and not target().imitated:
            return f"only {plan.use:.0%} of its products would not be filling zeros, at least {least:.0%} pay"
        if problem.dtype == "f32" and plan.cycles > MOST_CYCLES and not target().imitated:
            return f"f32 tiles would do it in {1 / plan.cycles:.0%} of the time that six products of bf16 take"
        return None

    def speed(self, problem: ConvProblem) -> int:
        """Say how many times as fast as on f32 tiles it is, about."""
        return BATCH // PARTS[problem.dtype] or 1

    def schedule(self, problem: ConvProblem) -> Any:
        """Lay out the sum."""
        return dot_schedule(problem)

    def part(self, problem: ConvProblem, unit: Unit) -> Part:
        """Prepare a unit."""
        return _part(problem, unit)


BWD_DOTS = BwdDots()
