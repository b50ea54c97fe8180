"""A streamed reply: events while it arrives, then the verified result."""

from __future__ import annotations

from collections.abc import Iterator

import httpx

from convgrad._assembly import Assembly
from convgrad._errors import TimedOut
from convgrad._events import Array, Event, Result
from convgrad._messages import Messages
from convgrad._retry import Budget
from convgrad._transport import translated
from convgrad._whole import Whole

__all__ = ["Stream"]


class Stream:
    """The reply of one call: iterate over its events, each given once, then get its `result`."""

    def __init__(self, response: httpx.Response, assembly: Assembly | Whole | Messages, budget: Budget) -> None:
        self._response = response
        self._budget = budget
        self._assembly = assembly
        self._events = self._read()

    def __iter__(self) -> Iterator[Event]:
        return self._events

    def result(self) -> Array:
        """Read the rest of the reply and return the output; raises what the call raises."""
        return self.details().array

    def details(self) -> Result:
        """Read the rest of the reply and return all of it; raises what the call raises."""
        for _ in self._events:
            pass
        found: Result = self._assembly.close()
        return found

    def _read(self) -> Iterator[Event]:
        try:
            with translated():
                for data in self._response.iter_bytes():
                    self._budget.check()
                    yield from self._assembly.feed(data)
        except TimedOut:
            self._budget.check()
            raise
        self._assembly.close()
