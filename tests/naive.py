"""The oracle: convolutions and their weight gradients in NumPy float64, slow and obvious.

It knows nothing of `kernels/` or `schemas/`. Channels come first and groups get an axis of their own, then
every kernel position (tap) is one product of two slices. A slice holds the positions whose tap meets real
data, so padding is left out and never multiplied: Inf and NaN spread exactly as far as the formulas say.

I and O are the channels of src and dst, for ConvTranspose too. Inside this module weights are
``(groups, I/groups, O/groups, *kernel)``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from math import prod
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
Index = tuple[Any, ...]

DTYPES: dict[str, np.dtype[Any]] = {
    "f32": np.dtype(np.float32),
    "f16": np.dtype(np.float16),
    "bf16": np.dtype(ml_dtypes.bfloat16),
    "f64": np.dtype(np.float64),
}


def bwd_weights(
    op: str, src: npt.NDArray[Any], diff_dst: npt.NDArray[Any], *, kernel: Sequence[int], strides: Sequence[int],
    pads_begin: Sequence[int], dilations: Sequence[int], groups: int = 1, data_format: str = "NXC",
    weights_format: str = "XIO", groups_axis: str = "I",
) -> Array:  # fmt: skip
    """Compute diff_weights of Convolution or ConvTranspose (`op`, any name that begins with it) in float64.

    Convolution: ``dW[o, i, k] = sum src[n, i, x * s + k * d - b] * diff_dst[n, o, x]``, ConvTranspose:
    ``dW[i, o, k] = sum src[n, i, x] * diff_dst[n, o, x * s + k * d - b]``, both inside one group.
    """
    a = channels_first(src, data_format, groups)
    b = channels_first(diff_dst, data_format, groups)
    transposed = op.startswith("ConvTranspose")
    wide, narrow = (b.shape[3:], a.shape[3:]) if transposed else (a.shape[3:], b.shape[3:])
    out = np.zeros((groups, a.shape[2], b.shape[2], *kernel))
    for tap, at_narrow, at_wide in _taps(kernel, wide, narrow, strides, pads_begin, dilations):
        at_src, at_dst = (at_narrow, at_wide) if transposed else (at_wide, at_narrow)
        out[_last(tap)] = 0.0 + _contract("ngip,ngop->gio", _pixels(a, at_src), _pixels(b, at_dst))
    return from_grouped(out, weights_format, groups_axis)


def conv_transpose(
    src: npt.NDArray[Any], weights: npt.NDArray[Any], bias: npt.NDArray[Any] | None = None, *,
    dst_spatial: Sequence[int], strides: Sequence[int], pads_begin: Sequence[int], dilations: Sequence[int],
    groups: int = 1, data_format: str = "NXC", weights_format: str = "XOI", groups_axis: str = "O",
) -> Array:  # fmt: skip
    """Compute dst of ConvTranspose in float64.

    ``dst[n, o, x * s + k * d - b] += src[n, i, x] * W[i, o, k]`` inside one group, then the bias.
    """
    a = channels_first(src, data_format, groups)
    w = to_grouped(weights, weights_format, groups_axis, groups)
    out = np.zeros((a.shape[0], groups, w.shape[2], *dst_spatial))
    for tap, at_src, at_dst in _taps(w.shape[3:], dst_spatial, a.shape[3:], strides, pads_begin, dilations):
        part = a[_last(at_src)]
        term = _contract("ngip,gio->ngop", _pixels(a, at_src), w[_last(tap)])
        with np.errstate(invalid="ignore"):
            out[_last(at_dst)] += term.reshape(*term.shape[:3], *part.shape[3:])
    return _finish(out, bias, data_format)


def convolution(
    src: npt.NDArray[Any], weights: npt.NDArray[Any], bias: npt.NDArray[Any] | None = None, *,
    dst_spatial: Sequence[int], strides: Sequence[int], pads_begin: Sequence[int], dilations: Sequence[int],
    groups: int = 1, data_format: str = "NXC", weights_format: str = "XIO", groups_axis: str = "I",
) -> Array:  # fmt: skip
    """Compute dst of Convolution in float64.

    ``dst[n, o, x] = sum src[n, i, x * s + k * d - b] * W[o, i, k]`` inside one group, then the bias.
    """
    a = channels_first(src, data_format, groups)
    w = to_grouped(weights, weights_format, groups_axis, groups)
    out = np.zeros((a.shape[0], groups, w.shape[2], *dst_spatial))
    for tap, at_dst, at_src in _taps(w.shape[3:], a.shape[3:], dst_spatial, strides, pads_begin, dilations):
        part: Array = out[_last(at_dst)]
        with np.errstate(invalid="ignore"):
            part += _contract("ngip,gio->ngop", _pixels(a, at_src), w[_last(tap)]).reshape(part.shape)
    return _finish(out, bias, data_format)


def bwd_data(
    op: str, diff_dst: npt.NDArray[Any], weights: npt.NDArray[Any], *, src_spatial: Sequence[int],
    strides: Sequence[int], pads_begin: Sequence[int], dilations: Sequence[int], groups: int = 1,
    data_format: str = "NXC", weights_format: str = "XIO", groups_axis: str = "I",
) -> Array:  # fmt: skip
    """Compute diff_src of Convolution or ConvTranspose (`op`, any name that begins so) in float64.

    Convolution: ``dS[n, i, x * s + k * d - b] += diff_dst[n, o, x] * W[o, i, k]``, ConvTranspose: ``dS[n, i, x] = sum
    diff_dst[n, o, x * s + k * d - b] * W[i, o, k]``, both inside one group.
    """
    b = channels_first(diff_dst, data_format, groups)
    w = to_grouped(weights, weights_format, groups_axis, groups)
    transposed = op.startswith("ConvTranspose")
    wide, narrow = (b.shape[3:], tuple(src_spatial)) if transposed else (tuple(src_spatial), b.shape[3:])
    out = np.zeros((b.shape[0], groups, w.shape[1], *src_spatial))
    for tap, at_narrow, at_wide in _taps(w.shape[3:], wide, narrow, strides, pads_begin, dilations):
        at_src, at_dst = (at_narrow, at_wide) if transposed else (at_wide, at_narrow)
        part: Array = out[_last(at_src)]
        with np.errstate(invalid="ignore"):
            part += _contract("ngop,gio->ngip", _pixels(b, at_dst), w[_last(tap)]).reshape(part.shape)
    return _finish(out, None, data_format)


def round_to(dtype: str, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Round float64 values to `dtype`, to nearest, ties to even, once.

    The service rounds an f32 sum once, to nearest even (RNE). Where that sum is exact (integer tests) it equals the
    float64 sum, and one rounding of float64 is the expected bit pattern. Where it is not, rounding float64 directly
    differs from rounding the f32 sum by at most one unit in the last place of `dtype` plus the error of that sum; the
    tolerances for real data cover both.

    float64 -> float16 is one rounding in NumPy. float64 -> bfloat16 in `ml_dtypes` goes through float32,
    which can round twice: 1 + 2**-8 + 2**-40 would become the tie 1 + 2**-8 and then 1 instead of 1 +
    2**-7. Here the step to f32 rounds to odd (an inexact value gets an odd last bit, so it can't look like
    a tie), which makes the second rounding right because f32 has more than two bits to spare.
    """
    values = np.asarray(values, np.float64)
    with np.errstate(over="ignore", invalid="ignore"):
        if dtype != "bf16":
            return values.astype(DTYPES[dtype])
        nearest = values.astype(np.float32)
        toward_zero = np.where(
            np.abs(nearest.astype(np.float64)) > np.abs(values), np.nextafter(nearest, np.float32(0)), nearest
        )
        inexact = toward_zero.astype(np.float64) != values
    odd = toward_zero.view(np.uint32) | (inexact & np.isfinite(values)).astype(np.uint32)
    rounded: npt.NDArray[Any] = odd.view(np.float32).astype(DTYPES["bf16"])
    return rounded


def bias_add(src: npt.NDArray[Any], bias: npt.NDArray[Any], *, data_format: str) -> Array:
    """Compute dst of BiasAdd in float64: ``dst[n, o, x] = src[n, o, x] + bias[o]``."""
    values = np.asarray(src, np.float64)
    axis = 1 if data_format == "NCX" else values.ndim - 1
    with np.errstate(invalid="ignore"):
        return values + np.expand_dims(np.asarray(bias, np.float64), [a for a in range(values.ndim) if a != axis])


def bias_gradient(diff_dst: npt.NDArray[Any], *, data_format: str) -> Array:
    """Compute diff_bias in float64: the sum of each channel over images and pixels."""
    values = np.asarray(diff_dst, np.float64)
    axis = 1 if data_format == "NCX" else values.ndim - 1
    with np.errstate(invalid="ignore"):
        total: Array = values.sum(tuple(a for a in range(values.ndim) if a != axis))
    return total


def channels_first(tensor: npt.NDArray[Any], data_format: str, groups: int) -> Array:
    """Return a data tensor as ``(N, groups, channels/groups, *spatial)`` in float64."""
    values = tensor.astype(np.float64)
    if data_format == "NXC":
        values = np.moveaxis(values, -1, 1)
    n, channels, *spatial = values.shape
    assert channels % groups == 0, f"{channels} channels, {groups} groups"
    return values.reshape(n, groups, channels // groups, *spatial)


def to_grouped(weights: npt.NDArray[Any], weights_format: str, groups_axis: str, groups: int) -> Array:
    """Return weights in `weights_format` as ``(groups, I/groups, O/groups, *kernel)`` in float64."""
    rank = weights.ndim - 2
    axes = _letter_axes(weights_format, rank)
    values = weights.astype(np.float64).transpose(axes["I"] + axes["O"] + axes["X"])
    i, o, *kernel = values.shape
    if groups_axis == "I":  # (I/g, g * O/g, X)
        return np.moveaxis(values.reshape(i, groups, o // groups, *kernel), 1, 0)
    return values.reshape(groups, i // groups, o, *kernel)


def from_grouped(grouped: Array, weights_format: str, groups_axis: str) -> Array:
    """Return weights of shape ``(groups, I/groups, O/groups, *kernel)`` in `weights_format`."""
    groups, i, o, *kernel = grouped.shape
    if groups_axis == "I":
        flat = np.moveaxis(grouped, 0, 1).reshape(i, groups * o, *kernel)
    else:
        flat = grouped.reshape(groups * i, o, *kernel)
    axes = {"I": [0], "O": [1], "X": list(range(2, flat.ndim))}
    return np.ascontiguousarray(flat.transpose([axis for letter in weights_format for axis in axes[letter]]))


def _letter_axes(weights_format: str, rank: int) -> dict[str, list[int]]:
    axes, at = {}, 0
    for letter in weights_format:
        size = rank if letter == "X" else 1
        axes[letter] = list(range(at, at + size))
        at += size
    return axes


def _taps(
    kernel: Sequence[int], wide: Sequence[int], narrow: Sequence[int], strides: Sequence[int], pads: Sequence[int],
    dilations: Sequence[int],
) -> Iterator[tuple[tuple[int, ...], Index, Index]]:  # fmt: skip
    """Yield each tap that meets data, with the slices of the narrow and the wide tensor that it multiplies."""
    for tap in product(*map(range, kernel)):
        at_narrow, at_wide = [], []
        for k, size, count, s, d, b in zip(tap, wide, narrow, strides, dilations, pads, strict=True):
            inside = [x for x in range(count) if 0 <= x * s + k * d - b < size]
            if inside:
                first, last = inside[0], inside[-1]
                at_narrow.append(slice(first, last + 1))
                at_wide.append(slice(first * s + k * d - b, last * s + k * d - b + 1, s))
        if len(at_narrow) == len(tap):
            yield tap, tuple(at_narrow), tuple(at_wide)


def _last(at: Sequence[Any]) -> Index:
    """Return the index that applies `at` to the last axes and takes the first ones whole."""
    return (Ellipsis, *at)


def _pixels(tensor: Array, at: Index) -> Array:
    part = tensor[_last(at)]
    return part.reshape(*part.shape[:3], prod(part.shape[3:]))


def _contract(subscripts: str, a: Array, b: Array) -> Array:
    """Sum products. BLAS is used for finite data only: its kernels may skip zeros, and 0 * Inf is NaN."""
    with np.errstate(over="ignore", invalid="ignore"):
        finite = bool(np.isfinite(a).all() and np.isfinite(b).all())
        return np.asarray(np.einsum(subscripts, a, b, optimize=finite and a.size * b.size > 1 << 16))


def _finish(out: Array, bias: npt.NDArray[Any] | None, data_format: str) -> Array:
    n, groups, channels, *spatial = out.shape
    dst = out.reshape(n, groups * channels, *spatial)
    if bias is not None:
        with np.errstate(invalid="ignore"):  # Inf - Inf is NaN, as it should be
            dst += bias.astype(np.float64).reshape(-1, *[1] * len(spatial))
    return np.ascontiguousarray(dst if data_format == "NCX" else np.moveaxis(dst, 1, -1))
