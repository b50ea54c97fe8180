"""Numbers with thousands of digits where the table has no row: other pages, messages, and numbers that are texts."""

from __future__ import annotations

import json

import httpx
import pytest

from tests.app.samples import JSON
from tests.hostile.apis import INPUTS, RAW, TINY

OIP = f"/v2/models/{TINY.op}/infer"
NODE = {
    "id": 0, "kind": "BiasAdd", "outputs": [{"id": 2, "dtype": "f32"}],
    "inputs": [{"id": 0, "dtype": "f32", "shape": [1, 1]}, {"id": 1, "dtype": "f32", "shape": [1]}],
}  # fmt: skip
TENSORS = [
    {"name": name, "datatype": "FP32", "shape": list(array.shape), "data": array.tolist()}
    for name, array in INPUTS.items()
]
RPC = {"jsonrpc": "2.0", "id": 1, "method": "ops.list"}
# More digits than int() takes; as many as it takes; and with the zeros that JSON doesn't allow.
NUMBERS = {"5000 digits": "9" * 5000, "4000 digits": "-" + "9" * 4000, "zeros": "0" * 5000 + "3"}
TEXTS = NUMBERS | {"underscores": "1_0", "Arabic digits": "٣", "sign": "+1"}


def model(**parameters: str) -> dict[str, object]:
    """Return a valid call of the protocol with more parameters."""
    return {"inputs": TENSORS, "parameters": TINY.attributes() | parameters}


def with_src(**members: object) -> dict[str, object]:
    """Return a valid call of the protocol with another src."""
    return model() | {"inputs": [TENSORS[0] | members, *TENSORS[1:]]}


PLACES: dict[str, tuple[str, object]] = {
    "id of an op": ("/v1/graphs", {"graph": {"graph": [NODE | {"id": RAW}]}}),
    "id of a tensor": ("/v1/graphs", {"graph": {"graph": [NODE | {"outputs": [{"id": RAW, "dtype": "f32"}]}]}}),
    "outputs": ("/v1/graphs", {"graph": {"graph": [NODE]}, "outputs": [RAW]}),
    "cases of a check": ("/v1/checks", {"ops": [TINY.op], "cases": RAW}),
    "version": ("/rpc", RPC | {"jsonrpc": RAW}),
    "method": ("/rpc", RPC | {"method": RAW}),
    "params": ("/rpc", RPC | {"params": RAW}),
    "batch": ("/rpc", [RAW]),
    "model's shape": (OIP, with_src(shape=[1, 1, RAW])),
    "model's data": (OIP, with_src(data=[[[RAW, 1, 1, 1]]])),
    "size": (OIP, with_src(data=None, parameters={"binary_data_size": RAW})),
    "timeout": (OIP, model(timeout=RAW)),
    "region": ("/v2/systemsharedmemory/region/x/register", {"key": "/x", "offset": RAW, "byte_size": RAW}),
}


@pytest.mark.parametrize("number", NUMBERS.values(), ids=list(NUMBERS))
@pytest.mark.parametrize("place", PLACES)
def test_numbers(http: httpx.Client, place: str, number: str) -> None:
    """The reply is an error of the caller, and does not repeat the digits."""
    path, document = PLACES[place]
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


@pytest.mark.parametrize("number", TEXTS.values(), ids=list(TEXTS))
@pytest.mark.parametrize("parameter", ["strides", "groups", "timeout"])
def test_texts(http: httpx.Client, parameter: str, number: str) -> None:
    """A number as the text of a parameter is read as JSON has it: otherwise the reply is an error of the caller."""
    text = f"[{number}]" if parameter == "strides" else number
    reply = http.post(OIP, json=model(**{parameter: text}))
    assert 400 <= reply.status_code < 500, reply.text


@pytest.mark.parametrize("number", [NUMBERS["5000 digits"], NUMBERS["4000 digits"][1:]], ids=["5000", "4000"])
def test_ids(http: httpx.Client, number: str) -> None:
    """An id that int() takes comes back and cancels no other call; a longer one is a parse error."""
    reply = http.post("/rpc", content=f'{{"jsonrpc":"2.0","method":"ops.list","id":{number}}}')
    assert reply.text.endswith(f'"id":{number}}}') if len(number) == 4000 else reply.json()["error"]["code"] == -32700
    params = f'{{"requestId":{number}}}'
    reply = http.post("/rpc", content=f'{{"jsonrpc":"2.0","method":"notifications/cancelled","params":{params}}}')
    assert reply.status_code == 204 if len(number) == 4000 else reply.json()["error"]["code"] == -32700
