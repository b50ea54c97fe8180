"""Shape inference of the convolution family: integers in, integers out.

Per spatial axis, with S the size of `src`, D the size of `dst`, K taps, s stride, d dilation, b and e the
padding at the beginning and the end, p the output padding, and E = (K - 1) * d + 1 the effective kernel:

    Convolution     D = floor((S + b + e - E) / s) + 1, for S + b + e >= E
    ConvTranspose   D = s * (S - 1) + E - b - e + p

A format names the axis order: `N` batch, `C` channels of a data tensor, `I` and `O` channels of `src` and `dst`, `X`
all spatial axes. Groups divide the I channels of a convolution's weights. For a transposed convolution oneDNN's code
divides O, but a note on its pages divides I: the shape shows which.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Literal

__all__ = [
    "INT32_MAX",
    "INT64_MAX",
    "GroupsAxis",
    "auto_pad_convolution",
    "auto_pad_transposed",
    "convolution_size",
    "data_axes",
    "data_shape",
    "effective_kernel",
    "elements",
    "groups_axis_of",
    "split_data",
    "split_weights",
    "transposed_size",
    "weights_channels",
    "weights_shape",
]

GroupsAxis = Literal["I", "O"]

INT32_MAX = 2**31 - 1
INT64_MAX = 2**63 - 1


def elements(shape: Sequence[int]) -> int:
    """Return the number of elements of a shape, without overflow."""
    return prod(shape)


def effective_kernel(kernel: int, dilation: int) -> int:
    """Return E, the number of elements from the first to the last tap."""
    return (kernel - 1) * dilation + 1


def convolution_size(size: int, begin: int, end: int, effective: int, stride: int) -> int:
    """Return the output size of a convolution axis; 0 when the kernel does not fit the padded input.

    Truncating division would give 1 for an input that is up to s - 1 elements too short.
    """
    room = size + begin + end - effective
    return room // stride + 1 if room >= 0 else 0


def transposed_size(size: int, begin: int, end: int, effective: int, stride: int, output_padding: int) -> int:
    """Return the output size of a transposed convolution axis; it can be zero or negative."""
    return stride * (size - 1) + effective - begin - end + output_padding


def auto_pad_convolution(mode: str, size: int, effective: int, stride: int) -> tuple[int, int]:
    """Return (begin, end) padding for `valid`, `same_upper` or `same_lower` on an axis of a convolution.

    With the `same` modes the output has ceil(size / stride) elements.
    """
    if mode == "valid":
        return 0, 0
    return _halves(mode, max(0, effective - (size % stride or stride)))


def auto_pad_transposed(mode: str, effective: int, stride: int) -> tuple[int, int]:
    """Return (begin, end) padding for an axis of a transposed convolution; it does not depend on the input size.

    With the `same` modes the total is E - s, so that the output is s times the input if E >= s. A shorter kernel gets
    no padding, and an output of s * (S - 1) + E elements.
    """
    if mode == "valid":
        return 0, 0
    return _halves(mode, max(0, effective - stride))


def _halves(mode: str, total: int) -> tuple[int, int]:
    half = total // 2
    return (half, total - half) if mode == "same_upper" else (total - half, half)


def data_axes(data_format: str, rank: int) -> tuple[int, slice]:
    """Return the channel axis and the slice of the spatial axes of a data tensor."""
    return (1, slice(2, rank)) if data_format == "NCX" else (rank - 1, slice(1, rank - 1))


def split_data(shape: Sequence[int], data_format: str) -> tuple[int, int, tuple[int, ...]]:
    """Return (N, channels, spatial sizes) of a data shape in `NCX` or `NXC` order."""
    channel, spatial = data_axes(data_format, len(shape))
    return shape[0], shape[channel], tuple(shape[spatial])


def data_shape(n: int, channels: int, spatial: Sequence[int], data_format: str) -> tuple[int, ...]:
    """Return the shape of a data tensor in `NCX` or `NXC` order."""
    return (n, channels, *spatial) if data_format == "NCX" else (n, *spatial, channels)


def split_weights(shape: Sequence[int], weights_format: str) -> tuple[int, int, tuple[int, ...]]:
    """Return (I extent, O extent, kernel) of a weights shape; one of the extents is divided by the groups."""
    first = weights_format.startswith("X")
    kernel, channels = (shape[:-2], shape[-2:]) if first else (shape[2:], shape[:2])
    extents = dict(zip(weights_format.replace("X", ""), channels, strict=True))
    return extents["I"], extents["O"], tuple(kernel)


def weights_shape(i: int, o: int, kernel: Sequence[int], weights_format: str) -> tuple[int, ...]:
    """Return the shape of weights with these extents, in the order of the format."""
    extents = {"I": (i,), "O": (o,), "X": tuple(kernel)}
    return tuple([size for letter in weights_format for size in extents[letter]])


def weights_channels(
    transposed: bool, src_channels: int, dst_channels: int, groups: int
) -> tuple[tuple[GroupsAxis, int, int], ...]:
    """Return every valid (groups axis, I extent, O extent) of the weights, oneDNN's own reading first."""
    divided_i: tuple[GroupsAxis, int, int] = ("I", src_channels // groups, dst_channels)
    if not transposed:
        return (divided_i,)
    return (("O", src_channels, dst_channels // groups), divided_i)


def groups_axis_of(
    transposed: bool, i: int, o: int, src_channels: int, dst_channels: int, groups: int
) -> GroupsAxis | None:
    """Return the axis of the weights that groups divide, or None if their extents fit neither reading."""
    for axis, right_i, right_o in weights_channels(transposed, src_channels, dst_channels, groups):
        if (i, o) == (right_i, right_o):
            return axis
    return None
