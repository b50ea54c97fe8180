"""Results that are too large for a reference are judged by random projections (Freivalds, 1977) where the tensors are.

All operations share one trilinear form, sum over images, channels and pixels of

    src[n, i, x * s + k * d - b] * weights[o, i, k] * dst[n, o, x]

With random signs for each axis of the result (the projection is their product) it says what the projected result must
be, for a fraction of the multiply-adds: each large tensor is read once, and contracted axis by axis. Gradients of
weights are projected over their channels, and compared for each tap.

The data are signs too, so that sums in f32 are exact. Then one wrong element changes each projection, and two that are
exchanged (images, channels, rows, ..) half of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from itertools import product
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from convgrad._check.problems import Problem

__all__ = ["Projected", "draw", "project"]

Floats = npt.NDArray[np.float64]

_COUNT = 12
"""Projections: two exchanged images or channels are missed once in 4,096."""

_BLOCK = 1 << 22
"""Elements that are drawn or read at a time."""

_DIGITS = {"f32": 24, "f16": 11, "bf16": 8, "f64": 53}
_SIGMAS = 8


@dataclass(frozen=True)
class Projected:
    """The `expected` projections, those of the result, and the RMS errors that rounding it may cause at most."""

    expected: Floats
    got: Floats
    rounding: Floats

    @property
    def wrong(self) -> npt.NDArray[np.bool_]:
        """Which projections differ: by anything, where no element of the result had to be rounded."""
        with np.errstate(invalid="ignore"):
            near: npt.NDArray[np.bool_] = np.abs(self.got - self.expected) <= _SIGMAS * self.rounding
        return ~near

    def __str__(self) -> str:
        """Return what is wrong, if anything is."""
        at = int(np.argmax(self.wrong))
        got, expected = (float(each.reshape(-1)[at]) for each in (self.got, self.expected))
        return f"{self.wrong.sum()} of {self.wrong.size} projections differ: {got:.9g}, expected {expected:.9g}"

    def as_json(self) -> dict[str, list[Any]]:
        """Return the fields as JSON; they are the arguments of `from_json`."""
        return {name: getattr(self, name).tolist() for name in ("expected", "got", "rounding")}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Projected:
        """Return what `as_json` described."""
        return cls(**{name: np.array(values, np.float64) for name, values in data.items()})


def draw(rng: np.random.Generator, shape: Sequence[int], like: Any) -> Any:
    """Return an array of random signs of the kind of `like`, on its device, which gets them block by block."""
    torch = hasattr(like, "new_empty")
    found = like.new_empty(tuple(shape)) if torch else np.empty_like(like, shape=tuple(shape))
    flat = found.reshape(-1)
    for start in range(0, prod(shape), _BLOCK):
        size = min(_BLOCK, prod(shape) - start)
        flat[start : start + size] = _like(_signs(rng, size, 1)[0], flat, np.float32)
    return found


def project(problem: Problem, inputs: Mapping[str, Any], result: Any, rng: np.random.Generator) -> Projected:
    """Project the inputs and the result of a call, where they are. Only small arrays come back to NumPy."""
    data = {name.removeprefix("diff_"): each for name, each in {**inputs, problem.output: result}.items()}
    for name in {"src", "dst"} & data.keys():
        data[name] = data[name] if problem.data_format == "NCX" else _channels_first(data[name])
    if problem.output == "diff_weights":
        return _of_weights(problem, data, rng)
    return _of_data(problem, data, rng)


def _of_data(problem: Problem, data: Mapping[str, Any], rng: np.random.Generator) -> Projected:
    """Project dst or a data gradient: random signs for its images, its channels and its pixels."""
    of, other = ("dst", "src") if problem.output == "dst" else ("src", "dst")
    result, given, groups = data[of], data[other], problem.groups
    images = _signs(rng, problem.n)
    channels = _signs(rng, result.shape[1])
    pixels = [_signs(rng, size) for size in result.shape[2:]]
    rounding = 0.0
    for at in _places(result.shape, _BLOCK):
        largest = float(abs(_floats(result[at], np.float32)).max())
        rounding += 0.0 if largest < 2.0 ** _DIGITS[problem.dtype] else float(_rounding(problem, result[at]).sum())
    sums = _contracted(result, images, [signs[:, None] for signs in pixels], np.float64)
    got = np.einsum("pck,pc->p", sums, channels)
    maps = [_map(problem, axis, signs) for axis, signs in enumerate(pixels)]
    found = _contracted(given, images, maps, np.float32).reshape(_COUNT, groups, -1, prod(problem.kernel))
    form = "goik,pgik,pgo->p" if of == "dst" else "goik,pgok,pgi->p"
    expected = np.einsum(
        form, _taps(problem, data["weights"]), found, channels.reshape(_COUNT, groups, -1), optimize=True
    )
    if "bias" in data:
        pixel_sums = np.prod([signs.sum(1) for signs in pixels], 0)
        expected = expected + images.sum(1) * pixel_sums * (channels @ _host(_floats(data["bias"], np.float64)))
    return Projected(expected, got, np.full(_COUNT, np.sqrt(rounding)))


def _of_weights(problem: Problem, data: Mapping[str, Any], rng: np.random.Generator) -> Projected:
    """Project a gradient of weights over its channels, for each tap."""
    groups, shapes = problem.groups, {name: data[name].shape for name in ("src", "dst")}
    signs = {name: _signs(rng, shape[1]).reshape(_COUNT, groups, -1) for name, shape in shapes.items()}
    wide, narrow = ("dst", "src") if problem.transposed else ("src", "dst")
    expected = np.zeros((_COUNT, prod(problem.kernel)))
    most = max(max(shape[1], _COUNT * groups) * prod(shape[2:]) for shape in shapes.values())
    step = max(1, _BLOCK // most)
    for first in range(0, problem.n, step):
        sums = {}
        for name, shape in shapes.items():
            block = data[name][first : first + step]
            block = block.reshape(block.shape[0], groups, shape[1] // groups, -1)
            matrix = np.swapaxes(signs[name], 0, 1)
            lines = _host(_like(matrix, block, np.float32) @ _floats(block, np.float32))  # images, groups, P, pixels
            sums[name] = lines.reshape(*lines.shape[:3], *shape[2:]).astype(np.float64)
        for number, (at_wide, at_narrow) in enumerate(_slices(problem)):
            pair = sums[wide][(..., *at_wide)], sums[narrow][(..., *at_narrow)]
            x, y = (each.reshape(*each.shape[:3], -1) for each in pair)
            expected[:, number] += np.einsum("ngpx,ngpx->p", x, y)
    weights = _taps(problem, data["weights"])
    got = np.einsum("goik,pgo,pgi->pk", weights, signs["dst"], signs["src"], optimize=True)
    rounding = np.sqrt(_rounding(problem, weights).sum((0, 1, 2)))
    return Projected(expected, got, np.broadcast_to(rounding, got.shape))


def _signs(rng: np.random.Generator, size: int, count: int = _COUNT) -> Floats:
    found: Floats = rng.integers(0, 2, (count, size), np.int8) * 2.0 - 1.0
    return found


def _contracted(tensor: Any, images: Floats, maps: Sequence[Floats], dtype: type) -> Floats:
    """Contract (n, c, *spatial) with signs (P, n) and a map (P, k, size) for each spatial axis, to (P, c, taps).

    Blocks are multiplied by the map of their last axis in `dtype`, where they are: in f32 sums of signs are exact.
    """
    *others, last = maps
    _, taps, size = last.shape
    matrix = last.reshape(-1, size).T
    total = np.zeros((_COUNT, tensor.shape[1], prod(each.shape[1] for each in maps)))
    for at in _places(tensor.shape, max(1, _BLOCK * size // max(size, _COUNT * taps))):
        block = tensor[at]
        found = _host(_floats(block, dtype) @ _like(matrix, block, dtype)).astype(np.float64)
        sums = found.reshape(*block.shape[:-1], _COUNT, taps)
        for axis in range(len(others) - 1, -1, -1):  # (.., size, P, taps) -> (.., P, taps)
            rows = others[axis][:, :, at[2 + axis]]
            sums = np.einsum("...spk,pqs->...pqk", sums, rows, optimize=True)
            sums = sums.reshape(*sums.shape[:-2], -1)
        total[:, at[1]] += np.einsum("pn,ncpk->pck", images[:, at[0]], sums, optimize=True)
    return total


def _places(shape: Sequence[int], most: int) -> Iterator[tuple[slice, ...]]:
    """Cut an array into blocks of about so many elements along its first axes, and yield their slices."""
    sizes = []
    for axis, size in enumerate(shape[:-1]):
        sizes.append(min(size, max(1, most // prod(shape[axis + 1 :]))))
    steps = [range(0, size, step) for size, step in zip(shape, sizes, strict=False)]
    for starts in product(*steps):
        yield (*[slice(start, start + step) for start, step in zip(starts, sizes, strict=True)], slice(None))


def _map(problem: Problem, axis: int, signs: Floats) -> Floats:
    """Return the map of one axis of the given data, (P, taps, size), for signs of the pixels of the result."""
    positions = list(zip(*_axis(problem, axis), strict=True))
    narrow = (problem.output == "dst") != problem.transposed  # the result
    found = np.zeros((_COUNT, len(positions), problem.wide[axis] if narrow else problem.narrow[axis]))
    for tap, (at_wide, at_narrow) in enumerate(positions):
        to, at = (at_wide, at_narrow) if narrow else (at_narrow, at_wide)
        found[:, tap, to] = signs[:, at]
    return found


def _axis(problem: Problem, axis: int) -> tuple[list[slice], list[slice]]:
    """Return what each tap of an axis multiplies: pixels of the wide and of the narrow tensor."""
    kernel, stride, dilation, pad = (
        getattr(problem, name)[axis] for name in ("kernel", "strides", "dilations", "pads_begin")
    )
    at_wide, at_narrow = [], []
    for start in range(-pad, kernel * dilation - pad, dilation):
        first = max(0, -(start // stride))
        last = min(problem.narrow[axis], (problem.wide[axis] - 1 - start) // stride + 1)
        at_narrow.append(slice(first, max(first, last)))
        at_wide.append(slice(start + first * stride, start + (last - 1) * stride + 1, stride) if last > first
                       else slice(0))  # fmt: skip
    return at_wide, at_narrow


def _slices(problem: Problem) -> Iterator[tuple[tuple[slice, ...], tuple[slice, ...]]]:
    """Yield the pixels of the wide and the narrow tensor that each tap multiplies."""
    axes = [_axis(problem, axis) for axis in range(problem.rank)]
    yield from zip(*(product(*each) for each in zip(*axes, strict=True)), strict=True)


def _taps(problem: Problem, weights: Any) -> Floats:
    """Return weights as (groups, O of a group, I of a group, taps)."""
    values, form, rank = _host(_floats(weights, np.float64)), problem.weights_format, problem.rank
    places = {letter: sum(rank if before == "X" else 1 for before in form[: form.index(letter)]) for letter in "OIX"}
    order = [places["O"], places["I"], *range(places["X"], places["X"] + rank)]
    o, i = (size // problem.groups for size in (problem.dst_channels, problem.src_channels))
    oix: Floats = values.transpose(order)
    if problem.transposed:
        return np.swapaxes(oix.reshape(o, problem.groups, i, -1), 0, 1)
    return oix.reshape(problem.groups, o, i, -1)


def _rounding(problem: Problem, values: Any) -> Floats:
    """Return the squares of the largest errors of rounding these elements of a result, zero where they are exact."""
    digits = _DIGITS[problem.dtype]
    exact = _host(_floats(values, np.float64))
    half = np.ldexp(1.0, np.frexp(exact)[1] - digits - 1)
    found: Floats = np.where(np.abs(exact) < 2.0**digits, 0.0, np.square(half))
    return found


def _channels_first(data: Any) -> Any:
    return data.movedim(-1, 1) if hasattr(data, "movedim") else np.moveaxis(data, -1, 1)


def _floats(values: Any, dtype: type) -> Any:
    """Return values in another dtype, where they are."""
    if hasattr(values, "astype"):
        return values.astype(dtype)
    return values.to(getattr(import_module("torch"), np.dtype(dtype).name))


def _like(matrix: Floats, block: Any, dtype: type) -> Any:
    """Return a NumPy array as one of the kind of `block`, on its device."""
    small: npt.NDArray[Any] = np.ascontiguousarray(matrix.astype(dtype))
    if hasattr(block, "new_tensor"):
        return block.new_tensor(small, dtype=getattr(import_module("torch"), np.dtype(dtype).name))
    return (
        small
        if isinstance(block, np.ndarray)
        else import_module(type(block).__module__.partition(".")[0]).asarray(small)
    )


def _host(values: Any) -> Any:
    """Return values as a NumPy array."""
    if isinstance(values, np.ndarray):
        return values
    return values.get() if hasattr(values, "get") else values.cpu().numpy()
