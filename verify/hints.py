"""Guesses at what is wrong with a result that fails: the mistakes that kernels are most often found to make."""

from __future__ import annotations

from itertools import product

import numpy as np
import numpy.typing as npt

from kernels.plan import Stop, Storage
from kernels.problem import ConvProblem
from kernels.reference import widen

__all__ = ["hints"]

Array = npt.NDArray[np.float64]

_LEAST, _MOST = 8, 1 << 21
"""Elements of a result that is looked at: a few agree by chance, and many take too long."""

_FAR = 2
"""Taps, or pixels, that a result may be shifted by."""


@np.errstate(over="ignore", invalid="ignore")
def hints(problem: ConvProblem, result: Storage, exact: Array, stop: Stop) -> list[str] | None:
    """Return what the wrong `result` equals instead of `exact`, in sentences; mostly none. None when `stop` said so."""
    if not _LEAST <= result.size <= _MOST:
        return []
    got = widen(result, problem.dtype)
    if not (np.isfinite(got).all() and np.isfinite(exact).all()):
        return []
    if _same(got, exact):  # a few wrong elements in data that look alike everywhere
        return []
    found = []
    x = problem.weights_format.index("X") if problem.computes == "diff_weights" else _first_pixel(problem)
    shift = _shift(got, exact, range(x, x + problem.rank * (problem.computes != "diff_bias")), stop)
    if stop():
        return None
    if shift is not None and problem.computes == "diff_weights":
        begin = [
            pad - far * dilation
            for pad, far, dilation in zip(problem.pads_begin, shift, problem.dilations, strict=True)
        ]
        found.append(f"the result is the reference shifted by {shift} taps: as if pads_begin were {begin}")
    elif shift is not None:
        found.append(f"the result is the reference shifted by {shift} pixels: check pads_begin")
    if problem.computes == "diff_weights":
        flipped = np.flip(exact, tuple(range(x, x + problem.rank)))
        if max(problem.kernel, default=1) > 1 and _same(got, flipped):
            found.append("the result is the reference with its taps in reverse order: a kernel flip too many")
        i, o = (0, 1) if x else (-2, -1)
        swapped = np.swapaxes(exact, i, o)
        if swapped.shape == exact.shape and exact.shape[i] > 1 and _same(got, swapped):
            found.append("the result is the reference with its two channel axes swapped: check weights_format")
    scale = _factor(got, exact)
    if scale is not None:
        found.append(f"the result is {scale:.6g} times the reference everywhere")
        if problem.n > 1 and abs(scale * problem.n - 1) < 1e-3:
            found[-1] += ": it is averaged over the batch"
    return found


def _first_pixel(problem: ConvProblem) -> int:
    return 2 if problem.data_format == "NCX" else 1


def _shift(got: Array, exact: Array, axes: range, stop: Stop) -> list[int] | None:
    """Return how far along each axis the elements of `got` are found in `exact`; None where they are not.

    None also when `stop` said so.
    """
    offsets = product(range(-_FAR, _FAR + 1), repeat=len(axes))
    nearest = sorted(offsets, key=lambda far: sum(map(abs, far)))[1:]
    for far in nearest:
        if stop():
            return None
        if any(2 * abs(step) > exact.shape[axis] for step, axis in zip(far, axes, strict=True)):
            continue
        some: list[slice] = [slice(None)] * exact.ndim
        other = list(some)
        for step, axis in zip(far, axes, strict=True):
            some[axis] = slice(max(0, -step), min(exact.shape[axis], exact.shape[axis] - step))
            other[axis] = slice(max(0, step), min(exact.shape[axis], exact.shape[axis] + step))
        if _same(got[tuple(some)], exact[tuple(other)]):
            return list(far)
    return None


def _same(got: Array, other: Array) -> bool:
    """Whether nearly all elements agree to about the digits of bf16, and not because they are zero."""
    if other.size == 0 or not other.any():
        return False
    close = np.abs(got - other) <= 2.0**-6 * np.abs(other) + 1e-3 * np.sqrt(np.mean(other * other))
    return bool(close.mean() > 0.97)


def _factor(got: Array, exact: Array) -> float | None:
    """Return the constant factor between the two, if there is one and it is not 1 or 0."""
    norm = float((exact * exact).sum())
    scale = float((got * exact).sum()) / norm if norm else 0.0
    if abs(scale) < 1e-6 or abs(scale - 1) < 0.02 or not _same(got / scale, exact):
        return None
    return scale
