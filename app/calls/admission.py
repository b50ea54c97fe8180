"""Admission control: requests and calls are counted per tenant, and no tenant can take all of the queue.

A tenant is an API key, or an address if no keys are required (`RequestContext.tenant`). A key may have as many requests
and calls at a time as its own limit allows. A tenant may hold no more places in the queue than it leaves free: alone it
can fill half of the queue, beside one full tenant a third, and so on. So there is always a place for a tenant that has
nothing in the queue yet. The same holds for requests that are still being received, and for the memory of all requests
of a tenant but its first (`SegmentPool.acquire`).

An address may use the whole queue while no other address calls: usually there is only one, this machine's or a proxy's.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from app.settings import Settings
from app.telemetry.context import ANYONE, RequestContext
from convgrad._errors import Overloaded, RateLimited

__all__ = ["Admission"]

_RETRY_AFTER_S = 1
# Requests that may be in progress, from their body to their reply, for each place in the queue; and at least this many
# in all, so that a few slow clients can't block a short queue.
_REQUESTS_PER_PLACE, _LEAST_REQUESTS = 4, 256
# An address is left its share for this long after its last request, so that one that was rejected can try again.
_SHARING_S = 60.0


class Admission:
    """Count requests and calls per tenant, and reject those beyond the limits."""

    def __init__(self, settings: Settings) -> None:
        self._queue_length = settings.queue_length
        self._most_requests = max(_LEAST_REQUESTS, _REQUESTS_PER_PLACE * settings.queue_length)
        self._requests = Counter[str]()
        self._calls = Counter[str]()
        self._idle = asyncio.Event()
        self._idle.set()
        # The tenant of the latest request, its time, and the time of the latest request of any other tenant.
        self._latest, self._latest_at, self._other_at = "", -math.inf, -math.inf

    @property
    def requests(self) -> int:
        """Number of admitted requests that are not answered yet."""
        return self._requests.total()

    def limit_of(self, context: RequestContext) -> int:
        """Return how many calls the key of a request may have at a time."""
        if context.key == ANYONE:
            return self._queue_length
        return context.calls_limit or self._queue_length

    @contextmanager
    def request(self, context: RequestContext, limited: bool = True) -> Iterator[None]:
        """Count a request while the ``with`` block runs; raises as `check` does before that.

        One that is not `limited` is only counted among the open requests.
        """
        tenant = context.tenant
        # Accepted or not: from now on others leave it a place.
        if tenant != self._latest:
            self._latest, self._other_at = tenant, self._latest_at
        self._latest_at = time.monotonic()
        # Without keys the clients behind one address can't be told apart, so requests that are still being received do
        # not count towards its limit of calls.
        if context.key != ANYONE and limited:
            self._check_limit(self._requests, context)
        self._check_room(self._requests, self._most_requests, context)
        if limited:
            self.check(context)
        # The first request of a tenant may take as much memory as a call can need; the others share.
        context.owner = tenant if self._requests[tenant] and self._shares(context) else ""
        self._idle.clear()
        self._requests[tenant] += 1
        try:
            yield
        finally:
            _leave(self._requests, tenant)
            if not self._requests:
                self._idle.set()

    @contextmanager
    def call(self, context: RequestContext) -> Iterator[None]:
        """Count a call while the ``with`` block runs; raises as `check` does before that."""
        self.check(context)
        tenant = context.tenant
        self._calls[tenant] += 1
        try:
            yield
        finally:
            _leave(self._calls, tenant)

    async def idle(self) -> None:
        """Wait until no request is in progress."""
        await self._idle.wait()

    def check(self, context: RequestContext) -> None:
        """Raise `RateLimited` when the tenant has its share of calls, `Overloaded` when the queue is full.

        A call takes a place only when its whole request has arrived, so that slow clients hold none. Until then it is
        checked again after each wait, before more is spent on it: when its request is admitted, when that gets an
        upload slot, when units of it run early, and when it takes the place.
        """
        if context.key != ANYONE:
            self._check_limit(self._calls, context)
        self._check_room(self._calls, self._queue_length, context)

    def _check_limit(self, counter: Counter[str], context: RequestContext) -> None:
        limit = self.limit_of(context)
        if counter[context.tenant] >= limit:
            raise RateLimited(
                f"this key may have {limit} requests or calls at a time",
                retry_after=_RETRY_AFTER_S,
                data={"reason": "key_calls", "limit": limit},
            )

    def _check_room(self, counter: Counter[str], most: int, context: RequestContext) -> None:
        total, mine = counter.total(), counter[context.tenant]
        if total >= most:
            message = f"{total} calls are being received, queued or computed; the limit is {most}"
            raise Overloaded(message, retry_after=_RETRY_AFTER_S, data={"reason": "queue", "limit": most})
        if mine >= most - total and self._shares(context):
            raise RateLimited(
                f"this key or address has {mine} calls; the {most - total} free places are reserved for others",
                retry_after=_RETRY_AFTER_S,
                data={"reason": "key_share", "value": mine, "limit": most - total},
            )

    def _shares(self, context: RequestContext) -> bool:
        other = self._other_at if context.tenant == self._latest else self._latest_at
        return context.key != ANYONE or time.monotonic() - other < _SHARING_S


def _leave(counter: Counter[str], tenant: str) -> None:
    counter[tenant] -= 1
    if not counter[tenant]:
        del counter[tenant]
