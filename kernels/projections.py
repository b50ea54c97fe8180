"""Random projections: lines of a tensor added up with signs, in float64, in one pass over its memory.

A line is what a tensor has of one channel or image. Each sum is one chain over its lines, and f32, f16 and bf16 times a
sign are exact in float64, as are their squares; so all bits are the same on every target.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt
from llvmlite import ir

from kernels.arena import address, arena_address
from kernels.dtypes import DTYPES, KINDS
from kernels.emit import simd
from kernels.emit.compiler import Doubles, Record, Records, Rows, Vector, emitted, jit, numbers, row_of
from kernels.emit.intrinsics import F32, address_of, by_kind, fill_zero, load_wide, size_of, stored_size
from kernels.pack.panels import transpose_run
from kernels.plan import Storage
from kernels.problem import Dims
from kernels.reference import widen
from kernels.target import target

__all__ = ["add_products", "add_signed", "meetings"]

Array = npt.NDArray[np.float64]

_ROWS = 4
"""Sums that are formed side by side: a value is read from memory once for so many of them."""

_WIDTH = 2 * target().lanes if target().registers == 32 else 8
"""Positions of these that are in registers."""

_LINES = 8
"""Lines that are read at the same time: more streams than that are not prefetched."""

_STRETCH = 1024
"""Positions whose sums stay in the second cache."""

_ACROSS = 64
"""Positions of adjacent channels that are transposed at a time."""

_F64 = ir.DoubleType()
_ADJACENT = (16, 4, 1)
_STRIDED = (4, 1)
"""Lanes of the sums of a tap: the same on every target, as their order is."""

_TAP_SUMS = sum(_ADJACENT)


class Lines(Record):
    """Lines of so many groups, `count` of each, with so many values.

    Either lines are `step` bytes apart, from `source` on, and their values adjacent; or positions are `step` bytes
    apart, the values of all lines there are adjacent, and lines of f32 are made of them in a `panel`.
    """

    source: int
    step: int
    groups: int
    count: int
    values: int
    panel: int


class Signed(Record):
    """Float64 sums to add to: of `rows` projections, which are `step` bytes apart, each group of them `group` bytes.

    For each group and each four rows there are the `signs` of the first line, of the second and so on. `squares` and
    `powers` are addresses, or 0: sums of squared values, and of squared powers of two at or below each value, which are
    2 to the power of `least` or more. `fresh` sums are zero
    before, whatever there is.
    """

    signs: int
    rows: int
    sums: int
    step: int
    group: int
    squares: int
    powers: int
    least: int
    fresh: bool


class Planes(Record):
    """Planes of float64: so many of each of two tensors, for each of the `groups` of a projection.

    `sizes` are the values of a plane and of its first two axes; `strides` the wide positions from one narrow position
    to the next.
    """

    wide: int
    narrow: int
    projections: int
    groups: int
    wide_sizes: Vector = numbers(3)
    narrow_sizes: Vector = numbers(3)
    strides: Vector = numbers(3)


class Meeting(Record):
    """Where narrow and wide planes meet in a tap: the first position of each, and the number of them, by axis."""

    narrow: Vector = numbers(3)
    wide: Vector = numbers(3)
    counts: Vector = numbers(3)


def _over_lines(
    rows: int, terms: Callable[..., list[Any]], builder: Any, kind: str, sums: Any, sum_step: Any, *values: Any
) -> None:
    """Add to `rows` rows of `count` sums the terms of each of `lines` lines.

    Arguments: sums, their byte step, source, its byte step, what `terms` gets (which moves on with the lines if it is
    the address of signs), lines, count.
    """
    source, step, more, lines, count = values

    def positions(width: int, origins: list[Any]) -> None:
        lane, (to, first) = ir.VectorType(_F64, width), origins
        places = [simd.nth(builder, to, sum_step, row) for row in range(rows)]

        def line(carried: list[Any]) -> list[Any]:
            place, other, *before = carried
            value = builder.fpext(load_wide(builder, place, kind, width), lane)
            after = terms(builder, value, other, before)
            following = builder.add(other, simd.I64(8 * rows)) if rows > 1 else other
            return [builder.add(place, step), following, *after]

        start = [simd.load(builder, place, lane, 8) for place in places]
        _, _, *found = simd.loop(builder, lines, [first, more, *start], line, "line")
        for place, value in zip(places, found, strict=True):
            simd.store(builder, value, place, 8)

    simd.each_run(builder, count, (sums, source), (8, size_of(kind)), (_WIDTH, 4, 1), positions)


def _signed(builder: Any, value: Any, signs: Any, sums: list[Any]) -> list[Any]:
    found = []
    for row, total in enumerate(sums):
        sign = simd.load(builder, builder.add(signs, simd.I64(8 * row)), _F64, 8)
        found.append(simd.multiply_add(builder, simd.splat(builder, sign, value.type.count), value, total))
    return found


def _squared(builder: Any, value: Any, _: Any, sums: list[Any]) -> list[Any]:
    return [simd.multiply_add(builder, value, value, sums[0])]


def _powers(builder: Any, value: Any, least: Any, sums: list[Any]) -> list[Any]:
    """Add squares of powers of two: a float64 without its sign and digits is one."""
    count = value.type.count
    least = simd.splat(builder, builder.shl(builder.add(least, simd.I64(1023)), simd.I64(52)), count)
    most, exponent = (simd.constant(least.type, bits << 52) for bits in (1023 + 127, 0x7FF))
    bits = builder.and_(builder.bitcast(value, least.type), exponent)
    bits = builder.select(builder.icmp_signed(">", bits, least), bits, least)
    bits = builder.select(builder.icmp_signed("<", bits, most), bits, most)
    power = builder.bitcast(bits, value.type)
    return [simd.multiply_add(builder, power, power, sums[0])]


def _add_dot(lanes: tuple[int, ...], builder: Any, sums: Any, one: Any, step: Any, other: Any, count: Any) -> None:
    """Add `count` products of float64 to the sums of a tap, each in its lane.

    Values of one factor are `step` bytes apart, unless `lanes` has whole vectors of them. Both factors are sums, whose
    products are not exact: they are rounded before they are added, on every target.
    """
    kinds = [ir.VectorType(_F64, width) for width in lanes]
    places = [builder.add(sums, simd.I64(8 * sum(lanes[:at]))) for at in range(len(lanes))]
    before = [simd.load(builder, place, kind, 8) for place, kind in zip(places, kinds, strict=True)]

    def positions(width: int) -> Callable[[list[Any]], list[Any]]:
        at = lanes.index(width)

        def some(carried: list[Any]) -> list[Any]:
            one, other, *found = carried
            if lanes is _ADJACENT:
                factor, following = simd.load(builder, one, kinds[at], 8), builder.add(one, simd.I64(8 * width))
            else:
                factor, following = ir.Constant(kinds[at], ir.Undefined), one
                for lane in range(width):
                    value = simd.load(builder, following, _F64, 8)
                    factor = builder.insert_element(factor, value, ir.IntType(32)(lane))
                    following = builder.add(following, step)
            product = builder.fmul(factor, simd.load(builder, other, kinds[at], 8))
            found[at] = builder.fadd(found[at], product)
            return [following, builder.add(other, simd.I64(8 * width)), *found]

        return some

    _, _, *found = simd.runs(builder, count, [one, other, *before], lanes, positions)
    for value, place in zip(found, places, strict=True):
        simd.store(builder, value, place, 8)


_add_rows = by_kind(partial(_over_lines, _ROWS, _signed))
_add_squares, _add_powers = (by_kind(partial(_over_lines, 1, terms)) for terms in (_squared, _powers))
_add_adjacent, _add_strided = emitted(partial(_add_dot, _ADJACENT)), emitted(partial(_add_dot, _STRIDED))


@jit
def _add_group(kind: int, place: int, step: int, lines: int, values: int, group: int, signed: Signed, at: int) -> None:
    """Add the lines of a group, whose values are adjacent, to its sums from byte `at` on."""
    size = stored_size(kind)
    first = group * signed.group + at
    for x in range(0, values, _STRETCH):
        count, here = min(_STRETCH, values - x), first + 8 * x
        if signed.fresh:
            for row in range(signed.rows):
                fill_zero(signed.sums + row * signed.step + here, 8 * count)
            if signed.squares:
                fill_zero(signed.squares + here, 8 * count)
            if signed.powers:
                fill_zero(signed.powers + here, 8 * count)
        for line in range(0, lines, _LINES):
            many, source = min(_LINES, lines - line), place + line * step + x * size
            for row in range(0, signed.rows, _ROWS):
                signs = signed.signs + 8 * ((group * signed.rows + row) * lines + _ROWS * line)
                _add_rows(kind, signed.sums + row * signed.step + here, signed.step, source, step, signs, many, count)
            if signed.squares:
                _add_squares(kind, signed.squares + here, 0, source, step, 0, many, count)
            if signed.powers:
                _add_powers(kind, signed.powers + here, 0, source, step, signed.least, many, count)


@jit
def add_lines(kind: int, tables: Rows[Lines], sums: Rows[Signed]) -> None:
    """Add all lines of a tensor."""
    lines, signed = tables[0], sums[0]
    if not lines.panel:
        for group in range(lines.groups):
            place = lines.source + group * lines.count * lines.step
            _add_group(kind, place, lines.step, lines.count, lines.values, group, signed, 0)
        return
    step = 4 * _ACROSS
    for x in range(0, lines.values, _ACROSS):
        some, place = min(_ACROSS, lines.values - x), lines.source + x * lines.step
        transpose_run(kind, (some + 7) // 8 * 8, some, lines.panel, step, place, lines.step, lines.groups * lines.count)
        for group in range(lines.groups):
            _add_group(F32, lines.panel + group * lines.count * step, step, lines.count, some, group, signed, 8 * x)


@jit
def add_planes(tables: Rows[Planes], meetings: Rows[Meeting], first: int, sums: Doubles) -> None:
    """Add to the sums of taps, from the `first` one on, the products of the planes' values that meet in them.

    `sums` has a row of these taps for each projection.
    """
    planes, room, taps = tables[0], np.zeros(_TAP_SUMS), meetings.shape[0]
    a_sizes, b_sizes, strides = planes.wide_sizes, planes.narrow_sizes, planes.strides
    every = len(sums) // planes.projections
    for projection in range(planes.projections):
        for tap in range(taps):
            meet = meetings[tap]
            room[:] = 0.0
            for plane in range(projection * planes.groups, (projection + 1) * planes.groups):
                for z in range(meet.counts[0]):
                    a_layer = plane * a_sizes[0] + (meet.wide[0] + z * strides[0]) * a_sizes[1] + meet.wide[2]
                    b_layer = plane * b_sizes[0] + (meet.narrow[0] + z) * b_sizes[1] + meet.narrow[2]
                    for y in range(meet.counts[1]):
                        a = planes.wide + 8 * (a_layer + (meet.wide[1] + y * strides[1]) * a_sizes[2])
                        b = planes.narrow + 8 * (b_layer + (meet.narrow[1] + y) * b_sizes[2])
                        if strides[2] == 1:
                            _add_adjacent(address_of(room), a, 8, b, meet.counts[2])
                        else:
                            _add_strided(address_of(room), a, 8 * strides[2], b, meet.counts[2])
            total = 0.0
            for lane in range(_TAP_SUMS):
                total += room[lane]
            sums[projection * every + first + tap] += total


def add_signed(
    tensor: Storage, dtype: str, signs: Array, sums: Array, squares: Array | None = None, powers: Array | None = None,
    *, fresh: bool = False,
) -> None:  # fmt: skip
    """Add to `sums`, (projections, groups, values), the lines of a tensor, (groups * lines, values), with `signs`.

    `signs` are (projections, groups, lines), of a multiple of 4 projections. `squares` and `powers`, (groups, values),
    get the squares of the values, and those of the powers of two at or below them, of at least 2 to the power of
    `DType.least`. All these are written, not added to, if they are `fresh`. The tensor may be PyTorch's, on a GPU.
    """
    if not isinstance(tensor, np.ndarray):
        from kernels.gpu.projections import add_signed as add_on_gpu  # loads PyTorch

        add_on_gpu(tensor, DTYPES[dtype].least, signs, sums, squares, powers, fresh=fresh)
        return
    rows, groups, lines = signs.shape
    values = tensor.shape[1]
    if not target().compiles:
        for each in (sums, squares, powers) if fresh else ():
            if each is not None:
                each[...] = 0
        _add_signed(widen(tensor, dtype).reshape(groups, lines, values), dtype, signs, sums, squares, powers)
        return
    adjacent = tensor.strides[1] == tensor.itemsize or values == 1
    panel = 0 if adjacent else arena_address("transposed", groups * lines * _ACROSS)
    by_four = np.ascontiguousarray(signs.reshape(-1, 4, groups, lines).transpose(2, 0, 3, 1))
    given = row_of(
        Lines, source=address(tensor), step=tensor.strides[0 if adjacent else 1], groups=groups, count=lines,
        values=values, panel=panel,
    )  # fmt: skip
    to = row_of(
        Signed, signs=address(by_four), rows=rows, sums=address(sums), step=sums.strides[0], group=sums.strides[1],
        squares=0 if squares is None else address(squares), powers=0 if powers is None else address(powers),
        least=DTYPES[dtype].least, fresh=fresh,
    )  # fmt: skip
    add_lines(KINDS[dtype], given, to)


def _add_signed(
    values: Array, dtype: str, signs: Array, sums: Array, squares: Array | None, powers: Array | None
) -> None:
    """Do the same with NumPy."""
    for line in range(values.shape[1]):
        some = values[:, line]
        with np.errstate(invalid="ignore", over="ignore"):
            sums += signs[:, :, line, None] * some
            if squares is not None:
                squares += some * some
        if powers is not None:
            exponents = np.clip((some.view(np.int64) >> 52 & 0x7FF) - 1023, DTYPES[dtype].least, 127)
            powers += np.square(np.ldexp(1.0, exponents.astype(np.intc)))


def meetings(dims: Dims) -> Records:
    """Return where the pixels meet in each tap."""
    found = np.zeros(dims.kernel, Meeting.dtype)
    for axis in range(3):
        low, high = dims.tap_ranges(axis).T
        start = dims.wide_at(axis, np.arange(dims.kernel[axis]), low)
        shape = [-1 if at == axis else 1 for at in range(3)]
        for name, values in (("narrow", low), ("wide", np.where(high > low, start, 0)), ("counts", high - low)):
            found[name][..., axis] = values.reshape(shape)
    return found.reshape(-1)


def add_products(dims: Dims, wide: Array, narrow: Array, meet: Records, first: int, sums: Array) -> None:
    """Add to `sums`, (projections, taps), what the planes of each projection add to taps from the `first` one on.

    The planes are (projections, groups, pixels), and `meet` says where their pixels meet in these taps.
    """
    strides = tuple([min(stride, max(dims.wide)) for stride in dims.strides])
    if not target().compiles:
        a, b = wide.reshape(*wide.shape[:2], *dims.wide), narrow.reshape(*narrow.shape[:2], *dims.narrow)
        for tap, each in enumerate(meet):
            at_wide = [
                slice(at, at + (count - 1) * stride + 1 if count else at, stride)
                for at, count, stride in zip(each["wide"], each["counts"], strides, strict=True)
            ]
            at_narrow = [slice(at, at + count) for at, count in zip(each["narrow"], each["counts"], strict=True)]
            with np.errstate(invalid="ignore", over="ignore"):
                sums[:, first + tap] += np.einsum("pgzyx,pgzyx->p", a[:, :, *at_wide], b[:, :, *at_narrow])
        return
    table = row_of(
        Planes, wide=address(wide), narrow=address(narrow), projections=len(wide), groups=wide.shape[1],
        wide_sizes=(prod(dims.wide), prod(dims.wide[1:]), dims.wide[2]),
        narrow_sizes=(prod(dims.narrow), prod(dims.narrow[1:]), dims.narrow[2]), strides=strides,
    )  # fmt: skip
    add_planes(table, meet, first, sums.reshape(-1))
