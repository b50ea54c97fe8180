"""Requests that are rejected while their bodies are still arriving, on every API: the client sends no more."""

from __future__ import annotations

import json
from typing import Any

import pytest

from app.intake.requests import check_begun
from app.intake.strict_json import partial_document
from schemas.tables import find_operation
from tests.app.bare import connected, replies
from tests.app.samples import SMALL
from tests.live import LiveService

REST, RPC = f"/v1/ops/{SMALL.op}", "/rpc"
SRC = {"dtype": "f32", "shape": list(SMALL.inputs()["src"].shape)}
HUGE = {"dtype": "f32", "shape": [1 << 20, 1 << 20, 8]}


def begun(path: str, tensor: dict[str, Any], **attributes: Any) -> tuple[bytes, str]:
    """Return the beginning of a call's body, up to the data of its first tensor, and its content type."""
    call: dict[str, Any] = {"attributes": SMALL.attributes() | attributes, "inputs": {"src": tensor | {"data": "@"}}}
    if path == RPC:
        call = {"jsonrpc": "2.0", "id": "a", "method": SMALL.op, "params": call}
    text = json.dumps(call).partition('"@"')[0].encode() + b'"' + b"A" * 1000
    return text, "application/json"


def ask(service: LiveService, path: str, body: bytes, content_type: str) -> tuple[int, Any]:
    """Send the head of a request with a long body, and the beginning of that; return the reply."""
    fields = f"host: localhost\r\ncontent-type: {content_type}\r\ncontent-length: 100000000"
    head = f"POST {path} HTTP/1.1\r\n{fields}\r\n\r\n"
    with connected(service.url) as sock:
        sock.sendall(head.encode() + body)
        ((status, reply),) = replies(sock, 1)
    return status, json.loads(reply)


def error_of(path: str, reply: Any) -> tuple[str, Any]:
    """Return the code of an error and the place of its first fault."""
    data = reply["error"]["data"] if path == RPC else reply
    return data["code"], data["errors"][0]["loc"] if "errors" in data else data["loc"]


@pytest.mark.parametrize("path", [REST, f"{REST}/verify", f"{REST}/validate", RPC])
def test_wrong_attributes(service: LiveService, path: str) -> None:
    """An attribute that breaks a rule by itself is an error before a tensor has arrived."""
    status, reply = ask(service, path, *begun(path, SRC, strides=[0, 0]))
    assert status == (200 if path == RPC else 422)
    assert error_of(path, reply) == ("invalid_params", ["attributes", "strides", 0])
    assert path != RPC or reply["id"] == "a"


@pytest.mark.parametrize("path", [REST, f"{REST}/verify", RPC])
def test_attributes_that_are_not_complete(service: LiveService, path: str) -> None:
    """So is one in an object that is still arriving."""
    text, content_type = begun(path, SRC, strides=[0, 0])
    status, reply = ask(service, path, text.partition(b'"pads_begin"')[0], content_type)
    assert status == (200 if path == RPC else 422)
    assert error_of(path, reply) == ("invalid_params", ["attributes", "strides", 0])


@pytest.mark.parametrize("path", [REST, f"{REST}/verify", RPC])
def test_a_tensor_of_terabytes(service: LiveService, path: str) -> None:
    """A tensor that does not fit the memory is an error once its shape has arrived."""
    status, reply = ask(service, path, *begun(path, HUGE))
    assert status == (200 if path == RPC else 413)
    assert error_of(path, reply) == ("too_large", ["inputs", "src"])


@pytest.mark.parametrize("path", [REST, RPC])
def test_a_tensor_that_the_body_can_not_contain(service: LiveService, path: str) -> None:
    """A tensor that is longer than the rest of the body is an error before it ends."""
    status, reply = ask(service, path, *begun(path, {"dtype": "f32", "shape": [50_000_000]}))
    assert status == (200 if path == RPC else 422)
    assert error_of(path, reply) == ("invalid_params", ["inputs", "src", "data"])


def test_params_by_position(service: LiveService) -> None:
    """They are checked like those by name."""
    call = {"jsonrpc": "2.0", "method": SMALL.op, "params": [SMALL.attributes() | {"strides": [0, 0]}, {"src": "@"}]}
    text = json.dumps(call).partition('"@"')[0].encode()
    _, reply = ask(service, RPC, text, "application/json")
    assert error_of(RPC, reply) == ("invalid_params", ["attributes", "strides", 0])
    assert reply["id"] is None  # which may come later


@pytest.mark.parametrize("method", ["ops.verify", "ops.validate"])
def test_the_operation_is_a_param(service: LiveService, method: str) -> None:
    """Methods that take the operation as a param check its attributes too."""
    params = {"op": SMALL.op, "attributes": SMALL.attributes() | {"strides": [0, 0]}, "inputs": {"src": "@"}}
    call = {"jsonrpc": "2.0", "id": 7, "method": method, "params": params}
    _, reply = ask(service, RPC, json.dumps(call).partition('"@"')[0].encode(), "application/json")
    assert error_of(RPC, reply) == ("invalid_params", ["attributes", "strides", 0])
    assert reply["id"] == 7


def test_a_multipart_request(service: LiveService) -> None:
    """The attributes are checked once the part with the request is complete."""
    request = json.dumps({"attributes": SMALL.attributes() | {"strides": [0, 0]}})
    disposition = 'Content-Disposition: form-data; name="{}"\r\n\r\n'
    text = f"--x\r\n{disposition.format('request')}{request}\r\n--x\r\n{disposition.format('src')}"
    status, reply = ask(service, REST, text.encode(), "multipart/form-data; boundary=x")
    assert (status, *error_of(REST, reply)) == (422, "invalid_params", ["attributes", "strides", 0])


@pytest.mark.parametrize("path", [REST, RPC])
def test_a_valid_beginning_is_no_error(path: str) -> None:
    """Wherever a valid call is cut, nothing is wrong with it yet."""
    text, _ = begun(path, SRC)
    called = find_operation(SMALL.op)
    for cut in range(len(text)):
        found = partial_document(text[:cut])
        found = found.get("params", {}) if path == RPC and found else found
        check_begun(called, found or {}, 1 << 30)
