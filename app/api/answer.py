"""How a call is answered, on every API: admit, receive and check, compute, reply, free everything."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from starlette.types import Send

from app.calls.tasks import Task
from app.calls.work import Work
from app.http.exchange import Exchange
from app.intake.body import media_type, read_json, refuse_encoding
from app.intake.lease import Lease
from app.intake.multipart import MultipartBody
from app.intake.requests import RequestObject
from convgrad._errors import UnsupportedMediaType

__all__ = ["REQUEST_TYPES", "Decode", "Encode", "answer", "check_media_type", "decode", "decode_optional"]

Decode = Callable[[Exchange, Task, Lease], Awaitable[RequestObject]]
"""Reads the body of a request in one format."""

Encode = Callable[[Work, Send], Awaitable[None]]
"""Runs the work and sends its reply in one format."""

REQUEST_TYPES = ("application/json", "multipart/form-data")
"""Content types of requests to `/v1`."""


async def answer(exchange: Exchange, task: Task, decode: Decode, encode: Encode) -> None:
    """Answer one request for one task.

    It is rejected before its body is read if the service is full or its key has reached a limit. Raises the error of a
    request that fails.
    """
    service = task.service
    limited = task.limited
    with service.admit(task.context, limited), service.lease(task.context, exchange.direct_body, limited) as lease:
        request = await decode(exchange, task, lease)
        lease.received()
        work = await task.work(request, lease)
        del request  # a client that reads slowly does not hold the text of its tensors
        lease.forget()
        with exchange.watched():
            async with work:
                await encode(work, exchange.send)


async def decode(exchange: Exchange, task: Task, lease: Lease) -> RequestObject:
    """Read a body of one of the `REQUEST_TYPES`; raises `UnsupportedMediaType` for another."""
    headers, length, limit = exchange.headers, exchange.length, int(task.service.settings.json_limit)
    refuse_encoding(headers)
    name = media_type(headers)
    check_media_type(name, REQUEST_TYPES)
    if name == "application/json":
        document = await read_json(exchange.chunks(), lease, length=length, limit=limit)
        return await (await task.read(document)).read()
    body = MultipartBody(headers["content-type"], lease, task.read, task.check_head, length=length, limit=limit)
    return await body.request(exchange.chunks())


async def decode_optional(exchange: Exchange, task: Task, lease: Lease) -> RequestObject:
    """Read a body that may be missing, which counts as an empty object."""
    if not exchange.length and "transfer-encoding" not in exchange.headers:
        return await task.read({})
    return await decode(exchange, task, lease)


def check_media_type(name: str, supported: Sequence[str]) -> None:
    """Raise `UnsupportedMediaType` unless the media type of a body is one of the `supported` ones."""
    if name not in supported:
        names = list(filter(None, supported))
        raise UnsupportedMediaType(f"the Content-Type must be {' or '.join(names)}", data={"supported": names})
