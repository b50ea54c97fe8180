"""Loops that end when a worker is asked to stop: by `Stopped`, which the kernels of this package catch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeVar

from kernels.plan import Stop

__all__ = ["Stopped", "until"]

T = TypeVar("T")


class Stopped(Exception):  # noqa: N818 - it is no error
    """`stop` said so."""


def until(stop: Stop, items: Iterable[T]) -> Iterator[T]:
    """Yield items; raises `Stopped` before the next one when `stop` says so."""
    for item in items:
        if stop():
            raise Stopped
        yield item
