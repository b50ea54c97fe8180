"""Convolutions as products of blocks on the matrix units, from operands in one layout.

Data tensors are (n, d, h, w, groups, channels of a group), weights (groups, taps, channels of dst, channels of src) for
dst. A float32 tensor is three of bfloat16, whose sum it is (`split`), one after another in memory. Only sums of float32
leave the matrix units; those that are not finite are computed again (`kernels.gpu.sums`).
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.gpu.numbers import divide, is_not_finite, multiply, rounded

__all__ = ["multiply_boxes", "multiply_dst", "multiply_weights", "split"]

# A row of the table of `multiply_dst` has 12 numbers for each axis: positions of a phase of dst, the first, where src
# begins, the phase's taps, the first, the steps to the next in src and in the weights; then, the same for all phases,
# src's size, its step, the step in dst, dst's size, all taps. The last, 37th, is the positions in all images.
# The table of `multiply_weights` has, each by axis, wide sizes, strides, dilations, pads, taps; then narrow sizes, each
# with factor and shift to divide by it (`divide`), pixels, and those of a chunk.


@triton.jit
def split(values: tl.tensor, parts: tl.tensor, count: tl.tensor, BLOCK: tl.constexpr) -> None:
    """Split float32 values into three bfloat16 whose sum they are, but for what is below 2**-133."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    real = i < count
    value = tl.load(values + i, real, 0.0)
    bits = value.to(tl.int32, bitcast=True)
    cut = (bits & -65536).to(tl.float32, bitcast=True)
    # To the nearest would be Inf just below the largest float32: there the first part is cut.
    high = tl.where(tl.abs(value) < 3.38e38, value.to(tl.bfloat16).to(tl.float32), cut)
    rest = tl.where(tl.abs(value) <= 3.4028235e38, value - high, 0.0)
    middle = rest.to(tl.bfloat16)
    low = (rest - middle.to(tl.float32)).to(tl.bfloat16)
    # The payload of a NaN may be in the bits that are cut.
    high = tl.where(value != value, float("nan"), high)
    to = parts + i
    tl.store(to, high.to(tl.bfloat16), real)
    tl.store(to + count, middle, real)
    tl.store(to + count + count, low, real)  # twice the count may not fit into its 32 bits


@triton.jit
def _parts(at: tl.tensor, part: tl.tensor, real: tl.tensor, PARTS: tl.constexpr) -> tl.tensor:
    """Return the tiles of three parts, `part` elements apart; of one part, its tile three times."""
    first = tl.load(at, real, 0.0)
    second = first
    third = first
    if PARTS == 3:
        second = tl.load(at + part, real, 0.0)
        third = tl.load(at + part + part, real, 0.0)  # as in `split`
    return first, second, third


@triton.jit
def _positions(row: tl.tensor, m: tl.tensor, AGAIN: tl.constexpr) -> tl.tensor:
    """Return the image of each row of a block, and its position along each axis of its phase.

    With `AGAIN` the table is read again: what is computed of it takes no registers meanwhile.
    """
    count_d = tl.load(row, volatile=AGAIN)
    count_h = tl.load(row + 12, volatile=AGAIN)
    count_w = tl.load(row + 24, volatile=AGAIN)
    rest = m // (count_w * count_h)
    return rest // count_d, rest % count_d, m // count_w % count_h, m % count_w


@triton.jit
def _taps(row: tl.tensor) -> tl.tensor:
    """Return of an axis of a phase its taps, the first, the steps to the next in src and the weights, src's size."""
    return tl.load(row + 3), tl.load(row + 4), tl.load(row + 5), tl.load(row + 6), tl.load(row + 7)


@triton.jit
def _finish(
    total: tl.tensor, written: tl.tuple, row: tl.tensor, outside: tl.tensor, place: tl.tuple, there: tl.tensor,
    o: tl.tensor, BIAS: tl.constexpr, FIRST: tl.constexpr,
) -> None:  # fmt: skip
    """Add the bias, store the block's rows that are there, and set the flag if not all of them are finite.

    `written` is (bias, dst, flag), `place` the image of each row and its position along (d, h, w) of its phase.
    """
    bias, dst, flag = written
    n, d, h, w = place
    group = tl.program_id(2).to(tl.int64)
    groups = tl.num_programs(2)
    if BIAS:
        total += tl.load(bias + group * outside + o, o < outside, 0.0).to(tl.float32)[None, :]
    dst_d = tl.load(row + 10)
    dst_h = tl.load(row + 22)
    dst_w = tl.load(row + 34)
    real = there[:, None] & (o < outside)[None, :]
    at = (n.to(tl.int64) * dst_d + tl.load(row + 1) + d * tl.load(row + 9)) * dst_h
    at = (at + tl.load(row + 13) + h * tl.load(row + 21)) * dst_w + tl.load(row + 25) + w * tl.load(row + 33)
    if FIRST:
        size = dst_d.to(tl.int64) * dst_h * dst_w
        at = at + n.to(tl.int64) * size * (groups * outside - 1)
        to = dst + at[:, None] + ((group * outside + o) * size)[None, :]
    else:
        to = dst + (at * (groups * outside) + group * outside)[:, None] + o[None, :]
    tl.store(to, rounded(total, dst.dtype.element_ty), real)
    if tl.max(tl.max((is_not_finite(total) & real).to(tl.int32), 1), 0) != 0:
        tl.store(flag, 1)


@triton.jit
def multiply_dst(
    src: tl.tensor, weights: tl.tensor, bias: tl.tensor, dst: tl.tensor, flag: tl.tensor, table: tl.tensor,
    src_part: tl.tensor, weights_part: tl.tensor,
    inside: tl.tensor, outside: tl.tensor,
    PARTS: tl.constexpr, FLAT: tl.constexpr, BIAS: tl.constexpr, FIRST: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
) -> None:  # fmt: skip
    """Compute a block of dst: positions of a phase, whose taps are the same, by channels of a group.

    Steps of the sum are blocks of `DEPTH` src channels of a tap; with `FLAT`, a power of two that holds the `inside`
    channels of a group, of taps and channels together. `FIRST` says that channels come first in dst.
    """
    row = table + tl.program_id(1) * 37
    group = tl.program_id(2).to(tl.int64)
    groups = tl.num_programs(2)
    blocks = tl.cdiv(outside, COLUMNS)
    o = tl.program_id(0) % blocks * COLUMNS + tl.arange(0, COLUMNS)
    m0 = tl.program_id(0) // blocks * ROWS
    rows = tl.load(row + 36)
    if m0 < rows:
        m = m0 + tl.arange(0, ROWS)
        n, d, h, w = _positions(row, m, False)
        # positions of src; those of rows that are not there are outside
        at_d = tl.where(m < rows, d * tl.load(row + 8) + tl.load(row + 2), -(1 << 29))
        at_h = h * tl.load(row + 20) + tl.load(row + 14)
        at_w = w * tl.load(row + 32) + tl.load(row + 26)
        taps_d, first_d, src_d, tap_d, size_d = _taps(row)
        taps_h, first_h, src_h, tap_h, size_h = _taps(row + 12)
        taps_w, first_w, src_w, tap_w, size_w = _taps(row + 24)
        kernel_h = tl.load(row + 23)
        kernel_w = tl.load(row + 35)
        channels = groups * inside
        start = ((n.to(tl.int64) * size_d + at_d) * size_h + at_h) * size_w + at_w
        start = (src + start * channels + group * inside)[:, None]
        taps = weights + group * (tl.load(row + 11) * kernel_h * kernel_w * outside) * inside
        taps = taps + (o * inside)[:, None]
        k = tl.arange(0, DEPTH)[None, :]
        depth = tl.cdiv(inside, DEPTH)
        if FLAT:
            steps = tl.cdiv(taps_d * taps_h * taps_w * FLAT, DEPTH)
        else:
            steps = taps_d * taps_h * taps_w * depth
        total = tl.zeros((ROWS, COLUMNS), tl.float32)
        for step in range(steps):
            if FLAT:
                tap = (step * DEPTH + k) // FLAT
                c = (step * DEPTH + k) % FLAT
            else:
                tap = step // depth
                c = step % depth * DEPTH + k
            t_w = tap % taps_w
            t_h = tap // taps_w % taps_h
            t_d = tap // (taps_w * taps_h)
            to_d = t_d * src_d
            to_h = t_h * src_h
            to_w = t_w * src_w
            real = c < inside
            if FLAT:
                real = real & (t_d < taps_d)
            met = (at_d[:, None] + to_d >= 0) & (at_d[:, None] + to_d < size_d)
            met &= (at_h[:, None] + to_h >= 0) & (at_h[:, None] + to_h < size_h)
            met &= (at_w[:, None] + to_w >= 0) & (at_w[:, None] + to_w < size_w)
            met = met & real
            a = start + ((to_d.to(tl.int64) * size_h + to_h) * size_w + to_w) * channels + c
            position = (first_d + t_d * tap_d) * kernel_h + first_h + t_h * tap_h
            position = position * kernel_w + first_w + t_w * tap_w
            b = taps + position * outside * inside + c
            there = real & (o < outside)[:, None]
            a0, a1, a2 = _parts(a, src_part, met, PARTS)
            b0, b1, b2 = _parts(b, weights_part, there, PARTS)
            total = multiply(total, a0, a1, a2, b0.T, b1.T, b2.T, PARTS)
        place = _positions(row, m, True)
        _finish(total, (bias, dst, flag), row, outside, place, m < rows, o, BIAS, FIRST)


@triton.jit
def multiply_boxes(
    src: tl.tensor, weights: tl.tensor, bias: tl.tensor, dst: tl.tensor, flag: tl.tensor, table: tl.tensor,
    images: tl.tensor, inside: tl.tensor, outside: tl.tensor,
    PARTS: tl.constexpr, BIAS: tl.constexpr, FIRST: tl.constexpr, N: tl.constexpr, D: tl.constexpr, H: tl.constexpr,
    W: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
) -> None:  # fmt: skip
    """Compute what `multiply_dst` does, with bulk copies: a block is a box of positions, which read src at stride 1.

    `src` describes (parts * n, d, h, w, channels), with zeros around, `weights` (parts * groups * taps * channels of
    dst, channels of src); `DEPTH` divides `inside`. The product is transposed: Triton leaves a box in shared memory, as
    the matrix units take it, only as the right factor.
    """
    ROWS: tl.constexpr = N * D * H * W
    row = table + tl.program_id(1) * 37
    group = tl.program_id(2)
    many_d = tl.load(row)
    many_h = tl.load(row + 12)
    many_w = tl.load(row + 24)
    blocks = tl.cdiv(outside, COLUMNS)
    o0 = tl.program_id(0) % blocks * COLUMNS
    rest = tl.program_id(0) // blocks
    w0 = rest % tl.cdiv(many_w, W) * W
    rest = rest // tl.cdiv(many_w, W)
    h0 = rest % tl.cdiv(many_h, H) * H
    rest = rest // tl.cdiv(many_h, H)
    d0 = rest % tl.cdiv(many_d, D) * D
    n0 = rest // tl.cdiv(many_d, D) * N
    if n0 < images:
        taps_d, first_d, src_d, tap_d, _ = _taps(row)
        taps_h, first_h, src_h, tap_h, _ = _taps(row + 12)
        taps_w, first_w, src_w, tap_w, _ = _taps(row + 24)
        at_d = d0 + tl.load(row + 2)
        at_h = h0 + tl.load(row + 14)
        at_w = w0 + tl.load(row + 26)
        kernel_h = tl.load(row + 23)
        kernel_w = tl.load(row + 35)
        taps = tl.load(row + 11) * kernel_h * kernel_w
        part = tl.num_programs(2) * taps * outside
        total = tl.zeros((COLUMNS, ROWS), tl.float32)
        for step in range(taps_d * taps_h * taps_w * (inside // DEPTH)):
            tap = step // (inside // DEPTH)
            c = step % (inside // DEPTH) * DEPTH
            t_w = tap % taps_w
            t_h = tap // taps_w % taps_h
            t_d = tap // (taps_w * taps_h)
            position = (first_d + t_d * tap_d) * kernel_h + first_h + t_h * tap_h
            line = (group * taps + position * kernel_w + first_w + t_w * tap_w) * outside + o0
            at = group * inside + c
            d = at_d + t_d * src_d
            h = at_h + t_h * src_h
            w = at_w + t_w * src_w
            a0 = weights.load([line, c])
            b0 = src.load([n0, d, h, w, at]).reshape(ROWS, DEPTH).T
            a1 = a0
            a2 = a0
            b1 = b0
            b2 = b0
            if PARTS == 3:
                a1 = weights.load([part + line, c])
                b1 = src.load([images + n0, d, h, w, at]).reshape(ROWS, DEPTH).T
                a2 = weights.load([2 * part + line, c])
                b2 = src.load([2 * images + n0, d, h, w, at]).reshape(ROWS, DEPTH).T
            total = multiply(total, a0, a1, a2, b0, b1, b2, PARTS)
        m = tl.arange(0, ROWS)
        n = n0 + m // (W * H * D)
        d = d0 + m // (W * H) % D
        h = h0 + m // W % H
        w = w0 + m % W
        there = (n < images) & (d < many_d) & (h < many_h) & (w < many_w)
        o = o0 + tl.arange(0, COLUMNS)
        _finish(total.T, (bias, dst, flag), row, outside, (n, d, h, w), there, o, BIAS, FIRST)


@triton.jit
def multiply_weights(
    wide: tl.tensor, narrow: tl.tensor, parts: tl.tensor,
    table: tl.tensor, wide_part: tl.tensor, narrow_part: tl.tensor,
    many_wide: tl.tensor, many_narrow: tl.tensor,
    PARTS: tl.constexpr, FLAT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
) -> None:  # fmt: skip
    """Sum a chunk of the pixels of diff_weights: narrow channels of a group by wide channels of a tap, in float32.

    With `FLAT`, a power of two that holds the wide channels of a group, columns are taps and channels together.
    """
    size_d = tl.load(table)
    size_h = tl.load(table + 1)
    size_w = tl.load(table + 2)
    stride_d = tl.load(table + 3)
    stride_h = tl.load(table + 4)
    stride_w = tl.load(table + 5)
    kernel_h = tl.load(table + 13)
    kernel_w = tl.load(table + 14)
    taps = tl.load(table + 12) * kernel_h * kernel_w
    narrow_d = tl.load(table + 15)
    factor_d = tl.load(table + 16)
    digits_d = tl.load(table + 17)
    narrow_h = tl.load(table + 18)
    factor_h = tl.load(table + 19)
    digits_h = tl.load(table + 20)
    narrow_w = tl.load(table + 21)
    factor_w = tl.load(table + 22)
    digits_w = tl.load(table + 23)
    pixels = tl.load(table + 24)
    chunk = tl.load(table + 25)
    group = tl.program_id(2).to(tl.int64)
    groups = tl.num_programs(2)
    blocks = tl.cdiv(many_narrow, ROWS)
    i = tl.program_id(0) % blocks * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(0) // blocks
    j = tl.arange(0, COLUMNS)
    if FLAT:
        tap = (column * COLUMNS + j) // FLAT
        c = (column * COLUMNS + j) % FLAT
        to_d = (tap // (kernel_w * kernel_h) * tl.load(table + 6) - tl.load(table + 9))[None, :]
        to_h = (tap // kernel_w % kernel_h * tl.load(table + 7) - tl.load(table + 10))[None, :]
        to_w = (tap % kernel_w * tl.load(table + 8) - tl.load(table + 11))[None, :]
        there = (c < many_wide) & (tap < taps)
    else:
        across = tl.cdiv(many_wide, COLUMNS)
        tap = column // across
        c = column % across * COLUMNS + j
        to_d = tap // (kernel_w * kernel_h) * tl.load(table + 6) - tl.load(table + 9)
        to_h = tap // kernel_w % kernel_h * tl.load(table + 7) - tl.load(table + 10)
        to_w = tap % kernel_w * tl.load(table + 8) - tl.load(table + 11)
        there = c < many_wide
    k = tl.arange(0, DEPTH)
    channels = groups * many_wide
    from_wide = (to_d.to(tl.int64) * size_h + to_h) * size_w + to_w
    from_wide = from_wide * channels + group * many_wide + c[None, :]
    from_narrow = group * many_narrow + i[None, :]
    begin = tl.program_id(1) * chunk
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for first in range(begin, tl.minimum(begin + chunk, pixels), DEPTH):
        m = first + k
        lines = divide(m, factor_w, digits_w)
        planes = divide(lines, factor_h, digits_h)
        n = divide(planes, factor_d, digits_d)
        at_w = ((m - lines * narrow_w) * stride_w)[:, None]
        at_h = ((lines - planes * narrow_h) * stride_h)[:, None]
        at_d = ((planes - n * narrow_d) * stride_d)[:, None]
        met = (at_d + to_d >= 0) & (at_d + to_d < size_d) & (at_h + to_h >= 0) & (at_h + to_h < size_h)
        met &= (at_w + to_w >= 0) & (at_w + to_w < size_w)
        met = met & (m < pixels)[:, None] & there[None, :]
        at = ((n.to(tl.int64)[:, None] * size_d + at_d) * size_h + at_h) * size_w + at_w
        b = wide + at * channels + from_wide
        real = (m < pixels)[:, None] & (i < many_narrow)[None, :]
        a = narrow + m.to(tl.int64)[:, None] * (groups * many_narrow) + from_narrow
        a0, a1, a2 = _parts(a, narrow_part, real, PARTS)
        b0, b1, b2 = _parts(b, wide_part, met, PARTS)
        total = multiply(total, a0.T, a1.T, a2.T, b0, b1, b2, PARTS)
    to = parts + ((tl.program_id(1).to(tl.int64) * groups + group) * taps * many_narrow) * many_wide
    to = to + ((tap * many_narrow) * many_wide + c)[None, :] + (i * many_wide)[:, None]
    tl.store(to, total, (i < many_narrow)[:, None] & there[None, :])
