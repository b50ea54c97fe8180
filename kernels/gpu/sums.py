"""Sums of float64 in the order of the CPU's reference, with its bits, and small sums of float32.

They take every problem: any layout, groups, steps and pads. What they are told is a table of integers, in whose dtype
they compute addresses, and the spans of the taps, a row (low, high, start) for each tap of
each axis: narrow positions from low to high meet wide ones from start on, a stride apart (`kernels.problem.Dims`).

They also repair what the kernels on the matrix units leave: where a sum is not finite, those may have multiplied Inf by
a zero of the padding, or by one of the parts of a float32.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.gpu.numbers import add_exactly, is_not_finite, round_pair, rounded, widened

__all__ = ["add_bias", "sum_channels", "sum_dst", "sum_weights"]

# The table: images, groups, rows of dst, wide and narrow channels of a group; by axis narrow sizes, strides, taps; then
# in elements the steps of the wide tensor (image, each axis, channel) from 14 on, those of the narrow one from 19 on,
# those of the weights (group, wide and narrow channel, tap) from 24 on; and dst's sizes.


@triton.jit
def _meet(at: tl.tensor, row: tl.tensor, stride: tl.tensor, GATHERS: tl.constexpr) -> tl.tensor:
    """Return where positions of dst meet a tap of an axis, and the positions of src that they meet there."""
    low = tl.load(row)
    high = tl.load(row + 1)
    start = tl.load(row + 2)
    if GATHERS:
        return (at >= low) & (at < high), start + (at - low) * stride
    beyond = at - start
    found = low + beyond // stride
    return (beyond >= 0) & (beyond % stride == 0) & (found < high), found


@triton.jit
def sum_dst(
    src: tl.tensor, weights: tl.tensor, bias: tl.tensor, dst: tl.tensor,
    table: tl.tensor, spans: tl.tensor, flag: tl.tensor,
    SUM: tl.constexpr, EXACT: tl.constexpr, GATHERS: tl.constexpr, BIAS: tl.constexpr, REPAIR: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
) -> None:  # fmt: skip
    """Compute a block of dst, of some positions and some channels of all groups; `SUM` is the dtype of the sums.

    For each tap, the products of its channels are summed, and what that gives is added. With `EXACT` a sum is three
    float64. With `REPAIR` only values that are not finite are computed again, if `flag` says that there are any.
    """
    wanted = tl.load(flag) if REPAIR else 1
    if wanted != 0:
        groups = tl.load(table + 1)
        gathers_step = 14 if GATHERS else 19  # the places of src's steps; those of dst are the others
        other_step = 19 if GATHERS else 14
        inside = tl.load(table + (3 if GATHERS else 4))
        outside = tl.load(table + (4 if GATHERS else 3))
        channels = groups * outside
        blocks = tl.cdiv(channels, COLUMNS)
        block = tl.program_id(0).to(table.dtype.element_ty)
        m = block // blocks * ROWS + tl.arange(0, ROWS)
        o = block % blocks * COLUMNS + tl.arange(0, COLUMNS)
        size_h = tl.load(table + 29)
        size_w = tl.load(table + 30)
        w = m % size_w
        h = m // size_w % size_h
        rest = m // (size_w * size_h)
        d = rest % tl.load(table + 28)
        n = rest // tl.load(table + 28)
        real = (m < tl.load(table + 2))[:, None] & (o < channels)[None, :]
        at = n * tl.load(table + other_step) + d * tl.load(table + other_step + 1)
        at += h * tl.load(table + other_step + 2) + w * tl.load(table + other_step + 3)
        to = dst + at[:, None] + (o * tl.load(table + other_step + 4))[None, :]
        if REPAIR:
            real = real & is_not_finite(tl.load(to, real, 0.0).to(tl.float32))
        if tl.max(real.to(tl.int32)) != 0:
            kernel_d = tl.load(table + 11)
            kernel_h = tl.load(table + 12)
            kernel_w = tl.load(table + 13)
            channel = tl.load(table + gathers_step + 4)
            group = o // outside
            from_group = (group * inside * channel)[None, :]
            factors = weights + group * tl.load(table + 24)
            factors += o % outside * tl.load(table + (26 if GATHERS else 25))
            step = tl.load(table + (25 if GATHERS else 26))
            high = tl.zeros((ROWS, COLUMNS), SUM)
            middle = tl.zeros((ROWS, COLUMNS), SUM)
            low = tl.zeros((ROWS, COLUMNS), SUM)
            for tap in range(kernel_d * kernel_h * kernel_w):
                k_w = tap % kernel_w
                k_h = tap // kernel_w % kernel_h
                k_d = tap // (kernel_w * kernel_h)
                met_d, src_d = _meet(d, spans + 3 * k_d, tl.load(table + 8), GATHERS)
                met_h, src_h = _meet(h, spans + 3 * (kernel_d + k_h), tl.load(table + 9), GATHERS)
                met_w, src_w = _meet(w, spans + 3 * (kernel_d + kernel_h + k_w), tl.load(table + 10), GATHERS)
                met = (met_d & met_h & met_w)[:, None] & real
                at = n * tl.load(table + gathers_step) + src_d * tl.load(table + gathers_step + 1)
                at += src_h * tl.load(table + gathers_step + 2) + src_w * tl.load(table + gathers_step + 3)
                chain = tl.zeros((ROWS, COLUMNS), SUM)
                for c in range(inside):
                    a = widened(tl.load(src + at[:, None] + from_group + c * channel, met, 0.0), SUM)
                    b = tl.load(factors + c * step + tap * tl.load(table + 27), o < channels, 0.0)
                    b = tl.where(met, widened(b, SUM)[None, :], 0.0)  # in the padding nothing is multiplied
                    if EXACT:
                        high, middle, low = add_exactly(high, middle, low, a, b)
                    else:
                        chain += a * b
                high += chain
            offset = tl.zeros((COLUMNS,), SUM)
            if BIAS:
                offset = widened(tl.load(bias + o, o < channels, 0.0), SUM)
            total = round_pair(high, middle, low, offset[None, :]) if EXACT else high + offset[None, :]
            tl.store(to, rounded(total, dst.dtype.element_ty), real)


@triton.jit
def sum_weights(
    wide: tl.tensor, narrow: tl.tensor, out: tl.tensor, parts: tl.tensor,
    table: tl.tensor, spans: tl.tensor, chunks: tl.tensor,
    SUM: tl.constexpr, EXACT: tl.constexpr, ONES: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """Compute a block of diff_weights, from sums of chunks of the pixels, or from the tensors.

    With `PARTS` the sums of the chunks (chunks, groups, taps, narrow, wide channels) are added in order; what is not
    finite then, and without `PARTS` all, is summed over the pixels of an image, and then over images. With `ONES` the
    wide tensor has ones.
    """
    groups = tl.load(table + 1)
    many_wide = tl.load(table + 3)
    many_narrow = tl.load(table + 4)
    kernel_d = tl.load(table + 11)
    kernel_h = tl.load(table + 12)
    kernel_w = tl.load(table + 13)
    count = groups * kernel_d * kernel_h * kernel_w * many_narrow * many_wide
    e = tl.program_id(0).to(table.dtype.element_ty) * BLOCK + tl.arange(0, BLOCK)
    real = e < count
    c = e % many_wide
    i = e // many_wide % many_narrow
    tap = e // (many_wide * many_narrow)
    k_w = tap % kernel_w
    k_h = tap // kernel_w % kernel_h
    k_d = tap // (kernel_w * kernel_h) % kernel_d
    group = tap // (kernel_w * kernel_h * kernel_d)
    position = (k_d * kernel_h + k_h) * kernel_w + k_w
    to = out + group * tl.load(table + 24) + c * tl.load(table + 25) + i * tl.load(table + 26)
    to += position * tl.load(table + 27)
    if PARTS:
        total = tl.zeros((BLOCK,), tl.float32)
        part = parts + e
        for _ in range(chunks):
            total += tl.load(part, real, 0.0)
            part += count
        tl.store(to, rounded(total, out.dtype.element_ty), real)
        real = real & is_not_finite(total)
    if tl.max(real.to(tl.int32)) != 0:
        row_d = spans + 3 * k_d
        row_h = spans + 3 * (kernel_d + k_h)
        row_w = spans + 3 * (kernel_d + kernel_h + k_w)
        low_d = tl.load(row_d)
        low_h = tl.load(row_h)
        low_w = tl.load(row_w)
        high_d = tl.load(row_d + 1)
        high_h = tl.load(row_h + 1)
        high_w = tl.load(row_w + 1)
        start_d = tl.load(row_d + 2)
        start_h = tl.load(row_h + 2)
        start_w = tl.load(row_w + 2)
        narrow_h = tl.load(table + 6)
        narrow_w = tl.load(table + 7)
        left = wide + (group * many_wide + c) * tl.load(table + 18)
        right = narrow + (group * many_narrow + i) * tl.load(table + 23)
        high = tl.zeros((BLOCK,), SUM)
        middle = tl.zeros((BLOCK,), SUM)
        low = tl.zeros((BLOCK,), SUM)
        for n in range(tl.load(table)):
            chain = tl.zeros((BLOCK,), SUM)
            for pixel in range(tl.load(table + 5) * narrow_h * narrow_w):
                w = pixel % narrow_w
                h = pixel // narrow_w % narrow_h
                d = pixel // (narrow_w * narrow_h)
                met = (d >= low_d) & (d < high_d) & (h >= low_h) & (h < high_h) & (w >= low_w) & (w < high_w) & real
                at = n * tl.load(table + 19) + d * tl.load(table + 20)
                at += h * tl.load(table + 21) + w * tl.load(table + 22)
                b = widened(tl.load(right + at, met, 0.0), SUM)
                if ONES:
                    a = tl.where(met, 1.0, 0.0).to(SUM)
                else:
                    at = n * tl.load(table + 14) + (start_d + (d - low_d) * tl.load(table + 8)) * tl.load(table + 15)
                    at += (start_h + (h - low_h) * tl.load(table + 9)) * tl.load(table + 16)
                    at += (start_w + (w - low_w) * tl.load(table + 10)) * tl.load(table + 17)
                    a = widened(tl.load(left + at, met, 0.0), SUM)
                if EXACT:
                    high, middle, low = add_exactly(high, middle, low, a, b)
                else:
                    chain += a * b
            high += chain
        if EXACT:
            high = round_pair(high, middle, low, tl.zeros((BLOCK,), SUM))
        tl.store(to, rounded(high, out.dtype.element_ty), real)


@triton.jit
def sum_channels(
    wide: tl.tensor, narrow: tl.tensor, parts: tl.tensor, table: tl.tensor, spans: tl.tensor, chunk: tl.tensor,
    ONES: tl.constexpr, PIXELS: tl.constexpr, COLUMNS: tl.constexpr,
) -> None:  # fmt: skip
    """Sum products of depthwise weights, or with `ONES` a tensor's channels, over a chunk of the pixels, in float32.

    Each program has some channels of the narrow tensor, a tap and one of the wide channels of its group.
    """
    many_wide = tl.load(table + 3)
    many_narrow = tl.load(table + 4)
    channels = tl.load(table + 1) * many_narrow
    kernel_d = tl.load(table + 11)
    kernel_h = tl.load(table + 12)
    kernel_w = tl.load(table + 13)
    taps = kernel_d * kernel_h * kernel_w
    o = tl.program_id(0).to(table.dtype.element_ty) * COLUMNS + tl.arange(0, COLUMNS)
    c = tl.program_id(1) % many_wide
    tap = tl.program_id(1) // many_wide
    row_d = spans + 3 * (tap // (kernel_w * kernel_h))
    row_h = spans + 3 * (kernel_d + tap // kernel_w % kernel_h)
    row_w = spans + 3 * (kernel_d + kernel_h + tap % kernel_w)
    narrow_d = tl.load(table + 5)
    narrow_h = tl.load(table + 6)
    narrow_w = tl.load(table + 7)
    pixels = tl.load(table) * narrow_d * narrow_h * narrow_w
    from_wide = ((o // many_narrow * many_wide + c) * tl.load(table + 18))[None, :]
    from_narrow = (o * tl.load(table + 23))[None, :]
    total = tl.zeros((PIXELS, COLUMNS), tl.float32)
    begin = tl.program_id(2).to(table.dtype.element_ty) * chunk
    for first in range(begin, tl.minimum(begin + chunk, pixels), PIXELS):
        m = first + tl.arange(0, PIXELS)
        w = m % narrow_w
        h = m // narrow_w % narrow_h
        rest = m // (narrow_w * narrow_h)
        d = rest % narrow_d
        n = rest // narrow_d
        met_d, wide_d = _meet(d, row_d, tl.load(table + 8), True)
        met_h, wide_h = _meet(h, row_h, tl.load(table + 9), True)
        met_w, wide_w = _meet(w, row_w, tl.load(table + 10), True)
        met = (met_d & met_h & met_w & (m < pixels))[:, None] & (o < channels)[None, :]
        at = n * tl.load(table + 19) + d * tl.load(table + 20) + h * tl.load(table + 21) + w * tl.load(table + 22)
        b = tl.load(narrow + at[:, None] + from_narrow, met, 0.0).to(tl.float32)
        if ONES:
            total += b
        else:
            at = n * tl.load(table + 14) + wide_d * tl.load(table + 15)
            at += wide_h * tl.load(table + 16) + wide_w * tl.load(table + 17)
            total += tl.load(wide + at[:, None] + from_wide, met, 0.0).to(tl.float32) * b
    element = ((o // many_narrow * taps + tap) * many_narrow + o % many_narrow) * many_wide + c
    to = parts + tl.program_id(2).to(tl.int64) * (channels * taps * many_wide) + element
    tl.store(to, tl.sum(total, 0), o < channels)


@triton.jit
def add_bias(src: tl.tensor, bias: tl.tensor, dst: tl.tensor, table: tl.tensor, BLOCK: tl.constexpr) -> None:
    """Compute BiasAdd: the sum of two values, rounded once."""
    channels = tl.load(table + 3) * tl.load(table + 1)
    count = tl.load(table + 2) * channels
    e = tl.program_id(0).to(table.dtype.element_ty) * BLOCK + tl.arange(0, BLOCK)
    real = e < count
    a = widened(tl.load(src + e, real, 0.0), tl.float64)
    b = widened(tl.load(bias + e // tl.load(table + 18) % channels, real, 0.0), tl.float64)
    tl.store(dst + e, rounded(a + b, dst.dtype.element_ty), real)
