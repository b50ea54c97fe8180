"""Responses are closed, however a call ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator

import httpx
import pytest

import convgrad
from convgrad import Client
from tests.convgrad.server import SRC, stream_of


class Broken(httpx.SyncByteStream, httpx.AsyncByteStream):
    """The body of a reply, with a connection that breaks after the first piece."""

    def __init__(self, piece: bytes) -> None:
        self.piece = piece
        self.closed = False

    def __iter__(self) -> Iterator[bytes]:
        yield self.piece
        raise httpx.ReadError("reset")

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for piece in self:
            yield piece

    def close(self) -> None:
        """Record it."""
        self.closed = True

    async def aclose(self) -> None:
        """Record it."""
        self.closed = True


def broken_replies() -> tuple[httpx.MockTransport, list[Broken]]:
    """Return a transport whose replies all break off, and a list to which it adds their bodies."""
    bodies: list[Broken] = []

    def reply(request: httpx.Request) -> httpx.Response:
        bodies.append(Broken(b"".join(stream_of(SRC)[:3])))
        status = 500 if request.url.path == "/v1/ops/Op" else 200
        return httpx.Response(status, headers={"content-type": "application/x-tensor-stream"}, stream=bodies[-1])

    return httpx.MockTransport(reply), bodies


def test_every_response_is_closed() -> None:
    """A reply that is broken, an error, or not read to its end is closed, by both clients."""
    transport, bodies = broken_replies()
    with Client(transport=transport, retry=None) as client:
        calls: list[Callable[[], object]] = [
            lambda: client.run("Op", {"src": SRC}), client.operations, lambda: client.describe("Op"),
        ]  # fmt: skip
        for call in calls:
            with pytest.raises(convgrad.BrokenStream):
                call()
        with client.stream("Op", {"src": SRC}) as stream:
            next(iter(stream))

    async def use() -> None:
        async with convgrad.AsyncClient(transport=transport, retry=None) as client:
            for call in (client.run("Op", {"src": SRC}), client.operations(), client.describe("Op")):
                with pytest.raises(convgrad.BrokenStream):
                    await call
            async with client.stream("Op", {"src": SRC}) as stream:
                await anext(aiter(stream))

    asyncio.run(use())
    assert [body.closed for body in bodies] == [True] * 8
