"""The asyncio client."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Self

from convgrad._base import BaseClient
from convgrad._retry import DEFAULT_TIMEOUT, Retry, Timeout

if TYPE_CHECKING:
    import httpx

    from convgrad._tls import Certificate, Trust

__all__ = ["AsyncClient"]


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
        import httpx

        from convgrad._http import AsyncNetwork, Http
        from convgrad._tls import tls_context

        trust = tls_context(verify, cert)
        if uds is not None and transport is None:
            transport = httpx.AsyncHTTPTransport(uds=os.fspath(uds), verify=trust)
        network = AsyncNetwork(httpx.AsyncClient(transport=transport, verify=trust))
        super().__init__(Http(network, url, api_key, timeout, retry))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()
