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
from tests.app.samples import JSON
from tests.problems import Case

__all__ = ["APIS", "EXPECTED", "INPUTS", "RAW", "SECRET", "TINY", "VALID", "Answer", "Content", "Row", "ask", "in_json"]
__all__ += ["node", "npy_file"]

TINY = Case(
    op="ConvTransposeBackwardWeights", n=1, src_channels=1, dst_channels=1, src_spatial=(4,), dst_spatial=(6,),
    kernel=(3,),
)  # fmt: skip
INPUTS = TINY.inputs()
EXPECTED = TINY.expected(INPUTS)

SECRET = "5eCr3tPayload"
"""A text in the caller's data that no answer may repeat."""

Answer = tuple[int, str | None, list[str | int] | None]
"""Status, code and `errors[0].loc` of a reply; a valid call has neither code nor loc."""

Content = tuple[bytes, dict[str, str]]
"""A body and its headers."""

APIS = ("json", "validate", "verify", "tolerance", "parts", "rpc", "batch", "oip", "graph", "job", "submit")
_TEXT = ("json", "validate", "verify", "tolerance", "rpc", "batch", "graph")
"""The APIs whose tensors are base64."""

_RPC_CODE = {cls.code: reply.rpc_code for cls, reply in MAPPING.items()}
_PAGES = {
    "json": f"/v1/ops/{TINY.op}", "validate": f"/v1/ops/{TINY.op}/validate", "verify": f"/v1/ops/{TINY.op}/verify",
    "tolerance": f"/v1/ops/{TINY.op}/tolerance",
    "parts": f"/v1/ops/{TINY.op}", "rpc": "/rpc", "batch": "/rpc", "oip": f"/v2/models/{TINY.op}/infer",
    "graph": "/v1/graphs", "job": f"/v1/ops/{TINY.op}", "submit": "/rpc", "upload": "/v1/tensors",
}  # fmt: skip
_LIKE = {"job": "json", "submit": "rpc"}
"""A call that may become a job is refused at once, as the call itself is."""
_RESULT, _IDS = "diff_weights", {"src": "0", "diff_dst": "1"}

RAW = "@raw@"
"""Replaced by the row's `raw`, quotes included, once the request is text."""


@dataclass(frozen=True)
class Row:
    """One bad request, and its answers.

    `answer` is that of most APIs, in the names of a single call; `others` are those of the other ones, as they are. A
    tensor that is None, or a member of one, is left out.
    """

    name: str
    answer: Answer
    attributes: Mapping[str, Any] = field(default_factory=dict)
    tensors: Mapping[str, Mapping[str, Any] | None] = field(default_factory=dict)
    members: Mapping[str, Any] = field(default_factory=dict)
    raw: bytes = b""
    send: Callable[[bytes, dict[str, str]], Content] | None = None
    apis: tuple[str, ...] = APIS
    others: Mapping[str, Answer] = field(default_factory=dict)

    def expected(self, api: str) -> Answer:
        """Return the answer of an API: a graph has other locs, JSON-RPC one status, binary tensors no members."""
        status, code, loc = self.others.get(api, self.others.get(_LIKE.get(api, ""), self.answer))
        if api == "job" and status == 200:
            status = 202
        if loc and api not in self.others:
            if api == "graph" and loc[0] == "attributes":
                loc = ["graph", 0, *loc]
            elif api == "graph" and loc[0] == "inputs":
                loc = ["inputs", *(_IDS.get(str(name), name) for name in loc[1:2]), *loc[2:]]
            elif api in ("parts", "oip") and loc[0] == "inputs":
                loc = loc[:2]
            elif api == "upload" and loc[0] == "inputs":
                loc = ["inputs", "tensor", *loc[2:]]
        return (200 if _PAGES[api] == "/rpc" and status != 415 else status), code, loc


def ask(http: httpx.Client, api: str, row: Row) -> Answer:
    """Send the request to an API; return its answer, after checking that the reply has its API's form and is short."""
    body, headers = _WRITERS.get(api, _json)(row, api)
    if row.send is not None:
        body, headers = row.send(body, headers)
    reply = http.post(_PAGES[api], content=body, headers=headers)
    assert len(reply.content) < 50_000
    assert SECRET not in reply.text
    return _rpc_answer(reply) if _PAGES[api] == "/rpc" else _answer(reply)


def _answer(reply: httpx.Response) -> Answer:
    if reply.status_code in (200, 202):
        return reply.status_code, None, None
    assert reply.headers["content-type"] == "application/problem+json", reply.text
    return reply.status_code, *_fault(reply.json(), reply.json()["detail"])


def _rpc_answer(reply: httpx.Response) -> Answer:
    answer = reply.json() if reply.headers["content-type"] == JSON else {}
    if isinstance(answer, list) and len(answer) == 3:
        first, answer, last = answer
        assert "result" in first
        assert "result" in last
    if "error" not in answer:
        return _answer(reply)
    error = answer["error"]
    assert error["code"] == _RPC_CODE[error["data"]["code"]]
    return reply.status_code, *_fault(error["data"], error["message"])


def _fault(data: Mapping[str, Any], message: str) -> tuple[str, list[str | int] | None]:
    errors = data.get("errors", [])
    assert len(errors) <= 64
    if data.get("omitted"):
        assert f"{len(errors) + data['omitted'] - 1:,} more broken rules, 63 of which are listed" in message
    return data["code"], errors[0]["loc"] if errors else data.get("loc")


def npy_file(kind: str, shape: list[Any], data: bytes) -> bytes:
    """Return a .npy file with any shape and any bytes."""
    text = f"{{'descr': '{np.dtype(kind.replace('s', 'i')[0] + str(int(kind[1:]) // 8)).str}', "
    text += f"'fortran_order': False, 'shape': {tuple(shape)!r}, }}\n"
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text.encode() + data


def _tensors(row: Row, api: str) -> dict[str, dict[str, Any]]:
    arrays = INPUTS | ({_RESULT: EXPECTED} if api == "verify" else {})
    right = {
        name: {"dtype": "f32", "shape": list(array.shape), "data": array.tobytes()} for name, array in arrays.items()
    }
    changed = {name: tensor for name in right | dict(row.tensors) if (tensor := row.tensors.get(name, {})) is not None}
    made = {name: right.get(name, {}) | dict(tensor) for name, tensor in changed.items()}
    return {name: {key: value for key, value in tensor.items() if value is not None} for name, tensor in made.items()}


def in_json(tensor: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tensor with its bytes as base64."""
    encoded = {name: base64.b64encode(value).decode() for name, value in tensor.items() if isinstance(value, bytes)}
    return dict(tensor) | encoded


def _request(row: Row, api: str) -> dict[str, Any]:
    tensors = {name: in_json(tensor) for name, tensor in _tensors(row, api).items()}
    return {"attributes": TINY.attributes() | dict(row.attributes), "inputs": tensors} | dict(row.members)


def _dump(row: Row, value: Any) -> bytes:
    return json.dumps(value).encode().replace(f'"{RAW}"'.encode(), row.raw)


def _json(row: Row, api: str) -> Content:
    preference = {"prefer": "respond-async"} if api == "job" else {}
    return _dump(row, _request(row, api)), {"content-type": JSON, **preference}


def _upload(row: Row, api: str) -> Content:
    return _dump(row, {"inputs": {"tensor": _request(row, api)["inputs"]["src"]}}), {"content-type": JSON}


def _rpc(row: Row, api: str) -> Content:
    message = {"jsonrpc": "2.0", "id": 1, "method": TINY.op, "params": _request(row, api)}
    if api == "submit":
        message |= {"method": "jobs.submit", "params": {name: message[name] for name in ("method", "params")}}
    good = message | {"params": _request(VALID, api)}
    return _dump(row, [good, message, good] if api == "batch" else message), {"content-type": JSON}


def _parts(row: Row, api: str) -> Content:
    request = {"attributes": TINY.attributes() | dict(row.attributes)} | dict(row.members)
    parts = {"request": _dump(row, request)}
    for name, tensor in _tensors(row, api).items():
        parts[name] = npy_file(tensor["dtype"], tensor["shape"], tensor["data"])
    body = b"".join(
        b'--X\r\nContent-Disposition: form-data; name="%s"\r\n\r\n%s\r\n' % (name.encode(), content)
        for name, content in parts.items()
    )
    return body + b"--X--\r\n", {"content-type": "multipart/form-data; boundary=X"}


def _oip(row: Row, api: str) -> Content:
    inputs, binary = [], b""
    for name, tensor in _tensors(row, api).items():
        entry: dict[str, Any] = {"name": name, "datatype": tensor.get("dtype", "").replace("f32", "FP32")} | tensor
        if isinstance(tensor.get("data"), bytes):
            binary += entry.pop("data")
            entry = {"parameters": {"binary_data_size": len(tensor["data"])}} | entry
        inputs.append(entry)
    document = {"inputs": inputs, "parameters": TINY.attributes() | dict(row.attributes)} | dict(row.members)
    head = _dump(row, document)
    lengths = {"inference-header-content-length": str(len(head)), "accept": "application/problem+json"}
    return head + binary, lengths


def node(number: int, row: Row, **logical: Any) -> dict[str, Any]:
    """Return the call as an op of a dumped graph; `logical` are more members of its result."""
    tensors = [{"id": 3 * number + at, "dtype": "f32", "shape": list(a.shape)} for at, a in enumerate(INPUTS.values())]
    result = {"id": 3 * number + 2, "dtype": "f32", "shape": list(EXPECTED.shape)}
    attributes = TINY.attributes() | dict(row.attributes)
    return {"id": number, "kind": TINY.op, "attrs": attributes, "inputs": tensors, "outputs": [result | logical]}


def _graph(row: Row, api: str) -> Content:
    tensors = {_IDS.get(name, name): in_json(tensor) for name, tensor in _tensors(row, api).items()}
    request = {"graph": {"graph": [node(0, row)]}, "inputs": tensors} | dict(row.members)
    return _dump(row, request), {"content-type": JSON}


_WRITERS = {"parts": _parts, "rpc": _rpc, "batch": _rpc, "oip": _oip, "graph": _graph}
_WRITERS |= {"submit": _rpc, "upload": _upload}
VALID = Row("a valid call", (200, None, None))
