"""The example graph: its dump, inputs for it, and the oracle's results."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import numpy as np

from tests import naive
from tests.app.samples import Array
from tests.problems import Case

EXAMPLE = Path(__file__).parents[2] / "examples" / "graph.json"
SHAPES = {0: (2, 3, 8, 8), 1: (4, 3, 3, 3), 3: (4, 5, 4, 4), 5: (2, 5, 16, 16)}


def dump() -> Any:
    """Return the example: Convolution 0, 1 -> 2; ConvTranspose 2, 3 -> 4; its weight gradient 2, 5 -> 6."""
    return json.loads(EXAMPLE.read_text(encoding="utf-8"))


def wrapped(attributes: dict[str, Any]) -> dict[str, Any]:
    """Return attributes as oneDNN Graph dumps them."""
    kinds: dict[type, str] = {list: "s64[]", int: "s64", str: "string"}
    return {name: {"type": kinds[type(value)], "value": value} for name, value in attributes.items()}


def of_case(case: Case) -> dict[str, Any]:
    """Return the dump of a graph of one op, 7, whose tensors are numbered from 0; the last one is the result."""
    tensors = [
        {"id": number, "dtype": case.dtype, "shape": list(shape)}
        for number, shape in enumerate((*case.input_shapes.values(), case.output_shape))
    ]
    op = {"id": 7, "name": "dw", "kind": case.op, "attrs": wrapped(case.attributes())}
    return {"graph": [op | {"inputs": tensors[:-1], "outputs": tensors[-1:]}]}


def tensors(seed: int = 0) -> dict[int, Array]:
    """Return small integers for the example's inputs."""
    rng = np.random.default_rng(seed)
    return {number: rng.integers(-3, 4, shape).astype(np.float32) for number, shape in SHAPES.items()}


def expected(given: dict[int, Array]) -> dict[int, Array]:
    """Return the oracle's results for the example."""
    shared: dict[str, Any] = {"dilations": (1, 1), "pads_begin": (1, 1), "groups": 1, "data_format": "NCX"}
    inner = naive.convolution(
        given[0], given[1], None, dst_spatial=(8, 8), strides=(1, 1), weights_format="OIX", groups_axis="I", **shared
    )
    shared |= {"strides": (2, 2), "weights_format": "IOX", "groups_axis": "O"}
    dst = naive.conv_transpose(inner, given[3], None, dst_spatial=(16, 16), **shared)
    gradient = naive.bwd_weights("ConvTransposeBackwardWeights", inner, given[5], kernel=(4, 4), **shared)
    return {number: array.astype(np.float32) for number, array in ((2, inner), (4, dst), (6, gradient))}


def sent(array: Array) -> dict[str, Any]:
    """Return a tensor as JSON."""
    return {"dtype": "f32", "shape": list(array.shape), "data": base64.b64encode(array.tobytes()).decode()}


def body(given: dict[int, Array], **members: Any) -> dict[str, Any]:
    """Return a request."""
    return {"graph": dump(), "inputs": {str(number): sent(array) for number, array in given.items()}, **members}
