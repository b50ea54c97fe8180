"""f64 in, f64 out, on every API: with `options.reference` and in verifications, and nowhere else."""

from __future__ import annotations

import base64
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import tritonclient.http as triton

import convgrad
from convgrad._cli import main
from tests.app import oip
from tests.app.samples import FRAMES, JSON, NPY, SMALL, SSE, document, parts, post, read, read_tensor, same_bits
from tests.live import LiveService
from tests.problems import OPS, Case, random_case


def _cases() -> dict[str, Case]:
    """Return a case of each operation, whose result f32 could not hold."""
    rng, found = np.random.default_rng(64), dict[str, Case]()
    while len(found) < len(OPS):
        case = replace(random_case(rng), dtype="f64")
        right = case.expected(case.inputs())
        if (right.astype(np.float32) != right).any():
            found[case.op] = case
    return found


CASES = _cases()
WIDE = replace(SMALL, dtype="f64")
URL = f"/v1/ops/{SMALL.op}"


@pytest.mark.parametrize("op", OPS)
def test_the_client(service: LiveService, op: str) -> None:
    """Every operation returns the oracle's bits of integers that f32 could not hold, and verifies them."""
    case = CASES[op]
    inputs = case.inputs()
    right = case.expected(inputs)
    with convgrad.Client(service.url) as client:
        assert same_bits(client.run(op, inputs, case.attributes(), reference=True), right)
        with client.stream(op, inputs, case.attributes(), reference=True) as stream:
            assert same_bits(stream.result(), right)
        report = client.verify(op, inputs, right, case.attributes())
        assert (report.passed, report.equal, report.data["dtype"]) == (True, True, "f64")
        right.reshape(-1)[0] = np.nextafter(right.reshape(-1)[0], np.inf)
        assert not client.verify(op, inputs, right, case.attributes()).equal


@pytest.mark.parametrize("accept", [JSON, NPY, SSE, FRAMES])
@pytest.mark.parametrize("op", OPS)
def test_rest(http: httpx.Client, op: str, accept: str) -> None:
    """Every form of a reply has the oracle's bits."""
    case = CASES[op]
    inputs = case.inputs()
    assert same_bits(read(post(http, case, inputs, accept, reference=True)), case.expected(inputs))


@pytest.mark.parametrize("as_npy", [False, True])
@pytest.mark.parametrize("op", OPS)
def test_json_and_rpc(http: httpx.Client, op: str, as_npy: bool) -> None:
    """So do JSON calls and JSON-RPC, with raw elements and with .npy files."""
    case = CASES[op]
    inputs = case.inputs()
    body = document(case, inputs, as_npy=as_npy, encoding="npy" if as_npy else "base64", reference=True)
    assert same_bits(read(http.post(f"/v1/ops/{op}", json=body)), case.expected(inputs))
    answer = http.post("/rpc", json={"jsonrpc": "2.0", "id": 1, "method": op, "params": body}).json()
    assert same_bits(read_tensor(answer["result"]["outputs"][case.output_name]), case.expected(inputs))


@pytest.mark.parametrize("binary", [True, False])
@pytest.mark.parametrize("op", OPS)
def test_open_inference_protocol(service: LiveService, op: str, binary: bool) -> None:
    """FP64 is a datatype of tritonclient's calls with the parameter `reference`, as bytes and as numbers."""
    case = CASES[op]
    inputs = case.inputs()
    with triton.InferenceServerClient(service.url.removeprefix("http://")) as client:
        outputs = [triton.InferRequestedOutput(case.output_name, binary_data=binary)]
        sent = oip.triton_inputs(case, inputs, binary=binary)
        result = client.infer(op, sent, outputs=outputs, parameters={**case.attributes(), "reference": True})
        assert result.get_output(case.output_name)["datatype"] == "FP64"
        assert same_bits(result.as_numpy(case.output_name), case.expected(inputs))


def test_several_outputs(service: LiveService) -> None:
    """All gradients of one call are f64."""
    inputs = WIDE.inputs()
    inputs["weights"] = np.ones(WIDE.weights_shape)
    names = ["diff_weights", "diff_bias", "diff_src"]
    with convgrad.Client(service.url) as client:
        found = client.run_detailed(WIDE.op, inputs, WIDE.attributes(), outputs=names, reference=True).outputs
    assert {name: array.dtype.name for name, array in found.items()} == dict.fromkeys(names, "float64")
    assert same_bits(found["diff_weights"], WIDE.expected(WIDE.inputs()))


def test_the_command(service: LiveService, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """`convgrad run --reference` reads and writes .npy files of float64; without it, the error says what to do."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CONVGRAD_URL", service.url)
    inputs = WIDE.inputs()
    for name, array in inputs.items():
        np.save(f"{name}.npy", array)
    call = ["run", WIDE.op, "--src", "src.npy", "--diff-dst", "diff_dst.npy", "-o", "dw.npy"]
    for name, value in WIDE.attributes().items():
        call += ["--attr", f"{name}={','.join(map(str, value)) if isinstance(value, list) else value}"]
    assert main(call) != 0
    assert "reference" in capsys.readouterr().err
    assert main([*call, "--reference"]) == 0
    assert same_bits(np.load("dw.npy"), WIDE.expected(inputs))


def _refusals(http: httpx.Client) -> dict[str, tuple[int, str]]:
    """Return the status and text of the answer to a f64 call without the option, by API."""
    inputs = WIDE.inputs()
    described = {name: {"dtype": "f64", "shape": list(array.shape)} for name, array in inputs.items()}
    validate = {"attributes": WIDE.attributes(), "inputs": described}
    rpc = {"jsonrpc": "2.0", "id": 1, "method": WIDE.op, "params": document(WIDE, inputs)}
    replies = {
        "parts": http.post(URL, files=parts(WIDE, inputs)),
        "json": http.post(URL, json=document(WIDE, inputs)),
        "validate": http.post(f"{URL}/validate", json=validate),
        "rpc": http.post("/rpc", json=rpc),
        "binary": oip.post_binary(http, WIDE, inputs),
        "numbers": oip.post_json(http, WIDE, inputs),
    }
    return {api: (reply.status_code, reply.text) for api, reply in replies.items()}


def test_other_calls_are_refused(http: httpx.Client) -> None:
    """Without the option f64 is unsupported on every API, and the error says what to do."""
    found = _refusals(http)
    statuses = {"parts": 422, "json": 422, "validate": 422, "rpc": 200, "binary": 400, "numbers": 400}
    assert {api: status for api, (status, _) in found.items()} == statuses
    remedy = "src is f64, which only the reference kernel computes, slowly: send f32, or set options.reference"
    assert all(remedy in text for _, text in found.values())
    assert '"code":-32004' in found["rpc"][1]
    assert '["inputs","diff_dst","dtype"]' in found["parts"][1]


def test_validating_with_the_option(service: LiveService) -> None:
    """`validate` plans the reference kernel for f64."""
    with convgrad.Client(service.url) as client:
        told = client.validate(WIDE.op, WIDE.inputs(), WIDE.attributes(), reference=True)
        assert told["plan"]["kernel"] == "reference_f64"
        assert told["outputs"]["diff_weights"]["dtype"] == "f64"
        assert client.describe(WIDE.op)["reference_dtypes"] == ["f64"]


def test_mixed_dtypes(http: httpx.Client) -> None:
    """f64 beside f32 is an error like other mixtures, also for the result to verify."""
    inputs = SMALL.inputs()
    mixed = {**inputs, "diff_dst": inputs["diff_dst"].astype(np.float64)}
    reply = http.post(URL, files=parts(replace(SMALL, dtype="f64"), mixed))
    assert reply.status_code == 422
    body = document(SMALL, inputs)
    wrong = base64.b64encode(np.zeros(SMALL.weights_shape).tobytes()).decode()
    body["inputs"]["diff_weights"] = {"dtype": "f64", "shape": list(SMALL.weights_shape), "data": wrong}
    reply = http.post(f"{URL}/verify", json=body)
    assert reply.status_code == 422
    assert "diff_weights must be f32 like the inputs, but is f64: to verify a result of f64, convert" in reply.text
