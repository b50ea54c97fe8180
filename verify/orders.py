"""The orders in which kernels add, where data make them harder than a random one.

The model of an honest sum takes the products in a random order. Kernels add in lanes, row by row, image by image or tap
by tap, and data may be aligned with that: where a gradient's sign alternates along x, the even and the odd lanes of a
vector grow far beyond the sum. So before a result fails by size, each order that kernels use is tried: with pieces of
n_j products that are summed apart, as lanes are,

    V = sum over pieces of (n_j r_j^2 / 3 + n_j q_j / 6) + r_j^2,

and with pieces one after the other, where S_j is the sum up to piece j,

    V = sum over pieces of n_j (S_(j-1)^2 + S_(j-1) S_j + S_j^2) / 3 + n_j q_j / 6.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from kernels.plan import Stop, Storage
from kernels.problem import ConvProblem
from kernels.reference import widen
from verify.arithmetic import Arithmetic
from verify.blocks import largest_within
from verify.evaluate import evaluate, evaluation_work, gradients
from verify.layout import channel_axis, is_bias, pixel_axes, weights_axis
from verify.parts import only_tap
from verify.stopping import until

__all__ = ["Order", "most_work", "orders", "tile_spread"]

Array = npt.NDArray[np.float64]

_LANES = (2, 4, 8, 16, 32)
_MOST_PIECES, _MOST_TAPS = 4096, 1 << 14
_CALL = 1 << 16
"""Work that takes as long as the calls for one tap of a piece."""

_MOST_WORK, _LEAST_WORK, _EVALUATIONS = 1 << 33, 1 << 28, 10
"""Work of all orders of a result together: so many of its evaluations, or a little."""


@dataclass(frozen=True)
class Order:
    """An order of summing: its name, and V for each element of the result, of the random order `walk` at least."""

    name: str
    walk: Array


_Piece = Callable[[int], tuple[ConvProblem, Sequence[Storage]]]


@dataclass(frozen=True)
class _Pieces:
    """What cuts a sum into pieces: the problem and the inputs of each."""

    name: str
    one_after_another: bool
    count: int
    piece: _Piece
    work: int
    """That of computing all of them, as `evaluation_work` counts it."""


def most_work(problem: ConvProblem) -> int:
    """Return how much work the orders of a result may take together, as `evaluation_work` counts it."""
    return min(_MOST_WORK, _LEAST_WORK + _EVALUATIONS * evaluation_work(problem))


def orders(
    problem: ConvProblem, inputs: Sequence[Storage], spread: Array, terms: Array, stop: Stop, *,
    left: int, only: Collection[str] | None,
) -> Iterator[Order]:  # fmt: skip
    """Yield the orders, or `only` those of some names, that the work `left` is enough for, each with its V."""
    for pieces in _ways(problem, inputs):
        taps = pieces.count * prod(problem.kernel)
        work = pieces.work + taps * _CALL
        if work > left or taps > _MOST_TAPS or (only is not None and pieces.name not in only):
            continue
        left -= work
        yield Order(pieces.name, _walk(pieces, spread, terms, stop))


def _walk(pieces: _Pieces, spread: Array, terms: Array, stop: Stop) -> Array:
    each = terms / pieces.count  # products of a piece
    walk, total = np.zeros(spread.shape), np.zeros(spread.shape)
    with np.errstate(over="ignore", invalid="ignore"):
        for at in until(stop, range(pieces.count)):
            problem, inputs = pieces.piece(at)
            own = evaluate(problem, inputs, stop)
            if pieces.one_after_another:
                after = total + own
                walk += each / 3 * (total * total + total * after + after * after)
                total = after
            else:
                walk += (each / 3 + 1) * own * own
        walk += each / 6 * spread * spread
    return walk


def _ways(problem: ConvProblem, inputs: Sequence[Storage]) -> Iterator[_Pieces]:
    if problem.forward:
        yield from _ways_of_dst(problem, inputs)
        return
    work = evaluation_work(problem)
    if problem.n > 1 and problem.n <= _MOST_PIECES:
        images = [tuple(tensor[at : at + 1] for tensor in inputs) for at in range(problem.n)]
        yield _Pieces("image by image", True, problem.n, lambda at: (replace(problem, n=1), images[at]), work)
    cuts = _Cuts(problem, inputs)
    for lanes in _LANES:
        if problem.rank and cuts.size > lanes:
            yield _Pieces(f"in {lanes} lanes along x", False, lanes, partial(cuts.every, lanes), work)
    if problem.rank > 1 and problem.n * cuts.rows <= _MOST_PIECES and cuts.rows > 1:
        yield _Pieces("row by row", True, problem.n * cuts.rows, cuts.row, work)


def _ways_of_dst(problem: ConvProblem, inputs: Sequence[Storage]) -> Iterator[_Pieces]:
    """Yield the orders of sums over src channels and taps; a bias is added in the end, and counts as a product."""
    if is_bias(problem):
        return
    plain, (src, weights), work = replace(problem, bias=False), inputs[:2], evaluation_work(problem)
    channels = problem.src_channels // problem.groups
    if prod(problem.kernel) > 1:
        taps = list(np.ndindex(*problem.kernel))
        yield _Pieces(
            "tap by tap",
            True,
            len(taps),
            lambda at: (plain, (src, only_tap(plain, weights, taps[at]))),
            len(taps) * work,
        )
    for lanes in _LANES:
        if channels > lanes:
            of_lane = partial(_of_channels, plain, src, weights, lanes)
            yield _Pieces(f"in {lanes} lanes along channels", False, lanes, of_lane, work)


def _of_channels(
    problem: ConvProblem, src: Storage, weights: Storage, lanes: int, lane: int
) -> tuple[ConvProblem, Sequence[Storage]]:
    """Return the products of every so many src channels, of each group."""
    axis, channels = channel_axis(problem), problem.src_channels // problem.groups
    some = np.flatnonzero(np.arange(problem.src_channels) % channels % lanes == lane)
    of_group = np.arange(lane, channels, lanes)
    divided = some if problem.groups_axis != "I" and problem.groups > 1 else of_group
    weights = np.ascontiguousarray(np.take(weights, divided, weights_axis(problem, "I")))
    return replace(problem, src_channels=len(some)), (np.ascontiguousarray(np.take(src, some, axis)), weights)


class _Cuts:
    """Problems of some pixels of the narrow tensor of a gradient: of the products that they are in."""

    def __init__(self, problem: ConvProblem, inputs: Sequence[Storage]) -> None:
        self._problem = problem
        self._inputs = inputs
        self._wide: int | None = None if is_bias(problem) else problem.places[0]
        self._narrow = 0 if is_bias(problem) else problem.places[1]
        sizes = [inputs[self._narrow].shape[axis] for axis in pixel_axes(problem)]
        self.size, self.rows = (sizes or [1])[-1], sizes[-2] if len(sizes) > 1 else 1

    def every(self, lanes: int, lane: int) -> tuple[ConvProblem, Sequence[Storage]]:
        """Return the products of every so many pixels along x."""
        return self._cut(slice(None), self._problem.rank - 1, slice(lane, None, lanes))

    def row(self, at: int) -> tuple[ConvProblem, Sequence[Storage]]:
        """Return the products of one row of one image."""
        image, row = divmod(at, self.rows)
        return self._cut(slice(image, image + 1), self._problem.rank - 2, slice(row, row + 1, 1))

    def _cut(self, images: slice, axis: int, some: slice) -> tuple[ConvProblem, Sequence[Storage]]:
        problem, inputs = self._problem, [tensor[images] for tensor in self._inputs]
        before = (slice(None),) * pixel_axes(problem)[axis]
        inputs[self._narrow] = np.ascontiguousarray(inputs[self._narrow][(*before, some)])
        changes: dict[str, Any] = {"n": len(inputs[0])}
        if self._wide is not None:
            first = some.start * problem.strides[axis] - problem.pads_begin[axis]
            inputs[self._wide] = np.ascontiguousarray(inputs[self._wide][(*before, slice(max(0, first), None))])
            changes["pads_begin"] = _changed(problem.pads_begin, axis, max(0, -first))
            changes["strides"] = _changed(problem.strides, axis, problem.strides[axis] * some.step)
        shapes = [tuple([tensor.shape[each] for each in pixel_axes(problem)]) for tensor in inputs]
        return replace(problem, src_spatial=shapes[0], dst_spatial=shapes[-1], **changes), inputs


def _changed(values: tuple[int, ...], axis: int, value: int) -> tuple[int, ...]:
    return (*values[:axis], value, *values[axis + 1 :])


def tile_spread(problem: ConvProblem, inputs: Sequence[Storage], arithmetic: Arithmetic, stop: Stop) -> Array | None:
    """Return the spread of a gradient by Winograd where pixels of a tile meet that are no products of the sum.

    Their products cancel, but for rounding. Each pixel of the narrow tensor counts with the largest value of the wide
    one that any tile has with it; None for other algorithms and operations.
    """
    if problem.computes != "diff_weights" or not any(arithmetic.reach(problem)) or arithmetic.algorithm == "fft":
        return None
    wide, narrow = problem.places
    axes = pixel_axes(problem)
    found = widen(inputs[wide], problem.dtype)
    shape = inputs[narrow].shape
    for axis, far, kernel, pad in zip(axes, arithmetic.reach(problem), problem.kernel, problem.pads_begin, strict=True):
        far += arithmetic.tile_size - 1
        found = largest_within(found, axis, far)
        centre = np.arange(shape[axis]) - pad + kernel // 2
        found = np.take(found, np.clip(centre, 0, found.shape[axis] - 1), axis)
    spatial = tuple([shape[axis] for axis in axes])
    ones = (1,) * problem.rank
    smaller = replace(
        problem, dtype="f64", src_spatial=spatial, dst_spatial=spatial, kernel=ones, pads_begin=(0,) * problem.rank
    )  # fmt: skip
    tensors = [found if place == wide else widen(inputs[place], problem.dtype) for place in range(2)]

    def square(values: Array, place: int) -> Array:  # noqa: ARG001
        return np.square(values)

    return np.sqrt(gradients(smaller, tensors, stop, [square])[0])
