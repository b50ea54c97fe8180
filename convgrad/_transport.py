"""The one place where errors of httpx become errors of convgrad."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import httpx

from convgrad._errors import BrokenStream, ConnectFailed, ProtocolError, TimedOut, TransportError

__all__ = ["MAPPING", "translated"]

# The most specific class wins.
MAPPING: dict[type[httpx.HTTPError], tuple[type[TransportError], str]] = {
    httpx.TransportError: (TransportError, "the request failed in transit"),
    httpx.ConnectError: (ConnectFailed, "can't connect to the service"),
    httpx.ConnectTimeout: (ConnectFailed, "can't connect to the service in time"),
    httpx.ProxyError: (ConnectFailed, "the proxy can't connect to the service"),
    httpx.UnsupportedProtocol: (TransportError, "the service's address must begin with http:// or https://"),
    httpx.TimeoutException: (TimedOut, "the service did not answer in time"),
    httpx.NetworkError: (BrokenStream, "the connection broke"),
    httpx.ProtocolError: (BrokenStream, "the connection ended before the whole reply arrived"),
    httpx.DecodingError: (ProtocolError, "the reply does not match its Content-Encoding"),
    httpx.TooManyRedirects: (ProtocolError, "the reply has too many redirects"),
    httpx.HTTPError: (TransportError, "the request failed in transit"),
}


@contextmanager
def translated(url: httpx.URL | None = None) -> Iterator[None]:
    """Raise httpx's errors as `TransportError`; one of connecting names the `url`."""
    try:
        yield
    except httpx.HTTPError as error:
        cls, message = next(MAPPING[kind] for kind in type(error).__mro__ if kind in MAPPING)
        if cls is ConnectFailed and url is not None:
            message = message.replace("the service", f"the service at {url.copy_with(userinfo=b'')}", 1)
        start = (
            "; start one with `convgrad serve`, or use convgrad.local()"
            if cls is ConnectFailed and _refused(error)
            else ""
        )
        raise cls(f"{message}: {error}{start}" if str(error) else message) from error
    except httpx.StreamError as error:
        raise TransportError(f"the reply was closed before it was read: {error}") from error


def _refused(error: BaseException | None) -> bool:
    """Whether nothing listens at the address or Unix socket."""
    while error is not None:
        several = getattr(error, "exceptions", ())
        if isinstance(error, ConnectionRefusedError | FileNotFoundError) or any(map(_refused, several)):
            return True
        # httpcore's errors have the OSError as their context only; that of an OSError may be the caller's.
        error = error.__cause__ or (None if isinstance(error, OSError) else error.__context__)
    return False
