"""httpx's side of the client: its errors become ours here, and only here."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import httpx

from convgrad._errors import BrokenStream, ConnectFailed, ProtocolError, TimedOut, TransportError

__all__ = ["MAPPING", "translated"]

# The most specific class wins.
MAPPING: dict[type[httpx.HTTPError], tuple[type[TransportError], str]] = {
    httpx.TransportError: (TransportError, "the call failed on its way"),
    httpx.ConnectError: (ConnectFailed, "no connection to the service could be made"),
    httpx.ConnectTimeout: (ConnectFailed, "no connection to the service was made in time"),
    httpx.ProxyError: (ConnectFailed, "the proxy made no connection to the service"),
    httpx.UnsupportedProtocol: (TransportError, "the service's address must begin with http:// or https://"),
    httpx.TimeoutException: (TimedOut, "the service did not answer in time"),
    httpx.NetworkError: (BrokenStream, "the connection broke"),
    httpx.ProtocolError: (BrokenStream, "the connection ended before the whole reply had come"),
    httpx.DecodingError: (ProtocolError, "the reply's content encoding is broken"),
    httpx.TooManyRedirects: (ProtocolError, "the reply is a circle of redirects"),
    httpx.HTTPError: (TransportError, "the call failed on its way"),
}


@contextmanager
def translated() -> Iterator[None]:
    """Raise the tree's errors for those of httpx."""
    try:
        yield
    except httpx.HTTPError as error:
        cls, message = next(MAPPING[kind] for kind in type(error).__mro__ if kind in MAPPING)
        raise cls(f"{message}: {error}" if str(error) else message) from error
    except httpx.StreamError as error:
        raise TransportError(f"the reply was closed before it was read: {error}") from error
