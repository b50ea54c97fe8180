"""Run the async client without an event loop: on a network that blocks, its coroutines never suspend."""

from __future__ import annotations

import inspect
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from functools import wraps
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

import httpx

__all__ = ["Blocking", "BlockingNetwork", "blocking", "complete"]

A = TypeVar("A")
P = ParamSpec("P")
T = TypeVar("T")


class BlockingNetwork:
    """A `Network` whose coroutines block the thread until they are done."""

    def __init__(self, http: httpx.Client) -> None:
        self.http = http

    async def send(self, request: httpx.Request) -> httpx.Response:
        return self.http.send(request, stream=True)

    async def chunks(self, response: httpx.Response) -> AsyncIterator[bytes]:
        for chunk in response.iter_bytes():
            yield chunk

    async def read(self, response: httpx.Response) -> bytes:
        return response.read()

    async def close(self, response: httpx.Response) -> None:
        response.close()

    async def sleep(self, seconds: float) -> None:
        time.sleep(seconds)  # noqa: ASYNC251 - there is no event loop

    async def in_thread(self, function: Callable[[], T]) -> T:
        return function()

    async def aclose(self) -> None:
        self.http.close()


class Blocking(Generic[A]):
    """The blocking form of an object whose coroutines never suspend."""

    _async: A


def blocking(method: Callable[Concatenate[A, P], Coroutine[Any, Any, T]]) -> Callable[Concatenate[Blocking[A], P], T]:
    """Return the blocking form of a method, with its signature and docstring."""

    @wraps(method)
    def call(self: Blocking[A], /, *args: P.args, **kwargs: P.kwargs) -> T:
        return complete(method(self._async, *args, **kwargs))

    call.__doc__ = inspect.getdoc(method)  # also an inherited one
    return call


def complete(awaitable: Awaitable[T]) -> T:
    """Run a coroutine that never suspends, and return its result."""
    try:
        next(awaitable.__await__())
    except StopIteration as done:
        result: T = done.value
        return result
    raise RuntimeError("a coroutine on a blocking network must not suspend")
