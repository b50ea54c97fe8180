"""Who gets in: requests and calls are counted by key, and no key can take what all share.

A key may have so many requests and calls at a time as its own limit says. Of the queue it gets what the others
leave free and never more: alone it can fill half of it, beside another full one a third, and so on. So there is
always a place for a key that has nothing in the queue yet. The same holds for the memory of all requests of a key
but its first (`SegmentPool.acquire`). Where no key is asked for, everybody shares one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from app.context import ANYONE, RequestContext
from app.settings import Settings
from convgrad._errors import Overloaded, RateLimited

__all__ = ["Admission"]

_RETRY_AFTER_S = 1


class Admission:
    """Count what runs, by key, and refuse what is too much."""

    def __init__(self, settings: Settings) -> None:
        self._queue_length = settings.queue_length
        self._key_calls = settings.key_calls
        self._requests = Counter[str]()
        self._calls = Counter[str]()

    def limit_of(self, context: RequestContext) -> int:
        """Tell how many calls the key of a request may have at a time."""
        if context.key == ANYONE:
            return self._queue_length
        return context.calls_limit or self._key_calls or self._queue_length

    @contextmanager
    def request(self, context: RequestContext) -> Iterator[None]:
        """Count a request while the block runs; raises as `check` does before that."""
        limit = self.limit_of(context)
        # Without keys there is no telling whose request it is: those that only send their body are no calls yet.
        if context.key != ANYONE and self._requests[context.key] >= limit:
            raise _over_limit(limit)
        self.check(context)
        # The first request of a key may take as much memory as a call can need; those beside it share.
        context.owner = context.key if self._requests[context.key] and context.key != ANYONE else ""
        yield from self._counted(self._requests, context.key)

    @contextmanager
    def call(self, context: RequestContext) -> Iterator[None]:
        """Count a call while the block runs; raises as `check` does before that."""
        self.check(context)
        yield from self._counted(self._calls, context.key)

    def check(self, context: RequestContext) -> None:
        """Raise `RateLimited` when the key has its share of calls, `Overloaded` when the queue is full."""
        total, length = self._calls.total(), self._queue_length
        if total >= length:
            raise Overloaded(
                f"{total} calls wait or compute and the queue holds {length}",
                retry_after=_RETRY_AFTER_S,
                data={"reason": "queue", "limit": length},
            )
        if context.key == ANYONE:
            return
        mine, limit = self._calls[context.key], self.limit_of(context)
        if mine >= limit:
            raise _over_limit(limit)
        if mine >= length - total:
            raise RateLimited(
                f"{mine} calls of this key wait or compute, and the queue has {length - total} places left for others",
                retry_after=_RETRY_AFTER_S,
                data={"reason": "key_share", "value": mine, "limit": length - total},
            )

    def _counted(self, counter: Counter[str], key: str) -> Iterator[None]:
        counter[key] += 1
        try:
            yield
        finally:
            counter[key] -= 1
            if not counter[key]:
                del counter[key]


def _over_limit(limit: int) -> RateLimited:
    return RateLimited(
        f"this key may have {limit} calls at a time",
        retry_after=_RETRY_AFTER_S,
        data={"reason": "key_calls", "limit": limit},
    )
