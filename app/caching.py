"""What is made once for many requests: what the short texts of clients mean, and values that they wait for."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sized
from functools import lru_cache, wraps
from typing import Generic, ParamSpec, TypeVar, cast

__all__ = ["Shared", "cached_if_short"]

P = ParamSpec("P")
T = TypeVar("T")

# Most clients send the same few, short texts, such as headers. Long or many ones must not fill the memory.
_LONGEST, _MOST = 256, 256


def cached_if_short(find: Callable[P, T]) -> Callable[P, T]:
    """Cache the last results of a function of texts, those for at most 256 characters in all."""
    usual = cast("Callable[P, T]", lru_cache(_MOST)(find))

    @wraps(find)
    def found(*texts: P.args, **named: P.kwargs) -> T:
        is_short = sum(map(len, cast("tuple[Sized, ...]", texts))) <= _LONGEST
        return (usual if is_short else find)(*texts, **named)

    return found


class Shared(Generic[T]):
    """A value that the requests which wait for it share.

    It is made at the first request, and kept. With `every` it is made again for each request that finds none being
    made, but not more often than every so many seconds: a request that comes sooner waits, so that what it gets is
    never older than itself.
    """

    def __init__(self, make: Callable[[], Awaitable[T]], every: float | None = None) -> None:
        self._make = make
        self._every = every
        self._next = 0.0
        self._making: asyncio.Task[T] | None = None

    async def get(self) -> T:
        """Return the value; raises what making it raises, and then the next request tries again."""
        loop, making = asyncio.get_running_loop(), self._making
        if making is None or making.get_loop() is not loop or (making.done() and not self._is_kept(making)):
            making = self._making = loop.create_task(self._made())
        return await asyncio.shield(making)  # which must not end with the request that began it

    def _is_kept(self, made: asyncio.Task[T]) -> bool:
        return self._every is None and not made.cancelled() and made.exception() is None

    async def _made(self) -> T:
        loop = asyncio.get_running_loop()
        await asyncio.sleep(self._next - loop.time())
        try:
            return await self._make()
        finally:
            self._next = loop.time() + (self._every or 0.0)
