"""Requests that are rejected while their bodies are still arriving, on every API: the client sends no more."""

from __future__ import annotations

import json
import socket
from typing import Any

import httpx
import numpy as np
import pytest

from app.api.oip.request import begun_request
from app.intake.requests import check_begun
from app.intake.strict_json import partial_document
from schemas.tables import CalledOperation, find_operation
from tests.app.bare import connected, replies
from tests.app.intake.support import npy
from tests.app.resident import Resident, resident_service
from tests.app.samples import JSON, NPY, SMALL
from tests.live import LiveService

REST, RPC, OIP = f"/v1/ops/{SMALL.op}", "/rpc", f"/v2/models/{SMALL.op}/infer"
SRC = {"dtype": "f32", "shape": list(SMALL.inputs()["src"].shape)}
HUGE = {"dtype": "f32", "shape": [1 << 20, 1 << 20, 8]}


def begun(path: str, tensor: dict[str, Any], **attributes: Any) -> tuple[bytes, str]:
    """Return the beginning of a call's body, up to the data of its first tensor, and its content type."""
    if path == OIP:
        described = {"name": "src", "datatype": "FP32", "shape": tensor["shape"], "data": "@"}
        parameters = SMALL.attributes() | {"weights_shape": list(SMALL.weights_shape)} | attributes
        infer = {"id": "a", "parameters": parameters, "inputs": [described]}
        return json.dumps(infer).partition('"@"')[0].encode() + b"[" + b"1," * 500, "application/json"
    call: dict[str, Any] = {"attributes": SMALL.attributes() | attributes, "inputs": {"src": tensor | {"data": "@"}}}
    if path == RPC:
        call = {"jsonrpc": "2.0", "id": "a", "method": SMALL.op, "params": call}
    text = json.dumps(call).partition('"@"')[0].encode() + b'"' + b"A" * 1000
    return text, "application/json"


def ask(
    service: LiveService | Resident,
    path: str,
    body: bytes,
    content_type: str,
    accept: str = "application/json, application/problem+json",  # the error of /v2 is then that of /v1
) -> tuple[int, Any]:
    """Send the head of a request with a long body, and the beginning of that; return the reply."""
    fields = f"host: localhost\r\ncontent-type: {content_type}\r\ncontent-length: 100000000"
    fields += f"\r\naccept: {accept}"
    head = f"POST {path} HTTP/1.1\r\n{fields}\r\n\r\n"
    with connected(service.url) as sock:
        sock.sendall(head.encode() + body)
        ((status, reply),) = replies(sock, 1)
    return status, json.loads(reply)


def error_of(path: str, reply: Any) -> tuple[str, Any]:
    """Return the code of an error and the place of its first fault."""
    data = reply["error"]["data"] if path == RPC else reply
    return data["code"], data["errors"][0]["loc"] if "errors" in data else data["loc"]


@pytest.mark.parametrize("path", [REST, f"{REST}/verify", f"{REST}/validate", RPC, OIP])
def test_wrong_attributes(service: LiveService, path: str) -> None:
    """An attribute that breaks a rule by itself is an error before a tensor has arrived."""
    status, reply = ask(service, path, *begun(path, SRC, strides=[0, 0]))
    assert status == (200 if path == RPC else 422)
    assert error_of(path, reply) == ("invalid_params", ["attributes", "strides", 0])
    assert path != RPC or reply["id"] == "a"


@pytest.mark.parametrize("path", [REST, f"{REST}/verify", RPC, OIP])
def test_attributes_that_are_not_complete(service: LiveService, path: str) -> None:
    """So is one in an object that is still arriving."""
    text, content_type = begun(path, SRC, strides=[0, 0])
    status, reply = ask(service, path, text.partition(b'"pads_begin"')[0], content_type)
    assert status == (200 if path == RPC else 422)
    assert error_of(path, reply) == ("invalid_params", ["attributes", "strides", 0])


@pytest.mark.parametrize("path", [REST, f"{REST}/verify", RPC, OIP])
def test_a_tensor_of_terabytes(service: LiveService, path: str) -> None:
    """A tensor that does not fit the memory is an error once its shape has arrived."""
    status, reply = ask(service, path, *begun(path, HUGE))
    assert status == (200 if path == RPC else 413)
    assert error_of(path, reply) == ("too_large", ["inputs", "src"])


@pytest.mark.parametrize("path", [REST, f"{REST}/verify", RPC, OIP])
def test_a_tensor_of_too_many_dimensions(service: LiveService, path: str) -> None:
    """A shape that no tensor has is an error before the data, however large it is."""
    status, reply = ask(service, path, *begun(path, {"dtype": "f32", "shape": [64] * 13}))
    assert status == (200 if path == RPC else 422)
    assert error_of(path, reply) == ("invalid_params", ["inputs", "src", "shape"])


@pytest.mark.parametrize("path", [REST, RPC])
def test_a_tensor_that_the_body_can_not_contain(service: LiveService, path: str) -> None:
    """A tensor that is longer than the rest of the body is an error before it ends."""
    status, reply = ask(service, path, *begun(path, {"dtype": "f32", "shape": [50_000_000]}))
    assert status == (200 if path == RPC else 422)
    assert error_of(path, reply) == ("invalid_params", ["inputs", "src", "data"])


@pytest.mark.parametrize("path", [REST, RPC])
def test_wrong_numbers(service: LiveService, path: str) -> None:
    """Numbers with a fault are an error before they end, in the words of a body that is complete."""
    text, content_type = begun(path, SRC)
    status, reply = ask(service, path, text.rpartition(b'"')[0] + b"[[1], 2, ", content_type)
    assert status == (200 if path == RPC else 422)
    (error,) = (reply["error"]["data"] if path == RPC else reply)["errors"]
    assert error["msg"].startswith("data of src must be flat, or nested like its shape: ")


def with_outputs(outputs: list[str], *, form: bool) -> tuple[bytes, str]:
    """Return the beginning of a body with options, up to its inputs or its first file, and its content type."""
    call = {"options": {"outputs": outputs}, "attributes": SMALL.attributes(), "inputs": {}}
    text, content_type = json.dumps(call), JSON
    if form:
        disposition = 'Content-Disposition: form-data; name="{}"\r\n\r\n'
        text = f"--x\r\n{disposition.format('request')}{text}\r\n--x\r\n{disposition.format('src')}"
        content_type = "multipart/form-data; boundary=x"
    return text.removesuffix("}}").encode(), content_type


@pytest.mark.parametrize("form", [False, True])
def test_outputs_that_the_reply_can_not_hold(service: LiveService, form: bool) -> None:
    """A `.npy` file of several outputs is refused once the options have arrived."""
    status, reply = ask(service, REST, *with_outputs(["diff_weights", "diff_bias"], form=form), NPY)
    assert (status, reply["code"]) == (406, "not_acceptable")
    assert "the call requests 2" in reply["detail"]


@pytest.mark.parametrize("accept", [JSON, NPY])
@pytest.mark.parametrize("form", [False, True])
@pytest.mark.parametrize("second", ["dst", "bias_delta"])
def test_outputs_that_break_a_rule(service: LiveService, second: str, form: bool, accept: str) -> None:
    """An unknown or repeated output is a broken rule, whatever the form of the reply could hold."""
    status, reply = ask(service, REST, *with_outputs(["diff_bias", second], form=form), accept)
    assert (status, error_of(REST, reply)) == (422, ("invalid_params", ["options", "outputs", 1]))


def test_params_by_position(service: LiveService) -> None:
    """They are checked like those by name."""
    call = {"jsonrpc": "2.0", "method": SMALL.op, "params": [SMALL.attributes() | {"strides": [0, 0]}, {"src": "@"}]}
    text = json.dumps({"id": 7} | call).partition('"@"')[0].encode()
    _, reply = ask(service, RPC, text, "application/json")
    assert error_of(RPC, reply) == ("invalid_params", ["attributes", "strides", 0])


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


def in_two(service: LiveService, path: str, body: bytes, cut: int, content_type: str = JSON) -> tuple[int, Any]:
    """Send a whole request, of whose body the first `cut` bytes arrive before the rest; return the reply."""
    fields = f"host: localhost\r\ncontent-type: {content_type}\r\ncontent-length: {len(body)}"
    with connected(service.url) as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.sendall(f"POST {path} HTTP/1.1\r\n{fields}\r\n\r\n".encode() + body[:cut])
        with connected(service.url) as other:  # whose reply shows that the first part has been read
            other.sendall(b"GET /healthz HTTP/1.1\r\nhost: localhost\r\n\r\n")
            replies(other, 1)
        sock.sendall(body[cut:])
        ((status, reply),) = replies(sock, 1)
    return status, json.loads(reply) if reply else None


def test_a_notification_gets_no_reply(service: LiveService) -> None:
    """An invalid call without an id is one, if no id comes."""
    call = {"jsonrpc": "2.0", "method": SMALL.op, "params": {"attributes": {"strides": [0, 0]}, "x": "y"}}
    body = json.dumps(call).encode()
    assert in_two(service, RPC, body, len(body) - 5) == (204, None)


@pytest.mark.parametrize("value", ["7", '"b"', "1.5"])
def test_an_id_that_comes_last(service: LiveService, value: str) -> None:
    """It is the id of the answer, wherever the network cuts the request."""
    call = {"jsonrpc": "2.0", "method": SMALL.op, "params": {"attributes": {"strides": [0, 0]}}, "id": "@"}
    body = json.dumps(call).replace('"@"', value).encode()
    for cut in (body.index(b'"id"'), len(body) - 2):
        _, reply = in_two(service, RPC, body, cut)
        assert reply["id"] == json.loads(value)
        assert reply["error"]["code"] == -32602


def test_an_id_that_comes_late(service: LiveService) -> None:
    """The answer waits for an id that comes after a pause, and has it."""
    call = {"jsonrpc": "2.0", "method": SMALL.op, "params": {"attributes": {"strides": [0, 0]}}, "id": 7}
    body = json.dumps(call).encode()
    cut = body.index(b'"id"')
    fields = f"host: localhost\r\ncontent-type: {JSON}\r\ncontent-length: {len(body)}"
    with connected(service.url) as sock:
        sock.sendall(f"POST {RPC} HTTP/1.1\r\n{fields}\r\n\r\n".encode() + body[:cut])
        sock.settimeout(0.7)
        with pytest.raises(TimeoutError):
            sock.recv(1)
        sock.settimeout(30)
        sock.sendall(body[cut:])
        ((_, reply),) = replies(sock, 1)
    assert json.loads(reply)["id"] == 7


def test_an_id_that_never_comes() -> None:
    """A client that stops sending is told the error that was found, and not that it is slow."""
    params = {"attributes": SMALL.attributes() | {"strides": [0, 0]}}
    call = {"jsonrpc": "2.0", "method": SMALL.op, "params": params, "x": "@"}
    text = json.dumps(call).partition('"@"')[0].encode()
    with resident_service(slow_s=0.2, workers=1) as resident:
        _, reply = ask(resident, RPC, text, JSON)
    assert error_of(RPC, reply) == ("invalid_params", ["attributes", "strides", 0])
    assert reply["id"] is None


@pytest.mark.parametrize("text", [rb'{"\x": 1, "b": 2}', b'{"a\n": 1, "b": 2}'])
def test_malformed_names(service: LiveService, text: bytes) -> None:
    """They are no JSON, also in two pieces."""
    status, reply = in_two(service, REST, text, len(text) - 3)
    assert (status, reply["code"]) == (400, "parse_error")


def parts(*names: str, outputs: list[str] | None = None) -> bytes:
    """Return a multipart call of which the request describes no tensor."""
    weights = SMALL.weights_shape
    arrays = SMALL.inputs() | {"weights": np.ones(weights, "f4"), "diff_src": np.zeros(SRC["shape"], "f4")}
    options = {"options": {"outputs": outputs}} if outputs else {}
    request = json.dumps({"attributes": SMALL.attributes(), **options}).encode()
    files = [("request", request), *((name, npy(arrays[name])) for name in names)]
    texts = [b'--x\r\nContent-Disposition: form-data; name="%b"\r\n\r\n%b\r\n' % (n.encode(), c) for n, c in files]
    return b"".join(texts) + b"--x--\r\n"


@pytest.mark.parametrize("outputs", [["diff_src"], ["diff_weights", "diff_src"]])
def test_an_input_that_an_output_needs_may_come_last(service: LiveService, outputs: list[str]) -> None:
    """Nothing is missing before the end, wherever the network cuts the body."""
    body = parts("src", "diff_dst", "weights", outputs=outputs)
    status, reply = in_two(service, REST, body, body.index(b'name="weights"'), "multipart/form-data; boundary=x")
    assert status == 200
    assert list(reply["outputs"]) == outputs


def test_a_result_to_verify_may_come_first(service: LiveService) -> None:
    """The inputs that the reference needs follow it."""
    body = parts("diff_src", "src", "diff_dst", "weights")
    cut = body.index(b'name="weights"')
    status, reply = in_two(service, f"{REST}/verify", body, cut, "multipart/form-data; boundary=x")
    assert (status, reply["passed"]) == (200, False)


@pytest.mark.parametrize("path", [REST, RPC])
def test_a_complete_body_gets_all_errors(service: LiveService, path: str) -> None:
    """All faults of a body that arrives as a whole are listed, also if its length was not declared."""
    call = {"attributes": SMALL.attributes() | {"strides": [0, 0]}, "inputs": {"src": {"dtype": "f32"}}, "x": 1}
    body = json.dumps(
        call if path == REST else {"jsonrpc": "2.0", "id": 1, "method": SMALL.op, "params": call}
    ).encode()
    with httpx.Client(base_url=service.url, headers={"content-type": JSON}) as http:
        whole, chunked = http.post(path, content=body).json(), http.post(path, content=iter([body])).json()
    found = [reply["error"]["data"] if path == RPC else reply for reply in (whole, chunked)]
    assert found[0]["errors"] == found[1]["errors"]


@pytest.mark.parametrize("path", [REST, RPC, OIP])
def test_a_valid_beginning_is_no_error(path: str) -> None:
    """Wherever a valid call is cut, nothing is wrong with it yet."""
    called = find_operation(SMALL.op)
    dump = {"attributes": {"id": 0, "name": "x", "kind": SMALL.op, "version": "3.8.0"}}
    for text in (begun(path, SRC)[0], json.dumps({"params": dump} if path == RPC else dump).encode()):
        check_beginnings(called, text, path)


def check_beginnings(called: CalledOperation, text: bytes, path: str) -> None:
    """Check every beginning of a body; raises what that raises."""
    for cut in range(len(text)):
        found = partial_document(text[:cut])
        if found and path != REST:
            found = found.get("params", {}) if path == RPC else begun_request(called, found)
        check_begun(called, found or {}, 1 << 30)
