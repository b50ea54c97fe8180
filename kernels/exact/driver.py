"""The loops of the reference: pack as f64, sum in tiles, round once."""

from __future__ import annotations

import numpy as np

from kernels.emit.compiler import Rows, Vector, jit
from kernels.emit.doubles import (
    LANES,
    Chain,
    DoubleTile,
    adjust_run,
    call_doubles,
    load_double,
    round_run,
    store_double,
    widen_run,
)
from kernels.emit.intrinsics import address_of, fill_zero
from kernels.exact.records import ForwardJob, GradientJob, Operand, Segment, Span, WeightsSource

__all__ = ["F64", "KINDS", "finish", "pack", "sum_forward", "sum_gradient"]

F32, F16, BF16, F64 = 0, 1, 2, 3
KINDS = {"f32": F32, "f16": F16, "bf16": BF16, "f64": F64}

_widen_f32, _widen_f16, _widen_bf16, _widen_f64 = (widen_run(kind) for kind in KINDS)
_load_f32, _load_f16, _load_bf16, _load_f64 = (load_double(kind) for kind in KINDS)
_round_f32, _round_f16, _round_bf16, _round_f64 = (round_run(kind) for kind in KINDS)

_CHAIN, _TILE = Chain.dtype, DoubleTile.dtype
_TOGETHER = 64
"""Channels that are read in turn where the positions of each are adjacent: as many lines as stay in L1."""
_LINE = 256
"""Values that are rounded at a time where they are not adjacent."""


@jit
def _widen(kind: int, to: int, source: int, count: int) -> None:
    """Write adjacent values as f64."""
    if kind == F32:
        _widen_f32(to, source, count)
    elif kind == F16:
        _widen_f16(to, source, count)
    elif kind == BF16:
        _widen_bf16(to, source, count)
    else:
        _widen_f64(to, source, count)


@jit
def _round(kind: int, to: int, source: int, bias: int, count: int) -> None:
    """Store the sums of adjacent f64, rounded once."""
    if kind == F32:
        _round_f32(to, source, bias, count)
    elif kind == F16:
        _round_f16(to, source, bias, count)
    elif kind == BF16:
        _round_bf16(to, source, bias, count)
    else:
        _round_f64(to, source, bias, count)


@jit
def _widen_apart(kind: int, to: int, to_step: int, source: int, step: int, count: int) -> None:
    """Write `count` values, `step` bytes apart, as f64, `to_step` bytes apart."""
    if kind == F32:
        for i in range(count):
            store_double(to + i * to_step, _load_f32(source + i * step))
    elif kind == F16:
        for i in range(count):
            store_double(to + i * to_step, _load_f16(source + i * step))
    elif kind == BF16:
        for i in range(count):
            store_double(to + i * to_step, _load_bf16(source + i * step))
    else:
        for i in range(count):
            store_double(to + i * to_step, _load_f64(source + i * step))


@jit
def _size(kind: int) -> int:
    """Return the bytes of a stored value."""
    return 8 if kind == F64 else 4 if kind == F32 else 2


@jit
def pack(box: Operand, source: int) -> None:
    """Pack a box of positions whose first value is at `source`.

    Lanes past the channels, up to a whole vector, are zeros, so that sums which are dropped are not slow.
    """
    kind, channels, line, to = box.kind, box.channels, box.line, box.packed
    size = _size(kind)
    spare = min(line // 8, (channels + LANES - 1) // LANES * LANES) - channels
    adjacent = box.channel == size or channels == 1
    whole = adjacent and box.steps[3] == channels * size and line == 8 * channels
    run = box.sizes[3]
    for n in range(box.sizes[0]):
        for d in range(box.sizes[1]):
            for h in range(box.sizes[2]):
                place = source + n * box.steps[0] + d * box.steps[1] + h * box.steps[2]
                if whole:
                    _widen(kind, to, place, run * channels)
                elif adjacent:
                    for w in range(run):
                        _widen(kind, to + w * line, place + w * box.steps[3], channels)
                else:
                    for first in range(0, channels, _TOGETHER):
                        some = min(_TOGETHER, channels - first)
                        for w in range(run):
                            origin = place + w * box.steps[3] + first * box.channel
                            _widen_apart(kind, to + w * line + 8 * first, 8, origin, box.channel, some)
                if spare > 0:
                    for w in range(run):
                        fill_zero(to + w * line + 8 * channels, 8 * spare)
                if box.factor != 0 or box.square != 0:
                    for w in range(run):
                        adjust_run(to + w * line, channels, box.factor, box.square)
                to += run * line


@jit
def _pack_weights(
    source: WeightsSource, place: int, taps: int, channels: int, step: int, lanes: int, panel: int
) -> int:
    """Pack `[tap][src channel][lanes]` of a block, whose lanes are `step` bytes apart; give the bytes of a line."""
    padded = (lanes + LANES - 1) // LANES * LANES
    for tap in range(taps):
        for c in range(channels):
            to = panel + (tap * channels + c) * 8 * padded
            origin = place + tap * source.tap + c * source.src
            if step == _size(source.kind):
                _widen(source.kind, to, origin, lanes)
            else:
                _widen_apart(source.kind, to, 8, origin, step, lanes)
            if padded > lanes:
                fill_zero(to + 8 * lanes, 8 * (padded - lanes))
    if source.factor != 0 or source.square != 0:
        adjust_run(panel, taps * channels * padded, source.factor, source.square)
    return 8 * padded


@jit
def sum_forward(jobs: Rows[ForwardJob], segments: Rows[Segment], first: int, last: int) -> None:
    """Add up the products of a pass, for the blocks `first` to `last` of all groups.

    Each sum is a chain over the kernel's positions in order, and over the src channels of each.
    """
    job = jobs[0]
    chains, tiles = np.empty(job.most, _CHAIN), np.zeros(1, _TILE)
    places, sums = np.empty(job.rows, np.int64), np.empty(job.rows, np.int64)
    tile, src = tiles[0], job.src
    channels = 1 if job.lanewise else src.channels
    tile.places, tile.sums, tile.chains = places.ctypes.data, sums.ctypes.data, chains.ctypes.data
    tile.b, tile.word, tile.a_step = job.panel, job.word, src.line if job.lanewise else 8
    for item in range(first, last):
        group, block = item // job.blocks, item % job.blocks
        if block == 0 or item == first:
            pack(src, src.place + group * src.group)
        lane = block * job.width
        lanes = min(job.width, job.lanes - lane)
        step = job.weights.group if job.lanewise else job.weights.dst
        place = job.weights.place + group * job.weights.group + lane * step
        line = _pack_weights(job.weights, place, job.taps, channels, step, lanes, job.panel)
        tile.b_step, tile.vectors = line, line // (8 * LANES)
        a = src.packed + (8 * lane if job.lanewise else 0)
        c = job.sums + group * job.group + 8 * lane
        for i in range(job.first[0], job.first[0] + job.segments[0]):
            for j in range(job.first[1], job.first[1] + job.segments[1]):
                for k in range(job.first[2], job.first[2] + job.segments[2]):
                    for m in range(job.first[3], job.first[3] + job.segments[3]):
                        one, two, three, four = segments[i], segments[j], segments[k], segments[m]
                        tile.count = _list_taps(two, three, four, chains, channels, tile.a_step, line, job.split)
                        _sum_positions(job, tiles[0], one, two, three, four, a, c, places, sums)
    tiles[0].count = chains.shape[0] + places.shape[0] + sums.shape[0]  # that keeps them


@jit
def _list_taps(
    two: Segment, three: Segment, four: Segment, chains: Rows[Chain], channels: int, a_step: int, line: int, split: int
) -> int:
    """List the taps of some segments in order; give the number of elements."""
    count, next_a, next_b = 0, -1, -1
    for d in range(two.taps):
        for h in range(three.taps):
            for w in range(four.taps):
                a = two.a + d * two.a_tap + three.a + h * three.a_tap + four.a + w * four.a_tap
                tap = two.tap + d * two.tap_step + three.tap + h * three.tap_step + four.tap + w * four.tap_step
                b = tap * channels * line
                if split == 0 and a == next_a and b == next_b:
                    chains[count - 1].steps += channels
                else:
                    most = channels if split == 0 else split
                    for done in range(0, channels, most):
                        chain = chains[count]
                        chain.a, chain.b = a + done * a_step, b + done * line
                        chain.steps = min(most, channels - done)
                        count += 1
                next_a, next_b = a + channels * a_step, b + channels * line
    return count


@jit
def _sum_positions(
    job: ForwardJob, tile: DoubleTile, one: Segment, two: Segment, three: Segment, four: Segment, a: int, c: int,
    places: Vector, sums: Vector,
) -> None:  # fmt: skip
    """Sum the listed taps for all positions of some segments, as many at a time as a tile has rows."""
    rows = 0
    for n in range(one.count):
        for d in range(two.count):
            for h in range(three.count):
                at = a + n * one.a_row + d * two.a_row + h * three.a_row
                to = c + one.c + n * one.c_row + two.c + d * two.c_row + three.c + h * three.c_row + four.c
                for w in range(four.count):
                    places[rows], sums[rows] = at + w * four.a_row, to + w * four.c_row
                    rows += 1
                    if rows == job.rows:
                        tile.rows, rows = rows, 0
                        call_doubles(job.entry, address_of(tile))
    if rows > 0:
        tile.rows = rows
        call_doubles(job.entry, address_of(tile))


@jit
def sum_gradient(jobs: Rows[GradientJob], spans: Rows[Span], first: int, last: int) -> None:
    """Add a slab of pixels to the sums of all taps, for the groups `first` to `last`.

    Each sum is a chain over the images, and over the pixels of each, in order.
    """
    job = jobs[0]
    chains, tiles = np.empty(job.most, _CHAIN), np.zeros(1, _TILE)
    places, sums = np.empty(job.rows, np.int64), np.empty(job.rows, np.int64)
    tile, a, b = tiles[0], job.a, job.b
    tile.places, tile.sums, tile.chains = places.ctypes.data, sums.ctypes.data, chains.ctypes.data
    tile.a_step, tile.b_step, tile.word = job.a_steps[3], job.b_steps[3], job.word
    planes, lines = job.spans[0], job.spans[0] + job.spans[1]
    rows = 1 if job.lanewise else a.channels
    for group in range(first, last):
        if job.has_a:
            pack(a, a.place + group * a.group)
        pack(b, b.place + group * b.group)
        to = job.sums + group * job.group
        for i in range(planes):
            for j in range(planes, lines):
                for k in range(lines, lines + job.spans[2]):
                    tile.count = _list_lines(job, spans[i], spans[j], spans[k], chains)
                    if tile.count > 0:
                        for lane in range(0, b.channels, job.width):
                            tile.b = b.packed + 8 * lane
                            tile.vectors = (min(job.width, b.channels - lane) + LANES - 1) // LANES
                            for row in range(0, rows, job.rows):
                                tile.rows = min(job.rows, rows - row)
                                for m in range(tile.rows):
                                    places[m] = a.packed + 8 * (lane if job.lanewise else row + m)
                                    sums[m] = to + (row + m) * job.line + 8 * lane
                                call_doubles(job.entry, address_of(tile))
                    to += job.tap
    tiles[0].count = chains.shape[0] + places.shape[0] + sums.shape[0]  # that keeps them


@jit
def _list_lines(job: GradientJob, plane: Span, line: Span, column: Span, chains: Rows[Chain]) -> int:
    """List the lines of pixels for which a tap is inside; give the number of elements."""
    count, next_a, next_b = 0, -1, -1
    if plane.count == 0 or line.count == 0 or column.count == 0:
        return 0
    for n in range(job.images):
        for d in range(plane.count):
            for h in range(line.count):
                a = plane.a + line.a + column.a + n * job.a_steps[0] + d * job.a_steps[1] + h * job.a_steps[2]
                b = plane.b + line.b + column.b + n * job.b_steps[0] + d * job.b_steps[1] + h * job.b_steps[2]
                if job.split == 0 and a == next_a and b == next_b:
                    chains[count - 1].steps += column.count
                else:
                    done = 0
                    while done < column.count:
                        # elements end at pixels that no cut of units or slabs moves
                        steps = column.count - done
                        if job.split != 0:
                            steps = min(steps, job.split - (column.at + done) % job.split)
                        chain = chains[count]
                        chain.a, chain.b, chain.steps = a + done * job.a_steps[3], b + done * job.b_steps[3], steps
                        count, done = count + 1, done + steps
                next_a, next_b = a + column.count * job.a_steps[3], b + column.count * job.b_steps[3]
    return count


@jit
def _joined(place: int, word: int, bias: int, low: bool) -> float:
    """Return a sum of three words and a bias, rounded, or what is `low`er than that."""
    high, more = _load_f64(place), _load_f64(bias)
    total = high + more
    if not abs(total) < np.inf:  # the other words are NaN
        return -0.0 if low else total  # type: ignore[no-any-return]
    of_more = total - high
    lost = (high - (total - of_more)) + (more - of_more)
    rest = _load_f64(place + word) + (_load_f64(place + 2 * word) + lost)
    result = total + rest
    if not low or not abs(result) < np.inf:
        return -0.0 if low else result  # type: ignore[no-any-return]
    of_rest = result - total
    return (total - (result - of_rest)) + (rest - of_rest)


@jit
def finish(
    kind: int, sums: int, word: int, low: bool, sizes: Vector, lanes: int, line: int, bias: int, group: int, to: int,
    steps: Vector, lane_step: int,
) -> None:  # fmt: skip
    """Write sums `[group][n][d][h][w][line / 8]` of `lanes`, plus a bias each, rounded once.

    Steps in `to` are bytes. The f64 at `bias` lead to those of the next group by `group` bytes. With a `word`, sums
    have three; `low` writes what rounding to f64 left of them.
    """
    size, spare, none = _size(kind), np.empty(_LINE, np.float64), np.full(_LINE, -0.0)
    for g in range(sizes[0]):
        more = bias + g * group
        for n in range(sizes[1]):
            for d in range(sizes[2]):
                for h in range(sizes[3]):
                    place = to + g * steps[0] + n * steps[1] + d * steps[2] + h * steps[3]
                    source = sums + (((g * sizes[1] + n) * sizes[2] + d) * sizes[3] + h) * sizes[4] * line
                    if word == 0 and lane_step == size:
                        for w in range(sizes[4]):
                            _round(kind, place + w * steps[4], source + w * line, more, lanes)
                        continue
                    for lane in range(lanes):
                        for start in range(0, sizes[4], _LINE):
                            count = min(_LINE, sizes[4] - start)
                            for w in range(count):
                                at = source + (start + w) * line + 8 * lane
                                if word == 0:
                                    spare[w] = _load_f64(at) + _load_f64(more + 8 * lane)
                                else:
                                    spare[w] = _joined(at, word, more + 8 * lane, low)
                            target = place + lane * lane_step + start * steps[4]
                            if steps[4] == size:
                                _round(kind, target, spare.ctypes.data, none.ctypes.data, count)
                            else:
                                for w in range(count):
                                    _round(kind, target + w * steps[4], spare.ctypes.data + 8 * w, none.ctypes.data, 1)
    spare[0] = none[0]  # that keeps them
