"""Heartbeats on idle connections."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from app.replies.heartbeat import Heartbeat
from app.replies.sse import EventStream


def test_it_beats_while_nothing_is_written() -> None:
    """An idle connection gets one heartbeat after another, and none after `stop`."""

    async def scenario() -> int:
        enough, beats = asyncio.Event(), 0

        async def beat() -> None:
            nonlocal beats
            beats += 1
            if beats == 3:
                enough.set()

        heart = Heartbeat(beat, 0.01)
        heart.start()
        await asyncio.wait_for(enough.wait(), 10)
        heart.stop()
        return beats

    assert asyncio.run(scenario()) == 3


def test_a_beat_never_interrupts_a_write() -> None:
    """During a write, however long it takes, no heartbeat comes between its pieces."""

    async def scenario() -> list[str]:
        log: list[str] = []
        beaten = asyncio.Event()

        async def beat() -> None:
            log.append("beat")
            beaten.set()

        async def write() -> None:
            log.append("first")
            await asyncio.wait([asyncio.create_task(beaten.wait())], timeout=0.05)
            log.append("second")

        heart = Heartbeat(beat, 0.005)
        heart.start()
        await heart.write(write)
        await asyncio.wait_for(beaten.wait(), 10)
        heart.stop()
        return log

    log = asyncio.run(scenario())
    assert log[log.index("first") + 1] == "second"
    assert log[-1] == "beat"


def test_an_event_stream_pings() -> None:
    """An idle stream gets comment lines, but not before its first message."""

    async def scenario() -> list[bytes]:
        sent: list[bytes] = []
        pinged = asyncio.Event()

        async def send(message: Any) -> None:
            sent.append(message.get("body", b"head"))
            if message.get("body", b"").startswith(b":"):
                pinged.set()

        async with EventStream(send, ping_s=0.01) as stream:
            await asyncio.wait([asyncio.create_task(pinged.wait())], timeout=0.05)
            assert not sent
            await stream.pieces([b'{"a":1}'])
            await asyncio.wait_for(pinged.wait(), 10)
        return sent

    sent = asyncio.run(scenario())
    assert sent[0] == b"head"
    text = b"".join(sent[1:]).decode()
    assert text.endswith(": ping\n\n")
    assert json.loads(text.split("\n\n")[0].removeprefix("data: ")) == {"a": 1}
