"""Every API as clients use it: a call is prepared once and sent many times, and its result read back."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx

from tests.app import oip
from tests.app.bare import written
from tests.app.samples import FRAMES, JSON, NPY, SSE, Array, document, parts, read, read_events, read_tensor
from tests.problems import Case

__all__ = ["APIS", "Prepared", "prepare"]


@dataclass(frozen=True)
class Prepared:
    """One call for one API: what is sent, how the reply is read, and the expected result."""

    api: str
    path: str
    content: bytes
    headers: dict[str, str]
    read: Callable[[httpx.Response], Array]
    expected: Array = field(repr=False)

    def head(self) -> bytes:
        """Return the request's head for a raw socket."""
        made = httpx.Request("POST", f"http://localhost{self.path}", content=self.content, headers=self.headers)
        return written(made)[0]

    async def send(self, client: httpx.AsyncClient) -> httpx.Response:
        """Send it and return the complete response."""
        return await client.post(self.path, content=self.content, headers=self.headers)


Content = tuple[str, bytes, dict[str, str]]
Build = Callable[[Case, Mapping[str, Array], dict[str, Any]], Content]


def _rest_json(case: Case, inputs: Mapping[str, Array], options: dict[str, Any]) -> Content:
    text = json.dumps(document(case, dict(inputs), **options)).encode()
    return f"/v1/ops/{case.op}", text, {"content-type": JSON, "accept": JSON}


def _multipart(accept: str) -> Build:
    def build(case: Case, inputs: Mapping[str, Array], options: dict[str, Any]) -> Content:
        request = httpx.Request("POST", "http://localhost/", files=parts(case, dict(inputs), **options))
        headers = {"content-type": request.headers["content-type"], "accept": accept}
        return f"/v1/ops/{case.op}", request.read(), headers

    return build


def _rpc(accept: str) -> Build:
    def build(case: Case, inputs: Mapping[str, Array], options: dict[str, Any]) -> Content:
        params = document(case, dict(inputs), **options)
        text = json.dumps({"jsonrpc": "2.0", "id": 1, "method": case.op, "params": params}).encode()
        return "/rpc", text, {"content-type": JSON, "accept": accept}

    return build


def _oip(case: Case, inputs: Mapping[str, Array], options: dict[str, Any]) -> Content:
    given = dict(inputs)
    head = oip.head(case, given)
    head["parameters"] |= options
    outputs = [{"name": case.output_name, "parameters": {"binary_data": True}}]
    content, headers = oip.body(head | {"outputs": outputs}, given)
    return f"/v2/models/{case.op}/infer", content, headers


def _read_rpc(response: httpx.Response) -> Array:
    assert response.status_code == 200, response.text
    reply = response.json()
    assert "result" in reply, reply
    (tensor,) = reply["result"]["outputs"].values()
    return read_tensor(tensor)


def _read_stream(response: httpx.Response) -> Array:
    assert response.status_code == 200, response.text
    assert '"error":' not in response.text[-2000:], response.text[-2000:]
    return read_events(response)


APIS: dict[str, Build] = {
    "rest json": _rest_json, "rest npy": _multipart(NPY), "rest events": _multipart(SSE),
    "rest frames": _multipart(FRAMES), "rpc json": _rpc(JSON), "rpc events": _rpc(SSE), "oip binary": _oip,
}  # fmt: skip
"""The APIs and the forms of their replies, with the function that prepares a call for each."""


def prepare(api: str, case: Case, inputs: Mapping[str, Array], expected: Array, **options: Any) -> Prepared:
    """Return a call prepared for an API."""
    readers: dict[str, Callable[[httpx.Response], Array]] = {
        "rpc json": _read_rpc,
        "rpc events": _read_stream,
        "oip binary": lambda response: oip.read(response, case.dtype),
    }
    path, content, headers = APIS[api](case, inputs, options)
    return Prepared(api, path, content, headers, readers.get(api, read), expected)
