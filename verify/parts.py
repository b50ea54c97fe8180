"""A part of a problem that can be computed alone: some channels and images, for all taps and pixels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil, prod, sqrt

import numpy as np

from kernels.plan import Storage
from kernels.problem import ConvProblem
from verify.layout import channel_axis, in_data_order, in_weights_order, is_bias, tap_axes, weights_position

__all__ = ["Part", "only_tap", "origin", "part_of"]

Index = tuple[int, ...]


@dataclass(frozen=True)
class Part:
    """A smaller problem with its inputs, which are views, and the place of its result in the whole one."""

    problem: ConvProblem
    inputs: tuple[Storage, ...]
    place: tuple[slice, ...]
    input_places: tuple[tuple[slice, ...], ...]


def origin(place: tuple[slice, ...]) -> list[int]:
    """Return the index of the first element of a place."""
    return [part.start or 0 for part in place]


def part_of(
    problem: ConvProblem, inputs: Sequence[Storage], around: Index, elements: int, *, one_dst: bool = False
) -> Part:
    """Return a part of about so many elements or more, one of them at the index `around` of the result.

    With `one_dst` it is one dst channel, for all src channels of its group.
    """
    if is_bias(problem):
        return _of_bias(problem, inputs, around, elements)
    src, dst, groups = (
        problem.src_channels // problem.groups,
        problem.dst_channels // problem.groups,
        problem.groups,
    )
    forward = problem.forward
    pairs = max(1, ceil(elements / prod(problem.dst_spatial if forward else problem.kernel)))
    if forward:
        many_src, many_dst = src, min(dst, pairs)
    else:
        many_dst = min(dst, max(ceil(sqrt(pairs)), ceil(pairs / src)))
        many_src = min(src, ceil(pairs / many_dst))
    of_group = dst if forward else src * dst
    if one_dst:
        many_dst, many_src = 1, src
    many_groups = min(groups, max(1, pairs // of_group)) if pairs >= of_group and not one_dst else 1
    group, i, o = _channels_at(problem, around)
    group = min(group, groups - many_groups)
    if many_groups > 1:
        many_src, many_dst = src, dst
    i, o = min(i, src - many_src), min(o, dst - many_dst)
    images = slice(around[0], around[0] + 1) if forward else slice(0, problem.n)
    of_src = _range(group, src, i, many_src, many_groups)
    of_dst = _range(group, dst, o, many_dst, many_groups)
    smaller = replace(
        problem, n=images.stop - images.start, groups=many_groups,
        src_channels=of_src.stop - of_src.start, dst_channels=of_dst.stop - of_dst.start,
    )  # fmt: skip
    divided_src = slice(i, i + many_src) if problem.groups_axis == "I" else of_src
    divided_dst = slice(o, o + many_dst) if problem.groups_axis == "O" else of_dst
    weights = in_weights_order(problem, divided_src, divided_dst, (slice(None),) * problem.rank)
    src_place, dst_place = _data(problem, images, of_src), _data(problem, images, of_dst)
    places: list[tuple[slice, ...]] = [src_place, weights if forward else dst_place, (of_dst,)]
    cut = tuple([tensor[at] for tensor, at in zip(inputs, places, strict=False)])
    return Part(smaller, cut, dst_place if forward else weights, tuple(places[: len(cut)]))


def only_tap(problem: ConvProblem, weights: Storage, tap: Index) -> Storage:
    """Return weights that are zero in all other taps."""
    found, at = np.zeros_like(weights), (slice(None),) * tap_axes(problem)[0] + tap
    found[at] = weights[at]
    return found


def _of_bias(problem: ConvProblem, inputs: Sequence[Storage], around: Index, elements: int) -> Part:
    forward = problem.forward
    channel = around[0] if not forward else around[channel_axis(problem)]
    many = max(1, min(problem.dst_channels, elements // (prod(problem.dst_spatial) if forward else 1)))
    low = min(channel, problem.dst_channels - many)
    images = slice(around[0], around[0] + 1) if forward else slice(0, problem.n)
    channels = slice(low, low + many)
    smaller = replace(problem, n=images.stop - images.start, src_channels=many, dst_channels=many, groups=many)
    data = _data(problem, images, channels)
    places = (data, (channels,))[: len(inputs)]
    cut = tuple([tensor[at] for tensor, at in zip(inputs, places, strict=True)])
    return Part(smaller, cut, data if forward else (channels,), places)


def _channels_at(problem: ConvProblem, index: Index) -> tuple[int, int, int]:
    """Return the group of an element of the result, and its channels of src and dst inside the group."""
    if problem.forward:
        group, o = divmod(index[channel_axis(problem)], problem.dst_channels // problem.groups)
        return group, 0, o
    return weights_position(problem, index)[:3]


def _range(group: int, channels: int, first: int, many: int, groups: int) -> slice:
    """Return channels of the whole tensor: some of one group, or all of several."""
    if groups > 1:
        return slice(group * channels, (group + groups) * channels)
    return slice(group * channels + first, group * channels + first + many)


def _data(problem: ConvProblem, images: slice, channels: slice) -> tuple[slice, ...]:
    return in_data_order(problem, images, channels, (slice(None),) * problem.rank)
