"""Resolve a call's name, attributes and input shapes to a `ResolvedOp`, reporting all broken rules at once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import prod
from typing import Any

from convgrad._dtypes import DTYPES
from schemas.broken_rules import BrokenRule, broken_rule, dims, invalid_params, unsupported
from schemas.call import ParsedCall, read_call
from schemas.dumps import is_dump, read_dump
from schemas.geometry import Geometry, infer_geometry
from schemas.resolved import ResolvedOp
from schemas.rows import DATA_FORMATS, REFERENCE_DTYPES, WEIGHTS_FORMATS
from schemas.shapes import INT64_MAX, data_shape, elements
from schemas.tables import find_operation
from schemas.tensors import TensorMeta, TensorSpec

__all__ = ["ResolvedOp", "TensorMeta", "TensorSpec", "require_reference", "resolve"]


def resolve(
    name: str,
    attributes: Mapping[str, Any],
    inputs: Mapping[str, TensorMeta | Mapping[str, Any] | list[int]],
    *,
    output: TensorMeta | Mapping[str, Any] | None = None,
    outputs: tuple[str, ...] = (),
) -> ResolvedOp:
    """Return the call with defaults, `auto_pad` and shape inference applied.

    `attributes` may be a whole dumped op, whose inputs replace absent `inputs`. An input is a `TensorMeta`, a mapping
    with `dtype` and `shape`, or, for `weights_shape`, a list. `output` is what the caller expects, and
    `outputs` are the names of the requested outputs, in either spelling; by default the operation's first.

    Raises `UnknownOperation`; `InvalidParams` with all broken rules; `Unsupported` for a dtype other than
    f32, f16, bf16, and f64, for which see `require_reference`.
    """
    called = find_operation(name)
    given, expected = attributes, output
    if is_dump(attributes):
        dump = read_dump(attributes, called)
        # A dump's output is checked against its own inputs only; with other inputs it may just give the weights'
        # shape.
        expected = output if inputs and dump.inputs else dump.output
        given, inputs, output = dump.attributes, inputs or dump.inputs, output or dump.output
    call, broken = read_call(called, given, inputs, output, outputs)
    data_format, weights_format = call.given.data_format, call.given.weights_format
    if not called.operation.convolves:
        weights_format = ""
    made = Geometry()
    if data_format is not None and weights_format is not None:
        made, mismatches = infer_geometry(call, data_format, weights_format)
        if mismatches and not broken:
            _add_hint(call, data_format, weights_format, mismatches)
        broken.extend(mismatches)
    if not broken:
        if expected is None:
            call.output = None
        resolved = _resolved(call, made, data_format or "", weights_format or "", broken)
        if not broken:
            return resolved
    if call.inputs.unsupported is not None:
        raise unsupported(call.inputs.unsupported["msg"], broken)
    raise invalid_params(called.called_as, broken)


def require_reference(op: ResolvedOp) -> None:
    """Raise `Unsupported` for a dtype that only the reference kernel computes."""
    if op.dtype in REFERENCE_DTYPES:
        rule = f"is {op.dtype}, which only the reference kernel computes, slowly: send f32, or set options.reference"
        names = [op.wire_name(spec.name) for spec in op.inputs]
        broken = [broken_rule(["inputs", name, "dtype"], f"{name} {rule}", "unsupported_dtype") for name in names]
        raise unsupported(f"{op.called_as}: {broken[0]['msg']}", broken)


def _resolved(
    call: ParsedCall, made: Geometry, data_format: str, weights_format: str, broken: list[BrokenRule]
) -> ResolvedOp:
    given, metas = call.given, call.inputs.metas
    dtype = call.inputs.dtype or ""
    groups = given.groups or 1
    src_shape = data_shape(made.n, made.src_channels, made.src_spatial, data_format)
    shapes = {
        "dst": data_shape(made.n, made.dst_channels, made.dst_spatial, data_format),
        "diff_src": src_shape,
        "diff_weights": call.weights or (),
        "diff_bias": (made.dst_channels,),
    }
    for output in call.outputs:
        _check_output(call, output, TensorMeta(dtype, shapes[output]), broken)
    # One multiply-add per tap, pair of channels and pixel of the tensor that the taps step over.
    pixels = prod(made.src_spatial if call.transposed else made.dst_spatial)
    products = made.n * pixels * made.dst_channels
    if call.called.operation.convolves:
        products = products * prod(made.kernel) * made.src_channels // groups
    # A bias is added or summed for each value of dst.
    sums = made.n * prod(made.dst_spatial) * made.dst_channels
    no_products = {"diff_bias"} if call.called.operation.convolves else {*shapes}
    macs = sum(sums if output in no_products else products for output in call.outputs)
    return ResolvedOp(
        called=call.called,
        dtype=dtype,
        n=made.n,
        src_channels=made.src_channels,
        dst_channels=made.dst_channels,
        groups=groups,
        src_spatial=made.src_spatial,
        dst_spatial=made.dst_spatial,
        kernel=made.kernel,
        strides=given.strides or (),
        dilations=given.dilations or (),
        pads_begin=made.pads_begin,
        pads_end=made.pads_end,
        output_padding=made.output_padding,
        auto_pad=given.auto_pad or "none",
        data_format=data_format,
        weights_format=weights_format,
        groups_axis=made.groups_axis,
        weights_shape=call.weights or (),
        dst_shape=src_shape,
        inputs=tuple(
            [
                TensorSpec(row.name, dtype, metas[row.name].shape)
                for row in call.called.operation.inputs
                if row.name in metas and row.only_for in (None, *call.outputs)
            ]
        ),
        outputs=tuple([TensorSpec(output, dtype, shapes[output]) for output in call.outputs]),
        warnings=(*call.warnings, *_ignored_pads(call, made)),
        macs=macs,
    )


def _check_output(call: ParsedCall, output: str, found: TensorMeta, broken: list[BrokenRule]) -> None:
    """Check that an output has fewer than 2^63 bytes, and what the caller expects."""
    name = call.called.wire_names[output]
    if elements(found.shape) * DTYPES[found.dtype].itemsize > INT64_MAX:
        msg = f"{name} would have shape {dims(found.shape)}, but must have fewer than 2^63 bytes"
        broken.append(broken_rule(["outputs", name, "shape"], msg, "overflow"))
    expected = call.output
    if expected is None or output != call.called.operation.output.name:
        return
    if expected.dtype != found.dtype:
        msg = f"{name} must be {found.dtype} like the inputs, but has another dtype in the dump"
        broken.append(broken_rule(["outputs", name, "dtype"], msg, "mixed_dtypes"))
    if expected.shape != found.shape:
        msg = f"{name} must have shape {dims(found.shape)}, but has {dims(expected.shape)} in the dump"
        broken.append(broken_rule(["outputs", name, "shape"], msg, "output_shape"))


def _ignored_pads(call: ParsedCall, made: Geometry) -> list[str]:
    """Return a warning for explicit pads that were ignored and differ from those used."""
    given = call.given
    if given.auto_pad == "none":
        return []
    return [
        f"{name} is ignored because auto_pad is {given.auto_pad}: {dims(used)} was used"
        for name, asked, used in (
            ("pads_begin", given.pads_begin, made.pads_begin),
            ("pads_end", given.pads_end, made.pads_end),
        )
        if asked and any(asked) and asked != used
    ]


def _add_hint(call: ParsedCall, data_format: str, weights_format: str, mismatches: list[BrokenRule]) -> None:
    """Add to the first broken rule what would make the shapes valid: other formats, or two tensors exchanged.

    All causes are named, because the remedy for a wrong one gives a valid call with a wrong result.
    """
    fitting = _fitting_formats(call, data_format, weights_format)
    causes = []
    for data, orders in fitting.items():
        several = " or ".join(orders)
        if data == data_format:
            causes.append((f"{call.weights_loc[1]} matches {several}", "weights_format"))
        elif orders == [weights_format] or (weights_format in orders and "weights_format" in call.given.spelled):
            causes.append((f"the shapes match {data}", "data_format"))
        else:
            causes.append((f"the shapes match {data} with {several}", "data_format weights_format"))
    exchanged = _fitting_exchanged(call, data_format, weights_format, fitting)
    if exchanged is not None:
        first, second = call.name("src"), call.name("diff_dst")
        causes.append((f"the shapes match{exchanged} if {first} and {second} are exchanged", ""))
    if len(causes) > 1:
        mismatches[0]["msg"] += f" (either {', or '.join(cause for cause, _ in causes)})"
    elif causes:
        ((cause, names),) = causes
        remedy = " and ".join(call.name(name) for name in names.split())
        mismatches[0]["msg"] += f" ({cause}; pass {remedy})" if remedy else f" ({cause})"


def _fitting_formats(call: ParsedCall, data_format: str, weights_format: str) -> dict[str, list[str]]:
    """Return the weights formats that the shapes fit, by data format, the call's own first."""
    found: dict[str, list[str]] = {}
    for data in (data_format, *(other for other in DATA_FORMATS if other != data_format)):
        for order in WEIGHTS_FORMATS if call.called.operation.convolves else ("",):
            if (data, order) != (data_format, weights_format) and not infer_geometry(call, data, order)[1]:
                found.setdefault(data, []).append(order)
    return found


def _fitting_exchanged(
    call: ParsedCall, data_format: str, weights_format: str, fitting: Mapping[str, list[str]]
) -> str | None:
    """Return the formats that the shapes fit with `src` and `diff_dst` exchanged: the call's own, or usual ones."""
    metas = call.inputs.metas
    if not {"src", "diff_dst"} <= metas.keys():
        return None
    exchanged = {**metas, "src": metas["diff_dst"], "diff_dst": metas["src"]}
    other = replace(call, inputs=replace(call.inputs, metas=exchanged))
    if not infer_geometry(other, data_format, weights_format)[1]:
        return ""
    usual = ("XOI", "IOX") if call.transposed else ("XIO", "OIX")
    if any(order in usual for orders in fitting.values() for order in orders):
        return None
    pairs = ((data, order) for data in DATA_FORMATS for order in usual)
    return next((f" {data} with {order}" for data, order in pairs if not infer_geometry(other, data, order)[1]), None)
