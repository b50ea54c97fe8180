"""What is to be computed, as plain integers: the one descriptor that every kernel and schedule reads."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from functools import cached_property
from math import prod
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from kernels.dtypes import DTYPES, DTypeName

__all__ = ["FEW_TAPS", "Algorithm", "ConvProblem", "Dims", "OpName", "data_steps", "storage_dtype", "wrapped"]

FEW_TAPS = 64
"""Taps of an axis up to which they are looked at one by one."""

OpName = Literal[
    "ConvolutionBackwardWeights",
    "ConvTransposeBackwardWeights",
    "ConvTranspose",
    "Convolution",
    "BiasAdd",
    "BiasAddBackward",
]
Algorithm = Literal["direct", "winograd", "auto"]
Ints = tuple[int, ...]
Span = tuple[int, int]


def storage_dtype(dtype: str) -> np.dtype[Any]:
    """Return the NumPy dtype that stores `dtype`: f32 and f64 as themselves, f16 and bf16 as their 16 bits."""
    return DTYPES[dtype].storage


def wrapped(values: Iterable[int]) -> npt.NDArray[np.int64]:
    """Return integers modulo 2**64, in which compiled code computes addresses.

    Strides, dilations and pads may be anything up to 2**63, and their products with byte steps more. What meets
    data comes to an address inside a tensor all the same, because sums and products keep the modulus.
    """
    if isinstance(values, range):
        first, step = wrapped((values.start, values.step))
        rising: npt.NDArray[np.int64] = np.arange(len(values)) * step + first
        return rising
    return np.array([(value + (1 << 63)) % (1 << 64) - (1 << 63) for value in values], np.int64)


def data_steps(data_format: str, channels: int, spatial: tuple[int, int, int]) -> tuple[int, int, int, int, int]:
    """Return the element steps of (n, d, h, w, channel) of a data tensor."""
    d, h, w = spatial
    if data_format == "NCX":
        return channels * d * h * w, h * w, w, 1, d * h * w
    return d * h * w * channels, h * w * channels, w * channels, channels, 1


def _three(values: Ints, fill: int) -> tuple[int, int, int]:
    padded = (fill,) * (3 - len(values)) + values
    return padded[0], padded[1], padded[2]


@dataclass(frozen=True)
class Dims:
    """An operation as a wide and a narrow tensor, ranks raised to three spatial axes by leading ones.

    `wide` is the tensor sampled at ``x * stride + k * dilation - pad`` (src of Convolution, diff_dst of
    ConvTranspose), `narrow` the one sampled at ``x``. ConvTranspose is Convolution with the two swapped, so
    nothing below this class knows which of them it computes.
    """

    n: int
    groups: int
    wide_channels: int
    narrow_channels: int
    wide: tuple[int, int, int]
    narrow: tuple[int, int, int]
    kernel: tuple[int, int, int]
    strides: tuple[int, int, int]
    dilations: tuple[int, int, int]
    pads: tuple[int, int, int]
    gathers: bool = False
    """Whether the operation is Convolution, whose dst is the narrow tensor; ConvTranspose has a wide dst."""

    @property
    def src(self) -> tuple[int, int, int]:
        """Spatial sizes of what a forward operation reads."""
        return self.wide if self.gathers else self.narrow

    @property
    def dst(self) -> tuple[int, int, int]:
        """Spatial sizes of what a forward operation computes."""
        return self.narrow if self.gathers else self.wide

    @property
    def src_channels(self) -> int:
        """Channels of a group of what a forward operation reads."""
        return self.wide_channels if self.gathers else self.narrow_channels

    @property
    def dst_channels(self) -> int:
        """Channels of a group of what a forward operation computes."""
        return self.narrow_channels if self.gathers else self.wide_channels

    def tap_range(self, axis: int, tap: int) -> tuple[int, int]:
        """Return the half-open range of narrow positions whose `tap` along `axis` lies inside the wide tensor."""
        shift = self.wide_at(axis, tap, 0)
        stride = self.strides[axis]
        low = min(self.narrow[axis], max(0, -(shift // stride)))  # ceil(-shift / stride)
        high = min(self.narrow[axis], (self.wide[axis] - 1 - shift) // stride + 1)
        return low, max(low, high)

    def tap_ranges(self, axis: int) -> npt.NDArray[np.int64]:
        """Return `tap_range` of every tap of an axis, as rows; they fall as taps rise."""
        taps, stride, dilation, pad = self.kernel[axis], self.strides[axis], self.dilations[axis], self.pads[axis]
        # one by one where they are few, or 64 bits too small
        if taps <= FEW_TAPS or max(taps * dilation, pad, stride) + self.wide[axis] >= 1 << 62:
            return np.array([self.tap_range(axis, tap) for tap in range(taps)], np.int64).reshape(-1, 2)
        shifts = np.arange(taps) * dilation - pad
        low = np.minimum(self.narrow[axis], np.maximum(0, -(shifts // stride)))
        high = np.minimum(self.narrow[axis], (self.wide[axis] - 1 - shifts) // stride + 1)
        return np.column_stack([low, np.maximum(low, high)])

    def slices(self, axis: int, tap: int) -> tuple[slice, slice]:
        """Return the narrow and the wide positions that meet in a tap of an axis."""
        low, high = self.tap_range(axis, tap)
        if high == low:
            return slice(low, low), slice(0, 0)
        start, end = (self.wide_at(axis, tap, narrow) for narrow in (low, high - 1))
        return slice(low, high), slice(start, end + 1, self.strides[axis])

    def wide_at(self, axis: int, tap: Any, narrow: Any) -> Any:
        """Return the wide position that a narrow one meets in a tap of an axis, given numbers or arrays of them."""
        return narrow * self.strides[axis] + tap * self.dilations[axis] - self.pads[axis]

    def meetings(self, axis: int) -> npt.NDArray[np.int64]:
        """Count the narrow positions that each tap of an axis meets."""
        found: npt.NDArray[np.int64] = self.tap_ranges(axis) @ (-1, 1)
        return found

    def met(self, axis: int) -> int:
        """Count the pairs of a narrow position and a tap of an axis that meet."""
        return int(self.meetings(axis).sum())


@dataclass(frozen=True)
class ConvProblem:
    """One operation on tensors of known shape: integers and names only, hashable, validated before.

    `src_channels` and `dst_channels` are I and O of the pages, for ConvTranspose too; `pads_begin` counts elements,
    `dilations` of 1 means dense. `weights_format` is the axis order of the weights (any of XIO, OIX, IOX, XOI) and
    `groups_axis` the letter of the axis that groups divide. BiasAdd and BiasAddBackward have no weights: src and dst
    have one shape, with any number of spatial axes, and the other fields are those of a kernel of ones. `algorithm` is
    the caller's choice: direct sums, Winograd's (see `kernels.winograd.rules`), or what is faster.
    """

    op: OpName
    dtype: DTypeName
    n: int
    src_channels: int
    dst_channels: int
    groups: int
    src_spatial: Ints
    dst_spatial: Ints
    kernel: Ints
    strides: Ints
    dilations: Ints
    pads_begin: Ints
    data_format: Literal["NCX", "NXC"]
    weights_format: Literal["XIO", "OIX", "IOX", "XOI"]
    groups_axis: Literal["I", "O"] = "I"
    bias: bool = field(default=False)
    algorithm: Algorithm = "direct"

    def __hash__(self) -> int:
        """Return a hash that is computed once: every lookup of a plan or of its units needs it."""
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash(tuple(getattr(self, each.name) for each in fields(self)))

    def __getstate__(self) -> dict[str, object]:
        """Return the fields alone: hashes of strings differ from process to process."""
        return {each.name: getattr(self, each.name) for each in fields(self)}

    @classmethod
    def of_bias(
        cls, op: OpName, dtype: DTypeName, n: int, channels: int, spatial: Ints, data_format: Literal["NCX", "NXC"]
    ) -> ConvProblem:
        """Return the problem of BiasAdd or BiasAddBackward on tensors of one shape."""
        ones, zeros = (1,) * len(spatial), (0,) * len(spatial)
        return cls(
            op=op, dtype=dtype, n=n, src_channels=channels, dst_channels=channels, groups=channels, src_spatial=spatial,
            dst_spatial=spatial, kernel=ones, strides=ones, dilations=ones, pads_begin=zeros, data_format=data_format,
            weights_format="OIX", bias=op == "BiasAdd",
        )  # fmt: skip

    @property
    def computes(self) -> Literal["dst", "diff_weights", "diff_bias"]:
        """What the result is."""
        if self.op == "BiasAddBackward":
            return "diff_bias"
        return "diff_weights" if self.op.endswith("BackwardWeights") else "dst"

    @property
    def forward(self) -> bool:
        """Whether the result is dst."""
        return self.computes == "dst"

    @property
    def transposed(self) -> bool:
        """Whether it belongs to ConvTranspose, whose dst is the wide tensor."""
        return self.op.startswith("ConvT")

    @property
    def places(self) -> tuple[int, int]:
        """Which of src and dst, 0 and 1, are the wide and the narrow tensor."""
        return (1, 0) if self.transposed else (0, 1)

    @property
    def letters(self) -> tuple[str, str]:
        """The letters of the wide and of the narrow tensor's channels among the axes of the weights."""
        return ("O", "I") if self.transposed else ("I", "O")

    @property
    def whole_axis(self) -> Literal["I", "O"]:
        """The letter of the axis that groups do not divide: it holds the channels of all groups one after another."""
        return "O" if self.groups_axis == "I" else "I"

    @cached_property
    def src_shape(self) -> Ints:
        """Shape of src in `data_format`."""
        return self._data_shape(self.src_channels, self.src_spatial)

    @cached_property
    def dst_shape(self) -> Ints:
        """Shape of dst and diff_dst in `data_format`."""
        return self._data_shape(self.dst_channels, self.dst_spatial)

    @cached_property
    def weights_shape(self) -> Ints:
        """Shape of weights and diff_weights in `weights_format`."""
        sizes = {"I": (self.src_channels,), "O": (self.dst_channels,), "X": self.kernel}
        sizes[self.groups_axis] = (sizes[self.groups_axis][0] // self.groups,)
        return tuple(size for letter in self.weights_format for size in sizes[letter])

    @cached_property
    def input_shapes(self) -> tuple[Ints, ...]:
        """Shapes of the inputs in the order that `run_unit` and `compute` take them."""
        if self.computes == "diff_weights":
            return self.src_shape, self.dst_shape
        if self.computes == "diff_bias":
            return (self.dst_shape,)
        weights = () if self.op == "BiasAdd" else (self.weights_shape,)
        return self.src_shape, *weights, *(((self.dst_channels,),) if self.bias else ())

    @cached_property
    def output_shape(self) -> Ints:
        """Shape of the result."""
        shapes = {"dst": self.dst_shape, "diff_weights": self.weights_shape, "diff_bias": (self.dst_channels,)}
        return shapes[self.computes]

    @property
    def output_dtype(self) -> np.dtype[Any]:
        """NumPy dtype in which the result is stored."""
        return storage_dtype(self.dtype)

    @property
    def rank(self) -> int:
        """Number of spatial axes."""
        return len(self.kernel)

    @cached_property
    def macs(self) -> int:
        """Nominal multiply-adds, taps in the padding included."""
        pixels = self.src_spatial if self.transposed else self.dst_spatial
        channels = self.src_channels * self.dst_channels // self.groups
        return self.n * prod(pixels) * prod(self.kernel) * channels

    @cached_property
    def dims(self) -> Dims:
        """The problem as wide and narrow tensors (see `Dims`)."""
        wide = (self.src_channels, self.src_spatial)
        narrow = (self.dst_channels, self.dst_spatial)
        if self.transposed:
            wide, narrow = narrow, wide
        return Dims(
            n=self.n,
            groups=self.groups,
            wide_channels=wide[0] // self.groups,
            narrow_channels=narrow[0] // self.groups,
            wide=_three(wide[1], 1),
            narrow=_three(narrow[1], 1),
            kernel=_three(self.kernel, 1),
            strides=_three(self.strides, 1),
            dilations=_three(self.dilations, 1),
            pads=_three(self.pads_begin, 0),
            gathers=self.op == "Convolution",
        )

    @cached_property
    def weights_strides(self) -> tuple[int, int, int, int]:
        """Element strides of the weights for (group, wide channel, narrow channel, tap).

        Channels are counted inside their group. The tap stride serves the flattened index of the kernel position,
        because X is never split. The axis that groups divide holds one group; the other one holds all of them.
        """
        stride = {"I": 1, "O": 1, "X": 1}
        sizes = {"I": self.src_channels, "O": self.dst_channels, "X": prod(self.kernel)}
        sizes[self.groups_axis] //= self.groups
        step = 1
        for letter in reversed(self.weights_format):
            stride[letter] = step
            step *= sizes[letter]
        group = sizes[self.whole_axis] // self.groups * stride[self.whole_axis]
        wide, narrow = self.letters
        return group, stride[wide], stride[narrow], stride["X"]

    def weights_box(self, groups: Span, wide: Span, narrow: Span) -> tuple[Ints, Ints]:
        """Return offset and shape, in the weights' axes, of some groups, and of channels of each in both tensors.

        Channels of several groups are all that they have: of one group they may be some.
        """
        spans = dict(zip(self.letters, (wide, narrow), strict=True))
        whole = self.whole_axis
        each = (self.src_channels if whole == "I" else self.dst_channels) // self.groups
        first, last = spans[whole]
        assert groups[1] - groups[0] == 1 or last - first == each, (self, groups, wide, narrow)
        spans[whole] = groups[0] * each + first, (groups[1] - 1) * each + last
        found: list[Span] = []
        for letter in self.weights_format:
            found += [(0, size) for size in self.kernel] if letter == "X" else [spans[letter]]
        return tuple(low for low, _ in found), tuple(high - low for low, high in found)

    def _data_shape(self, channels: int, spatial: Ints) -> Ints:
        if self.data_format == "NCX":
            return (self.n, channels, *spatial)
        return (self.n, *spatial, channels)
