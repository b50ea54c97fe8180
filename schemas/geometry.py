"""The rules that relate the shapes: batch, channels, groups and, in `schemas.axes`, spatial axes.

`infer_geometry` reads the shapes in given formats and returns every broken rule. It is also tried with the other
formats, to give a hint to a caller who forgot `data_format` or `weights_format`.
"""

from __future__ import annotations

from dataclasses import dataclass

from schemas.axes import Axis, resolve_axis
from schemas.broken_rules import BrokenRule, broken_rule, dims
from schemas.call import ParsedCall
from schemas.shapes import (
    GroupsAxis,
    data_axes,
    groups_axis_of,
    split_data,
    split_weights,
    weights_channels,
    weights_shape,
)

__all__ = ["Geometry", "infer_geometry"]


@dataclass(slots=True)
class Geometry:
    """The sizes of a call in given formats; 0 and () stand for what could not be inferred."""

    n: int = 0
    src_channels: int = 0
    dst_channels: int = 0
    src_spatial: tuple[int, ...] = ()
    dst_spatial: tuple[int, ...] = ()
    kernel: tuple[int, ...] = ()
    pads_begin: tuple[int, ...] = ()
    pads_end: tuple[int, ...] = ()
    output_padding: tuple[int, ...] = ()
    groups_axis: GroupsAxis = "I"


def infer_geometry(call: ParsedCall, data_format: str, weights_format: str) -> tuple[Geometry, list[BrokenRule]]:
    """Return the sizes of a call in these formats, and the rules that they break together.

    Shapes and attributes that are missing or invalid by themselves are skipped.
    """
    made = Geometry()
    broken: list[BrokenRule] = []
    metas = call.inputs.metas
    base, src, diff_dst = metas.get(call.base), metas.get("src"), metas.get("diff_dst")
    if base is None or len(base.shape) not in call.called.operation.ranks:
        return made, broken
    if src is not None:
        made.n, made.src_channels, made.src_spatial = split_data(src.shape, data_format)
    if diff_dst is not None:
        n, made.dst_channels, made.dst_spatial = split_data(diff_dst.shape, data_format)
        if src is not None and n != made.n:
            name = call.name("diff_dst")
            msg = f"{name} must have the batch of {call.name('src')}, which is {made.n}, but has {n}"
            broken.append(broken_rule(["inputs", name, "shape", 0], msg, "batch"))
        made.n = made.n if src is not None else n
    if not call.called.operation.convolves:
        made.src_channels = made.dst_channels = made.src_channels or made.dst_channels
        made.src_spatial = made.dst_spatial = made.src_spatial or made.dst_spatial
    elif call.weights is not None:
        i, o, made.kernel = split_weights(call.weights, weights_format)
        if call.given.groups is not None:
            _RELATE[call.called.operation.computes](call, made, i, o, weights_format, broken)
        if call.result is not None:
            _relate_result(call, made, call.result, data_format, broken)
        _relate_axes(call, made, data_format, broken)
    bias = metas.get("bias")
    if bias is not None and len(bias.shape) == 1 and made.dst_channels not in (0, bias.shape[0]):
        name = call.name("bias")
        msg = f"{name} must have shape ({made.dst_channels}), the channels of dst, but has {dims(bias.shape)}"
        broken.append(broken_rule(["inputs", name, "shape"], msg, "bias"))
    return made, broken


def _relate_both(
    call: ParsedCall, made: Geometry, i: int, o: int, weights_format: str, broken: list[BrokenRule]
) -> None:
    """Check the weights against the channels of `src` and `diff_dst`, and find the axis that groups divide."""
    groups = call.given.groups
    src, dst = made.src_channels, made.dst_channels
    if groups is None:
        return
    src_divided = _divides(call, groups, "src", src, broken)
    # Without a valid diff_dst its channels are 0, which any number of groups divides.
    if not (_divides(call, groups, "diff_dst", dst, broken) and src_divided and dst):
        return
    axis = groups_axis_of(call.transposed, i, o, src, dst, groups)
    if axis is None:
        right = [(right_i, right_o) for _, right_i, right_o in weights_channels(call.transposed, src, dst, groups)]
        channels = f"{src} channels of {call.name('src')}, {dst} of {call.name('diff_dst')}"
        broken.append(_wrong_weights(call, made, right, weights_format, channels))
    else:
        made.groups_axis = axis


def _relate_src(
    call: ParsedCall, made: Geometry, i: int, o: int, weights_format: str, broken: list[BrokenRule]
) -> None:
    """Check the weights against the channels of `src`, and infer the channels of `dst` from them."""
    groups, src = call.given.groups, made.src_channels
    if groups is None or not _divides(call, groups, "src", src, broken):
        return
    if call.transposed and i == src:
        made.groups_axis, made.dst_channels = "O", o * groups
    elif i == src // groups:
        _divides(call, groups, "dst", o, broken)
        made.groups_axis, made.dst_channels = "I", o
    else:
        right = [(src, o), (src // groups, o)] if call.transposed else [(src // groups, o)]
        channels = f"{src} channels of {call.name('src')}"
        broken.append(_wrong_weights(call, made, right, weights_format, channels))


def _relate_dst(
    call: ParsedCall, made: Geometry, i: int, o: int, weights_format: str, broken: list[BrokenRule]
) -> None:
    """Check the weights against the channels of `diff_dst`, and infer the channels of `diff_src` from them."""
    groups, dst = call.given.groups, made.dst_channels
    if groups is None or not _divides(call, groups, "diff_dst", dst, broken):
        return
    if call.transposed and o == dst // groups:
        _divides(call, groups, "diff_src", i, broken)
        made.groups_axis, made.src_channels = "O", i
    elif o == dst:
        made.groups_axis, made.src_channels = "I", i * groups
    else:
        right = [(i, dst // groups), (i, dst)] if call.transposed else [(i, dst)]
        channels = f"{dst} channels of {call.name('diff_dst')}"
        broken.append(_wrong_weights(call, made, right, weights_format, channels))


_RELATE = {"diff_weights": _relate_both, "dst": _relate_src, "diff_src": _relate_dst}


def _relate_result(
    call: ParsedCall, made: Geometry, shape: tuple[int, ...], data_format: str, broken: list[BrokenRule]
) -> None:
    """Check the batch and the channels of a given shape of `diff_src`, and take its spatial sizes."""
    n, channels, made.src_spatial = split_data(shape, data_format)
    kind, name = call.result_loc
    axis, _ = data_axes(data_format, len(shape))
    if n != made.n:
        msg = f"{name}[0] must be the batch of {call.name('diff_dst')}, which is {made.n}, but is {n}"
        broken.append(broken_rule([kind, name, 0], msg, "batch"))
    if made.src_channels not in (0, channels):
        msg = f"{name}[{axis}] must be {made.src_channels}, the channels that the weights give, but is {channels}"
        broken.append(broken_rule([kind, name, axis], msg, "channels"))


def _divides(call: ParsedCall, groups: int, tensor: str, channels: int, broken: list[BrokenRule]) -> bool:
    if channels % groups:
        name = call.name("groups")
        msg = f"{name} must divide the channels of {call.name(tensor)}, which are {channels}, but is {groups}"
        broken.append(broken_rule(["attributes", name], msg, "groups"))
    return channels % groups == 0


def _wrong_weights(
    call: ParsedCall, made: Geometry, right: list[tuple[int, int]], weights_format: str, channels: str
) -> BrokenRule:
    assert call.weights is not None
    shapes = dict.fromkeys(dims(weights_shape(i, o, made.kernel, weights_format)) for i, o in right)
    facts = f"{call.name('weights_format')} {weights_format}, {channels} and groups {call.given.groups}"
    msg = f"{call.weights_loc[1]} must be {' or '.join(shapes)} for {facts}, but is {dims(call.weights)}"
    return broken_rule(call.weights_loc, msg, "weights_channels")


def _relate_axes(call: ParsedCall, made: Geometry, data_format: str, broken: list[BrokenRule]) -> None:
    """Resolve every spatial axis, if everything needed is known."""
    count = len(made.src_spatial) or len(made.dst_spatial)
    strides, dilations, pads = call.given.strides, call.given.dilations, _pads(call, count)
    extra = call.given.output_padding
    if strides is None or dilations is None or pads is None:
        return
    if not len(strides) == len(dilations) == len(made.kernel) == count:
        return
    extras = (None,) * count if extra is None or len(extra) != count else extra
    _, pixels = data_axes(data_format, count + 2)
    wide, narrow = made.src_spatial, made.dst_spatial
    if call.transposed:
        wide, narrow = narrow, wide
    axes = [
        Axis(
            index,
            index + pixels.start,
            wide[index] if len(wide) == count else None,
            narrow[index] if len(narrow) == count else None,
            made.kernel[index],
            strides[index],
            dilations[index],
            pads[0][index],
            pads[1][index],
            extras[index],
        )
        for index in range(count)
    ]
    for axis in axes:
        resolve_axis(call, axis, broken)
    made.pads_begin = tuple([axis.begin for axis in axes])
    made.pads_end = tuple([axis.end for axis in axes])
    made.output_padding = tuple([axis.output_padding or 0 for axis in axes])
    wide, narrow = tuple([axis.wide or 0 for axis in axes]), tuple([axis.narrow or 0 for axis in axes])
    made.src_spatial, made.dst_spatial = (narrow, wide) if call.transposed else (wide, narrow)


def _pads(call: ParsedCall, count: int) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Return the explicit pads, zeros for an empty list or with `auto_pad`; None if they are unknown."""
    given = call.given
    if given.auto_pad is None:
        return None
    zeros = (0,) * count
    if given.auto_pad != "none":
        return zeros, zeros
    if given.pads_begin is None or given.pads_end is None:
        return None
    begin, end = given.pads_begin or zeros, given.pads_end or zeros
    return (begin, end) if len(begin) == len(end) == count else None
