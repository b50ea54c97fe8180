"""Replies whose head and first piece of the body are a single write."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, cast

from app.http.cork import _Joining


class Wire:
    """A stand-in for a transport that records its calls."""

    def __init__(self) -> None:
        self.told: list[Any] = []

    def write(self, data: bytes) -> None:
        """Record a write."""
        self.told.append(data)

    def writelines(self, pieces: Sequence[bytes]) -> None:
        """Record one write of several pieces."""
        self.told.append(b"".join(pieces))

    def close(self) -> None:
        """Record the close."""
        self.told.append("closed")


async def replied(*writes: bytes, pause: bool = False, close: bool = False) -> list[Any]:
    """Return what a transport receives from these writes, with a pause after the first one if `pause`."""
    wire = Wire()
    joining = _Joining(cast("asyncio.Transport", wire), asyncio.get_running_loop())
    for at, data in enumerate(writes):
        joining.write(data)
        if pause and not at:
            await asyncio.sleep(0)
    if close:
        joining.close()
    await asyncio.sleep(0)
    return wire.told


def test_the_head_is_sent_with_the_first_piece() -> None:
    """Head and first piece are one write, every other piece is a separate one."""
    assert asyncio.run(replied(b"head", b"body", b"more", b"")) == [b"headbody", b"more", b""]


def test_the_head_does_not_wait_for_the_next_loop_iteration() -> None:
    """A head is sent before a body that comes later."""
    assert asyncio.run(replied(b"head", b"body", pause=True)) == [b"head", b"body"]
    assert asyncio.run(replied(b"head")) == [b"head"]


def test_nothing_is_lost_when_the_reply_closes_the_connection() -> None:
    """A head without a body is sent before the connection closes, and nothing after that."""
    assert asyncio.run(replied(b"head", close=True)) == [b"head", "closed"]
    assert asyncio.run(replied(b"head", b"body", close=True)) == [b"headbody", "closed"]
