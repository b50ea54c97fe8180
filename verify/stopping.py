"""A worker's request to stop, as an exception: whatever runs meanwhile need not pass it on."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeVar

from kernels.plan import Stop

__all__ = ["Stopped", "raising", "until"]

T = TypeVar("T")


class Stopped(Exception):  # noqa: N818 - it is no error
    """`stop` said so."""


def raising(stop: Stop) -> Stop:
    """Return a `stop` that raises `Stopped` instead of returning True."""

    def look() -> bool:
        if stop():
            raise Stopped
        return False

    return look


def until(stop: Stop, items: Iterable[T]) -> Iterator[T]:
    """Yield items, with a look at `stop` before each."""
    for item in items:
        stop()
        yield item
