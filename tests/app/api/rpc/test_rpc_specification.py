"""The examples of the JSON-RPC 2.0 specification (jsonrpc.org/specification, section 7), word for word."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from typing import Any

import httpx
import pytest
from starlette.types import Receive, Scope, Send

from app.api.rpc.methods import Method
from app.api.rpc.routes import answer_rpc
from app.calls.service import Service
from app.http.exchange import BodyLimits, Exchanges, exchange_of
from app.pool.buffers import SegmentPool
from app.pool.local import LocalEngine
from app.settings import Settings
from schemas.rpc import bind_params


def method(function: Callable[..., Any], *names: str) -> Method:
    """Return a method that calls a function."""
    if names:
        return lambda params: function(**bind_params(params, names, required=names))
    return lambda params: function(*(params or ()))


METHODS: Mapping[str, Method] = {
    "subtract": method(lambda minuend, subtrahend: minuend - subtrahend, "minuend", "subtrahend"),
    "sum": method(lambda *numbers: sum(numbers)),
    "update": method(lambda *_: None),
    "notify_hello": method(lambda *_: None),
    "notify_sum": method(lambda *_: None),
    "get_data": method(lambda: ["hello", 5]),
}


def post(body: bytes) -> httpx.Response:
    """Send a body to an API with our methods; no worker is started, because they don't need any."""
    pool = SegmentPool(1 << 24)
    service = Service(Settings(), LocalEngine(pool, workers=1), pool)

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        await answer_rpc(exchange_of(scope), service, METHODS)

    async def run() -> httpx.Response:
        transport = httpx.ASGITransport(app=Exchanges(answer, BodyLimits(1 << 30)))
        async with httpx.AsyncClient(transport=transport, base_url="http://API") as client:
            return await client.post("/rpc", content=body)

    return asyncio.run(run())


ERROR = '{"jsonrpc": "2.0", "error": {"code": %d, "message": "%s"}, "id": %s}'
NOT_FOUND, INVALID = (-32601, "Method not found"), (-32600, "Invalid Request")
EXAMPLES = {
    "positional 1": (
        '{"jsonrpc": "2.0", "method": "subtract", "params": [42, 23], "id": 1}',
        '{"jsonrpc": "2.0", "result": 19, "id": 1}',
    ),
    "positional 2": (
        '{"jsonrpc": "2.0", "method": "subtract", "params": [23, 42], "id": 2}',
        '{"jsonrpc": "2.0", "result": -19, "id": 2}',
    ),
    "named 1": (
        '{"jsonrpc": "2.0", "method": "subtract", "params": {"subtrahend": 23, "minuend": 42}, "id": 3}',
        '{"jsonrpc": "2.0", "result": 19, "id": 3}',
    ),
    "named 2": (
        '{"jsonrpc": "2.0", "method": "subtract", "params": {"minuend": 42, "subtrahend": 23}, "id": 4}',
        '{"jsonrpc": "2.0", "result": 19, "id": 4}',
    ),
    "notification 1": ('{"jsonrpc": "2.0", "method": "update", "params": [1,2,3,4,5]}', None),
    "notification 2": ('{"jsonrpc": "2.0", "method": "foobar"}', None),
    "non-existent method": ('{"jsonrpc": "2.0", "method": "foobar", "id": "1"}', ERROR % (*NOT_FOUND, '"1"')),
    "invalid JSON": (
        '{"jsonrpc": "2.0", "method": "foobar, "params": "bar", "baz]',
        ERROR % (-32700, "Parse error", "null"),
    ),
    "invalid request": ('{"jsonrpc": "2.0", "method": 1, "params": "bar"}', ERROR % (*INVALID, "null")),
    "batch, invalid JSON": (
        """[
          {"jsonrpc": "2.0", "method": "sum", "params": [1,2,4], "id": "1"},
          {"jsonrpc": "2.0", "method"
        ]""",
        ERROR % (-32700, "Parse error", "null"),
    ),
    "empty array": ("[]", ERROR % (*INVALID, "null")),
    "invalid batch, not empty": ("[1]", f"[{ERROR % (*INVALID, 'null')}]"),
    "invalid batch": ("[1,2,3]", f"[{', '.join([ERROR % (*INVALID, 'null')] * 3)}]"),
    "batch": (
        """[
          {"jsonrpc": "2.0", "method": "sum", "params": [1,2,4], "id": "1"},
          {"jsonrpc": "2.0", "method": "notify_hello", "params": [7]},
          {"jsonrpc": "2.0", "method": "subtract", "params": [42,23], "id": "2"},
          {"foo": "boo"},
          {"jsonrpc": "2.0", "method": "foo.get", "params": {"name": "myself"}, "id": "5"},
          {"jsonrpc": "2.0", "method": "get_data", "id": "9"}
        ]""",
        """[
          {"jsonrpc": "2.0", "result": 7, "id": "1"},
          {"jsonrpc": "2.0", "result": 19, "id": "2"},
          {"jsonrpc": "2.0", "error": {"code": -32600, "message": "Invalid Request"}, "id": null},
          {"jsonrpc": "2.0", "error": {"code": -32601, "message": "Method not found"}, "id": "5"},
          {"jsonrpc": "2.0", "result": ["hello", 5], "id": "9"}
        ]""",
    ),
    "batch of notifications": (
        """[
          {"jsonrpc": "2.0", "method": "notify_sum", "params": [1,2,4]},
          {"jsonrpc": "2.0", "method": "notify_hello", "params": [7]}
        ]""",
        None,
    ),
}


def without_data(answer: Any) -> Any:
    """Return the answer without the optional `data` of errors, which the examples don't have."""
    if isinstance(answer, list):
        return [without_data(item) for item in answer]
    if "error" in answer:
        answer["error"].pop("data")
    return answer


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_examples_of_the_specification(name: str) -> None:
    """Every example is answered as the specification says."""
    request, answer = EXAMPLES[name]
    response = post(request.encode())
    if answer is None:
        assert (response.status_code, response.content) == (204, b"")
    else:
        assert response.status_code == 200
        assert without_data(response.json()) == json.loads(answer)


def test_an_exception_in_a_method_is_an_internal_error_without_details(caplog: pytest.LogCaptureFixture) -> None:
    """An unexpected exception is -32603 without details, which are logged."""
    body = '{"jsonrpc": "2.0", "method": "subtract", "params": ["secret", 2], "id": 1}'
    answer = post(body.encode())
    assert answer.json()["error"]["code"] == -32603
    assert "secret" not in answer.text
    assert "TypeError" in caplog.text


def test_a_long_batch_keeps_its_order() -> None:
    """A batch of the largest size is answered completely and in order."""
    batch = [{"jsonrpc": "2.0", "method": "sum", "params": [number], "id": number} for number in range(1000)]
    answers = post(json.dumps(batch).encode()).json()
    assert [answer["result"] for answer in answers] == list(range(1000))
    assert post(json.dumps([*batch, batch[0]]).encode()).json()["error"]["code"] == -32600
