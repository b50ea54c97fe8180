"""Bad requests to pages that are no calls: jobs, tensors under handles, the key of checks, and `/mcp`.

`{job}` and `{handle}` in a path or a body are those of another key, `{dropped}` is a handle that is gone, and the
idempotency key `mine` has been used. To add a row, append it to `PAGES`; `test_pages.py` does the rest.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from tests.app.samples import JSON
from tests.hostile.apis import INPUTS, TINY, in_json

__all__ = ["KEY", "PAGES", "Page"]

KEY = "cg_first-of-two-keys"
"""The caller's."""

_REVISION = "2026-07-28"
_META = {
    "io.modelcontextprotocol/protocolVersion": _REVISION,
    "io.modelcontextprotocol/clientCapabilities": {},
    "io.modelcontextprotocol/clientInfo": {"name": "test", "version": "1"},
}
_NOT_FOUND = 404, "not_found"
_INVALID = 422, "invalid_params"
_LONG = "x" * 5000


@dataclass(frozen=True)
class Page:
    """A request, as verb and path, and the status and code of its answer; JSON-RPC's code is that of the error."""

    name: str
    request: str
    answer: tuple[int, str | int | None]
    body: bytes = b""
    headers: Mapping[str, str] = field(default_factory=dict)


def _document(document: Any) -> bytes:
    return json.dumps(document).encode()


def _posted(name: str, path: str, answer: tuple[int, str | int | None], document: Any, **headers: str) -> Page:
    named = {key.replace("_", "-"): value for key, value in headers.items()}
    return Page(name, f"POST {path}", answer, _document(document), {"content-type": JSON} | named)


def _jobs() -> Iterator[Page]:
    for job in ("{job}", "0" * 32, "x", "%2e%2e%2frequests", "{job}%00", "%ff", _LONG):
        for verb, path in (("GET", ""), ("GET", "/result"), ("DELETE", "")):
            yield Page(f"{verb} job {job[:20]}{path}", f"{verb} /v1/jobs/{job}{path}", _NOT_FOUND)
    for verb, path in (("POST", "/v1/jobs"), ("PUT", "/v1/jobs/{job}"), ("DELETE", "/v1/jobs/{job}/result")):
        yield Page(f"{verb} {path}", f"{verb} {path}", (405, "method_not_allowed"))
    for method in ("jobs.get", "jobs.result", "jobs.cancel"):
        some: tuple[Any, ...] = ("{job}", "../requests", _LONG, 7, [], {}, "\0")
        for given in some:
            yield _rpc(f"{method} {str(given)[:20]!r}", -32008, method, {"job": given})
        yield _rpc(f"{method} without a job", -32602, method, {})
    for named in ("ops.validate", "ops.list", "check.begin", "graph.validate", "jobs.submit", "nothing", 7, None):
        yield _rpc(f"jobs.submit of {named}", -32602, "jobs.submit", {"method": named, "params": {"op": TINY.op}})
    for params in (7, "x", None):
        yield _rpc(f"jobs.submit with {params}", -32602, "jobs.submit", {"method": TINY.op, "params": params})
    call = {"attributes": TINY.attributes(), "inputs": {name: in_json(each) for name, each in _TENSORS.items()}}
    other = call | {"options": {"encoding": "npy"}}
    page, prefer = f"/v1/ops/{TINY.op}", "respond-async"
    yield _posted("a used key of another request", page, _INVALID, other, prefer=prefer, idempotency_key="mine")
    yield _rpc("the same in JSON-RPC", -32602, "jobs.submit",
               {"method": TINY.op, "params": other, "idempotency_key": "mine"})  # fmt: skip
    for key in ("", "a b", "x" * 256, '""'):
        yield _posted(f"the key {key[:9]!r}", page, (400, "invalid_request"), call, prefer=prefer, idempotency_key=key)
    for wrong in (7, ["mine"], "a b", ""):
        yield _rpc(f"the key {wrong!r} in JSON-RPC", -32600, "jobs.submit",
                   {"method": TINY.op, "params": call, "idempotency_key": wrong})  # fmt: skip


def _rpc(name: str, code: int, method: str, params: Any) -> Page:
    message = {"jsonrpc": "2.0", "id": 1, "method": method, "params": params}
    return _posted(name, "/rpc", (200, code), message)


def _tensors() -> Iterator[Page]:
    for handle in ("{handle}", "{dropped}", "0" * 32, "%2e%2e%2f", "%00", _LONG):
        for verb in ("GET", "DELETE"):
            yield Page(f"{verb} tensor {handle[:20]}", f"{verb} /v1/tensors/{handle}", _NOT_FOUND)
    src = {"dtype": "f32", "shape": [1], "data": [1]}
    documents: tuple[Any, ...] = (
        {}, [], {"inputs": {}}, {"inputs": 1}, {"tensors": 1}, {"inputs": {"src": src}}, {"inputs": {"tensor": 7}},
        {"inputs": {"tensor": [1]}}, {"inputs": {"tensor": {"dtype": "f32", "shape": [1]}}},
        {"inputs": {"tensor": src, "src": src}}, {"inputs": {"tensor": src}, "options": {}},
    )  # fmt: skip
    for document in documents:
        yield _posted(f"upload {json.dumps(document)[:60]}", "/v1/tensors", _INVALID, document)
    yield Page("upload text", "POST /v1/tensors", (415, "unsupported_media_type"), b"x", {"content-type": "text/plain"})
    yield Page("GET /v1/tensors", "GET /v1/tensors", (405, "method_not_allowed"))


def _keys() -> Iterator[Page]:
    yield Page("the key of checks", "GET /v1/checks/key", (200, None))
    yield Page("POST to the key of checks", "POST /v1/checks/key", (405, "method_not_allowed"))
    yield Page("DELETE a check named key", "DELETE /v1/checks/key", _NOT_FOUND)
    for path in ("/v1/checks/key", "/v1/jobs", "/v1/tensors/{handle}"):
        yield Page(f"{path} without a key", f"GET {path}", (401, "unauthorised"), headers={"authorization": ""})
        yield Page(
            f"{path} of a foreign page", f"GET {path}", (403, "forbidden"), headers={"origin": "http://a.example"}
        )


def _message(
    name: str,
    answer: tuple[int, str | int | None],
    method: str = "tools/list",
    params: Mapping[str, Any] | None = None,
    **headers: str,
) -> Page:
    """Return a row of `/mcp`, with the headers that its revision requires unless others are given."""
    document = {"jsonrpc": "2.0", "id": 1, "method": method, "params": {"_meta": _META, **(params or {})}}
    own = {"accept": f"{JSON}, text/event-stream", "mcp_protocol_version": _REVISION, "mcp_method": method}
    return _posted(name, "/mcp", answer, document, **(own | headers))


def _mcp() -> Iterator[Page]:
    listed: dict[str, Any] = {"name": "describe", "arguments": {}}
    yield _message("MCP: a list of tools", (200, None))
    yield _message("MCP: an unknown method", (404, -32601), "tools/none")
    yield _message("MCP: a method of /rpc", (404, -32601), "ops.list")
    yield _message("MCP: another method in the header", (400, -32020), "tools/call", listed, mcp_name="describe",
                   mcp_method="tools/list")  # fmt: skip
    yield _message("MCP: another tool in the header", (400, -32020), "tools/call", listed, mcp_name="verify")
    yield _message("MCP: no tool in the header", (400, -32020), "tools/call", listed)
    yield _message("MCP: another revision in the body", (400, -32020),
                   params={"_meta": {**_META, "io.modelcontextprotocol/protocolVersion": "2025-11-25"}})  # fmt: skip
    unknown = {"_meta": {**_META, "io.modelcontextprotocol/protocolVersion": "2099-01-01"}}
    yield _message("MCP: an unknown revision", (400, -32022), params=unknown, mcp_protocol_version="2099-01-01")
    yield _message("MCP: an unknown tool", (200, None), "tools/call", {"name": "none"}, mcp_name="none")
    yield _message("MCP: an unknown prompt", (400, -32602), "prompts/get", {"name": "none"}, mcp_name="none")
    yield _message("MCP: an unknown resource", (400, -32602), "resources/read", {"uri": "a://b"}, mcp_name="a://b")
    yield _message("MCP: a foreign page", (403, "forbidden"), origin="https://example.org")
    yield _message("MCP: a wrong key", (401, "unauthorised"), authorization="Bearer wrong")
    yield _message("MCP: only JSON", (406, None), accept=JSON)
    yield from (Page(f"{verb} /mcp", f"{verb} /mcp", (405, "method_not_allowed")) for verb in ("GET", "DELETE", "PUT"))
    headers = {"content-type": JSON, "accept": f"{JSON}, text/event-stream", "mcp-protocol-version": _REVISION}
    for name, body, answer in (
        ("no JSON", b"{", (400, -32700)), ("NaN", b"NaN", (400, -32600)), ("a batch", b"[]", (400, -32600)),
        ("deep nesting", b"[" * 60_000 + b"]" * 60_000, (400, -32700)), ("many digits", b"9" * 5000, (400, -32700)),
        ("UTF-16", '{"a": 1}'.encode("utf-16"), (400, -32600)), ("latin-1", b'"\xe9"', (400, -32700)),
        ("a long body", b" " * (5 << 20), (413, "too_large")),
    ):  # fmt: skip
        yield Page(f"MCP: {name}", "POST /mcp", answer, body, headers)


_TENSORS = {
    name: {"dtype": "f32", "shape": list(array.shape), "data": array.tobytes()} for name, array in INPUTS.items()
}

PAGES: list[Page] = [*_jobs(), *_tensors(), *_keys(), *_mcp()]
