"""Read a JSON body as it arrives; media type and content encoding of any body."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any

from app.intake.json import JsonIntake
from app.intake.lease import Lease
from app.intake.requests import Begun, Known, RequestEvent, RequestObject
from app.intake.strict_json import Partial
from convgrad._errors import UnsupportedMediaType

__all__ = ["ReadRequest", "begun_documents", "json_events", "media_type", "refuse_encoding", "whole"]

ReadRequest = Callable[[Any], Awaitable[RequestObject]]
"""Turns a parsed document into a request object."""

# Of a Content-Type. Parsing the options of 8 KiB takes 15 ms.
_LONGEST = 1024
_CHARSETS = ("utf-8", "utf8", "us-ascii")


async def json_events(
    chunks: AsyncIterator[bytes | memoryview],
    document: JsonIntake,
    read_request: ReadRequest,
    lease: Lease,
) -> AsyncIterator[RequestEvent]:
    """Read a JSON body; yield what has arrived."""
    async for begun in begun_documents(chunks, document):
        yield begun
    async for event in whole(await document.finish_async(), read_request, lease):
        yield event


async def whole(document: Any, read_request: ReadRequest, lease: Lease) -> AsyncIterator[RequestEvent]:
    """Yield the request of a document that has arrived as a whole."""
    yield Known(await (await read_request(document)).read(lease))


async def begun_documents(chunks: AsyncIterator[bytes | memoryview], document: JsonIntake) -> AsyncIterator[Begun]:
    """Read a JSON body into `document`; while it is an incomplete object, yield its members so far.

    They are yielded before memory is allocated for what follows them.
    """
    async for chunk in chunks:
        assert isinstance(chunk, bytes)
        await document.take(chunk)
        if isinstance(begun := await document.begun(), Partial):
            yield Begun(begun)
        await document.supply()


def refuse_encoding(headers: Mapping[str, str]) -> None:
    """Raise `UnsupportedMediaType` for a content encoding."""
    if headers.get("content-encoding", "").strip().lower() not in ("", "identity"):
        raise UnsupportedMediaType("the body must not have a content encoding")


def media_type(headers: Mapping[str, str]) -> str:
    """Return the media type in lower case, or an empty string; raises `UnsupportedMediaType` for another charset."""
    given = headers.get("content-type", "")
    if len(given) > _LONGEST:
        raise UnsupportedMediaType(f"the Content-Type has {len(given)} characters; at most {_LONGEST} are allowed")
    name, *parameters = given.split(";")
    for parameter in parameters:
        key, _, value = parameter.partition("=")
        if key.strip().lower() == "charset" and value.strip(' "').lower() not in _CHARSETS:
            raise UnsupportedMediaType("text must be UTF-8, but the Content-Type header names another charset")
    return name.strip().lower()
