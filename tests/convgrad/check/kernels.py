"""Kernels to check: a right one in NumPy, and the same with one fault each.

All compute ConvolutionBackwardWeights, OIX from NCX. `FAULTY` says what a check finds in each.
"""

from __future__ import annotations

import ctypes
import itertools
import math
import time
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Ints = tuple[int, ...]


def right(
    src: Array, diff_dst: Array, weights_shape: Ints, strides: Ints, dilations: Ints, pads_begin: Ints, groups: int
) -> Array:
    """Sum in float64, tap by tap, over the pixels that the tap reads; padding is never multiplied."""
    n, channels = src.shape[:2]
    a = src.astype(np.float64).reshape(n, groups, channels // groups, *src.shape[2:])
    b = diff_dst.astype(np.float64).reshape(n, groups, diff_dst.shape[1] // groups, *diff_dst.shape[2:])
    found = np.zeros((groups, b.shape[2], a.shape[2], *weights_shape[2:]))
    for tap in itertools.product(*map(range, weights_shape[2:])):
        at_src: list[Any] = [...]
        at_dst: list[Any] = [...]
        axes = zip(tap, strides, dilations, pads_begin, src.shape[2:], diff_dst.shape[2:], strict=True)
        for k, s, d, p, wide, narrow in axes:
            first = max(0, -((k * d - p) // s))
            last = min(narrow - 1, (wide - 1 + p - k * d) // s)
            start = first * s + k * d - p
            at_dst.append(slice(first, max(first, last + 1)))
            at_src.append(slice(start, start + (last - first) * s + 1, s) if last >= first else slice(0, 0))
        read: list[Array] = [a[tuple(at_src)], b[tuple(at_dst)]]
        x, y = (each.reshape(*each.shape[:3], math.prod(each.shape[3:])) for each in read)
        with np.errstate(all="ignore"):
            at: Any = (slice(None), slice(None), slice(None), *tap)
            found[at] = np.einsum("ngop,ngip->goi", y, x)
    with np.errstate(all="ignore"):
        return found.reshape(weights_shape).astype(src.dtype)


def faulty(function: Callable[..., Array]) -> Callable[..., Array]:
    """Give a function the parameters of `right`."""
    function.__wrapped__ = right  # type: ignore[attr-defined]
    return function


@faulty
def wrong_stride(strides: Ints, **given: Any) -> Array:
    """Use the first stride for all axes."""
    return right(strides=(strides[0],) * len(strides), **given)


@faulty
def pad_off_by_one(pads_begin: Ints, **given: Any) -> Array:
    """Pad the last axis by one pixel less."""
    return right(pads_begin=(*pads_begin[:-1], max(0, pads_begin[-1] - 1)), **given)


def pads_exchanged(
    src: Array, diff_dst: Array, weights_shape: Ints, strides: Ints, dilations: Ints, pads_begin: Ints, pads_end: Ints,
    groups: int,
) -> Array:  # fmt: skip
    """Pad the beginning by what belongs to the end."""
    del pads_begin
    return right(src, diff_dst, weights_shape, strides, dilations, pads_end, groups)


@faulty
def for_one_layer(weights_shape: Ints, strides: Ints, **given: Any) -> Array:
    """Take 3x3 kernels with channels in multiples of 16, and the same stride along both axes; all else is declined."""
    if weights_shape[2:] != (3, 3) or weights_shape[0] % 16 or weights_shape[1] % 16 or len({*strides}) > 1:
        raise NotImplementedError
    return right(weights_shape=weights_shape, strides=strides, **given)


@faulty
def dilation_ignored(dilations: Ints, **given: Any) -> Array:
    """Read taps that are dense."""
    return right(dilations=(1,) * len(dilations), **given)


@faulty
def group_offset(src: Array, groups: int, **given: Any) -> Array:
    """Read the channels of the first group in all groups."""
    first = src[:, : src.shape[1] // groups]
    return right(src=np.concatenate([first] * groups, 1), groups=groups, **given)


@faulty
def channel_tail(weights_shape: Ints, src: Array, **given: Any) -> Array:
    """Write whole blocks of four dst channels, and leave the rest unwritten."""
    found = right(weights_shape=weights_shape, src=src, **given)
    result = np.empty_like(found)
    whole = len(found) // 4 * 4 if len(found) > 4 else len(found)
    result[:whole] = found[:whole]
    return result


@faulty
def last_image(src: Array, diff_dst: Array, **given: Any) -> Array:
    """Leave out the last of several images."""
    n = max(1, len(src) - 1)
    return right(src=src[:n], diff_dst=diff_dst[:n], **given)


@faulty
def bf16_sums(src: Array, diff_dst: Array, **given: Any) -> Array:
    """Add the images of a batch in bf16."""
    total = None
    for image in range(len(src)):
        part = right(src=src[image : image + 1], diff_dst=diff_dst[image : image + 1], **given)
        part = part.astype(ml_dtypes.bfloat16).astype(src.dtype)
        total = part if total is None else (total + part).astype(ml_dtypes.bfloat16).astype(src.dtype)
    return right(src=src, diff_dst=diff_dst, **given) if total is None else total


@faulty
def tf32_inputs(src: Array, diff_dst: Array, **given: Any) -> Array:
    """Round the inputs to the ten bits of TF32."""
    rounded = []
    for values in (src, diff_dst):
        bits = values.view(np.uint32).astype(np.uint64) + 0xFFF + ((values.view(np.uint32) >> 13) & 1)
        near = (bits & 0xFFFFE000).astype(np.uint32).view(np.float32)
        rounded.append(np.where(np.isfinite(values), near, values))
    return right(src=rounded[0], diff_dst=rounded[1], **given)


@faulty
def tf32_last_image(src: Array, diff_dst: Array, **given: Any) -> Array:
    """Round the inputs to TF32, and leave out the last of several images."""
    n = max(1, len(src) - 1)
    return tf32_inputs(src=src[:n], diff_dst=diff_dst[:n], **given)


@faulty
def constant(weights_shape: Ints, src: Array, **given: Any) -> Array:
    """Return zeros."""
    return np.zeros(weights_shape, src.dtype)


_kept: dict[Any, Array] = {}


@faulty
def cached(src: Array, diff_dst: Array, **given: Any) -> Array:
    """Return the first result again for all calls with the same shapes."""
    key = (src.shape, diff_dst.shape, *given.values())
    if key not in _kept:
        _kept[key] = right(src=src, diff_dst=diff_dst, **given)
    return _kept[key].copy()


@faulty
def input_modified(src: Array, **given: Any) -> Array:
    """Negate the input in place, and leave it so."""
    found = right(src=src, **given)
    np.negative(src, out=src)
    return found


_calls = itertools.count()


@faulty
def not_reproducible(**given: Any) -> Array:
    """Be off by one unit in the last place in every other call."""
    found = right(**given)
    return np.nextafter(found, np.inf, dtype=found.dtype) if next(_calls) % 2 and given["src"].size > 40 else found


@faulty
def segfault(groups: int, **given: Any) -> Array:
    """Read address 0 where there are groups."""
    if groups > 1:
        ctypes.string_at(0)
    return right(groups=groups, **given)


@faulty
def hang(strides: Ints, **given: Any) -> Array:
    """Never return where a stride is 3."""
    while 3 in strides:
        time.sleep(0.05)
    return right(strides=strides, **given)


@faulty
def nan_masked(**given: Any) -> Array:
    """Replace NaN by zero."""
    return np.nan_to_num(right(**given), nan=0.0, posinf=np.inf, neginf=-np.inf)


@faulty
def raises(dilations: Ints, **given: Any) -> Array:
    """Have an assertion that does not hold for dilated kernels."""
    assert max(dilations) < 3, "no dilation of 3 or more"
    return right(dilations=dilations, **given)


@faulty
def another_shape(**given: Any) -> Array:
    """Return the weights as IOX."""
    return np.swapaxes(right(**given), 0, 1)


@faulty
def another_dtype(**given: Any) -> Array:
    """Return float64."""
    return right(**given).astype(np.float64)


@faulty
def unaligned(src: Array, **given: Any) -> Array:
    """Lose a little where src is not aligned."""
    found = right(src=src, **given)
    return found if src.ctypes.data % 64 == 0 else np.nextafter(found, np.inf, dtype=found.dtype)


def partly(
    src: Array, diff_dst: Array, weights_shape: Ints, strides: Ints, dilations: Ints, pads_begin: Ints, out: Array
) -> None:
    """Write the result to the memory that is given, all but its last element."""
    found = right(src, diff_dst, weights_shape, strides, dilations, pads_begin, 1)
    out.reshape(-1)[:-1] = found.reshape(-1)[:-1]


FAULTY: dict[str, set[str]] = {
    "pads_exchanged": {"wrong"},
    "wrong_stride": {"wrong"}, "pad_off_by_one": {"wrong"}, "dilation_ignored": {"wrong"}, "group_offset": {"wrong"},
    "channel_tail": {"wrong", "memory", "repeat"}, "partly": {"memory"}, "last_image": {"wrong"},
    "bf16_sums": {"wrong"}, "tf32_inputs": {"wrong"}, "constant": {"wrong"},
    "cached": {"zeros", "doubled", "wrong", "images", "channels"}, "input_modified": {"modified"},
    "not_reproducible": {"repeat"}, "segfault": {"crashed"}, "hang": {"hung"}, "nan_masked": {"wrong"},
    "raises": {"raised"}, "another_shape": {"shape"}, "another_dtype": {"dtype"}, "unaligned": {"alignment"},
}  # fmt: skip
"""The kinds of faults of which a check finds at least one in each kernel."""
