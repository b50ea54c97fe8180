"""Guesses at what is wrong with a result that fails: the mistakes that kernels are most often found to make."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import permutations, product
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from kernels.plan import Stop, Storage
from kernels.problem import ConvProblem
from kernels.reference import widen
from verify.compared import Compared
from verify.evaluate import evaluate, evaluation_work
from verify.layout import along_channels, channel_axis, is_bias, pixel_axes, tap_axes, weights_axis
from verify.parts import Part, only_tap, part_of
from verify.rules import Shares
from verify.stopping import until

__all__ = ["hints"]

Array = npt.NDArray[np.float64]
Guess = tuple[str, Callable[[], Array]]
"""What a result would be said to be, and its values in that case."""

_LEAST, _MOST = 8, 1 << 21
"""Elements of a result that is looked at: a few agree by chance, and many take too long."""

_FAR = 2
"""Taps, or pixels, that a result may be shifted by."""

_PART = 2048
"""Elements that are computed again, with a mistake in the problem."""

_SAMPLED = 1 << 14
"""Elements of a result, spread over it, that are compared with a rearranged reference."""

_WORK, _PIECES_WORK = 1 << 26, 1 << 30
"""Most work of one guess, as `evaluation_work` counts it, and of all pieces of the sums."""

_COPIED = 1 << 23
"""Most values of an input that is rearranged as a whole."""

_IMAGES = 64
"""Most images, or taps, that may be the one left out."""

_UNEXPLAINED = 0.02
"""Share of the squared errors that a right guess may leave."""

_UNEXPLAINED_FEW = 1e-6
"""The same where a few errors are explained, which a wrong guess may hit by chance."""


@np.errstate(over="ignore", invalid="ignore")
def hints(compared: Compared, share: Shares, around: tuple[int, ...], stop: Stop) -> list[str]:
    """Return what the wrong result equals, in sentences; mostly none.

    Where several guesses explain the result, all are named. `share` are the errors as shares of what is allowed, and
    `around` is the index of a wrong element.
    """
    problem, exact = compared.problem, compared.exact
    if exact.size < _LEAST:
        return []
    found = _of_result(problem, compared.result, exact, stop) if exact.size <= _MOST else []
    if is_bias(problem) or problem.macs == 0:
        return found
    part = part_of(problem, compared.inputs, around, _PART)
    got, right = widen(compared.result[part.place], problem.dtype), exact[part.place]
    if (
        evaluation_work(part.problem) > _WORK
        or not (np.isfinite(got).all() and np.isfinite(right).all())
        or (got == right).all()
    ):
        return found
    guesses = until(stop, _guesses(compared, part, around, stop))
    found += [sentence for sentence, values in guesses if _explains(got, right, values())]
    contributed = _contributions(part, stop)
    wrong = share[part.place] > 1
    return found + _left_out(got, right, wrong if wrong.any() else np.ones_like(wrong), contributed)


def _explains(got: Array, right: Array, guess: Array) -> bool:
    """Whether a guess leaves hardly any error."""
    before, after = float(np.square(got - right).sum()), float(np.square(got - guess).sum())
    return bool(after <= _UNEXPLAINED * before and np.count_nonzero(guess != right) >= _LEAST)


def _left_out(
    got: Array, right: Array, wrong: npt.NDArray[np.bool_], contributed: Sequence[tuple[str, Array]]
) -> list[str]:
    """Return which contribution to the sums of the wrong elements is missing, or counted twice.

    Where it is all of these sums, that the elements are zero or twice what is right says more.
    """
    found, few, error = [], int(wrong.sum()) < _LEAST, got - right
    limit = (_UNEXPLAINED_FEW if few else _UNEXPLAINED) * float(np.square(error[wrong]).sum())
    for name, values in contributed:
        if float(np.square(right - values)[wrong].sum()) <= limit:
            continue
        for sign, words in ((1, "left out"), (-1, "counted twice")):
            if np.any(values[wrong]) and float(np.square(error + sign * values)[wrong].sum()) <= limit:
                found.append(f"{name} is {words}" + (" in the wrong elements" if not wrong.all() else ""))
    return found


def _contributions(part: Part, stop: Stop) -> list[tuple[str, Array]]:
    """Return parts of the sums that kernels forget, or count twice: name, and what they contribute."""
    problem = part.problem
    found = [(name, evaluate(changed, inputs, stop)) for name, changed, inputs in _pieces(part)]
    if problem.bias:
        bias = along_channels(problem, widen(part.inputs[2], problem.dtype))
        found.append(("the bias", np.broadcast_to(bias, problem.output_shape)))
    return found


def _pieces(part: Part) -> Iterator[tuple[str, ConvProblem, tuple[Storage, ...]]]:
    """Yield pieces of the sums: their name, and the problem and inputs that compute them."""
    problem, first = part.problem, part.inputs[0]
    if problem.forward:
        plain = replace(problem, bias=False)
        channel = channel_axis(problem)
        for at, name in {0: "first", problem.src_channels // problem.groups - 1: "last"}.items():
            some = _only(first, channel, _every(problem, at))
            yield f"the {name} src channel of a group", plain, (some, part.inputs[1])
        count = prod(problem.kernel)
        few = 1 < count <= _IMAGES and count * evaluation_work(plain) <= _PIECES_WORK
        for position in np.ndindex(*problem.kernel) if few else ():
            yield f"tap {list(position)}", plain, (first, only_tap(problem, part.inputs[1], position))
        return
    dst = part.inputs[1]
    for image in range(problem.n) if 1 < problem.n <= _IMAGES else ():
        single = tuple(tensor[image : image + 1] for tensor in part.inputs)
        yield f"image {image} of {problem.n}", replace(problem, n=1), single
    last = (first[-1:], dst[-1:])
    for name, axis in zip("zyx"[3 - problem.rank :], pixel_axes(problem), strict=True):
        size, name = dst.shape[axis], f"pixel {name}"
        for at in {0: 0, size - 1: 0} if size > 1 else ():
            yield f"{name} = {at} of diff_dst", problem, (first, _only(dst, axis, [at]))
            if problem.n > 1:
                yield (
                    f"{name} = {at} of diff_dst in the last image", replace(problem, n=1),
                    (last[0], _only(last[1], axis, [at])),
                )  # fmt: skip


def _every(problem: ConvProblem, channel: int) -> list[int]:
    size = problem.src_channels // problem.groups
    return [group * size + channel for group in range(problem.groups)]


def _only(tensor: Storage, axis: int, places: Sequence[int]) -> Storage:
    """Return a tensor in which all but some places of an axis are zero."""
    found = np.zeros_like(tensor)
    at = (slice(None),) * axis + (list(places),)
    found[at] = tensor[at]
    return found


def _guesses(compared: Compared, part: Part, around: tuple[int, ...], stop: Stop) -> Iterator[Guess]:
    """Yield what the part would be with a mistake in the problem or in the inputs."""
    problem, small, inputs = compared.problem, part.problem, compared.inputs

    def of(changed: ConvProblem, tensors: Sequence[Storage] = part.inputs) -> Callable[[], Array]:
        return lambda: evaluate(changed, tensors, stop)

    def whole(*tensors: Storage) -> Callable[[], Array]:
        return lambda: evaluate(small, part_of(problem, tensors, around, _PART).inputs, stop)

    ones = (1,) * problem.rank
    if max(problem.strides) > 1:
        yield "as if strides were 1", of(replace(small, strides=ones))
    if max(problem.dilations) > 1:
        yield "as if dilations were 1", of(replace(small, dilations=ones))
    if any(problem.pads_begin):
        yield "as if pads_begin were 0", of(replace(small, pads_begin=(0,) * problem.rank))
        if not small.transposed:
            for words, tensor in _unmasked(small, part.inputs[0]):
                pads = (*problem.pads_begin[:-1], 0)
                spatial = (*problem.src_spatial[:-1], tensor.shape[pixel_axes(problem)[-1]])
                changed = replace(small, pads_begin=pads, src_spatial=spatial)
                yield f"as if the padding were not masked: {words}", of(changed, (tensor, *part.inputs[1:]))
    if (ends := _pads_end(problem)) != problem.pads_begin:
        yield "as if pads_begin and pads_end were exchanged", of(replace(small, pads_begin=ends))
    channel = channel_axis(problem)
    if problem.groups > 1 and inputs[0].size <= _COPIED:
        size = problem.src_channels // problem.groups
        for words, tensor in (
            ("every group read the src channels of the first one", _first_group(inputs[0], channel, size)),
            ("every group read the src channels of the next one", np.roll(inputs[0], -size, channel)),
            ("every group read the src channels of the one before", np.roll(inputs[0], size, channel)),
        ):
            yield f"as if {words}", whole(tensor, *inputs[1:])
    if not problem.forward:
        src, dst = inputs[:2]
        if src.shape == dst.shape and max(src.size, problem.macs) <= _COPIED:
            yield "as if src and diff_dst were swapped", whole(dst, src)
        return
    taps = tuple(tap_axes(problem))
    if max(problem.kernel) > 1:
        flipped = np.ascontiguousarray(np.flip(part.inputs[1], taps))
        yield (
            "as if the taps were in reverse order: a kernel flip too many",
            of(small, (part.inputs[0], flipped, *part.inputs[2:])),
        )
    if problem.rank > 1 and problem.kernel[-1] == problem.kernel[-2] > 1:
        swapped = np.ascontiguousarray(np.swapaxes(part.inputs[1], taps[-1], taps[-2]))
        yield "as if the axes of the taps were swapped", of(small, (part.inputs[0], swapped, *part.inputs[2:]))
    if inputs[1].size <= _COPIED:
        for name, tensor in _layouts(inputs[1], problem.weights_format, problem.rank, read=True):
            yield f"as if weights_format were {name}", whole(inputs[0], tensor, *inputs[2:])


def _pads_end(problem: ConvProblem) -> tuple[int, ...]:
    wide, narrow = problem.src_spatial, problem.dst_spatial
    if problem.transposed:
        wide, narrow = narrow, wide
    reached = [
        (count - 1) * stride + (taps - 1) * dilation + 1
        for count, stride, taps, dilation in zip(
            narrow, problem.strides, problem.kernel, problem.dilations, strict=True
        )
    ]
    return tuple([far - size - pad for far, size, pad in zip(reached, wide, problem.pads_begin, strict=True)])


def _first_group(tensor: Storage, channel: int, size: int) -> Storage:
    return np.take(tensor, np.arange(tensor.shape[channel]) % size, channel)


def _unmasked(problem: ConvProblem, tensor: Storage) -> Iterator[tuple[str, Storage]]:
    """Yield src with its last axis padded by what lies beside it in memory, and by the pixels at its ends."""
    first, axis = pixel_axes(problem)[0], pixel_axes(problem)[-1]
    size, begin, kernel = tensor.shape[axis], problem.pads_begin[-1], problem.kernel[-1]
    reach = (problem.dst_spatial[-1] - 1) * problem.strides[-1] + (kernel - 1) * problem.dilations[-1] + 1
    if not 0 < begin <= size or reach - begin > 2 * size:
        return
    at = np.arange(-begin, max(size, reach - begin))
    rows = prod(tensor.shape[first : axis + 1])
    flat = np.moveaxis(tensor, channel_axis(problem), -1).reshape(tensor.shape[0], rows, -1)
    places = np.arange(rows // size)[:, None] * size + at
    beside = np.where(((places >= 0) & (places < rows))[None, ..., None], flat[:, np.clip(places, 0, rows - 1)], 0)
    channels = beside.shape[-1]
    beside = beside.reshape(*tensor.shape[:1], *tensor.shape[first:axis], len(at), channels).astype(tensor.dtype)
    beside = np.moveaxis(beside, -1, channel_axis(problem))
    yield "it reads what lies beside a row in memory", np.ascontiguousarray(beside)
    yield "it repeats the pixels at the ends of a row", np.take(tensor, np.clip(at, 0, size - 1), axis)


def _layouts(
    tensor: npt.NDArray[Any], letters: str, rank: int, *, read: bool = False
) -> Iterator[tuple[str, npt.NDArray[Any]]]:
    """Yield weights as written in another layout than `letters`, as views of other shapes with their elements in order.

    Or `read` as if they were in it, as copies; X is never split.
    """
    x = letters.index("X")
    sizes = [
        prod(tensor.shape[x : x + rank]) if at == x else tensor.shape[at + (rank - 1) * (at > x)] for at in range(3)
    ]
    for order in permutations(range(3)):
        wide = [at for at in order if sizes[at] > 1]
        if wide == sorted(wide):  # the same in memory
            continue
        if read:
            moved = tensor.reshape([sizes[at] for at in order]).transpose(np.argsort(order))
            moved = np.ascontiguousarray(moved).reshape(tensor.shape)
        else:
            moved = tensor.reshape(sizes).transpose(order)
        yield "".join(letters[at] for at in order), moved


def _of_result(problem: ConvProblem, result: Storage, exact: Array, stop: Stop) -> list[str]:
    """Return how the whole result is a rearranged or scaled reference."""
    got = widen(result, problem.dtype)
    if not (np.isfinite(got).all() and np.isfinite(exact).all()):
        return []
    if _same(got, exact):  # a few wrong elements in data that look alike everywhere
        return []
    found = []
    weights = problem.computes == "diff_weights"
    axes = tap_axes(problem) if weights else pixel_axes(problem) if problem.forward else range(0)
    shift = _shift(got, exact, axes, stop)
    if shift is not None and weights:
        begin = [
            pad - far * dilation
            for pad, far, dilation in zip(problem.pads_begin, shift, problem.dilations, strict=True)
        ]
        found.append(f"the result is the reference shifted by {shift} taps: as if pads_begin were {begin}")
    elif shift is not None:
        found.append(f"the result is the reference shifted by {shift} pixels: check pads_begin")
    what = "taps" if weights else "pixels"
    if prod(exact.shape[axis] for axis in axes) > 1 and _same(got, np.flip(exact, tuple(axes))):
        more = ": a kernel flip too many" if weights else ""
        found.append(f"the result is the reference with its {what} in reverse order{more}")
    square = len(axes) > 1 and exact.shape[axes[-1]] == exact.shape[axes[-2]] > 1
    if square and _same(got, np.swapaxes(exact, axes[-1], axes[-2])):
        found.append(f"the result is the reference with the last two axes of its {what} swapped")
    found += [sentence for sentence, values in until(stop, _relaid(problem, exact)) if _same(got, values)]
    scale = _factor(got, exact)
    if scale is not None:
        found.append(f"the result is {scale:.6g} times the reference everywhere")
        if problem.n > 1 and abs(scale * problem.n - 1) < 1e-3:
            found[-1] += ": it is averaged over the batch"
    return found


def _relaid(problem: ConvProblem, exact: Array) -> Iterator[tuple[str, Array]]:
    """Yield the reference in other layouts."""
    if problem.computes == "diff_weights":
        i, o = weights_axis(problem, "I"), weights_axis(problem, "O")
        swapped = np.swapaxes(exact, i, o)
        if swapped.shape == exact.shape and exact.shape[i] > 1:
            also = "check weights_format, and that src and diff_dst are not swapped"
            yield f"the result is the reference with its two channel axes swapped: {also}", swapped
        for name, values in _layouts(exact, problem.weights_format, problem.rank):
            if swapped.shape != exact.shape or not np.array_equal(_sampled(values), _sampled(swapped)):
                yield f"the result has the layout {name} instead of {problem.weights_format}", values
    elif problem.forward and problem.rank:
        first = problem.data_format == "NCX"
        other = np.moveaxis(exact, 1, -1) if first else np.moveaxis(exact, -1, 1)
        if min(problem.dst_channels, prod(problem.dst_spatial)) > 1:
            yield f"the result has the layout {'NXC' if first else 'NCX'} instead of {problem.data_format}", other


def _shift(got: Array, exact: Array, axes: range, stop: Stop) -> list[int] | None:
    """Return how far along each axis the elements of `got` are found in `exact`; None where they are not."""
    offsets = product(range(-_FAR, _FAR + 1), repeat=len(axes))
    nearest = sorted(offsets, key=lambda far: sum(map(abs, far)))[1:]
    for far in until(stop, nearest):
        if any(2 * abs(step) > exact.shape[axis] for step, axis in zip(far, axes, strict=True)):
            continue
        some: list[slice] = [slice(None)] * exact.ndim
        other = list(some)
        for step, axis in zip(far, axes, strict=True):
            some[axis] = slice(max(0, -step), min(exact.shape[axis], exact.shape[axis] - step))
            other[axis] = slice(max(0, step), min(exact.shape[axis], exact.shape[axis] + step))
        if _same(got[tuple(some)], exact[tuple(other)]):
            return list(far)
    return None


def _sampled(array: Array) -> Array:
    """Return the elements of an array in their order; of many, some that are spread over it."""
    if array.size <= _SAMPLED:
        return array.reshape(-1)
    places = np.linspace(0, array.size - 1, _SAMPLED).astype(np.int64)
    return array[np.unravel_index(places, array.shape)]


def _same(got: Array, other: Array) -> bool:
    """Whether nearly all elements agree to about the digits of bf16, and not because they are zero."""
    got, other = _sampled(got), _sampled(other)
    if other.size == 0 or not other.any():
        return False
    close = np.abs(got - other) <= 2.0**-6 * np.abs(other) + 1e-3 * np.sqrt(np.mean(other * other))
    return bool(close.mean() > 0.97)


def _factor(got: Array, exact: Array) -> float | None:
    """Return the constant factor between the two, if there is one and it is not 1 or 0."""
    norm = float((exact * exact).sum())
    scale = float((got * exact).sum()) / norm if norm else 0.0
    if abs(scale) < 1e-6 or abs(scale - 1) < 0.02 or not _same(got / scale, exact):
        return None
    return scale
