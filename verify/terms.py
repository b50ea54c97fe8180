"""The products that one element of a result sums, with the positions of their factors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from math import inf, isnan, prod
from typing import Any

import numpy as np
import numpy.typing as npt

from kernels.plan import Stop, Storage
from kernels.problem import ConvProblem, Dims
from kernels.reference import channels_first, widen
from verify.blocks import Block, blocks
from verify.layout import channel_axis, in_data_order, pixel_axes, weights_position
from verify.stopping import until

__all__ = ["products_of", "term_counts", "worst_terms"]

Array = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

_SHOWN = 24
"""Products that are listed: the largest."""


def worst_terms(problem: ConvProblem, inputs: Sequence[Storage], index: tuple[int, ...], stop: Stop) -> dict[str, Any]:
    """Describe the sum of one element: how many products it has, and the largest of them.

    Each has the index of its two factors in their own tensors, and its value.
    """
    if problem.op == "BiasAdd":
        channel = index[channel_axis(problem)]
        summed = [
            {"at": [list(at)], "value": float(widen(tensor[at].reshape(1), problem.dtype)[0])}
            for tensor, at in zip(inputs, (index, (channel,)), strict=True)
        ]
        return {"terms": 2, "largest": summed}
    if problem.computes == "diff_bias":
        values = _channel(problem, inputs[0], index[0])
        ranked = _ranked(values.shape, lambda block: widen(values[block], problem.dtype), stop)
        return _described(
            values.size, [([_data_index(problem, n, index[0], pixel)], value) for (n, *pixel), value in ranked]
        )
    return _of_dst(problem, inputs, index) if problem.forward else _of_weights(problem, inputs, index, stop)


def term_counts(problem: ConvProblem) -> Array:
    """Return how many products each element of the result sums, in a shape that broadcasts to it."""
    dims, rank = problem.dims, problem.rank
    if problem.computes == "diff_bias":
        return np.full(1, float(problem.n * prod(problem.dst_spatial)))
    if problem.op == "BiasAdd":
        return np.full((1,) * (rank + 2), 2.0)
    each = _meeting_taps if problem.forward else Dims.meetings
    counts = reduce(np.multiply.outer, [each(dims, axis) for axis in range(3 - rank, 3)], np.ones(()))
    if not problem.forward:
        x = problem.weights_format.index("X")
        return (problem.n * counts).reshape((1,) * x + problem.kernel + (1,) * (2 - x))
    counts = dims.src_channels * counts + problem.bias
    return counts[None, None] if problem.data_format == "NCX" else counts[None, ..., None]


def _meeting_taps(dims: Dims, axis: int) -> Array:
    """Count the taps that meet each dst position of an axis."""
    counts = np.zeros(dims.dst[axis])
    for tap in range(dims.kernel[axis]):
        counts[dims.slices(axis, tap)[0 if dims.gathers else 1]] += 1
    return counts


def products_of(problem: ConvProblem, inputs: Sequence[Storage], index: tuple[int, ...]) -> Array:
    """Return all that an element of a result sums, as an array by images and pixels, or by channels and taps."""
    if problem.computes == "diff_bias":
        return widen(_channel(problem, inputs[0], index[0]), problem.dtype)
    if problem.computes == "diff_weights":
        (a, *_), (b, *_) = _factors(problem, inputs, index)
        with np.errstate(invalid="ignore", over="ignore"):
            return widen(a, problem.dtype) * widen(b, problem.dtype)
    channel = index[channel_axis(problem)]
    summed = [] if problem.op == "BiasAdd" else [_dst_products(problem, inputs, index)[0]]
    if problem.op == "BiasAdd":
        summed.append(widen(inputs[0][index].reshape(1), problem.dtype))
    if problem.bias:
        summed.append(widen(inputs[-1][channel : channel + 1], problem.dtype))
    return summed[0] if len(summed) == 1 else np.concatenate([each.reshape(-1) for each in summed])


def _of_weights(problem: ConvProblem, inputs: Sequence[Storage], index: tuple[int, ...], stop: Stop) -> dict[str, Any]:
    """Describe the sum of one element of diff_weights, over images and pixels."""
    (a, i, at_src), (b, o, at_dst) = _factors(problem, inputs, index)

    def products(block: Block) -> Array:
        with np.errstate(invalid="ignore", over="ignore"):
            return widen(a[block], problem.dtype) * widen(b[block], problem.dtype)

    found = []
    for (n, *pixel), value in _ranked(a.shape, products, stop):
        places = []
        for channel, at in ((i, at_src), (o, at_dst)):
            spatial = [part.start + (part.step or 1) * x for part, x in zip(at, pixel, strict=True)]
            places.append(_data_index(problem, n, channel, spatial))
        found.append((places, value))
    return _described(a.size, found)


def _factors(
    problem: ConvProblem, inputs: Sequence[Storage], index: tuple[int, ...]
) -> tuple[tuple[Storage, int, tuple[slice, ...]], ...]:
    """Return what an element of diff_weights multiplies, of src and of diff_dst: values, channel, and place."""
    group, i, o, tap = weights_position(problem, index)
    place = (0,) * (3 - problem.rank) + tap
    slices = zip(*(problem.dims.slices(axis, tap) for axis, tap in enumerate(place)), strict=True)
    at_narrow, at_wide = slices
    at_src, at_dst = (at_narrow, at_wide) if problem.transposed else (at_wide, at_narrow)
    src_channel = i + group * (problem.src_channels // problem.groups)
    dst_channel = o + group * (problem.dst_channels // problem.groups)
    return (
        (_channel(problem, inputs[0], src_channel)[(slice(None), *at_src)], src_channel, at_src),
        (_channel(problem, inputs[1], dst_channel)[(slice(None), *at_dst)], dst_channel, at_dst),
    )


def _of_dst(problem: ConvProblem, inputs: Sequence[Storage], index: tuple[int, ...]) -> dict[str, Any]:
    """Describe the sum of one element of dst, over channels and taps."""
    products, pixels, places, group = _dst_products(problem, inputs, index)
    dims = problem.dims
    found = []
    for c, *position in _largest(products):
        spatial = [int(pixels[axis][x]) for axis, x in enumerate(position)]
        src_index = _data_index(problem, index[0], group * dims.src_channels + c, spatial)
        place = int(places[(c, *position)])
        weights_index = [int(x) for x in np.unravel_index(place, problem.weights_shape)]
        found.append(([src_index, weights_index], products[(c, *position)]))
    return _described(products.size + int(problem.bias), found)


def _dst_products(
    problem: ConvProblem, inputs: Sequence[Storage], index: tuple[int, ...]
) -> tuple[Array, tuple[Ints, ...], Ints, int]:
    """Return the products of an element of dst by src channel and tap, their src pixels, weights, and group."""
    dims = problem.dims
    channel = index[channel_axis(problem)]
    raised = (0,) * (3 - problem.rank) + tuple([index[axis] for axis in pixel_axes(problem)])
    group, out = divmod(channel, dims.dst_channels)
    taps, pixels = zip(*(_met(dims, axis, raised[axis]) for axis in range(3)), strict=True)
    image = channels_first(inputs[0][index[0] : index[0] + 1], problem, dims.groups)[0, group]
    src = widen(image[(slice(None), *np.ix_(*pixels))], problem.dtype)
    step_group, step_wide, step_narrow, step_tap = problem.weights_strides
    step_out, step_in = (step_narrow, step_wide) if dims.gathers else (step_wide, step_narrow)
    first, second, third = np.ix_(*taps)
    flat = (first * dims.kernel[1] + second) * dims.kernel[2] + third
    at = group * step_group + out * step_out + np.arange(dims.src_channels)[:, None, None, None] * step_in
    places = at + flat[None] * step_tap
    weights = widen(inputs[1].reshape(-1)[places.reshape(-1)], problem.dtype).reshape(places.shape)
    with np.errstate(invalid="ignore", over="ignore"):
        products = weights * src.reshape(places.shape)
    return products, pixels, places, group


def _met(dims: Dims, axis: int, x: int) -> tuple[Ints, Ints]:
    """Return the taps of an axis that meet a dst position, and the src positions where they do."""
    taps = np.arange(dims.kernel[axis])
    shift = taps * dims.dilations[axis] - dims.pads[axis]
    if dims.gathers:
        src = x * dims.strides[axis] + shift
        met = (src >= 0) & (src < dims.src[axis])
    else:
        src, rest = np.divmod(x - shift, dims.strides[axis])
        met = (rest == 0) & (src >= 0) & (src < dims.src[axis])
    return taps[met], src[met]


def _channel(problem: ConvProblem, tensor: Storage, channel: int) -> Storage:
    """Return one channel of all images, with three spatial axes."""
    taken = tensor[(slice(None),) * channel_axis(problem) + (channel,)]
    return taken.reshape(problem.n, *(1,) * (3 - problem.rank), *taken.shape[1:])


def _data_index(problem: ConvProblem, n: int, channel: int, spatial: Sequence[int]) -> list[int]:
    return list(map(int, in_data_order(problem, n, channel, spatial[3 - problem.rank :])))


def _largest(values: Array) -> list[list[int]]:
    """Return the indexes of the largest magnitudes, the largest first; NaN counts as largest."""
    flat = np.nan_to_num(np.abs(values.reshape(-1)), nan=np.inf, posinf=np.inf)
    count = min(_SHOWN, flat.size)
    if count == 0:
        return []
    first = np.argpartition(-flat, count - 1)[:count]
    ordered = first[np.argsort(-flat[first], kind="stable")]
    return [[int(x) for x in np.unravel_index(at, values.shape)] for at in ordered]


def _ranked(shape: tuple[int, ...], values_of: Callable[[Block], Array], stop: Stop) -> list[tuple[list[int], float]]:
    """Return the largest magnitudes as `_largest` does, and their values, of an array that is computed in blocks."""
    found: list[tuple[list[int], float]] = []
    for block in until(stop, blocks(shape)):
        values = values_of(block)
        found += [
            ([part.start + x for part, x in zip(block, at, strict=True)], float(values[tuple(at)]))
            for at in _largest(values)
        ]
        found.sort(key=lambda each: -inf if isnan(each[1]) else -abs(each[1]))
        del found[_SHOWN:]
    return found


def _described(terms: int, found: Sequence[tuple[list[list[int]], float]]) -> dict[str, Any]:
    return {"terms": terms, "largest": [{"at": at, "value": float(value)} for at, value in found]}
