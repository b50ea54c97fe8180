"""The compiled loops of the forward operations where every dst pixel gathers its taps.

One driver serves Convolution and ConvTranspose, and with them both data gradients: pixels that share their taps are the
rows of tiles, dst channels or groups their lanes, and a batch of `kernels.emit.brgemm` sums all taps and channels.

    1. bands of dst positions, whose src is packed, or read in place, and stays in a cache
    2. groups
    3. blocks of dst channels: up to two vectors, or some vectors of groups
    4. phases of all axes, and in each the classes of positions that share their taps (`kernels.forward.lists`)
    5. lines of positions, tiles of a line

Everything is addresses, byte steps and tables (`kernels.forward.records`) that `kernels.forward.share` has laid out;
nothing is checked here.
"""

from __future__ import annotations

import numpy as np

from kernels.emit.brgemm import MICRO, ROWS, Batch
from kernels.emit.compiler import Rows, Vector, inlined, jit
from kernels.emit.intrinsics import (
    F32,
    address_of,
    copy_bytes,
    fill_zero,
    load,
    stack_array,
    stack_record,
    store_value,
    touch,
)
from kernels.forward.lists import list_class, list_room, list_rows, sum_lines, sum_lists
from kernels.forward.output import bring_bias, fill, lay_out, write, write_rounded
from kernels.forward.records import Axis, Band, Call, Data, GatherShare, Lists, Pass, Phase, Tables, Work
from kernels.pack.doubles import Operand, pack_doubles, packed
from kernels.pack.magnitudes import LEAST_BIAS
from kernels.pack.panels import Panel, Values, pack_panels
from kernels.target import target

if target().dots == "avx512bf16":
    from kernels.forward.pairs import bring_dots

__all__ = ["bring_box", "gather", "gather_doubles", "pack_bias", "sum_block"]

WIDTH, DOTS = target().lanes, target().dots == "avx512bf16"
DOTS_PLACE = MICRO["dots"]
PAIRS, PAIRS_ROWS = MICRO["pairs"], ROWS["pairs"][1] if DOTS else 0

BATCH, PANEL, SHARE, WORK = (each.dtype for each in (Batch, Panel, GatherShare, Work))


@jit
def pack_bias(shares: Rows[GatherShare], passes: Rows[Pass], calls: Rows[Call]) -> bool:
    """Put the bias of each group behind the packed weights, in whole vectors; return whether dots would keep it.

    They do unless it is so small that a sum might be subnormal.
    """
    share, one, call = shares[0], passes[0], calls[0]
    lanes, kept = (one.channels + WIDTH - 1) // WIDTH * WIDTH, True
    for g in range(one.groups):
        line = _bias_line(share, one, call, g)
        bring_bias(share.kind, one, call, g, 0, lanes, line)
        for lane in range(lanes):
            value = load(F32, line + 4 * lane)
            if value != 0 and abs(value) < LEAST_BIAS:
                kept = False
    return kept


@inlined
def _bias_line(share: GatherShare, one: Pass, call: Call, g: int) -> int:
    """Return the address of a group's bias."""
    blocks = (one.channels + WIDTH - 1) // WIDTH
    panels = 1 if share.lanes.lanewise else one.groups * blocks
    address: int = call.panels + panels * share.panel.block_bytes + g * blocks * 4 * WIDTH
    return address


@jit
def _reach(tables: Tables, axis: int, work: Work) -> None:
    """Note the src positions of an axis that the dst positions at hand meet."""
    phases, taps, band = tables.phases, tables.taps, work.band
    one, first, last, low, high = tables.axes[axis], 1 << 62, -1, band.low[axis], band.high[axis]
    for number in range(one.first, one.first + one.phases):
        phase = phases[number]
        begin, end = _clip(one, phase, low, high)
        for place in range(phase.first, phase.first + phase.taps):
            tap = taps[place]
            a, b = max(begin, tap.low), min(end, tap.high)
            if a < b:
                first = min(first, tap.src + (a - tap.low) * one.src_step)
                last = max(last, tap.src + (b - 1 - tap.low) * one.src_step)
    band.first[axis], band.sizes[axis] = (first, last + 1 - first) if last >= 0 else (0, 0)


@jit
def _cut_band(share: GatherShare, tables: Tables, work: Work, counts: Vector, band: int) -> None:
    """Note the positions of a band, and the src positions that it meets."""
    grid, cut = share.grid, work.band
    for axis in range(3, -1, -1):
        low, high, size = grid.low[axis], grid.high[axis], grid.step[axis]
        parts = (high - low + size - 1) // size
        cut.low[axis] = low + band % parts * size
        cut.high[axis] = min(high, cut.low[axis] + size)
        counts[axis] = cut.high[axis] - cut.low[axis]
        band //= parts
        _reach(tables, axis, work)


@inlined
def _clip(axis: Axis, phase: Phase, low: int, high: int) -> tuple[int, int]:
    """Return the positions of a phase whose dst positions are from `low` to `high`."""
    step = axis.dst_step
    return max(0, (low - phase.dst + step - 1) // step), max(0, (high - phase.dst + step - 1) // step)


@jit
def bring_box(src: Values, channels: int, pitch: int, work: Work, scratch: int) -> None:
    """Pack a box of src positions as f32, `pitch` bytes apart, padded to 8 channels if they fit; `src` is the first."""
    panels, lanes = stack_array(1, PANEL), min(pitch // 4, (channels + 7) // 8 * 8)
    panel = panels[0]
    panel.lanes, panel.valid, panel.source, panel.address, panel.unit = lanes, channels, 0, scratch, 1
    lay_out(work, pitch, scratch)
    pack_panels(src, panels, work.band.sizes[:], work.src[:])


@jit
def _bring_lanes(share: GatherShare, src: Values, step: int, lanes: int, work: Work, scratch: int) -> None:
    """Pack a box of src positions as f32 [position][src channel][lanes]; the lanes of a group get the same value.

    The channels of a group are `step` bytes apart.
    """
    many, line, sizes = share.lanes.multiplier, share.panel.line, work.band.sizes
    groups, positions = lanes // many, sizes[0] * sizes[1] * sizes[2] * sizes[3]
    if positions == 0:
        return
    for c in range(share.channels - 1, -1, -1):
        one = Values(src.kind, src.place + c * step, src.steps, src.channel, src.end)
        bring_box(one, groups, line * share.channels, work, scratch + c * line)
    if many > 1:
        for place in range(scratch, scratch + positions * share.channels * line, line):
            for g in range(groups - 1, -1, -1):
                value = load(F32, place + 4 * g)
                for lane in range(g * many, g * many + many):
                    store_value(place + 4 * lane, value)


@jit
def _bring_band(share: GatherShare, one: Pass, call: Call, work: Work, channels: int, least: int) -> None:
    """Pack the src `channels` that a band reaches, unless they are read in place: the first one at `work.start`."""
    if DOTS and share.micro == DOTS_PLACE:
        bring_dots(share, one, call, work, channels, least)
        return
    if not share.src.packed:
        return
    strides, place = one.src.strides, work.start
    for axis in range(4):
        place += work.band.first[axis] * strides[axis]
    by_group = share.lanes.lanewise and not share.lanes.grouped  # the lanes of a packed position
    channel = one.src.group if by_group else one.src.channel
    src = Values(share.kind, place, strides[:], channel, call.src + one.src.nbytes)
    if by_group:
        _bring_lanes(share, src, one.src.channel, one.channels, work, call.source)
    else:
        bring_box(src, channels, share.src.pixel_bytes, work, call.source)


@jit
def _touch_source(data: Data, call: Call, work: Work) -> None:
    """Ask for the src positions at hand in the order of memory: tiles read a few bytes of many pixels in turn."""
    first, sizes, strides = work.band.first, work.band.sizes, data.strides
    for n in range(first[0], first[0] + sizes[0]):
        for d in range(first[1], first[1] + sizes[1]):
            for h in range(first[2], first[2] + sizes[2]):
                place = call.src + n * strides[0] + d * strides[1] + h * strides[2] + first[3] * strides[3]
                for ahead in range(0, sizes[3] * strides[3], 64):
                    touch(place + ahead)


@jit
def sum_block(entry: int, share: GatherShare, tables: Tables, work: Work, lists: Lists, batch: Batch) -> None:
    """Sum all positions of a band for one block of lanes."""
    axes, phases, taps, pieces, lines = tables.axes, tables.phases, tables.taps, lists.pieces, share.lines.kernel != 0
    loops, part, band, per_axis = share.loops, work.part, work.band, pieces.shape[0] // 4
    at, end, counts = part.at, part.end, part.counts
    begin, stop = stack_array(4, np.int64), stack_array(4, np.int64)
    combinations = axes[0].phases * axes[1].phases * axes[2].phases * axes[3].phases
    for combination in range(combinations):
        rest, some = combination, True
        for axis in range(3, -1, -1):
            part.phase[axis] = axes[axis].first + rest % axes[axis].phases
            rest //= axes[axis].phases
            begin[axis], stop[axis] = _clip(axes[axis], phases[part.phase[axis]], band.low[axis], band.high[axis])
            some = some and begin[axis] < stop[axis]
        if not some:
            continue
        depth, at[loops[0]] = 0, begin[loops[0]]
        while depth >= 0:
            axis = loops[depth]
            phase, some_taps = phases[part.phase[axis]], pieces[axis * per_axis : (axis + 1) * per_axis]
            if at[axis] >= stop[axis]:
                depth -= 1
                if depth >= 0:
                    at[loops[depth]] = end[loops[depth]]
            elif depth == 3:
                left = stop[axis] - at[axis]
                if share.src.staged:
                    counts[axis], _ = list_class(taps, phase, axes[axis].src_step, at[axis], stop[axis], some_taps)
                    rows = min(work.tile.limit, left)
                    part.repeat = left // rows
                else:
                    step, limit = axes[axis].src_step, work.tile.limit
                    rows, part.repeat, counts[axis] = list_rows(
                        taps, phase, step, at[axis], stop[axis], limit, share.skips, some_taps
                    )
                    if lines and counts[axis] > 0 and share.limits[1] < rows and rows < limit:  # there is no such tile
                        rows, part.repeat, counts[axis] = list_rows(
                            taps, phase, step, at[axis], stop[axis], share.limits[1], share.skips, some_taps
                        )
                batch.rows = rows
                if counts[axis] > 0 and lines:
                    sum_lines(share, tables, work, lists, batch)
                elif counts[axis] > 0:
                    sum_lists(entry, share, tables, work, lists, batch)
                at[axis] += rows * part.repeat
            else:
                counts[axis], end[axis] = list_class(taps, phase, axes[axis].src_step, at[axis], stop[axis], some_taps)
                if counts[axis] == 0:
                    at[axis] = end[axis]
                    continue
                depth += 1
                at[loops[depth]] = begin[loops[depth]]


@jit
def _write_doubles(dst: Operand, sums: int, to: int, parts: int, valid: int, counts: Vector) -> None:
    """Write sums [n][d][h][w][part][lanes] to float64; dst has all of a part after the other."""
    line = 8 * dst.width * parts
    for p in range(parts):
        for d in range(counts[1]):
            for h in range(counts[2]):
                place = to + p * dst.nbytes + d * dst.strides[1] + h * dst.strides[2]
                source = sums + 8 * dst.width * p + line * counts[3] * (d * counts[2] + h)
                for lane in range(valid):
                    for w in range(counts[3]):
                        copy_bytes(place + w * dst.strides[3] + lane * dst.channel, source + w * line + 8 * lane, 8)


@jit
def gather_doubles(
    table: Vector, facts: Vector, operands: Rows[Operand], tables: Tables, bands: Rows[Band], number: int, call: Vector,
) -> None:  # fmt: skip
    """Compute one band of dst for each image in float64; each tap is summed by itself.

    `facts` has the rows of the tallest tile, the values of a sum, and the kernel's sizes. `operands` are src, weights
    and dst. `call` has the addresses of src, of the packed weights of all groups, of room for src, for f32 and for
    sums, and of dst, then the number of images, which follow each other, and the bytes of one of dst.
    """
    band, src, weights, dst, lists = bands[number], operands[0], operands[1], operands[2], list_room(tables, 1)
    share, work, batch, counts = stack_record(SHARE), stack_record(WORK), stack_record(BATCH), stack_array(4, np.int64)
    parts, positions, panel, word, lanewise = facts[1], 1, share.panel, 8, src.lanewise
    if lanewise:
        word *= packed(src.positions, src.width)
    panel.words = share.sums.chunk = src.panels if lanewise else src.channels
    panel.line, panel.tap_bytes = 8 * dst.width, 8 * dst.width * panel.words
    for axis in range(4):
        share.loops[axis] = axis
        if axis < 3:
            panel.kernel[axis] = facts[2 + axis]
    share.src.word, share.sums.group, share.sums.within_line, share.sums.flushes = word, 1, True, True
    batch.apart, batch.a_step, batch.b_step, batch.b_vector = 1, word, panel.line, 4 * WIDTH
    work.tile.limit, work.tile.blocks, work.tile.last = facts[0], 1, table[0]
    work.start, work.place = call[2], call[4]
    result = call[5] + dst.start
    for axis in range(3, -1, -1):
        work.band.low[axis], work.band.high[axis] = band.low[axis], band.high[axis]
        work.src[axis], work.dst[axis] = 8 * src.width * src.steps[axis], parts * panel.line * positions
        counts[axis] = band.high[axis] - band.low[axis]
        positions *= counts[axis]
        work.start -= band.first[axis] * work.src[axis]
        work.place -= band.low[axis] * work.dst[axis]
        result += band.low[axis] * dst.strides[axis]
    for item in range(call[6] * src.groups):
        image, g = item // src.groups, item % src.groups
        pack_doubles(src, call[0] + image * src.nbytes, g, band.first[:], band.sizes[:], call[2], call[3])
        for c in range(weights.panels):
            place, to = g * weights.panels + c, result + image * call[7] + g * dst.group + c * dst.panel
            valid = min(dst.width, dst.channels - (g if dst.lanewise else c) * dst.width)
            batch.b = call[1] + 8 * place * packed(weights.positions, weights.width)
            fill_zero(call[4], positions * work.dst[3])
            sum_block(table[0], share, tables, work, lists, batch)
            _write_doubles(dst, call[4], to, parts, valid, counts)


@jit
def gather(
    table: Vector, shares: Rows[GatherShare], passes: Rows[Pass], calls: Rows[Call], tables: Tables, first: int,
    last: int, least: int,
) -> None:  # fmt: skip
    """Compute bands ``first..last`` of the grid for a pass.

    The call's `source` holds the packed src of a band, its `sums` those of a band [n][d][h][w][lanes] for one block,
    its `products` the second sums of a tile. `least` is the smallest exponent among the weights, where they are bf16.
    """
    share, one, call = shares[0], passes[0], calls[0]
    src, dst, lanewise, direct = one.src, one.dst, share.lanes.lanewise, share.direct
    batch, work = stack_record(BATCH), stack_record(WORK)
    counts, buffer = stack_array(4, np.int64), stack_array(64, np.float32)
    tile, panel, reading, flushes = work.tile, share.panel, share.src, share.sums.flushes
    blocks, lists = (one.channels + WIDTH - 1) // WIDTH, list_room(tables, (panel.words - 1) // share.sums.chunk + 1)
    batch.totals, batch.totals_row = call.products if flushes else 0, 8 * WIDTH
    batch.apart, batch.rounds = 1 if flushes else 0, 1 if share.rounds else 0
    stored, size = (share.kind, 2) if DOTS and share.rounds else (F32, 4)
    batch.a_step, batch.b_step = reading.word, panel.line
    batch.b_vector = panel.tap_bytes if share.lines.kernel != 0 else panel.block_bytes
    step, by_block = share.lanes.step, share.lanes.grouped and reading.packed
    for item in range(first, last):
        _cut_band(share, tables, work, counts, item)
        if not reading.packed and share.micro != DOTS_PLACE and not share.lines.ahead:
            _touch_source(src, call, work)
        for g in range(one.groups):
            start, tile.micro = call.src + src.start + g * src.group, share.micro
            for axis in range(4):
                work.src[axis] = src.strides[axis]
            begin = start
            place, line = call.dst + dst.start + g * dst.group, _bias_line(share, one, call, g)
            if direct and not share.covered:
                to = place
                for axis in range(4):
                    to += work.band.low[axis] * dst.strides[axis]
                fill(share.kind, line, one.channels, counts, to, dst.strides[:])
            for channel in range(0, one.channels, step):
                valid = min(step, one.channels - channel)
                vectors = (valid + WIDTH - 1) // WIDTH
                tile.blocks = 1 if lanewise else (vectors + 1) // 2
                wide, narrow = (1, 1) if lanewise else (min(vectors, 2), vectors - 2 * (tile.blocks - 1))
                lanes, to = vectors * WIDTH, place + channel * dst.channel
                batch.start, batch.start_row = line + 4 * channel, 0
                tile.pair, tile.valid = 2 * WIDTH * dst.channel, WIDTH if lanewise else valid - (vectors - 1) * WIDTH
                batch.b = call.panels + (g * blocks + channel // WIDTH) * panel.block_bytes
                batch.vectors, batch.last = vectors, 4 * (valid - WIDTH if direct else lanes)
                if by_block or channel == 0:  # by block, so that positions lie close together
                    work.start = start + channel * src.channel
                    _bring_band(share, one, call, work, valid if by_block else share.channels, least)
                    begin = work.start
                work.start = begin
                if lanewise:
                    batch.b = call.panels + 4 * channel
                    work.start += 0 if by_block else channel * (4 if reading.packed else src.channel)
                tile.limit = share.limits[wide - 1]
                if DOTS and tile.micro == PAIRS:
                    tile.limit = PAIRS_ROWS
                for axis in range(3, -1, -1):
                    work.dst[axis] = dst.strides[axis]
                    if not direct:
                        work.dst[axis] = size * lanes if axis == 3 else work.dst[axis + 1] * counts[axis + 1]
                work.place = to if direct else call.sums
                for axis in range(4):
                    to += work.band.low[axis] * dst.strides[axis]
                    work.place -= 0 if direct else work.band.low[axis] * work.dst[axis]
                if not direct and not share.covered:
                    fill(stored, batch.start, lanes, counts, call.sums, work.dst[:])
                entry = table[tile.micro + wide - 1]
                tile.last = table[tile.micro + narrow - 1]
                sum_block(entry, share, tables, work, lists, batch)
                if DOTS and share.rounds and not direct:
                    out = Values(share.kind, to, dst.strides[:], dst.channel, 0)
                    write_rounded(out, call.sums, lanes, valid, counts)
                elif not direct:
                    out = Values(share.kind, to, dst.strides[:], dst.channel, call.dst + dst.nbytes)
                    write(out, call.sums, lanes, valid, counts, address_of(buffer))
