"""Errors of the `/v2` API in its protocol's words: `{"error": ".."}`, on every path under it."""

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
    """Answer what fails under `/v2`; everything else goes on to the net that all APIs share.

    So does what fails for a client that accepts problem objects: they say more.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] != "http" or not (scope["path"] == "/v2" or scope["path"].startswith("/v2/")):
            await self._app(scope, receive, send)
            return
        begun = False

        async def watch(message: Message) -> None:
            nonlocal begun
            begun = True
            await send(message)

        try:
            await self._app(scope, receive, watch)
        except Exception as caught:
            if begun or isinstance(caught, Cancelled) or _PROBLEM in headers_of(scope).get("accept", ""):
                raise  # to the net, which says it as a problem object
            # What is left of a refused body may take seconds to come: the traceback would hold the call's memory.
            await _answer(scope, send, as_convgrad_error(caught, log=_log).with_traceback(None))


async def _answer(scope: Scope, send: Send, error: ConvgradError) -> None:
    context_of(scope).fail(error)
    status = reply_of(error).status
    await send_json(
        send,
        {"error": _message(error)},
        # The protocol knows one status for whatever is wrong with a request that could be read.
        status=_BAD_REQUEST if status == _UNPROCESSABLE else status,
        headers=problem_headers(error),
    )


def _message(error: ConvgradError) -> str:
    """Say every broken rule: the protocol has no other place for them."""
    if not isinstance(error, InvalidParams | Unsupported):
        return error.message
    rules = list(dict.fromkeys(found["msg"] for found in error.data.get("errors", [])))
    return "; ".join(rules) if len(rules) > 1 else error.message
