"""How a call to `/v1` or `/v2` is answered: admit, receive and check, compute, reply, free everything.

`/rpc` takes the same steps for each item of a message.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

from starlette.types import Send

from app.calls.tasks import RequestReceiver, Task
from app.calls.work import Work
from app.http.exchange import Exchange
from app.intake.body import json_events, media_type, refuse_encoding, whole
from app.intake.json import JsonIntake
from app.intake.lease import Lease
from app.intake.multipart import MultipartIntake
from app.intake.requests import RequestEvent
from app.intake.values import TensorValues
from convgrad._errors import UnsupportedMediaType

__all__ = ["REQUEST_TYPES", "Decode", "Encode", "answer", "decode", "decode_optional"]

Decode = Callable[[Exchange, Task, Lease], AsyncIterator[RequestEvent]]
"""Reads the body of a request in one format."""

Encode = Callable[[Work, Send], Awaitable[None]]
"""Runs the work and sends its reply in one format."""

REQUEST_TYPES = ("application/json", "multipart/form-data")
"""Content types of requests to `/v1`."""


async def answer(exchange: Exchange, task: Task, decode: Decode, encode: Encode) -> None:
    """Answer one request for one task.

    It is rejected before its body is read if the service is full or its key has reached a limit, and while the body
    arrives as soon as a rule is broken. Raises the error of a request that fails.
    """
    service = task.service
    with service.admit(), service.lease(exchange.direct_body) as lease:
        work = await RequestReceiver(task, lease).receive(decode(exchange, task, lease))
        async with exchange.watched(), work:
            await encode(work, exchange.send)


def decode(exchange: Exchange, task: Task, lease: Lease) -> AsyncIterator[RequestEvent]:
    """Read a body of one of the `REQUEST_TYPES`; raises `UnsupportedMediaType` for another."""
    headers, length, limit = exchange.headers, exchange.length, int(task.service.settings.head_limit)
    refuse_encoding(headers)
    name = media_type(headers)
    check_media_type(name, REQUEST_TYPES)
    if name == "application/json":
        document = JsonIntake(TensorValues(lease), length=length, max_skeleton=limit)
        return json_events(exchange.chunks(), document, task.read, lease)
    parts = MultipartIntake(headers["content-type"], task.read, lease, length=length, max_request=limit)
    return parts.events(exchange.chunks())


def decode_optional(exchange: Exchange, task: Task, lease: Lease) -> AsyncIterator[RequestEvent]:
    """Read a body that may be missing, which counts as an empty object."""
    if not exchange.length and "transfer-encoding" not in exchange.headers:
        return whole({}, task.read, lease)
    return decode(exchange, task, lease)


def check_media_type(name: str, supported: Sequence[str]) -> None:
    """Raise `UnsupportedMediaType` unless the media type of a body is one of the `supported` ones."""
    if name not in supported:
        names = list(filter(None, supported))
        raise UnsupportedMediaType(f"the Content-Type must be {' or '.join(names)}", data={"supported": names})
