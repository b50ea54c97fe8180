"""Errors in the format of each API: every class has a JSON-RPC code, an HTTP status and a title."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from app.replies.body import dump
from convgrad import _errors as errors
from convgrad._errors import ConvgradError

__all__ = ["MAPPING", "ErrorReply", "Reply", "error_reply", "problem", "problem_headers", "reply_of", "rpc_error"]

_PROBLEM = "application/problem+json"
_PROBLEM_TYPE = "urn:convgrad:problem:"


@dataclass(frozen=True, slots=True)
class Reply:
    """How the APIs report one class of error."""

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
    errors.NotFound: Reply(-32008, 404, "Not found"),
    errors.MethodNotAllowed: Reply(-32601, 405, "Method not allowed"),
    errors.ServiceError: Reply(-32603, 500, "Service error"),
    errors.Overloaded: Reply(-32000, 503, "Overloaded"),
    errors.RateLimited: Reply(-32000, 429, "Too many requests"),
    errors.ShuttingDown: Reply(-32006, 503, "Shutting down"),
    errors.DeadlineExceeded: Reply(-32001, 504, "Deadline exceeded"),
    errors.Cancelled: Reply(-32002, 499, "Cancelled"),
    errors.WorkerLost: Reply(-32007, 500, "Worker lost"),
    errors.InternalError: Reply(-32603, 500, "Internal error"),
    # The client's own errors: a service never sends them, but the mapping is total.
    errors.TransportError: Reply(-32603, 502, "Transport error"),
    errors.ConnectFailed: Reply(-32603, 502, "Connection failed"),
    errors.TimedOut: Reply(-32603, 504, "Timed out"),
    errors.BrokenStream: Reply(-32700, 400, "Broken stream"),
    errors.ProtocolError: Reply(-32700, 400, "Protocol error"),
}


def reply_of(error: ConvgradError) -> Reply:
    """Return how to report `error`: by its class, or the nearest base class."""
    return next(MAPPING[cls] for cls in type(error).__mro__ if cls in MAPPING)


def rpc_error(error: ConvgradError) -> dict[str, Any]:
    """Build the `error` member of a JSON-RPC response; `data.code` is the stable name of the error."""
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


@dataclass(frozen=True, slots=True)
class ErrorReply:
    """An HTTP reply that reports an error."""

    status: int
    body: bytes
    media_type: str
    headers: dict[str, str]


def error_reply(error: ConvgradError, api: str, request_id: str, *, accept: str = "") -> ErrorReply:
    """Build the reply for `error`: a problem object, or the Open Inference Protocol's `{"error": ".."}`.

    The protocol has one status for all invalid requests. A client of it that accepts problem objects, which have more
    detail, gets one.
    """
    status, headers = reply_of(error).status, problem_headers(error)
    if api == "oip" and _PROBLEM not in accept:
        status, body = 400 if status == 422 else status, dump({"error": _all_rules(error)})
        return ErrorReply(status, body, "application/json", headers)
    return ErrorReply(status, dump(problem(error, request_id)), _PROBLEM, headers)


def _all_rules(error: ConvgradError) -> str:
    """Return all broken rules in one message: the Open Inference Protocol has no other place for them."""
    if not isinstance(error, errors.InvalidParams | errors.Unsupported):
        return error.message
    rules = list(dict.fromkeys(found["msg"] for found in error.data.get("errors", [])))
    if "omitted" in error.data:
        rules.append(f"and {error.data['omitted']:,} more")
    return "; ".join(rules) if len(rules) > 1 else error.message


_RESERVED = frozenset({"type", "title", "status", "detail", "code", "request_id"})


def problem_headers(error: ConvgradError) -> dict[str, str]:
    """Build the headers for `error`: Retry-After, Allow, Accept-Post, WWW-Authenticate."""
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
