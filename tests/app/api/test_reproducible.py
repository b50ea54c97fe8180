"""`options.reproducible` on every API: the same bits on every kind of processor, which are the reference kernel's."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import tritonclient.http as triton

import convgrad
from convgrad._cli import main
from kernels.registry import compute
from tests.app import oip
from tests.app.samples import FRAMES, JSON, NPY, SMALL, SSE, document, post, read, read_tensor, same_bits
from tests.kernels.harness import problem_of, stored
from tests.live import LiveService
from tests.naive import DTYPES
from tests.problems import Case

CASE = replace(SMALL, n=8)
INPUTS = CASE.floats()
URL = f"/v1/ops/{CASE.op}"


def _right(case: Case, inputs: dict[str, Any], *, reference: bool = True) -> Any:
    problem = problem_of(case)
    found: Any = compute(problem, *map(stored, inputs.values()), reference=reference)
    return found.view(DTYPES[case.dtype])


RIGHT = _right(CASE, INPUTS)


def test_it_makes_a_difference() -> None:
    """Without the option this call has other bits; otherwise the tests below would assert nothing."""
    assert not same_bits(_right(CASE, INPUTS, reference=False), RIGHT)


@pytest.mark.parametrize("accept", [JSON, NPY, SSE, FRAMES])
def test_rest(http: httpx.Client, accept: str) -> None:
    """Every form of a reply has the reference kernel's bits."""
    assert same_bits(read(post(http, CASE, INPUTS, accept, reproducible=True)), RIGHT)


def test_json_and_rpc(http: httpx.Client) -> None:
    """So do JSON calls and JSON-RPC, and the statistics name the kernel."""
    body = document(CASE, INPUTS, reproducible=True)
    reply = http.post(URL, json=body)
    assert same_bits(read(reply), RIGHT)
    assert reply.json()["stats"]["kernel"] == "reference_f64"
    answer = http.post("/rpc", json={"jsonrpc": "2.0", "id": 1, "method": CASE.op, "params": body}).json()
    assert same_bits(read_tensor(answer["result"]["outputs"][CASE.output_name]), RIGHT)


def test_open_inference_protocol(service: LiveService, http: httpx.Client) -> None:
    """It is a parameter of tritonclient's calls, which the model's configuration lists."""
    with triton.InferenceServerClient(service.url.removeprefix("http://")) as client:
        asked = {**CASE.attributes(), "reproducible": True}
        result = client.infer(CASE.op, oip.triton_inputs(CASE, INPUTS), parameters=asked)
        assert same_bits(result.as_numpy(CASE.output_name), RIGHT)
    assert "reproducible" in http.get(f"/v2/models/{CASE.op}/config").json()["parameters"]


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_client(service: LiveService, dtype: str) -> None:
    """It is an argument of the client's methods, in every dtype: with it f64 needs no other option."""
    case = replace(CASE, dtype=dtype)
    inputs = case.floats()
    right = _right(case, inputs)
    with convgrad.Client(service.url) as client:
        assert same_bits(client.run(case.op, inputs, case.attributes(), reproducible=True), right)
        detailed = client.run_detailed(case.op, inputs, case.attributes(), reproducible=True)
        assert same_bits(detailed.outputs[case.output_name], right)
        with client.stream(case.op, inputs, case.attributes(), reproducible=True) as stream:
            assert same_bits(stream.result(), right)
        method: Any = client.conv_transpose_backward_weights
        assert same_bits(method(**inputs, **case.attributes(), reproducible=True), right)


def test_validating(service: LiveService) -> None:
    """`ops.validate` says whether a call is reproducible on every kind of processor."""
    with convgrad.Client(service.url) as client:
        call = CASE.op, INPUTS, CASE.attributes()
        plans = (
            client.validate(*call),
            client.validate(*call, reproducible=True),
            client.validate(*call, reference=True),
        )
    assert [told["plan"]["reproducible"] for told in plans] == [False, True, True]


def test_the_command(service: LiveService, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`convgrad run --reproducible` writes the same bits."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CONVGRAD_URL", service.url)
    call = ["run", CASE.op, "--src", "src.npy", "--diff-dst", "diff_dst.npy", "-o", "dw.npy", "--reproducible"]
    for name, array in INPUTS.items():
        np.save(f"{name}.npy", array)
    for name, value in CASE.attributes().items():
        call += ["--attr", f"{name}={','.join(map(str, value)) if isinstance(value, list) else value}"]
    assert main(call) == 0
    assert same_bits(np.load("dw.npy"), RIGHT)


@pytest.mark.parametrize(
    ("path", "options", "loc"),
    [
        (URL, {"reproducible": "yes"}, ["options", "reproducible"]),
        (URL, {"reproducible": True, "algorithm": "winograd"}, ["options", "algorithm"]),
        (f"{URL}/verify", {"reproducible": True}, ["options", "reproducible"]),
    ],
)
def test_refusals(http: httpx.Client, path: str, options: dict[str, Any], loc: list[str]) -> None:
    """It is true or false, excludes Winograd's algorithm, and has no effect on a verification."""
    reply = http.post(path, json=document(CASE, INPUTS, **options))
    assert reply.status_code == 422
    assert [error["loc"] for error in reply.json()["errors"]] == [loc]
