"""Inference calls as sent by `tritonclient` and by any HTTP client, and functions that read their replies."""

from __future__ import annotations

import json
from typing import Any

import httpx
import numpy as np
import tritonclient.http as triton

from tests.app.samples import DTYPES, Array
from tests.problems import Case

OIP = {"f32": "FP32", "f16": "FP16", "bf16": "BF16", "f64": "FP64"}
OLD_NAMES = {
    "src": "input_forward", "diff_dst": "output_delta", "weights_shape": "filter_shape", "diff_weights": "filter_delta",
    "weights_format": "filter_format", "weights": "filter", "diff_src": "input_delta", "dst_shape": "output_shape",
    "diff_bias": "bias_delta",
}  # fmt: skip
HEAD_LENGTH = "Inference-Header-Content-Length"


def tensor(name: str, array: Array, datatype: str, *, binary: bool = True) -> triton.InferInput:
    """Return an input for tritonclient."""
    made = triton.InferInput(name, list(array.shape), datatype)
    made.set_data_from_numpy(array, binary_data=binary)
    return made


def triton_inputs(case: Case, inputs: dict[str, Array], *, binary: bool = True) -> list[triton.InferInput]:
    """Return the inputs of a case for tritonclient."""
    return [tensor(name, array, OIP[case.dtype], binary=binary) for name, array in inputs.items()]


def infer(client: Any, case: Case, inputs: dict[str, Array], *, binary: bool = True, **more: Any) -> Array:
    """Return the result of a case computed through tritonclient's synchronous client."""
    outputs = [triton.InferRequestedOutput(case.output_name, binary_data=binary)]
    json_too = binary or case.dtype == "bf16"  # tritonclient itself rejects BF16 in JSON requests
    sent = triton_inputs(case, inputs, binary=json_too)
    result = client.infer(case.op, sent, outputs=outputs, parameters=case.attributes(), **more)
    found: Array = result.as_numpy(case.output_name)
    return found


def head(case: Case, inputs: dict[str, Array], *, binary: bool = True, **members: Any) -> dict[str, Any]:
    """Return the JSON of an inference request, built by hand."""
    tensors = []
    for name, array in inputs.items():
        entry: dict[str, Any] = {"name": name, "shape": list(array.shape), "datatype": OIP[case.dtype]}
        if binary:
            entry["parameters"] = {"binary_data_size": array.nbytes}
        else:
            entry["data"] = array.astype(np.float64).ravel().tolist()
        tensors.append(entry)
    return {"inputs": tensors, "parameters": case.attributes(), **members}


def body(document: dict[str, Any], inputs: dict[str, Array]) -> tuple[bytes, dict[str, str]]:
    """Return the body of a binary request, and its headers."""
    text = json.dumps(document).encode()
    return b"".join([text, *(array.tobytes() for array in inputs.values())]), {HEAD_LENGTH: str(len(text))}


def post(http: httpx.Client, op: str, content: Any, headers: dict[str, str] | None = None) -> httpx.Response:
    """Post a request unchanged."""
    return http.post(f"/v2/models/{op}/infer", content=content, headers=headers or {})


def post_binary(http: httpx.Client, case: Case, inputs: dict[str, Array], **members: Any) -> httpx.Response:
    """Post a case with binary tensors."""
    content, headers = body(head(case, inputs, **members), inputs)
    return post(http, case.op, content, headers)


def post_json(http: httpx.Client, case: Case, inputs: dict[str, Array], **members: Any) -> httpx.Response:
    """Post a case entirely as JSON."""
    return http.post(f"/v2/models/{case.op}/infer", json=head(case, inputs, binary=False, **members))


def read(response: httpx.Response, dtype: str) -> Array:
    """Return the one output of a reply in either form."""
    assert response.status_code == 200, response.text
    length = response.headers.get(HEAD_LENGTH)
    content = response.content
    text, data = (content, None) if length is None else (content[: int(length)], content[int(length) :])
    (output,) = json.loads(text)["outputs"]
    assert output["datatype"] == OIP[dtype]
    if data is None:
        return np.array(output["data"], DTYPES[dtype]).reshape(output["shape"])
    assert output["parameters"] == {"binary_data_size": len(data)}
    return np.frombuffer(data, DTYPES[dtype]).reshape(output["shape"])


def error(response: httpx.Response, status: int) -> str:
    """Check that a reply is the protocol's error object, and return its text."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    found = response.json()
    assert list(found) == ["error"]
    message: str = found["error"]
    return message
