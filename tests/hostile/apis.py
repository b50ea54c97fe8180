"""One call, right or wrong, through every API that takes it, with comparable answers."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx
import numpy as np

from app.replies.errors import MAPPING
from tests.app.samples import JSON, NPY
from tests.problems import Case

__all__ = ["APIS", "SECRET", "TINY", "WrongCall", "ask"]

TINY = Case(
    op="ConvTransposeBackwardWeights",
    n=1,
    src_channels=1,
    dst_channels=1,
    src_spatial=(4,),
    dst_spatial=(6,),
    kernel=(3,),
)

SECRET = "5eCr3tPayload"
"""A text in the caller's data that no answer may repeat."""

_STATUS = {cls.code: reply.status for cls, reply in MAPPING.items()}
_RPC_CODE = {cls.code: reply.rpc_code for cls, reply in MAPPING.items()}
_OIP = {"f32": "FP32", "f16": "FP16", "s32": "INT32"}


@dataclass(frozen=True)
class WrongCall:
    """A call that replaces some attributes and tensors of the right one; a tensor is its dtype, shape and bytes."""

    attributes: Mapping[str, Any] = field(default_factory=dict)
    tensors: Mapping[str, tuple[str, list[Any], bytes]] = field(default_factory=dict)

    def all_attributes(self) -> dict[str, Any]:
        """Return the attributes of the right call, with the wrong ones replaced."""
        return TINY.attributes() | dict(self.attributes)

    def all_tensors(self) -> dict[str, tuple[str, list[Any], bytes]]:
        """Return the tensors of the right call, with the wrong ones replaced."""
        right = {name: (TINY.dtype, list(array.shape), array.tobytes()) for name, array in TINY.inputs().items()}
        return right | dict(self.tensors)


def ask(http: httpx.Client, api: str, call: WrongCall) -> str:
    """Make the call; return `ok` or the slug of its error, after checking that the reply has its API's form."""
    return APIS[api](http, call)


def _request(call: WrongCall) -> dict[str, Any]:
    tensors = {
        name: {"dtype": kind, "shape": shape, "data": base64.b64encode(data).decode()}
        for name, (kind, shape, data) in call.all_tensors().items()
    }
    return {"attributes": call.all_attributes(), "inputs": tensors}


def npy_file(kind: str, shape: list[Any], data: bytes) -> bytes:
    """Return a .npy file with any shape and any bytes."""
    text = f"{{'descr': '{np.dtype(kind.replace('s', 'i')[0] + str(int(kind[1:]) // 8)).str}', "
    text += f"'fortran_order': False, 'shape': {tuple(shape)!r}, }}\n"
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text.encode() + data


def _problem(answer: httpx.Response) -> str:
    assert SECRET not in answer.text
    if answer.status_code == 200:
        return "ok"
    found = answer.json()
    assert answer.headers["content-type"] == "application/problem+json", answer.text
    assert answer.status_code == found["status"] == _STATUS[found["code"]] < 500, answer.text
    return str(found["code"])


def _json(http: httpx.Client, call: WrongCall) -> str:
    return _problem(http.post(f"/v1/ops/{TINY.op}", content=json.dumps(_request(call)), headers={"content-type": JSON}))


def _validate(http: httpx.Client, call: WrongCall) -> str:
    page = f"/v1/ops/{TINY.op}/validate"
    return _problem(http.post(page, content=json.dumps(_request(call)), headers={"content-type": JSON}))


def _parts(http: httpx.Client, call: WrongCall) -> str:
    request = json.dumps({"attributes": call.all_attributes()}).encode()
    files = [("request", ("r", request, JSON))]
    files += [(name, (name, npy_file(*tensor), NPY)) for name, tensor in call.all_tensors().items()]
    return _problem(http.post(f"/v1/ops/{TINY.op}", files=files))


def _rpc(http: httpx.Client, call: WrongCall) -> str:
    message = {"jsonrpc": "2.0", "method": TINY.op, "params": _request(call), "id": 7}
    answer = http.post("/rpc", content=json.dumps(message))
    found = answer.json()
    assert SECRET not in answer.text
    assert (answer.status_code, found["jsonrpc"], found["id"]) == (200, "2.0", 7)
    if "result" in found:
        return "ok"
    slug = found["error"]["data"]["code"]
    assert found["error"]["code"] == _RPC_CODE[slug] != -32603
    return str(slug)


def _oip(http: httpx.Client, call: WrongCall) -> str:
    inputs, body = [], b""
    for name, (kind, shape, data) in call.all_tensors().items():
        told = {"binary_data_size": len(data)}
        inputs.append({"name": name, "datatype": _OIP.get(kind, kind), "shape": shape, "parameters": told})
        body += data
    head = json.dumps({"inputs": inputs, "parameters": call.all_attributes()}).encode()
    length = {"inference-header-content-length": str(len(head))}
    answer = http.post(f"/v2/models/{TINY.op}/infer", content=head + body, headers=length)
    assert SECRET not in answer.text
    if answer.status_code == 200:
        return "ok"
    assert list(answer.json()) == ["error"]
    # The protocol has one status for all invalid requests, and no slugs.
    return {400: "refused", 413: "too_large"}[answer.status_code]


APIS: dict[str, Callable[[httpx.Client, WrongCall], str]] = {
    "json": _json,
    "parts": _parts,
    "rpc": _rpc,
    "oip": _oip,
}
