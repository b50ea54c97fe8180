"""Replies whose head and first piece of body are one write."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, cast

from app.http.cork import _Joining


class Wire:
    """Stands in for a transport, and notes what it is told."""

    def __init__(self) -> None:
        self.told: list[Any] = []

    def write(self, data: bytes) -> None:
        """Note a write."""
        self.told.append(data)

    def writelines(self, pieces: Sequence[bytes]) -> None:
        """Note one write of several pieces."""
        self.told.append(b"".join(pieces))

    def close(self) -> None:
        """Note the end."""
        self.told.append("closed")


async def replied(*writes: bytes, pause: bool = False, close: bool = False) -> list[Any]:
    """What a transport hears of these writes; after a pause behind the first of them, where one is wanted."""
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
    """Head and first piece are one write, every other piece is its own."""
    assert asyncio.run(replied(b"head", b"body", b"more", b"")) == [b"headbody", b"more", b""]


def test_the_head_does_not_wait_for_the_next_loop_iteration() -> None:
    """A head whose body comes later has gone out before."""
    assert asyncio.run(replied(b"head", b"body", pause=True)) == [b"head", b"body"]
    assert asyncio.run(replied(b"head")) == [b"head"]


def test_nothing_is_lost_when_the_reply_closes_the_connection() -> None:
    """A head without a body goes out before the end, and nothing comes after that."""
    assert asyncio.run(replied(b"head", close=True)) == [b"head", "closed"]
    assert asyncio.run(replied(b"head", b"body", close=True)) == [b"headbody", "closed"]
