"""Errors in the format of each API: every class has a JSON-RPC code, an HTTP status and a title."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from app.replies.body import json_bytes
from convgrad import _errors as errors
from convgrad._errors import PROBLEM_JSON, ConvgradError

__all__ = [
    "MAPPING",
    "ErrorCodes",
    "codes_of",
    "error_headers",
    "error_reply",
    "problem_object",
    "rpc_error",
]

_PROBLEM_TYPE = "urn:convgrad:problem:"


@dataclass(frozen=True, slots=True)
class ErrorCodes:
    """The JSON-RPC code, HTTP status and title of one class of error."""

    rpc_code: int
    status: int
    title: str


MAPPING: dict[type[ConvgradError], ErrorCodes] = {
    errors.ConvgradError: ErrorCodes(-32603, 500, "Error"),
    errors.CallerError: ErrorCodes(-32600, 400, "Bad request"),
    errors.ParseError: ErrorCodes(-32700, 400, "Malformed request"),
    errors.InvalidRequest: ErrorCodes(-32600, 400, "Invalid request"),
    errors.UnknownOperation: ErrorCodes(-32601, 404, "Unknown operation"),
    errors.InvalidParams: ErrorCodes(-32602, 422, "Invalid parameters"),
    errors.NotAcceptable: ErrorCodes(-32600, 406, "No acceptable reply format"),
    errors.UnsupportedMediaType: ErrorCodes(-32600, 415, "Unsupported media type"),
    errors.TooLarge: ErrorCodes(-32003, 413, "Too large"),
    errors.Unsupported: ErrorCodes(-32004, 422, "Unsupported dtype or layout"),
    errors.Unauthorised: ErrorCodes(-32005, 401, "Unauthorised"),
    errors.Forbidden: ErrorCodes(-32005, 403, "Forbidden"),
    errors.NotFound: ErrorCodes(-32008, 404, "Not found"),
    errors.MethodNotAllowed: ErrorCodes(-32601, 405, "Method not allowed"),
    errors.ServiceError: ErrorCodes(-32603, 500, "Service error"),
    errors.Overloaded: ErrorCodes(-32000, 503, "Overloaded"),
    errors.SpoolFull: ErrorCodes(-32000, 507, "Spool full"),
    errors.Starting: ErrorCodes(-32000, 503, "Starting"),
    errors.RateLimited: ErrorCodes(-32000, 429, "Too many requests"),
    errors.ShuttingDown: ErrorCodes(-32006, 503, "Shutting down"),
    errors.DeadlineExceeded: ErrorCodes(-32001, 504, "Deadline exceeded"),
    errors.Cancelled: ErrorCodes(-32002, 499, "Cancelled"),
    errors.WorkerLost: ErrorCodes(-32007, 500, "Worker lost"),
    errors.InternalError: ErrorCodes(-32603, 500, "Internal error"),
    # The client's own errors: a service never sends them, but the mapping is total.
    errors.TransportError: ErrorCodes(-32603, 502, "Transport error"),
    errors.ConnectFailed: ErrorCodes(-32603, 502, "Connection failed"),
    errors.TimedOut: ErrorCodes(-32603, 504, "Timed out"),
    errors.BrokenStream: ErrorCodes(-32700, 400, "Broken stream"),
    errors.ProtocolError: ErrorCodes(-32700, 400, "Protocol error"),
}


def codes_of(error: ConvgradError) -> ErrorCodes:
    """Return the codes of the class of `error`, or of its nearest base class."""
    return next(MAPPING[cls] for cls in type(error).__mro__ if cls in MAPPING)


def rpc_error(error: ConvgradError) -> dict[str, Any]:
    """Build the `error` member of a JSON-RPC response; `data.code` is the stable name of the error."""
    return {
        "code": codes_of(error).rpc_code,
        "message": error.message,
        "data": {"code": error.code, **error.data},
    }


def problem_object(error: ConvgradError, request_id: str) -> dict[str, Any]:
    """Build the RFC 9457 problem object of `error`."""
    codes = codes_of(error)
    extra = {key: value for key, value in error.data.items() if key not in _RESERVED}
    return {
        "type": _PROBLEM_TYPE + error.code,
        "title": codes.title,
        "status": codes.status,
        "detail": error.message,
        "code": error.code,
        **extra,
        "request_id": request_id,
    }


def error_reply(error: ConvgradError, api: str, request_id: str, *, accept: str = "") -> tuple[int, bytes, str]:
    """Return status, body and media type for `error`: a problem object, or `{"error": ".."}` of Open Inference.

    The protocol has one status for all invalid requests. A client of it that accepts problem objects, which have more
    detail, gets one.
    """
    status = codes_of(error).status
    if api == "oip" and PROBLEM_JSON not in accept:
        status, body = 400 if status == 422 else status, json_bytes({"error": _all_rules(error)})
        return status, body, "application/json"
    return status, json_bytes(problem_object(error, request_id)), PROBLEM_JSON


def _all_rules(error: ConvgradError) -> str:
    """Return all broken rules in one message: the Open Inference Protocol has no other place for them."""
    if not isinstance(error, errors.InvalidParams | errors.Unsupported):
        return error.message
    rules = list(dict.fromkeys(found["msg"] for found in error.data.get("errors", [])))
    if "omitted" in error.data:
        rules.append(f"and {error.data['omitted']:,} more")
    return "; ".join(rules) if len(rules) > 1 else error.message


_RESERVED = frozenset({"type", "title", "status", "detail", "code", "request_id"})


def error_headers(error: ConvgradError) -> dict[str, str]:
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
