"""Random calls: valid ones resolve to what they were built from; invalid ones are rejected without other errors."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from convgrad._errors import ConvgradError, InvalidParams
from schemas.describe import example
from schemas.ops import resolve
from schemas.shapes import data_shape, weights_shape
from schemas.tables import find_operation, operation_names
from tests.schemas.calls import CONVOLUTION, FORWARD, refused, spread, tensors, windows

NAMES = st.sampled_from([name for name in operation_names() if not name.startswith("BiasAdd")])


@st.composite
def right_calls(draw: st.DrawFn) -> tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Draw a valid call, built from the definition of its forward operation, and what it must resolve to."""
    name = draw(NAMES)
    operation = find_operation(name).operation
    spatial = draw(st.integers(1, 3))
    each = [
        (draw(st.integers(1, 7)), draw(st.integers(1, 4)), draw(st.integers(1, 4)), draw(st.integers(1, 3)))
        for _ in range(spatial)
    ]
    src, kernel, strides, dilations = (tuple(axis[part] for axis in each) for part in range(4))
    begin = tuple(draw(st.integers(0, 3)) for _ in range(spatial))
    end = tuple(draw(st.integers(0, 3)) for _ in range(spatial))
    extra = tuple(draw(st.integers(0, stride - 1)) for stride in strides)
    if operation.transposed:
        dst = tuple(
            spread(s, k, t, d) - b - e + p for (s, k, t, d), b, e, p in zip(each, begin, end, extra, strict=True)
        )
    else:
        dst = tuple(windows(s, b, e, k, t, d) for (s, k, t, d), b, e in zip(each, begin, end, strict=True))
    groups = draw(st.integers(1, 3))
    i, o = groups * draw(st.integers(1, 3)), groups * draw(st.integers(1, 3))
    axis = draw(st.sampled_from("IO")) if operation.transposed and groups > 1 else "O" if operation.transposed else "I"
    weights = (i, o // groups) if axis == "O" else (i // groups, o)
    n = draw(st.integers(0, 3))
    data_format, order = (draw(st.sampled_from(["NCX", "NXC"])), draw(st.sampled_from(["XIO", "OIX", "XOI", "IOX"])))
    attributes: dict[str, Any] = {
        "strides": list(strides), "pads_begin": list(begin), "pads_end": list(end), "dilations": list(dilations),
        "groups": groups, "data_format": data_format, draw(st.sampled_from(["weights_format", "filter_format"])): order,
    }  # fmt: skip
    if operation.transposed and (operation.name == FORWARD or draw(st.booleans())):
        attributes["output_padding"] = list(extra)
    shape = weights_shape(*weights, kernel, order)
    every = tensors(
        src=data_shape(n, i, src, data_format), diff_dst=data_shape(n, o, dst, data_format), weights=shape,
        weights_shape=list(shape), dst_shape=list(data_shape(n, i, src, data_format)),
    )  # fmt: skip
    inputs = {row.name: every[row.name] for row in operation.inputs if row.name != "bias"}
    facts = {"n": n, "src_channels": i, "dst_channels": o, "src_spatial": src, "dst_spatial": dst, "kernel": kernel}
    facts |= {"pads_begin": begin, "pads_end": end, "groups": groups, "groups_axis": axis, "weights_shape": shape}
    facts["output_padding"] = extra if operation.transposed else (0,) * spatial
    if operation.computes == "diff_src" and not operation.transposed and min(dst) > 0:
        facts["output_padding"] = tuple(
            size - spread(count, kernel[axis], strides[axis], dilations[axis]) + begin[axis] + end[axis]
            for axis, (size, count) in enumerate(zip(src, dst, strict=True))
        )
    return name, attributes, inputs, facts


@given(right_calls())
def test_a_call_made_from_the_definition_resolves(
    call: tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]],
) -> None:
    """A call whose shapes follow the definition is valid, unless its output would be empty; then it is rejected."""
    name, attributes, inputs, facts = call
    if min(facts["dst_spatial"]) < 1:
        if "diff_dst" in inputs:
            inputs["diff_dst"] = tensors(x=tuple(max(0, size) for size in inputs["diff_dst"].shape))["x"]
        with pytest.raises(InvalidParams):
            resolve(name, attributes, inputs)
        return
    op = resolve(name, attributes, inputs)
    assert {fact: getattr(op, fact) for fact in facts} == facts


@given(right_calls(), st.data())
def test_a_wrong_size_is_refused(
    call: tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]], data: st.DataObject
) -> None:
    """A gradient with one changed spatial size is valid if, and only if, the definition allows that size too."""
    name, attributes, inputs, facts = call
    operation = find_operation(name).operation
    if operation.computes != "diff_weights" or min(facts["dst_spatial"]) < 1:
        return
    axis = data.draw(st.integers(0, len(facts["src_spatial"]) - 1))
    size = facts["dst_spatial"][axis] + data.draw(st.integers(-4, 4))
    if size < 1:
        return
    sizes = (*facts["dst_spatial"][:axis], size, *facts["dst_spatial"][axis + 1 :])
    inputs = inputs | tensors(diff_dst=data_shape(facts["n"], facts["dst_channels"], sizes, attributes["data_format"]))
    stride, dilation = attributes["strides"][axis], attributes["dilations"][axis]
    begin, end, kernel = (facts[part][axis] for part in ("pads_begin", "pads_end", "kernel"))
    src, extra = facts["src_spatial"][axis], attributes.get("output_padding")
    if operation.name == CONVOLUTION:
        right = size == windows(src, begin, end, kernel, stride, dilation)
    elif extra is not None:
        right = size == facts["dst_spatial"][axis]
    else:
        right = windows(size, begin, end, kernel, stride, dilation) == src
    if right:
        assert resolve(name, attributes, inputs).dst_spatial == sizes
    else:
        assert {place[:2] for place in refused(name, attributes, inputs)} == {("inputs", "diff_dst")}


SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 9),
    st.integers(),
    st.sampled_from([2**31, 2**62, 2**63 - 1, 2**63, -(2**63), 10**400]),
    st.floats(),
    st.text(max_size=8),
    st.sampled_from(
        ["f32", "bf16", "s32", "NCX", "XIO", "OIX", "same_upper", "valid", "s64[]", "ConvTranspose", "\ud800"]
    ),
)
JSON = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=6), inner, max_size=4),
    max_leaves=12,
)
SIZES = st.lists(st.sampled_from([0, 1, 2, 3, 4, 7, 8, 2**31, 2**62, -1]), max_size=6)
WRAPPED = st.fixed_dictionaries({"type": st.sampled_from(["s64[]", "s64", "string"]), "value": SCALARS | SIZES})
TENSOR = st.fixed_dictionaries({}, optional={"dtype": SCALARS, "shape": SIZES | JSON, "data": SCALARS})


def attempt(name: Any, attributes: Any, inputs: Any) -> None:
    """Resolve; the outcome must be a resolved call or one of our errors that can be sent as JSON."""
    answer: Any
    try:
        answer = resolve(name, attributes, inputs).reply_attributes()
    except ConvgradError as error:
        answer = [error.message, error.data]
    assert len(json.dumps(answer, ensure_ascii=False).encode()) < 20_000


@given(NAMES, st.data())
@settings(max_examples=150)
def test_nearly_valid_calls_raise_only_convgrad_errors(name: str, data: st.DataObject) -> None:
    """A step or two away from a valid call the outcome is a call or one of our errors, small and fit for JSON."""
    call = example(find_operation(name))
    for _ in range(data.draw(st.integers(1, 3))):
        part = call[data.draw(st.sampled_from(["attributes", "inputs"]))]
        if part:
            key = data.draw(st.sampled_from(sorted(part)))
            part[key] = data.draw(JSON | SIZES | WRAPPED | TENSOR)
    attempt(name, call["attributes"], call["inputs"])


def test_deep_nesting() -> None:
    """A value nested thousands of levels deep is rejected like any other."""
    deep: Any = []
    for _ in range(20_000):
        deep = [deep]
    example_call = example(find_operation(CONVOLUTION))
    for name in ("strides", "weights_shape", "filter_shape", "auto_pad", "groups", "attrs"):
        both = {"weights_shape": deep, "filter_shape": deep}
        attempt(CONVOLUTION, example_call["attributes"] | both | {name: deep}, example_call["inputs"])
        attempt(CONVOLUTION, example_call["attributes"], {"src": deep, "weights_shape": deep, "filter_shape": [deep]})
