"""A right kernel for all operations, and for each published fault one that has it: `pytorch_50042` and so on.

The mutants take NCX and OIX. Where an issue does not say what its kernel did, the mutant does something that gives
wrong results in the same problems.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from tests import naive

__all__ = ["MUTANTS", "right"]

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Call:
    """A call of a kernel."""

    op: str
    dtype: str
    inputs: dict[str, Array]
    attributes: dict[str, Any]
    output_shape: tuple[int, ...]

    def __getattr__(self, name: str) -> Any:
        return self.inputs[name] if name in self.inputs else self.attributes[name]

    @property
    def rank(self) -> int:
        """Number of spatial axes."""
        return next(iter(self.inputs.values())).ndim - 2

    def spatial(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the spatial sizes of a shape of data."""
        return shape[2:] if self.data_format == "NCX" else shape[1:-1]

    def exact(self, **changed: Any) -> Array:
        """Compute the result in float64, with some inputs and attributes changed."""
        given = {**self.inputs, **{name: each for name, each in changed.items() if name in self.inputs}}
        at = {**self.attributes, **{name: each for name, each in changed.items() if name not in self.inputs}}
        if self.op == "BiasAdd":
            return naive.bias_add(given["src"], given["bias"], data_format=at["data_format"])
        if self.op == "BiasAddBackward":
            return naive.bias_gradient(given["diff_dst"], data_format=at["data_format"])
        transposed = self.op.startswith("ConvTranspose")
        names = ("strides", "pads_begin", "dilations", "groups", "data_format", "weights_format")
        more = {name: at[name] for name in names} | {"groups_axis": "O" if transposed else "I"}
        if self.op.endswith("BackwardWeights"):
            x = at["weights_format"].index("X")
            kernel = self.output_shape[x : x + self.rank]
            return naive.bwd_weights(self.op, given["src"], given["diff_dst"], kernel=kernel, **more)
        spatial = self.spatial(self.output_shape)
        if self.op.endswith("BackwardData"):
            return naive.bwd_data(self.op, given["diff_dst"], given["weights"], src_spatial=spatial, **more)
        function = naive.conv_transpose if transposed else naive.convolution
        return function(given["src"], given["weights"], given.get("bias"), dst_spatial=spatial, **more)


def right(op: str, dtype: str, inputs: dict[str, Array], attributes: dict[str, Any], output_shape: Any) -> Array:
    """Sum in float64, and round once."""
    return naive.round_to(dtype, Call(op, dtype, inputs, attributes, output_shape).exact())


right.takes = {"dtypes": ["f32", "f16", "bf16"]}  # type: ignore[attr-defined]

MUTANTS: dict[str, Callable[..., Array]] = {}
"""The kernel that has the fault of an issue, by the name of the function."""


def mutant(operation: str) -> Callable[[Callable[[Call], Array]], Callable[..., Array]]:
    """Make a kernel of a function that computes one operation wrongly; it computes the others right."""

    def decorate(fault: Callable[[Call], Array]) -> Callable[..., Array]:
        def kernel(op: str, dtype: str, inputs: dict[str, Array], attributes: Any, output_shape: Any) -> Array:
            call = Call(op, dtype, inputs, attributes, output_shape)
            return naive.round_to(dtype, fault(call) if op == operation else call.exact())

        kernel.takes = {  # type: ignore[attr-defined]
            "dtypes": ["f32", "f16", "bf16"], "data_formats": ["NCX"], "weights_formats": ["OIX"],
        }  # fmt: skip
        MUTANTS[fault.__name__] = kernel
        return kernel

    return decorate


def without(array: Array, *at: Any) -> Array:
    """Return a copy with zeros at an index."""
    found = array.copy()
    found[at] = 0
    return found


ALL, DW, DX, FORWARD = slice(None), "ConvolutionBackwardWeights", "ConvolutionBackwardData", "Convolution"


@mutant(DW)
def pytorch_50042(call: Call) -> Array:
    """Leave the last row of pixels out of the last row of taps, of strided depthwise gradients."""
    found = call.exact()
    if call.groups > 1 and min(call.strides) > 1:
        found[:, :, -1] = call.exact(diff_dst=without(call.diff_dst, ALL, ALL, -1))[:, :, -1]
    return found


@mutant(DW)
def onednn_4124(call: Call) -> Array:
    """Cut what is in the padding for blocks of two rows of pixels, not for each row."""
    found = call.exact()
    if call.groups > 1 and min(call.strides) > 1:
        found[:, :, 0] = call.exact(diff_dst=without(call.diff_dst, ALL, ALL, slice(2)))[:, :, 0]
    return found


@mutant(DW)
def onednn_4074(call: Call) -> Array:
    """Pad one row less where the kernel is as high as the image."""
    high = call.src.shape[2] == call.output_shape[2] > 1
    return call.exact(pads_begin=[max(0, call.pads_begin[0] - high), *call.pads_begin[1:]])


@mutant(DW)
def onednn_6035(call: Call) -> Array:
    """Copy two pixels where there is place for one, from the last one on: each is overwritten by its neighbour."""
    src = call.src
    if src.shape[1] < 8 and call.strides[-1] == 2:
        src = src.copy()
        src[..., 2::2] = call.src[..., 1:-1:2]
    return call.exact(src=src)


@mutant(DX)
def fujitsu_onednn_43(call: Call) -> Array:
    """Leave out what is behind 16 channels of diff_dst."""
    few = max(call.strides) > 1 and call.output_shape[-1] < 17
    return call.exact(diff_dst=without(call.diff_dst, ALL, slice(16, None)) if few else call.diff_dst)


@mutant(DW)
def pytorch_68868(call: Call) -> Array:
    """Leave out the last plane of pixels where each plane meets padding."""
    both = call.rank == 3 and call.diff_dst.shape[2] == 2
    return call.exact(diff_dst=without(call.diff_dst, ALL, ALL, -1) if both else call.diff_dst)


@mutant("BiasAddBackward")
def pytorch_68048(call: Call) -> Array:
    """Add pixel by pixel in the dtype of the data."""
    pixels = np.moveaxis(call.diff_dst, 1, -1).reshape(-1, call.diff_dst.shape[1])
    total: Array = np.zeros_like(pixels[0])
    for pixel in pixels:
        total = (total + pixel).astype(pixels.dtype)
    found: Array = total.astype(np.float64)
    return found


@mutant(DW)
def pytorch_51430(call: Call) -> Array:
    """Repeat all channels of diff_dst, not each of them."""
    full = call.exact(groups=1)
    o, i, *_ = call.output_shape
    pairs = [[full[to, (at * o + to) * call.groups // o] for at in range(i)] for to in range(o)]
    return np.array(pairs)


@mutant("ConvTransposeBackwardData")
def pytorch_63314(call: Call) -> Array:
    """Forget the strides of a 1x1 kernel."""
    return call.exact(strides=[1] * call.rank if call.weights[0, 0].size == 1 else call.strides)


@mutant(DW)
def pytorch_96225(call: Call) -> Array:
    """Count images in 16 bits."""
    n = len(call.src) & 0xFFFF
    return call.exact(src=call.src[:n], diff_dst=call.diff_dst[:n])


pytorch_193577 = MUTANTS["pytorch_193577"] = pytorch_96225


@mutant(FORWARD)
def pytorch_129207(call: Call) -> Array:
    """Write the last of 65,537 channels over the first one."""
    found = call.exact()
    if found.shape[1] > 65_536:
        found[:, 0], found[:, 65_536] = found[:, 65_536], 0
    return found


@mutant(FORWARD)
def pytorch_188335(call: Call) -> Array:
    """Ignore rows of the kernel from 255 on, in a batch."""
    return call.exact(weights=without(call.weights, ALL, ALL, slice(255 if len(call.src) > 1 else None, None)))


@mutant(FORWARD)
def pytorch_163347(call: Call) -> Array:
    """Multiply the first row and column alone in bf16, if the kernel is as large as the image."""
    whole = call.dtype == "bf16" and call.src.shape[2:] == call.weights.shape[2:]
    return call.exact(weights=without(call.weights, ..., slice(1, None)) if whole else call.weights)


@mutant(FORWARD)
def pytorch_19912(call: Call) -> Array:
    """Leave out the last channel of each group, where images have one pixel."""
    one = call.groups > 1 and call.src[0, 0].size == 1
    return call.exact(weights=without(call.weights, ALL, -1) if one else call.weights)


_calls = itertools.count(5)


@mutant(DW)
def pytorch_34344(call: Call) -> Array:
    """Lose some of many images, others in each call."""
    kept = np.random.default_rng(next(_calls)).random(len(call.src)) < (0.9 if call.rank == 3 else 1)
    return call.exact(src=call.src[kept], diff_dst=call.diff_dst[kept])


@mutant(DW)
def rocm_libraries_8029(call: Call) -> Array:
    """Add parts of the sum in bf16."""
    if call.dtype != "bf16" or call.rank != 3:
        return call.exact()
    total: Array = np.zeros(call.output_shape)
    for image, plane in np.ndindex(len(call.src), 8):
        at = (slice(image, image + 1), ALL, slice(2 * plane, 2 * plane + 2))
        part = call.exact(src=call.src[at], diff_dst=call.diff_dst[at])
        total = (total + part.astype(ml_dtypes.bfloat16)).astype(ml_dtypes.bfloat16).astype(np.float64)
    return total


@mutant(DX)
def rocm_libraries_7732(call: Call) -> Array:
    """Compute the pixels of the first phase of the strides."""
    found = call.exact()
    if call.groups == 1 and min(call.strides) > 1:
        kept = np.zeros(found.shape[2:], bool)
        kept[tuple([slice(pad % s, None, s) for pad, s in zip(call.pads_begin, call.strides, strict=True)])] = True
        found = np.where(kept, found, 0)
    return found


@mutant(DX)
def rocm_libraries_10627(call: Call) -> Array:
    """Read the first half of the batch twice."""
    n = len(call.diff_dst)
    return call.exact(diff_dst=np.resize(call.diff_dst[: n // 2 or n], call.diff_dst.shape))


@mutant(DX)
def miopen_575(call: Call) -> Array:
    """Count the taps of each phase as `Y % YDot`."""
    size, stride = call.weights.shape[2], call.strides[0]
    each = -(-size // stride)
    counts = [each if (phase + 1) * each <= size else size % each for phase in range(stride)]
    lost = [tap for tap in range(size) if tap // stride >= counts[tap % stride]]
    return call.exact(weights=without(call.weights, ALL, ALL, lost) if stride > 1 else call.weights)


@mutant(DX)
def mlx_3800(call: Call) -> Array:
    """Use all channels of diff_dst in each group, if strided."""
    if call.groups == 1 or max(call.strides) == 1:
        return call.exact()
    return call.exact(weights=np.tile(call.weights, (1, call.groups, *[1] * call.rank)), groups=1)


@mutant(DW)
def burn_1891(call: Call) -> Array:
    """Take the taps that are one pixel behind, if strided and depthwise."""
    shifted = call.groups > 1 and min(call.strides) > 1
    return call.exact(pads_begin=[pad - shifted for pad in call.pads_begin])


@mutant(FORWARD)
def burn_4727(call: Call) -> Array:
    """Read the channels of the first group for rows that meet padding."""
    found, pad = call.exact(), call.pads_begin[0]
    if call.groups > 1 and pad:
        first = call.src[:, : call.src.shape[1] // call.groups]
        other = call.exact(src=np.concatenate([first] * call.groups, 1))
        for rows in (slice(pad), slice(-pad, None)):
            found[:, :, rows] = other[:, :, rows]
    return found


@mutant("ConvTransposeBackwardData")
def candle_2337(call: Call) -> Array:
    """Exchange strides and dilations."""
    return call.exact(strides=call.dilations, dilations=call.strides)


@mutant("ConvTranspose")
def torch_mlir_4650(call: Call) -> Array:
    """Crop half of what is cropped at each end."""
    crops = zip(call.pads_begin, call.pads_end, call.output_padding, strict=True)
    return call.exact(pads_begin=[(begin + end - more) // 2 for begin, end, more in crops])


@mutant(DW)
def iree_23786(call: Call) -> Array:
    """Forget the strides of groups of several channels."""
    several = call.groups > 1 and call.output_shape[1] > 1
    return call.exact(strides=[1] * call.rank if several else call.strides)


@mutant(FORWARD)
def modular_6712(call: Call) -> Array:
    """Read the pixels beside an image in the first and the last column that needs but one of them."""
    found, pad = call.exact(), call.pads_begin[-1]
    if pad > 6:
        beside = replace(call, output_shape=(*found.shape[:-1], 1))
        for at, pixel, tap in ((pad - 1, -1, 0), (-pad, 0, -1)):
            one = {"src": call.src[..., [pixel]], "weights": call.weights[..., [tap]], "pads_begin": [0, 0]}
            found[..., [at]] += beside.exact(**one)
    return found


def pointwise(op: str, inputs: dict[str, Array], output_shape: tuple[int, ...]) -> Array:
    """Multiply matrices, image by image, in the memory of the inputs: Convolution of 1x1 kernels and its gradient."""
    src = inputs["src"].reshape(*inputs["src"].shape[:2], -1)
    if op == FORWARD:
        return np.stack([inputs["weights"].reshape(output_shape[1], -1) @ image for image in src]).reshape(output_shape)
    diff_dst = inputs["diff_dst"].reshape(*inputs["diff_dst"].shape[:2], -1)
    total: Array = np.zeros((diff_dst.shape[1], src.shape[1]), np.float32)
    for image, gradient in zip(src, diff_dst, strict=True):
        total += gradient @ image.T
    return total.reshape(output_shape)


def rocm_libraries_11188(op: str, inputs: dict[str, Array], output_shape: tuple[int, ...]) -> Array:
    """Return zeros for tensors beyond 4 GB."""
    return pointwise(op, inputs, output_shape) * (max(each.nbytes for each in inputs.values()) < 1 << 32)


for kernel in (pointwise, rocm_libraries_11188):
    kernel.takes = {  # type: ignore[attr-defined]
        "ops": [DW, FORWARD], "data_formats": ["NCX"], "weights_formats": ["OIX"], "groups": False, "strides": False,
        "dilations": False, "pads": False, "bias": False,
    }  # fmt: skip
