"""Frames that are gathered and sent together."""

from __future__ import annotations

import asyncio
from typing import Any

from app.replies.frames import _FrameStream
from app.telemetry.context import Timings
from convgrad._frames import FrameDecoder


async def test_frames_that_come_during_a_slow_write_are_sent() -> None:
    """What is gathered while a client takes the frames before it follows them, each frame once."""
    body, taken, slow = b"", asyncio.Event(), asyncio.Event()

    async def send(message: Any) -> None:
        nonlocal body
        held = message.get("body", b"")
        if held and not slow.is_set():
            slow.set()
            await asyncio.wait_for(taken.wait(), 10)
        body += held

    async with _FrameStream(send, Timings()) as stream:
        await stream.put({"number": 0})
        await asyncio.wait_for(slow.wait(), 10)
        for number in range(1, 4):
            await stream.put({"number": number})
        taken.set()
    decoder = FrameDecoder()
    assert [frame.header["number"] for frame in decoder.feed(body)] == [0, 1, 2, 3]
