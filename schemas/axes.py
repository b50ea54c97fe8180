"""The rules of one spatial axis: padding, output size and output padding."""

from __future__ import annotations

from dataclasses import dataclass

from schemas.call import Call
from schemas.problems import Problem, number, problem
from schemas.shapes import (
    INT64_MAX,
    auto_pad_convolution,
    auto_pad_transposed,
    convolution_size,
    effective_kernel,
    transposed_size,
)

__all__ = ["Axis", "resolve_axis"]


@dataclass(slots=True)
class Axis:
    """One spatial axis: sizes of `src` and `dst`, number of taps, and attributes.

    `dst` is None while it is to be inferred, `output_padding` if it is not given. `at` is the index of the axis in
    `diff_dst`.
    """

    index: int
    at: int
    src: int
    dst: int | None
    kernel: int
    stride: int
    dilation: int
    begin: int
    end: int
    output_padding: int | None

    @property
    def effective(self) -> int:
        """E, the number of elements from the first to the last tap."""
        return effective_kernel(self.kernel, self.dilation)

    @property
    def span(self) -> str:
        """E with its derivation, for messages."""
        if self.dilation == 1:
            return str(self.effective)
        return f"({self.kernel} - 1) * {self.dilation} + 1 = {number(self.effective)}"


def resolve_axis(call: Call, axis: Axis, problems: list[Problem]) -> None:
    """Set padding, `dst` and output padding of an axis; append the rules it breaks to `problems`."""
    effective = axis.effective
    if effective > INT64_MAX:
        msg = f"the weights span {axis.span} on spatial axis {axis.index}, but must span at most {INT64_MAX}"
        problems.append(problem(["attributes", call.name("dilations"), axis.index], msg, "overflow"))
        return
    mode = call.given.auto_pad
    if mode is not None and mode != "none":
        if call.transposed:
            axis.begin, axis.end = auto_pad_transposed(mode, effective, axis.stride)
        else:
            axis.begin, axis.end = auto_pad_convolution(mode, axis.src, effective, axis.stride)
    if call.transposed:
        _resolve_transposed(call, axis, effective, problems)
    else:
        _resolve_convolution(call, axis, effective, problems)


def _resolve_convolution(call: Call, axis: Axis, effective: int, problems: list[Problem]) -> None:
    """Check that D = floor((S + b + e - E) / s) + 1."""
    padded = axis.src + axis.begin + axis.end
    found = convolution_size(axis.src, axis.begin, axis.end, effective, axis.stride)
    if found == axis.dst and padded <= INT64_MAX:
        axis.output_padding = 0
        return
    sum_of = f"{axis.src} + {axis.begin} + {axis.end}"
    if padded > INT64_MAX:
        msg = f"src with its padding, {sum_of}, must be at most {INT64_MAX} on spatial axis {axis.index}"
        problems.append(problem(["attributes", call.name("pads_begin"), axis.index], msg, "overflow"))
    elif not found:
        msg = (
            f"the weights span {axis.span} on spatial axis {axis.index}, but src with its padding has only "
            f"{sum_of} = {padded}"
        )
        problems.append(problem(call.weights_loc, msg, "kernel_too_large"))
    elif axis.dst is not None:
        why = f"floor(({sum_of} - {effective}) / {axis.stride}) + 1 = {found}"
        problems.append(_wrong_size(call, axis, f"size {found}", why))


def _resolve_transposed(call: Call, axis: Axis, effective: int, problems: list[Problem]) -> None:
    """Check that D = s * (S - 1) + E - b - e + p, or infer D (forward) or p (if it is not given)."""
    stride, extra = axis.stride, axis.output_padding
    if extra is not None and extra >= stride:
        name = call.name("output_padding")
        rule = f"must be less than {call.name('strides')}[{axis.index}], which is {stride}"
        msg = f"{name}[{axis.index}] {rule}, but is {extra}"
        problems.append(problem(["attributes", name, axis.index], msg, "output_padding"))
    if transposed_size(axis.src, 0, 0, effective, stride, stride) > INT64_MAX:
        msg = f"{stride} * {axis.src} + {effective} must be at most {INT64_MAX} on spatial axis {axis.index}"
        problems.append(problem(["attributes", call.name("strides"), axis.index], msg, "overflow"))
        return
    least = transposed_size(axis.src, axis.begin, axis.end, effective, stride, 0)
    sum_of = f"{stride} * ({axis.src} - 1) + {effective} - {axis.begin} - {axis.end}"
    if call.forward:
        axis.output_padding = extra or 0
        axis.dst = least + axis.output_padding
        if axis.dst < 1:
            msg = f"{sum_of} + {axis.output_padding} = {axis.dst}, but dst must have at least 1 element"
            msg = f"{msg} on spatial axis {axis.index}"
            larger = call.name("pads_begin" if axis.begin > axis.end else "pads_end")
            problems.append(problem(["attributes", larger, axis.index], msg, "size"))
    elif axis.dst is not None:
        _match_output_padding(call, axis, least, sum_of, problems)


def _match_output_padding(call: Call, axis: Axis, least: int, sum_of: str, problems: list[Problem]) -> None:
    assert axis.dst is not None
    stride, extra, difference = axis.stride, axis.output_padding, axis.dst - least
    if extra is None and 0 <= difference < stride:
        axis.output_padding = difference
    elif extra is not None and difference != extra:
        why = f"{sum_of} + {extra} = {least + extra}"
        problems.append(_wrong_size(call, axis, f"size {least + extra}", why))
    elif extra is None and stride == 1:
        problems.append(_wrong_size(call, axis, f"size {least}", f"{sum_of} = {least}"))
    elif extra is None:
        why = f"{sum_of} = {least}, and output_padding is from 0 to {stride - 1}"
        problems.append(_wrong_size(call, axis, f"a size from {least} to {least + stride - 1}", why))


def _wrong_size(call: Call, axis: Axis, wanted: str, why: str) -> Problem:
    name = call.name("diff_dst")
    msg = f"{name} must have {wanted} on spatial axis {axis.index}, because {why}, but has {axis.dst}"
    return problem(["inputs", name, "shape", axis.at], msg, "size")
