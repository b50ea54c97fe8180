"""Requests and replies without a network."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

import convgrad
from convgrad import _core as core


def test_lists_and_integer_arrays_stay_in_the_json() -> None:
    """A shape may be a list, a tuple or a NumPy array; it never becomes a separate part."""
    shapes: list[Any] = [[4, 3], (4, 3), np.array([4, 3]), np.array([4, 3], np.int32), [np.int64(4), np.int64(3)]]
    given = {"strides": np.array([2, 2]), "groups": np.int64(2)}
    for shape in shapes:
        request = core.validation("Op", {"weights_shape": shape}, given, options={})
        assert request.body is not None
        document = json.loads(b"".join(request.body.pieces()))
        assert document["inputs"] == {"weights_shape": [4, 3]}
        assert document["attributes"] == {"strides": [2, 2], "groups": 2}


@pytest.mark.parametrize("name", ["a/b", "..", ".", "", "a?b", "a#b", "a b", "%2e", "\u00e9", "\0", "\ud800", "a\n"])
def test_operation_names_cannot_change_the_path(name: str) -> None:
    """A name that some server could take as another path is no operation's, and is not sent."""
    with pytest.raises(convgrad.UnknownOperation):
        core.description(name)
    with pytest.raises(convgrad.UnknownOperation):
        core.call(name, {}, {}, options={})
    assert core.description("ConvTranspose-1").path == "/v1/ops/ConvTranspose-1"


@pytest.mark.parametrize(
    ("headers", "body", "seconds"),
    [
        ({"retry-after": "2"}, {"code": "overloaded"}, 2.0),
        ({"retry-after": "2"}, {"code": "overloaded", "retry_after": 1.5}, 1.5),
        ({"retry-after": "Wed, 21 Oct 2026 07:28:00 GMT"}, {"code": "overloaded"}, None),
        ({"retry-after": "-1"}, {"code": "overloaded"}, None),
        ({"retry-after": "inf"}, {"code": "overloaded"}, None),
        ({}, {"code": "overloaded", "retry_after": "soon"}, None),
        ({}, {}, None),
    ],
)
def test_retry_after(headers: dict[str, str], body: dict[str, Any], seconds: float | None) -> None:
    """The problem's own time takes precedence over the header's; values that are not seconds are ignored."""
    error = core.error_of(503, headers, json.dumps(body).encode())
    assert isinstance(error, convgrad.Overloaded)
    assert error.retry_after == seconds


def test_every_error_code_becomes_its_class() -> None:
    """An error code of the service raises the class with that code."""
    for name in convgrad.__all__:
        cls = getattr(convgrad, name)
        if isinstance(cls, type) and issubclass(cls, convgrad.ConvgradError):
            problem = {"code": cls.code, "detail": "rule", "status": 500}
            assert type(core.error_of(500, {}, json.dumps(problem).encode())) is cls


@pytest.mark.parametrize(
    ("status", "cls"),
    [
        (401, convgrad.Unauthorised), (404, convgrad.NotFound), (418, convgrad.CallerError),
        (500, convgrad.ServiceError), (504, convgrad.DeadlineExceeded),
    ],
)  # fmt: skip
def test_the_page_of_a_proxy_is_an_error_of_its_status(status: int, cls: type[convgrad.ConvgradError]) -> None:
    """Whatever the body of an error reply that is not problem+json, it raises the class for its status."""
    for content in (b"", b"<html>", b"[]", b"null", b"[" * 100_000, b"\xff", b'{"code": 7}'):
        error = core.error_of(status, {}, content)
        assert type(error) is cls
        assert str(status) in error.message
