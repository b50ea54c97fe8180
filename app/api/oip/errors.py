"""Errors of the `/v2` API in the form of its protocol, `{"error": ".."}`, for every path under it."""

from __future__ import annotations

import logging

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.calls.errors import as_convgrad_error
from app.http.context import context_of, headers_of
from app.replies.body import send_json
from app.replies.errors import problem_headers, reply_of
from convgrad._errors import Cancelled, ConvgradError, InvalidParams, Unsupported

__all__ = ["OipErrors"]

_log = logging.getLogger("convgrad.request")

_UNPROCESSABLE, _BAD_REQUEST = 422, 400
_PROBLEM = "application/problem+json"


class OipErrors:
    """Answer the errors of requests under `/v2`; other errors go to `RequestContextMiddleware`.

    So do errors for a client that accepts problem objects, which have more detail.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] != "http" or not (scope["path"] == "/v2" or scope["path"].startswith("/v2/")):
            await self._app(scope, receive, send)
            return
        started = False

        async def watch(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            await self._app(scope, receive, watch)
        except Exception as caught:
            if started or isinstance(caught, Cancelled) or _PROBLEM in headers_of(scope).get("accept", ""):
                raise
            # Reading the rest of a rejected body may take seconds: the traceback would keep the call's memory.
            await _answer(scope, send, as_convgrad_error(caught, log=_log).with_traceback(None))


async def _answer(scope: Scope, send: Send, error: ConvgradError) -> None:
    context_of(scope).fail(error)
    status = reply_of(error).status
    await send_json(
        send,
        {"error": _message(error)},
        # The protocol has one status for all invalid requests.
        status=_BAD_REQUEST if status == _UNPROCESSABLE else status,
        headers=problem_headers(error),
    )


def _message(error: ConvgradError) -> str:
    """Return all broken rules in one message: the protocol has no other place for them."""
    if not isinstance(error, InvalidParams | Unsupported):
        return error.message
    rules = list(dict.fromkeys(found["msg"] for found in error.data.get("errors", [])))
    if "omitted" in error.data:
        rules.append(f"and {error.data['omitted']:,} more")
    return "; ".join(rules) if len(rules) > 1 else error.message
