"""The asyncio client."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from typing import Self, TypeVar

import httpx

from convgrad._base import DEFAULT_TIMEOUT, BaseClient, Timeout
from convgrad._retry import Retry
from convgrad._tls import Certificate, Trust, tls_context

__all__ = ["AsyncClient"]

T = TypeVar("T")


class AsyncClient(BaseClient):
    """`Client` for asyncio: the same names with `await`, `async with` and `async for`."""

    def __init__(
        self,
        url: str | None = None,
        *,
        api_key: str | None = None,
        timeout: Timeout = DEFAULT_TIMEOUT,
        retry: Retry | None = Retry(),  # noqa: B008 - frozen
        transport: httpx.AsyncBaseTransport | None = None,
        uds: str | os.PathLike[str] | None = None,
        verify: Trust | None = None,
        cert: Certificate | None = None,
    ) -> None:
        trust = tls_context(verify, cert)
        if uds is not None and transport is None:
            transport = httpx.AsyncHTTPTransport(uds=os.fspath(uds), verify=trust)
        network = _AsyncNetwork(httpx.AsyncClient(transport=transport, verify=trust))
        super().__init__(network, url, api_key, timeout, retry)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()


class _AsyncNetwork:
    """A `Network` on the event loop."""

    def __init__(self, http: httpx.AsyncClient) -> None:
        self.http = http

    async def send(self, request: httpx.Request) -> httpx.Response:
        return await self.http.send(request, stream=True)

    def chunks(self, response: httpx.Response) -> AsyncIterator[bytes]:
        return response.aiter_bytes()

    async def read(self, response: httpx.Response) -> bytes:
        return await response.aread()

    async def close(self, response: httpx.Response) -> None:
        await response.aclose()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    async def in_thread(self, function: Callable[[], T]) -> T:
        return await asyncio.to_thread(function)

    async def aclose(self) -> None:
        await self.http.aclose()
