"""What belongs to one request and goes with it through the service: ids, key, trace, times, how it ended."""

from __future__ import annotations

import re
import time
import uuid
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import lru_cache
from ipaddress import IPv6Address, IPv6Network, ip_address

from app.telemetry.timings import Timings
from app.telemetry.traceparent import TraceParent
from convgrad._errors import ConvgradError, Overloaded, RateLimited, ShuttingDown, TooLarge, Unauthorised

__all__ = ["ANYONE", "REQUEST_ID", "RequestContext", "address_of", "api_of", "current_context"]

ANYONE = "-"
"""The key id of a request where no key is asked for, or none is known."""

REQUEST_ID = re.compile(r"[A-Za-z0-9._~:/+=@-]{1,128}")
"""The ids of requests that callers may choose."""

_APIS = {"rpc": "rpc", "v1": "rest", "v2": "oip"}

# What the service turned away although it could be read; the rest is wrong in itself.
_REFUSALS = (Overloaded, RateLimited, ShuttingDown, TooLarge, Unauthorised)

_current: ContextVar[RequestContext | None] = ContextVar("convgrad-request", default=None)


@dataclass(slots=True)
class RequestContext:
    """Carry what belongs to one request."""

    request_id: str
    started: float = field(default_factory=time.monotonic)
    outcome: str = "ok"
    timings: Timings = field(default_factory=Timings)
    api: str = "pages"
    key: str = ANYONE
    address: str = ANYONE
    session: str = ""
    owner: str = ""
    """Whose share of the memory the request's tensors come from; nobody's where the name is empty."""
    calls_limit: int | None = None
    denied: ConvgradError | None = None
    trace: TraceParent | None = None
    settle: Callable[[], object] = lambda: None
    """Says that the request is one of those that are counted: the listener need not reckon with it any more."""
    refusals: list[str] = field(default_factory=list)
    received: int = 0
    sent: int = 0

    @property
    def lot(self) -> str:
        """Who shares with the others: the key, or where none is asked for the address."""
        return self.address if self.key == ANYONE else self.key

    def fail(self, error: ConvgradError) -> None:
        """Note an error that becomes an answer, or a part of one."""
        self.outcome = error.code
        if isinstance(error, _REFUSALS) or "reason" in error.data:
            self.refusals.append(str(error.data.get("reason", error.code)))

    def age(self) -> float:
        """Seconds since the request came."""
        return time.monotonic() - self.started

    def enter(self) -> None:
        """Make this the context of the running task and of those that it starts."""
        _current.set(self)


@lru_cache(maxsize=1024)
def address_of(host: str) -> str:
    """Name whom an address belongs to: of IPv6 the network of 64 bits that a host can choose its addresses from.

    What is no address, such as the peer of a Unix socket, is nobody's.
    """
    try:
        found = ip_address(host.partition("%")[0])
    except ValueError:
        return ANYONE
    if isinstance(found, IPv6Address):
        return str(found.ipv4_mapped or IPv6Network((found, 64), strict=False))
    return str(found)


def current_context() -> RequestContext:
    """Return the context of the request that this task works for; a fresh one outside of any."""
    return _current.get() or RequestContext(uuid.uuid4().hex)


def api_of(path: str) -> str:
    """Name the API of a path: `rpc`, `rest`, `oip`, or `pages` for all others."""
    return _APIS.get(path[1:].partition("/")[0], "pages")
