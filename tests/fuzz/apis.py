"""Targets that drive a whole API: the real application, without a socket or workers.

The first two bytes of an input select how to call: operation and page, form of the reply, how the body is split,
whether its length is declared, whether the client disconnects in the middle. The rest is the body.
"""

from __future__ import annotations

import asyncio
import gzip
import json
from functools import cache
from typing import Any
from unittest import mock

from fastapi import FastAPI

from app.main import create_app
from app.pool.jobs import Job
from app.replies.errors import MAPPING
from app.replies.formats import EVENTS, FORMATS
from app.settings import Settings
from schemas.tables import operation_names
from tests.fuzz.parsers import RUNNER

__all__ = ["BOUNDARY", "multipart", "oip", "rest", "rpc"]

BOUNDARY = b"X"

_LIMIT = 1 << 20
_STEPS = (_LIMIT, 509, 127, 53)
_REPLIES = (b"*/*", *(form.media_type.encode() for form in FORMATS))
_PROBLEMS = {400, 404, 413, 415, 422, 503}
_CODES = {reply.rpc_code for reply in MAPPING.values()} - {-32603}


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
    limits = {"body_limit": _LIMIT, "json_limit": 64 << 10, "memory_limit": 8 << 20}
    settings = Settings.model_validate({**limits, "workers": 1, "work_limit": 10**9, "deadline_s": 20.0})
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
    _v1(first, second, body, b"multipart/form-data; boundary=" + BOUNDARY)


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


def _post(path: str, body: bytes, how: int, headers: list[tuple[bytes, bytes]]) -> tuple[int, bytes]:
    """Post a body; return status and content, or status 0 if the client disconnected before the reply.

    Afterwards no call, request or memory may be left, whatever the body was.
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
    assert service.segments.stats().used == 0
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
