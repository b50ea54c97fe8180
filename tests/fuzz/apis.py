"""Targets that drive a whole API: the real application with a spool, without a socket or workers.

The first two bytes of an input select how to call: operation and page, form of the reply, how the body is split,
whether its length is declared, whether the client disconnects in the middle. The rest is the body.
"""

from __future__ import annotations

import asyncio
import gzip
import json
import tempfile
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

from fastapi import FastAPI

from app.api.jobs import Run
from app.main import create_app
from app.pool.jobs import Job
from app.replies.errors import MAPPING
from app.replies.formats import EVENTS, FORMATS
from app.settings import Settings
from schemas.tables import operation_names
from tests.fuzz.parsers import RUNNER

__all__ = ["BOUNDARY", "jobs", "mcp", "multipart", "oip", "rest", "rpc", "tensors"]

BOUNDARY = b"X"

_LIMIT = 1 << 20
_STEPS = (_LIMIT, 509, 127, 53)
_REPLIES = (b"*/*", *(form.media_type.encode() for form in FORMATS))
_PROBLEMS = {400, 404, 413, 415, 422, 503}
_CODES = {reply.rpc_code for reply in MAPPING.values()} - {-32603}
_FORM = b"multipart/form-data; boundary=" + BOUNDARY
_SPOOL = tempfile.TemporaryDirectory(prefix="convgrad-fuzz-")


class _Instant:
    """An engine that computes nothing: every unit is done at once, with whatever its memory holds."""

    ready = True

    def count(self, units: int, macs: int, seconds: float) -> None:
        pass

    async def run(self, job: Job) -> None:
        if job.on_unit is not None:
            for unit in job.plan.units:
                job.on_unit(unit)

    run_here = run


@cache
def _app() -> FastAPI:
    limits: dict[str, Any] = {"body_limit": _LIMIT, "json_limit": 64 << 10, "memory_limit": 8 << 20}
    limits |= {"workers": 1, "work_limit": 10**9, "deadline_s": 20.0}
    settings = Settings.model_validate({**limits, "spool": _SPOOL.name})
    with mock.patch("app.main.make_engine", return_value=_Instant()):
        return create_app(settings)


def rpc(data: bytes) -> None:
    """Call /rpc: 200 with JSON-RPC responses or 204 with none, never a server error."""
    _, second, body = _apart(data)
    accept = EVENTS.media_type.encode() if second & 16 else b"*/*"
    status, content = _post("/rpc", body, second, [(b"accept", accept)])
    if status == 200 and not second & 16:
        answers = json.loads(content)
        for answer in answers if isinstance(answers, list) else [answers]:
            assert answer["jsonrpc"] == "2.0"
            assert len({"result", "error", "id"} & set(answer)) == 2
            assert "error" not in answer or answer["error"]["code"] in _CODES, answer
    else:
        assert status in (0, 200, 204), (status, content)


def rest(data: bytes) -> None:
    """Call /v1 with JSON: the reply is a result or a problem object."""
    first, second, body = _apart(data)
    _v1(first, second, body, b"application/json")


def multipart(data: bytes) -> None:
    """Call /v1 with multipart: the reply is a result or a problem object."""
    first, second, body = _apart(data)
    _v1(first, second, body, _FORM)


def jobs(data: bytes) -> None:
    """Have a call to /v1 become a job: one that is accepted is never refused when it is computed."""
    first, second, body = _apart(data)
    headers = [(b"prefer", b"respond-async"), (b"content-type", _FORM if second & 16 else b"application/json")]
    path = "/v1/graphs" if second & 32 else f"/v1/ops/{_name(first)}"
    status, content = _post(path, body, second, headers)
    spool = _app().state.service.jobs.spool
    if (claimed := spool.claim()) is not None:
        outcome = RUNNER.run(_computed(claimed[0]))
        job = spool.cancel(claimed[0].id, claimed[0].owner)
        assert outcome == "done" or "deadline_exceeded" in job.error, (outcome, job)
        assert not [*Path(_SPOOL.name).glob("re*/*")]
    elif status:
        assert status in _PROBLEMS, (status, content)


async def _computed(job: Any) -> str:
    service = _app().state.service
    return await Run(service, service.jobs, job).task


def tensors(data: bytes) -> None:
    """Upload a tensor: a handle that returns as many bytes, or a problem object."""
    _, second, body = _apart(data)
    headers = [(b"content-type", _FORM if second & 16 else b"application/json")]
    status, content = _post("/v1/tensors", body, second, headers, kept=True)
    kept = _app().state.service.kept_tensors
    if status == 200:
        found = json.loads(content)
        output = kept.find(found["handle"], "127.0.0.1")
        assert (output.spec.dtype, list(output.spec.shape)) == (found["dtype"], found["shape"])
        kept.drop(found["handle"], "127.0.0.1")
    else:
        assert status == 0 or status in _PROBLEMS, (status, content)
    assert _app().state.service.segments.stats().used == 0


def mcp(data: bytes) -> None:
    """Call /mcp in a revision, with headers that fit the body or don't: one answer, and no internal error."""
    first, second, body = _apart(data)
    revision = (b"2026-07-28", b"2025-11-25", b"2025-03-26", b"1999-01-01")[first & 3]
    headers = [(b"content-type", b"application/json"), (b"accept", b"application/json, text/event-stream")]
    headers += [(b"mcp-protocol-version", revision), *_fitting(body)]
    status, content = _post("/mcp", body, second, headers, kept=True)
    RUNNER.run(_forgotten())
    assert status in (0, 200, 202, 400, 404, 406, 413), (status, content)
    answers = [line.removeprefix(b"data: ") for line in content.splitlines() if line.startswith((b"data: ", b"{"))]
    assert not any(json.loads(answer).get("error", {}).get("code") == -32603 for answer in answers), content


async def _forgotten() -> None:
    """Drop all tensors and checks; what a client has left stops, and then no memory is in use."""
    service = _app().state.service
    for handle in list(service.kept_tensors._kept):
        service.kept_tensors.drop(handle, "127.0.0.1")
    for check in list(service.sealed_checks._checks.values()):
        service.sealed_checks.drop(check)
    async with asyncio.timeout(10):
        while service.calls or service.admission.requests or service.segments.stats().used:  # noqa: ASYNC110
            await asyncio.sleep(0)


def _fitting(body: bytes) -> list[tuple[bytes, bytes]]:
    """Return the headers that the new revision requires for a body."""
    try:
        message = json.loads(body)
        method, params = message["method"], message.get("params") or {}
        name = params.get("name", params.get("uri", ""))
        return [(b"mcp-method", method.encode("latin-1")), (b"mcp-name", name.encode("latin-1"))]
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return []


def _v1(first: int, second: int, body: bytes, content_type: bytes) -> None:
    page = f"/v1/ops/{_name(first)}" + ("/validate" if first & 32 else "")
    headers = [
        (b"content-type", content_type),
        (b"accept", b"*/*" if first & 32 else _REPLIES[(second >> 4) % len(_REPLIES)]),
    ]
    status, content = _post(page, body, second, headers)
    if status not in (0, 200):
        assert status in _PROBLEMS, (status, content)
        assert json.loads(content)["status"] == status


def oip(data: bytes) -> None:
    """Call /v2: a result or the protocol's error. With a declared length the head ends at the first line break."""
    first, second, body = _apart(data)
    headers = []
    if second & 16:
        # The fuzzer chooses where the head ends, by its first line break.
        length, body = body.find(b"\n"), body.replace(b"\n", b"", 1)
        headers.append((b"inference-header-content-length", b"%d" % max(length, 0)))
    if second & 32:
        headers.append((b"content-encoding", b"gzip"))
        body = gzip.compress(body, 1) if first & 32 else body
    status, content = _post(f"/v2/models/{_name(first)}/infer", body, second, headers)
    if status not in (0, 200):
        assert status in {400, 413, 503}, (status, content)
        assert list(json.loads(content)) == ["error"]


def _apart(data: bytes) -> tuple[int, int, bytes]:
    return data[0] if data else 0, data[1] if len(data) > 1 else 0, data[2:]


def _name(first: int) -> str:
    return operation_names()[(first & 31) % len(operation_names())]


def _cut(body: bytes, step: int) -> list[bytes]:
    return [body[start : start + step] for start in range(0, len(body), step)]


def _post(
    path: str, body: bytes, how: int, headers: list[tuple[bytes, bytes]], *, kept: bool = False
) -> tuple[int, bytes]:
    """Post a body; return status and content, or status 0 if the client disconnected before the reply.

    Afterwards no call, request or memory may be left, whatever the body was, except tensors that are `kept`.
    """
    app = _app()
    if how & 4:
        headers.append((b"content-length", b"%d" % len(body)))
    else:
        headers.append((b"transfer-encoding", b"chunked"))
    answer = RUNNER.run(_talk(app, path, _cut(body, _STEPS[how & 3]), headers, leaves=how & 0xC8 == 0xC8))
    service = app.state.service
    assert not service.calls
    assert not service.admission.requests
    assert kept or service.segments.stats().used == 0
    return answer


async def _talk(
    app: FastAPI, path: str, chunks: list[bytes], headers: list[tuple[bytes, bytes]], *, leaves: bool
) -> tuple[int, bytes]:
    status, content = 0, bytearray()
    some = chunks[: len(chunks) // 2] if leaves else chunks or [b""]
    coming = [{"type": "http.request", "body": chunk, "more_body": True} for chunk in some]
    if leaves:
        coming.append({"type": "http.disconnect"})
    else:
        coming[-1]["more_body"] = False
    messages = iter(coming)

    async def receive() -> dict[str, Any]:
        if (message := next(messages, None)) is None:
            await asyncio.Event().wait()
            raise AssertionError
        return message

    async def send(message: Any) -> None:
        nonlocal status
        status = message.get("status", status)
        content.extend(message.get("body", b""))

    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "scheme": "http",
        "path": path, "raw_path": path.encode(), "root_path": "", "query_string": b"", "headers": headers,
        "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 80),
    }  # fmt: skip
    await app(scope, receive, send)
    return status, bytes(content)
