"""Which taps meet which dst positions of ConvTranspose, axis by axis.

A dst position ``u`` meets tap ``k`` at src position ``x = (u + pad - k * dilation) / stride`` where that is whole and
inside. The taps of one position are an arithmetic progression, and so are the positions, one stride apart, that share
them: a class. Its taps are numbered so that src positions rise with them.

A table has a row for each class: 0 number of its first tap, 1 taps, 2 first dst position, 3 dst positions (one stride
apart), 4 src position that the first tap meets there, 5 whether a line of it fills register tiles by itself.
"""

from __future__ import annotations

from itertools import product
from math import gcd, prod
from typing import Literal

import numpy as np
import numpy.typing as npt

from kernels.problem import Dims

__all__ = ["Ints", "Tables", "class_tables", "tap_numbers", "tap_runs", "tap_steps"]

Ints = npt.NDArray[np.int64]
Tables = tuple[Ints, Ints, Ints]
Only = Literal["classes", "taps"]

CLASSES_MAX = 20_000
"""Classes of whole positions up to which they are worth looking at."""

CALL_CYCLES = 60
"""What a register tile costs beside its multiply-adds."""

LINE_TILES = 4
"""Tiles of a line from which on it is cut by itself; shorter lines share tiles."""


def tap_steps(dims: Dims, axis: int) -> tuple[int, int]:
    """Give the steps from one tap of a dst position to its next: in taps, and in src positions."""
    stride, dilation = dims.strides[axis], dims.dilations[axis]
    step = stride // gcd(stride, dilation)
    # a single tap has no next one, and a step that no tensor holds
    return min(step, dims.kernel[axis]), min(step * dilation // stride, dims.narrow[axis])


def tap_numbers(dims: Dims, axis: int, joined: bool) -> Ints:
    """Number the taps of an axis: backwards, because src positions fall as taps rise.

    With `joined`, taps that meet the same dst positions follow each other.
    """
    taps = np.arange(dims.kernel[axis])
    step = tap_steps(dims, axis)[0] if joined else 1
    numbers = np.empty(len(taps), np.int64)
    numbers[np.lexsort((-taps, taps % step))] = taps
    return numbers


def _classes(dims: Dims, axis: int, numbers: Ints) -> Ints:
    """Give the classes of an axis with all their taps: no dst position is in two of them."""
    stride = min(dims.strides[axis], dims.wide[axis])
    first, count, place = np.zeros((3, dims.wide[axis]), np.int64)
    for tap in range(dims.kernel[axis]):
        low, start, length = _reached(dims, axis, tap)
        span = slice(start, start + length * stride, stride) if length else slice(0, 0)
        # the last tap has the lowest src position
        first[span], place[span] = numbers[tap], np.arange(low, low + length)
        count[span] += 1
    met = np.flatnonzero(count)
    met = met[np.lexsort((met, met % stride))]
    breaks = (first[met][1:] != first[met][:-1]) | (count[met][1:] != count[met][:-1]) | (np.diff(met) != stride)
    starts = np.concatenate([[0], np.flatnonzero(breaks) + 1]) if len(met) else np.zeros(0, np.int64)
    lengths = np.diff([*starts, len(met)])
    dst = met[starts]
    return np.column_stack([first[dst], count[dst], dst, lengths, place[dst]])


def tap_runs(dims: Dims, axis: int, numbers: Ints) -> Ints:
    """Give a class for every single tap of an axis: dst positions are in several of them, but they are long."""
    rows = np.zeros((dims.kernel[axis], 5), np.int64)
    for tap in range(dims.kernel[axis]):
        low, start, length = _reached(dims, axis, tap)
        rows[tap] = numbers[tap], 1, start if length else 0, length, low if length else 0
    return np.ascontiguousarray(rows[rows[:, 3] > 0])


def _reached(dims: Dims, axis: int, tap: int) -> tuple[int, int, int]:
    """Give first src position, first dst position and number of positions that a tap joins."""
    low, high = dims.tap_range(axis, tap)
    return low, low * dims.strides[axis] + tap * dims.dilations[axis] - dims.pads[axis], high - low


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
    planes, lines, columns = (
        np.ascontiguousarray(np.column_stack([table, table[:, 3] >= LINE_TILES * limit])) for table in best
    )
    return planes, lines, columns


def _cost(dims: Dims, tables: list[Ints], channels: int, limit: int) -> float:
    """Estimate cycles for one vector of dst channels; single taps where there are too many classes to look at."""
    if prod(len(table) for table in tables) > CLASSES_MAX:
        return float("inf") if any((table[:, 1] > 1).any() for table in tables) else 1e300
    taps, pixels = np.ones(1), np.full(1, float(dims.n))
    for table in tables:
        taps = np.multiply.outer(taps, table[:, 1]).reshape(-1)
        pixels = np.multiply.outer(pixels, table[:, 3]).reshape(-1)
    tiles = np.ceil(pixels / limit)
    cycles = tiles * CALL_CYCLES + np.maximum(tiles * 4, pixels) * taps * channels
    return float(cycles.sum())
