"""Which taps meet which dst positions of a forward operation, axis by axis.

ConvTranspose: a dst position ``u`` meets tap ``k`` at src position ``x = (u + pad - k * dilation) / stride`` where that
is an integer and inside. The taps of one position are an arithmetic progression, and so are the positions, one stride
apart, that share them: a class. Convolution: a dst position ``x`` meets tap ``k`` at src position
``x * stride + k * dilation - pad`` where that is inside; a class is a run of adjacent positions. Taps are numbered so
that src positions rise with them.
"""

from __future__ import annotations

from itertools import product
from math import gcd, prod
from typing import Literal

import numpy as np
import numpy.typing as npt

from kernels.emit.compiler import Records
from kernels.forward.records import Class
from kernels.problem import Dims, wrapped

__all__ = ["Ints", "Tables", "class_tables", "disjoint", "tap_numbers", "tap_runs", "tap_steps"]

Ints = npt.NDArray[np.int64]
Tables = tuple[Records, Records, Records]
Only = Literal["classes", "taps"]

CLASSES_MAX = 20_000
"""Classes of whole positions up to which they are worth looking at."""

CALL_CYCLES = 60
"""What a register tile costs beside its multiply-adds."""

LINE_TILES = 4
"""Tiles of a line from which on it is cut by itself; shorter lines share tiles."""


def tap_steps(dims: Dims, axis: int) -> tuple[int, int]:
    """Return the steps from one tap of a dst position to its next: in taps, and in src positions."""
    stride, dilation = dims.strides[axis], dims.dilations[axis]
    if dims.gathers:
        return 1, min(dilation, dims.wide[axis])
    step = stride // gcd(stride, dilation)
    # a single tap has no next one, and a step that no tensor holds
    return min(step, dims.kernel[axis]), min(step * dilation // stride, dims.narrow[axis])


def tap_numbers(dims: Dims, axis: int, joined: bool) -> Ints:
    """Number the taps of an axis: backwards for ConvTranspose, where src positions fall as taps rise.

    With `joined`, taps that meet the same dst positions follow each other.
    """
    taps = np.arange(dims.kernel[axis])
    if dims.gathers:
        return taps
    step = tap_steps(dims, axis)[0] if joined else 1
    numbers = np.empty(len(taps), np.int64)
    numbers[np.lexsort((-taps, taps % step))] = taps
    return numbers


def _classes(dims: Dims, axis: int, numbers: Ints) -> Records:
    """Return the classes of an axis with all their taps: no dst position is in two of them.

    Of the dst positions that agree modulo the stride some taps meet each, one after another as positions rise, and they
    leave in the same order. Between two such edges is a class; its taps are those that have come and not left.
    """
    if dims.gathers:
        return _runs(dims, axis)
    stride = min(dims.strides[axis], dims.wide[axis])
    tap, low, start, length = _reached(dims, axis)
    lane, place = start % stride, start // stride
    ends = place + length
    order = np.lexsort((tap, lane))  # the taps that share positions follow each other as they come
    tap, low, start, lane, place, ends = (each[order] for each in (tap, low, start, lane, place, ends))
    scale = int(ends.max(initial=0)) + 1
    comes, goes = lane * scale + place, lane * scale + ends
    edges = np.sort(np.concatenate([comes, goes]), kind="stable")  # of two rising rows
    edges = edges[np.diff(edges, prepend=-1) > 0]
    come, gone = (each.searchsorted(edges[:-1], "right") for each in (comes, goes))
    met = come > gone
    (lanes, first), last, come, gone = divmod(edges[:-1][met], scale), edges[1:][met] % scale, come[met], gone[met]
    latest = come - 1  # the last tap has the lowest src position
    dst, at = lanes + stride * first, low[latest] + first - place[latest]
    return _table(numbers[tap[latest]], come - gone, dst, last - first, at)


def _runs(dims: Dims, axis: int) -> Records:
    """Return the classes of an axis of Convolution: between two positions where a tap enters or leaves."""
    low, high = dims.tap_ranges(axis).T  # of all taps; neither rises with them
    met = low < high
    edges = np.unique(np.concatenate([low[met], high[met]]))
    first, last = edges[:-1], edges[1:]
    rising_low, rising_high = low[::-1], high[::-1]
    taps = len(low)
    begin = taps - rising_low.searchsorted(first, "right")  # the first tap that has entered
    end = taps - rising_high.searchsorted(first, "right")  # the first one that has left already
    live = begin < end
    first, last, begin, end = first[live], last[live], begin[live], end[live]
    stride, dilation, pad = wrapped((dims.strides[axis], dims.dilations[axis], dims.pads[axis]))
    return _table(begin, end - begin, first, last - first, first * stride + begin * dilation - pad)


def tap_runs(dims: Dims, axis: int, numbers: Ints) -> Records:
    """Return a class for every single tap of an axis: dst positions are in several of them, but they are long."""
    tap, low, start, length = _reached(dims, axis)
    if dims.gathers:
        low, start = start, low
    return _table(numbers[tap], np.ones(len(tap), np.int64), start, length, low)


def _table(first: Ints, taps: Ints, dst: Ints, count: Ints, src: Ints) -> Records:
    """Return a table of classes; which of them fill register tiles is set later."""
    table = np.zeros(len(first), Class.dtype)
    table["first"], table["taps"], table["dst"], table["count"], table["src"] = first, taps, dst, count, src
    return table


def _reached(dims: Dims, axis: int) -> tuple[Ints, Ints, Ints, Ints]:
    """Return the taps that join positions, with their first narrow and wide position and the number of positions."""
    low, high = dims.tap_ranges(axis).T
    taps = np.flatnonzero(low < high)
    stride, dilation, pad = wrapped((dims.strides[axis], dims.dilations[axis], dims.pads[axis]))
    return taps, low[taps], low[taps] * stride + taps * dilation - pad, (high - low)[taps]


def class_tables(dims: Dims, numbers: list[Ints], channels: int, limit: int, only: Only | None) -> Tables:
    """Choose between classes and single taps along each axis, by an estimate of the cycles, unless `only` one will do.

    Large kernels on small maps have classes of one pixel, which leave register tiles empty.
    """
    runs = [tap_runs(dims, axis, numbers[axis]) for axis in range(3)]
    best = runs
    if only == "classes":
        best = [_classes(dims, axis, numbers[axis]) for axis in range(3)]
    elif only is None:
        classes = [_classes(dims, axis, numbers[axis]) for axis in range(3)]
        options = [[c] if len(c) == len(r) and (c == r).all() else [c, r] for c, r in zip(classes, runs, strict=True)]
        choices = [list(choice) for choice in product(*options)]
        best = min(choices, key=lambda tables: _cost(dims, tables, channels, limit))
    for table in best:
        table["fills"] = table["count"] >= LINE_TILES * limit
    planes, lines, columns = best
    return planes, lines, columns


def disjoint(dims: Dims, tables: Tables) -> bool:
    """Return whether no dst position of an axis is in two classes of its table."""
    for axis, table in enumerate(tables):
        stride = 1 if dims.gathers else min(dims.strides[axis], dims.wide[axis])
        lane, first = table["dst"] % stride, table["dst"] // stride
        order = np.lexsort((first, lane))
        ends = (first + table["count"])[order]
        if ((lane[order][1:] == lane[order][:-1]) & (first[order][1:] < ends[:-1])).any():
            return False
    return True


def _cost(dims: Dims, tables: list[Records], channels: int, limit: int) -> float:
    """Estimate cycles for one vector of dst channels; single taps where there are too many classes to look at."""
    if prod(len(table) for table in tables) > CLASSES_MAX:
        return float("inf") if any((table["taps"] > 1).any() for table in tables) else 1e300
    taps, pixels = np.ones(1), np.full(1, float(dims.n))
    for table in tables:
        taps = np.multiply.outer(taps, table["taps"]).reshape(-1)
        pixels = np.multiply.outer(pixels, table["count"]).reshape(-1)
    tiles = np.ceil(pixels / limit)
    cycles = tiles * CALL_CYCLES + np.maximum(tiles * 4, pixels) * taps * channels
    return float(cycles.sum())
