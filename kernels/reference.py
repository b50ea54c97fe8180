"""The kernel that takes everything: float64 sums in one order on all processors, rounded once at the end.

For each kernel position and image the products of a sum are added one after another, as `np.add.accumulate` adds them,
and what that gives is added to the sum. Compiled loops do so (`kernels.chains`), and NumPy where nothing compiles, with
the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from kernels.chains.boxes import Stored
from kernels.chains.gradients import gradient_sums
from kernels.chains.pixels import pixel_sums
from kernels.chains.units import Part, arrange, units_of
from kernels.dtypes import KINDS
from kernels.emit.doubles import PARTS
from kernels.expansion import Layer, add, add_product, layers, pair, two_sum
from kernels.pack.doubles import F64
from kernels.plan import Stop, Unit, box
from kernels.problem import ConvProblem, Dims
from kernels.target import target

__all__ = ["REFERENCE", "bias_of", "narrow", "single", "sums_of", "widen"]

Array = npt.NDArray[np.float64]
Storage = npt.NDArray[np.float32] | npt.NDArray[np.float64] | npt.NDArray[np.uint16]

Change = Callable[[Array, int], Array]
"""Changes values of an input before they are summed, given which input it is; may write to its argument."""

MultiplyAdd = Callable[[Array, Array, Array], None]
"""Adds products of (groups, rows, terms) and (groups, columns, terms) to sums (see `add_products`)."""


def widen(stored: Storage, dtype: str) -> Array:
    """Return the values of a stored tensor (f16 and bf16 as their bits) in float64, exactly, as a copy."""
    return single(stored, dtype).astype(np.float64)


def single(stored: Storage, dtype: str) -> Storage:
    """Return the values of a stored tensor in float32, those of f64 as they are, without a copy where they are that."""
    if dtype in ("f32", "f64"):
        return stored
    if dtype == "f16":
        return stored.view(np.float16).astype(np.float32)
    if dtype != "bf16":
        raise KeyError(dtype)
    return (stored.astype(np.uint32) << 16).view(np.float32)


def read(stored: Storage, dtype: str, change: Change | None, place: int) -> Array:
    """Return values of the input at a place in float64, changed."""
    values = widen(stored, dtype)
    return values if change is None else change(values, place)


def narrow(values: Array, dtype: str) -> Storage:
    """Round float64 values to the storage of `dtype`, to nearest even, once; f64 stays."""
    if dtype == "f64":
        return values
    with np.errstate(over="ignore", invalid="ignore"):
        if dtype == "f16":
            return values.astype(np.float16).view(np.uint16)
        near = values.astype(np.float32)
    if dtype == "f32":
        return near
    if dtype != "bf16":
        raise KeyError(dtype)
    # NumPy has no bfloat16: of an f32 that is halfway between two of them, the rounding error decides
    bits, nan = near.view(np.int32), np.isnan(near)
    halfway = (bits & 0xFFFF == 0x8000) & ~nan
    bits[halfway] += np.sign(np.abs(values[halfway]) - np.abs(near[halfway])).astype(np.int32)
    chosen: npt.NDArray[np.int32] = np.where(nan, bits >> 16 | 0x40, bits + 0x7FFF + (bits >> 16 & 1) >> 16)
    return chosen.astype(np.uint16)


def add_products(sums: Array, rows: Array, columns: Array) -> None:
    """Add products of (groups, rows, terms) and (groups, columns, terms), summed over the last axis, to given sums.

    The sums are (parts, groups, rows, columns): one float64 each, to which that of all terms is added, or the PARTS of
    an exact sum, to which each term is. The order of the sums is the same on every processor.
    """
    chains = sums if len(sums) == PARTS else np.zeros_like(sums)
    for term in range(rows.shape[2]):
        add_product(chains, rows[:, :, term, None], columns[:, None, :, term])
    if chains is not sums:
        sums += chains


def channels_first(tensor: npt.NDArray[Any], problem: ConvProblem, groups: int) -> npt.NDArray[Any]:
    """View a data tensor as (N, groups, channels of a group, D, H, W)."""
    if problem.data_format == "NXC":
        tensor = np.moveaxis(tensor, -1, 1)
    n, channels, *spatial = tensor.shape
    raised = (1,) * (3 - len(spatial)) + tuple(spatial)
    return tensor.reshape(n, groups, channels // groups, *raised)


def taps(dims: Dims) -> Iterator[tuple[int, tuple[slice, ...], tuple[slice, ...]]]:
    """For every kernel position in which pixels meet give its flat index and the slices of narrow and wide pixels.

    What lies in the padding is left out, not multiplied by zero, so Inf and NaN meet only real data.
    """
    met = [np.flatnonzero(dims.meetings(axis)).tolist() for axis in range(3)]
    axes = [[(tap, *dims.slices(axis, tap)) for tap in some] for axis, some in enumerate(met)]
    _, height, width = dims.kernel
    for position in product(*axes):
        (z, y, x), narrow, wide = zip(*position, strict=True)
        yield (z * height + y) * width + x, narrow, wide


def _stored(problem: ConvProblem, inputs: Sequence[Storage], change: Change | None) -> tuple[int, Stored]:
    """Return the kind of the inputs' values, for compiled code, and what gives them."""

    def stored(place: int, images: slice) -> Storage:
        found = inputs[place][images] if place == 0 or not problem.forward else inputs[place]
        found = found if change is None else read(found, problem.dtype, change, place)
        return found if found.flags.c_contiguous else found.copy()

    return F64 if change is not None or problem.dtype == "f64" else KINDS[problem.dtype], stored


def sums_of(
    problem: ConvProblem, unit: Unit, inputs: Sequence[Storage], stop: Stop, change: Change | None = None,
    parts: int = 1, multiply_add: MultiplyAdd | None = None,
) -> Array | None:  # fmt: skip
    """Compute a unit's box with sums of so many float64, the first axis, without a bias; None when `stop` said so.

    Compiled loops do so, or NumPy alone, with `multiply_add`, where that is given or nothing compiles.
    """
    assert unit.shape is not None
    if problem.op == "BiasAdd" or not target().compiles:
        multiply_add = multiply_add or add_products
    if problem.forward:
        images = range(*unit.part)
        if multiply_add:
            found = _forward(problem, images, inputs, stop, change, parts, multiply_add)
        else:
            found = pixel_sums(problem, images, *_stored(problem, inputs, change), stop, parts)
    else:
        if problem.computes == "diff_bias":
            problem, inputs, change = _as_gradient(problem, inputs[0], change)
        part = Part(*zip(unit.part[::2], unit.part[1::2], strict=True))
        if multiply_add:
            sums = _gradients(problem, part, inputs, stop, change, parts, multiply_add)
        else:
            sums = gradient_sums(problem, part, *_stored(problem, inputs, change), stop, parts)
        found = None if sums is None else arrange(sums, problem)
    return None if found is None else found.reshape(parts, *unit.shape)


def _gradients(
    problem: ConvProblem, part: Part, inputs: Sequence[Storage], stop: Stop, change: Change | None, parts: int,
    multiply_add: MultiplyAdd,
) -> Array | None:  # fmt: skip
    """Compute a part of diff_weights as (parts, groups, taps, wide channels, narrow channels)."""
    dims, channels = problem.dims, (part.wide, part.narrow)
    sizes = [high - low for low, high in (part.groups, *channels)]
    total = np.zeros((parts, sizes[0], prod(dims.kernel), *sizes[1:]))
    for image in range(dims.n):
        sides = []
        for place, some in zip(problem.places, channels, strict=True):
            values = read(inputs[place][image : image + 1], problem.dtype, change, place)
            sides.append(channels_first(values, problem, dims.groups)[0][slice(*part.groups), slice(*some)])
        for tap, *at in taps(dims):
            if stop():
                return None
            a, b = (each[:, :, *box] for each, box in zip(sides, at[::-1], strict=True))
            with np.errstate(invalid="ignore", over="ignore"):
                multiply_add(total[:, :, tap], *(each.reshape(*each.shape[:2], -1) for each in (a, b)))
    return total


def _forward(
    problem: ConvProblem, images: range, inputs: Sequence[Storage], stop: Stop, change: Change | None, parts: int,
    multiply_add: MultiplyAdd,
) -> Array | None:  # fmt: skip
    """Compute dst of a forward operation for some images as (parts, images, ..)."""
    dims = problem.dims
    src = read(inputs[0][images.start : images.stop], problem.dtype, change, 0)
    src = channels_first(src, problem, dims.groups)
    out = np.zeros((parts, len(images), dims.groups, dims.dst_channels, *dims.dst))
    if problem.op == "BiasAdd":
        out[0] = src
    else:
        weights = read(inputs[1], problem.dtype, change, 1)
        group, wide, narrow, tap_step = (8 * step for step in problem.weights_strides)
        channels = (narrow, wide) if dims.gathers else (wide, narrow)
        sizes = dims.groups, prod(dims.kernel), dims.dst_channels, dims.src_channels
        by_tap = np.lib.stride_tricks.as_strided(weights, sizes, (group, tap_step, *channels))
        for tap, at_narrow, at_wide in taps(dims):
            if stop():
                return None
            at_src, at_dst = (at_wide, at_narrow) if dims.gathers else (at_narrow, at_wide)
            pixels = np.moveaxis(src[:, :, :, *at_src], (0, 2), (1, -1))  # groups, images, pixels, channels
            products = np.zeros((parts, *sizes[::2], prod(pixels.shape[1:-1])))
            with np.errstate(invalid="ignore", over="ignore"):
                multiply_add(products, by_tap[:, tap], pixels.reshape(dims.groups, -1, dims.src_channels))
                found = products.reshape(*products.shape[:3], *pixels.shape[1:-1])
                add(out[:, :, :, :, *at_dst], np.moveaxis(found, 3, 1))
    channels_last = problem.data_format == "NXC"
    found = out.reshape(parts, len(images), problem.dst_channels, *problem.dst_spatial)
    return np.moveaxis(found, 2, -1) if channels_last else found


def _as_gradient(
    problem: ConvProblem, diff_dst: Storage, change: Change | None
) -> tuple[ConvProblem, list[Storage], Change | None]:
    """Turn diff_bias into the weight gradient of one src channel that is one everywhere."""
    pixels = (prod(problem.dst_spatial),)
    layer = replace(
        problem, op="ConvolutionBackwardWeights", src_channels=1, groups=1, src_spatial=pixels, dst_spatial=pixels,
        kernel=(1,), strides=(1,), dilations=(1,), pads_begin=(0,),
    )  # fmt: skip
    ones: Any = np.broadcast_to(narrow(np.ones(1), problem.dtype), layer.src_shape)

    def changed(values: Array, place: int) -> Array:
        return change(values, 0) if change and place else values

    return layer, [ones, diff_dst.reshape(layer.dst_shape)], change and changed


class ReferenceKernel:
    """Sums in float64, in one order on all processors, and rounds once; takes every problem."""

    name = "reference_f64"

    def refuse(self, problem: ConvProblem) -> str | None:
        """Refuse nothing."""
        return None

    def units(self, problem: ConvProblem, workers: int) -> tuple[list[Unit], int]:
        """Cut a weight gradient by channels and a forward operation by images."""
        return units_of(problem, workers), 0

    def run(
        self,
        problem: ConvProblem,
        unit: Unit,
        inputs: Sequence[Storage],
        output: Storage,
        scratch: Storage | None,
        stop: Stop,
    ) -> bool:
        """Compute a box of channels of a gradient, some images, or the gradient of a bias."""
        if stop():
            return False
        if output.size == 0:
            return True
        if problem.dtype == "f64":
            exact = self.exact(problem, unit, inputs, stop)
            values = None if exact is None else exact[0]
        else:
            values = self.values(problem, unit, inputs, stop)
        if values is not None:
            values[np.isnan(values)] = np.nan  # processors give their own NaN different signs
            box(output, unit)[...] = narrow(values, problem.dtype)
        return values is not None

    def values(
        self, problem: ConvProblem, unit: Unit, inputs: Sequence[Storage], stop: Stop, *, change: Change | None = None
    ) -> Array | None:
        """Compute a unit's box in float64, with sums in float64; with `change` from inputs whose values are changed.

        None when `stop` said so. Where products have more than 53 bits, the last bits differ between processors.
        """
        found = sums_of(problem, unit, inputs, stop, change, 1)
        if found is None:
            return None
        if problem.bias:
            with np.errstate(invalid="ignore", over="ignore"):
                found[0] += bias_of(problem, read(inputs[-1], problem.dtype, change, len(inputs) - 1))
        values: Array = found[0]
        return values

    def exact(
        self, problem: ConvProblem, unit: Unit, inputs: Sequence[Storage], stop: Stop
    ) -> tuple[Array, Array] | None:
        """Compute a unit's box of f64 inputs: each sum rounded once, and what is missing; None when `stop` said so.

        Together they are wrong by less than 2^-100 of the sum of the magnitudes (`kernels.emit.doubles`). Sums of
        finite values are those of the exact sum, Inf where that is too large; Inf and NaN spread as in float64.
        """
        given = [np.asarray(each, np.float64) for each in inputs]
        products, tensors = (replace(problem, bias=False), given[:-1]) if problem.bias else (problem, given)
        own = [tensors[0][slice(*unit.part)] if problem.forward else tensors[0], *tensors[1:]]
        if problem.op == "BiasAdd":
            high = self.values(products, unit, tensors, stop)
            total = None if high is None else (high, np.zeros_like(high))
        else:
            total = self._layered(products, unit, tensors, stop, [layers(each) for each in own])
        if total is None:
            return None
        high, low = total
        with np.errstate(invalid="ignore", over="ignore"):
            if problem.op != "BiasAdd" and not all(np.isfinite(each).all() for each in own):
                marks = self.values(products, unit, tensors, stop, change=_marks)
                if marks is None:
                    return None
                high = np.where(np.isfinite(marks), high, marks)
            if problem.bias:
                high, error = two_sum(high, bias_of(problem, given[-1]))
                low = low + error
            rounded = np.where(np.isfinite(high) & (low != 0), high + low, high)
            return rounded, np.where(np.isfinite(rounded), low - (rounded - high), 0.0)

    def _layered(
        self, problem: ConvProblem, unit: Unit, inputs: Sequence[Storage], stop: Stop,
        found: Sequence[tuple[Layer | None, ...]],
    ) -> tuple[Array, Array] | None:  # fmt: skip
        """Sum what the inputs' layers give, each with each, without a bias."""
        total = None
        for chosen in product(*found):
            summed = sums_of(problem, unit, inputs, stop, partial(_in_layers, chosen), PARTS)
            if summed is None:
                return None
            high, low = pair(summed)
            shift = -sum(each.shift for each in chosen if each)
            with np.errstate(all="ignore"):
                if shift:
                    high, low = np.ldexp(high, shift), np.ldexp(low, shift)
                if total is not None:
                    high, lost = two_sum(total[0], high)
                    low = total[1] + low + lost
            total = high, low
        return total


def bias_of(problem: ConvProblem, bias: Array) -> Array:
    """Shape a bias so that it is added to a box of dst."""
    return bias.reshape((-1, *(1,) * problem.rank) if problem.data_format == "NCX" else (-1,))


def _marks(values: Array, place: int) -> Array:
    """Leave Inf and NaN, and of other values their sign: their sums are where they belong, and do not overflow."""
    return np.where(np.isfinite(values), np.sign(values), values)


def _in_layers(chosen: Sequence[Layer | None], values: Array, place: int) -> Array:
    """Leave one layer of each input."""
    layer = chosen[place]
    return values if layer is None else layer.of(values)


REFERENCE = ReferenceKernel()
