"""Op objects as oneDNN Graph dumps them."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from schemas.dumps import call_of_dump, is_dump
from schemas.ops import resolve
from schemas.tables import find_operation
from tests.schemas.calls import FORWARD, GRADIENT, refused, tensors

UNKNOWN = -9223372036854775808


def logical(number: int, shape: list[int], dtype: str = "bf16") -> dict[str, Any]:
    """Return a logical tensor as in a dump."""
    kinds = {"layout_type": "strided", "property_type": "undef"}
    return {"id": number, "dtype": dtype, "shape": shape, "stride": [1] * len(shape), **kinds}


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
            "data_format": {"type": "string", "value": "NCX"}, "pads_end": s64s(41, 41),
            "auto_pad": {"type": "string", "value": "None"}, "weights_format": {"type": "string", "value": "IOX"},
            "dilations": s64s(1, 1), "pads_begin": s64s(0, 0), "weights_shape": s64s(32, 128, 3, 3),
            "groups": {"type": "s64", "value": 1}, "strides": s64s(2, 2),
        },
        "inputs": [logical(0, [1, 32, 28, 28]), logical(1, [1, 128, 16, 16])],
        "outputs": [logical(2, [32, 128, 3, 3])],
    }  # fmt: skip


def forward() -> dict[str, Any]:
    """Return the dump of a transposed convolution, with twelve zeros for an attribute that was never set."""
    op = dumped() | {"kind": FORWARD, "inputs": [logical(0, [1, 32, 28, 28]), logical(1, [32, 128, 3, 3])]}
    op["outputs"] = [logical(2, [1, 128, 16, 16])]
    del op["attrs"]["weights_shape"]
    op["attrs"]["output_padding"] = s64s(*[0] * 12)
    return op


@pytest.mark.parametrize("op", [dumped(), forward()], ids=["gradient", "forward"])
def test_a_dump_in_the_place_of_the_attributes(op: dict[str, Any]) -> None:
    """A dump may be given as the attributes; its own inputs are used where the call has none."""
    assert resolve(op["kind"], op, {}).output.shape == tuple(op["outputs"][0]["shape"])
    plain: list[Any] = [{}, {"strides": [1]}, None, []]
    with_graph = {"version": "3.0.0", "engine_kind": "cpu", "graph": [op]}
    assert [is_dump(each) for each in (op, with_graph, *plain)] == [True] * 2 + [False] * 4
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
        ({"outputs": [logical(2, [32, 128, 3, 5])]}, ("attributes", "weights_shape"), "which is (32, 128, 3, 5)"),
        ({"outputs": [logical(2, [32, 128, 3, 3], "f32")]}, ("outputs", "diff_weights", "dtype"), "must be bf16 like"),
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


def test_a_request_that_is_a_dump() -> None:
    """A whole request may be a dump with options, and with data added to its tensors, by index or by name.

    The third input of a gradient is its weights_shape; the values come from the attribute.
    """
    body = copy.deepcopy(dumped())
    body["inputs"].append(logical(3, [4], "s32"))
    assert resolve(GRADIENT, body, {}).weights_shape == (32, 128, 3, 3)
    del body["inputs"][2]
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
