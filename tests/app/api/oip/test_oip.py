"""The `/v2` API of the real service, through unmodified `tritonclient`."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import httpx
import numpy as np
import pytest
import tritonclient.http as triton
import tritonclient.http.aio as triton_aio
from tritonclient.utils import InferenceServerException

from tests.app import oip
from tests.app import samples as calls
from tests.app.samples import CASES, SMALL, doubled, same_bits
from tests.live import LiveService
from tests.problems import OPS, Case, random_case

DTYPES = ("f32", "f16", "bf16")
NAMES = {
    "ConvTransposeBackwardWeights": ("ConvTransposeBackpropFilters", "ConvTransposeBackpropFilters-1"),
    "ConvolutionBackwardWeights": ("ConvolutionBackpropFilters", "ConvolutionBackpropFilters-1"),
    "ConvolutionBackwardData": ("ConvolutionBackpropData", "ConvolutionBackpropData-1"),
    "BiasAddBackward": ("BiasAddBackprop", "BiasAddBackprop-1"),
}


@pytest.fixture
def client(service: LiveService) -> Iterator[Any]:
    """Tritonclient's own client for the service."""
    with triton.InferenceServerClient(service.url.removeprefix("http://"), concurrency=4) as client:
        yield client


@pytest.mark.parametrize("op", OPS)
def test_every_alias(client: Any, op: str) -> None:
    """Every name of an operation is a model; under an old name its inputs, outputs and attributes have old names."""
    case = CASES[op]
    inputs = case.inputs()
    expected = case.expected(inputs)
    sent = oip.triton_inputs(case, inputs)
    result = client.infer(f"{op}-1", sent, parameters=case.attributes())
    assert same_bits(result.as_numpy(case.output_name), expected)
    for name in NAMES.get(op, ()):
        old = {oip.OLD_NAMES[key]: array for key, array in inputs.items()}
        attributes = {oip.OLD_NAMES.get(key, key): value for key, value in case.attributes().items()}
        result = client.infer(name, oip.triton_inputs(case, old), parameters=attributes, model_version="1")
        assert result.get_response()["model_name"] == name
        assert same_bits(result.as_numpy(oip.OLD_NAMES[case.output_name]), expected)
        # An output requested by its other name is returned under that name.
        outputs = [triton.InferRequestedOutput(case.output_name)]
        result = client.infer(name, sent, outputs=outputs, parameters=case.attributes())
        assert same_bits(result.as_numpy(case.output_name), expected)


@pytest.mark.parametrize("datatype", ["INT32", "INT64"])
@pytest.mark.parametrize("binary", [True, False])
@pytest.mark.parametrize("first", [True, False])
def test_weights_shape_as_an_input(client: Any, datatype: str, binary: bool, first: bool) -> None:
    """The weights' shape may be an INT32 or INT64 tensor, before or after the others; it wins over a parameter."""
    inputs = SMALL.inputs()
    attributes = SMALL.attributes()
    shape = np.array(attributes.pop("weights_shape"), np.int32 if datatype == "INT32" else np.int64)
    given = oip.tensor("weights_shape", shape, datatype, binary=binary)
    tensors = oip.triton_inputs(SMALL, inputs)
    sent = [given, *tensors] if first else [*tensors, given]
    for parameters in (attributes, attributes | {"weights_shape": [1, 1, 1, 1]}):
        result = client.infer(SMALL.op, sent, parameters=parameters)
        assert same_bits(result.as_numpy("diff_weights"), SMALL.expected(inputs))


def test_attributes_may_be_text(client: Any) -> None:
    """A list may be a JSON list or a string with one, with or without brackets; an integer may be a string."""
    inputs = SMALL.inputs()
    attributes = SMALL.attributes()
    for write in (str, lambda values: ",".join(map(str, values)), lambda values: f"[{','.join(map(str, values))}]"):
        text = {key: write(value) if isinstance(value, list) else str(value) for key, value in attributes.items()}
        result = client.infer(SMALL.op, oip.triton_inputs(SMALL, inputs), parameters=text)
        assert same_bits(result.as_numpy("diff_weights"), SMALL.expected(inputs))


def test_async_requests_of_the_sync_client_do_not_mix(client: Any) -> None:
    """Requests in flight at the same time each get their own result and id."""
    rng = np.random.default_rng(23)
    cases = [random_case(rng, macs=300_000) for _ in range(12)]
    data = [case.inputs() for case in cases]
    requests = [
        client.async_infer(
            case.op, oip.triton_inputs(case, inputs), parameters=case.attributes(), request_id=f"call {number}"
        )
        for number, (case, inputs) in enumerate(zip(cases, data, strict=True))
    ]
    for number, (case, inputs, request) in enumerate(zip(cases, data, requests, strict=True)):
        result = request.get_result()
        assert result.get_response()["id"] == f"call {number}"
        assert same_bits(result.as_numpy(case.output_name), case.expected(inputs))


def test_the_aio_client(service: LiveService) -> None:
    """tritonclient's asyncio client works: every operation, with and without compression, many at a time."""

    async def run() -> None:
        async with triton_aio.InferenceServerClient(service.url.removeprefix("http://")) as client:
            assert await client.is_server_live()
            assert await client.is_model_ready("ConvTranspose")
            await asyncio.gather(
                *(one(client, replace(case, dtype=dtype)) for case in CASES.values() for dtype in DTYPES)
            )

    async def one(client: Any, case: Case) -> None:
        inputs = case.inputs()
        for coding, binary in product((None, "gzip", "deflate"), (True, False)):
            result = await client.infer(
                case.op,
                oip.triton_inputs(case, inputs),
                outputs=[triton.InferRequestedOutput(case.output_name, binary_data=binary)],
                parameters=case.attributes(),
                request_id=case.op,
                request_compression_algorithm=coding,
                response_compression_algorithm=coding,
            )
            assert result.get_response()["id"] == case.op
            assert same_bits(result.as_numpy(case.output_name), case.expected(inputs))

    asyncio.run(run())


def test_server_metadata(client: Any) -> None:
    """The service reports live, ready, its extensions, and the index of every name."""
    assert client.is_server_live()
    assert client.is_server_ready()
    assert "binary_tensor_data" in client.get_server_metadata()["extensions"]
    assert "system_shared_memory" not in client.get_server_metadata()["extensions"]
    index = client.get_model_repository_index()
    assert {"ConvTranspose", "ConvTransposeBackpropFilters-1"} <= {entry["name"] for entry in index}
    assert {entry["state"] for entry in index} == {"READY"}
    for entry in index:
        assert client.is_model_ready(entry["name"], entry["version"])


def test_metadata_and_config_are_in_the_dialect_of_the_name(client: Any) -> None:
    """A model is described with the names of its edition; both documents agree."""
    new = ["src", "diff_dst", "weights_shape", "weights"], ["diff_weights", "diff_bias", "diff_src"]
    old = [[oip.OLD_NAMES[name] for name in names] for names in new]
    for name, (inputs, outputs) in (("ConvolutionBackwardWeights", new), ("ConvolutionBackpropFilters", old)):
        metadata = client.get_model_metadata(name, "1")
        config = client.get_model_config(name)
        assert (metadata["name"], metadata["versions"]) == (name, ["1"])
        assert [entry["name"] for entry in metadata["inputs"]] == inputs
        assert [entry["name"] for entry in metadata["outputs"]] == outputs
        for side in ("input", "output"):
            described = [(entry["name"], f"TYPE_{entry['datatype']}", entry["shape"]) for entry in metadata[side + "s"]]
            assert [(entry["name"], entry["data_type"], entry["dims"]) for entry in config[side]] == described
        assert {"strides", "reproducible"} <= set(config["parameters"])


def test_statistics_are_counts(client: Any) -> None:
    """Each success and each failure counts once, under the name in the call, with its time."""

    def counts() -> dict[str, int]:
        (model,) = client.get_inference_statistics("ConvTransposeBackwardWeights-1")["model_stats"]
        assert model["inference_count"] == model["inference_stats"]["success"]["count"]
        return {part: entry["count"] for part, entry in model["inference_stats"].items()}

    inputs, before = SMALL.inputs(), counts()
    sent = oip.triton_inputs(SMALL, inputs)
    for _ in range(3):
        client.infer("ConvTransposeBackwardWeights-1", sent, parameters=SMALL.attributes())
    with pytest.raises(InferenceServerException):
        client.infer("ConvTransposeBackwardWeights-1", sent, parameters={"strides": [0, 0]})
    after = counts()
    grown = {part: after[part] - before[part] for part in after}
    assert grown == {
        "success": 3, "fail": 1, "queue": 3, "compute_input": 3, "compute_infer": 3, "compute_output": 3,
        "cache_hit": 0, "cache_miss": 0,
    }  # fmt: skip
    every = client.get_inference_statistics()["model_stats"]
    ours = next(model for model in every if model["name"] == "ConvTransposeBackwardWeights-1")
    stats = ours["inference_stats"]
    parts = ("queue", "compute_input", "compute_infer", "compute_output")
    assert 0 < sum(stats[part]["ns"] for part in parts) <= stats["success"]["ns"]


def test_errors_are_exceptions_with_messages(client: Any) -> None:
    """tritonclient raises the service's own message and status."""
    inputs = SMALL.inputs()
    sent = oip.triton_inputs(SMALL, inputs)
    with pytest.raises(InferenceServerException, match="strides") as caught:
        client.infer(SMALL.op, sent, parameters=SMALL.attributes() | {"strides": [0, 2]})
    assert caught.value.status() == "400"
    with pytest.raises(InferenceServerException, match="did you mean ConvTranspose") as caught:
        client.infer("ConvTransposed", sent)
    assert caught.value.status() == "404"
    with pytest.raises(InferenceServerException, match="deadline") as caught:
        client.infer(SMALL.op, sent, parameters=SMALL.attributes(), timeout=1)
    assert caught.value.status() == "504"
    client.infer(SMALL.op, sent, parameters=SMALL.attributes(), timeout=30_000_000, priority=1, sequence_id=7)


def test_load_and_unload(client: Any) -> None:
    """The operations are loaded from the start and can't be unloaded."""
    client.load_model("ConvTranspose")
    with pytest.raises(InferenceServerException, match="there is no operation resnet: the operations are"):
        client.load_model("resnet")
    with pytest.raises(InferenceServerException, match=r"there is no operation x{64}\.\.: the operations are"):
        client.get_model_metadata("x" * 300)
    with pytest.raises(InferenceServerException, match="ConvTranspose has no version 2: the only one is 1"):
        client.get_model_metadata("ConvTranspose", "2")
    with pytest.raises(InferenceServerException, match="built in"):
        client.unload_model("ConvTranspose")
    with pytest.raises(InferenceServerException, match="built in"):
        client.load_model("ConvTranspose", config="{}")


def test_a_large_call(client: Any) -> None:
    """Megabytes arrive intact both ways, as binary data and as JSON numbers."""
    for size, binary in ((128, True), (64, False)):
        case = doubled(size, 16, 16, n=2)
        inputs = case.inputs()
        assert same_bits(oip.infer(client, case, inputs, binary=binary), case.expected(inputs))


def test_a_client_may_have_the_reply_in_frames(http: httpx.Client) -> None:
    """If Accept names its media type, the reply is the tensor stream of `/v1`, with the same bits."""
    inputs = SMALL.inputs()
    content, headers = oip.body(oip.head(SMALL, inputs), inputs)
    response = oip.post(http, SMALL.op, content, headers | {"accept": calls.FRAMES})
    assert response.headers["content-type"] == calls.FRAMES
    assert same_bits(calls.read(response), SMALL.expected(inputs))
    refused = oip.post(http, SMALL.op, content, headers | {"accept": f"{calls.FRAMES};q=0, application/json;q=0"})
    oip.error(refused, 406)


def test_a_client_may_have_problem_objects(http: httpx.Client) -> None:
    """If Accept names its media type, an error is the problem object of `/v1`, which names the attribute."""
    inputs = SMALL.inputs()
    described = oip.head(SMALL, inputs)
    described["parameters"]["strides"] = [0, 1]
    content, headers = oip.body(described, inputs)
    response = oip.post(http, SMALL.op, content, headers | {"accept": "application/problem+json"})
    assert (response.status_code, response.headers["content-type"]) == (422, "application/problem+json")
    assert response.json()["errors"][0]["loc"] == ["attributes", "strides", 0]
    assert oip.error(oip.post(http, SMALL.op, content, headers), 400)
