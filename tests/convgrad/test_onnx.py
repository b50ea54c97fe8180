"""`convgrad.onnx` with the real service, against ONNX's reference evaluator and, where that is limited, the oracle."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import convgrad
import convgrad.onnx as co
from tests import naive
from tests.live import LiveService

CONV: dict[str, dict[str, Any]] = {
    "defaults": {},
    "all": {"strides": [2, 1], "dilations": [1, 2], "group": 2, "pads": [1, 0, 2, 1], "kernel_shape": [3, 2]},
    "valid": {"auto_pad": "VALID", "strides": [2, 2]},
    "same upper": {"auto_pad": "SAME_UPPER", "strides": [2, 2]},
    "same lower": {"auto_pad": "SAME_LOWER", "strides": [2, 2]},
    "not set": {"auto_pad": "NOTSET", "pads": [1, 1, 1, 1]},
}
TRANSPOSED: dict[str, dict[str, Any]] = {
    "defaults": {},
    "all": {"strides": [3, 2], "dilations": [1, 2], "pads": [1, 0, 2, 1], "output_padding": [2, 1]},
    "same upper": {"auto_pad": "SAME_UPPER", "strides": [2, 1]},
    "same lower": {"auto_pad": "SAME_LOWER", "strides": [2, 1]},
    "same upper, sized": {"auto_pad": "SAME_UPPER", "strides": [2, 2], "output_shape": [10, 7]},
}
X_SHAPE, KERNEL = (2, 4, 7, 5), (3, 2)


@pytest.fixture(autouse=True)
def client(service: LiveService) -> Iterator[convgrad.Client]:
    """The client that all calls use."""
    with convgrad.Client(service.url) as client:
        co.use(client)
        yield client
        co.use(None)


def integers(*shape: int) -> Any:
    """Return small integers, whose sums are exact."""
    return np.random.default_rng(shape).integers(-4, 5, shape).astype(np.float32)


def evaluated(kind: str, attributes: dict[str, Any], *inputs: Any) -> Any:
    """Return a node, and its output by ONNX's reference evaluator."""
    onnx = pytest.importorskip("onnx", reason="onnx is not installed: scripts/test-frameworks installs it")
    reference = pytest.importorskip("onnx.reference")
    node = onnx.helper.make_node(kind, ["X", "W", "B"][: len(inputs)], ["Y"], **attributes)
    (found,) = reference.ReferenceEvaluator(node).run(None, dict(zip("XWB", inputs, strict=False)))
    return node, found


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    ("kind", "attributes"),
    [*(("Conv", each) for each in CONV.values()), *(("ConvTranspose", each) for each in TRANSPOSED.values())],
)
def test_nodes(kind: str, attributes: dict[str, Any], bias: bool) -> None:
    """Every attribute of Conv and ConvTranspose means what ONNX's evaluator takes it to mean."""
    channels = (6, 4 // attributes.get("group", 1)) if kind == "Conv" else (4, 6)
    inputs = [integers(*X_SHAPE), integers(*channels, *KERNEL), *([integers(6)] * bias)]
    node, right = evaluated(kind, attributes, *inputs)
    np.testing.assert_array_equal(co.run(node, *inputs), right)
    np.testing.assert_array_equal(co.run({"op_type": kind, "attributes": attributes}, *inputs), right)


@pytest.mark.parametrize("rank", [1, 2, 3])
def test_conv_transpose_with_groups(rank: int) -> None:
    """Groups of ConvTranspose have the oracle's result: ONNX's evaluator computes few of them."""
    x, w = integers(2, 4, *(5, 4, 3)[:rank]), integers(4, 3, *(2, 3, 2)[:rank])
    attributes = {"group": 2, "strides": [2] * rank, "pads": [0] * rank + [1] * rank, "output_padding": [1] * rank}
    found = co.run({"op_type": "ConvTranspose", "attributes": attributes}, x, w)
    right = naive.conv_transpose(
        x, w, dst_spatial=found.shape[2:], strides=[2] * rank, pads_begin=[0] * rank, dilations=[1] * rank, groups=2,
        data_format="NCX", weights_format="IOX", groups_axis="O",
    )  # fmt: skip
    np.testing.assert_array_equal(found, right)
    spatial = [2 * (size - 1) + extent for size, extent in zip(x.shape[2:], w.shape[2:], strict=True)]
    assert list(found.shape) == [2, 6, *spatial]


def test_an_output_shape_without_auto_pad() -> None:
    """As specified, `output_shape` replaces `pads`, and an odd padding goes to the beginning."""
    node = {"op_type": "ConvTranspose", "attributes": {"strides": [2], "output_shape": [8]}}
    op, attributes = co.call_of(node, (1, 1, 4), (1, 1, 5))
    assert op == "ConvTranspose"
    assert (attributes["pads_begin"], attributes["pads_end"]) == ((2,), (1,))


def test_the_algorithm_of_a_node_and_of_all(client: convgrad.Client) -> None:
    """A call's algorithm, or else that of `use`, sums it and its gradients."""
    node = {"op_type": "Conv", "attributes": {"pads": [1, 1, 1, 1]}}
    x, w, dy = (np.random.default_rng(n).standard_normal((16, 16, 3, 3)).astype(np.float32) for n in range(3))
    direct, summed = co.gradients(node, x, w, dy), co.gradients(node, x, w, dy, algorithm="winograd")
    assert not np.array_equal(direct["diff_weights"], summed["diff_weights"])
    assert not np.array_equal(direct["diff_src"], summed["diff_src"])
    co.use(client, algorithm="winograd")
    assert np.array_equal(co.gradients(node, x, w, dy)["diff_weights"], summed["diff_weights"])
    assert np.array_equal(co.run(node, x, w), co.run(node, x, w, algorithm="winograd"))
    assert not np.array_equal(co.run(node, x, w), co.run(node, x, w, algorithm="direct"))


@pytest.mark.parametrize("kind", ["Conv", "ConvTranspose"])
def test_gradients(kind: str) -> None:
    """The gradients of a node are those of the formula, all in one call, also in float64."""
    node = {"op_type": kind, "attributes": {"strides": [2, 1], "pads": [1, 0, 1, 1]}}
    transposed = kind == "ConvTranspose"
    for dtype in (np.float32, np.float64):
        x = integers(*X_SHAPE).astype(dtype)
        w = integers(*((4, 6) if transposed else (6, 4)), *KERNEL).astype(dtype)
        y = co.run(node, x, w)
        assert y.dtype == dtype
        dy = integers(*y.shape).astype(dtype)
        found = co.gradients(node, x, w, dy)
        shared: dict[str, Any] = {
            "strides": [2, 1], "pads_begin": [1, 0], "dilations": [1, 1], "data_format": "NCX",
            "weights_format": "IOX" if transposed else "OIX",
        }  # fmt: skip
        op = "ConvTranspose" if transposed else "Convolution"
        right = {
            "diff_src": naive.bwd_data(op, dy, w, src_spatial=X_SHAPE[2:], **shared),
            "diff_weights": naive.bwd_weights(op, x, dy, kernel=KERNEL, **shared),
            "diff_bias": dy.sum((0, 2, 3)),
        }
        assert found.keys() == right.keys()
        for name, array in right.items():
            np.testing.assert_array_equal(found[name], array)
            assert found[name].dtype == dtype


@pytest.mark.parametrize(
    ("kind", "attributes", "error", "says"),
    [
        ("QLinearConv", {}, convgrad.Unsupported, "Conv or ConvTranspose of ai.onnx, but is ai.onnx.QLinear"),
        ("Conv", {"output_padding": [1, 1]}, convgrad.Unsupported, "no attribute output_"),
        ("Conv", {"strides": [2]}, convgrad.InvalidParams, "have 2 integers, but has 1"),
        ("Conv", {"strides": [0, 1]}, convgrad.InvalidParams, "at least 1, but has 0"),
        ("Conv", {"pads": [0, 0, -1, 0]}, convgrad.InvalidParams, "at least 0, but has -1"),
        ("Conv", {"kernel_shape": [3, 3]}, convgrad.InvalidParams, r"\[3, 2\], but is \[3"),
        ("Conv", {"auto_pad": "SAME"}, convgrad.InvalidParams, "auto_pad must be one of"),
        ("Conv", {"auto_pad": "VALID", "pads": [1] * 4}, convgrad.InvalidParams, "must not be given together"),
        ("ConvTranspose", {"output_shape": [99, 9]}, convgrad.Unsupported, r"\[99, 9\] is larger than"),
        ("Conv", {"group": 3}, convgrad.InvalidParams, "groups"),
    ],
)
def test_errors(kind: str, attributes: dict[str, Any], error: type[Exception], says: str) -> None:
    """The error names the attribute or operator and both values."""
    node = {"op_type": kind, "attributes": attributes}
    inputs = integers(*X_SHAPE), integers(6, 4, *KERNEL)
    with pytest.raises(error, match=says):
        co.run(node, *inputs)
    with pytest.raises(convgrad.Unsupported, match=f"but is com.x.{kind}"):
        co.run(node | {"domain": "com.x"}, *inputs)
