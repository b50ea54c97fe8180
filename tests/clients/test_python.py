"""The client that openapi-python-client makes from the OpenAPI document."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.live import LiveService

# A user's program with the generated package.
PROGRAM = """
import base64, struct, sys
from generated import Client
from generated.api.operations import conv_transpose, convolution_backward_weights, validate_convolution_backward_weights
from generated.models import (
    ConvolutionBackwardWeightsAttributes, ConvolutionBackwardWeightsRequest, ConvolutionBackwardWeightsRequestInputs,
    ConvolutionBackwardWeightsValidate, ConvolutionBackwardWeightsValidateInputs, DataTensor, DataTensorDtype,
    TensorDescription, TensorDescriptionDtype,
)

client = Client(base_url=sys.argv[1])
attributes = ConvolutionBackwardWeightsAttributes(
    strides=[1], pads_begin=[0], pads_end=[0], dilations=[1], data_format="NCX", weights_format="OIX"
)

def tensor(shape, *values):
    data = base64.b64encode(struct.pack(f"<{len(values)}f", *values)).decode()
    return DataTensor(dtype=DataTensorDtype.F32, shape=shape, data=data)

inputs = ConvolutionBackwardWeightsRequestInputs(
    src=tensor([1, 1, 3], 1, 2, 3), diff_dst=tensor([1, 1, 2], 1, 1), weights_shape=[1, 1, 2]
)
body = ConvolutionBackwardWeightsRequest(attributes=attributes, inputs=inputs)
reply = convolution_backward_weights.sync(client=client, body=body)
print(struct.unpack("<2f", base64.b64decode(reply.outputs["diff_weights"].data)))

inputs = ConvolutionBackwardWeightsValidateInputs(
    src=TensorDescription(dtype=TensorDescriptionDtype.F32, shape=[1, 1, 3]),
    diff_dst=TensorDescription(dtype=TensorDescriptionDtype.F32, shape=[1, 1, 2]),
    weights_shape=[1, 1, 2],
)
body = ConvolutionBackwardWeightsValidate(attributes=attributes, inputs=inputs)
reply = validate_convolution_backward_weights.sync(client=client, body=body)
print(reply.outputs["diff_weights"].shape)

attributes.strides = [0]
reply = validate_convolution_backward_weights.sync(client=client, body=body)
print(reply.code, reply.errors[0].loc)
"""


@pytest.mark.heavy
def test_a_generated_client(service: LiveService, tmp_path: Path) -> None:
    """It is made without a warning, computes a gradient, checks a call, and gets a typed error."""
    command = ["openapi_python_client", "generate", "--url", f"{service.url}/openapi.json"]
    command += ["--meta", "none", "--output-path", str(tmp_path / "generated"), "--fail-on-warning"]
    made = subprocess.run([sys.executable, "-m", *command], cwd=tmp_path, capture_output=True, text=True)
    assert made.returncode == 0, made.stdout + made.stderr
    called = [sys.executable, "-c", PROGRAM, service.url]
    done = subprocess.run(called, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["(3.0, 5.0)", "[1, 1, 2]", "invalid_params ['attributes', 'strides', 0]"]
