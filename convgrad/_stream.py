"""A streamed reply: events while it arrives, then the verified result."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, AbstractContextManager, ExitStack, contextmanager
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

from convgrad._blocking import Blocking, blocking, complete
from convgrad._events import Array, Event, Progress, Result

__all__ = ["AsyncStream", "OnProgress", "Stream", "blocking_stream"]

A = TypeVar("A")
P = ParamSpec("P")


OnProgress = Callable[[Progress], object]
"""Called with each `Progress` of a computation."""


class AsyncStream:
    """`Stream` for asyncio: the same names with `await` and `async for`.

    `events` are those of a call, after which `close` returns its result or raises `BrokenStream`.
    """

    def __init__(self, events: AsyncIterator[Event], close: Callable[[], Any]) -> None:
        self._events = events
        self._close = close

    def __aiter__(self) -> AsyncIterator[Event]:
        return self._events

    async def result(self) -> Array:
        """Read the rest of the reply and return the output; raises what the call raises."""
        return (await self.details()).array

    async def details(self) -> Result:
        """Read the rest of the reply and return all of it; raises what the call raises."""
        async for _ in self._events:
            pass
        found: Result = self._close()
        return found


class Stream(Blocking[AsyncStream]):
    """The reply of one call: iterate over its events, each given once, then get its `result`."""

    def __init__(self, stream: AsyncStream) -> None:
        self._async = stream

    def __iter__(self) -> Iterator[Event]:
        events = aiter(self._async)
        while True:
            try:
                yield complete(anext(events))
            except StopAsyncIteration:
                return

    result = blocking(AsyncStream.result)
    details = blocking(AsyncStream.details)


def blocking_stream(
    method: Callable[Concatenate[A, P], AbstractAsyncContextManager[AsyncStream]],
) -> Callable[Concatenate[Blocking[A], P], AbstractContextManager[Stream]]:
    """Return the blocking form of a method that opens a stream, with its signature and docstring."""

    @contextmanager
    def call(self: Blocking[A], /, *args: P.args, **kwargs: P.kwargs) -> Iterator[Stream]:
        opened = method(self._async, *args, **kwargs)
        stream = complete(opened.__aenter__())
        with ExitStack() as stack:
            stack.push(lambda *error: complete(opened.__aexit__(*error)))
            yield Stream(stream)

    wrapped = wraps(method)(call)
    wrapped.__doc__ = inspect.getdoc(method)
    signature = inspect.signature(method).replace(return_annotation="AbstractContextManager[Stream]")
    wrapped.__signature__ = signature  # type: ignore[attr-defined] # what `help` shows
    return wrapped
