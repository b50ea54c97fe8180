"""The one place that maps httpx's errors to ours."""

from __future__ import annotations

import httpx
import pytest

import convgrad
from convgrad._transport import translated


def below(cls: type[Exception]) -> list[type[Exception]]:
    """Return a class and all its subclasses."""
    return [cls, *(inner for child in cls.__subclasses__() for inner in below(child))]


SAID_BY_US = {httpx.HTTPStatusError}


@pytest.mark.parametrize("cls", [cls for cls in below(httpx.HTTPError) if cls not in SAID_BY_US])
def test_every_error_of_httpx_has_a_class(cls: type[Exception]) -> None:
    """Whatever httpx raises for a request becomes a `TransportError`, with the cause kept."""
    with pytest.raises(convgrad.TransportError) as caught, translated():
        raise cls("reason")
    assert isinstance(caught.value.__cause__, cls)
    assert "reason" in caught.value.message


@pytest.mark.parametrize(
    ("cls", "ours"),
    [
        (httpx.ConnectError, convgrad.ConnectFailed), (httpx.ConnectTimeout, convgrad.ConnectFailed),
        (httpx.ReadTimeout, convgrad.TimedOut), (httpx.PoolTimeout, convgrad.TimedOut),
        (httpx.ReadError, convgrad.BrokenStream), (httpx.WriteError, convgrad.BrokenStream),
        (httpx.RemoteProtocolError, convgrad.BrokenStream), (httpx.DecodingError, convgrad.ProtocolError),
        (httpx.UnsupportedProtocol, convgrad.TransportError),
    ],
)  # fmt: skip
def test_the_most_specific_class_wins(cls: type[Exception], ours: type[convgrad.ConvgradError]) -> None:
    """A timeout while connecting is a failed connection, not a timeout, and so on."""
    with pytest.raises(ours) as caught, translated():
        raise cls("reason")
    assert type(caught.value) is ours


@pytest.mark.parametrize(
    ("cause", "refused"),
    [
        (ConnectionRefusedError(111, "refused"), True),
        (FileNotFoundError(2, "no such socket"), True),
        (ExceptionGroup("several addresses", [OSError("unreachable"), ConnectionRefusedError(111, "refused")]), True),
        (OSError("unreachable"), False),
    ],
)
def test_nothing_listens(cause: Exception, refused: bool) -> None:
    """Where nothing listens at the address or socket, the error names the ways to start a service."""
    with pytest.raises(convgrad.ConnectFailed) as caught, translated():
        raise httpx.ConnectError("reason") from cause
    assert caught.value.message.endswith("use convgrad.local()") == refused


def test_reading_a_closed_reply_is_a_transport_error() -> None:
    """Using a stream outside its `with` raises one of our errors."""
    with pytest.raises(convgrad.TransportError, match="closed"), translated():
        raise httpx.StreamClosed


def test_other_errors_pass() -> None:
    """Errors that come neither from httpx nor from the network are left alone."""
    with pytest.raises(ZeroDivisionError), translated():
        raise ZeroDivisionError
