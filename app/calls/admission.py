"""Who gets in: requests and calls are counted by lot, and no lot can take what all share.

A lot is what comes with one key, or where no key is asked for from one address (`app.http.context`). A key may have so
many requests and calls at a time as its own limit says. Of the queue a lot gets what the others leave free and never
more: alone it can fill half of it, beside another full one a third, and so on. So there is always a place for a lot
that has nothing in the queue yet. The same holds for requests on their way into the queue, and for the memory of all
requests of a lot but its first (`SegmentPool.acquire`).

An address has all of it as long as no other one comes: mostly there is only one, that of this machine or of a proxy.
"""

from __future__ import annotations

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
# Requests whose bodies are on their way or whose replies are, for each place of the queue; at least so many in all,
# so that a few slow clients don't keep a short queue from all others.
_REQUESTS_PER_PLACE, _LEAST_REQUESTS = 4, 256
# So long after its last request an address is still reckoned with: one that was refused is to find a place.
_COMPANY_S = 60.0
# So long after the queue was full those who are on their way are reckoned with.
_PRESSED_S = 1.0


class Admission:
    """Count what runs, by lot, and refuse what is too much."""

    def __init__(self, settings: Settings) -> None:
        self._queue_length = settings.queue_length
        self._most_requests = max(_LEAST_REQUESTS, _REQUESTS_PER_PLACE * settings.queue_length)
        self._key_calls = settings.key_calls
        self._requests = Counter[str]()
        self._calls = Counter[str]()
        self._was_full = -math.inf
        # Which lot came last, when, and when the last one that was not it.
        self._latest, self._latest_came, self._other_came = "", -math.inf, -math.inf

    def limit_of(self, context: RequestContext) -> int:
        """Tell how many calls the key of a request may have at a time."""
        if context.key == ANYONE:
            return self._queue_length
        return context.calls_limit or self._key_calls or self._queue_length

    @contextmanager
    def request(self, context: RequestContext) -> Iterator[None]:
        """Count a request while the block runs; raises as `check` does before that."""
        lot = context.lot
        self.note(lot)
        # Without keys there is no telling whose request it is: those that only send their body are no calls yet.
        if context.key != ANYONE:
            self._check_limit(self._requests, context)
        self._check_room(self._requests, self._most_requests, context)
        self.check(context)
        # The first request of a lot may take as much memory as a call can need; those beside it share.
        context.owner = lot if self._requests[lot] and self._shares(context) else ""
        yield from self._counted(self._requests, lot)

    @contextmanager
    def call(self, context: RequestContext) -> Iterator[None]:
        """Count a call while the block runs; raises as `check` does before that."""
        self.check(context)
        context.settle()
        yield from self._counted(self._calls, context.lot)

    def check(self, context: RequestContext) -> None:
        """Raise `RateLimited` when the lot has its share of calls, `Overloaded` when the queue is full."""
        if context.key != ANYONE:
            self._check_limit(self._calls, context)
        self._check_room(self._calls, self._queue_length, context)

    def full(self, coming: int) -> Overloaded | None:
        """Return the refusal of anybody's call, or None while there is a place.

        `coming` are on their way and no requests yet. They count as requests, and as calls where the queue was full a
        moment ago: when a place is free again, all who come before it is taken would be let in for it.
        """
        requests, calls = self._requests.total(), self._calls.total()
        if requests + coming >= self._most_requests:
            return _overloaded(requests + coming, self._most_requests)
        if calls >= self._queue_length:
            self._was_full = time.monotonic()
        elif not coming or time.monotonic() - self._was_full > _PRESSED_S:
            return None
        return _overloaded(calls + coming, self._queue_length) if calls + coming >= self._queue_length else None

    def _check_limit(self, counter: Counter[str], context: RequestContext) -> None:
        limit = self.limit_of(context)
        if counter[context.lot] >= limit:
            raise RateLimited(
                f"this key may have {limit} calls at a time",
                retry_after=_RETRY_AFTER_S,
                data={"reason": "key_calls", "limit": limit},
            )

    def _check_room(self, counter: Counter[str], most: int, context: RequestContext) -> None:
        total, mine = counter.total(), counter[context.lot]
        if total >= most:
            raise _overloaded(total, most)
        if mine >= most - total and self._shares(context):
            raise RateLimited(
                f"{mine} calls of this key or address are there, and {most - total} places are left for others",
                retry_after=_RETRY_AFTER_S,
                data={"reason": "key_share", "value": mine, "limit": most - total},
            )

    def note(self, lot: str) -> None:
        """Take note that a lot asks, whether it gets in or not: from now on others leave it a place."""
        if lot != self._latest:
            self._latest, self._other_came = lot, self._latest_came
        self._latest_came = time.monotonic()

    def _shares(self, context: RequestContext) -> bool:
        other = self._other_came if context.lot == self._latest else self._latest_came
        return context.key != ANYONE or time.monotonic() - other < _COMPANY_S

    def _counted(self, counter: Counter[str], lot: str) -> Iterator[None]:
        counter[lot] += 1
        try:
            yield
        finally:
            counter[lot] -= 1
            if not counter[lot]:
                del counter[lot]


def _overloaded(total: int, most: int) -> Overloaded:
    return Overloaded(
        f"{total} calls wait, compute or are on their way, and {most} may",
        retry_after=_RETRY_AFTER_S,
        data={"reason": "queue", "limit": most},
    )
