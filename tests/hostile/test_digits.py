"""Numbers with thousands of digits, wherever an API reads one: the caller's fault, and never the service's."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterator

import httpx
import pytest

from tests.app.samples import JSON, NPY, post, read, same_bits
from tests.hostile.apis import TINY
from tests.hostile.table import RAW
from tests.hostile.wire import chunked, head, status, talk
from tests.live import LiveService

INPUTS = TINY.inputs()
REST, OIP = f"/v1/ops/{TINY.op}", f"/v2/models/{TINY.op}"
TENSORS = {
    name: {"dtype": "f32", "shape": list(array.shape), "data": base64.b64encode(array.tobytes()).decode()}
    for name, array in INPUTS.items()
}
CALL = {"attributes": TINY.attributes(), "inputs": TENSORS}
NODE = {
    "id": 0,
    "kind": "BiasAdd",
    "inputs": [{"id": 0, "dtype": "f32", "shape": [1, 1]}, {"id": 1, "dtype": "f32", "shape": [1]}],
    "outputs": [{"id": 2, "dtype": "f32"}],
}
MODEL = {
    "inputs": [
        {"name": name, "datatype": "FP32", "shape": list(array.shape), "data": array.tolist()}
        for name, array in INPUTS.items()
    ],
    "parameters": TINY.attributes(),
}
RPC = {"jsonrpc": "2.0", "id": 1, "method": TINY.op, "params": CALL}

# More digits than int() takes; as many as it takes; and with the zeros that JSON doesn't allow.
NUMBERS = {"5000 digits": "9" * 5000, "4000 digits": "-" + "9" * 4000, "zeros": "0" * 5000 + "3"}


@pytest.fixture(autouse=True)
def the_next_call_works(http: httpx.Client) -> Iterator[None]:
    """After each of these tests a valid call returns the right bits."""
    yield
    assert same_bits(read(post(http, TINY, INPUTS, NPY)), TINY.expected(INPUTS))


def _src(**members: object) -> dict[str, object]:
    return {"inputs": TENSORS | {"src": TENSORS["src"] | members}}


def _input(**members: object) -> dict[str, object]:
    return {"inputs": [MODEL["inputs"][0] | members, *MODEL["inputs"][1:]]}  # type: ignore[index]


IN_JSON: dict[str, tuple[str, object]] = {
    "attribute": (REST, CALL | {"attributes": TINY.attributes() | {"groups": RAW}}),
    "list": (REST, CALL | {"attributes": TINY.attributes() | {"strides": [RAW]}}),
    "shape": (REST, CALL | _src(shape=[1, 1, RAW])),
    "data": (REST, CALL | _src(data=[[[RAW, 1, 1, 1]]])),
    "deadline": (REST, CALL | {"options": {"deadline_ms": RAW}}),
    "id of an op": ("/v1/graphs", {"graph": {"graph": [NODE | {"id": RAW}]}}),
    "id of a tensor": ("/v1/graphs", {"graph": {"graph": [NODE | {"outputs": [{"id": RAW, "dtype": "f32"}]}]}}),
    "outputs": ("/v1/graphs", {"graph": {"graph": [NODE]}, "outputs": [RAW]}),
    "cases of a check": ("/v1/checks", {"ops": [TINY.op], "cases": RAW}),
    "seed of a check": ("/v1/checks", {"ops": [TINY.op], "seed": RAW}),
    "method's attribute": ("/rpc", RPC | {"params": CALL | {"attributes": {"groups": RAW}}}),
    "version": ("/rpc", RPC | {"jsonrpc": RAW}),
    "method": ("/rpc", RPC | {"method": RAW}),
    "params": ("/rpc", RPC | {"params": RAW}),
    "batch": ("/rpc", [RAW]),
    "model's shape": (f"{OIP}/infer", MODEL | _input(shape=[1, 1, RAW])),
    "model's data": (f"{OIP}/infer", MODEL | _input(data=[[[RAW, 1, 1, 1]]])),
    "size": (f"{OIP}/infer", MODEL | _input(data=None, parameters={"binary_data_size": RAW})),
    "timeout": (f"{OIP}/infer", MODEL | {"parameters": TINY.attributes() | {"timeout": RAW}}),
    "region": ("/v2/systemsharedmemory/region/x/register", {"key": "/x", "offset": RAW, "byte_size": RAW}),
}


@pytest.mark.parametrize("number", NUMBERS.values(), ids=list(NUMBERS))
@pytest.mark.parametrize("place", IN_JSON)
def test_in_json(http: httpx.Client, place: str, number: str) -> None:
    """The reply is an error of the caller, and does not repeat the digits."""
    path, document = IN_JSON[place]
    body = json.dumps(document).replace(f'"{RAW}"', number)
    reply = http.post(path, content=body, headers={"content-type": JSON})
    assert len(reply.content) < 5000
    if path == "/rpc":
        found = reply.json()
        error = (found[0] if isinstance(found, list) else found)["error"]
        assert reply.status_code == 200
        assert error["code"] in (-32700, -32600, -32602), error
    else:
        assert 400 <= reply.status_code < 500, reply.text


def _model(http: httpx.Client, number: str, **parameters: str) -> httpx.Response:
    named = {name: value.format(number) for name, value in parameters.items()}
    return http.post(f"{OIP}/infer", json=MODEL | {"parameters": TINY.attributes() | named})


def _file(http: httpx.Client, number: str) -> httpx.Response:
    text = f"{{'descr': '<f4', 'fortran_order': False, 'shape': (1, 1, {number}), }}\n".encode()
    file = b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text
    request = json.dumps({"attributes": TINY.attributes()}).encode()
    return http.post(REST, files=[("request", ("r", request, JSON)), ("src", ("src", file, NPY))])


IN_TEXT: dict[str, Callable[[httpx.Client, str], httpx.Response]] = {
    "list": lambda http, number: _model(http, number, strides="[{}]"),
    "integer": lambda http, number: _model(http, number, groups="{}"),
    "timeout": lambda http, number: _model(http, number, timeout="{}"),
    "head": lambda http, number: http.post(
        f"{OIP}/infer", content=b"{}", headers={b"inference-header-content-length": number.encode()}
    ),
    ".npy": _file,
}
# Texts that int() takes although they are no numbers of a protocol.
TEXTS = NUMBERS | {"underscores": "1_0", "Arabic digits": "٣", "sign": "+1"}


@pytest.mark.parametrize("number", TEXTS.values(), ids=list(TEXTS))
@pytest.mark.parametrize("place", IN_TEXT)
def test_in_text(http: httpx.Client, place: str, number: str) -> None:
    """The reply is an error of the caller."""
    reply = IN_TEXT[place](http, number)
    assert 400 <= reply.status_code < 500, reply.text


@pytest.mark.parametrize("number", [NUMBERS["5000 digits"], NUMBERS["4000 digits"][1:]], ids=["5000", "4000"])
def test_ids(http: httpx.Client, number: str) -> None:
    """An id that int() takes comes back and cancels no other call; a longer one is a parse error."""
    reply = http.post("/rpc", content=f'{{"jsonrpc":"2.0","method":"ops.list","id":{number}}}')
    assert reply.text.endswith(f'"id":{number}}}') if len(number) == 4000 else reply.json()["error"]["code"] == -32700
    params = f'{{"requestId":{number}}}'
    reply = http.post("/rpc", content=f'{{"jsonrpc":"2.0","method":"notifications/cancelled","params":{params}}}')
    assert reply.status_code == 204 if len(number) == 4000 else reply.json()["error"]["code"] == -32700


BODY = b'{"jsonrpc":"2.0","method":"ops.list","id":1}'
LENGTHS = {
    "zeros": (b"0" * 5000 + b"%d" % len(BODY), 200),
    "a zero": (b"0%d" % len(BODY), 200),
    "too many zeros": (b"0" * 9000 + b"%d" % len(BODY), 400),
    "digits": (b"9" * 5000, 400),
    "2^64": (b"18446744073709551616", 400),
    "underscore": (b"4_4", 400),
    "Arabic digits": ("٤٤".encode(), 400),
    "sign": (b"+44", 400),
    "two": (b"44, 44", 400),
    "two lines": (b"44\r\ncontent-length: 44", 400),
    "two different ones": (b"44\r\ncontent-length: 45", 400),
    "chunked, too": (b"44\r\ntransfer-encoding: chunked", 400),
}


@pytest.mark.parametrize("name", LENGTHS)
def test_lengths(service: LiveService, name: str) -> None:
    """A length is read as HTTP has it, zeros included, or rejected before a page is called."""
    length, expected = LENGTHS[name]
    before = len(service.log)
    reply = talk(service.url, head("/rpc", b"content-length: " + length, b"connection: close") + BODY)
    assert (status(reply), reply.count(b"HTTP/1.1 ")) == (expected, 1), reply
    assert (b"x-request-id" in reply) == (expected == 200)
    assert not [line for line in service.log[before:] if "Traceback" in line or "Error" in line]


def test_chunk_sizes(service: LiveService) -> None:
    """The size of a chunk may begin with zeros."""
    lines = b"transfer-encoding: chunked", b"connection: close"
    assert status(talk(service.url, head("/rpc", *lines) + b"0" * 5000 + chunked(BODY))) == 200
