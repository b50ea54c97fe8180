"""Resolving valid calls: the results of defaults, auto_pad, formats and groups."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest

from schemas.ops import TensorMeta, TensorSpec, resolve
from schemas.shapes import data_shape, weights_shape
from schemas.tables import find_operation, operation_names
from tests.problems import Case, real_layers
from tests.schemas.calls import CONVOLUTION, FORWARD, GRADIENT, attributes, gradient, tensor, tensors
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


def test_a_shape_tensor_without_values() -> None:
    """If the weights_shape tensor has unknown values, the attribute is used, with a warning."""
    given = attributes(weights_format="IOX", weights_shape=[4, 6, 3, 3])
    op = resolve(GRADIENT, given, gradient(weights_shape=TensorMeta("s32", (4,))))
    assert op.weights_shape == (4, 6, 3, 3)
    assert len(op.warnings) == 1


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
    """What broke others, and every layer of the benchmarks, are valid calls in both data formats."""
    for data_format, weights_format in itertools.product(("NCX", "NXC"), ("OIX", "XOI")):
        each = replace(case, data_format=data_format, weights_format=weights_format)
        op = resolve(each.op, each.attributes(), tensors(**each.input_shapes))
        assert (op.output.shape, op.output_padding, op.macs) == (each.output_shape, each.output_padding, each.macs)


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
