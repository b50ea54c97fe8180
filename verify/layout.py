"""The axes of a problem's tensors in the layouts that it names, and what lies at an index of its result."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal, TypeVar

import numpy.typing as npt

from kernels.problem import ConvProblem

__all__ = [
    "along_channels",
    "channel_axes",
    "channel_axis",
    "in_data_order",
    "in_weights_order",
    "is_bias",
    "pixel_axes",
    "tap_axes",
    "weights_axis",
    "weights_position",
]

T = TypeVar("T")


def is_bias(problem: ConvProblem) -> bool:
    """Whether a problem has a bias and no weights."""
    return problem.op in ("BiasAdd", "BiasAddBackward")


def channel_axis(problem: ConvProblem) -> int:
    """Return the axis of the channels of src and dst."""
    return 1 if problem.data_format == "NCX" else problem.rank + 1


def channel_axes(problem: ConvProblem) -> tuple[int, ...]:
    """Return the axes of a result that have channels: of a gradient those of dst and of src."""
    if problem.computes == "diff_bias":
        return (0,)
    return (channel_axis(problem),) if problem.forward else (weights_axis(problem, "O"), weights_axis(problem, "I"))


def pixel_axes(problem: ConvProblem) -> range:
    """Return the spatial axes of src and dst."""
    first = 2 if problem.data_format == "NCX" else 1
    return range(first, first + problem.rank)


def tap_axes(problem: ConvProblem) -> range:
    """Return the spatial axes of the weights."""
    first = problem.weights_format.index("X")
    return range(first, first + problem.rank)


def weights_axis(problem: ConvProblem, letter: Literal["I", "O"]) -> int:
    """Return the axis of the weights that has the channels of src, `I`, or of dst, `O`."""
    place = problem.weights_format.index(letter)
    return place if place < problem.weights_format.index("X") else place + problem.rank - 1


def in_data_order(problem: ConvProblem, image: T, channel: T, pixels: Iterable[T]) -> tuple[T, ...]:
    """Return something for each axis of src or dst, in their order."""
    return (image, channel, *pixels) if problem.data_format == "NCX" else (image, *pixels, channel)


def in_weights_order(problem: ConvProblem, i: T, o: T, taps: Iterable[T]) -> tuple[T, ...]:
    """Return something for each axis of the weights, in their order."""
    found = {"I": (i,), "O": (o,), "X": tuple(taps)}
    return tuple([each for letter in problem.weights_format for each in found[letter]])


def along_channels(problem: ConvProblem, bias: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """View a tensor of the channels of dst so that it broadcasts to dst."""
    return bias.reshape((-1, *(1,) * problem.rank) if problem.data_format == "NCX" else (-1,))


def weights_position(problem: ConvProblem, index: tuple[int, ...]) -> tuple[int, int, int, tuple[int, ...]]:
    """Return the group of an element of the weights, its channels of src and dst inside the group, and its tap."""
    at = {"I": index[weights_axis(problem, "I")], "O": index[weights_axis(problem, "O")]}
    whole = problem.whole_axis
    many = (problem.src_channels if whole == "I" else problem.dst_channels) // problem.groups
    group, at[whole] = divmod(at[whole], many)
    return group, at["I"], at["O"], tuple([index[axis] for axis in tap_axes(problem)])
