"""The memory cost of one large call: its tensors once plus a constant, through every API."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import numpy as np
import pytest

from benchmarks.service_servers import PeakMemory
from benchmarks.startup import held_mib
from tests.app import oip
from tests.app.samples import FRAMES, NPY, npy, request_object
from tests.live import running_service
from tests.problems import Case

MIB = 2**20
BOUND_MIB = 64
CASE = Case(
    name="memory", n=16, src_channels=64, dst_channels=64, src_spatial=(56, 56), dst_spatial=(56, 56), kernel=(3, 3),
    pads_begin=(1, 1), pads_end=(1, 1),
)  # fmt: skip
INPUTS = {
    name: np.random.default_rng(3).standard_normal(shape, np.float32) for name, shape in CASE.input_shapes.items()
}
TENSORS_MIB = (sum(array.nbytes for array in INPUTS.values()) + 4 * 64 * 64 * 9) / MIB


@dataclass
class Watched:
    """A service in its own processes, and the memory it used before the first large call."""

    url: str
    pid: int
    idle_mib: float


@pytest.fixture(scope="module")
def watched() -> Iterator[Watched]:
    """A service with two workers that have answered some small calls."""
    small = np.ones((4, 16, 56, 56), np.float32)  # large enough for workers
    request = {
        "attributes": CASE.attributes() | {"weights_shape": [16, 16, 3, 3]},
        "inputs": {
            name: {"dtype": "f32", "shape": list(small.shape), "data": base64.b64encode(small.tobytes()).decode()}
            for name in INPUTS
        },
    }
    with running_service("--workers", "2") as service:
        with httpx.Client(base_url=service.url, timeout=60.0) as http:
            for _ in range(20):
                assert http.post(f"/v1/ops/{CASE.op}", json=request).status_code == 200
        yield Watched(service.url, service.pid, held_mib(service.pid))


def binary() -> dict[str, Any]:
    """Return the `/v2` request."""
    wanted = [{"name": "diff_weights", "parameters": {"binary_data": True}}]
    body, headers = oip.body(oip.head(CASE, INPUTS, outputs=wanted), INPUTS)
    return {"url": f"/v2/models/{CASE.op}/infer", "content": body, "headers": headers}


def multipart() -> dict[str, Any]:
    """Return the multipart request."""
    files = [(name, (f"{name}.npy", npy(array), NPY)) for name, array in INPUTS.items()]
    request = json.dumps(request_object(CASE)).encode()
    form = [("request", ("request.json", request, "application/json")), *files]
    return {"url": f"/v1/ops/{CASE.op}", "files": form, "headers": {"accept": FRAMES}}


def document() -> dict[str, Any]:
    """Return the request object with base64 in it."""
    inputs = {
        name: {"dtype": "f32", "shape": list(array.shape), "data": base64.b64encode(array.tobytes()).decode()}
        for name, array in INPUTS.items()
    }
    return {"attributes": CASE.attributes(), "inputs": inputs}


APIS: dict[str, Callable[[], dict[str, Any]]] = {
    "/v2 binary": binary,
    "multipart": multipart,
    "/v1 JSON": lambda: {"url": f"/v1/ops/{CASE.op}", "json": document()},
    "/rpc": lambda: {"url": "/rpc", "json": {"jsonrpc": "2.0", "id": 1, "method": CASE.op, "params": document()}},
}


@pytest.mark.parametrize("api", APIS)
def test_a_large_call_costs_its_tensors_once(watched: Watched, api: str) -> None:
    """All processes together never use more than at rest plus the call's tensors once plus 64 MiB.

    Beside those of JSON there may be its text, and the strings of that.
    """
    request = APIS[api]()
    with httpx.Client(base_url=watched.url, timeout=60.0) as http:
        prepared = http.build_request("POST", **request)
        prepared.read()
        with PeakMemory(lambda: held_mib(watched.pid), every_s=0.005) as watch:
            for _ in range(3):
                response = http.send(prepared)
                assert response.status_code == 200, response.text[:500]
                assert api != "/rpc" or "result" in response.json()
    over = watch.peak - watched.idle_mib
    print(f"{api}: {over:.1f} MiB over idle, tensors {TENSORS_MIB:.1f} MiB")
    text = 2 * len(prepared.content) / MIB if "json" in request else 0.0
    assert TENSORS_MIB / 2 < over < TENSORS_MIB + text + BOUND_MIB
