"""Resolving calls: the results of defaults, auto_pad, formats and groups; and each rule that a call may break."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest

from convgrad._errors import InvalidParams, Unsupported
from schemas.ops import TensorMeta, TensorSpec, resolve
from schemas.shapes import data_shape, weights_shape
from schemas.tables import find_operation, operation_names
from tests.problems import Case, real_layers
from tests.schemas.calls import CONVOLUTION, FORWARD, GRADIENT, attributes, gradient, place, refused, tensor, tensors
from tests.traps import TRAPS


def test_a_gradient() -> None:
    """Every size of a transposed gradient is inferred from its shapes."""
    op = resolve(GRADIENT, attributes(weights_format="IOX"), gradient())
    assert (op.op, op.called_as, op.dialect, op.dtype) == (GRADIENT, GRADIENT, "new", "f32")
    assert (op.n, op.src_channels, op.dst_channels, op.groups) == (2, 4, 6, 1)
    assert (op.src_spatial, op.dst_spatial, op.kernel) == ((5, 5), (7, 7), (3, 3))
    assert (op.pads_begin, op.pads_end, op.output_padding) == ((0, 0), (0, 0), (0, 0))
    assert op.inputs == (TensorSpec("src", "f32", (2, 4, 5, 5)), TensorSpec("diff_dst", "f32", (2, 6, 7, 7)))
    assert op.output == TensorSpec("diff_weights", "f32", (4, 6, 3, 3))
    assert op.weights_shape == (4, 6, 3, 3)
    assert op.warnings == ()
    assert op.macs == 2 * 25 * 9 * 4 * 6


def test_a_forward_call() -> None:
    """The output of ConvTranspose is inferred, and bias is an input if it is given."""
    inputs = tensors(src=(2, 4, 5, 5), weights=(4, 3, 3, 3))
    given = attributes(weights_format="IOX", groups=2, strides=[2, 2], output_padding=[1, 0])
    op = resolve(FORWARD, given, inputs)
    assert op.output == TensorSpec("dst", "f32", (2, 6, 12, 11))
    assert op.macs == 2 * 25 * 9 * 4 * 6 // 2
    with_bias = resolve(FORWARD, given, inputs | tensors(bias=(6,)))
    assert [spec.name for spec in with_bias.inputs] == ["src", "weights", "bias"]


def test_the_reply_uses_the_dialect_called() -> None:
    """Under an old name the reply has the old names, whatever spelling the call used; and vice versa."""
    inputs = tensors(input_forward=(2, 4, 5, 5), output_delta=(2, 6, 7, 7), filter_shape=[4, 6, 3, 3])
    old = resolve("ConvTransposeBackpropFilters-1", attributes(weights_format="IOX"), gradient())
    assert old.reply_attributes()["filter_format"] == "IOX"
    assert old.reply_attributes()["filter_shape"] == [4, 6, 3, 3]
    assert [old.wire_name(spec.name) for spec in old.inputs] == ["input_forward", "output_delta"]
    assert old.wire_name("diff_weights") == "filter_delta"
    new = resolve(GRADIENT, attributes(filter_format="IOX"), inputs)
    assert new.reply_attributes()["weights_format"] == "IOX"
    assert new.wire_name(new.output.name) == "diff_weights"


def test_the_reply_has_every_attribute() -> None:
    """The resolved attributes are all those of the operation, and the groups axis."""
    op = resolve(GRADIENT, attributes(weights_format="IOX", pads_begin=[], pads_end=[]), gradient())
    assert op.reply_attributes() == {
        "strides": [1, 1], "pads_begin": [0, 0], "pads_end": [0, 0], "dilations": [1, 1], "auto_pad": "none",
        "output_padding": [0, 0], "groups": 1, "data_format": "NCX", "weights_format": "IOX",
        "weights_shape": [4, 6, 3, 3], "groups_axis": "O",
    }  # fmt: skip


@pytest.mark.parametrize("data_format", ["NCX", "NXC"])
@pytest.mark.parametrize("weights_format", ["XIO", "OIX", "XOI", "IOX"])
@pytest.mark.parametrize("spatial", [1, 2, 3])
@pytest.mark.parametrize("name", [GRADIENT, CONVOLUTION, FORWARD])
def test_every_layout_and_rank(name: str, spatial: int, weights_format: str, data_format: str) -> None:
    """The order of a format's letters is that of the axes, for one to three spatial axes and every operation."""
    given = attributes(spatial, data_format=data_format, weights_format=weights_format, groups=2)
    small, large, kernel = (5, 6, 7)[:spatial], (7, 7, 11)[:spatial], (3, 2, 5)[:spatial]
    transposed = name != CONVOLUTION
    src, dst = (small, large) if transposed else (large, small)
    i, o = (4, 3) if transposed else (2, 6)
    weights = weights_shape(i, o, kernel, weights_format)
    inputs: dict[str, Any] = {"src": tensor(*data_shape(2, 4, src, data_format))}
    if name == FORWARD:
        inputs["weights"] = tensor(*weights)
    else:
        inputs |= {"diff_dst": tensor(*data_shape(2, 6, dst, data_format)), "weights_shape": list(weights)}
    op = resolve(name, given, inputs)
    assert (op.src_channels, op.dst_channels, op.src_spatial, op.dst_spatial) == (4, 6, src, dst)
    assert (op.kernel, op.groups_axis) == (kernel, "O" if transposed else "I")
    assert op.output.shape == (data_shape(2, 6, dst, data_format) if name == FORWARD else weights)
    if transposed:  # The weights may divide I instead, as the note does: their shape tells which.
        other = weights_shape(2, 6, kernel, weights_format)
        key = "weights" if name == FORWARD else "weights_shape"
        op = resolve(name, given, inputs | {key: tensor(*other) if name == FORWARD else list(other)})
        assert (op.groups_axis, op.reply_attributes()["groups_axis"], op.dst_channels) == ("I", "I", 6)


def test_the_input_wins_over_the_attribute() -> None:
    """weights_shape may be an input or an attribute; the input wins, with a warning if they differ."""
    inputs = gradient()
    wanted = inputs.pop("weights_shape")
    given = attributes(weights_format="IOX")
    assert resolve(GRADIENT, given | {"weights_shape": wanted}, inputs).weights_shape == (4, 6, 3, 3)
    both = resolve(GRADIENT, given | {"weights_shape": wanted}, gradient())
    assert not both.warnings
    other = resolve(GRADIENT, given | {"filter_shape": [1, 2]}, gradient())
    assert other.weights_shape == (4, 6, 3, 3)
    assert other.warnings == (
        "weights_shape was given twice: the input (4, 6, 3, 3) was used, not the attribute (1, 2)",
    )
    unknown = gradient(weights_shape=TensorMeta("s32", (4,)))  # a tensor without values
    instead = resolve(GRADIENT, given | {"weights_shape": wanted}, unknown)
    assert (instead.weights_shape, len(instead.warnings)) == ((4, 6, 3, 3), 1)


def test_output_padding_is_found_from_the_shapes() -> None:
    """An absent output padding is inferred: the excess in the size of diff_dst, less than the stride."""
    given = attributes(weights_format="IOX", strides=[3, 3])
    for extra in range(3):
        op = resolve(GRADIENT, given, gradient(diff_dst=tensor(2, 6, 15 + extra, 15)))
        assert op.output_padding == (extra, 0)


@pytest.mark.parametrize(
    ("name", "mode", "pads", "dst"),
    [
        (GRADIENT, "same_upper", (0, 1), 14), (GRADIENT, "same_lower", (1, 0), 14), (GRADIENT, "valid", (0, 0), 15),
        (CONVOLUTION, "same_upper", (1, 1), 4),
    ],
)  # fmt: skip
def test_auto_pad(name: str, mode: str, pads: tuple[int, int], dst: int) -> None:
    """S=7, s=2, K=3: the padding of a transposed gradient depends on stride and kernel, not on the odd size of src."""
    inputs = tensors(src=(1, 1, 7), diff_dst=(1, 1, dst), weights_shape=[1, 1, 3])
    given = attributes(1, auto_pad=mode, strides=[2], pads_begin=None, pads_end=None, weights_format="IOX")
    given["weights_format"] = "IOX" if name == GRADIENT else "OIX"
    op = resolve(name, given, inputs)
    assert (*op.pads_begin, *op.pads_end, op.auto_pad) == (*pads, mode)


def test_ignored_pads_give_a_warning() -> None:
    """Explicit pads that auto_pad overrides are named in a warning, unless they are zeros or the same."""
    inputs = tensors(src=(1, 1, 7), diff_dst=(1, 1, 4), weights_shape=[1, 1, 3])
    given = attributes(1, auto_pad="same_upper", strides=[2], weights_format="OIX")
    op = resolve(CONVOLUTION, given | {"pads_begin": [9], "pads_end": [1]}, inputs)
    assert op.warnings == ("pads_begin is ignored because auto_pad is same_upper: (1) was used",)
    assert not resolve(CONVOLUTION, given, inputs).warnings


def test_same_padding_of_a_short_kernel_with_output_padding() -> None:
    """E < s under same_*: D = s * (S - 1) + E, and the rest up to the stride is output padding."""
    for extra in (0, 1):
        inputs = tensors(src=(1, 1, 3), diff_dst=(1, 1, 5 + extra), weights_shape=[1, 1, 1])
        op = resolve(GRADIENT, attributes(1, auto_pad="same_upper", strides=[2]), inputs)
        assert (op.pads_begin, op.pads_end, op.output_padding) == ((0,), (0,), (extra,))


@pytest.mark.parametrize("case", [*TRAPS, *real_layers()], ids=lambda case: case.name)
def test_traps_and_real_layers(case: Case) -> None:
    """What broke others, and every layer of the benchmarks, are valid calls in every dtype and both data formats."""
    layouts = itertools.product(("NCX", "NXC"), ("OIX", "XOI"))
    for dtype, (data_format, weights_format) in zip(("f32", "f16", "bf16", "f64"), layouts, strict=True):
        each = replace(case, dtype=dtype, data_format=data_format, weights_format=weights_format)
        inputs = {name: tensor(*shape, dtype=dtype) for name, shape in each.input_shapes.items()}
        op = resolve(each.op, each.attributes(), inputs)
        assert op.output == TensorSpec(each.output_name, dtype, each.output_shape)
        assert (op.dtype, op.output_padding, op.macs) == (dtype, each.output_padding, each.macs)


@pytest.mark.parametrize("name", operation_names())
def test_a_reply_resolves_to_itself(name: str) -> None:
    """The attributes of a reply, sent back without groups_axis, resolve to the same call."""
    given = attributes(auto_pad="same_upper", strides=[2, 2])
    given["filter_format"] = "IOX" if name.startswith("ConvT") else "OIX"
    if not find_operation(name).operation.convolves:
        given = {"data_format": "NCX"}
    src, dst = ((2, 4, 5, 5), (2, 6, 10, 10)) if name.startswith("ConvT") else ((2, 4, 10, 10), (2, 6, 5, 5))
    weights = (4, 6, 3, 3) if name.startswith("ConvT") else (6, 4, 3, 3)
    given_tensors: dict[str, Any] = {"src": tensor(*src), "diff_dst": tensor(*dst), "weights": tensor(*weights)}
    given_tensors |= {"weights_shape": list(weights), "dst_shape": list(src)}
    rows = find_operation(name).operation.inputs
    inputs = {row.name: given_tensors[row.name] for row in rows if row.name in given_tensors}
    if name.startswith("BiasAdd") and "src" in inputs:
        inputs["bias"] = tensor(src[1])
    first = resolve(name, given, inputs)
    again = first.reply_attributes()
    again.pop("groups_axis", None)
    assert resolve(name, again, inputs) == first


IOX: dict[str, Any] = {"weights_format": "IOX"}
W = "inputs.weights_shape"


Row = tuple[dict[str, Any], dict[str, Any], str, str]
RULES: dict[str, list[Row]] = {
    GRADIENT: [
        # Numbers of values
        ({"strides": [1]}, {}, "attributes.strides", "one value for each of the 2 spatial axes of src, but has 1"),
        ({"dilations": [1, 1, 1]}, {}, "attributes.dilations", "but has 3"),
        ({"pads_begin": [0]}, {}, "attributes.pads_begin", "but has 1"),
        ({"pads_end": [0, 0, 0]}, {}, "attributes.pads_end", "but has 3"),
        ({"output_padding": [0]}, {}, "attributes.output_padding", "but has 1"),
        ({"auto_pad": "valid", "pads_end": [0]}, {}, "attributes.pads_end", "but has 1"),
        # Ranks
        ({}, {"diff_dst": tensor(2, 6, 7)}, "inputs.diff_dst.shape", "must have 4 dimensions like src, but has 3"),
        ({}, {"weights_shape": [4, 6, 3]}, W, "must have 4 values, as src has 4 dimensions, but has 3"),
        ({}, {"src": tensor(2, 4)}, "inputs.src.shape", "must have 3, 4 or 5 dimensions, but has 2"),
        ({}, {"src": tensor(*[2] * 6)}, "inputs.src.shape", "must have 3, 4 or 5 dimensions, but has 6"),
        # Batch and channels
        ({}, {"diff_dst": tensor(3, 6, 7, 7)}, "inputs.diff_dst.shape.0", "batch of src, which is 2, but has 3"),
        ({"groups": 3}, {}, "attributes.groups", "must divide the channels of src, which are 4, but is 3"),
        ({"groups": 4}, {}, "attributes.groups", "must divide the channels of diff_dst, which are 6, but is 4"),
        ({}, {"weights_shape": [4, 5, 3, 3]}, W, "must be (4, 6, 3, 3) for weights_format IOX"),
        ({"groups": 2}, {"weights_shape": [4, 6, 3, 3]}, W, "must be (4, 3, 3, 3) or (2, 6, 3, 3)"),
        ({"groups": 2}, {"weights_shape": [2, 3, 3, 3]}, W, "must be (4, 3, 3, 3) or (2, 6, 3, 3)"),
        # Sizes
        ({}, {"diff_dst": tensor(2, 6, 8, 7)}, "inputs.diff_dst.shape.2", "1 * (5 - 1) + 3 - 0 - 0 = 7, but has 8"),
        ({"strides": [2, 1]}, {}, "inputs.diff_dst.shape.2", "a size from 11 to 12 on spatial axis 0"),
        ({"pads_end": [0, 1]}, {}, "inputs.diff_dst.shape.3", "must have size 6 on spatial axis 1"),
        ({"output_padding": [0, 1]}, {}, "attributes.output_padding.1", "less than strides[1], which is 1, but is 1"),
        ({"strides": [2, 1], "output_padding": [1, 0]}, {}, "inputs.diff_dst.shape.2",
         "2 * (5 - 1) + 3 - 0 - 0 + 1 = 12"),
        # The weights' shape
        ({}, {"weights_shape": None}, "attributes.weights_shape", "is required: as an input or as an attribute"),
        ({}, {"weights_shape": [0, 0, 0, 0]}, "attributes.weights_shape", "is required"),
        ({}, {"weights_shape": TensorMeta("s32", (4,))}, "attributes.weights_shape", "is required"),
        ({}, {"weights_shape": [4, 0, 3, 3]}, W + ".1", "weights_shape[1] must be at least 1, but is 0"),
        ({}, {"weights_shape": [4, -6, 3, 3]}, W + ".1", "must be from 1 to 2147483647, but is -6"),
        ({}, {"weights_shape": [4, 2**31, 3, 3]}, W + ".1", "must be from 1 to 2147483647, but is 2147483648"),
        ({}, {"weights_shape": [4, 6.0, 3, 3]}, W + ".1", "weights_shape[1] must be an integer"),
        ({}, {"weights_shape": [4, True, 3, 3]}, W + ".1", "weights_shape[1] must be an integer"),
        ({}, {"weights_shape": [1] * 13}, W, "must have at most 12 values, but has 13"),
        ({}, {"weights_shape": TensorMeta("f32", (4,))}, W + ".dtype", "must be s32, or a JSON list of integers"),
        ({}, {"weights_shape": TensorMeta("s32", (2, 2))}, W + ".shape", "must have 1 dimension, but has 2"),
        ({}, {"weights_shape": 7}, W, "must be a tensor with dtype and shape"),
        # Individual tensors
        ({}, {"src": None}, "inputs.src", "src is required"),
        ({}, {"diff_dst": None}, "inputs.diff_dst", "diff_dst is required"),
        ({}, {"src": tensor(2, 0, 5, 5)}, "inputs.src.shape.1", "at least 1 element on axis 1, but has 0"),
        ({}, {"src": tensor(2, 4, 5, 0)}, "inputs.src.shape.3", "only the batch may be empty"),
        ({}, {"src": {"dtype": "f32", "shape": [2, -4, 5, 5]}}, "inputs.src.shape.1", "but is -4"),
        ({}, {"src": {"dtype": "f32", "shape": [2, 4, 5, True]}}, "inputs.src.shape.3", "must be an integer"),
        ({}, {"src": {"dtype": "f32", "shape": [2, 4, 5, 5.0]}}, "inputs.src.shape.3", "must be an integer"),
        ({}, {"src": {"dtype": "f32", "shape": [2, 4, 5, 10**5000]}}, "inputs.src.shape.3", "a number above"),
        ({}, {"src": {"dtype": "f32", "shape": "2455"}}, "inputs.src.shape", "must be a list of integers"),
        ({}, {"src": {"dtype": "f32", "shape": [1] * 13}}, "inputs.src.shape", "at most 12 dimensions, but has 13"),
        ({}, {"src": {"dtype": "f32"}}, "inputs.src.shape", "must be a list of integers"),
        ({}, {"src": {"shape": [2, 4, 5, 5]}}, "inputs.src.dtype", "src needs a dtype"),
        ({}, {"src": [2, 4, 5, 5]}, "inputs.src", "must be a tensor with dtype and shape"),
        ({}, {"diff_dst": tensor(2, 6, 7, 7, dtype="f16")}, "inputs.diff_dst.dtype",
         "must be f32 like src, but is f16"),
        ({}, {"difdst": tensor(1)}, "inputs.difdst", "did you mean diff_dst?"),
        ({}, {"kernel": tensor(1)}, "inputs.kernel", "kernel is not an input of ConvTransposeBackwardWeights"),
        ({}, {"input_forward": tensor(2, 4, 5, 5)}, "inputs.input_forward", "another spelling of src: give one"),
        # Numbers that don't fit 64 bits
        ({}, {"src": tensor(2**31, 2**31, 1, 1)}, "inputs.src.shape", "must have fewer than 2^63 bytes"),
        ({"strides": [2**62, 1]}, {}, "attributes.strides.0", "must be at most 9223372036854775807"),
        ({"dilations": [2**62, 1]}, {}, "attributes.dilations.0", "must span at most 9223372036854775807"),
    ],
    # Its own size rule, which floor division must not weaken.
    CONVOLUTION: [
        ({}, {"diff_dst": tensor(1, 6, 6)}, "inputs.diff_dst.shape.2", "floor((7 + 0 + 0 - 3) / 1) + 1 = 5, but has 6"),
        ({}, {"weights_shape": [6, 4, 8]}, W,
         "the weights span 8 on spatial axis 0, but src with its padding has only 7 + 0 + 0 = 7"),
        ({"strides": [4]}, {"weights_shape": [6, 4, 8], "diff_dst": tensor(1, 6, 1)}, W, "span 8"),
        ({"dilations": [4]}, {}, W, "(3 - 1) * 4 + 1 = 9 on spatial axis 0"),
        ({"auto_pad": "same_upper"}, {}, "inputs.diff_dst.shape.2", "must have size 7 on spatial axis 0"),
        ({"auto_pad": "valid"}, {"weights_shape": [6, 4, 8]}, W, "span 8"),
        ({"pads_begin": [2**63 - 1]}, {}, "attributes.pads_begin.0", "at most 9223372036854775807"),
        ({"dilations": [2**62], "auto_pad": "same_lower"}, {}, "attributes.dilations.0", "must span at most"),
        ({"groups": 2}, {}, W,
         "must be (6, 2, 3) for weights_format OIX, 4 channels of src, 6 of diff_dst and groups 2"),
        ({"output_padding": [0]}, {}, "attributes.output_padding", "is not an attribute of"),
    ],
    # Weights and bias are checked against src, and the output has at least one element.
    FORWARD: [
        ({"pads_begin": [4], "pads_end": [3]}, {}, "attributes.pads_begin.0",
         "1 * (5 - 1) + 3 - 4 - 3 + 0 = 0, but dst must have at least 1"),
        ({"pads_begin": [0], "pads_end": [7]}, {}, "attributes.pads_end.0", "but dst must have at least 1"),
        ({}, {"bias": tensor(5)}, "inputs.bias.shape", "must have shape (6), the channels of dst, but has (5)"),
        ({}, {"bias": tensor(6, 1)}, "inputs.bias.shape", "must have 1 dimension, but has 2"),
        ({}, {"bias": tensor(6, dtype="bf16")}, "inputs.bias.dtype", "must be f32 like src, but is bf16"),
        ({}, {"weights": tensor(5, 6, 3)}, "inputs.weights",
         "must be (4, 6, 3) for weights_format IOX, 4 channels of src"),
        ({}, {"weights": tensor(4, 6, 3, 3)}, "inputs.weights.shape", "must have 3 dimensions like src, but has 4"),
        ({}, {"weights": None}, "inputs.weights", "weights is required"),
        ({}, {"weights": tensor(4, 6, 0)}, "inputs.weights.shape.2", "but has 0"),
        ({"groups": 2}, {"weights": tensor(2, 5, 3)}, "attributes.groups",
         "must divide the channels of dst, which are 5, but is 2"),
        ({"groups": 2}, {"weights": tensor(3, 6, 3)}, "inputs.weights", "must be (4, 6, 3) or (2, 6, 3)"),
        ({"output_padding": [1]}, {}, "attributes.output_padding.0", "less than strides[0], which is 1, but is 1"),
        ({"dilations": [2**61]}, {"weights": tensor(4, 2**30, 2), "bias": None}, "outputs.dst.shape",
         "fewer than 2^63 bytes"),
    ],
}  # fmt: skip
"""For each operation changed attributes and inputs of a right call, and where and how they are rejected."""
RIGHT: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    GRADIENT: (attributes(**IOX), gradient()),
    CONVOLUTION: (
        attributes(1, weights_format="OIX"), tensors(src=(1, 4, 7), diff_dst=(1, 6, 5), weights_shape=[6, 4, 3]),
    ),
    FORWARD: (attributes(1, **IOX), tensors(src=(1, 4, 5), weights=(4, 6, 3), bias=(6,))),
}  # fmt: skip


@pytest.mark.parametrize(("op", "row"), [(op, row) for op, rows in RULES.items() for row in rows])
def test_one_broken_rule(op: str, row: Row) -> None:
    """A call that breaks one rule is rejected for that, at the place of the value."""
    changes, inputs, where, message = row
    given = {name: value for name, value in (RIGHT[op][0] | changes).items() if value is not None}
    assert message in refused(op, given, RIGHT[op][1] | inputs)[place(where)]


@pytest.mark.parametrize("dtype", ["f8", "s8", "s32", "banana", ""])
def test_unsupported_dtypes(dtype: str) -> None:
    """A dtype that the operation does not have raises `Unsupported`, with its place."""
    with pytest.raises(Unsupported, match=r"^src must be f32, f16 or bf16, or f64 with options.reference$") as caught:
        resolve(GRADIENT, attributes(**IOX), gradient(src=tensor(2, 4, 5, 5, dtype=dtype)))
    assert ["inputs", "src", "dtype"] in [found["loc"] for found in caught.value.data["errors"]]


def test_all_errors_in_one_pass() -> None:
    """Broken rules of attributes, of inputs and between them are reported in one error, in the caller's spelling."""
    given = attributes(strides=[2, 0], groups=3, pads_end=[0], unknown=1) | {"filter_format": "IOX"}
    inputs = {
        "input_forward": tensor(2, 4, 5, 5),
        "output_delta": tensor(3, 6, 7, 7, dtype="f16"),
        "filter_shape": [4, 6, 3, "3"],
        "more": 1,
    }
    found = refused("ConvTransposeBackpropFilters", given, inputs)
    assert set(found) == {
        ("attributes", "strides", 1), ("attributes", "pads_end"), ("attributes", "unknown"),
        ("inputs", "output_delta", "dtype"), ("inputs", "filter_shape", 3), ("inputs", "more"),
        ("inputs", "output_delta", "shape", 0),
    }  # fmt: skip


SWAPPED = "if src and diff_dst are exchanged)"
HINTS: list[tuple[str, dict[str, Any], dict[str, Any], str]] = [
    ("ConvTransposeBackpropFilters", {}, gradient(), "(weights_shape matches IOX; pass filter_format)"),
    (GRADIENT, {}, gradient(weights_shape=[3, 3, 4, 6]), "(weights_shape matches XIO; pass weights_format)"),
    (GRADIENT, {"data_format": None, "weights_format": "IOX"}, gradient(), "(the shapes match NCX; pass data_format)"),
    (GRADIENT, {"data_format": None}, gradient(),
     "(the shapes match NCX with IOX; pass data_format and weights_format)"),
    (FORWARD, {}, tensors(src=(1, 4, 5), weights=(4, 4, 3)), "(weights matches XIO or OIX or IOX; pass weights_"),
    # With the channels alone exchanged, the weights of the other order fit as well.
    (GRADIENT, {"weights_format": "IOX", "pads_begin": [1], "pads_end": [1]},
     tensors(src=(2, 6, 5), diff_dst=(2, 4, 5), weights_shape=[4, 6, 3]),
     f"(either weights_shape matches OIX, or the shapes match {SWAPPED}"),
    (CONVOLUTION, {"weights_format": "OIX"}, tensors(src=(2, 6, 5), diff_dst=(2, 4, 7), weights_shape=[6, 4, 3]),
     f"(the shapes match {SWAPPED}"),
    (CONVOLUTION, {}, tensors(src=(2, 6, 5), diff_dst=(2, 4, 7), weights_shape=[6, 4, 3]),
     f"(the shapes match NCX with OIX {SWAPPED}"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "given", "inputs", "hint"), HINTS)
def test_the_right_format_is_named(name: str, given: dict[str, Any], inputs: dict[str, Any], hint: str) -> None:
    """Shapes that fit other formats than those of the call are rejected with a hint that names the right formats.

    Where `src` and `diff_dst` may have been exchanged, no single format is recommended.
    """
    spatial = len(inputs["src"].shape) - 2
    with pytest.raises(InvalidParams) as caught:
        resolve(name, attributes(spatial, **given), inputs)
    assert hint in caught.value.message
    assert ("pass" in caught.value.message) is (SWAPPED not in hint)


def test_no_format_is_guessed() -> None:
    """Shapes that fit no format get no hint, and those that fit the default are accepted."""
    found = refused(GRADIENT, attributes(), gradient(weights_shape=[9, 9, 9, 9]))
    assert not [msg for msg in found.values() if "; pass" in msg]
    square = tensors(src=(1, 3, 5), diff_dst=(1, 3, 7), weights_shape=[3, 3, 3])
    assert resolve(GRADIENT, attributes(1), square).weights_format == "XOI"
    assert resolve("ConvTransposeBackpropFilters", attributes(1), square).weights_format == "XIO"


def test_the_message_is_the_first_rule() -> None:
    """The message is the first broken rule and the number of further ones."""
    with pytest.raises(InvalidParams) as caught:
        resolve(GRADIENT, attributes(strides=[0, 0], groups=0), gradient())
    assert caught.value.message == (f"{GRADIENT}: strides[0] must be at least 1, but is 0 (and 2 more broken rules)")


@pytest.mark.parametrize(
    ("name", "end"),
    [
        ("kernel_size", "; use weights_shape (the shape has the channels too)"),
        ("weight", "; use weights, an input"),
        ("src", "; it is an input"),
        ("padding_mode", "; the padding is always zeros"),
        ("input_size", "; it is dst_shape here, which ConvTransposeBackwardWeights does not have"),
    ],
)  # fmt: skip
def test_attributes_of_other_frameworks(name: str, end: str) -> None:
    """An attribute of another framework is translated, or the error says what takes its place."""
    found = refused(GRADIENT, attributes(**IOX, **{name: 1}), gradient())
    assert found["attributes", name] == f"{name} is not an attribute of {GRADIENT}{end}"


@pytest.mark.parametrize(
    ("name", "end"), [("grad_output", "; use diff_dst"), ("mask", ": it has src, diff_dst, weights_shape, weights")]
)
def test_inputs_of_other_frameworks(name: str, end: str) -> None:
    """A tensor of another framework is translated; for another unknown name the error lists the inputs."""
    found = refused(GRADIENT, attributes(**IOX), gradient(**{name: tensor(1)}))
    assert found["inputs", name] == f"{name} is not an input of {GRADIENT}{end}"
