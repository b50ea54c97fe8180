"""The total map from the error tree to what the APIs say: JSON-RPC code, HTTP status, title."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from convgrad import _errors as errors
from convgrad._errors import ConvgradError

__all__ = ["MAPPING", "Reply", "problem", "problem_headers", "reply_of", "rpc_error"]

_PROBLEM_TYPE = "urn:convgrad:problem:"


@dataclass(frozen=True, slots=True)
class Reply:
    """Say how the APIs answer one class of error."""

    rpc_code: int
    status: int
    title: str


MAPPING: dict[type[ConvgradError], Reply] = {
    errors.ConvgradError: Reply(-32603, 500, "Error"),
    errors.CallerError: Reply(-32600, 400, "Bad request"),
    errors.ParseError: Reply(-32700, 400, "Malformed request"),
    errors.InvalidRequest: Reply(-32600, 400, "Invalid request"),
    errors.UnknownOperation: Reply(-32601, 404, "Unknown operation"),
    errors.InvalidParams: Reply(-32602, 422, "Invalid parameters"),
    errors.NotAcceptable: Reply(-32600, 406, "No acceptable reply form"),
    errors.UnsupportedMediaType: Reply(-32600, 415, "Unsupported media type"),
    errors.TooLarge: Reply(-32003, 413, "Too large"),
    errors.Unsupported: Reply(-32004, 422, "Unsupported dtype or layout"),
    errors.Unauthorised: Reply(-32005, 401, "Unauthorised"),
    errors.Forbidden: Reply(-32005, 403, "Forbidden"),
    errors.NotFound: Reply(-32601, 404, "Not found"),
    errors.MethodNotAllowed: Reply(-32601, 405, "Method not allowed"),
    errors.ServiceError: Reply(-32603, 500, "Service error"),
    errors.Overloaded: Reply(-32000, 503, "Overloaded"),
    errors.RateLimited: Reply(-32000, 429, "Too many requests"),
    errors.ShuttingDown: Reply(-32006, 503, "Shutting down"),
    errors.DeadlineExceeded: Reply(-32001, 504, "Deadline exceeded"),
    errors.Cancelled: Reply(-32002, 499, "Cancelled"),
    errors.WorkerLost: Reply(-32007, 500, "Worker lost"),
    errors.InternalError: Reply(-32603, 500, "Internal error"),
    # The client's own errors never leave a service; the map is total all the same.
    errors.TransportError: Reply(-32603, 502, "Transport error"),
    errors.ConnectFailed: Reply(-32603, 502, "Connection failed"),
    errors.TimedOut: Reply(-32603, 504, "Timed out"),
    errors.BrokenStream: Reply(-32700, 400, "Broken stream"),
    errors.ProtocolError: Reply(-32700, 400, "Protocol error"),
}


def reply_of(error: ConvgradError) -> Reply:
    """Find how to answer `error`: its class's row, or that of the nearest class above."""
    return next(MAPPING[cls] for cls in type(error).__mro__ if cls in MAPPING)


def rpc_error(error: ConvgradError) -> dict[str, Any]:
    """Build the `error` member of a JSON-RPC response; `data.code` is the stable slug."""
    return {
        "code": reply_of(error).rpc_code,
        "message": error.message,
        "data": {"code": error.code, **error.data},
    }


def problem(error: ConvgradError, request_id: str) -> dict[str, Any]:
    """Build the RFC 9457 problem object of `error`."""
    reply = reply_of(error)
    extra = {key: value for key, value in error.data.items() if key not in _RESERVED}
    return {
        "type": _PROBLEM_TYPE + error.code,
        "title": reply.title,
        "status": reply.status,
        "detail": error.message,
        "code": error.code,
        **extra,
        "request_id": request_id,
    }


_RESERVED = frozenset({"type", "title", "status", "detail", "code", "request_id"})


def problem_headers(error: ConvgradError) -> dict[str, str]:
    """Build the headers that belong to `error`: Retry-After, Allow, Accept, WWW-Authenticate."""
    headers = {}
    retry_after = getattr(error, "retry_after", None)
    if retry_after is not None:
        headers["retry-after"] = str(max(1, math.ceil(retry_after)))
    if isinstance(error, errors.MethodNotAllowed) and "allow" in error.data:
        headers["allow"] = ", ".join(error.data["allow"])
    if isinstance(error, errors.UnsupportedMediaType) and "supported" in error.data:
        headers["accept-post"] = ", ".join(error.data["supported"])
    if isinstance(error, errors.Unauthorised):
        headers["www-authenticate"] = "Bearer"
    return headers
