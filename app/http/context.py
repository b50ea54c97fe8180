"""The context of a request: id, key, trace, timings, outcome."""

from __future__ import annotations

import re
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import lru_cache
from ipaddress import IPv6Address, IPv6Network, ip_address
from typing import Any, Protocol

from starlette.types import Scope

from app.telemetry.timings import Timings
from app.telemetry.traceparent import TraceParent
from convgrad._errors import ConvgradError, Overloaded, RateLimited, ShuttingDown, TooLarge, Unauthorised

__all__ = [
    "ANYONE",
    "REQUEST_ID",
    "DirectBody",
    "Exchange",
    "RequestContext",
    "address_of",
    "api_of",
    "context_of",
    "current_context",
    "exchange_of",
    "headers_of",
]

ANYONE = "-"
"""The key id of a request without a key, and the address of one without an address."""

REQUEST_ID = re.compile(r"[A-Za-z0-9._~:/+=@-]{1,128}")
"""Request ids that callers may choose."""

_KEY = "convgrad"
_APIS = {"rpc": "rpc", "v1": "rest", "v2": "oip"}
# Errors that count as refusals; the others are faults of the request or the service.
_REFUSALS = (Overloaded, RateLimited, ShuttingDown, TooLarge, Unauthorised)

_current: ContextVar[RequestContext | None] = ContextVar("convgrad-request", default=None)


@dataclass(slots=True)
class RequestContext:
    """The state of one request."""

    request_id: str
    started: float = field(default_factory=time.monotonic)
    outcome: str = "ok"
    timings: Timings = field(default_factory=Timings)
    api: str = "pages"
    key: str = ANYONE
    address: str = ANYONE
    session: str = ""
    owner: str = ""
    """Whose share of the memory the request's tensors count towards; nobody's if empty."""
    calls_limit: int | None = None
    denied: ConvgradError | None = None
    trace: TraceParent | None = None
    on_counted: Callable[[], object] = lambda: None
    """Called when the request is counted as a call, or over: the listener need not reserve a place for it any more."""
    refusals: list[str] = field(default_factory=list)
    received: int = 0
    sent: int = 0

    @property
    def lot(self) -> str:
        """Whom the request counts for when resources are shared: its key, or its address when there are no keys."""
        return self.address if self.key == ANYONE else self.key

    def fail(self, error: ConvgradError) -> None:
        """Record an error that is sent as the answer, or as part of it."""
        self.outcome = error.code
        if isinstance(error, _REFUSALS) or "reason" in error.data:
            self.refusals.append(str(error.data.get("reason", error.code)))

    def age(self) -> float:
        """Seconds since the request arrived."""
        return time.monotonic() - self.started

    def enter(self) -> None:
        """Make this the context of the current task and of the tasks it starts."""
        _current.set(self)


class DirectBody(Protocol):
    """Read the rest of a body from the socket straight into its destination."""

    def place(self, targets: Iterable[memoryview]) -> None:
        """Read the next bytes of the body into these, in order."""

    def forget(self) -> None:
        """Stop reading into them."""


@dataclass(slots=True)
class Exchange:
    """What connection, middlewares and APIs share about one request, in its ASGI scope.

    `abort` cuts the connection; `on_counted` is what `RequestContext.on_counted` calls; `direct_body` is set for large
    bodies that arrive without TLS.
    """

    abort: Callable[[], object] | None = None
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


@lru_cache(maxsize=1024)
def address_of(host: str) -> str:
    """Return the address to count requests by: for IPv6 its /64 network, in which a host can choose any address.

    `ANYONE` for what is not an address, such as the peer of a Unix socket.
    """
    try:
        found = ip_address(host.partition("%")[0])
    except ValueError:
        return ANYONE
    if isinstance(found, IPv6Address):
        return str(found.ipv4_mapped or IPv6Network((found, 64), strict=False))
    return str(found)


def headers_of(scope: Scope) -> Mapping[str, str]:
    """Return the headers of a request by lower-case name; the first one where a name is repeated."""
    exchange = exchange_of(scope)
    if exchange.headers is None:
        exchange.headers = {
            name.decode("latin-1"): value.decode("latin-1") for name, value in reversed(scope["headers"])
        }
    return exchange.headers


def current_context() -> RequestContext:
    """Return the context of the request that this task handles; a new one outside of any."""
    return _current.get() or RequestContext(uuid.uuid4().hex)


def api_of(path: str) -> str:
    """Return the API of a path: `rpc`, `rest`, `oip`, or `pages` for all other paths."""
    return _APIS.get(path[1:].partition("/")[0], "pages")
