"""Op objects as oneDNN Graph dumps them."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from convgrad._errors import InvalidParams
from schemas.dumps import call_of_dump, is_dump, read_dump
from schemas.ops import resolve
from schemas.tables import find_operation
from tests.schemas.calls import FORWARD, GRADIENT, refused, tensors

UNKNOWN = -9223372036854775808


def logical(number: int, shape: list[int], dtype: str = "bf16") -> dict[str, Any]:
    """Return a logical tensor as in a dump."""
    return {
        "id": number,
        "dtype": dtype,
        "shape": shape,
        "stride": [1] * len(shape),
        "layout_type": "strided",
        "property_type": "undef",
    }


def s64s(*values: int) -> dict[str, Any]:
    """Return a list attribute as in a dump."""
    return {"type": "s64[]", "value": list(values)}


def dumped() -> dict[str, Any]:
    """Return a transposed gradient as in benchdnn's graph files."""
    return {
        "id": 0,
        "name": "DECONV_0",
        "kind": GRADIENT,
        "attrs": {
            "data_format": {"type": "string", "value": "NCX"},
            "pads_end": s64s(41, 41),
            "auto_pad": {"type": "string", "value": "None"},
            "weights_format": {"type": "string", "value": "IOX"},
            "dilations": s64s(1, 1),
            "pads_begin": s64s(0, 0),
            "weights_shape": s64s(32, 128, 3, 3),
            "groups": {"type": "s64", "value": 1},
            "strides": s64s(2, 2),
        },
        "inputs": [logical(0, [1, 32, 28, 28]), logical(1, [1, 128, 16, 16])],
        "outputs": [logical(2, [32, 128, 3, 3])],
    }


def forward() -> dict[str, Any]:
    """Return the dump of a transposed convolution, with twelve zeros for an attribute that was never set."""
    op = dumped() | {"kind": FORWARD, "inputs": [logical(0, [1, 32, 28, 28]), logical(1, [32, 128, 3, 3])]}
    op["outputs"] = [logical(2, [1, 128, 16, 16])]
    del op["attrs"]["weights_shape"]
    op["attrs"]["output_padding"] = s64s(*[0] * 12)
    return op


def test_the_three_parts_of_a_call() -> None:
    """A dump splits into a name, attributes, and inputs by their index, and these resolve."""
    dump = read_dump(dumped(), find_operation(GRADIENT))
    assert dump.name == GRADIENT
    assert list(dump.inputs) == ["src", "diff_dst"]
    op = resolve(dump.name, dump.attributes, dump.inputs)
    assert (op.dtype, op.pads_end, op.output.shape) == ("bf16", (41, 41), (32, 128, 3, 3))


@pytest.mark.parametrize("op", [dumped(), forward()], ids=["gradient", "forward"])
def test_a_dump_in_the_place_of_the_attributes(op: dict[str, Any]) -> None:
    """A dump may be given as the attributes; its own inputs are used where the call has none."""
    assert resolve(op["kind"], op, {}).output.shape == tuple(op["outputs"][0]["shape"])
    with_graph = {"version": "3.0.0", "engine_kind": "cpu", "graph": [op]}
    assert resolve(op["kind"], with_graph, {}) == resolve(op["kind"], op, {})


def test_inputs_of_the_call_take_precedence() -> None:
    """A dump may be the spec for tensors other than its own."""
    op = dumped()
    inputs = tensors(src=(7, 32, 28, 28), diff_dst=(7, 128, 16, 16))
    assert (resolve(GRADIENT, op, inputs).n, resolve(GRADIENT, op, inputs).dtype) == (7, "f32")
    op["attrs"]["weights_shape"] = s64s(*[0] * 12)
    assert resolve(GRADIENT, op, inputs).weights_shape == (32, 128, 3, 3)
    weights = tensors(src=(7, 32, 28, 28), weights=(32, 128, 3, 3))
    assert resolve(FORWARD, forward(), weights).output.shape == (7, 128, 16, 16)


def test_the_old_kind_and_the_name_called() -> None:
    """A dump's kind may be any name of the called operation; the dialect is that of the name in the call."""
    op = dumped() | {"kind": "ConvTransposeBackpropFilters-1"}
    assert resolve(GRADIENT, op, {}).dialect == "new"
    del op["kind"]
    assert resolve("ConvTransposeBackpropFilters", op, {}).dialect == "old"


def test_the_output_stands_in_for_an_unset_weights_shape() -> None:
    """An unset weights_shape is taken from the dumped output, if its shape is known."""
    op = dumped()
    op["attrs"]["weights_shape"] = s64s(*[0] * 12)
    assert resolve(GRADIENT, op, {}).weights_shape == (32, 128, 3, 3)
    op["outputs"] = [logical(2, [UNKNOWN] * 4)]
    assert "is required" in refused(GRADIENT, op, {})["attributes", "weights_shape"]


@pytest.mark.parametrize(
    ("changes", "where", "message"),
    [
        (
            {"outputs": [logical(2, [32, 128, 3, 5])]},
            ("attributes", "weights_shape"),
            "the output's shape, which is (32, 128, 3, 5)",
        ),
        (
            {"outputs": [logical(2, [32, 128, 3, 3], "f32")]},
            ("outputs", "diff_weights", "dtype"),
            "must be bf16 like the inputs",
        ),
        ({"outputs": 3}, ("attributes", "outputs"), "must be a list of 1 tensor"),
        ({"outputs": [1, 2]}, ("attributes", "outputs"), "must be a list of 1 tensor"),
        ({"inputs": 3}, ("attributes", "inputs"), "must be a list"),
        ({"inputs": [1] * 4}, ("attributes", "inputs"), "has at most 3 inputs, but the dump has 4"),
        ({"attrs": 3}, ("attributes", "attrs"), "attrs must be an object"),
        ({"kind": FORWARD}, ("attributes", "kind"), "must be ConvTransposeBackwardWeights, the operation called"),
        ({"kind": 3}, ("attributes", "kind"), "kind must name an operation"),
        ({"kind": "MatMul"}, ("attributes", "kind"), "there is no operation MatMul"),
        ({"graph": []}, ("attributes", "graph"), "must have 1 op, but has 0"),
        ({"graph": [3]}, ("attributes",), "must be an object with kind, attrs, inputs and outputs"),
    ],
)
def test_wrong_dumps(changes: dict[str, Any], where: tuple[str | int, ...], message: str) -> None:
    """Errors in a dump are reported at their place in it."""
    assert message in refused(GRADIENT, dumped() | changes, {})[where]


def test_an_impossible_output_is_rejected() -> None:
    """A forward dump is rejected if its output's shape is not that of the call."""
    op = forward()
    op["outputs"] = [logical(2, [1, 128, 16, 17])]
    message = refused(FORWARD, op, {})["outputs", "dst", "shape"]
    assert message == "dst must have shape (1, 128, 16, 16), but has (1, 128, 16, 17) in the dump"


def test_three_inputs() -> None:
    """The third input of a gradient is its weights_shape; the values come from the attribute."""
    op = dumped()
    op["inputs"].append(logical(3, [4], "s32"))
    assert resolve(GRADIENT, op, {}).weights_shape == (32, 128, 3, 3)


@pytest.mark.parametrize("value", [dumped() | {"kind": "MatMul"}, None, [], 3, {"kind": 3}])
def test_what_is_no_dump_of_an_operation_is_rejected(value: Any) -> None:
    """A dump of another operation, or anything else, raises `InvalidParams`."""
    with pytest.raises(InvalidParams):
        read_dump(value, find_operation(GRADIENT))


def test_a_request_that_is_a_dump() -> None:
    """A whole request may be a dump with options, and with data added to its tensors, by index or by name."""
    body = copy.deepcopy(dumped())
    body["inputs"][0]["data"] = body["inputs"][1]["data"] = "AAAA"
    body["options"] = {"reference": True}
    call = call_of_dump(find_operation(GRADIENT), body)
    assert call["inputs"]["src"]["data"] == "AAAA"
    assert call["options"] == {"reference": True}
    assert resolve(GRADIENT, call["attributes"], call["inputs"]).output.shape == (32, 128, 3, 3)
    body["inputs"] = dict(zip(("input_forward", "output_delta"), body["inputs"], strict=True))
    by_name = call_of_dump(find_operation(GRADIENT), body)
    assert resolve(GRADIENT, by_name["attributes"], by_name["inputs"]).n == 1


def test_the_output_of_a_request_that_is_a_dump() -> None:
    """A dump's output is checked against the dump's own inputs, also after these were moved out of it."""
    called = find_operation(FORWARD)
    call = call_of_dump(called, forward() | {"outputs": [logical(2, [1, 128, 16, 17])]})
    assert "in the dump" in refused(FORWARD, call["attributes"], call["inputs"])["outputs", "dst", "shape"]
    other = {"src": logical(0, [7, 32, 28, 28]), "weights": logical(1, [32, 128, 3, 3])}
    template = forward() | {"outputs": [logical(2, [1, 128, 16, 17])]}
    assert resolve(FORWARD, template, other).n == 7


def test_a_request_that_is_a_dump_with_unknown_shapes() -> None:
    """Shapes unknown to the dump are left to the data, and a shape input without values is dropped."""
    body = dumped()
    body["inputs"] = [logical(0, [UNKNOWN] * 4), logical(1, []), logical(3, [4], "s32")]
    inputs = call_of_dump(find_operation(GRADIENT), body)["inputs"]
    assert set(inputs) == {"src", "diff_dst"}
    assert all("shape" not in described and described["dtype"] == "bf16" for described in inputs.values())


@pytest.mark.parametrize(
    ("value", "is_one"),
    [(dumped(), True), ({"graph": []}, True), ({"strides": [1]}, False), ({}, False), (None, False), ([], False)],
)
def test_dumps_are_recognised(value: Any, is_one: bool) -> None:
    """Plain attributes never look like a dump: no attribute is called kind, attrs or graph."""
    assert is_dump(value) == is_one
