"""The map from errors to replies."""

from __future__ import annotations

import json
import logging

import pytest

from app.replies.errors import MAPPING, codes_of, error_headers, problem_object, rpc_error
from app.telemetry.context import RequestContext
from convgrad import _errors as errors
from schemas.openrpc import RPC_ERRORS

CLASSES = list(errors.error_classes().values())


@pytest.mark.parametrize("cls", CLASSES)
def test_the_map_is_total(cls: type[errors.ConvgradError]) -> None:
    """Every error class has its own row, with an error status and a code of the contract."""
    reply = MAPPING[cls]
    assert 400 <= reply.status < 600
    assert -32768 <= reply.rpc_code <= -32000
    assert reply.title


def test_the_map_has_nothing_else() -> None:
    """No row is left over from a class that no longer exists; two have the code of `Overloaded`."""
    assert set(MAPPING) == {*CLASSES, errors.Starting, errors.SpoolFull}


@pytest.mark.parametrize(
    ("cls", "code"),
    [
        (errors.ParseError, -32700),
        (errors.InvalidRequest, -32600),
        (errors.UnknownOperation, -32601),
        (errors.InvalidParams, -32602),
        (errors.InternalError, -32603),
        (errors.Overloaded, -32000),
        (errors.DeadlineExceeded, -32001),
        (errors.Cancelled, -32002),
        (errors.TooLarge, -32003),
        (errors.Unsupported, -32004),
        (errors.Unauthorised, -32005),
        (errors.ShuttingDown, -32006),
        (errors.WorkerLost, -32007),
        (errors.NotFound, -32008),
    ],
)
def test_the_codes_of_the_contract(cls: type[errors.ConvgradError], code: int) -> None:
    """JSON-RPC codes are public: they never change."""
    assert rpc_error(cls("x"))["code"] == code


def test_openrpc_lists_the_codes_of_the_map() -> None:
    """The JSON-RPC document lists exactly the codes that an answer can have."""
    own = {errors.TransportError, errors.ConnectFailed, errors.TimedOut, errors.BrokenStream, errors.ProtocolError}
    assert {code for code, _, _ in RPC_ERRORS} == {MAPPING[cls].rpc_code for cls in set(CLASSES) - own}


def test_a_problem_has_the_members_of_the_rfc() -> None:
    """type, title, status and detail are present, data is added beside them and can't replace them."""
    found = problem_object(errors.TooLarge("too much", data={"limit": 5, "status": 200}), "id-1")
    assert found["status"] == 413
    assert found["limit"] == 5
    assert found["detail"] == "too much"
    assert found["request_id"] == "id-1"
    json.dumps(found)


def test_a_subclass_is_answered_like_its_parent() -> None:
    """A class that is not in the map uses the row of its nearest base class."""

    class Special(errors.ParseError):
        pass

    assert codes_of(Special("x")) == MAPPING[errors.ParseError]


def test_headers() -> None:
    """Retry-After in whole seconds, at least one; Allow; WWW-Authenticate; Accept-Post."""
    assert error_headers(errors.Overloaded("x", retry_after=0.2)) == {"retry-after": "1"}
    assert error_headers(errors.MethodNotAllowed("x", data={"allow": ["GET", "POST"]})) == {"allow": "GET, POST"}
    assert error_headers(errors.Unauthorised("x")) == {"www-authenticate": "Bearer"}
    assert error_headers(errors.UnsupportedMediaType("x", data={"supported": ["a/b"]})) == {"accept-post": "a/b"}
    assert error_headers(errors.ParseError("x")) == {}


def test_other_errors_have_no_details(caplog: pytest.LogCaptureFixture) -> None:
    """Any other exception becomes an internal error without details, which are logged."""
    with caplog.at_level(logging.ERROR):
        found = RequestContext("id").fail(ValueError("secret"))
    assert isinstance(found, errors.InternalError)
    assert "secret" not in found.message
    assert "secret" in caplog.text
