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
"""The key id of a request without a key, and the address of one without an address."""

REQUEST_ID = re.compile(r"[A-Za-z0-9._~:/+=@-]{1,128}")
"""Request ids that callers may choose."""

# An IPv6 address has at most 45 characters, and its zone some more.
_LONGEST_ADDRESS = 64
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
    def tenant(self) -> str:
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


def address_of(host: str) -> str:
    """Return the address to count requests by: for IPv6 its /64 network, in which a host can choose any address.

    `ANYONE` for what is not an address, such as the peer of a Unix socket.
    """
    return _address_of(host) if len(host) <= _LONGEST_ADDRESS else ANYONE  # a proxy may name anything


@lru_cache(maxsize=1024)
def _address_of(host: str) -> str:
    try:
        address = ip_address(host.partition("%")[0])
    except ValueError:
        return ANYONE
    if isinstance(address, IPv6Address):
        return str(address.ipv4_mapped or IPv6Network((address, 64), strict=False))
    return str(address)


def current_context() -> RequestContext:
    """Return the context of the request that this task handles; a new one outside of any."""
    return _current.get() or RequestContext(uuid.uuid4().hex)


def api_of(path: str) -> str:
    """Return the API of a path: `rpc`, `rest`, `oip`, or `pages` for all other paths."""
    return _APIS.get(path[1:].partition("/")[0], "pages")
