"""The rules of one spatial axis: padding, output size and output padding."""

from __future__ import annotations

from dataclasses import dataclass

from schemas.broken_rules import BrokenRule, broken_rule, number
from schemas.call import ParsedCall
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
    """One spatial axis: sizes of the two data tensors, number of taps, and attributes.

    `wide` is the size that the taps step over (`src` of a convolution, `dst` of a transposed one), `narrow` the other;
    a size is None while it is to be inferred, `output_padding` if it is not given. `at` is the index of the axis in a
    data tensor.
    """

    index: int
    at: int
    wide: int | None
    narrow: int | None
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


def resolve_axis(call: ParsedCall, axis: Axis, broken: list[BrokenRule]) -> None:
    """Set padding, output padding and the inferred size of an axis; append the rules it breaks to `broken`."""
    effective = axis.effective
    if effective > INT64_MAX:
        where = f"with {call.name('dilations')}[{axis.index}] = {axis.dilation}"
        msg = f"{where} the weights span {axis.span} on spatial axis {axis.index}, but must span at most {INT64_MAX}"
        broken.append(broken_rule(["attributes", call.name("dilations"), axis.index], msg, "overflow"))
        return
    mode = call.given.auto_pad
    if mode is not None and mode != "none":
        if call.transposed:
            axis.begin, axis.end = auto_pad_transposed(mode, effective, axis.stride)
        elif axis.wide is not None or mode == "valid":
            axis.begin, axis.end = auto_pad_convolution(mode, axis.wide or 0, effective, axis.stride)
        else:
            if axis.index == 0:
                name = call.name("dst_shape")
                msg = f"{name} is required while auto_pad is {mode}, which needs the size of diff_src"
                broken.append(broken_rule(["attributes", name], msg, "missing"))
            return
    if call.called.operation.widens:
        _resolve_wide(call, axis, effective, broken)
    else:
        _resolve_narrow(call, axis, effective, broken)


def _resolve_narrow(call: ParsedCall, axis: Axis, effective: int, broken: list[BrokenRule]) -> None:
    """Check that narrow = floor((wide + b + e - E) / s) + 1, or infer it."""
    if axis.wide is None:
        return
    padded = axis.wide + axis.begin + axis.end
    found = convolution_size(axis.wide, axis.begin, axis.end, effective, axis.stride)
    sum_of = f"{axis.wide} + {axis.begin} + {axis.end}"
    tensor = call.name("diff_dst") if call.transposed else "src"
    if padded > INT64_MAX:
        msg = f"{tensor} with its padding, {sum_of}, must be at most {INT64_MAX} on spatial axis {axis.index}"
        broken.append(broken_rule(["attributes", call.name("pads_begin"), axis.index], msg, "overflow"))
    elif not found:
        msg = (
            f"the weights span {axis.span} on spatial axis {axis.index}, but {tensor} with its padding has only "
            f"{sum_of} = {padded}"
        )
        broken.append(broken_rule(call.weights_loc, msg, "kernel_too_large"))
    elif axis.narrow is None and call.called.operation.computes != "diff_weights":
        axis.narrow = found
        _set_output_padding(call, axis, effective, broken)
    elif axis.narrow == found:
        axis.output_padding = 0
    elif axis.narrow is not None:
        why = f"floor(({sum_of} - {effective}) / {axis.stride}) + 1 = {found}"
        broken.append(_wrong_size(call, axis, axis.narrow, f"size {found}", why))


def _set_output_padding(call: ParsedCall, axis: Axis, effective: int, broken: list[BrokenRule]) -> None:
    """Set the output padding that the sizes give; a given one must be the same."""
    assert axis.wide is not None
    assert axis.narrow is not None
    extra = axis.output_padding
    axis.output_padding = 0
    if not call.transposed:
        return
    least = transposed_size(axis.narrow, axis.begin, axis.end, effective, axis.stride, 0)
    axis.output_padding = axis.wide - least
    if extra is not None and extra != axis.output_padding:
        name = call.name("output_padding")
        rule = f"must be {axis.output_padding}, because {call.name('diff_dst')} is {axis.wide}"
        sum_of = f"{axis.stride} * ({axis.narrow} - 1) + {effective} - {axis.begin} - {axis.end} = {least}"
        msg = f"{name}[{axis.index}] {rule} and {sum_of}, but is {extra}"
        broken.append(broken_rule(["attributes", name, axis.index], msg, "output_padding"))


def _resolve_wide(call: ParsedCall, axis: Axis, effective: int, broken: list[BrokenRule]) -> None:
    """Check that wide = s * (narrow - 1) + E - b - e + p, or infer it, or p if that is not given."""
    if axis.narrow is None:
        return
    stride, extra = axis.stride, axis.output_padding
    if extra is not None and extra >= stride:
        name = call.name("output_padding")
        rule = f"must be less than {call.name('strides')}[{axis.index}], which is {stride}"
        msg = f"{name}[{axis.index}] {rule}, but is {extra}"
        broken.append(broken_rule(["attributes", name, axis.index], msg, "output_padding"))
    if transposed_size(axis.narrow, 0, 0, effective, stride, stride) > INT64_MAX:
        size = f"{stride} * {axis.narrow} + {effective}"
        rule = f"{call.name('strides')}[{axis.index}] is {stride}, but {size} must be at most {INT64_MAX}"
        msg = f"{rule} on spatial axis {axis.index}"
        broken.append(broken_rule(["attributes", call.name("strides"), axis.index], msg, "overflow"))
        return
    least = transposed_size(axis.narrow, axis.begin, axis.end, effective, stride, 0)
    sum_of = f"{stride} * ({axis.narrow} - 1) + {effective} - {axis.begin} - {axis.end}"
    computes = call.called.operation.computes
    if axis.wide is not None:
        _match_output_padding(call, axis, least, sum_of, broken)
    elif computes != "diff_weights" and not call.inputs.values_unknown:
        axis.output_padding = extra or 0
        axis.wide = least + axis.output_padding
        if axis.wide < 1:
            msg = f"{sum_of} + {axis.output_padding} = {axis.wide}, but {computes} must have at least 1 element"
            msg = f"{msg} on spatial axis {axis.index}"
            larger = call.name("pads_begin" if axis.begin > axis.end else "pads_end")
            broken.append(broken_rule(["attributes", larger, axis.index], msg, "size"))


def _match_output_padding(call: ParsedCall, axis: Axis, least: int, sum_of: str, broken: list[BrokenRule]) -> None:
    assert axis.wide is not None
    stride, extra, difference = axis.stride, axis.output_padding, axis.wide - least
    if extra is None and 0 <= difference < stride:
        axis.output_padding = difference
    elif extra is not None and difference != extra:
        why = f"{sum_of} + {extra} = {least + extra}"
        broken.append(_wrong_size(call, axis, axis.wide, f"size {least + extra}", why))
    elif extra is None and stride == 1:
        broken.append(_wrong_size(call, axis, axis.wide, f"size {least}", f"{sum_of} = {least}"))
    elif extra is None:
        why = f"{sum_of} = {least}, and output_padding is from 0 to {stride - 1}"
        broken.append(_wrong_size(call, axis, axis.wide, f"a size from {least} to {least + stride - 1}", why))


def _wrong_size(call: ParsedCall, axis: Axis, size: int, wanted: str, why: str) -> BrokenRule:
    if call.result is not None:
        name = call.result_loc[1]
        loc: list[str | int] = [*call.result_loc, axis.at]
    else:
        name = call.name("diff_dst")
        loc = ["inputs", name, "shape", axis.at]
    msg = f"{name} must have {wanted} on spatial axis {axis.index}, because {why}, but has {size}"
    return broken_rule(loc, msg, "size")
