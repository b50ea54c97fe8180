"""Coroutines that are run without an event loop."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from convgrad import Client
from convgrad._blocking import complete
from tests.convgrad.server import SRC


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


def test_a_client_inside_an_event_loop(client: Client) -> None:
    """The blocking client does not need, or disturb, a running event loop, as in a notebook."""

    async def cell() -> None:
        np.testing.assert_array_equal(client.run("Op", {"src": SRC}), SRC)
        with client.stream("Op", {"src": SRC}) as stream:
            next(iter(stream))
        with client.stream("Op", {"src": SRC}) as stream:
            np.testing.assert_array_equal(stream.result(), SRC)

    asyncio.run(cell(), debug=True)
