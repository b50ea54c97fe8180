"""Run the async client without an event loop: on a backend that blocks, its coroutines never suspend."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Coroutine
from functools import wraps
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

__all__ = ["Blocking", "blocking", "complete"]

A = TypeVar("A")
P = ParamSpec("P")
T = TypeVar("T")


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
    raise RuntimeError("a coroutine on a blocking backend must not suspend")
