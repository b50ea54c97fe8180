"""A reply on its way: events while it comes, the verified result when it has come."""

from __future__ import annotations

from collections.abc import Iterator

import httpx

from convgrad._assembly import Assembly
from convgrad._errors import TimedOut
from convgrad._events import Array, Event, Result
from convgrad._retry import Budget
from convgrad._transport import translated
from convgrad._whole import Whole

__all__ = ["Stream"]


class Stream:
    """Iterate over the events of one call, each once, and then ask for the `result`."""

    def __init__(self, response: httpx.Response, assembly: Assembly | Whole, budget: Budget) -> None:
        self._response = response
        self._budget = budget
        self._assembly = assembly
        self._events = self._read()

    def __iter__(self) -> Iterator[Event]:
        return self._events

    def result(self) -> Array:
        """Return the output, after reading what is left of the reply; raises what the call raises."""
        return self.details().array

    def details(self) -> Result:
        """Return the whole reply, like `result`."""
        for _ in self._events:
            pass
        return self._assembly.close()

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
