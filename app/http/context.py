"""What the connection, the middlewares and the APIs know of one request: one object in its ASGI scope."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

from starlette.types import Scope

from app.intake.sinks import DirectBody
from app.telemetry.context import RequestContext, api_of

__all__ = ["Exchange", "context_of", "exchange_of", "headers_of"]

_KEY = "convgrad"


@dataclass(slots=True)
class Exchange:
    """What connection, middlewares and APIs share about one request, in its ASGI scope.

    `transport` is the connection's; `on_counted` is what `RequestContext.on_counted` calls; `direct_body` is set for
    large bodies that arrive without TLS.
    """

    transport: asyncio.Transport | None = None
    on_counted: Callable[[], object] | None = None
    direct_body: DirectBody | None = None
    headers: Mapping[str, str] | None = None
    context: RequestContext | None = None


def exchange_of(scope: MutableMapping[str, Any]) -> Exchange:
    """Return the exchange of a request, which is kept in its scope."""
    if _KEY not in scope:
        scope[_KEY] = Exchange()
    exchange: Exchange = scope[_KEY]
    return exchange


def context_of(scope: Scope) -> RequestContext:
    """Return the context of a request; a new one without the middleware."""
    exchange = exchange_of(scope)
    if exchange.context is None:
        exchange.context = RequestContext(uuid.uuid4().hex, api=api_of(scope["path"]))
    return exchange.context


def headers_of(scope: Scope) -> Mapping[str, str]:
    """Return the headers of a request by lower-case name; the first one where a name is repeated."""
    exchange = exchange_of(scope)
    if exchange.headers is None:
        exchange.headers = {
            name.decode("latin-1"): value.decode("latin-1") for name, value in reversed(scope["headers"])
        }
    return exchange.headers
