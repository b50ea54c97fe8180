"""Coroutines that are run without an event loop."""

from __future__ import annotations

import asyncio

import pytest

from convgrad._blocking import complete


async def divide(numerator: int, denominator: int) -> int:
    """Return a quotient, or raise."""
    return numerator // denominator


def test_complete() -> None:
    """A coroutine returns its result or raises its error; one that suspends is a bug."""
    assert complete(divide(6, 2)) == 3
    with pytest.raises(ZeroDivisionError):
        complete(divide(6, 0))
    with pytest.raises(RuntimeError, match="must not suspend"):
        complete(asyncio.sleep(0))
