"""The context of a request, kept from its head to its last byte: ids, key, trace, timings, outcome."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from ipaddress import IPv6Address, IPv6Network, ip_address
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect

from app.caching import cached_if_short
from convgrad import _errors as errors
from convgrad._errors import Cancelled, ConvgradError, InternalError

__all__ = [
    "ANYONE",
    "CONTEXT",
    "HEALTH_PAGES",
    "MONITORED",
    "PARTS",
    "REQUEST_ID",
    "RequestContext",
    "Timings",
    "address_of",
    "api_of",
    "as_convgrad_error",
]

T = TypeVar("T")

_log = logging.getLogger("convgrad.request")

ANYONE = "-"
"""The key id of a request without a key, and the address of one without an address."""

CONTEXT = "convgrad.context"
"""Where the scope of a request has its `RequestContext`."""

REQUEST_ID = re.compile(r"[A-Za-z0-9._~:/+=@-]{1,128}")
"""Request ids that callers may choose."""

# An IPv6 address has at most 45 characters, and its zone some more.
_LONGEST_ADDRESS = 64
HEALTH_PAGES = frozenset({"/healthz", "/readyz", "/v2/health/live", "/v2/health/ready"})
"""Pages that orchestrators and load balancers read every few seconds."""

MONITORED = HEALTH_PAGES | {"/metrics"}
"""Pages that are answered also beyond the limit of connections, without a key, and not logged."""

_APIS = {"rpc": "rpc", "v1": "rest", "v2": "oip", "mcp": "mcp"}

# Errors that count as refusals; the others are faults of the request or the service.
_REFUSALS = (errors.Overloaded, errors.RateLimited, errors.ShuttingDown, errors.TooLarge, errors.Unauthorised)

PARTS = ("receive", "decode", "queue", "compute", "encode")


class Timings:
    """Add up seconds by part: `receive`, `decode`, `queue`, `compute`, `encode`."""

    __slots__ = ("seconds",)

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def add(self, part: str, seconds: float) -> None:
        """Add to the time of a part."""
        self.seconds[part] = self.seconds.get(part, 0.0) + seconds

    @contextmanager
    def measure(self, part: str) -> Iterator[None]:
        """Add the time of a ``with`` block to a part."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.add(part, time.perf_counter() - start)

    def each(self, part: str, pieces: Iterable[T]) -> Iterator[T]:
        """Yield `pieces`, adding the time it takes to produce each of them to a part."""
        begun = time.perf_counter()
        for piece in pieces:
            self.add(part, time.perf_counter() - begun)
            yield piece
            begun = time.perf_counter()
        self.add(part, time.perf_counter() - begun)

    def header(self) -> str:
        """Return the `Server-Timing` value: the known parts in milliseconds, in processing order."""
        return ", ".join(f"{part};dur={self.seconds[part] * 1000:.3f}" for part in PARTS if part in self.seconds)


@dataclass(slots=True)
class RequestContext:
    """The state of one request."""

    request_id: str
    started: float = field(default_factory=time.monotonic)
    outcome: str = "ok"
    timings: Timings = field(default_factory=Timings)
    api: str = "pages"
    connection: int = 0
    key: str = ANYONE
    address: str = ANYONE
    owner: str = ""
    """Tenant charged for the memory of the request's tensors; empty: none."""
    calls_limit: int | None = None
    denied: ConvgradError | None = None
    trace_id: str = ""
    """Of the request's span; empty without tracing."""
    refusals: list[str] = field(default_factory=list)
    received: int = 0
    sent: int = 0

    @property
    def tenant(self) -> str:
        """Owner of the request's share of resources: its key, or its address when there are no keys."""
        return self.address if self.key == ANYONE else self.key

    def fail(self, caught: BaseException) -> ConvgradError:
        """Record an exception, and return the error that is sent as the answer, or as part of it.

        Don't keep the result in a variable where `caught` was caught: with the traceback that makes a reference cycle,
        and the call's memory waits for the garbage collector.
        """
        error = as_convgrad_error(caught)
        if error is not caught and isinstance(error, InternalError):
            _log.error("internal error", exc_info=caught)
        self.outcome = error.code
        if isinstance(error, _REFUSALS) or "reason" in error.data:
            self.refusals.append(str(error.data.get("reason", error.code)))
        return error

    def age(self) -> float:
        """Seconds since the request arrived."""
        return time.monotonic() - self.started

    def facts(self, status: int) -> dict[str, Any]:
        """Return what the log has about the request, which got `status`."""
        facts = {"request_id": self.request_id, "key": self.key, "address": self.address, "status": status}
        facts |= {"outcome": self.outcome, "ms": round(self.age() * 1000, 3)}
        return facts | ({"trace_id": self.trace_id} if self.trace_id else {})


def as_convgrad_error(error: BaseException) -> ConvgradError:
    """Return `error` if it is a `ConvgradError`, otherwise an `InternalError` without details."""
    if isinstance(error, ConvgradError):
        return error
    if isinstance(error, ClientDisconnect):
        return Cancelled("the client disconnected before its request was complete")
    return InternalError("internal error; the service's log has the details under the request id")


@cached_if_short
def address_of(host: str) -> str:
    """Return the address to count requests by: for IPv6 its /64 network, in which a host can choose any address.

    `ANYONE` for what is not an address, such as the peer of a Unix socket.
    """
    if len(host) > _LONGEST_ADDRESS:  # a proxy may name anything
        return ANYONE
    try:
        address = ip_address(host.partition("%")[0])
    except ValueError:
        return ANYONE
    if isinstance(address, IPv6Address):
        return str(address.ipv4_mapped or IPv6Network((address, 64), strict=False))
    return str(address)


def api_of(path: str) -> str:
    """Return the API of a path: `rpc`, `rest`, `oip`, `mcp`, or `pages` for all other paths."""
    return _APIS.get(path[1:].partition("/")[0], "pages")
