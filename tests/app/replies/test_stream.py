"""Replies that are sent while they are made."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

from app.replies.body import Stream
from app.replies.sse import EventStream


class _Client:
    """What is sent, and a wait for beats."""

    def __init__(self, beat: bytes) -> None:
        self.sent: list[bytes] = []
        self.beaten = asyncio.Event()
        self._beat = beat

    async def send(self, message: Any) -> None:
        """Take a message of the reply."""
        self.sent.append(message.get("body", b"head"))
        if self.sent[-1] == self._beat:
            self.beaten.set()

    async def beats(self, count: int) -> None:
        """Wait for beats."""
        for _ in range(count):
            self.beaten.clear()
            await asyncio.wait_for(self.beaten.wait(), 10)


async def test_it_beats_while_nothing_is_written() -> None:
    """An idle stream gets one beat after another once its head is sent, and none after its end."""
    client = _Client(b"beat")
    async with Stream(client.send, "text/plain", {}, interval=0.01) as stream:
        stream.beat = b"beat"
        await asyncio.wait([asyncio.create_task(client.beaten.wait())], timeout=0.05)
        assert not client.sent
        await stream.write([b"first"])
        await client.beats(3)
    count = len(client.sent)
    await asyncio.wait([asyncio.create_task(client.beats(1))], timeout=0.05)
    assert len(client.sent) == count
    assert client.sent[:5] == [b"head", b"first", b"beat", b"beat", b"beat"]
    assert client.sent[-1] == b""


async def test_a_beat_never_interrupts_a_write() -> None:
    """During a write, however long it takes, no beat comes between its pieces; an end waits for it."""
    client, slow = _Client(b"beat"), asyncio.Event()

    async def send(message: Any) -> None:
        await client.send(message)
        if message.get("body") == b"first":
            slow.set()
            await asyncio.wait([asyncio.create_task(client.beaten.wait())], timeout=0.05)

    async with Stream(send, "text/plain", {}, interval=0.005) as stream:
        stream.beat = b"beat"
        writing = asyncio.create_task(stream.write([b"first", b"second"]))
        await slow.wait()
    await writing
    assert client.sent == [b"head", b"first", b"second", b""]


async def test_an_event_stream_pings() -> None:
    """An idle stream of events gets comment lines between its messages."""
    client = _Client(b": ping\n\n")
    async with EventStream(client.send, interval=0.01) as stream:
        await stream.message(_pieces())
        await client.beats(1)
    assert client.sent[0] == b"head"
    text = b"".join(client.sent[1:]).decode()
    assert text.endswith(": ping\n\n")
    assert json.loads(text.split("\n\n")[0].removeprefix("data: ")) == {"a": 1}


def _pieces() -> Iterator[bytes]:
    yield b'{"a"'
    yield b":1}"
